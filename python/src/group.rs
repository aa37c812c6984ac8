//! Groups as Python sees them: `with mccs.group():` collects the calls inside, and issues them together at its end. All or none:
//! what is wrong is found before the first is issued.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mccs::{Error, ErrorClass};
use pyo3::prelude::*;

use crate::collected::{self, Collected, Left};
use crate::errors;
use crate::lane::Lane;
use crate::operation::{Kind, Operation};
use crate::pending::PyOperation;

static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// Group()
/// --
///
/// Calls that are issued together, at the end of ``with``: see :func:`mccs.group`.
#[pyclass(frozen, module = "mccs", name = "Group")]
pub(crate) struct PyGroup {
    number: u64,
    was_entered: AtomicBool,
}

/// Why calls of a group are not issued.
fn not_issued(why: &str) -> Error {
    Error::refused(ErrorClass::InvalidUsage, format!("it was not issued: {why}"))
}

fn usage(message: &str) -> PyErr {
    errors::new(ErrorClass::InvalidUsage, format!("group: {message}"))
}

/// Ends calls that are not to be issued.
fn drop_all(calls: &[Collected], why: &str) {
    calls.iter().for_each(|call| call.operation.end(Err(not_issued(why))));
}

#[pymethods]
impl PyGroup {
    #[new]
    fn new() -> Self {
        PyGroup { number: LAST_NUMBER.fetch_add(1, Ordering::Relaxed), was_entered: AtomicBool::new(false) }
    }

    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let group = slf.get();
        if group.was_entered.swap(true, Ordering::Relaxed) {
            return Err(usage("it was entered before: each `with` has a group of its own"));
        }
        collected::open(py, group.number)?;
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let is_exception = !kind.is_none();
        match collected::close(py, self.number, is_exception)? {
            Left::Inner => Ok(()),
            Left::Outermost { calls, .. } if is_exception => {
                py.detach(|| drop_all(&calls, "an exception ended its group"));
                Ok(())
            }
            Left::Outermost { calls, is_broken: true } => {
                let why = "an exception ended a group inside its group";
                py.detach(|| drop_all(&calls, why));
                Err(usage(&format!("nothing was issued: {why}")))
            }
            Left::Outermost { calls, .. } => issue_and_wait(py, &calls),
            // The exception is more to the point.
            Left::Stranger if is_exception => Ok(()),
            Left::Stranger => {
                Err(usage("a group is left by the thread and the task that have entered it, the innermost one first"))
            }
        }
    }
}

/// A call that could not be issued, by its place in the group, and why.
type Failure = (usize, Error);

/// Issues calls, and waits for those that block.
fn issue_and_wait(py: Python<'_>, calls: &[Collected]) -> PyResult<()> {
    let lanes: PyResult<Vec<_>> = calls.iter().map(|call| call.lane.get()).collect();
    let lanes = lanes.inspect_err(|_| drop_all(calls, "this process was forked inside the group"))?;
    let failure = py.detach(|| issue(calls, &lanes));
    let mut first = failure.map(|(at, error)| calls[at].caller.of(py, calls[at].operation.call.kind.name(), &error));
    for call in calls.iter().filter(|call| call.is_blocking) {
        let waited = PyOperation::of(call).finish(py, None);
        if let Err(error) = waited {
            if !call.operation.is_done() {
                // A signal's. Calls that go on keep their arrays.
                return Err(error);
            }
            first.get_or_insert(error);
        }
    }
    first.map_or(Ok(()), Err)
}

/// Issues calls: sends and receives together, then collectives in their order. Returns the first that could not be.
fn issue(calls: &[Collected], lanes: &[&Arc<Lane>]) -> Option<Failure> {
    let is_p2p = |call: &Collected| matches!(call.operation.call.kind, Kind::Send | Kind::Recv);
    let closed = lanes.iter().position(|lane| lane.is_closed());
    let messages: Vec<_> =
        lanes.iter().zip(calls).filter(|(_, call)| is_p2p(call)).map(|(lane, call)| (*lane, &call.operation)).collect();
    let refusal = match closed {
        Some(at) => Some((at, Lane::closed())),
        None => Lane::issue_together(&messages)
            .err()
            .map(|error| (calls.iter().position(is_p2p).unwrap_or_default(), error)),
    };
    if let Some(failure) = refusal {
        drop_all(calls, "another call of its group could not be");
        return Some(failure);
    }
    let mut first = None;
    for (at, (lane, call)) in lanes.iter().zip(calls).enumerate() {
        let issued = if is_p2p(call) { Ok(()) } else { lane.submit(&call.operation) };
        if let Err(error) = issued.and_then(|()| told_later(lane, &call.operation)) {
            call.operation.end(Err(error.clone()));
            first.get_or_insert((at, error));
        }
    }
    first
}

/// It is under way: whoever has asked to be told of its end is told.
fn told_later(lane: &Arc<Lane>, operation: &Arc<Operation>) -> Result<(), Error> {
    if operation.release() { lane.finish_later(operation) } else { Ok(()) }
}
