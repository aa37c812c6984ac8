//! Sites: which ranks on GPUs reach each other; a site is a host, or a part of one. All GPUs of a
//! site reach each other. Pure.

use mccs_ipc::device_initiated::DEVICE_INITIATED_RANKS_MAX;
use mccs_ipc::protocol::{HOST_RUNS_MAX, HostRun};
use serde::{Deserialize, Serialize};

/// A rank's GPU, as its host counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuPlace {
    /// Number of the GPU.
    pub(crate) gpu: u32,
    /// GPUs of the host with the same number reach each other.
    pub(crate) group: u32,
}

/// Ranks in order, by sites of at most [`DEVICE_INITIATED_RANKS_MAX`] ranks, from each rank's host and GPU. None where all are at one site or one is on no GPU,
/// or where ranks lie so scattered that a message has no room.
pub(crate) fn host_runs(ranks: &[(u32, Option<GpuPlace>)]) -> Vec<HostRun> {
    // Host, group, and ranks so far.
    let mut sites: Vec<(u32, u32, u32)> = Vec::new();
    let mut runs: Vec<HostRun> = Vec::new();
    for (host, gpu) in ranks {
        let Some(GpuPlace { group, .. }) = gpu else { return Vec::new() };
        let has_room = |(of_host, of_group, ranks): &(u32, u32, u32)| {
            (of_host, of_group) == (host, group) && *ranks < DEVICE_INITIATED_RANKS_MAX
        };
        let site = sites.iter().position(has_room).unwrap_or_else(|| {
            sites.push((*host, *group, 0));
            sites.len() - 1
        });
        sites[site].2 += 1;
        match runs.last_mut().filter(|run| run.host == site as u32) {
            Some(run) => run.ranks += 1,
            None => runs.push(HostRun { host: site as u32, ranks: 1 }),
        }
    }
    if sites.len() > 1 && runs.len() <= HOST_RUNS_MAX { runs } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(ranks: &[(u32, u32)]) -> Vec<(u32, u32)> {
        let place =
            |(at, (host, group)): (usize, &(u32, u32))| (*host, Some(GpuPlace { gpu: at as u32, group: *group }));
        let ranks: Vec<_> = ranks.iter().enumerate().map(place).collect();
        host_runs(&ranks).iter().map(|run| (run.host, run.ranks)).collect()
    }

    #[test]
    fn ranks_that_all_reach_each_other_are_told_nothing() {
        assert_eq!(runs(&[(0, 0); 8]), []);
        assert_eq!(runs(&[]), []);
    }

    #[test]
    fn a_site_is_a_host_or_a_group_of_its_gpus() {
        assert_eq!(runs(&[(0, 0), (0, 0), (1, 0), (1, 0)]), [(0, 2), (1, 2)]);
        assert_eq!(runs(&[(0, 0), (0, 0), (0, 1), (0, 1)]), [(0, 2), (1, 2)]);
        assert_eq!(runs(&[(0, 0), (0, 1), (1, 0), (0, 1)]), [(0, 1), (1, 1), (2, 1), (1, 1)]);
    }

    #[test]
    fn more_ranks_than_reach_each_other_are_several_sites() {
        assert_eq!(runs(&[(0, 0); 16]), [(0, 8), (1, 8)]);
        assert_eq!(runs(&[(3, 1); 17]), [(0, 8), (1, 8), (2, 1)]);
    }

    #[test]
    fn a_rank_on_no_gpu_leaves_all_untold() {
        let gpu = Some(GpuPlace { gpu: 0, group: 0 });
        assert_eq!(host_runs(&[(0, gpu), (1, None)]), []);
    }
}
