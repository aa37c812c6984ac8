//! The first state of a session: its tenant says hello, and is welcomed with what it maps.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{SocketError, process};
use mccs_ipc::protocol::{MAGIC, Response, ResponseEnvelope, SegmentLayout, VERSION};
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::ErrorClass;

use super::outlets::Outlets;

/// How long a new connection has to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Descriptors of a welcome: the segment's, the doorbell's, and the service's process.
const WELCOME_FDS: usize = 3;
const NO_HELLO: &str = "no hello has come within 5 s";
const NO_ROOM_TO_WELCOME: &str =
    "processes of this tenant have been sent as many descriptors as it may have on their way, and do not take them";

/// The result of a greeting.
pub(super) enum Greeted {
    /// There is no hello yet.
    NotYet,
    /// The welcome's descriptors have no room yet.
    NoRoomYet,
    Welcomed,
    /// The tenant has had its hello, and could not be welcomed.
    Unwelcomed(SocketError),
    /// It has gone, or is of another version.
    Gone,
    /// It says what no library does.
    Broken(SocketError),
}

/// Parts that a session shares with its tenant, sent with the welcome and kept for the service's next program.
pub(super) struct Segment {
    pub(super) fd: OwnedFd,
    pub(super) layout: SegmentLayout,
    pub(super) doorbell: Doorbell,
}

/// See the module's documentation.
pub(super) struct Greeting {
    deadline: Instant,
    /// How long the tenant is to poll.
    spin: Duration,
}

impl Greeting {
    /// Begins now.
    pub(super) fn new(spin: Duration) -> Self {
        Greeting { deadline: Instant::now() + HELLO_WITHIN, spin }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The service has stood still for so long.
    pub(super) fn put_off(&mut self, by: Duration) {
        self.deadline += by;
    }

    /// Why a session ends whose deadline has passed.
    pub(super) fn too_late(greeted: &Greeted) -> &'static str {
        if matches!(greeted, Greeted::NoRoomYet) { NO_ROOM_TO_WELCOME } else { NO_HELLO }
    }

    /// Hears the hello, and welcomes the tenant.
    pub(super) fn poll(&self, out: &mut Outlets, segment: &Segment) -> Greeted {
        let socket = out.answers.socket_mut();
        let Ok(charge) = socket.charge_sent(WELCOME_FDS) else { return Greeted::NoRoomYet };
        let mut fds = Vec::new();
        let hello = socket.recv_hello_keeping(&mut fds);
        fds.into_iter().for_each(|fd| out.session.tenant.closer.close_later(fd));
        match hello {
            Ok(None) => Greeted::NotYet,
            Ok(Some(hello)) if hello.magic == MAGIC && hello.version == VERSION => {
                socket.note_sent(charge);
                self.welcome(out, segment).map_or_else(Greeted::Unwelcomed, |()| Greeted::Welcomed)
            }
            Ok(Some(hello)) => {
                // The other side compares versions itself, and says what to do.
                tracing::debug!(session = out.session.id, version = hello.version, "another version");
                let _ = socket.send_hello(ErrorClass::InvalidUsage.to_wire());
                Greeted::Gone
            }
            Err(SocketError::Closed) => Greeted::Gone,
            Err(error) => Greeted::Broken(error),
        }
    }

    fn welcome(&self, out: &Outlets, segment: &Segment) -> Result<(), SocketError> {
        let response = Response::Welcome {
            session: out.session.id,
            tenant: out.session.tenant.name.clone(),
            layout: segment.layout,
            spin: self.spin,
            operations_in_flight_max: out.session.tenant.quota.operations_in_flight,
            root_address: out.proxies.root_address.to_string(),
        };
        let socket = out.answers.socket();
        socket.send_hello(0)?;
        let own = process(std::process::id());
        let fds = [segment.fd.as_fd(), segment.doorbell.as_fd()].into_iter().chain(own.as_ref().map(AsFd::as_fd));
        socket.send(&ResponseEnvelope { id: 0, response }, &fds.collect::<Vec<_>>())
    }
}
