//! Pointers that programs know things by; a destroyed one is refused. Until it is given out again:
//! the last one first, as allocators do.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::{Done, INVALID_HANDLE};

/// Between pointers.
const STRIDE: usize = 64;

/// See the module's documentation.
pub(crate) struct Registry<T> {
    first: usize,
    state: LazyLock<Mutex<State<T>>>,
}

struct State<T> {
    known: HashMap<usize, Arc<T>>,
    free: Vec<usize>,
    count: usize,
}

impl<T> Registry<T> {
    /// Pointers of a kind begin at a place of their own.
    pub(crate) const fn new(kind: usize) -> Self {
        let empty = || Mutex::new(State { known: HashMap::new(), free: Vec::new(), count: 0 });
        Registry { first: (kind + 1) << 40, state: LazyLock::new(empty) }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives it a pointer.
    pub(crate) fn add(&self, thing: Arc<T>) -> usize {
        let mut state = self.state();
        let number = state.free.pop().unwrap_or_else(|| {
            state.count += 1;
            state.count - 1
        });
        let pointer = self.first + number * STRIDE;
        state.known.insert(pointer, thing);
        pointer
    }

    /// The object of a pointer.
    pub(crate) fn get(&self, pointer: usize) -> Done<Arc<T>> {
        self.state().known.get(&pointer).cloned().ok_or(INVALID_HANDLE)
    }

    /// The same, and it stands for it no more.
    pub(crate) fn remove(&self, pointer: usize) -> Done<Arc<T>> {
        let mut state = self.state();
        let thing = state.known.remove(&pointer).ok_or(INVALID_HANDLE)?;
        let number = (pointer - self.first) / STRIDE;
        state.free.push(number);
        Ok(thing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::INVALID_HANDLE;

    #[test]
    fn what_was_removed_is_refused_and_its_pointer_comes_again() {
        let registry: Registry<u32> = Registry::new(3);
        let [one, two] = [1, 2].map(|number| registry.add(Arc::new(number)));
        assert_eq!((registry.get(one).as_deref(), registry.get(two).as_deref()), (Ok(&1), Ok(&2)));
        assert_eq!(registry.remove(one).as_deref(), Ok(&1));
        assert_eq!((registry.get(one), registry.remove(one)), (Err(INVALID_HANDLE), Err(INVALID_HANDLE)));
        assert_eq!(registry.add(Arc::new(3)), one);
    }
}
