//! Registered memory of emulated NICs: what keys allow, and copies between it and slots.
//!
//! The processor copies memory of the host, at once unless threads do it. Copy engines copy that of GPUs, which is done later.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::abi::{ACCESS_LOCAL_WRITE, ACCESS_RELAXED_ORDERING, Sge};
use crate::copiers;
use crate::files::Ring;
use crate::gpu::{CallFailed, Copies, Gpu, Lane, Pending, Way};
use crate::twins::Twin;

/// A registered region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    /// By which address work requests name its first byte.
    pub iova: u64,
    /// Address of that byte.
    pub base: u64,
    pub bytes: u64,
    pub access: u32,
    /// The memory's owner; `None`: the host's.
    pub gpu: Option<Gpu>,
}

/// Place of bytes of a region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub address: u64,
    pub gpu: Option<Gpu>,
    /// Whether writes to it may overtake each other.
    pub is_relaxed: bool,
}

/// A slot, and what copies to it and from it.
pub(crate) struct Slot<'a> {
    pub ring: &'a Ring,
    pub data: *mut u8,
    /// Place of the data on a GPU instead.
    pub twin: Option<Twin>,
    pub copies: &'a Mutex<Copies>,
    /// Number of the queue pair.
    number: u32,
    index: u64,
    pub pending: Pending,
    /// Bytes copied that are a GPU's.
    pub gpu_bytes: u64,
}

impl<'a> Slot<'a> {
    pub(crate) fn new(ring: &'a Ring, index: u64, copies: &'a Mutex<Copies>, number: u32) -> Self {
        let (data, pending) = (ring.data(index), Pending::default());
        Slot { ring, data, twin: None, copies, number, index, pending, gpu_bytes: 0 }
    }

    /// The same slot of a twin, where there is one.
    pub(crate) fn on(self, twin: Option<Twin>) -> Self {
        Slot { twin: twin.map(|twin| self.ring.in_twin(twin, self.index)), ..self }
    }

    /// Copies between memory and the slot, from `at` on there.
    ///
    /// # Safety
    /// The memory is there until `pending` is done, and the slot has room.
    pub(crate) unsafe fn copy(&mut self, memory: Place, at: usize, bytes: usize, way: Way) -> Result<(), Denied> {
        let slot = self.data.wrapping_add(at);
        let Some(gpu) = memory.gpu.or(self.twin.map(|twin| twin.gpu)) else {
            let memory = memory.address as *mut u8;
            // SAFETY: the caller's promise.
            unsafe {
                match way {
                    Way::ToGpu => copiers::copy(memory, slot, bytes, &mut self.pending),
                    Way::FromGpu => copiers::copy(slot, memory, bytes, &mut self.pending),
                }
            }
            return Ok(());
        };
        if bytes == 0 {
            return Ok(());
        }
        if memory.gpu.is_some() {
            self.gpu_bytes += bytes as u64;
        }
        let slot = match self.twin {
            Some(twin) => twin.address + at as u64,
            None => {
                self.ring.pin(gpu);
                slot.addr() as u64
            }
        };
        // Out of a twin bytes stay in one GPU, into one they go to another.
        let is_within = way == Way::ToGpu && memory.gpu.zip(self.twin).is_some_and(|(gpu, twin)| twin.gpu.is(gpu));
        let (to, from) = match way {
            Way::ToGpu => (memory.address, slot),
            Way::FromGpu => (slot, memory.address),
        };
        let turns = if way == Way::FromGpu || memory.is_relaxed { self.index as u32 } else { 0 };
        let lane = Lane { gpu, way, number: self.number.wrapping_add(turns) };
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise; the slot is kept until `pending` is done.
        let launched = unsafe { copies.launch(lane, to, from, bytes, is_within, &mut self.pending) };
        launched.map_err(|CallFailed| Denied)
    }
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

    /// Place of `bytes` from `iova` on, if the key allows `access` there.
    pub(crate) fn place(&self, key: u32, iova: u64, bytes: u64, access: u32) -> Result<Place, Denied> {
        let region = self.regions.get(&key).ok_or(Denied)?;
        let offset = iova.checked_sub(region.iova).ok_or(Denied)?;
        let end = offset.checked_add(bytes).ok_or(Denied)?;
        if end > region.bytes || region.access & access != access {
            return Err(Denied);
        }
        let is_relaxed = region.access & ACCESS_RELAXED_ORDERING != 0;
        Ok(Place { address: region.base + offset, gpu: region.gpu, is_relaxed })
    }

