//! Exceptions (`mccs/errors.py`). Those of a call name its rank.

use mccs::{ErrorClass, Scope};
use pyo3::prelude::*;

pyo3::import_exception!(mccs.errors, InvalidArgument);
pyo3::import_exception!(mccs.errors, InvalidUsage);
pyo3::import_exception!(mccs.errors, Timeout);
pyo3::import_exception!(mccs.errors, Remote);
pyo3::import_exception!(mccs.errors, System);
pyo3::import_exception!(mccs.errors, Internal);

/// The caller.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
}

impl Caller {
    /// An exception about a call, which ends nothing else.
    pub(crate) fn error(self, py: Python<'_>, call: &str, class: ErrorClass, message: &str) -> PyErr {
        let Caller { rank, nranks } = self;
        let error = new(class, format!("rank {rank} of {nranks}, {call}: {message}"));
        let value = error.value(py);
        // Attributes of an exception of the package's own: they can be set.
        let _ = value.setattr("rank", rank).and_then(|()| value.setattr("call", call));
        error
    }

    pub(crate) fn of(self, py: Python<'_>, call: &str, error: &mccs::Error) -> PyErr {
        ending(py, error, self.error(py, call, error.class(), &error.to_string()))
    }

    pub(crate) fn argument(self, py: Python<'_>, call: &str, message: &str) -> PyErr {
        self.error(py, call, ErrorClass::InvalidArgument, message)
    }
}

/// An exception about an argument of a call of no rank's.
pub(crate) fn of_argument(py: Python<'_>, call: &str, message: &str) -> PyErr {
    let error = new(ErrorClass::InvalidArgument, format!("{call}: {message}"));
    // As above.
    let _ = error.value(py).setattr("call", call);
    error
}

/// An exception about no call.
pub(crate) fn new(class: ErrorClass, message: String) -> PyErr {
    match class {
        ErrorClass::InvalidArgument => InvalidArgument::new_err(message),
        ErrorClass::InvalidUsage => InvalidUsage::new_err(message),
        ErrorClass::Timeout => Timeout::new_err(message),
        ErrorClass::Remote => Remote::new_err(message),
        ErrorClass::System => System::new_err(message),
        ErrorClass::Internal => Internal::new_err(message),
    }
}

/// An exception about no call, for what the library says.
pub(crate) fn of(error: &mccs::Error) -> PyErr {
    Python::attach(|py| ending(py, error, new(error.class(), error.to_string())))
}

fn ending(py: Python<'_>, error: &mccs::Error, exception: PyErr) -> PyErr {
    let ends = match error.ends() {
        Scope::Call => "call",
        Scope::Communicator => "communicator",
        Scope::Session => "session",
    };
    // As above.
    let _ = exception.value(py).setattr("ends", ends);
    exception
}

/// Waits without the interpreter's lock: `wait` asks several times a second whether to go on, and ends where a signal came.
///
/// # Errors
/// The signal's exception.
pub(crate) fn with_signals<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(&mut (dyn FnMut() -> bool + Send)) -> T + Send,
) -> PyResult<T> {
    let mut signal = None;
    let waited = py.detach(|| {
        wait(&mut || {
            signal = Python::attach(|py| py.check_signals()).err();
            signal.is_none()
        })
    });
    signal.map_or(Ok(waited), Err)
}
