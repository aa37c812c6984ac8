//! Emulated CUDA events: points in a stream's work, also across processes. Those that other
//! processes open are two words of a memfd: how often they were recorded, and up to which time that
//! has happened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::capture::{self, Capture};
use crate::code::{CAPTURED_EVENT, Done, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED};
use crate::device::{self, Device};
use crate::graph::{Graph, Kind};
use crate::handle::{self, Handle};
use crate::physical::{PAGE_BYTES, Physical, What};
use crate::registry::Registry;
use crate::stream::Stream;
use crate::wait::{until, word};

/// Flags.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// See the module's documentation.
pub(crate) struct Event {
    device: &'static Device,
    is_timed: bool,
    shared: Option<Shared>,
    last: Mutex<Last>,
}

/// The last record.
enum Last {
    Nothing,
    At(Arc<Point>),
    /// Behind these nodes of a graph.
    Captured(Arc<Capture>, Vec<usize>),
}

/// A record of an event.
#[derive(Default)]
pub(crate) struct Point {
    has_happened: AtomicBool,
    at: OnceLock<Instant>,
}

impl Point {
    pub(crate) fn happen(&self) {
        let _ = self.at.set(Instant::now());
        self.has_happened.store(true, Ordering::Release);
    }

    pub(crate) fn has_happened(&self) -> bool {
        self.has_happened.load(Ordering::Acquire)
    }
}

/// An event of several processes.
struct Shared {
    physical: Physical,
    address: u64,
    is_own: bool,
}

static EVENTS: Registry<Event> = Registry::new(2);

impl Shared {
    fn new(physical: Physical, is_own: bool) -> Done<Self> {
        let address = physical.map(None, PAGE_BYTES)?;
        Ok(Shared { physical, address, is_own })
    }

    fn recorded(&self) -> &std::sync::atomic::AtomicU64 {
        word(self.address)
    }

    fn happened(&self) -> &std::sync::atomic::AtomicU64 {
        word(self.address + 8)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody else knows of it.
        unsafe { libc::munmap(self.address as *mut libc::c_void, PAGE_BYTES as usize) };
    }
}

/// A new event of the current context. Returns its pointer.
pub(crate) fn create(flags: u32) -> Done<usize> {
    let device = device::current()?;
    let (is_timed, is_shared) = (flags & DISABLE_TIMING == 0, flags & INTERPROCESS != 0);
    if is_timed && is_shared {
        return Err(INVALID_VALUE);
    }
    let shared = || Shared::new(Physical::new(What::Event, device.number, PAGE_BYTES)?, true);
    let shared = is_shared.then(shared).transpose()?;
    Ok(EVENTS.add(Arc::new(Event { device, is_timed, shared, last: Mutex::new(Last::Nothing) })))
}

/// Names an event to other processes.
pub(crate) fn export(event: usize) -> Done<Handle> {
    let event = find(event)?;
    event.shared.as_ref().filter(|shared| shared.is_own).map(|shared| handle::of(&shared.physical)).ok_or(INVALID_VALUE)
}

/// Another process' event. Returns its pointer here.
pub(crate) fn open(handle: &Handle) -> Done<usize> {
    let device = device::current()?;
    let physical = handle::open(handle, What::Event)?;
    if physical.name.device != device.number {
        return Err(INVALID_VALUE);
    }
    let shared = Some(Shared::new(physical, false)?);
    Ok(EVENTS.add(Arc::new(Event { device, is_timed: false, shared, last: Mutex::new(Last::Nothing) })))
}

/// The event with a pointer.
pub(crate) fn find(event: usize) -> Done<Arc<Event>> {
    EVENTS.get(event)
}

/// Destroys an event. A waiter goes on waiting.
pub(crate) fn destroy(event: usize) -> Done {
    EVENTS.remove(event).map(drop)
}

