//! Handles of 64 bytes by which other processes open memory and events.

use std::os::unix::fs::MetadataExt as _;

use bytemuck::{Pod, Zeroable};

use crate::code::{Done, INVALID_CONTEXT, INVALID_VALUE};
use crate::physical::{Name, Physical, What};

/// As the driver's: opaque bytes.
pub(crate) type Handle = [u8; 64];

const MAGIC: u64 = u64::from_be_bytes(*b"emuIPCv1");

/// What is in them: the same for the same thing.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Fields {
    magic: u64,
    pid: u32,
    fd: u32,
    what: u32,
    device: u32,
    bytes: u64,
    nonce: u64,
    /// The PID namespace of the process, whose number means something else in others.
    namespace: u64,
    reserved: [u64; 2],
}

const _: () = assert!(size_of::<Fields>() == 64);

fn own_namespace() -> u64 {
    std::fs::metadata("/proc/thread-self/ns/pid").map_or(0, |namespace| namespace.ino())
}

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
    let (pid, fd) = (std::process::id(), physical.number());
    let (device, namespace) = (device as u32, own_namespace());
    let fields = Fields { magic: MAGIC, pid, fd, what: code(what), device, bytes, nonce, namespace, reserved: [0; 2] };
    bytemuck::cast(fields)
}

/// What a handle names, which another process has made.
pub(crate) fn open(handle: &Handle, what: What) -> Done<Physical> {
    let fields: Fields = bytemuck::pod_read_unaligned(handle);
    if fields.magic != MAGIC || fields.what != code(what) || fields.reserved != [0; 2] {
        return Err(INVALID_VALUE);
    }
    // As the driver: memory cannot be imported where it was exported, nor in another PID namespace.
    if fields.pid == std::process::id() || fields.namespace != own_namespace() {
        return Err(INVALID_CONTEXT);
    }
    let name = Name { what, device: fields.device as usize, bytes: fields.bytes, nonce: fields.nonce };
    Physical::open(fields.pid, fields.fd, |other| *other == name)
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
        // Of another PID namespace.
        let mut other: Fields = bytemuck::cast(own);
        (other.pid, other.namespace) = (1, other.namespace + 1);
        assert_eq!(refused(&bytemuck::cast(other), What::Memory), Some(INVALID_CONTEXT));
        // Of a process that has nothing of the kind.
        let mut other: Fields = bytemuck::cast(own);
        other.pid = 1;
        assert_eq!(refused(&bytemuck::cast(other), What::Memory), Some(INVALID_VALUE));
    }
}
