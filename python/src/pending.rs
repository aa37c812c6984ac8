//! A call that goes on, as Python sees it: waits with signals, functions that are called at its end, and `await`.

use std::sync::Arc;
use std::time::Duration;

use mccs::ErrorClass;
use pyo3::prelude::*;

use crate::argument::{Argument, duration};
use crate::collected::{self, Collected};
use crate::errors::{self, Caller};
use crate::lane::Waited;
use crate::member::Member;
use crate::operation::{Operation, Phase};
use crate::process::OfProcess;

/// A call that goes on. ``wait`` ends it.
#[pyclass(frozen, module = "mccs", name = "Operation")]
pub(crate) struct PyOperation {
    member: OfProcess<Member>,
    operation: Arc<Operation>,
    caller: Caller,
}

impl PyOperation {
    pub(crate) fn new(member: &Member, operation: Arc<Operation>, caller: Caller) -> Self {
        PyOperation { member: OfProcess::new(member.clone()), operation, caller }
    }

    /// A call of a group.
    pub(crate) fn of(call: &Collected) -> Self {
        PyOperation { member: call.member.clone(), operation: Arc::clone(&call.operation), caller: call.caller }
    }

    /// # Errors
    /// In a forked child.
    fn member(&self, py: Python<'_>) -> PyResult<&Member> {
        self.member.get_for(py, self.caller, self.name())
    }

    /// Whether a group keeps it.
    pub(crate) fn is_kept(&self) -> bool {
        self.operation.is_kept()
    }

    fn name(&self) -> &'static str {
        self.operation.call.kind.name()
    }

    /// A wait for what the caller itself is to issue would not end.
    fn refuse_in_group(&self, py: Python<'_>) -> PyResult<()> {
        if self.operation.is_kept() && collected::is_open(py)? {
            let message = "it is issued when its group ends: wait for it behind the group";
            return Err(self.caller.error(py, self.name(), ErrorClass::InvalidUsage, message));
        }
        Ok(())
    }

    /// Waits until it has ended.
    pub(crate) fn finish(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        let member = self.member(py)?;
        let waited = errors::with_signals(py, |go_on| member.wait(&self.operation, timeout, go_on))?;
        let call = self.name();
        match waited {
            Waited::Ended(Ok(())) => Ok(()),
            Waited::Ended(Err(error)) => Err(self.caller.of(py, call, &error)),
            // A signal's exception has been raised.
            Waited::TimedOut | Waited::Interrupted => {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                let message = format!("Timed out after {seconds} s: another rank may not have made the call");
                Err(self.caller.error(py, call, ErrorClass::Timeout, &message))
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
        let refused = |message: String| self.caller.argument(py, self.name(), &message);
        let timeout = timeout.map_err(refused)?;
        self.refuse_in_group(py)?;
        self.finish(py, timeout)
    }

    /// ``await operation`` in asyncio: as ``wait``, and the event loop goes on meanwhile.
    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let py = slf.py();
        slf.get().refuse_in_group(py)?;
        py.import(pyo3::intern!(py, "mccs.awaiting"))?.call_method1(pyo3::intern!(py, "until_done"), (slf,))
    }

    /// Whether it has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let member = self.member(py)?;
        Ok(py.detach(|| member.poll(&self.operation)))
    }

    /// Has a function called, without arguments, when it has ended: at once if it has, otherwise from a thread of the package's.
    fn when_done(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let member = self.member(py)?;
        match self.operation.call_when_done(callback.clone_ref(py)) {
            Phase::Ended => callback.call0(py).map(drop),
            // The group sees to it.
            Phase::Kept => Ok(()),
            Phase::UnderWay => {
                let later = py.detach(|| member.finish_later(&self.operation));
                later.map_err(|error| self.caller.of(py, self.name(), &error))
            }
        }
    }

    /// The exception that it has ended with. ``None`` while it goes on, and where it went well.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        let error = self.operation.outcome()?.err()?;
        Some(self.caller.of(py, self.name(), &error))
    }
}
