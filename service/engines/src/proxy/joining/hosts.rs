//! Hosts of a communicator: which ranks are where, its links, and its reduction ring.

use std::sync::Arc;

use mccs_exchange::protocol::{Membership, Name};
use mccs_ipc::layout::RING_HOSTS_MIN;
use mccs_ipc::protocol::HostRun;
use mccs_telemetry::placed::Placed;

use crate::proxy::calls::sites::{self, GpuPlace};
use crate::proxy::communicator::comm::Span;
use crate::proxy::joining::setup::{Gathered, placed_ranks};
use crate::proxy::joining::transport_offer::Agreed;
use crate::transport::links::PathAssignment;

/// See the module's documentation.
pub(crate) struct Across {
    pub(crate) span: Span,
    pub(crate) hosts: Vec<Name>,
    /// As strategies take it.
    pub(crate) ranks_by_host: Vec<Vec<u32>>,
    /// The GPU of every rank, if it is on one.
    pub(crate) gpus: Vec<Option<GpuPlace>>,
    /// Agreement of its hosts.
    pub(crate) agreed: Agreed,
    /// The paths that its flows take then.
    pub(crate) assignment: Arc<PathAssignment>,
}

impl Across {
    pub(crate) fn new(span: Span, Gathered { membership, gpus, agreed, assignment }: Gathered) -> Self {
        Across { span, ranks_by_host: ranks_by_host(&membership), hosts: membership.hosts, gpus, agreed, assignment }
    }

    /// As a controller sees it.
    pub(crate) fn placed(&self) -> Placed {
        let hosts = placed_ranks(&self.hosts, &self.ranks_by_host, &self.gpus);
        Placed::new(self.span.comm.clone(), hosts)
    }

    /// Places among [`Across::host_runs`] in the order in which GPUs there pass on what they reduce; none where they do not.
    pub(crate) fn reduction_ring(&self) -> Vec<u32> {
        let hosts = &self.agreed.reduction_ring;
        let place_of = |first: u32| hosts.iter().position(|host| self.ranks_by_host[*host].contains(&first));
        let mut runs: Vec<(Option<usize>, u32)> = Vec::new();
        let mut first = 0;
        for (number, run) in (0..).zip(self.host_runs()) {
            runs.push((place_of(first), number));
            first += run.ranks;
        }
        runs.retain(|(place, _)| place.is_some());
        runs.sort_unstable();
        match runs.len() >= RING_HOSTS_MIN {
            true => runs.into_iter().map(|(_, number)| number).collect(),
            false => Vec::new(),
        }
    }

    /// See [`sites::host_runs`].
    pub(crate) fn host_runs(&self) -> Vec<HostRun> {
        let mut ranks: Vec<_> = self.gpus.iter().map(|gpu| (0, *gpu)).collect();
        for (host, of_host) in (0..).zip(&self.ranks_by_host) {
            of_host.iter().for_each(|rank| ranks[*rank as usize].0 = host);
        }
        sites::host_runs(&ranks)
    }
}

fn ranks_by_host(membership: &Membership) -> Vec<Vec<u32>> {
    let mut ranks = vec![Vec::new(); membership.hosts.len()];
    for (rank, host) in (0..).zip(&membership.host_of_rank) {
        ranks[usize::from(*host)].push(rank);
    }
    ranks
}
