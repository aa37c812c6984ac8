//! Arguments of Python's that may be none of their type: the call says so, which knows its rank and name.

use std::convert::Infallible;
use std::time::Duration;

use pyo3::prelude::*;

/// A time-out of Python's; none for an infinite one.
pub(crate) fn duration(seconds: Option<f64>) -> Result<Option<Duration>, String> {
    // A float that is no number stays none.
    let convert = |seconds: f64| Duration::try_from_secs_f64(if seconds < 0.0 { 0.0 } else { seconds });
    let finite = seconds.filter(|seconds| *seconds != f64::INFINITY).map(convert).transpose();
    finite.map_err(|error| format!("timeout: {error}"))
}

/// An argument, or what is wrong with it.
pub(crate) enum Argument<T> {
    Good(T),
    Bad(String),
}

impl Argument<String> {
    pub(crate) fn of(text: &str) -> Self {
        Argument::Good(text.into())
    }
}

impl<T> Argument<T> {
    /// The argument of this name.
    ///
    /// # Errors
    /// The mistake.
    pub(crate) fn get(self, name: &str) -> Result<T, String> {
        match self {
            Argument::Good(value) => Ok(value),
            Argument::Bad(why) => Err(format!("{name} = {why}")),
        }
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Argument<T> {
    type Error = Infallible;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(object.extract().map_or_else(
            |error: T::Error| {
                let error: PyErr = error.into();
                Argument::Bad(format!("{}: {}", &*object, error.value(object.py())))
            },
            Argument::Good,
        ))
    }
}
