//! Exceptions. Each names the rank and the call.

use mccs::ErrorClass;
use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(mccs, Error, PyRuntimeError, "A call failed. `rank` and `call` say whose and which.");
create_exception!(mccs, InvalidArgument, Error, "The caller: an argument is wrong, or contradicts another rank's.");
create_exception!(mccs, Timeout, Error, "Somebody did not come in time.");
create_exception!(mccs, Remote, Error, "Another rank, its host or the service failed or left.");
create_exception!(mccs, System, Error, "This host: no service, no memory, or what the operator has to mend.");

/// Whose call.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
}

impl Caller {
    /// An exception about a call.
    pub(crate) fn error(self, py: Python<'_>, call: &str, class: ErrorClass, message: &str) -> PyErr {
        let Caller { rank, nranks } = self;
        let error = new(class, format!("rank {rank} of {nranks}, {call}: {message}"));
        let value = error.value(py);
        // Attributes of an exception of Python's own kind: they can be set.
        let _ = value.setattr("rank", rank).and_then(|()| value.setattr("call", call));
        error
    }

    pub(crate) fn of(self, py: Python<'_>, call: &str, error: &mccs::Error) -> PyErr {
        self.error(py, call, error.class(), &error.to_string())
    }

    pub(crate) fn argument(self, py: Python<'_>, call: &str, message: &str) -> PyErr {
        self.error(py, call, ErrorClass::InvalidArgument, message)
    }
}

/// An exception about no call.
pub(crate) fn new(class: ErrorClass, message: String) -> PyErr {
    match class {
        ErrorClass::InvalidArgument | ErrorClass::InvalidUsage => InvalidArgument::new_err(message),
        ErrorClass::Timeout => Timeout::new_err(message),
        ErrorClass::Remote => Remote::new_err(message),
        ErrorClass::System | ErrorClass::Internal => System::new_err(message),
    }
}

pub(crate) fn of(error: &mccs::Error) -> PyErr {
    new(error.class(), error.to_string())
}
