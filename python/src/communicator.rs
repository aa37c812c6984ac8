//! Communicators as Python sees them: arguments to calls, waits with signals, errors to exceptions.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mccs::{CollectiveKind, DataType, ErrorClass, RedOp, ReduceOperator, Scalar};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::agreement;
use crate::argument::Argument;
use crate::array::{self, Array};
use crate::errors::{self, Caller};
use crate::lane::{Lane, Waited};
use crate::operation::{Call, Kind, Operation};
use crate::process::OfProcess;
use crate::session::{Session, parse_id};

/// How a call of Python's is answered: its operation, if it goes on, or what it returns when it has ended.
type Answer = PyResult<Option<PyOperation>>;

/// Communicator(session, unique_id, rank, nranks, *, root_address=None, name=None, timeout=None)
/// --
///
/// A rank's membership in a communicator; joins it, which waits for all ranks. All ranks make the same collective calls in the same
/// order. A call returns when it has ended, or with ``blocking=False`` at once with an :class:`Operation`.
#[pyclass(frozen, module = "mccs", name = "Communicator")]
pub(crate) struct PyCommunicator {
    lane: OfProcess<Arc<Lane>>,
    caller: Caller,
}

/// A call that goes on. ``wait`` ends it.
#[pyclass(frozen, module = "mccs", name = "Operation")]
pub(crate) struct PyOperation {
    lane: OfProcess<Arc<Lane>>,
    operation: Arc<Operation>,
    caller: Caller,
}

/// A time-out of Python's; none for an infinite one.
fn duration(seconds: Option<f64>) -> Result<Option<Duration>, String> {
    // What is no number stays none.
    let convert = |seconds: f64| Duration::try_from_secs_f64(if seconds < 0.0 { 0.0 } else { seconds });
    let finite = seconds.filter(|seconds| *seconds != f64::INFINITY).map(convert).transpose();
    finite.map_err(|error| format!("timeout: {error}"))
}

impl PyCommunicator {
    pub(crate) fn lane(&self) -> PyResult<&Arc<Lane>> {
        self.lane.get()
    }

    /// Rank, and number of ranks.
    pub(crate) fn place(&self) -> (u32, u32) {
        (self.caller.rank, self.caller.nranks)
    }

    /// The rank of an argument.
    fn peer(&self, py: Python<'_>, call: &str, name: &str, rank: Argument<u32>) -> PyResult<u32> {
        rank.get(name).map_err(|message| self.caller.argument(py, call, &message))
    }

    fn operator(
        &self,
        py: Python<'_>,
        call: &str,
        name: Argument<String>,
        factor: Option<Argument<f64>>,
    ) -> PyResult<ReduceOperator> {
        let refused = |message: &str| Err(self.caller.argument(py, call, message));
        let (name, factor) = match (name.get("op"), factor.map(|factor| factor.get("factor")).transpose()) {
            (Ok(name), Ok(factor)) => (name, factor),
            (Err(message), _) | (_, Err(message)) => return refused(&message),
        };
        let op = match name.as_str() {
            "sum" => RedOp::Sum,
            "prod" => RedOp::Prod,
            "min" => RedOp::Min,
            "max" => RedOp::Max,
            "avg" => RedOp::Avg,
            other => return refused(&format!("unknown operator {other:?}; known: sum, prod, min, max, avg")),
        };
        match factor {
            None => Ok(op.into()),
            Some(factor) if op == RedOp::Sum => Ok(ReduceOperator::PreMulSum(Scalar::Float(factor))),
            Some(_) => refused(&format!("a factor goes with the operator sum, not with {name}")),
        }
    }
}

/// Buffers of a call: which of them the rank has, and into how many parts each is divided.
struct Buffers<'a, 'py> {
    send: Option<&'a Bound<'py, PyAny>>,
    send_parts: usize,
    recv: Option<&'a Bound<'py, PyAny>>,
    recv_parts: usize,
}

/// What a call is, besides its buffers.
#[derive(Clone, Copy)]
struct What {
    kind: Kind,
    op: ReduceOperator,
    root: u32,
}

impl What {
    fn moving(kind: Kind, root: u32) -> Self {
        What { kind, op: RedOp::Sum.into(), root }
    }
}

