//! Ownership of GPU memory handles: they are numbers, and whoever knows one could name it.
//!
//! Whoever registers one first has it, as a process of its tenant's, until the last of its registrations has gone and the memory is
//! closed. Another process that registers the same meanwhile is refused (decision 031).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mccs_cuda::IpcHandle;

/// The process that registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registrant {
    /// Its tenant's name.
    pub tenant: String,
    /// Its process, as the kernel says it.
    pub pid: i32,
}

/// Registrations: by whom, and how often.
#[derive(Clone, Default)]
pub(crate) struct Handles(Arc<Mutex<HashMap<IpcHandle, (Registrant, usize)>>>);

/// A registration, until it is dropped.
pub(crate) struct Registration {
    pub(crate) handle: IpcHandle,
    all: Handles,
}

impl Handles {
    fn all(&self) -> MutexGuard<'_, HashMap<IpcHandle, (Registrant, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a handle; not, if another process has.
    pub(crate) fn register(&self, handle: IpcHandle, by: &Registrant) -> Option<Registration> {
        let mut all = self.all();
        let (owner, count) = all.entry(handle).or_insert_with(|| (by.clone(), 0));
        if owner != by {
            return None;
        }
        *count += 1;
        Some(Registration { handle, all: self.clone() })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut all = self.all.all();
        if let Some((_, count)) = all.get_mut(&self.handle) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_its_first_process_until_that_has_given_back_all() {
        let handles = Handles::default();
        let by = |tenant: &str, pid| Registrant { tenant: tenant.into(), pid };
        let handle = IpcHandle([7; 64]);
        let first = handles.register(handle, &by("a", 1)).expect("nobody has it");
        let again = handles.register(handle, &by("a", 1)).expect("it is its own");
        for other in [by("b", 1), by("a", 2)] {
            assert!(handles.register(handle, &other).is_none());
            assert!(handles.register(IpcHandle([8; 64]), &other).is_some());
        }
        drop(first);
        assert!(handles.register(handle, &by("b", 1)).is_none());
        drop(again);
        let other = handles.register(handle, &by("b", 1)).expect("nobody has it any more");
        assert!(handles.register(handle, &by("a", 1)).is_none());
        drop(other);
        assert!(handles.all().is_empty());
    }
}
