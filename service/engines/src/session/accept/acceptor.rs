//! Accepts tenants' connections: users, limits of sessions, drain, turns of who connects without end; makes a session of each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_handover::Phase;
use mccs_ipc::handshake::{BACKLOG, Listener, PeerCredentials, Socket, SocketError};
use mccs_ipc::loan;
use mccs_ipc::types::ErrorClass;
use mccs_runtime::{Context, Engine, Progress};
use mccs_tenants::{Charge, FdCloser, Tenant};

use super::admission::Admission;
use super::arrivals::{Arrivals, CONNECTS_PER_S};
use super::factory::{SessionFactory, descriptor_limit, refuse};
use crate::session::STOPPING;
use crate::session::descriptors::{NO_DESCRIPTOR, duplicate};

/// How long to wait when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How often it is looked whether something is left of a tenant that is taken away.
const GONE_LOOK: Duration = Duration::from_millis(5);

/// See the module's documentation.
pub struct Acceptor {
    listener: Listener,
    name: String,
    /// Tenants of this socket, and their connections: the first that admits a user is its tenant.
    tenants: Vec<(Admission, Arrivals<(Socket, PeerCredentials)>)>,
    factory: Arc<SessionFactory>,
    /// Closes sockets of those who are no tenants.
    strangers: FdCloser<Charge>,
    /// Whether nobody is let in for now, for want of descriptors: who comes waits outside. Nobody's own doing stops others.
    is_paused: bool,
    /// Given up for a moment when the process is out of descriptors, to tell who comes so.
    spare: Option<OwnedFd>,
    /// The last attempt to hand the service over in which it has stood still.
    handed_in: u64,
    /// Callback once nothing is left of tenants that are taken away.
    gone: Option<Gone>,
}

/// See [`Acceptor::when_gone`].
type Gone = Box<dyn FnOnce() + Send>;

/// Tells a connection that its tenant is taken away.
fn turn_out(tenant: &Tenant, socket: Socket) {
    refuse(&socket, ErrorClass::InvalidUsage, &tenant.removal());
    tenant.closer.close_connection(socket);
}

/// Tells a connection why it waits for nothing.
fn end(tenant: &Tenant, socket: Socket) {
    if tenant.is_removed() {
        return turn_out(tenant, socket);
    }
    refuse(&socket, ErrorClass::System, STOPPING);
    tenant.closer.close_connection(socket);
}

fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

impl Acceptor {
    /// Accepts for these tenants.
    #[must_use]
    pub fn new(listener: Listener, name: String, admissions: Vec<Admission>, factory: Arc<SessionFactory>) -> Self {
        let tenants = admissions.into_iter().map(|admission| (admission, Arrivals::default())).collect();
        let (strangers, spare) = (FdCloser::default(), spare());
        Acceptor { listener, name, tenants, factory, strangers, is_paused: false, spare, handed_in: 0, gone: None }
    }

    /// The same for tenants that may be [taken away](mccs_tenants::Tenant::remove): it ends then, when nothing is left of them.
    #[must_use]
    pub fn when_gone(mut self, gone: impl FnOnce() + Send + 'static) -> Self {
        self.gone = Some(Box::new(gone));
        self
    }

    /// Whether all its tenants are taken away.
    fn is_taken_away(&self) -> bool {
        self.tenants.iter().all(|(admission, _)| admission.tenant.is_removed())
    }

