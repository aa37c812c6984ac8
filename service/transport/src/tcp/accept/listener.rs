//! TCP listeners: which flows are accepted, and connections that are for one of them.
//!
//! ```text
//! taken --hello--> half open --listener and cookie are right--> arrived --accepted here, all sockets there--> the flow's
//!     \              |  garbage, wrong cookie, too slow, too many    |  the peer gave up
//!      \-------------+--> closed                                     +--> closed
//! ```

use std::collections::{BTreeMap, BTreeSet};

use mccs_ipc::types::Handle;

use crate::tcp::accept::port::refuse;
use crate::tcp::socket::Socket;
use crate::tcp::wire::{Cookie, Hello, Verdict, same_cookie};
use crate::{FLOWS_MAX, FLOWS_PER_LISTENER_MAX, FlowId};

/// A socket that has come, its watch, and how manieth of its connection it is.
pub(in crate::tcp) type Arrived = (Socket, Handle, u32);

/// Sockets of a flow that have come.
#[derive(Debug)]
pub(in crate::tcp) struct Arrivals {
    hello: Hello,
    sockets: Vec<Option<Arrived>>,
}

impl Arrivals {
    fn new(hello: Hello) -> Self {
        Arrivals { hello, sockets: (0..hello.connections).map(|_| None).collect() }
    }

    fn are_all(&self) -> bool {
        self.sockets.iter().all(Option::is_some)
    }

    /// Hello of one of them; all are of one flow.
    pub(in crate::tcp) fn hello(&self) -> Hello {
        self.hello
    }

    pub(in crate::tcp) fn into_sockets(self) -> impl Iterator<Item = Arrived> {
        self.sockets.into_iter().flatten()
    }
}

/// State of a flow number that is not connected yet.
#[derive(Debug, Default)]
struct Place {
    /// Accepted here.
    expected: Option<FlowId>,
    arrivals: Option<Arrivals>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Listener {
    cookie: Cookie,
    /// Numbers that one side waits for; at most [`FLOWS_MAX`].
    places: BTreeMap<u64, Place>,
    /// Numbers that were accepted and connected, or given up; with those above at most [`FLOWS_PER_LISTENER_MAX`].
    taken: BTreeSet<u64>,
    /// Lower numbers are over.
    first: u64,
}

/// The result of a connection with a right cookie.
#[derive(Debug)]
pub(in crate::tcp) enum Placed {
    /// Others are missing, or it is not accepted yet.
    Waiting,
    /// All are there.
    Complete(FlowId, Arrivals),
}

impl Listener {
    pub(in crate::tcp) fn new(cookie: Cookie) -> Self {
        Listener { cookie, places: BTreeMap::new(), taken: BTreeSet::new(), first: 0 }
    }

    fn is_taken(&self, number: u64) -> bool {
        number < self.first || self.taken.contains(&number)
    }

    fn has_room(&self) -> bool {
        self.places.len() < FLOWS_MAX as usize && self.places.len() + self.taken.len() < FLOWS_PER_LISTENER_MAX
    }

    /// A connection has said what it is for. Watches of sockets that its coming makes useless go to `given_up`.
    ///
    /// # Errors
    /// It is refused and closed; says why.
    pub(in crate::tcp) fn place(
        &mut self,
        hello: &Hello,
        socket: Socket,
        watch: Handle,
        given_up: &mut Vec<Handle>,
    ) -> Result<Placed, &'static str> {
        if !same_cookie(&hello.cookie, &self.cookie) {
            return Err("it does not know the listener's secret");
        }
        if self.is_taken(hello.flow) {
            refuse(&socket, Verdict::Taken);
            return Err("its flow was connected before");
        }
        if !self.has_room() && !self.places.contains_key(&hello.flow) {
            refuse(&socket, Verdict::TooMany);
            return Err("its listener has as many flows as it may have");
        }
        let place = self.places.entry(hello.flow).or_default();
        // Another attempt means that the peer gave the first one up.
        if let Some(old) = place.arrivals.take_if(|arrivals| !arrivals.hello.is_of_same_flow(hello)) {
            given_up.extend(old.into_sockets().map(|(_, watch, _)| watch));
        }
        let arrivals = place.arrivals.get_or_insert_with(|| Arrivals::new(*hello));
        match arrivals.sockets.get_mut(usize::from(hello.connection)) {
            // A later socket of the connection means that an earlier one's path is dead.
            Some(slot) if slot.as_ref().is_none_or(|(_, _, earlier)| *earlier < hello.resumption) => {
                let old = slot.replace((socket, watch, hello.resumption));
                given_up.extend(old.map(|(_, watch, _)| watch));
            }
            _ => {
                refuse(&socket, Verdict::Taken);
                return Err("this connection of its flow is there already");
            }
        }
        Ok(self.complete(hello.flow))
    }

