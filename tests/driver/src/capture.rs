//! Captures: what streams are told goes into a graph, a list for each stream that takes part. A stream comes in when it waits for an event
//! that was recorded there, and must be waited for itself before the end.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::code::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, Done,
    INVALID_VALUE,
};
use crate::graph::{GRAPHS, Graph, Node};
use crate::stream::{Stream, Work};

/// `CU_STREAM_CAPTURE_MODE_*`.
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// A capture.
pub(crate) struct Capture {
    pub(crate) id: u64,
    /// The graph's pointer.
    pointer: usize,
    state: Mutex<State>,
}

struct State {
    is_valid: bool,
    /// Until the end: events may keep the capture for longer.
    graph: Option<Arc<Graph>>,
    /// By list.
    streams: Vec<Weak<Stream>>,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub(crate) struct Taking {
    pub(crate) capture: Arc<Capture>,
    list: usize,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    static OWN: RefCell<Vec<Weak<Capture>>> = const { RefCell::new(Vec::new()) };
}
/// Of all threads, those in the mode in which they forbid things to all threads.
static GLOBALS: Mutex<Vec<Weak<Capture>>> = Mutex::new(Vec::new());

/// Exchanges what the calling thread forbids itself.
pub(crate) fn exchange_mode(mode: u32) -> Done<u32> {
    if mode > RELAXED { Err(INVALID_VALUE) } else { Ok(MODE.replace(mode)) }
}

/// Fails in a call that captures forbid, and ends those.
pub(crate) fn forbid() -> Done {
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let going = |captures: &mut Vec<Weak<Capture>>| -> Vec<Arc<Capture>> {
        captures.retain(|capture| capture.upgrade().is_some_and(|capture| !capture.is_over()));
        captures.iter().filter_map(Weak::upgrade).collect()
    };
    let mut forbidding = OWN.with_borrow_mut(going);
    if mode == GLOBAL {
        forbidding.extend(going(&mut GLOBALS.lock().unwrap_or_else(PoisonError::into_inner)));
    }
    forbidding.iter().for_each(|capture| capture.invalidate());
    if forbidding.is_empty() { Ok(()) } else { Err(CAPTURE_UNSUPPORTED) }
}

/// Begins to capture what a stream is told, which is no default one.
pub(crate) fn begin(stream: &Arc<Stream>, mode: u32) -> Done {
    static IDS: AtomicU64 = AtomicU64::new(1);
    if mode > RELAXED || stream.taking().is_some() {
        return Err(INVALID_VALUE);
    }
    let graph = Arc::new(Graph::new());
    let pointer = GRAPHS.add(Arc::clone(&graph));
    let state = Mutex::new(State { is_valid: true, graph: Some(graph), streams: Vec::new() });
    let capture = Arc::new(Capture { id: IDS.fetch_add(1, Ordering::Relaxed), pointer, state });
    match mode {
        GLOBAL => GLOBALS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&capture)),
        RELAXED => {}
        _ => OWN.with_borrow_mut(|own| own.push(Arc::downgrade(&capture))),
    }
    capture.take_in(stream).map(drop)
}

/// Ends the capture that began with a stream. Returns the graph.
pub(crate) fn end(stream: &Arc<Stream>) -> Done<usize> {
    let Taking { capture, list } = stream.taking().ok_or(INVALID_VALUE)?;
    if list != 0 {
        capture.invalidate();
        return Err(CAPTURE_UNMATCHED);
    }
    let mut state = capture.state();
    let graph = state.graph.take();
    state.streams.iter().filter_map(Weak::upgrade).for_each(|stream| stream.set_taking(None));
    let error = match (state.is_valid, graph.is_some_and(|graph| graph.is_joined())) {
        (true, true) => return Ok(capture.pointer),
        (true, false) => CAPTURE_UNJOINED,
        (false, _) => CAPTURE_INVALIDATED,
    };
    drop(state);
    let _ = GRAPHS.remove(capture.pointer);
    Err(error)
}

impl Capture {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.state().graph.is_none()
    }

    fn graph(&self) -> Done<Arc<Graph>> {
        self.state().graph.clone().ok_or(INVALID_VALUE)
    }

    /// A stream takes part from here on.
    fn take_in(self: &Arc<Self>, stream: &Arc<Stream>) -> Done<Taking> {
        let mut state = self.state();
        state.graph.as_ref().ok_or(INVALID_VALUE)?.add_list();
        state.streams.push(Arc::downgrade(stream));
        let taking = Taking { capture: Arc::clone(self), list: state.streams.len() - 1 };
        drop(state);
        stream.set_taking(Some(taking.clone()));
        Ok(taking)
    }

    /// Nothing comes of it.
    pub(crate) fn invalidate(&self) {
        self.state().is_valid = false;
    }

    /// Whether it goes on, and something may come of it.
    pub(crate) fn is_valid(&self) -> bool {
        self.state().is_valid
    }

    /// The pointer of its graph.
    pub(crate) fn pointer(&self) -> usize {
        self.pointer
    }

    /// A stream waits for an event that was recorded here.
    pub(crate) fn wait(self: &Arc<Self>, stream: &Arc<Stream>, point: usize) -> Done {
        if self.is_over() {
            return Err(INVALID_VALUE);
        }
        let taking = stream.taking().map_or_else(|| self.take_in(stream), Ok)?;
        if !Arc::ptr_eq(&taking.capture, self) {
            taking.capture.invalidate();
            self.invalidate();
            return Err(CAPTURE_ISOLATION);
        }
        taking.push(Node::Wait(point))
    }
}

impl Taking {
    fn push(&self, node: Node) -> Done {
        if !self.capture.is_valid() {
            return Err(CAPTURE_INVALIDATED);
        }
        self.capture.graph()?.push(self.list, node);
        Ok(())
    }

    /// Adds work.
    pub(crate) fn add(&self, work: Work) -> Done {
        self.push(Node::Run(work))
    }

    /// Adds a point that others can wait for.
    pub(crate) fn record(&self) -> Done<usize> {
        let point = self.capture.graph()?.new_point();
        self.push(Node::Record(point))?;
        Ok(point)
    }

    /// It was to wait for something outside.
    pub(crate) fn refuse_from_outside(&self) -> Done {
        self.capture.invalidate();
        Err(CAPTURE_ISOLATION)
    }
}
