//! Modelled messages between hosts besides communicators: in order, none twice, none lost in
//! between. Whoever meets a host tells it something in a few parts, and each host hears the parts
//! in order, none twice, and none after one that it has missed.

use std::collections::{BTreeMap, BTreeSet};

use mccs_exchange::protocol::{ControlBody, Event, Name, Request};

use super::network::HostIndex;
use super::world::World;

/// Parts of what is told.
const PARTS: u64 = 3;

/// Messages that were told and heard.
#[derive(Debug, Default)]
pub(super) struct Talks {
    begun: u64,
    /// By host and whom it hears: what it has heard last, and which part of it.
    heard: BTreeMap<(HostIndex, Name), (u64, u64)>,
    /// Messages whose first part was heard.
    known: BTreeSet<u64>,
}

impl World {
    /// Takes what is no proxy engine's business.
    pub(super) fn talk(&mut self, host: HostIndex, event: Event) -> Option<Event> {
        match event {
            Event::Met { host: peer } => {
                self.talks.begun += 1;
                for part in 0..PARTS * u64::from(self.manners.tells) {
                    let numbers = [self.talks.begun, part].map(u64::to_le_bytes);
                    let body = ControlBody::new(numbers.as_flattened()).expect("a short body");
                    self.ask_at(self.now, host, Request::Tell { to: peer.clone(), body });
                }
            }
            Event::Lost { .. } | Event::Linked { .. } => {}
            Event::Told { from, body } => {
                let (numbers, _) = body.bytes().as_chunks();
                let (talk, part) = (u64::from_le_bytes(numbers[0]), u64::from_le_bytes(numbers[1]));
                let before = self.talks.heard.insert((host, from.clone()), (talk, part));
                let follows = part > 0 && before == Some((talk, part - 1));
                if !follows && (part > 0 || !self.talks.known.insert(talk)) {
                    self.ledger
                        .complain(format!("host {host} heard part {part} of {talk} from {from} after {before:?}"));
                }
            }
            event => return Some(event),
        }
        None
    }
}