impl Event {
    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks what a stream has so far.
    pub(crate) fn record(self: &Arc<Self>, stream: &Arc<Stream>) -> Done {
        if stream.device.number != self.device.number {
            return Err(INVALID_HANDLE);
        }
        if let Some(taking) = stream.taking() {
            if self.shared.is_some() {
                return taking.refuse_from_outside();
            }
            let tail = taking.record()?;
            *self.last() = Last::Captured(taking.capture, tail);
            return Ok(());
        }
        self.device.check()?;
        if let Some(shared) = &self.shared {
            let (number, own) = (shared.recorded().fetch_add(1, Ordering::AcqRel) + 1, Arc::clone(self));
            return stream.enqueue_in_any_case(move |_| {
                if let Some(shared) = &own.shared {
                    shared.happened().fetch_max(number, Ordering::AcqRel);
                }
                Ok(())
            });
        }
        let point = self.begin_record();
        // Whoever waits elsewhere goes on when the context has failed.
        stream.enqueue_in_any_case(move |_| {
            point.happen();
            Ok(())
        })
    }

    /// The last record, by a stream or a graph.
    pub(crate) fn recorded_last(&self) -> Option<Arc<Point>> {
        if let Last::At(point) = &*self.last() { Some(Arc::clone(point)) } else { None }
    }

    /// It is recorded from here on.
    pub(crate) fn begin_record(&self) -> Arc<Point> {
        let point = Arc::new(Point::default());
        *self.last() = Last::At(Arc::clone(&point));
        point
    }

    /// Whether nodes of graphs may record it, or wait for it.
    fn check_for_graphs(&self) -> Done {
        if self.shared.is_none() { Ok(()) } else { Err(NOT_SUPPORTED) }
    }

    /// Has a captured stream wait for what was recorded last when its graph is launched.
    pub(crate) fn wait_in_graph(self: &Arc<Self>, stream: &Arc<Stream>) -> Done {
        self.check_for_graphs()?;
        stream.taking().ok_or(INVALID_VALUE)?.add(Kind::Wait(Arc::clone(self)))
    }

    /// Adds a node to a graph that records it. Returns what the node is known by.
    pub(crate) fn record_in_graph(self: &Arc<Self>, graph: &Graph, behind: &[usize]) -> Done<usize> {
        self.check_for_graphs()?;
        graph.add(Kind::Record(Arc::clone(self)), behind)
    }

    /// Has a stream wait for what was recorded last.
    pub(crate) fn wait(self: &Arc<Self>, stream: &Arc<Stream>) -> Done {
        let taking = stream.taking();
        if let Some(shared) = &self.shared {
            if let Some(taking) = taking {
                return taking.refuse_from_outside();
            }
            let (number, own) = (shared.recorded().load(Ordering::Acquire), Arc::clone(self));
            let has_happened =
                move || own.shared.as_ref().is_none_or(|shared| shared.happened().load(Ordering::Acquire) >= number);
            return stream.enqueue(move |device| until(device, &has_happened));
        }
        match (&*self.last(), taking) {
            (Last::Nothing, _) => Ok(()),
            (Last::At(_), Some(taking)) => taking.refuse_from_outside(),
            (Last::At(point), None) => {
                let point = Arc::clone(point);
                stream.enqueue(move |device| until(device, || point.has_happened()))
            }
            (Last::Captured(capture, tail), _) => capture.wait(stream, tail),
        }
    }

    /// Whether what was recorded last has happened.
    pub(crate) fn query(&self) -> Done {
        capture::forbid()?;
        self.device.check()?;
        if let Some(shared) = &self.shared {
            let recorded = shared.recorded().load(Ordering::Acquire);
            return if shared.happened().load(Ordering::Acquire) >= recorded { Ok(()) } else { Err(NOT_READY) };
        }
        match &*self.last() {
            Last::Nothing => Ok(()),
            Last::At(point) if point.has_happened() => Ok(()),
            Last::At(_) => Err(NOT_READY),
            Last::Captured(..) => Err(CAPTURED_EVENT),
        }
    }

    fn time(&self) -> Done<Instant> {
        match &*self.last() {
            Last::At(point) if self.is_timed => point.at.get().copied().ok_or(NOT_READY),
            _ => Err(INVALID_HANDLE),
        }
    }

    /// Milliseconds from another.
    pub(crate) fn since(&self, start: &Event) -> Done<f32> {
        Ok(self.time()?.saturating_duration_since(start.time()?).as_secs_f32() * 1e3)
    }
}
