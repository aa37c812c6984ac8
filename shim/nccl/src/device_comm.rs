//! NCCL's device API (`ncclDevComm`, GIN, barriers): refused. `ncclCommQueryProperties` says so
//! beforehand (`deviceApiSupport`). Teams are those of windows: ranks whose memory the caller's
//! kernels reach are one LSA team, and otherwise each is alone.

use std::ffi::{c_int, c_void};

use super::communicators::{Comm, Made};
use super::{Status, guard, refused};

/// The way out that a caller has.
const INSTEAD: &str = "kernels of the caller's cannot communicate; call collectives from the host (ncclCommQueryProperties: deviceApiSupport is false)";

/// `ncclTeam_t`: ranks at equal distances.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Team {
    nranks: c_int,
    rank: c_int,
    stride: c_int,
}

/// A team of one.
const ALONE: Team = Team { nranks: 1, rank: 0, stride: 1 };

/// A communicator's number of ranks, and this rank; none of a handle that is of no use.
fn place(comm: *const Comm) -> (c_int, c_int) {
    Comm::of(comm).map_or((0, 0), |comm: Made| (comm.nranks as c_int, comm.rank as c_int))
}

/// See `nccl_device/core.h`: all ranks.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamWorld(comm: *const Comm) -> Team {
    let (nranks, rank) = place(comm);
    Team { nranks, rank, stride: 1 }
}

/// See `nccl_device/core.h`: ranks whose memory the caller's kernels reach.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamLsa(comm: *const Comm) -> Team {
    if reach_each_other(comm) { ncclTeamWorld(comm) } else { ALONE }
}

/// See `nccl_device/core.h`: one rank of each team that reach each other.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRail(comm: *const Comm) -> Team {
    let (nranks, _) = place(comm);
    if reach_each_other(comm) { Team { stride: nranks, ..ALONE } } else { ncclTeamWorld(comm) }
}

fn reach_each_other(comm: *const Comm) -> bool {
    Comm::of(comm).is_ok_and(|comm| comm.reaches_peers())
}

/// See `nccl_device/core.h`: a rank of a team that this rank is in, among all.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToWorld(comm: *const Comm, team: Team, rank: c_int) -> c_int {
    let (_, own) = place(comm);
    own.wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride))
}

/// See `nccl_device/core.h`: a rank of a team that this rank is in, among those that it reaches.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToLsa(comm: *const Comm, team: Team, rank: c_int) -> c_int {
    ncclTeamLsa(comm).rank.wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride))
}

/// See `nccl_device/host.h`: ranks that reach each other by endpoints of the network. Each rank is alone.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamCft(_comm: *const Comm, _mode: c_int) -> Team {
    ALONE
}

/// See `nccl_device/host.h`: ranks that one multicast reaches. Each rank is alone.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamCftMultimem(_comm: *const Comm) -> Team {
    ALONE
}

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
