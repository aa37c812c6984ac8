//! Communicators as Python sees them: arguments to calls, errors to exceptions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mccs::CollectiveKind;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::agreement;
use crate::argument::{Argument, duration};
use crate::array;
use crate::calls::{self, Buffers, What, operator};
use crate::collected::{self, Collected};
use crate::errors::{self, Caller};
use crate::lane::Lane;
use crate::operation::{Call, Kind, Operation};
use crate::pending::PyOperation;
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

impl PyCommunicator {
    pub(crate) fn lane(&self) -> PyResult<&Arc<Lane>> {
        self.lane.get()
    }

    /// Rank, and number of ranks.
    pub(crate) fn place(&self) -> (u32, u32) {
        (self.caller.rank, self.caller.nranks)
    }
}

impl PyCommunicator {
    /// Makes a call, or keeps it for the end of the caller's group, which waits for its end if it blocks.
    fn new_operation(
        &self,
        py: Python<'_>,
        call: Call,
        owners: Vec<Py<PyAny>>,
        is_blocking: bool,
    ) -> PyResult<PyOperation> {
        let lane = self.lane.get()?;
        call.check(self.caller).map_err(|message| self.caller.argument(py, call.kind.name(), &message))?;
        let name = call.kind.name();
        let operation = Arc::new(Operation::new(call, owners));
        if collected::is_open(py)? {
            let (lane, operation) = (OfProcess::new(Arc::clone(lane)), Arc::clone(&operation));
            collected::keep(py, Collected { lane, operation, caller: self.caller, is_blocking })?;
        } else {
            py.detach(|| lane.submit(&operation)).map_err(|error| self.caller.of(py, name, &error))?;
        }
        Ok(PyOperation::new(lane, operation, self.caller))
    }

    /// Makes a call on arrays.
    fn call(&self, py: Python<'_>, what: What, buffers: &Buffers<'_, '_>, blocking: bool) -> Answer {
        let (call, owners) = what.on(py, self.caller, buffers, &mut array::of)?;
        let operation = self.new_operation(py, call, owners, blocking)?;
        match blocking {
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
            op: operator(py, self.caller, "all_reduce", op, factor)?,
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
        let root = calls::peer(py, self.caller, "reduce", "root", root)?;
        let what = What {
            kind: Kind::Collective(CollectiveKind::Reduce),
            op: operator(py, self.caller, "reduce", op, factor)?,
            root,
        };
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
            op: operator(py, self.caller, "reduce_scatter", op, factor)?,
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
        let root = calls::peer(py, self.caller, "broadcast", "root", root)?;
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
        let root = calls::peer(py, self.caller, "gather", "root", root)?;
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
        let root = calls::peer(py, self.caller, "scatter", "root", root)?;
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
        let peer = calls::peer(py, self.caller, "send", "peer", peer)?;
        self.call(py, What::moving(Kind::Send, peer), &buffers, blocking)
    }

    /// Receives an array of the same size from a peer.
    #[pyo3(signature = (array, peer, *, blocking=true))]
    fn recv(&self, py: Python<'_>, array: &Bound<'_, PyAny>, peer: Argument<u32>, blocking: bool) -> Answer {
        let buffers = Buffers { send: None, send_parts: 1, recv: Some(array), recv_parts: 1 };
        let peer = calls::peer(py, self.caller, "recv", "peer", peer)?;
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
            op: operator(py, self.caller, call, op, factor)?,
            root: calls::peer(py, self.caller, call, "root", root)?,
            count,
            send,
            recv,
        };
        if call.data_type == agreement::DATA_TYPE {
            return Err(self.caller.argument(py, call.kind.name(), "elements of this type are moved as uint8"));
        }
        self.new_operation(py, call, vec![owner], false)
    }

    /// Operations of this rank that used its arrays ``in_place`` and that ``copied`` them, and the bytes of both: ``in_place_bytes``,
    /// ``copied_bytes``.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = &self.lane.get()?.counters;
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
            // Others may wait for calls that do not come any more. The caller's exception is more to the point than a
            // failure here.
            let _ = self.abort(py);
        }
        self.close(py)
    }

    /// Takes no further calls. Leaves when those that were made have ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let lane = self.lane.get()?;
        py.detach(|| lane.close());
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
