//! Calls that wait for the end of their group. A group belongs to the thread that opens it, and there to its asyncio task: other
//! tasks of the thread go on between.

use std::cell::RefCell;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::Caller;
use crate::member::Member;
use crate::operation::Operation;
use crate::process::OfProcess;

/// A call that is kept for the end of its group.
pub(crate) struct Collected {
    pub(crate) member: OfProcess<Member>,
    pub(crate) operation: Arc<Operation>,
    pub(crate) caller: Caller,
    /// The group's end waits for its end.
    pub(crate) is_blocking: bool,
}

/// The groups that a task has open, one inside the other.
struct Open {
    /// `None` outside of asyncio.
    task: Option<Py<PyAny>>,
    /// Numbers of the groups, the outermost first.
    groups: Vec<u64>,
    calls: Vec<Collected>,
    /// A group inside has ended by an exception.
    is_broken: bool,
}

/// Work that a group leaves when it has ended.
pub(crate) enum Left {
    /// It was inside another, which has its calls.
    Inner,
    /// The outermost one, with the calls of all.
    Outermost { calls: Vec<Collected>, is_broken: bool },
    /// The task has not entered it, or has entered others since that it has not left.
    Stranger,
}

thread_local! {
    static OPEN: RefCell<Vec<Open>> = RefCell::default();
}

/// The asyncio task that runs in this thread.
fn task(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let task = py.import(pyo3::intern!(py, "mccs.tasks"))?.call_method0(pyo3::intern!(py, "current_task"))?;
    Ok(Some(task).filter(|task| !task.is_none()))
}

/// Does something with the calling task's groups. `None` where it has none open.
fn with_open<T>(py: Python<'_>, f: impl FnOnce(&mut Open) -> T) -> PyResult<Option<T>> {
    // As good as always.
    if OPEN.with_borrow(Vec::is_empty) {
        return Ok(None);
    }
    let task = task(py)?;
    let is_own = |open: &Open| open.task.as_ref().map(Py::as_ptr) == task.as_ref().map(Bound::as_ptr);
    Ok(OPEN.with_borrow_mut(|all| all.iter_mut().find(|open| is_own(open)).map(f)))
}

/// Opens a group.
pub(crate) fn open(py: Python<'_>, number: u64) -> PyResult<()> {
    if with_open(py, |open| open.groups.push(number))?.is_none() {
        let task = task(py)?.map(Bound::unbind);
        let open = Open { task, groups: vec![number], calls: Vec::new(), is_broken: false };
        OPEN.with_borrow_mut(|all| all.push(open));
    }
    Ok(())
}

/// Whether the calling task has a group open.
pub(crate) fn is_open(py: Python<'_>) -> PyResult<bool> {
    Ok(with_open(py, |_| ())?.is_some())
}

/// Keeps a call for the end of the calling task's group, which is open.
pub(crate) fn keep(py: Python<'_>, call: Collected) -> PyResult<()> {
    call.operation.keep();
    with_open(py, |open| open.calls.push(call)).map(drop)
}

/// Closes a group, which an exception ends or not.
pub(crate) fn close(py: Python<'_>, number: u64, is_exception: bool) -> PyResult<Left> {
    let left = with_open(py, |open| {
        if open.groups.last() != Some(&number) {
            return Left::Stranger;
        }
        open.groups.pop();
        open.is_broken |= is_exception;
        if open.groups.is_empty() {
            Left::Outermost { calls: std::mem::take(&mut open.calls), is_broken: open.is_broken }
        } else {
            Left::Inner
        }
    })?;
    OPEN.with_borrow_mut(|all| all.retain(|open| !open.groups.is_empty()));
    Ok(left.unwrap_or(Left::Stranger))
}
