//! Teams: which ranks reach each other's memory from kernels of the caller's. Such kernels reach nobody's memory through this library, so each
//! rank is alone in its team.

use std::ffi::c_int;

use super::communicators::{Comm, Made};

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
pub extern "C" fn ncclTeamLsa(_comm: *const Comm) -> Team {
    ALONE
}

/// See `nccl_device/core.h`: one rank of each team that reach each other.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRail(comm: *const Comm) -> Team {
    ncclTeamWorld(comm)
}

/// See `nccl_device/core.h`: a rank of a team that this rank is in, among all.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToWorld(comm: *const Comm, team: Team, rank: c_int) -> c_int {
    let (_, own) = place(comm);
    own.wrapping_add(rank.wrapping_sub(team.rank).wrapping_mul(team.stride))
}

/// See `nccl_device/core.h`: a rank of a team that this rank is in, among those that it reaches, where it is the first.
#[unsafe(no_mangle)]
pub extern "C" fn ncclTeamRankToLsa(_comm: *const Comm, team: Team, rank: c_int) -> c_int {
    rank.wrapping_sub(team.rank).wrapping_mul(team.stride)
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
