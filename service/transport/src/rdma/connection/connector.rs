//! Connects queue pairs (INIT, RTR, RTS) on a thread of its own (`blocking_worker.rs`).
//!
//! To connect a queue pair the kernel looks for the peer's address, a second where nobody answers. The thread works on queue pairs
//! that the flow's connection has as well: it touches none but those that nothing is posted to, and gives them back for the engine to
//! destroy.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_runtime::Share;
use nix::errno::Errno;

use crate::Fault;
use crate::rdma::connection::fault;
use crate::rdma::device::blocking_worker::{BlockingWorker, Work, lock};
use crate::rdma::device::queues::Places;
use crate::rdma::verbs::{Gid, QpPath, QpStep, QpTimers, QueuePair, VerbsError};

/// How long an address is not looked for again that was looked for in vain, where it is the only one.
const UNREACHABLE_FOR: Duration = Duration::from_secs(3);

/// A queue pair, and what it is to be connected to.
#[derive(Debug)]
pub(in crate::rdma) struct QpConnect {
    pub(in crate::rdma) qp: Arc<QueuePair>,
    pub(in crate::rdma) path: QpPath,
    pub(in crate::rdma) timers: QpTimers,
    /// Source port that the device is to be told besides, if it can be.
    pub(in crate::rdma) source_port: Option<u16>,
}

/// Queue pairs of a flow's connection, to be connected to the peer's.
#[derive(Debug)]
pub(in crate::rdma) struct Job {
    pub(in crate::rdma) flow: Handle,
    /// Its tenant's share.
    pub(in crate::rdma) share: Share,
    /// Number of the connection.
    pub(in crate::rdma) connection: u32,
    /// Which of the transport's ports.
    pub(in crate::rdma) port: usize,
    pub(in crate::rdma) peer: Gid,
    /// Places that the queue pairs have reserved, for whoever destroys them.
    pub(in crate::rdma) places: Places,
    pub(in crate::rdma) qp_connects: Vec<QpConnect>,
}

/// The result of a job.
#[derive(Debug)]
pub(in crate::rdma) struct Connected {
    pub(in crate::rdma) job: Job,
    pub(in crate::rdma) result: Result<(), Fault>,
    /// The device's answer when it was told UDP source ports, if it does not take them.
    pub(in crate::rdma) untold: Option<Result<(), VerbsError>>,
}

/// Addresses that were looked for in vain from a port, and until when they are not looked for again.
type Unreachable = Mutex<HashMap<(usize, Gid), Instant>>;

/// A job that was begun at some time, and what came of it.
#[derive(Debug)]
struct Connecting {
    job: Job,
    begun: Instant,
    unreachable: Arc<Unreachable>,
    result: Result<(), Fault>,
    untold: Option<Result<(), VerbsError>>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Connector {
    worker: BlockingWorker<Connecting>,
    unreachable: Arc<Unreachable>,
}

impl Connector {
    pub(in crate::rdma) fn new() -> Result<Self, VerbsError> {
        Ok(Connector { worker: BlockingWorker::new("mccs-connect")?, unreachable: Arc::default() })
    }

    /// Whether everything is done in place, when it is begun, or aside.
    #[cfg(test)]
    pub(in crate::rdma) fn do_in_place(&mut self, is_in_place: bool) {
        self.worker.do_in_place(is_in_place);
    }

    /// Begins to connect. Its result is told later, once.
    pub(in crate::rdma) fn begin(&mut self, job: Job, now: Instant) {
        let unreachable = Arc::clone(&self.unreachable);
        self.worker.begin(Connecting { job, begun: now, unreachable, result: Ok(()), untold: None });
    }

    /// The result of a job, if one has ended.
    pub(in crate::rdma) fn take(&mut self) -> Option<Connected> {
        self.worker.take().map(|Connecting { job, result, untold, .. }| Connected { job, result, untold })
    }

    /// A port is another one now, or back: who could not be reached from there may be.
    pub(in crate::rdma) fn forget_unreachable(&self, port: usize) {
        lock(&self.unreachable).retain(|(from, _), _| *from != port);
    }

    /// Readable when there is something to take.
    pub(in crate::rdma) fn descriptor(&self) -> BorrowedFd<'_> {
        self.worker.descriptor()
    }

    /// The descriptor's news is known.
    pub(in crate::rdma) fn hear(&self) {
        self.worker.hear();
    }
}

impl Connecting {
    fn is_unreachable(&self) -> bool {
        let mut unreachable = lock(&self.unreachable);
        unreachable.retain(|_, until| *until > self.begun);
        unreachable.contains_key(&(self.job.port, self.job.peer))
    }
}

impl Work for Connecting {
    fn share(&self) -> Share {
        self.job.share
    }

    fn work(&mut self) {
        let begun_here = Instant::now();
        if self.is_unreachable() {
            self.result = Err(Fault::Os { call: "looking for the peer's address", reason: Errno::ETIMEDOUT });
            return;
        }
        self.result = connect(&self.job, &mut self.untold);
        if let Err(Fault::Os { reason: Errno::ETIMEDOUT, .. }) = self.result {
            let mut unreachable = lock(&self.unreachable);
            // The more there are, the longer: most of the time is for those that are reached.
            let others = unreachable.len() as u32;
            let until = self.begun + begun_here.elapsed() + UNREACHABLE_FOR * (others + 1);
            unreachable.insert((self.job.port, self.job.peer), until);
        }
    }
}