    /// The caller accepts a flow number; `Err` if it was accepted before, or there are too many.
    pub(in crate::tcp) fn expect(&mut self, number: u64, flow: FlowId) -> Result<Placed, &'static str> {
        let is_expected = self.places.get(&number).is_some_and(|place| place.expected.is_some());
        if is_expected || self.is_taken(number) {
            return Err("was accepted before; each is accepted once");
        }
        if !self.has_room() && !self.places.contains_key(&number) {
            return Err("is one too many for its listener");
        }
        self.places.entry(number).or_default().expected = Some(flow);
        Ok(self.complete(number))
    }

    fn complete(&mut self, number: u64) -> Placed {
        let is_complete = |place: &Place| place.arrivals.as_ref().is_some_and(Arrivals::are_all);
        if !self.places.get(&number).is_some_and(|place| place.expected.is_some() && is_complete(place)) {
            return Placed::Waiting;
        }
        match self.places.remove(&number) {
            Some(Place { expected: Some(flow), arrivals: Some(arrivals) }) => {
                self.taken.insert(number);
                Placed::Complete(flow, arrivals)
            }
            _ => Placed::Waiting,
        }
    }

    /// An accepted flow is no longer waited for. Returns the watches of sockets that had come.
    pub(in crate::tcp) fn give_up(&mut self, number: u64) -> Vec<Handle> {
        if number >= self.first {
            self.taken.insert(number);
        }
        self.places.remove(&number).map(Place::into_watches).unwrap_or_default()
    }

    /// A socket that had come has ended: the peer gave up, so its sisters are useless too. Returns their watches.
    pub(in crate::tcp) fn lost_arrival(&mut self, number: u64) -> Vec<Handle> {
        let Some(place) = self.places.remove(&number) else { return Vec::new() };
        if place.expected.is_some() {
            self.places.insert(number, Place { expected: place.expected, arrivals: None });
        }
        place.into_watches()
    }

    /// Numbers below are over. Returns what they leave, as [`Listener::into_waiting`] does.
    pub(in crate::tcp) fn end_numbers(&mut self, below: u64) -> Waiting {
        self.first = self.first.max(below);
        self.taken = self.taken.split_off(&self.first);
        let left = self.places.split_off(&self.first);
        waiting(std::mem::replace(&mut self.places, left))
    }

    /// The rest when the listener closes.
    pub(in crate::tcp) fn into_waiting(self) -> Waiting {
        waiting(self.places)
    }
}

/// Connections that wait in vain at places that are over.
pub(in crate::tcp) struct Waiting {
    /// Watches of sockets that have come.
    pub(in crate::tcp) watches: Vec<Handle>,
    pub(in crate::tcp) flows: Vec<FlowId>,
}

fn waiting(places: BTreeMap<u64, Place>) -> Waiting {
    let (mut watches, mut flows) = (Vec::new(), Vec::new());
    for place in places.into_values() {
        flows.extend(place.expected);
        watches.extend(place.into_watches());
    }
    Waiting { watches, flows }
}

impl Place {
    fn into_watches(self) -> Vec<Handle> {
        self.arrivals.into_iter().flat_map(Arrivals::into_sockets).map(|(_, watch, _)| watch).collect()
    }
}