impl PyOperation {
    /// Waits until it has ended.
    fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        let lane = self.lane.get()?;
        let mut signal = None;
        let waited = py.detach(|| {
            lane.wait(&self.operation, timeout, || {
                signal = Python::attach(|py| py.check_signals()).err();
                signal.is_none()
            })
        });
        let call = self.operation.call.kind.name();
        match waited {
            Waited::Ended(Ok(())) => Ok(()),
            Waited::Ended(Err(error)) => Err(self.caller.of(py, call, &error)),
            Waited::TimedOut => {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                let message = format!("Timed out after {seconds} s: another rank may not have made the call");
                Err(self.caller.error(py, call, ErrorClass::Timeout, &message))
            }
            Waited::Interrupted => {
                Err(signal.unwrap_or_else(|| errors::new(ErrorClass::Internal, "interrupted".into())))
            }
        }
    }
}

#[pymethods]
impl PyOperation {
    /// Waits until it has ended; its arrays are the caller's again. After ``timeout`` seconds it raises ``Timeout``, and goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Argument<f64>>) -> PyResult<()> {
        let timeout = timeout.map(|timeout| timeout.get("timeout")).transpose().and_then(duration);
        let refused = |message: String| self.caller.argument(py, self.operation.call.kind.name(), &message);
        self.finish(py, timeout.map_err(refused)?)
    }

    /// Whether it has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let lane = self.lane.get()?;
        Ok(py.detach(|| lane.poll(&self.operation)))
    }

    /// Has a function called, without arguments, when it has ended: at once if it has, otherwise from a thread of the package's.
    fn when_done(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        if !self.operation.call_when_done(callback.clone_ref(py)) {
            return callback.call0(py).map(drop);
        }
        let lane = self.lane.get()?;
        let later = py.detach(|| lane.finish_later(&self.operation));
        later.map_err(|error| self.caller.of(py, self.operation.call.kind.name(), &error))
    }

    /// The exception that it has ended with. ``None`` while it goes on, and where it went well.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        let error = self.operation.outcome()?.err()?;
        Some(self.caller.of(py, self.operation.call.kind.name(), &error))
    }
}

impl PyCommunicator {
    fn new_operation(&self, py: Python<'_>, call: Call, owners: Vec<Py<PyAny>>) -> PyResult<PyOperation> {
        let lane = self.lane.get()?;
        let name = call.kind.name();
        if call.root >= self.caller.nranks {
            let message = format!("there is no rank {} among {}", call.root, self.caller.nranks);
            return Err(self.caller.argument(py, name, &message));
        }
        if call.overlaps_itself(self.caller.rank) {
            let message = "what is received overlaps what is sent; they must be apart, or exactly in place";
            return Err(self.caller.argument(py, name, message));
        }
        let operation = Arc::new(Operation::new(call, owners));
        py.detach(|| lane.submit(&operation)).map_err(|error| self.caller.of(py, name, &error))?;
        Ok(PyOperation { lane: OfProcess::new(Arc::clone(lane)), operation, caller: self.caller })
    }

    /// Makes a call on arrays.
    fn call(&self, py: Python<'_>, what: What, buffers: &Buffers<'_, '_>, blocking: bool) -> Answer {
        let name = what.kind.name();
        let refused = |error: PyErr| self.caller.argument(py, name, &error.value(py).to_string());
        let send = buffers.send.map(|array| array::of(array, false)).transpose().map_err(refused)?;
        let recv = buffers.recv.map(|array| array::of(array, true)).transpose().map_err(refused)?;
        let argument = |message: &str| self.caller.argument(py, name, message);
        let element = send.as_ref().or(recv.as_ref()).map(|array| array.element);
        if let (Some(send), Some(recv)) = (&send, &recv)
            && send.element != recv.element
        {
            return Err(argument("what is sent and what is received have different types"));
        }
        let reduces = matches!(what.kind, Kind::Collective(kind) if kind.reduces());
        let data_type = match element {
            Some(element) if reduces => element.data_type.ok_or_else(|| {
                argument("elements of this type cannot be combined; int8, int32, int64, their unsigned kinds, and float16, bfloat16, float32 and float64 can")
            })?,
            Some(element) => element.data_type.unwrap_or(DataType::U8),
            None => DataType::U8,
        };
        let size = data_type.size_bytes();
        let part_bytes = |array: &Array, parts: usize, what: &str| {
            let bytes = array.bytes / parts;
            if bytes * parts != array.bytes || !bytes.is_multiple_of(element.map_or(1, |element| element.bytes)) {
                let elements = array.bytes / element.map_or(1, |element| element.bytes).max(1);
                return Err(argument(&format!("{elements} elements to {what} are no {parts} equal parts")));
            }
            Ok(bytes)
        };
        let sent = send.as_ref().map(|array| part_bytes(array, buffers.send_parts, "send")).transpose()?;
        let received = recv.as_ref().map(|array| part_bytes(array, buffers.recv_parts, "receive")).transpose()?;
        if let (Some(sent), Some(received)) = (sent, received)
            && sent != received
        {
            let message = format!("a part that is sent has {sent} bytes, and one that is received has {received}");
            return Err(argument(&message));
        }
        let bytes = sent.or(received).unwrap_or(0);
        let parts = |array: &Option<Array>, parts: usize| {
            let address = |array: &Array| (0..parts).map(|part| array.address + part * bytes).collect();
            array.as_ref().map_or_else(Vec::new, address)
        };
        let call = Call {
            kind: what.kind,
            data_type,
            op: what.op,
            root: what.root,
            count: (bytes / size) as u64,
            send: parts(&send, buffers.send_parts),
            recv: parts(&recv, buffers.recv_parts),
        };
        let owners = [send, recv].into_iter().flatten().map(|array| array.owner).collect();
        let operation = self.new_operation(py, call, owners)?;
        if blocking { operation.finish(py, None).map(|()| None) } else { Ok(Some(operation)) }
    }

