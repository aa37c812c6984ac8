//! Communicators as Python sees them: arguments to calls, errors to exceptions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mccs::{CollectiveKind, ErrorClass};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::agreement;
use crate::argument::Argument;
use crate::array;
use crate::calls::{self, Buffers, What, operator};
use crate::collected::{self, Collected};
use crate::cuda_array;
use crate::cuda_rank::CudaRank;
use crate::errors::{self, Caller};
use crate::lane::Lane;
use crate::member::Member;
use crate::operation::{Call, Kind, Operation, StreamAddress};
use crate::pending::PyOperation;
use crate::process::OfProcess;
use crate::session::{Joining, Session};

/// How a call of Python's is answered: its operation, if it goes on, or what it returns when it has ended.
type Answer = PyResult<Option<PyOperation>>;

/// Communicator(session, unique_id, rank, nranks, *, root_address=None, name=None, timeout=None, device=None)
/// --
///
/// A rank's membership in a communicator; joins it, which waits for all ranks. All ranks make the same collective calls in the same
/// order. A call returns when it has ended, or with ``blocking=False`` at once with an :class:`Operation`. With a ``device``, arrays are in
/// the memory of that GPU, and calls are enqueued on their ``stream``, or on one of the communicator's own.
#[pyclass(frozen, module = "mccs", name = "Communicator")]
pub(crate) struct PyCommunicator {
    member: OfProcess<Member>,
    caller: Caller,
}

/// How a call is made.
struct Way<'a, 'py> {
    is_blocking: bool,
    stream: Option<&'a Bound<'py, PyAny>>,
}

fn way<'a, 'py>(is_blocking: bool, stream: Option<&'a Bound<'py, PyAny>>) -> Way<'a, 'py> {
    Way { is_blocking, stream }
}

impl PyCommunicator {
    /// The lane of a communicator of arrays in the host's memory.
    pub(crate) fn lane(&self) -> PyResult<&Arc<Lane>> {
        match self.member.get()? {
            Member::Host(lane) => Ok(lane),
            Member::Gpu(_) => Err(errors::new(ErrorClass::InvalidUsage, "the communicator is one of GPUs".into())),
        }
    }

    /// Rank, and number of ranks.
    pub(crate) fn place(&self) -> (u32, u32) {
        (self.caller.rank, self.caller.nranks)
    }

    fn gpu(&self) -> PyResult<Option<&Arc<CudaRank>>> {
        match self.member.get()? {
            Member::Host(_) => Ok(None),
            Member::Gpu(rank) => Ok(Some(rank)),
        }
    }

