//! Error texts of time-outs: which ranks have not called, and what the others wait in.

use mccs_registry::RankInfo;

use crate::proxy::calls::describe::describe;
use crate::proxy::calls::members::Member;
use crate::proxy::calls::operation::Operation;
use crate::proxy::communicator::comm::Comm;

/// Most ranks that a message tells of.
const RANKS_DESCRIBED_MAX: usize = 8;
/// Text for an operation that all ranks here have called.
const AWAITS_HOSTS: &str = " for ranks of other hosts";

/// See the module's documentation.
pub(crate) struct Waits<'a> {
    pub(crate) comm: &'a Comm,
    /// Sends and receives that run, with peers on other hosts.
    remote: Vec<&'a Operation>,
}

impl<'a> Waits<'a> {
    pub(crate) fn new(comm: &'a Comm, remote: Vec<&'a Operation>) -> Self {
        Waits { comm, remote }
    }

    /// Waiting ranks, their waits, and ranks that have not called anything, in words. First those who called nothing, as messages are cut
    /// where they get too long.
    pub(crate) fn describe(&self) -> String {
        let mut ranks = self.silent();
        let of = |member: &Member| {
            let calls = self.calls(member);
            let calls: Vec<_> = calls.into_iter().map(|(call, more)| format!("{}{more}", describe(call))).collect();
            (!calls.is_empty()).then(|| format!("rank {} waits in {}", member.rank, calls.join(", ")))
        };
        ranks.extend(self.comm.members.iter().filter_map(of));
        let more = ranks.len().saturating_sub(RANKS_DESCRIBED_MAX);
        ranks.truncate(RANKS_DESCRIBED_MAX);
        let more = if more > 0 { format!("; and {more} more ranks") } else { String::new() };
        let hosts = &self.comm.info.hosts;
        let hosts = if hosts.is_empty() { String::new() } else { format!(" (ranks are on {})", hosts.join(", ")) };
        format!("{}{more}{hosts}", ranks.join("; "))
    }

    /// Ranks of this host that have come to nothing, in words: they have called nothing, or are behind other work.
    pub(crate) fn silent(&self) -> Vec<String> {
        let of = |(member, info): (&Member, &RankInfo)| {
            let place = member.whole_started().saturating_add(self.comm.info.rounds(info));
            let (rank, pid) = (member.rank, member.session.peer.pid);
            let is_silent = !member.has_left() && self.calls(member).is_empty();
            is_silent.then(|| match member.next() {
                Some(next) => {
                    let call = describe(next);
                    format!("rank {rank} (process {pid}) has called {call}, and its stream has not come to it")
                }
                None => format!("rank {rank} (process {pid}) has called nothing after operation {place}"),
            })
        };
        self.comm.members.iter().zip(&self.comm.info.ranks).filter_map(of).collect()
    }

    /// Calls that a rank waits in: those that others have not called, and those that run with ranks of other hosts. With
    /// what to say of it.
    pub(crate) fn calls(&self, member: &'a Member) -> Vec<(&'a Operation, &'static str)> {
        let begun = self
            .comm
            .running
            .operations()
            .chain(&self.comm.broken)
            .chain(self.remote.iter().copied())
            .map(|operation| (operation, AWAITS_HOSTS));
        let waiting =
            member.arrived().into_iter().chain(self.comm.p2p.remote_waiting()).chain(self.comm.p2p.unmatched());
        let all = begun.chain(waiting.map(|operation| (operation, "")));
        all.filter(|(operation, _)| operation.rank == member.rank).collect()
    }
}