    /// Tells whoever waits, or comes, that its tenant is taken away. Ends when nothing of it is left: who connects without end keeps
    /// neither this from its end nor other engines from their turns.
    fn take_away(&mut self, now: Instant) -> Progress {
        for (admission, arrivals) in &mut self.tenants {
            for (socket, _) in arrivals.take_out(|_| true) {
                turn_out(&admission.tenant, socket);
            }
        }
        let is_left = |(admission, _): &(Admission, _)| admission.tenant.has_some() || !admission.queues.are_empty();
        if !self.tenants.iter().any(is_left) {
            self.gone.take().into_iter().for_each(|gone| gone());
            return Progress::Done;
        }
        // Descriptors are watched only where the next who comes may be told.
        self.is_paused = true;
        if let Some((admission, arrivals)) = self.tenants.first_mut().filter(|(_, arrivals)| arrivals.may_refuse(now)) {
            match self.listener.accept() {
                Ok(Some((socket, _))) => {
                    arrivals.note_refusal(now);
                    turn_out(&admission.tenant, socket);
                    self.is_paused = false;
                    return Progress::Busy;
                }
                Ok(None) => self.is_paused = false,
                // There is no descriptor: the next look tries again.
                Err(_) => {}
            }
        }
        Progress::Idle { wake_at: Some(now + GONE_LOOK) }
    }

    /// Lets nobody in, and hands in who waits.
    fn stand_still(&mut self) -> Progress {
        let moment = self.factory.handover.moment();
        if moment.phase == Phase::Quieting && self.handed_in != moment.attempt {
            self.handed_in = moment.attempt;
            let waiting = self.tenants.iter().flat_map(|(admission, arrivals)| {
                arrivals.waiting().map(|(socket, _)| Some((admission.tenant.name.clone(), duplicate(socket).ok()?)))
            });
            match waiting.collect::<Option<Vec<_>>>() {
                Some(waiting) => self.factory.handover.hand_in_connections(moment.attempt, waiting),
                None => self.factory.handover.object(moment.attempt, NO_DESCRIPTOR.to_owned()),
            }
        }
        Progress::IDLE
    }

    /// Takes a connection, or has it wait for its turn.
    fn arrive(&mut self, socket: Socket, peer: PeerCredentials, now: Instant) {
        let Some((admission, arrivals)) = self.tenants.iter_mut().find(|(admission, _)| admission.admits(peer)) else {
            self.factory.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
            let reason = "is no tenant of this socket, by user or cgroup; the operator's service.toml, or `mccsctl tenant add`, says who is";
            refuse(&socket, ErrorClass::InvalidUsage, &format!("user {} {reason}", peer.uid));
            self.strangers.close_connection(socket);
            return;
        };
        let closer = &admission.tenant.closer;
        if arrivals.is_full() {
            let gone = arrivals.take_out(|(socket, _)| socket.is_closed());
            gone.into_iter().for_each(|(socket, _)| closer.close_connection(socket));
        }
        if arrivals.is_full() {
            let reason = format!("this tenant connects more than {CONNECTS_PER_S} times a second: try again");
            self.factory.cannot(&reason, peer);
            refuse(&socket, ErrorClass::InvalidUsage, &reason);
            closer.close_connection(socket);
        } else if let Some(connection) = arrivals.arrive((socket, peer), now) {
            self.factory.admit(connection.0, connection.1, admission, now);
        }
    }

    /// Takes those whose turn has come. Returns whether there was one.
    fn take_waiting(&mut self, now: Instant) -> bool {
        let mut any = false;
        for (admission, arrivals) in &mut self.tenants {
            if let Some(connection) = arrivals.take(now) {
                self.factory.admit(connection.0, connection.1, admission, now);
                any = true;
            }
        }
        any
    }

    /// When the turn of one that waits comes.
    fn next_turn(&self) -> Option<Instant> {
        self.tenants.iter().filter_map(|(_, arrivals)| arrivals.next_at()).min()
    }
}

impl Acceptor {
    /// Tells whoever waits that the process has no descriptor for it, with one that was kept for this. The next poll looks for another.
    fn turn_away(&mut self, error: &SocketError) {
        drop(self.spare.take());
        if let Ok(Some((socket, peer))) = self.listener.accept() {
            let message = format!("the service cannot accept a connection: {error}; {}", descriptor_limit());
            self.factory.cannot(&message, peer);
            refuse(&socket, ErrorClass::System, &message);
            match self.tenants.iter().find(|(admission, _)| admission.admits(peer)) {
                Some((admission, _)) => admission.tenant.closer.close_connection(socket),
                None => self.strangers.close_connection(socket),
            }
        }
    }
}