    /// The stream of a call on a GPU, which can have it; none on the host.
    fn stream_of(
        &self,
        py: Python<'_>,
        member: &Member,
        call: &str,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<StreamAddress>> {
        let refused = |message: String| self.caller.argument(py, call, &message);
        let stream = stream.map(cuda_array::stream_of).transpose().map_err(refused)?;
        match (member, stream) {
            (Member::Host(_), None) => Ok(None),
            (Member::Host(_), Some(_)) => Err(refused(
                "stream: arrays in the host's memory have none; a communicator of GPUs is joined by mccs.init(..., device=0)".into(),
            )),
            (Member::Gpu(rank), stream) => {
                let stream = stream.unwrap_or(rank.stream());
                let checked = py.detach(|| rank.check_stream(stream));
                checked.map(|()| Some(stream)).map_err(|error| self.caller.of(py, call, &error))
            }
        }
    }

    /// Makes a call, or keeps it for the end of the caller's group, which waits for its end if it blocks.
    fn issue(&self, py: Python<'_>, member: &Member, operation: Operation, is_blocking: bool) -> PyResult<PyOperation> {
        let name = operation.call.kind.name();
        operation.call.check(self.caller).map_err(|message| self.caller.argument(py, name, &message))?;
        let operation = Arc::new(operation);
        if collected::is_open(py)? {
            let (member, operation) = (OfProcess::new(member.clone()), Arc::clone(&operation));
            collected::keep(py, Collected { member, operation, caller: self.caller, is_blocking })?;
        } else {
            py.detach(|| member.submit(&operation)).map_err(|error| self.caller.of(py, name, &error))?;
        }
        Ok(PyOperation::new(member, operation, self.caller))
    }

    /// Makes a call on arrays.
    fn call(&self, py: Python<'_>, what: What, buffers: &Buffers<'_, '_>, way: Way<'_, '_>) -> Answer {
        let name = what.kind.name();
        let member = self.member.get_for(py, self.caller, name)?;
        let stream = self.stream_of(py, member, name, way.stream)?;
        let (call, mut owners) = match (member, stream) {
            (Member::Gpu(rank), Some(stream)) => what.on(py, self.caller, buffers, &mut |array, is_written| {
                cuda_array::of(array, is_written, rank, stream)
            })?,
            _ => what.on(py, self.caller, buffers, &mut array::of)?,
        };
        owners.extend(way.stream.map(|stream| stream.clone().unbind()));
        let operation = self.issue(py, member, Operation::new(call, owners, stream), way.is_blocking)?;
        match way.is_blocking {
            false => Ok(Some(operation)),
            // Its group waits.
            true if operation.is_kept() => Ok(None),
            true => operation.finish(py, None).map(|()| None),
        }
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
    #[pyo3(signature = (session, unique_id, rank, nranks, *, root_address=None, name=None, timeout=None, device=None))]
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
        device: Option<Argument<u32>>,
    ) -> PyResult<Self> {
        let joining = Joining { unique_id, rank, nranks, root_address, name, timeout };
        let (builder, caller) = session.builder(py, joining)?;
        let device = device.map(|device| device.get("device")).transpose();
        let device = device.map_err(|message| caller.argument(py, "join", &message))?;
        let joined = match device {
            None => {
                let joined = errors::with_signals(py, |go_on| builder.join_while(go_on))?;
                let client = session.client()?.clone();
                joined.map(|comm| Member::Host(Lane::new(client, comm)))
            }
            Some(device) => {
                let joined = errors::with_signals(py, |go_on| CudaRank::join(&builder, device, go_on))?;
                joined.map(Member::Gpu)
            }
        };
        let member = joined.map_err(|error| caller.of(py, "join", &error))?;
        Ok(PyCommunicator { member: OfProcess::new(member), caller })
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

    /// The driver's number of this rank's GPU; ``None`` where arrays are in the host's memory.
    #[getter]
    fn device(&self) -> PyResult<Option<i32>> {
        Ok(self.gpu()?.map(|rank| rank.device()))
    }

    /// The stream of calls that name none, as an address: ``cudaStream_t``. ``None`` where arrays are in the host's memory.
    #[getter]
    fn stream(&self) -> PyResult<Option<usize>> {
        Ok(self.gpu()?.map(|rank| rank.stream()))
    }

    /// Combines all ranks' arrays; every rank gets the result in ``recv``, or in place.
    #[pyo3(
        signature = (send, recv=None, op=Argument::of("sum"), *, factor=None, blocking=true, stream=None),
        text_signature = "($self, send, recv=None, op='sum', *, factor=None, blocking=True, stream=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's signature, with names")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        op: Argument<String>,
        factor: Option<Argument<f64>>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let what = What {
            kind: Kind::Collective(CollectiveKind::AllReduce),
            op: operator(py, self.caller, "all_reduce", op, factor)?,
            root: 0,
        };
        let buffers = Buffers { send: Some(send), send_parts: 1, recv: Some(recv.unwrap_or(send)), recv_parts: 1 };
        self.call(py, what, &buffers, way(blocking, stream))
    }

