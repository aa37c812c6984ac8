//! Communicators that the end of the process closes: a rank that has ended its calls is not missed by those that have not.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;

use crate::process::OfProcess;

/// A rank's membership, as the end of the process finds it.
pub(crate) trait Close: Send + Sync {
    /// Leaves if nothing is under way. Waits for nobody.
    fn close_at_exit(self: Arc<Self>);
}

/// This process' memberships that may be open.
static OPEN: Mutex<Vec<OfProcess<Weak<dyn Close>>>> = Mutex::new(Vec::new());

/// Has the end of the process close a membership, if it is still there.
pub(crate) fn register<T: Close + 'static>(member: &Arc<T>) {
    let member: Weak<dyn Close> = Arc::downgrade(member) as Weak<dyn Close>;
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|other| other.here().is_some_and(|other| other.strong_count() > 0));
    open.push(OfProcess::new(member));
}

/// Closes this process' communicators.
#[pyfunction]
#[pyo3(name = "_close_all")]
pub(crate) fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    let members = open.iter().filter_map(|member| member.here()?.upgrade());
    members.for_each(|member| py.detach(|| member.close_at_exit()));
}
