//! User objects that emulated graphs keep, with their callbacks at the end.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use crate::code::{Done, INVALID_VALUE};
use crate::graph;
use crate::registry::Registry;

/// Something of the program's, which is called back for when nobody keeps it any more.
pub(crate) struct Object {
    destroy: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

/// A program's references to something.
struct Held {
    object: Arc<Object>,
    count: Mutex<u32>,
}

static OBJECTS: Registry<Held> = Registry::new(8);

impl Drop for Object {
    fn drop(&mut self) {
        let (destroy, data) = (self.destroy, self.data);
        // On a thread of the driver's, some time after.
        let called = std::thread::Builder::new().name("gpu-objects".into()).spawn(move || {
            // SAFETY: the program has promised that it can be called once, when nothing keeps it.
            unsafe { destroy(std::ptr::with_exposed_provenance_mut(data)) };
        });
        drop(called);
    }
}

/// Returns a pointer, with so many references.
pub(crate) fn create_object(data: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), count: u32) -> Done<usize> {
    const MOST: u32 = i32::MAX.unsigned_abs();
    if !(1..=MOST).contains(&count) {
        return Err(INVALID_VALUE);
    }
    let object = Arc::new(Object { destroy, data: data.expose_provenance() });
    Ok(OBJECTS.add(Arc::new(Held { object, count: Mutex::new(count) })))
}

/// Gives references back.
pub(crate) fn release_object(object: usize, count: u32) -> Done {
    let held = OBJECTS.get(object).map_err(|_| INVALID_VALUE)?;
    let mut left = held.count.lock().unwrap_or_else(PoisonError::into_inner);
    *left = left.checked_sub(count).ok_or(INVALID_VALUE)?;
    if *left == 0 {
        OBJECTS.remove(object)?;
    }
    Ok(())
}

/// A graph keeps an object: by references of its own, or by the program's.
pub(crate) fn retain_object(graph: usize, object: usize, count: u32, flags: u32) -> Done {
    const MOVE: u32 = 1;
    let graph = graph::find(graph)?;
    let held = OBJECTS.get(object).map_err(|_| INVALID_VALUE)?;
    graph.keep(Arc::clone(&held.object));
    if flags == MOVE { release_object(object, count) } else { Ok(()) }
}