    fn is_rank(&self, root: u32) -> bool {
        self.caller.rank == root
    }

    fn parts(&self) -> usize {
        self.caller.nranks as usize
    }
}

#[pymethods]
impl PyCommunicator {
    #[new]
    #[pyo3(signature = (session, unique_id, rank, nranks, *, root_address=None, name=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "Python's signature, with names")]
    fn new(
        py: Python<'_>,
        session: &Session,
        unique_id: &str,
        rank: Argument<u32>,
        nranks: Argument<u32>,
        root_address: Option<&str>,
        name: Option<&str>,
        timeout: Option<Argument<f64>>,
    ) -> PyResult<Self> {
        let refused = |message: String| errors::of_argument(py, "join", &message);
        let (rank, nranks) = (rank.get("rank").map_err(refused)?, nranks.get("nranks").map_err(refused)?);
        let timeout = timeout.map(|timeout| timeout.get("timeout")).transpose().and_then(duration).map_err(refused)?;
        let client = session.client()?;
        let mut builder = client.communicator(parse_id(unique_id)?, rank, nranks).root_address(root_address);
        if let Some(name) = name {
            builder = builder.name(name);
        }
        if let Some(timeout) = timeout {
            builder = builder.timeout(timeout);
        }
        let mut signal = None;
        let joined = py.detach(|| {
            builder.join_while(|| {
                signal = Python::attach(|py| py.check_signals()).err();
                signal.is_none()
            })
        });
        if let Some(signal) = signal {
            return Err(signal);
        }
        let caller = Caller { rank, nranks };
        let comm = joined.map_err(|error| caller.of(py, "join", &error))?;
        Ok(PyCommunicator { lane: OfProcess::new(Lane::new(client.clone(), comm)), caller })
    }

