//! Communicators for kernels of the caller's, and what such kernels need. All of it is refused; `ncclCommQueryProperties` says so beforehand
//! (`deviceApiSupport`).

use std::ffi::{c_int, c_void};

use super::communicators::Comm;
use super::teams::Team;
use super::{Status, guard, refused};

/// The way out that a caller has.
const INSTEAD: &str = "kernels of the caller's cannot communicate; call collectives from the host (ncclCommQueryProperties: deviceApiSupport is false)";

/// Defines a function that is refused.
macro_rules! refuses {
    ($($name:ident($($arg:ident: $type:ty),*);)+) => {
        $(
            /// Refused; see `nccl_device/host.h`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $type),*) -> Status {
                guard(|| Err(refused(stringify!($name), INSTEAD)))
            }
        )+
    };
}

refuses! {
    ncclDevCommCreate(_comm: *mut Comm, _requirements: *const c_void, _made: *mut c_void);
    ncclDevCommDestroy(_comm: *mut Comm, _made: *const c_void);
    ncclLsaBarrierCreateRequirement(_team: Team, _barriers: c_int, _handle: *mut c_void, _requirements: *mut c_void);
    ncclGinBarrierCreateRequirement(
        _comm: *const Comm,
        _team: Team,
        _barriers: c_int,
        _handle: *mut c_void,
        _requirements: *mut c_void
    );
    ncclGinOutboxCreateRequirement(
        _blocks: c_int,
        _size_log2: c_int,
        _handle: *mut c_void,
        _requirements: *mut c_void
    );
    ncclGinInboxA2ACreateRequirement(
        _peers: Team,
        _blocks: c_int,
        _size_log2: c_int,
        _handle: *mut c_void,
        _requirements: *mut c_void
    );
    ncclLLA2ACreateRequirement(_blocks: c_int, _slots: c_int, _handle: *mut c_void, _requirements: *mut c_void);
}

/// How many slots an exchange of a kernel's takes: one for each eight bytes of an element; see `nccl_device/host.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclLLA2ACalcSlots(elements: c_int, element_bytes: c_int) -> c_int {
    const SLOT_BYTES: c_int = 8;
    let slots = element_bytes.max(0).div_euclid(SLOT_BYTES) + c_int::from(element_bytes.max(0) % SLOT_BYTES != 0);
    elements.max(0).saturating_mul(slots)
}
