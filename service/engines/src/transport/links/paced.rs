//! Pacing at send: whether a message may leave by its communicator's rate, caps and windows, and
//! its tenant's.

use std::sync::Arc;
use std::time::Instant;

use mccs_model::link::{LinkKey, LinksId};
use mccs_model::rate_limit::{Bucket, Pace, SharedBucket};
use mccs_telemetry::placed::PaceUse;

use super::{LinkSet, Links, Sending};

/// How a communicator's flows leave this host.
#[derive(Clone)]
pub struct PaceHere {
    /// How fast, and when.
    pub pace: Arc<Pace>,
    /// Counter of the flows' use of it.
    pub pace_use: Arc<PaceUse>,
    /// Bucket of its tenant here, for all its communicators by all engines; if that has a cap.
    pub tenant: Option<Arc<SharedBucket>>,
}

/// All links on a channel to a host, of whichever ranks and strategies.
pub(super) struct Paced {
    /// Cap of the communicator's pace, in bits per second.
    cap_bps: Option<u64>,
    /// Point-to-point operations have one that engines share.
    bucket: Bucket,
}

/// A flow, in the words of paces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PacedFlow {
    pub(super) channel: u16,
    /// The place of the host that it goes to among the peers.
    pub(super) to: u16,
}

/// A link's turn among those of its tenant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// When its next message may leave.
    at: Instant,
    /// How long that is.
    bytes: u64,
}

/// Limits that hold a link back.
struct Held<'a> {
    paced: &'a mut Paced,
    /// In place of its own bucket.
    pairs: Option<&'a SharedBucket>,
    /// Besides, where flows have caps of their own.
    all: &'a SharedBucket,
    /// Besides, where its tenant has a cap of this host: in bits per second.
    tenant: Option<(&'a SharedBucket, u64)>,
    /// The link's in that.
    turn: &'a mut Option<Turn>,
}

impl Paced {
    pub(super) fn new(cap_bps: Option<u64>, now: Instant) -> Self {
        Paced { cap_bps, bucket: Bucket::new(now) }
    }
}

impl Links {
    /// From now on a communicator's flows keep to this.
    pub(in crate::transport) fn set_pace(&mut self, id: LinksId, here: PaceHere, now: Instant) {
        let Some(set) = self.sets.get_mut(&id) else { return };
        let pace = &here.pace;
        let before = set.pace.as_ref().map(|before| &*before.pace);
        for (PacedFlow { channel, to }, paced) in &mut set.paced {
            match before {
                Some(before) => paced.bucket.repace(before, paced.cap_bps, now),
                None => paced.bucket = Bucket::new(now),
            }
            let host = set.peers.as_ref().and_then(|peers| peers.hosts.get(usize::from(*to)));
            paced.cap_bps = host.and_then(|host| pace.cap_of(*channel, &host.name));
        }
        let is_same = |tenant: &Arc<SharedBucket>| here.tenant.as_ref().is_some_and(|other| Arc::ptr_eq(tenant, other));
        let keeps_turns = set.pace.as_ref().and_then(|before| before.tenant.as_ref()).is_some_and(is_same);
        for sending in set.sends.values_mut() {
            sending.meter.allot(set.paced.get(&sending.of).and_then(|paced| paced.cap_bps));
            sending.turn = sending.turn.filter(|_| keeps_turns);
        }
        set.pace = (!here.pace.is_free()).then_some(here);
    }

    /// Whether a link that has so many unfinished messages may send another one, of so many bytes, now, by its communicator's pace. If not the engine
    /// is woken when it may, unless it has to wait for one of these.
    pub fn may_send(&mut self, id: LinksId, link: LinkKey, under_way: usize, bytes: u64, now: Instant) -> bool {
        let Some((pace, pace_use, Held { paced, pairs, all, tenant, turn })) = self.paced(id, link) else {
            return true;
        };
        if !pace.has_room(under_way) {
            return false;
        }
        let own = match pairs {
            Some(pairs) => pairs.may_send_by(pace, paced.cap_bps, now),
            None => paced.bucket.may_send(pace, paced.cap_bps, now),
        };
        let common = pace.common_bps().map_or(Ok(()), |_| all.may_send(now));
        let mut held = own.err().max(common.err());
        // Last, so that nobody has a turn who could not use it.
        if let (None, Some((tenant, host_cap_bps))) = (held, tenant) {
            let own = turn.filter(|turn| turn.bytes == bytes);
            let new = || Turn { at: tenant.take_turn(bytes, host_cap_bps, now), bytes };
            let at = turn.insert(own.unwrap_or_else(new)).at;
            held = (at > now).then_some(at);
        }
        let Some(at) = held else { return true };
        pace_use.held();
        self.wake_at = Some(self.wake_at.map_or(at, |other| other.min(at)));
        false
    }

    /// A link has sent.
    pub fn sent(&mut self, id: LinksId, link: LinkKey, bytes: u64, now: Instant) {
        if let Some((pace, pace_use, Held { paced, pairs, all, tenant, turn })) = self.paced(id, link) {
            pace_use.sent(bytes);
            if let (None, Some((tenant, host_cap_bps))) = (turn.take(), tenant) {
                tenant.sent(bytes, host_cap_bps, now);
            }
            match pairs {
                Some(pairs) => pairs.sent_by(pace, paced.cap_bps, bytes, now),
                None => paced.bucket.sent(bytes, now),
            }
            if let Some(common_bps) = pace.common_bps() {
                all.sent(bytes, common_bps, now);
            }
        }
    }

    fn paced(&mut self, id: LinksId, link: LinkKey) -> Option<(&Pace, &PaceUse, Held<'_>)> {
        let LinkSet { pace, sends, paced, peers, .. } = self.sets.get_mut(&id)?;
        let (PaceHere { pace, pace_use, tenant }, peers) = (pace.as_ref()?, peers.as_ref()?);
        let Sending { of, turn, .. } = sends.get_mut(&link)?;
        let host = peers.hosts.get(usize::from(of.to))?;
        let pairs = link.track().map(|_| &*host.pairs);
        let tenant = tenant.as_deref().zip(pace.host_cap_bps);
        Some((pace, pace_use, Held { paced: paced.get_mut(of)?, pairs, all: &peers.all, tenant, turn }))
    }

    /// When something that was refused since this was last asked may go on.
    pub(in crate::transport) fn take_wake_at(&mut self) -> Option<Instant> {
        self.wake_at.take()
    }
}
