//! Groups as Python sees them: `with mccs.group():` collects the calls inside, and issues them together at its end. All or none:
//! what is wrong is found before the first is issued.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mccs::{Error, ErrorClass, Group};
use pyo3::prelude::*;

use crate::collected::{self, Collected, Left};
use crate::errors;
use crate::lane::Lane;
use crate::member::Member;
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

/// Ends calls that are not to be issued. Those that a GPU may have already end when it has passed them.
fn drop_all(calls: &[Collected], why: &str) {
    for call in calls {
        if call.operation.failure().is_none() {
            call.operation.end(Err(not_issued(why)));
        }
    }
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

impl Collected {
    /// Whether it begins along with others, by a group of the library's.
    fn is_together(&self) -> bool {
        self.operation.is_on_gpu() || matches!(self.operation.call.kind, Kind::Send | Kind::Recv)
    }
}

/// Issues calls, and waits for those that block.
fn issue_and_wait(py: Python<'_>, calls: &[Collected]) -> PyResult<()> {
    let member = |call: &Collected| {
        let name = call.operation.call.kind.name();
        call.member.get_for(py, call.caller, name).cloned()
    };
    let members: PyResult<Vec<_>> = calls.iter().map(member).collect();
    let members = members.inspect_err(|_| drop_all(calls, "this process was forked inside the group"))?;
    let failure = py.detach(|| issue(calls, &members));
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

/// Issues calls: sends, receives and all that GPUs do together, then collectives in their order. Returns the first that could not be.
fn issue(calls: &[Collected], members: &[Member]) -> Option<Failure> {
    if let Err(failure) = issue_together(calls, members) {
        drop_all(calls, "another call of its group could not be");
        // The failure is more to the point than one here.
        members.iter().zip(calls).for_each(|(member, call)| drop(told_later(member, &call.operation)));
        return Some(failure);
    }
    let mut first = None;
    for (at, (member, call)) in members.iter().zip(calls).enumerate() {
        let issued = if call.is_together() { Ok(()) } else { member.submit(&call.operation) };
        if let Err(error) = issued.and_then(|()| told_later(member, &call.operation)) {
            call.operation.end(Err(error.clone()));
            first.get_or_insert((at, error));
        }
    }
    first
}

/// Begins calls by a group of the library's, of any communicators: all, or none.
fn issue_together(calls: &[Collected], members: &[Member]) -> Result<(), Failure> {
    if let Some(at) = members.iter().position(Member::is_closed) {
        return Err((at, Lane::closed()));
    }
    let together: Vec<_> = (0..).zip(calls).zip(members).filter(|((_, call), _)| call.is_together()).collect();
    let Some(((first, _), _)) = together.first() else { return Ok(()) };
    let group = Group::begin();
    let collected = together.iter().try_for_each(|((at, call), member)| {
        let collected = match member {
            Member::Host(lane) => lane.collect(&call.operation),
            Member::Gpu(rank) => rank.collect(&call.operation),
        };
        collected.map_err(|error| (*at, error))
    });
    // Dropped where one of them was refused.
    let was_begun = collected.is_ok();
    let issued = collected.and_then(|()| group.end().map_err(|error| (*first, error)));
    for ((_, call), member) in &together {
        match (member, &issued) {
            (Member::Host(lane), issued) => lane.group_has_ended(&call.operation, issued.is_ok()),
            (Member::Gpu(rank), Ok(())) => rank.is_enqueued(&call.operation),
            // Some may be on their streams.
            (Member::Gpu(rank), Err((_, error))) if was_begun => rank.was_refused(&call.operation, error.clone()),
            (Member::Gpu(_), Err(_)) => {}
        }
    }
    issued
}

/// It is under way: whoever has asked to be told of its end is told.
fn told_later(member: &Member, operation: &Arc<Operation>) -> Result<(), Error> {
    if operation.release() { member.finish_later(operation) } else { Ok(()) }
}