    /// Combines all ranks' arrays; the root gets the result in ``recv``, or in place.
    #[pyo3(
        signature = (send, recv=None, op=Argument::of("sum"), root=Argument::Good(0), *, factor=None, blocking=true, stream=None),
        text_signature = "($self, send, recv=None, op='sum', root=0, *, factor=None, blocking=True, stream=None)"
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
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let root = calls::peer(py, self.caller, "reduce", "root", root)?;
        let what = What {
            kind: Kind::Collective(CollectiveKind::Reduce),
            op: operator(py, self.caller, "reduce", op, factor)?,
            root,
        };
        let recv = self.is_rank(root).then(|| recv.unwrap_or(send));
        self.call(py, what, &Buffers { send: Some(send), send_parts: 1, recv, recv_parts: 1 }, way(blocking, stream))
    }

    /// Combines all ranks' arrays; each rank gets its part, of ``nranks`` equal ones, in ``recv``.
    #[pyo3(
        signature = (send, recv, op=Argument::of("sum"), *, factor=None, blocking=true, stream=None),
        text_signature = "($self, send, recv, op='sum', *, factor=None, blocking=True, stream=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's signature, with names")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        op: Argument<String>,
        factor: Option<Argument<f64>>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let what = What {
            kind: Kind::Collective(CollectiveKind::ReduceScatter),
            op: operator(py, self.caller, "reduce_scatter", op, factor)?,
            root: 0,
        };
        let buffers = Buffers { send: Some(send), send_parts: self.parts(), recv: Some(recv), recv_parts: 1 };
        self.call(py, what, &buffers, way(blocking, stream))
    }

    /// Every rank gets all ranks' arrays in ``recv``, in the order of ranks.
    #[pyo3(signature = (send, recv, *, blocking=true, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let buffers = Buffers { send: Some(send), send_parts: 1, recv: Some(recv), recv_parts: self.parts() };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::AllGather), 0), &buffers, way(blocking, stream))
    }

    /// Every rank gets the root's array, in place.
    #[pyo3(
        signature = (array, root=Argument::Good(0), *, blocking=true, stream=None),
        text_signature = "($self, array, root=0, *, blocking=True, stream=None)"
    )]
    fn broadcast(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        root: Argument<u32>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let root = calls::peer(py, self.caller, "broadcast", "root", root)?;
        let send = self.is_rank(root).then_some(array);
        let buffers = Buffers { send, send_parts: 1, recv: Some(array), recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Broadcast), root), &buffers, way(blocking, stream))
    }

    /// Part s of rank r's ``nranks`` equal parts goes to rank s, as its part r.
    #[pyo3(signature = (send, recv, *, blocking=true, stream=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: &Bound<'_, PyAny>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let parts = self.parts();
        let buffers = Buffers { send: Some(send), send_parts: parts, recv: Some(recv), recv_parts: parts };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::AllToAll), 0), &buffers, way(blocking, stream))
    }

    /// The root gets all ranks' arrays in ``recv``, in the order of ranks.
    #[pyo3(
        signature = (send, recv=None, root=Argument::Good(0), *, blocking=true, stream=None),
        text_signature = "($self, send, recv=None, root=0, *, blocking=True, stream=None)"
    )]
    fn gather(
        &self,
        py: Python<'_>,
        send: &Bound<'_, PyAny>,
        recv: Option<&Bound<'_, PyAny>>,
        root: Argument<u32>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let root = calls::peer(py, self.caller, "gather", "root", root)?;
        let recv = recv.filter(|_| self.is_rank(root));
        if recv.is_none() && self.is_rank(root) {
            return Err(self.caller.argument(py, "gather", "the root needs an array to receive in"));
        }
        let buffers = Buffers { send: Some(send), send_parts: 1, recv, recv_parts: self.parts() };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Gather), root), &buffers, way(blocking, stream))
    }

    /// Each rank gets its part of the root's ``nranks`` equal ones in ``recv``.
    #[pyo3(
        signature = (send, recv, root=Argument::Good(0), *, blocking=true, stream=None),
        text_signature = "($self, send, recv, root=0, *, blocking=True, stream=None)"
    )]
    fn scatter(
        &self,
        py: Python<'_>,
        send: Option<&Bound<'_, PyAny>>,
        recv: &Bound<'_, PyAny>,
        root: Argument<u32>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let root = calls::peer(py, self.caller, "scatter", "root", root)?;
        let send = send.filter(|_| self.is_rank(root));
        if send.is_none() && self.is_rank(root) {
            return Err(self.caller.argument(py, "scatter", "the root needs an array to send"));
        }
        let buffers = Buffers { send, send_parts: self.parts(), recv: Some(recv), recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Scatter), root), &buffers, way(blocking, stream))
    }

    /// Ends when all ranks have called it.
    #[pyo3(signature = (*, blocking=true, stream=None))]
    fn barrier(&self, py: Python<'_>, blocking: bool, stream: Option<&Bound<'_, PyAny>>) -> Answer {
        let buffers = Buffers { send: None, send_parts: 1, recv: None, recv_parts: 1 };
        self.call(py, What::moving(Kind::Collective(CollectiveKind::Barrier), 0), &buffers, way(blocking, stream))
    }

    /// Sends an array to a peer; ends when the peer has received it.
    #[pyo3(signature = (array, peer, *, blocking=true, stream=None))]
    fn send(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        peer: Argument<u32>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let buffers = Buffers { send: Some(array), send_parts: 1, recv: None, recv_parts: 1 };
        let peer = calls::peer(py, self.caller, "send", "peer", peer)?;
        self.call(py, What::moving(Kind::Send, peer), &buffers, way(blocking, stream))
    }

    /// Receives an array of the same size from a peer.
    #[pyo3(signature = (array, peer, *, blocking=true, stream=None))]
    fn recv(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        peer: Argument<u32>,
        blocking: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> Answer {
        let buffers = Buffers { send: None, send_parts: 1, recv: Some(array), recv_parts: 1 };
        let peer = calls::peer(py, self.caller, "recv", "peer", peer)?;
        self.call(py, What::moving(Kind::Recv, peer), &buffers, way(blocking, stream))
    }

    /// Starts a call on addresses, for libraries whose arrays are none of Python's. ``send`` and ``recv`` have the addresses of parts of
    /// ``count`` elements: none, one, or one for each rank, as the call has it. The caller vouches for them; ``owner`` keeps them. Those on
    /// a GPU lie one behind the other, and are ready on the stream.
    #[pyo3(
        signature = (call, data_type, count, send, recv, *, op=Argument::of("sum"), factor=None, root=Argument::Good(0), owner, stream=None),
        text_signature = "($self, call, data_type, count, send, recv, *, op='sum', factor=None, root=0, owner, stream=None)"
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
        stream: Option<&Bound<'_, PyAny>>,
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
            op: operator(py, self.caller, call, op, factor)?,
            root: calls::peer(py, self.caller, call, "root", root)?,
            count,
            send,
            recv,
        };
        if call.data_type == agreement::DATA_TYPE {
            return Err(self.caller.argument(py, call.kind.name(), "elements of this type are moved as uint8"));
        }
        let (name, caller) = (call.kind.name(), self.caller);
        let member = self.member.get_for(py, caller, name)?;
        let owners = [Some(owner), stream.map(|stream| stream.clone().unbind())].into_iter().flatten().collect();
        let stream = self.stream_of(py, member, name, stream)?;
        self.issue(py, member, Operation::new(call, owners, stream), false)
    }

    /// Operations of this rank that used its arrays ``in_place`` and that ``copied`` them, and the bytes of both: ``in_place_bytes``,
    /// ``copied_bytes``.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = match self.member.get_for(py, self.caller, "counters")? {
            Member::Host(lane) => &lane.counters,
            Member::Gpu(rank) => &rank.counters,
        };
        let row = PyDict::new(py);
        for (name, counter) in [
            ("in_place", &counters.in_place),
            ("in_place_bytes", &counters.in_place_bytes),
            ("copied", &counters.copied),
            ("copied_bytes", &counters.copied_bytes),
        ] {
            row.set_item(name, counter.load(Ordering::Relaxed))?;
        }
        Ok(row)
    }

    /// Ends the communicator on all ranks: calls under way fail.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.member.get_for(py, self.caller, "abort")?;
        py.detach(|| member.abort()).map_err(|error| self.caller.of(py, "abort", &error))
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
            // Others may wait for calls that do not come any more. The caller's exception is more to the point than a
            // failure here.
            let _ = self.abort(py);
        }
        self.close(py)
    }

    /// Takes no further calls. Leaves when those that were made have ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.member.get_for(py, self.caller, "close")?;
        py.detach(|| member.close()).map_err(|error| self.caller.of(py, "close", &error))
    }
}

impl Drop for PyCommunicator {
    fn drop(&mut self) {
        if let Some(member) = self.member.here() {
            // Nobody hears of a failure any more.
            Python::attach(|py| py.detach(|| drop(member.close())));
        }
    }
}
