//! RDMA devices of a transport: ports, their completion queues, and kernel calls that take long.
//!
//! [`Devices`] owns the ports that a transport uses, and the names by which completions find their queue pairs. A port is known by its
//! place, which stays when its device goes and comes back.

pub(in crate::rdma) mod blocking_worker;
mod next_port;
pub(in crate::rdma) mod ports;
pub(in crate::rdma) mod queues;
pub(in crate::rdma) mod trial;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_runtime::Share;
use nix::errno::Errno;

use self::blocking_worker::BlockingWorker;
use self::ports::{NoRdma, Opened, Port};
use self::queues::Queues;
use crate::rdma::connection::ended::Ended;
use crate::rdma::connection::{Connection, Making, Owner, Owners, Shape};
use crate::rdma::data_path::flusher::Flusher;
use crate::rdma::data_path::memory_registration::PORTS_MAX;
use crate::rdma::flow::Half;
use crate::rdma::options::RdmaOptions;
use crate::rdma::verbs::{AsyncEvent, Driver, VerbsError};
use crate::{Fault, FlowOptions, TransportError};

/// How often devices are looked for: it costs tens of system calls, and is done by every engine.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// How often while a port is down.
const LOOK_EVERY_WHILE_DOWN: Duration = Duration::from_secs(5);

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Devices {
    driver: Arc<dyn Driver>,
    options: RdmaOptions,
    ports: Vec<Port>,
    /// Ports that are not used, in words.
    left: Vec<String>,
    owners: Owners,
    ending: BlockingWorker<Ended>,
    /// Makes first packet numbers that differ from those of earlier connections.
    random: u64,
    look_at: Option<Instant>,
}

impl Devices {
    /// The ports that the options choose.
    ///
    /// # Errors
    /// No port can be used, or the kernel has no random number.
    pub(in crate::rdma) fn find(driver: &Arc<dyn Driver>, options: RdmaOptions) -> Result<Self, NoRdma> {
        let ports::Found { mut ports, left } = ports::find(driver, &options)?;
        ports.truncate(PORTS_MAX);
        let random = random().map_err(|errno| VerbsError { call: "/dev/urandom", errno })?;
        let (owners, ending) = (Owners::new(u32::MAX >> 1), BlockingWorker::new("mccs-disconnect")?);
        Ok(Devices { driver: Arc::clone(driver), options, ports, left, owners, ending, random, look_at: None })
    }

    pub(in crate::rdma) fn options(&self) -> &RdmaOptions {
        &self.options
    }

    /// Ports that could be used and are not, in words.
    pub(in crate::rdma) fn left(&self) -> &[String] {
        &self.left
    }

    pub(in crate::rdma) fn ports(&self) -> &[Port] {
        &self.ports
    }

    pub(in crate::rdma) fn len(&self) -> usize {
        self.ports.len()
    }

    pub(in crate::rdma) fn port(&self, place: usize) -> Option<&Port> {
        self.ports.get(place)
    }

    pub(in crate::rdma) fn port_mut(&mut self, place: usize) -> Option<&mut Port> {
        self.ports.get_mut(place)
    }

    /// The port for a flow's turn, from its home on, and how many rounds were made before: the receiver's turn.
    pub(in crate::rdma) fn port_of_turn(&self, home: usize, turn: u32) -> (usize, u32) {
        next_port::port_of_turn(&self.ports, home, turn)
    }

    /// Whether a connection's port is the one to prefer now: from home on, the first that is up.
    pub(in crate::rdma) fn is_home(&self, home: usize, port: usize) -> bool {
        self.port_of_turn(home, 0).0 == port
    }

    /// Completion queues of a port whose device is there.
    pub(in crate::rdma) fn queues(&mut self, place: usize) -> Option<&mut Queues> {
        self.ports.get_mut(place).and_then(Port::queues)
    }

    /// Owner of the queue pair with a name.
    pub(in crate::rdma) fn owner(&self, name: Handle) -> Option<Owner> {
        self.owners.get(name).copied()
    }

    /// New queue pairs for a flow.
    ///
    /// # Safety
    /// The `ring` (address and length) stays accessible until the connection is dropped.
    pub(in crate::rdma) unsafe fn make_connection(
        &mut self,
        flow: Handle,
        place: usize,
        shape: Shape,
        ring_address: u64,
        ring_bytes: u64,
    ) -> Result<Connection, Fault> {
        let Devices { ports, owners, options, random, .. } = self;
        // SAFETY: the caller's promise, passed on.
        unsafe {
            Connection::new(Making { ports, owners, options, random }, flow, place, shape, ring_address, ring_bytes)
        }
    }

    /// Destroys a connection's queue pairs: after it nothing reads or writes for them.
    pub(in crate::rdma) fn end_connection(&mut self, connection: Connection) {
        connection.end(&mut self.ports, &mut self.owners);
    }

    /// The same aside, some time later, unless the connection's device has gone or another thread has its queue pairs. Nothing is under way on it;
    /// `half` has the memory that it knows.
    pub(in crate::rdma) fn end_connection_aside(&mut self, share: Share, connection: Connection, half: Half) {
        let opened = self.ports.get(connection.port).and_then(|port| port.opened.as_ref());
        match opened.filter(|_| !connection.is_connecting()) {
            Some(Opened { pd, .. }) => {
                connection.disown(&mut self.owners);
                self.ending.begin(Ended::new(share, connection, half, pd));
            }
            None => self.end_connection(connection),
        }
    }

    /// Takes back what those have held that have ended aside.
    pub(in crate::rdma) fn take_ended(&mut self) {
        while let Some(ended) = self.ending.take() {
            ended.release(&mut self.ports);
        }
    }

