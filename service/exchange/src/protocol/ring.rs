//! Bootstrap ring (all-gather) of a communicator's hosts: one host's view of the payloads that go
//! round.
//!
//! Every host sends its own ranks' payloads to the next, and forwards what comes from the one before until it has been everywhere.
//! So each host talks to two others, in as many messages as there are hosts, however many ranks each has.

use std::collections::BTreeMap;

use super::interface::Membership;
use super::message::{Part, RingHost};
use crate::limits::PART_BYTES;
use mccs_model::{CommId, CommKey, Name, Payload};

/// Why a ring cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RingFault {
    #[error("host {0} is part of it, and not in this service's list of hosts")]
    Stranger(Name),
    #[error("its ring does not have every host once")]
    Order,
    #[error("it has the name of another communicator")]
    Reused,
    #[error("it began before this host was ready")]
    Early,
    #[error("payloads came out of order")]
    Part,
    #[error("rank {0} is on two hosts, or out of range")]
    Rank(u32),
    #[error("rank {0} is on no host")]
    Missing(u32),
}

#[derive(Default, Clone)]
struct Block {
    parts: u32,
    whole: bool,
}

pub(super) struct Ring {
    comm: CommId,
    hosts: Vec<Name>,
    position: usize,
    blocks: Vec<Block>,
    /// By rank, its host's place and its payload.
    ranks: Vec<Option<(u16, Payload)>>,
}

impl Ring {
    /// The ring, and the host that comes next.
    pub(super) fn new(
        comm: CommId,
        hosts: &[RingHost],
        own: &Name,
        attempt: u64,
        nranks: u32,
    ) -> Result<(Self, RingHost), RingFault> {
        let names: Vec<Name> = hosts.iter().map(|host| host.name.clone()).collect();
        let mut distinct: Vec<_> = names.iter().collect();
        distinct.sort();
        distinct.dedup();
        let position = hosts.iter().position(|host| host.name == *own && host.attempt == attempt);
        let position = position.filter(|_| distinct.len() == hosts.len()).ok_or(RingFault::Order)?;
        let next = hosts.get((position + 1) % hosts.len()).cloned().ok_or(RingFault::Order)?;
        let blocks = vec![Block::default(); hosts.len()];
        Ok((Ring { comm, hosts: names, position, blocks, ranks: vec![None; nranks as usize] }, next))
    }

    pub(super) fn comm(&self) -> &CommId {
        &self.comm
    }

    pub(super) fn hosts(&self) -> &[Name] {
        &self.hosts
    }

    pub(super) fn is_previous(&self, host: &Name) -> bool {
        let before = (self.position + self.hosts.len() - 1) % self.hosts.len();
        self.hosts.get(before) == Some(host)
    }

    pub(super) fn is_own(&self, part: &Part) -> bool {
        usize::from(part.origin) == self.position
    }

    /// Whether a part is to be sent on: until the next host is where it came from.
    pub(super) fn goes_on(&self, part: &Part) -> bool {
        usize::from(part.origin) != (self.position + 1) % self.hosts.len()
    }

    /// This host's payloads, in parts.
    pub(super) fn own_parts(&self, local: &BTreeMap<u32, Payload>) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut bytes = PART_BYTES;
        for (rank, payload) in local {
            if bytes + payload.bytes().len() > PART_BYTES || parts.is_empty() {
                bytes = 0;
                let (origin, index) = (self.position as u16, parts.len() as u32);
                parts.push(Part { origin, index, last: false, ranks: Vec::new() });
            }
            bytes += payload.bytes().len();
            if let Some(part) = parts.last_mut() {
                part.ranks.push((*rank, payload.clone()));
            }
        }
        if let Some(part) = parts.last_mut() {
            part.last = true;
        }
        parts
    }

    pub(super) fn accept(&mut self, part: &Part) -> Result<(), RingFault> {
        let block = self.blocks.get_mut(usize::from(part.origin)).ok_or(RingFault::Part)?;
        if block.whole || block.parts != part.index {
            return Err(RingFault::Part);
        }
        block.parts += 1;
        block.whole = part.last;
        for (rank, payload) in &part.ranks {
            let slot = self.ranks.get_mut(*rank as usize).filter(|slot| slot.is_none());
            *slot.ok_or(RingFault::Rank(*rank))? = Some((part.origin, payload.clone()));
        }
        Ok(())
    }

    /// Everything, once all hosts' payloads are here.
    pub(super) fn finish(&mut self, key: &CommKey) -> Option<Result<(Membership, Vec<Payload>), RingFault>> {
        if self.blocks.iter().any(|block| !block.whole) {
            return None;
        }
        let mut host_of_rank = Vec::with_capacity(self.ranks.len());
        let mut payloads = Vec::with_capacity(self.ranks.len());
        for (rank, slot) in std::mem::take(&mut self.ranks).into_iter().enumerate() {
            let Some((host, payload)) = slot else { return Some(Err(RingFault::Missing(rank as u32))) };
            host_of_rank.push(host);
            payloads.push(payload);
        }
        let (comm, key, hosts) = (self.comm.clone(), key.clone(), self.hosts.clone());
        Some(Ok((Membership { comm, key, hosts, host_of_rank }, payloads)))
    }
}