    /// Whether all parts are memory of a GPU.
    pub(crate) fn are_on(&self, gpu: Gpu, parts: &[Sge]) -> bool {
        let place = |part: &Sge| self.place(part.lkey, part.addr, part.length.into(), 0).ok()?.gpu;
        parts.iter().all(|part| place(part).is_some_and(|owner| owner.is(gpu)))
    }

    /// Copies `bytes` between the parts' memory, from `offset` on, and a slot.
    ///
    /// # Safety
    /// Whoever registered the memory keeps it until the slot's copies are done, and the slot has room.
    pub(crate) unsafe fn copy(
        &self,
        parts: &[Sge],
        offset: u32,
        slot: &mut Slot<'_>,
        bytes: u32,
        way: Way,
    ) -> Result<(), Denied> {
        has_room(parts, offset, bytes)?;
        let access = if way == Way::ToGpu { ACCESS_LOCAL_WRITE } else { 0 };
        let mut done = 0;
        for (place, length) in self.pieces(parts, offset, bytes, access) {
            // SAFETY: the place lies in a registered region, the slot has room for all pieces.
            unsafe { slot.copy(place?, done, length as usize, way)? };
            done += length as usize;
        }
        Ok(())
    }

    /// Places and lengths of `bytes` from `offset` on in a list of parts.
    fn pieces<'a>(
        &'a self,
        parts: &'a [Sge],
        offset: u32,
        bytes: u32,
        access: u32,
    ) -> impl Iterator<Item = (Result<Place, Denied>, u32)> + 'a {
        let (mut skip, mut left) = (offset, bytes);
        parts.iter().filter_map(move |part| {
            let skipped = skip.min(part.length);
            skip -= skipped;
            let length = (part.length - skipped).min(left);
            left -= length;
            let iova = part.addr + u64::from(skipped);
            (length > 0).then(|| (self.place(part.lkey, iova, length.into(), access), length))
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
            let key = regions.add(Region { iova: 1000, base, bytes: 10, access: ACCESS_LOCAL_WRITE, gpu: None });
            Sge { addr: 1003, length: 6, lkey: key }
        });
        let folder = tempfile::tempdir().expect("a folder");
        let ring = Ring::create(folder.path(), [1; 16], 1).expect("a ring");
        let copies = Mutex::new(Copies::default());
        let mut slot = Slot::new(&ring, 0, &copies, 0);
        let data: Vec<u8> = (1..=12).collect();
        // SAFETY: the regions' memory lives, and both sides have the bytes that are named.
        unsafe {
            slot.data.copy_from(data.as_ptr(), 12);
            regions.copy(&parts, 0, &mut slot, 4, Way::ToGpu).expect("the first part");
            slot.data = ring.data(0).add(4);
            regions.copy(&parts, 4, &mut slot, 8, Way::ToGpu).expect("of both");
            slot.data = ring.data(1);
            regions.copy(&parts, 4, &mut slot, 8, Way::FromGpu).expect("of both");
            assert_eq!(std::slice::from_raw_parts(slot.data, 8), &data[4..]);
            assert_eq!(regions.copy(&parts, 8, &mut slot, 8, Way::ToGpu), Err(Denied), "there is no room");
        }
        assert_eq!(memory, [[0, 0, 0, 1, 2, 3, 4, 5, 6, 0], [0, 0, 0, 7, 8, 9, 10, 11, 12, 0]]);
    }

    #[test]
    fn a_key_is_good_for_its_region_and_its_access_alone() {
        let mut regions = Regions::default();
        let region = Region { iova: 4096, base: 1 << 20, bytes: 100, access: ACCESS_LOCAL_WRITE, gpu: None };
        let key = regions.add(region);
        let address = |regions: &Regions, key, iova, bytes, access| {
            regions.place(key, iova, bytes, access).map(|place| place.address)
        };
        assert_eq!(address(&regions, key, 4106, 90, 0), Ok((1 << 20) + 10));
        for (key, iova, bytes, access) in [
            (key + 2, 4096, 1, 0),
            (key, 4095, 1, 0),
            (key, 4106, 91, 0),
            (key, u64::MAX, 2, 0),
            (key, 4096, 1, crate::abi::ACCESS_REMOTE_WRITE),
        ] {
            assert_eq!(address(&regions, key, iova, bytes, access), Err(Denied), "{iova} {bytes} {access}");
        }
        regions.remove(key);
        assert_eq!(address(&regions, key, 4096, 1, 0), Err(Denied));
    }
}