impl Engine for Acceptor {
    fn name(&self) -> String {
        format!("acceptor {}", self.name)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.listener.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if !self.factory.handover.is_running() {
            return self.stand_still();
        }
        if self.is_taken_away() {
            return self.take_away(cx.now);
        }
        self.is_paused = false;
        self.spare = self.spare.take().or_else(spare);
        if self.take_waiting(cx.now) {
            return Progress::Busy;
        }
        match self.listener.accept() {
            Ok(Some((socket, peer))) => {
                self.arrive(socket, peer, cx.now);
                Progress::Busy
            }
            Ok(None) => Progress::Idle { wake_at: self.next_turn() },
            Err(error) => {
                self.turn_away(&error);
                self.is_paused = true;
                Progress::Idle { wake_at: Some(cx.now + ACCEPT_AGAIN_AFTER) }
            }
        }
    }

    fn ignores_descriptors(&self) -> bool {
        self.is_paused || !self.factory.handover.is_running()
    }
}

/// Whoever waits, inside or outside, is told that the service ends.
impl Drop for Acceptor {
    fn drop(&mut self) {
        if loan::is_on() {
            return;
        }
        for (admission, arrivals) in &mut self.tenants {
            arrivals.take_out(|_| true).into_iter().for_each(|(socket, _)| end(&admission.tenant, socket));
        }
        // Connections without end do not keep the service from its end. The kernel keeps one more than it is asked for.
        let outside = std::iter::from_fn(|| self.listener.accept().ok().flatten()).take(BACKLOG as usize + 1);
        for (socket, peer) in outside {
            match self.tenants.iter().find(|(admission, _)| admission.admits(peer)) {
                Some((admission, _)) => end(&admission.tenant, socket),
                None => {
                    refuse(&socket, ErrorClass::System, STOPPING);
                    self.strangers.close_connection(socket);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::protocol::{Response, ResponseEnvelope};
    use mccs_runtime::{TenantQueues, WakerSlot};
    use mccs_tenants::testing::{connect, held_back, shut_gate, unused};
    use mccs_tenants::{Quota, Resource};
    use nix::unistd::getuid;

    use super::*;

    #[test]
    fn a_process_is_told_by_its_cgroup() {
        let tenant = Tenant::new("a".into(), Quota::least());
        let queues = TenantQueues::new(1, WakerSlot::default());
        let own = std::fs::read_to_string("/proc/self/cgroup").expect("cgroups");
        let own = own.lines().last().and_then(|line| line.rsplit('/').next()).expect("a path").to_owned();
        let peer =
            mccs_ipc::handshake::PeerCredentials { pid: std::process::id() as i32, uid: getuid().as_raw(), gid: 0 };
        let queues = SessionFactory::for_tests(&queues).proxies.open_queues(tenant.share);
        let of = |cgroup: &str| Admission {
            tenant: Arc::clone(&tenant),
            uids: None,
            cgroup: Some(cgroup.into()),
            queues: queues.clone(),
        };
        assert!(of(&own).admits(peer) && !of("job_47").admits(peer));
        let unseen = mccs_ipc::handshake::PeerCredentials { pid: 0, ..peer };
        assert!(!of(&own).admits(unseen), "a process that the service does not see");
    }

    /// A flood neither takes a poll without end, nor the thread, nor keeps what is taken away from its end.
    #[test]
    fn who_connects_without_end_does_not_keep_a_tenant_that_is_taken_away() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = Listener::bind(&path).expect("bound");
        let tenant = Tenant::new("a".into(), Quota::least());
        let queues = TenantQueues::new(1, WakerSlot::default());
        let factory = SessionFactory::for_tests(&queues);
        let queues = factory.proxies.open_queues(tenant.share);
        let admission = Admission { tenant: Arc::clone(&tenant), uids: None, cgroup: None, queues };
        let (has_gone, gone) = std::sync::mpsc::channel();
        let mut acceptor = Acceptor::new(listener, "s".into(), vec![admission], Arc::new(factory))
            .when_gone(move || has_gone.send(()).expect("heard"));
        let left = tenant.charge(Resource::Sessions, 1).expect("within its quota");
        tenant.remove();
        let cx = Context::new(Instant::now(), 64);
        let mut poll_among = |connections: usize| {
            let come: Vec<_> = (0..connections).map(|_| Socket::from_fd(connect(&path))).collect();
            let progress = acceptor.poll(&cx);
            (come, progress, acceptor.ignores_descriptors())
        };
        let (come, progress, ignores) = poll_among(10);
        assert!(matches!(progress, Progress::Busy) && !ignores, "one, and others have their turns");
        come[0].recv_hello().expect("not closed").expect("a hello");
        let (envelope, _) = come[0].recv::<ResponseEnvelope>().expect("not closed").expect("a refusal");
        let Response::Error { message, .. } = envelope.response else { panic!("{envelope:?}") };
        assert!(message.contains("has taken tenant a away"), "{message}");
        come[1].set_nonblocking(true).expect("set");
        assert!(!come[1].is_closed(), "it waits outside");
        let refused = (0..1000).take_while(|_| matches!(poll_among(1).1, Progress::Busy)).count();
        assert!((100..999).contains(&refused), "{refused} at once, and no more for now");
        let (_, progress, ignores) = poll_among(1);
        assert!(matches!(progress, Progress::Idle { wake_at: Some(_) }) && ignores, "it sleeps beside who waits");
        gone.try_recv().expect_err("something is left");
        drop(left);
        assert!(matches!(poll_among(1).1, Progress::Done), "whoever waits");
        gone.try_recv().expect("nothing is left");
    }

    /// A client for which the acceptor has no descriptor is told so, and its own party's closer closes the socket: the acceptor waits
    /// for nothing.
    #[test]
    fn who_is_turned_away_is_closed_by_its_own_closer() {
        for is_tenant in [true, false] {
            let gate = shut_gate();
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("s");
            let listener = Listener::bind(&path).expect("bound");
            let (own, other) = (held_back(), unused());
            let (of_tenant, of_strangers) = if is_tenant { (own, other) } else { (other, own) };
            let mut tenant = Tenant::new("a".into(), Quota::least());
            Arc::get_mut(&mut tenant).expect("nobody else has it").closer = of_tenant;
            let queues = TenantQueues::new(1, WakerSlot::default());
            let factory = SessionFactory::for_tests(&queues);
            let uid = getuid().as_raw();
            let admission = Admission {
                queues: factory.proxies.open_queues(tenant.share),
                uids: Some(vec![if is_tenant { uid } else { uid + 1 }]),
                cgroup: None,
                tenant,
            };
            let mut acceptor = Acceptor::new(listener, "s".into(), vec![admission], Arc::new(factory));
            acceptor.strangers = of_strangers;
            let socket = Socket::from_fd(connect(&path));
            acceptor.turn_away(&SocketError::TooManyDescriptors);
            socket.recv_hello().expect("not closed").expect("a hello");
            let (envelope, _) = socket.recv::<ResponseEnvelope>().expect("not closed").expect("a refusal");
            let Response::Error { class, message } = envelope.response else { panic!("{envelope:?}") };
            assert!(class == ErrorClass::System && message.contains("RLIMIT_NOFILE"), "{class:?}: {message}");
            socket.set_nonblocking(true).expect("set");
            assert!(!socket.is_closed(), "it was not closed on the acceptor's own thread");
            drop(gate);
            socket.set_nonblocking(false).expect("set");
            assert!(matches!(socket.recv::<ResponseEnvelope>(), Err(SocketError::Closed)), "closed behind the gate");
        }
    }
}