    /// This rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.caller.rank
    }

    /// Number of ranks.
    #[getter]
    fn nranks(&self) -> u32 {
        self.caller.nranks
    }

    /// Combines all ranks' arrays; every rank gets the result in ``recv``, or in place.
    #[pyo3(
        signature = (send, recv=None, op=Argument::of("sum"), *, factor=None, blocking=true),
        text_signature = "($self, send, recv=None, op='sum', *, factor=None, blocking=True)"
    )]
    fn all_reduce(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        op: Argument<String>,
        factor: Option<Argument<f64>>,
        blocking: bool,
    ) -> Answer {
        let what = What {
            kind: Kind::Collective(CollectiveKind::AllReduce),
            op: self.operator(py, "all_reduce", op, factor)?,
            root: 0,
        };
        let buffers = Buffers { send: Some(send), send_parts: 1, recv: Some(recv.unwrap_or(send)), recv_parts: 1 };
        self.call(py, what, &buffers, blocking)
    }

    /// Combines all ranks' arrays; the root gets the result in ``recv``, or in place.
    #[pyo3(
        signature = (send, recv=None, op=Argument::of("sum"), root=Argument::Good(0), *, factor=None, blocking=true),
        text_signature = "($self, send, recv=None, op='sum', root=0, *, factor=None, blocking=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's signature, with names")]
    fn reduce(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        op: Argument<String>,
        root: Argument<u32>,
        factor: Option<Argument<f64>>,
        blocking: bool,
    ) -> Answer {
        let root = self.peer(py, "reduce", "root", root)?;
        let what =
            What { kind: Kind::Collective(CollectiveKind::Reduce), op: self.operator(py, "reduce", op, factor)?, root };
        let recv = self.is_rank(root).then(|| recv.unwrap_or(send));
        self.call(py, what, &Buffers { send: Some(send), send_parts: 1, recv, recv_parts: 1 }, blocking)
    }

    /// Combines all ranks' arrays; each rank gets its part, of ``nranks`` equal ones, in ``recv``.
    #[pyo3(
        signature = (send, recv, op=Argument::of("sum"), *, factor=None, blocking=true),
        text_signature = "($self, send, recv, op='sum', *, factor=None, blocking=True)"
    )]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        op: Argument<String>,
        factor: Option<Argument<f64>>,
        blocking: bool,
    ) -> Answer {
        let what = What {
            kind: Kind::Collective(CollectiveKind::ReduceScatter),
            op: self.operator(py, "reduce_scatter", op, factor)?,
            root: 0,
        };
        let buffers = Buffers { send: Some(send), send_parts: self.parts(), recv: Some(recv), recv_parts: 1 };
        self.call(py, what, &buffers, blocking)
    }

    /// Every rank gets all ranks' arrays in ``recv``, in the order of ranks.
    #[pyo3(signature = (send, recv, *, blocking=true))]
    fn all_gather(&self, py: Python<'_>, send: &Bound<'_, PyAny>, recv: &Bound<'_, PyAny>, blocking: bool) -> Answer {
        let buffers = Buffers { send: Some(send), send_parts: 1, recv: Some(recv), recv_parts: self.parts() };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::AllGather), 0), &buffers, blocking)
    }

    /// Every rank gets the root's array, in place.
    #[pyo3(
        signature = (array, root=Argument::Good(0), *, blocking=true),
        text_signature = "($self, array, root=0, *, blocking=True)"
    )]
    fn broadcast(&self, py: Python<'_>, array: &Bound<'_, PyAny>, root: Argument<u32>, blocking: bool) -> Answer {
        let root = self.peer(py, "broadcast", "root", root)?;
        let send = self.is_rank(root).then_some(array);
        let buffers = Buffers { send, send_parts: 1, recv: Some(array), recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Broadcast), root), &buffers, blocking)
    }

    /// Part s of rank r's ``nranks`` equal parts goes to rank s, as its part r.
    #[pyo3(signature = (send, recv, *, blocking=true))]
    fn all_to_all(&self, py: Python<'_>, send: &Bound<'_, PyAny>, recv: &Bound<'_, PyAny>, blocking: bool) -> Answer {
        let parts = self.parts();
        let buffers = Buffers { send: Some(send), send_parts: parts, recv: Some(recv), recv_parts: parts };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::AllToAll), 0), &buffers, blocking)
    }

    /// The root gets all ranks' arrays in ``recv``, in the order of ranks.
    #[pyo3(
        signature = (send, recv=None, root=Argument::Good(0), *, blocking=true),
        text_signature = "($self, send, recv=None, root=0, *, blocking=True)"
    )]
    fn gather(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        root: Argument<u32>,
        blocking: bool,
    ) -> Answer {
        let root = self.peer(py, "gather", "root", root)?;
        let recv = recv.filter(|_| self.is_rank(root));
        if recv.is_none() && self.is_rank(root) {
            return Err(self.caller.argument(py, "gather", "the root needs an array to receive in"));
        }
        let buffers = Buffers { send: Some(send), send_parts: 1, recv, recv_parts: self.parts() };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Gather), root), &buffers, blocking)
    }

    /// Each rank gets its part of the root's ``nranks`` equal ones in ``recv``.
    #[pyo3(
        signature = (send, recv, root=Argument::Good(0), *, blocking=true),
        text_signature = "($self, send, recv, root=0, *, blocking=True)"
    )]
    fn scatter(
        &self,
        py: Python<'_>,
        send: Option<&Bound<'_, PyAny>>,
        recv: &Bound<'_, PyAny>,
        root: Argument<u32>,
        blocking: bool,
    ) -> Answer {
        let root = self.peer(py, "scatter", "root", root)?;
        let send = send.filter(|_| self.is_rank(root));
        if send.is_none() && self.is_rank(root) {
            return Err(self.caller.argument(py, "scatter", "the root needs an array to send"));
        }
        let buffers = Buffers { send, send_parts: self.parts(), recv: Some(recv), recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Scatter), root), &buffers, blocking)
    }

    /// Ends when all ranks have called it.
    #[pyo3(signature = (*, blocking=true))]
    fn barrier(&self, py: Python<'_>, blocking: bool) -> Answer {
        let buffers = Buffers { send: None, send_parts: 1, recv: None, recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Barrier), 0), &buffers, blocking)
    }

    /// Sends an array to a peer; ends when the peer has received it.
    #[pyo3(signature = (array, peer, *, blocking=true))]
    fn send(&self, py: Python<'_>, array: &Bound<'_, PyAny>, peer: Argument<u32>, blocking: bool) -> Answer {
        let buffers = Buffers { send: Some(array), send_parts: 1, recv: None, recv_parts: 1 };
        let peer = self.peer(py, "send", "peer", peer)?;
        self.call(py, What::moving(Kind::Send, peer), &buffers, blocking)
    }

    /// Receives an array of the same size from a peer.
    #[pyo3(signature = (array, peer, *, blocking=true))]
    fn recv(&self, py: Python<'_>, array: &Bound<'_, PyAny>, peer: Argument<u32>, blocking: bool) -> Answer {
        let buffers = Buffers { send: None, send_parts: 1, recv: Some(array), recv_parts: 1 };
        let peer = self.peer(py, "recv", "peer", peer)?;
        self.call(py, What::moving(Kind::Recv, peer), &buffers, blocking)
    }

    /// Starts a call on addresses, for libraries whose arrays are none of Python's. ``send`` and ``recv`` have the addresses of parts of
    /// ``count`` elements: none, one, or one for each rank, as the call has it. The caller vouches for them; ``owner`` keeps them.
    #[pyo3(
        signature = (call, data_type, count, send, recv, *, op=Argument::of("sum"), factor=None, root=Argument::Good(0), owner),
        text_signature = "($self, call, data_type, count, send, recv, *, op='sum', factor=None, root=0, owner)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's signature, with names")]
    fn start(
        &self,
        py: Python<'_>,
        call: &str,
        data_type: &str,
        count: u64,
        send: Vec<usize>,
        recv: Vec<usize>,
        op: Argument<String>,
        factor: Option<Argument<f64>>,
        root: Argument<u32>,
        owner: Py<PyAny>,
    ) -> PyResult<PyOperation> {
        let unknown = |error: mccs::ParseError| self.caller.argument(py, call, &error.to_string());
        let kind = match call {
            "send" => Kind::Send,
            "recv" => Kind::Recv,
            name => Kind::Collective(name.parse().map_err(unknown)?),
        };
        let call = Call {
            kind,
            data_type: data_type.parse().map_err(unknown)?,
            op: self.operator(py, call, op, factor)?,
            root: self.peer(py, call, "root", root)?,
            count,
            send,
            recv,
        };
        if call.data_type == agreement::DATA_TYPE {
            return Err(self.caller.argument(py, call.kind.name(), "elements of this type are moved as uint8"));
        }
        self.new_operation(py, call, vec![owner])
    }

    /// How operations went: ``in_place``, ``copied`` and ``copied_bytes``.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = &self.lane.get()?.counters;
        let row = PyDict::new(py);
        row.set_item("in_place", counters.in_place.load(Ordering::Relaxed))?;
        row.set_item("copied", counters.copied.load(Ordering::Relaxed))?;
        row.set_item("copied_bytes", counters.copied_bytes.load(Ordering::Relaxed))?;
        Ok(row)
    }

    /// Ends the communicator on all ranks: calls under way fail.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let lane = self.lane.get()?;
        py.detach(|| lane.abort()).map_err(|error| self.caller.of(py, "abort", &error))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if !kind.is_none() {
            // Others may wait for calls that do not come any more. What raised is more to the point than what fails here.
            let _ = self.abort(py);
        }
        self.close()
    }

    /// Takes no further calls. Leaves when those that were made have ended, and everything made from it is gone.
    fn close(&self) -> PyResult<()> {
        self.lane.get()?.close();
        Ok(())
    }
}

impl Drop for PyCommunicator {
    fn drop(&mut self) {
        if let Ok(lane) = self.lane.get() {
            lane.close();
        }
    }
}
