//! Registered memory: what keys allow, and copies between it and slots.

use std::collections::HashMap;

use crate::abi::{ACCESS_LOCAL_WRITE, Sge};

/// A registered region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// By which address work requests name its first byte.
    pub iova: u64,
    /// Where that byte is.
    pub base: u64,
    pub bytes: u64,
    pub access: u32,
}

/// All regions of a context, by key. One number is a region's local and remote key.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    regions: HashMap<u32, Region>,
    made: u32,
}

/// A request names memory that its key does not have, or may not be used so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Denied;

impl Regions {
    /// Returns the new region's key.
    pub(crate) fn add(&mut self, region: Region) -> u32 {
        self.made += 1;
        // Keys that are far apart: a wrong one is nobody's.
        let key = self.made.wrapping_mul(0x9e37_79b1) | 1;
        self.regions.insert(key, region);
        key
    }

    pub(crate) fn remove(&mut self, key: u32) {
        self.regions.remove(&key);
    }

    /// The address of `bytes` from `iova` on, if the key allows `access` there.
    pub(crate) fn address(&self, key: u32, iova: u64, bytes: u64, access: u32) -> Result<u64, Denied> {
        let region = self.regions.get(&key).ok_or(Denied)?;
        let offset = iova.checked_sub(region.iova).ok_or(Denied)?;
        let end = offset.checked_add(bytes).ok_or(Denied)?;
        if end > region.bytes || region.access & access != access {
            return Err(Denied);
        }
        Ok(region.base + offset)
    }

    /// Copies `bytes` of the parts' data, from `offset` on, to `to`.
    ///
    /// # Safety
    /// `to` has room, and whoever registered the memory keeps it.
    pub(crate) unsafe fn gather(&self, parts: &[Sge], offset: u32, to: *mut u8, bytes: u32) -> Result<(), Denied> {
        has_room(parts, offset, bytes)?;
        let mut done = 0;
        for (address, length) in self.pieces(parts, offset, bytes, 0) {
            // SAFETY: `address` lies in a registered region, `to` has room for all pieces.
            unsafe { std::ptr::copy_nonoverlapping(address? as *const u8, to.add(done), length as usize) };
            done += length as usize;
        }
        Ok(())
    }

    /// Copies `bytes` from `from` to the parts' memory, from `offset` on.
    ///
    /// # Safety
    /// `from` has as many, and whoever registered the memory keeps it.
    pub(crate) unsafe fn scatter(&self, parts: &[Sge], offset: u32, from: *const u8, bytes: u32) -> Result<(), Denied> {
        has_room(parts, offset, bytes)?;
        let mut done = 0;
        for (address, length) in self.pieces(parts, offset, bytes, ACCESS_LOCAL_WRITE) {
            // SAFETY: `address` lies in a registered region, `from` has as many bytes as all pieces.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), address? as *mut u8, length as usize) };
            done += length as usize;
        }
        Ok(())
    }

    /// Addresses and lengths of `bytes` from `offset` on in a list of parts.
    fn pieces<'a>(
        &'a self,
        parts: &'a [Sge],
        offset: u32,
        bytes: u32,
        access: u32,
    ) -> impl Iterator<Item = (Result<u64, Denied>, u32)> + 'a {
        let (mut skip, mut left) = (offset, bytes);
        parts.iter().filter_map(move |part| {
            let skipped = skip.min(part.length);
            skip -= skipped;
            let length = (part.length - skipped).min(left);
            left -= length;
            let iova = part.addr + u64::from(skipped);
            (length > 0).then(|| (self.address(part.lkey, iova, length.into(), access), length))
        })
    }
}

/// Whether parts have `bytes` from `offset` on.
fn has_room(parts: &[Sge], offset: u32, bytes: u32) -> Result<(), Denied> {
    let room: u64 = parts.iter().map(|part| u64::from(part.length)).sum();
    if u64::from(offset) + u64::from(bytes) <= room { Ok(()) } else { Err(Denied) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_filled_one_after_the_other_and_read_back() {
        let mut memory = [[0_u8; 10], [0; 10]];
        let mut regions = Regions::default();
        let parts = memory.each_mut().map(|part| {
            let base = part.as_mut_ptr() as u64;
            let key = regions.add(Region { iova: 1000, base, bytes: 10, access: ACCESS_LOCAL_WRITE });
            Sge { addr: 1003, length: 6, lkey: key }
        });
        let data: Vec<u8> = (1..=12).collect();
        // SAFETY: the regions' memory lives, and both sides have the bytes that are named.
        unsafe {
            regions.scatter(&parts, 0, data.as_ptr(), 4).expect("the first part");
            regions.scatter(&parts, 4, data.as_ptr().add(4), 8).expect("of both");
            let mut back = [0; 8];
            regions.gather(&parts, 4, back.as_mut_ptr(), 8).expect("of both");
            assert_eq!(back[..], data[4..]);
            assert_eq!(regions.scatter(&parts, 8, data.as_ptr(), 8), Err(Denied), "there is no room");
        }
        assert_eq!(memory, [[0, 0, 0, 1, 2, 3, 4, 5, 6, 0], [0, 0, 0, 7, 8, 9, 10, 11, 12, 0]]);
    }

    #[test]
    fn a_key_is_good_for_its_region_and_its_access_alone() {
        let mut regions = Regions::default();
        let key = regions.add(Region { iova: 4096, base: 1 << 20, bytes: 100, access: ACCESS_LOCAL_WRITE });
        assert_eq!(regions.address(key, 4106, 90, 0), Ok((1 << 20) + 10));
        for (key, iova, bytes, access) in [
            (key + 2, 4096, 1, 0),
            (key, 4095, 1, 0),
            (key, 4106, 91, 0),
            (key, u64::MAX, 2, 0),
            (key, 4096, 1, crate::abi::ACCESS_REMOTE_WRITE),
        ] {
            assert_eq!(regions.address(key, iova, bytes, access), Err(Denied), "{iova} {bytes} {access}");
        }
        regions.remove(key);
        assert_eq!(regions.address(key, 4096, 1, 0), Err(Denied));
    }
}