/// Makes queue pairs ready to receive and to send.
fn connect(job: &Job, untold: &mut Option<Result<(), VerbsError>>) -> Result<(), Fault> {
    for QpConnect { qp, path, timers, source_port } in &job.qp_connects {
        // Nobody else has it: its connection has ended since.
        if Arc::strong_count(qp) == 1 {
            return Err(Fault::Closed);
        }
        qp.modify(QpStep::Receive(*path)).map_err(fault)?;
        qp.modify(QpStep::Send(*timers)).map_err(fault)?;
        if let (Some(source_port), None) = (source_port, &untold) {
            // The flow label, which has told it already, is not followed by all.
            *untold = match qp.set_source_port(*source_port) {
                Ok(true) => None,
                Ok(false) => Some(Ok(())),
                Err(error) => Some(Err(error)),
            };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::rdma::tests::bench::{Bench, flow_options};
    use crate::{DataPath, FlowOptions, FlowSpec, FlowState, ListenOptions, RecvFlow, SendFlow, Transport};

    /// A test that has not got further for so long hangs.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// A flow, and another one that begins, whose queue pairs wait to be connected at one side.
    fn held(side: usize) -> (Bench, SendFlow, RecvFlow) {
        let mut bench = Bench::new(2);
        bench.sides.iter_mut().for_each(|side| side.handshakes.connector_mut().do_in_place(false));
        bench.fabric.keep_looking(&bench.hosts[side].clone(), true);
        let (listener, handle) = bench.sides[1].listen(&ListenOptions::default()).expect("listens");
        // The test's time goes faster than the threads'.
        let forever = Duration::from_secs(80_000);
        let options =
            FlowOptions { connect_timeout: forever, silence_timeout: forever, peer_timeout: None, ..flow_options() };
        let spec = FlowSpec { number: 1, peer: "rank 6 on host-b".into(), options };
        let send = bench.sides[0].connect(&handle, &spec, bench.now).expect("connects");
        let recv = bench.sides[1].accept(listener, &spec, bench.now).expect("accepts");
        until(&mut bench, |bench| bench.fabric.looking() == 1);
        (bench, send, recv)
    }

    /// Polls until something holds that depends on a thread, for which no round counts.
    fn until(bench: &mut Bench, holds: impl Fn(&Bench) -> bool) {
        let since = Instant::now();
        while !holds(bench) {
            assert!(since.elapsed() < PATIENCE, "hangs");
            bench.rounds(1, &[0, 1]);
            std::thread::yield_now();
        }
    }

    fn states(bench: &Bench, send: SendFlow, recv: RecvFlow) -> [FlowState; 2] {
        [bench.sides[0].state(send.into()), bench.sides[1].state(recv.into())].map(|state| state.expect("lives"))
    }

    #[test]
    fn flows_go_on_while_another_is_connected() {
        for side in [0, 1] {
            let (mut bench, send, recv) = held(side);
            bench.stream(|_, _| {});
            bench.rounds(1000, &[0, 1]);
            assert_eq!(bench.fabric.looking(), 1);
            assert_eq!(states(&bench, send, recv)[0], FlowState::Connecting);
            assert!(bench.sides[side].handshakes.connector_mut().take().is_none());
            // A sleeper is woken.
            bench.fabric.keep_looking(&bench.hosts[side].clone(), false);
            let mut woken = [PollFd::new(bench.sides[side].descriptor().expect("one"), PollFlags::POLLIN)];
            assert_eq!(poll(&mut woken, PollTimeout::NONE), Ok(1));
            until(&mut bench, |bench| states(bench, send, recv) == [FlowState::Connected; 2]);
            until(&mut bench, |bench| bench.sides[side].handshakes.connector().worker.is_idle());
            bench.stream(|_, _| {});
        }
    }

    #[test]
    fn flows_that_are_closed_while_they_are_connected_leave_nothing() {
        for side in [0, 1] {
            let (mut bench, send, recv) = held(side);
            bench.sides[0].close(send.into());
            bench.sides[1].close(recv.into());
            bench.rounds(1000, &[0, 1]);
            let connections = usize::from(flow_options().connections);
            assert!(bench.fabric.held().0 > 2 * connections, "what is being connected is not destroyed meanwhile");
            bench.fabric.keep_looking(&bench.hosts[side].clone(), false);
            until(&mut bench, |bench| bench.fabric.held().0 == 2 * connections);
            bench.stream(|_, _| {});
        }
    }

    #[test]
    fn a_device_goes_while_a_flow_is_connected_on_it() {
        for side in [0, 1] {
            let (mut bench, send, recv) = held(side);
            let host = bench.hosts[side].clone();
            bench.fabric.remove(&host, 0, true);
            bench.rounds(1000, &[0, 1]);
            assert_eq!(bench.fabric.opened(&host, 0), 1, "what is being connected needs it");
            bench.fabric.keep_looking(&host, false);
            until(&mut bench, |bench| bench.fabric.opened(&host, 0) == 0);
            until(&mut bench, |bench| states(bench, send, recv) == [FlowState::Connected; 2]);
            bench.stream(|_, _| {});
        }
    }

    #[test]
    fn a_transport_that_goes_waits_for_nobody_and_leaves_nothing() {
        let (bench, _, _) = held(1);
        let Bench { hosts, fabric, .. } = &bench;
        let (hosts, fabric) = (hosts.clone(), fabric.clone());
        drop(bench);
        assert_eq!((fabric.looking(), fabric.opened(&hosts[1], 0)), (1, 1));
        fabric.keep_looking(&hosts[1], false);
        let since = Instant::now();
        while (fabric.held(), fabric.opened(&hosts[1], 0)) != ((0, 0), 0) {
            assert!(since.elapsed() < PATIENCE, "something is left");
            std::thread::yield_now();
        }
    }
}
