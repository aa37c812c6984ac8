//! Emulated CUDA IPC handles of memory and events, of 64 bytes.

use bytemuck::{Pod, Zeroable};

use crate::code::{Done, INVALID_CONTEXT, INVALID_VALUE};
use crate::physical::{Name, Physical, What, number_in_proc};

/// As the driver's: opaque bytes.
pub(crate) type Handle = [u8; 64];

const MAGIC: u64 = u64::from_be_bytes(*b"emuIPCv1");

/// Their content: the same for the same thing.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Fields {
    magic: u64,
    bytes: u64,
    nonce: u64,
    /// In its own PID namespace.
    pid: u32,
    in_proc: u32,
    fd: u32,
    what: u32,
    device: u32,
    reserved: [u32; 5],
}

const _: () = assert!(size_of::<Fields>() == 64);

fn code(what: What) -> u32 {
    match what {
        What::Memory => 1,
        What::Event => 2,
        What::OfHost => 3,
    }
}

/// The handle of something that this process has made.
pub(crate) fn of(physical: &Physical) -> Handle {
    let Name { what, device, bytes, nonce } = physical.name;
    let (pid, in_proc, fd) = (std::process::id(), number_in_proc(), physical.number());
    let (what, device) = (code(what), device as u32);
    bytemuck::cast(Fields { magic: MAGIC, bytes, nonce, pid, in_proc, fd, what, device, reserved: [0; 5] })
}

/// The object of a handle that another process has made.
pub(crate) fn open(handle: &Handle, what: What) -> Done<Physical> {
    let fields: Fields = bytemuck::pod_read_unaligned(handle);
    if fields.magic != MAGIC || fields.what != code(what) || fields.reserved != [0; 5] {
        return Err(INVALID_VALUE);
    }
    // As the driver: nothing is opened where it was made, which is any process with that number, be it in another PID namespace.
    if fields.pid == std::process::id() {
        return Err(INVALID_CONTEXT);
    }
    let name = Name { what, device: fields.device as usize, bytes: fields.bytes, nonce: fields.nonce };
    Physical::open(fields.in_proc, fields.fd, |other| *other == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_that_were_made_up_and_ones_own_are_refused() {
        let memory = Physical::new(What::Memory, 0, 4096).expect("memory");
        let own = of(&memory);
        assert_eq!(own, of(&memory));
        let refused = |handle: &Handle, what| open(handle, what).err();
        assert_eq!(refused(&own, What::Memory), Some(INVALID_CONTEXT));
        assert_eq!(refused(&own, What::Event), Some(INVALID_VALUE));
        assert_eq!(refused(&[0; 64], What::Memory), Some(INVALID_VALUE));
        // Handle of a process with that number in another PID namespace.
        let mut other: Fields = bytemuck::cast(own);
        other.in_proc = 1;
        assert_eq!(refused(&bytemuck::cast(other), What::Memory), Some(INVALID_CONTEXT));
        // Handle of a process that has nothing of the kind.
        other.pid = 1;
        assert_eq!(refused(&bytemuck::cast(other), What::Memory), Some(INVALID_VALUE));
    }
}
