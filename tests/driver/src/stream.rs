//! Emulated streams: a thread each, which does what was enqueued, in order.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::capture::{self, Taking};
use crate::code::{CAPTURE_UNSUPPORTED, Code, Done, INVALID_HANDLE, NOT_READY};
use crate::device::{self, Device};
use crate::graph::Kind;
use crate::registry::Registry;

/// Enqueued work. Graphs do it again and again. An error ends the context.
pub(crate) type Work = Arc<dyn Fn(&'static Device) -> Done + Send + Sync>;

/// With so many entries in a stream the driver has callers wait.
const ENTRIES_MAX: usize = 1024;
/// Pointers that stand for streams of every context.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// See the module's documentation.
pub(crate) struct Stream {
    pub(crate) device: &'static Device,
    /// No other has or had it.
    pub(crate) id: u64,
    /// It changes nothing here: every stream has a thread of its own.
    pub(crate) priority: i32,
    state: Mutex<State>,
    has_changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The first is being done.
    entries: VecDeque<Work>,
    enqueued: u64,
    ended: u64,
    has_thread: bool,
    is_destroyed: bool,
    taking: Option<Taking>,
}

static STREAMS: Registry<Stream> = Registry::new(1);
/// All that live, also those that only their work keeps.
static ALL: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: RefCell<OwnStreams> = RefCell::new(OwnStreams(HashMap::new()));
    static IS_IN_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// A thread's own streams, by GPU: destroyed when it ends.
struct OwnStreams(HashMap<usize, Arc<Stream>>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        self.0.values().for_each(|stream| stream.destroy());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the calling thread is in a function that a stream has called, where the driver must not be.
pub(crate) fn is_in_function() -> bool {
    IS_IN_FUNCTION.get()
}

/// A new stream of the current context. Returns its pointer.
pub(crate) fn create(priority: i32) -> Done<usize> {
    Ok(STREAMS.add(Stream::with_priority(device::current()?, priority)))
}

/// The stream with a pointer.
pub(crate) fn find(pointer: usize) -> Done<Arc<Stream>> {
    match pointer {
        0 | LEGACY => Ok(Arc::clone(device::current()?.default_stream())),
        PER_THREAD => {
            let device = device::current()?;
            Ok(OWN.with_borrow_mut(|own| Arc::clone(own.0.entry(device.number).or_insert_with(|| Stream::new(device)))))
        }
        _ => STREAMS.get(pointer),
    }
}

/// The same, which must be of the current context.
pub(crate) fn find_of_current(pointer: usize) -> Done<Arc<Stream>> {
    let (stream, device) = (find(pointer)?, device::current()?);
    if stream.device.number == device.number { Ok(stream) } else { Err(INVALID_HANDLE) }
}

/// Destroys a stream. Its work goes on.
pub(crate) fn destroy(pointer: usize) -> Done {
    STREAMS.remove(pointer)?.destroy();
    Ok(())
}

fn all() -> Vec<Arc<Stream>> {
    let mut all = locked(&ALL);
    all.retain(|stream| stream.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// Waits until everything has ended that any stream of the process has: as the driver does to free memory.
pub(crate) fn wait_for_all() {
    let streams: Vec<_> = all().into_iter().map(|stream| (stream.enqueued(), stream)).collect();
    streams.iter().for_each(|(enqueued, stream)| stream.wait(*enqueued));
}

/// Waits for all of a context's.
pub(crate) fn synchronize_context(device: &'static Device) -> Done {
    capture::forbid()?;
    let streams = all().into_iter().filter(|stream| stream.device.number == device.number);
    let streams: Vec<_> = streams.map(|stream| (stream.enqueued(), stream)).collect();
    streams.iter().for_each(|(enqueued, stream)| stream.wait(*enqueued));
    device.check()
}

impl Stream {
    pub(crate) fn new(device: &'static Device) -> Arc<Self> {
        Self::with_priority(device, 0)
    }

    fn with_priority(device: &'static Device, priority: i32) -> Arc<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::new(Stream { device, id, priority, state: Mutex::default(), has_changed: Condvar::new() });
        locked(&ALL).push(Arc::downgrade(&stream));
        stream
    }

    fn destroy(&self) {
        locked(&self.state).is_destroyed = true;
        self.has_changed.notify_all();
    }

    fn enqueued(&self) -> u64 {
        locked(&self.state).enqueued
    }

    /// Enqueues work, which is left out when the context is of no use any more; or adds it to the graph that is captured.
    pub(crate) fn enqueue(self: &Arc<Self>, work: impl Fn(&'static Device) -> Done + Send + Sync + 'static) -> Done {
        self.device.check()?;
        self.add(Arc::new(move |device: &'static Device| {
            device.check()?;
            work(device)
        }))
    }

    /// Enqueues work that is done in any case.
    pub(crate) fn enqueue_in_any_case(
        self: &Arc<Self>,
        work: impl Fn(&'static Device) -> Done + Send + Sync + 'static,
    ) -> Done {
        self.device.check()?;
        self.add(Arc::new(work))
    }

    /// Returns when something can be enqueued without a wait, if nobody else enqueues.
    pub(crate) fn wait_for_room(&self) {
        drop(self.state_with_room());
    }

    fn state_with_room(&self) -> MutexGuard<'_, State> {
        let is_full = |state: &mut State| state.entries.len() >= ENTRIES_MAX;
        self.has_changed.wait_while(locked(&self.state), is_full).unwrap_or_else(PoisonError::into_inner)
    }

    fn add(self: &Arc<Self>, work: Work) -> Done {
        if let Some(taking) = self.taking() {
            return taking.add(Kind::Run(work));
        }
        let mut state = self.state_with_room();
        state.entries.push_back(work);
        state.enqueued += 1;
        if !state.has_thread {
            state.has_thread = true;
            let own = Arc::clone(self);
            let name = format!("gpu{}-stream{}", self.device.number, self.id);
            std::thread::Builder::new()
                .name(name)
                .spawn(move || own.run())
                .map_err(|_| crate::code::OPERATING_SYSTEM)?;
        }
        drop(state);
        self.has_changed.notify_all();
        Ok(())
    }

    /// Until it is destroyed, and nothing is left.
    fn run(&self) {
        let mut state = locked(&self.state);
        loop {
            let Some(work) = state.entries.front().cloned() else {
                if state.is_destroyed {
                    state.has_thread = false;
                    return;
                }
                state = self.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            if let Err(code) = work(self.device) {
                self.device.lose(code);
            }
            drop(work);
            state = locked(&self.state);
            let done = state.entries.pop_front();
            state.ended += 1;
            drop(state);
            self.has_changed.notify_all();
            // Memory that it keeps may go with it.
            drop(done);
            state = locked(&self.state);
        }
    }

    /// Waits until so much of it has ended.
    fn wait(&self, enqueued: u64) {
        let mut state = locked(&self.state);
        while state.ended < enqueued {
            state = self.has_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Enqueues work and waits for it.
    pub(crate) fn run_now(self: &Arc<Self>, work: impl Fn(&'static Device) -> Done + Send + Sync + 'static) -> Done {
        capture::forbid()?;
        self.enqueue(work)?;
        self.synchronize()
    }

    /// Waits until all has ended.
    pub(crate) fn synchronize(&self) -> Done {
        self.refuse_captured()?;
        self.wait(self.enqueued());
        self.device.check()
    }

    /// Whether all has ended.
    pub(crate) fn query(&self) -> Done {
        self.refuse_captured()?;
        self.device.check()?;
        let state = locked(&self.state);
        if state.ended == state.enqueued { Ok(()) } else { Err(NOT_READY) }
    }

    /// Fails, and ends the capture, where the stream is captured: the driver answers nothing of it then.
    pub(crate) fn refuse_captured(&self) -> Done {
        self.taking().map_or(Ok(()), |taking| {
            taking.capture.invalidate();
            Err(CAPTURE_UNSUPPORTED)
        })
    }

    /// Calls a function of the program's.
    pub(crate) fn call(
        self: &Arc<Self>,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<(), Code> {
        let data = data.expose_provenance();
        self.enqueue(move |_| {
            IS_IN_FUNCTION.set(true);
            // SAFETY: whoever enqueued it has promised that it can be called when the stream comes here.
            unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
            IS_IN_FUNCTION.set(false);
            Ok(())
        })
    }

    /// The capture that it takes part in.
    pub(crate) fn taking(&self) -> Option<Taking> {
        locked(&self.state).taking.clone()
    }

    /// It takes part in a capture, or not any more.
    pub(crate) fn set_taking(&self, taking: Option<Taking>) {
        locked(&self.state).taking = taking;
    }
}
