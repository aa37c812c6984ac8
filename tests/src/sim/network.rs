//! Simulated connections of the exchange simulation, and what can break them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use mccs_exchange::protocol::LinkId;
use rand::Rng;
use rand::rngs::StdRng;

/// Number of a host.
pub type HostIndex = usize;

/// Time since the simulation began.
pub type Time = Duration;

/// A connection between two hosts. Both ends have a link of their own.
#[derive(Debug)]
pub struct Connection {
    /// Hosts, and the life in which each holds it.
    pub ends: [(HostIndex, u64); 2],
    /// Links by which the ends know it.
    pub links: [LinkId; 2],
    /// Which ends know that it is there: one accepts it later than the other.
    pub up: [bool; 2],
    /// When the last frame that was sent towards each end arrives: later ones arrive later.
    arrives_at: [Time; 2],
    on_the_way: [VecDeque<Vec<u8>>; 2],
}

/// All connections there ever were, and who cannot reach whom.
#[derive(Debug)]
pub struct Network {
    connections: Vec<Connection>,
    open: BTreeSet<usize>,
    by_link: BTreeMap<LinkId, (usize, usize)>,
    cut: BTreeSet<(HostIndex, HostIndex)>,
    delay: (Duration, Duration),
}

fn pair(a: HostIndex, b: HostIndex) -> (HostIndex, HostIndex) {
    (a.min(b), a.max(b))
}

impl Network {
    /// Nothing is connected, nothing is cut. `delay` is the least and the greatest one way.
    #[must_use]
    pub fn new(delay: (Duration, Duration)) -> Self {
        let (connections, open, by_link, cut) = Default::default();
        Network { connections, open, by_link, cut, delay }
    }

    /// Whether two hosts can reach each other.
    #[must_use]
    pub fn is_cut(&self, a: HostIndex, b: HostIndex) -> bool {
        self.cut.contains(&pair(a, b))
    }

    /// Cuts two hosts off from each other: frames on their way are lost, nobody is told.
    pub fn cut(&mut self, a: HostIndex, b: HostIndex) {
        self.cut.insert(pair(a, b));
        for connection in self.open() {
            if self.is_between(connection, a, b) {
                self.close(connection);
            }
        }
    }

    /// Ends all cuts.
    pub fn heal(&mut self) {
        self.cut.clear();
    }

    /// A delay of the network.
    pub fn some_delay(&self, rng: &mut StdRng) -> Duration {
        let (least, greatest) = self.delay;
        if least == greatest { least } else { rng.random_range(least..greatest) }
    }

    /// Connects two hosts. Each end knows of it after a time; frames arrive no earlier.
    pub fn connect(&mut self, ends: [(HostIndex, u64); 2], known_at: [Time; 2]) -> usize {
        let number = self.connections.len();
        let links = [LinkId(2 * number as u64), LinkId(2 * number as u64 + 1)];
        for (end, link) in links.into_iter().enumerate() {
            self.by_link.insert(link, (number, end));
        }
        let (up, on_the_way) = Default::default();
        self.connections.push(Connection { ends, links, up, arrives_at: known_at, on_the_way });
        self.open.insert(number);
        number
    }

    /// The connection with that number.
    #[must_use]
    pub fn connection(&self, number: usize) -> &Connection {
        &self.connections[number]
    }

    /// An end knows of a connection, unless it is gone. Returns whether it is there.
    pub fn accept(&mut self, number: usize, end: usize) -> bool {
        self.connections[number].up[end] = self.open.contains(&number);
        self.connections[number].up[end]
    }

    /// The connection that an end knows by that link, and which end that is.
    #[must_use]
    pub fn by_link(&self, link: LinkId) -> (usize, usize) {
        self.by_link[&link]
    }

    fn is_between(&self, number: usize, a: HostIndex, b: HostIndex) -> bool {
        let [(low, _), (high, _)] = self.connections[number].ends;
        pair(low, high) == pair(a, b)
    }

    /// Whether there is an open connection between two hosts.
    #[must_use]
    pub fn are_connected(&self, a: HostIndex, b: HostIndex) -> bool {
        self.open.iter().any(|number| self.is_between(*number, a, b))
    }

    /// Closes a connection: what is on its way is lost.
    pub fn close(&mut self, number: usize) {
        self.open.remove(&number);
        self.connections[number].on_the_way = Default::default();
    }

    /// Takes a frame towards an end; says when it arrives, unless the connection is gone.
    pub fn send(&mut self, number: usize, to: usize, frame: Vec<u8>, now: Time, rng: &mut StdRng) -> Option<Time> {
        let delay = self.some_delay(rng);
        let connection = self.open.contains(&number).then(|| &mut self.connections[number])?;
        let at = (now + delay).max(connection.arrives_at[to]);
        connection.arrives_at[to] = at;
        connection.on_the_way[to].push_back(frame);
        Some(at)
    }

    /// The frame that arrives at an end now, if it was not lost.
    pub fn arrive(&mut self, number: usize, to: usize) -> Option<Vec<u8>> {
        self.connections[number].on_the_way[to].pop_front()
    }

    /// The numbers of all open connections.
    #[must_use]
    pub fn open(&self) -> Vec<usize> {
        self.open.iter().copied().collect()
    }
}
