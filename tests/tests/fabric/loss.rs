//! A link that loses packets at random: a program of seven instructions at the interface where they arrive.
//!
//! In the kernel's own terms that is netem's work, which not every kernel has; programs at interfaces every recent one has.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Constants of `linux/bpf.h`.
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// The interface's driver need not know of programs.
const FLAG_GENERIC: u32 = 2;

/// As `union bpf_attr` begins, for loading.
#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    instructions: u32,
    code: u64,
    license: u64,
    more: [u64; 16],
}

/// As `union bpf_attr` begins, for attaching.
#[repr(C)]
#[derive(Default)]
struct Attach {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
    more: [u64; 6],
}

/// Loss at an interface, until it is dropped.
pub struct Loss {
    _link: OwnedFd,
}

fn instruction(opcode: u8, offset: u16, immediate: u32) -> u64 {
    u64::from(opcode) | u64::from(offset) << 16 | u64::from(immediate) << 32
}

/// # Safety
/// `attributes` is as the kernel reads it for `command`, pointers included.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> OwnedFd {
    // SAFETY: the caller's.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    assert!(fd >= 0, "bpf({command}): {}", std::io::Error::last_os_error());
    // SAFETY: a new descriptor.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

impl Loss {
    /// One in `one_in` packets that arrive at an interface of a namespace is lost.
    pub fn start(namespace: &str, interface: &str, one_in: u32) -> Self {
        let code = [
            instruction(0x85, 0, 7),      // r0 = a random number of 32 bits
            instruction(0x97, 0, one_in), // r0 %= one_in
            instruction(0x55, 2, 0),      // if r0 != 0, over the next two
            instruction(0xb7, 0, 1),      // r0 = drop
            instruction(0x95, 0, 0),      // return
            instruction(0xb7, 0, 2),      // r0 = pass
            instruction(0x95, 0, 0),      // return
        ];
        inside_namespace(namespace, || {
            let index = nix::net::if_::if_nametoindex(interface).expect("an interface");
            let license = c"Apache-2.0";
            let load = Load {
                prog_type: PROG_TYPE_XDP,
                instructions: code.len() as u32,
                code: code.as_ptr() as u64,
                license: license.as_ptr() as u64,
                ..Load::default()
            };
            // SAFETY: `code` and `license` outlive the call, and have the lengths that are said.
            let program = unsafe { bpf(PROG_LOAD, &load) };
            let attach = Attach {
                program: program.as_raw_fd() as u32,
                interface: index,
                attach_type: ATTACH_XDP,
                flags: FLAG_GENERIC,
                ..Attach::default()
            };
            // SAFETY: no pointers.
            Loss { _link: unsafe { bpf(LINK_CREATE, &attach) } }
        })
    }
}

/// Runs `work` on a thread of its own, which enters a network namespace first.
pub fn inside_namespace<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(format!("/run/netns/{namespace}")).expect("a namespace");
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: changes only this thread, which ends after `work`.
            let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(entered, 0, "setns: {}", std::io::Error::last_os_error());
            work()
        });
        thread.join().expect("a thread in a namespace")
    })
}