    #[cfg(test)]
    pub(in crate::rdma) fn end_in_place(&mut self, is_in_place: bool) {
        self.ending.do_in_place(is_in_place);
    }

    /// Begins to read a byte of a GPU's memory on a port, so that what was written before is visible. Returns the read's number, unless
    /// too many are under way.
    pub(in crate::rdma) fn flush(&mut self, place: usize, address: u64, rkey: u32) -> Result<Option<u64>, Fault> {
        let port = self.ports.get_mut(place).ok_or(Fault::NoPort)?;
        if port.opened.as_ref().is_some_and(|opened| opened.flusher.is_none()) {
            let made = Flusher::new(place, port, &mut self.owners, &self.options)?;
            if let Some(opened) = &mut port.opened {
                opened.flusher = Some(made);
            }
        }
        let flusher = port.opened.as_mut().and_then(|opened| opened.flusher.as_mut()).ok_or(Fault::NoPort)?;
        let read = flusher.read(address, rkey)?;
        port.flushes = port.flushes.max(read.unwrap_or(0));
        Ok(read)
    }

    /// Whether a flush's read is done; `None` if it never will be.
    pub(in crate::rdma) fn is_flushed(&self, place: usize, read: u64) -> Option<bool> {
        self.ports.get(place)?.opened.as_ref()?.flusher.as_ref()?.is_done(read)
    }

    /// A read of a port's flusher has ended. A flusher that fails is no more.
    pub(in crate::rdma) fn flushed(&mut self, place: usize, is_good: bool) {
        let opened = self.ports.get_mut(place).and_then(|port| port.opened.as_mut());
        match opened.and_then(|opened| opened.flusher.as_mut()) {
            Some(flusher) if is_good => flusher.completed(),
            _ => self.end_flusher(place),
        }
    }

    /// Ends a port's flusher: unfinished flushes fail, the next one makes another. A device that is left to itself would try a read on a port that is
    /// down for as long as a write.
    pub(in crate::rdma) fn end_flusher(&mut self, place: usize) {
        let opened = self.ports.get_mut(place).and_then(|port| port.opened.as_mut());
        if let Some(Opened { flusher, queues, .. }) = opened
            && let Some(flusher) = flusher.take()
        {
            flusher.end(queues, &mut self.owners);
        }
    }

    /// The next event of a port's device.
    pub(in crate::rdma) fn next_event(&self, place: usize) -> Option<AsyncEvent> {
        self.ports.get(place)?.opened.as_ref()?.context.next_event()
    }

    /// Asks a port's device for its state. Returns whether the port's address is another one.
    pub(in crate::rdma) fn refresh(&mut self, place: usize) -> Result<bool, VerbsError> {
        self.ports.get_mut(place).map_or(Ok(false), |port| port.refresh(&self.options))
    }

    /// A port's device cannot be used any more: what the service has of it is taken out, to be given back.
    pub(in crate::rdma) fn close(&mut self, place: usize) -> Option<Opened> {
        self.end_flusher(place);
        self.ports.get_mut(place)?.opened.take()
    }

    /// Opens a port's device anew. One that does not work yet, or has no address yet, is `None`.
    pub(in crate::rdma) fn open_again(&self, place: usize) -> Option<Port> {
        let port = self.ports.get(place)?;
        let mut made = ports::open_port(&self.driver, &port.device, port.number, &self.options).ok()?.ok()?;
        made.flushes = port.flushes;
        Some(made)
    }

    /// A port's device is back.
    pub(in crate::rdma) fn replace(&mut self, place: usize, made: Port) {
        if let Some(port) = self.ports.get_mut(place) {
            *port = made;
        }
    }

    /// When devices are to be looked for.
    pub(in crate::rdma) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Plans the next look for devices.
    pub(in crate::rdma) fn plan_look(&mut self, now: Instant) {
        let are_up = self.ports.iter().all(|port| port.is_up);
        let latest = now + if are_up { LOOK_EVERY } else { LOOK_EVERY_WHILE_DOWN };
        self.look_at = Some(self.look_at.map_or(latest, |at| at.min(latest)));
    }

    /// Names of all devices of this host, if it is time to look.
    pub(in crate::rdma) fn look(&mut self, now: Instant) -> Option<Vec<String>> {
        if self.look_at.is_none_or(|at| at > now) {
            return None;
        }
        self.look_at = None;
        // A device that cannot be asked is asked again later.
        self.driver.devices().ok()
    }

    /// The place of the port that a sender prefers: its path's or home's device, or its engine's turn.
    ///
    /// # Errors
    /// There is no such port.
    pub(in crate::rdma) fn home_of(&self, options: &FlowOptions) -> Result<usize, TransportError> {
        match options.device.as_ref().or(options.home.as_ref()) {
            Some(device) => self.named(device),
            None => Ok(self.options.turn % self.ports.len().max(1)),
        }
    }

    /// Longest message that all ports take.
    pub(in crate::rdma) fn message_bytes(&self) -> u32 {
        self.ports.iter().map(|port| port.attributes.message_bytes).min().unwrap_or(u32::MAX)
    }

    /// The place of the port that a path names.
    ///
    /// # Errors
    /// There is no such port.
    pub(in crate::rdma) fn named(&self, device: &mccs_config::service::Device) -> Result<usize, TransportError> {
        ports::named(&self.ports, device)
    }
}

fn random() -> Result<u64, Errno> {
    let mut seed = [0; 8];
    let file = nix::fcntl::open("/dev/urandom", nix::fcntl::OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty())?;
    nix::unistd::read(&file, &mut seed)?;
    Ok(u64::from_le_bytes(seed))
}
