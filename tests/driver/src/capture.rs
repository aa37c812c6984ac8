//! Emulated stream capture: what streams are told goes into a graph. Each comes behind what the
//! stream was told before. A stream comes in when it waits for an event that was recorded there,
//! and must be waited for itself before the end.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::code::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, Done,
    INVALID_VALUE,
};
use crate::graph::{GRAPHS, Graph, Kind};
use crate::stream::Stream;

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
    /// The first is the one that it began with.
    streams: Vec<Weak<Stream>>,
    /// Nodes without which a stream has gone on.
    left: Vec<usize>,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub(crate) struct Taking {
    pub(crate) capture: Arc<Capture>,
    is_first: bool,
    /// Nodes behind which the next one comes.
    tail: Arc<Mutex<Vec<usize>>>,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    static OWN: RefCell<Vec<Weak<Capture>>> = const { RefCell::new(Vec::new()) };
}
/// Captures of all threads, those in the mode in which they forbid things to all threads.
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
        forbidding.extend(going(&mut locked(&GLOBALS)));
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
    let state = Mutex::new(State { is_valid: true, graph: Some(graph), streams: Vec::new(), left: Vec::new() });
    let capture = Arc::new(Capture { id: IDS.fetch_add(1, Ordering::Relaxed), pointer, state });
    match mode {
        GLOBAL => locked(&GLOBALS).push(Arc::downgrade(&capture)),
        RELAXED => {}
        _ => OWN.with_borrow_mut(|own| own.push(Arc::downgrade(&capture))),
    }
    capture.take_in(stream).map(drop)
}

/// Ends the capture that began with a stream. Returns the graph.
pub(crate) fn end(stream: &Arc<Stream>) -> Done<usize> {
    let Taking { capture, is_first, tail } = stream.taking().ok_or(INVALID_VALUE)?;
    if !is_first {
        capture.invalidate();
        return Err(CAPTURE_UNMATCHED);
    }
    let mut state = capture.state();
    let graph = state.graph.take();
    let streams: Vec<_> = state.streams.iter().filter_map(Weak::upgrade).collect();
    let is_joined = |stream: &Arc<Stream>| {
        let own = stream.taking().map(|taking| taking.tail()).unwrap_or_default();
        graph.as_ref().is_some_and(|graph| graph.are_before(&own, &locked(&tail)))
    };
    // The driver lets a stream go on without what it was told before (`go_on_behind`), and says nothing. Here that is a mistake: what the
    // caller captures next would not wait for it.
    let none_is_left = graph.as_ref().is_some_and(|graph| graph.are_before(&state.left, &locked(&tail)));
    let are_joined = none_is_left && streams.iter().all(is_joined);
    streams.iter().for_each(|stream| stream.set_taking(None));
    let error = match (state.is_valid, are_joined) {
        (true, true) => return Ok(capture.pointer),
        (true, false) => CAPTURE_UNJOINED,
        (false, _) => CAPTURE_INVALIDATED,
    };
    drop(state);
    let _ = GRAPHS.remove(capture.pointer);
    Err(error)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Capture {
    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
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
        if state.graph.is_none() {
            return Err(INVALID_VALUE);
        }
        let (is_first, tail) = (state.streams.is_empty(), Arc::default());
        state.streams.push(Arc::downgrade(stream));
        let taking = Taking { capture: Arc::clone(self), is_first, tail };
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

    /// A stream waits for an event that was recorded here, behind these nodes.
    pub(crate) fn wait(self: &Arc<Self>, stream: &Arc<Stream>, nodes: &[usize]) -> Done {
        if self.is_over() {
            return Err(INVALID_VALUE);
        }
        let taking = stream.taking().map_or_else(|| self.take_in(stream), Ok)?;
        if !Arc::ptr_eq(&taking.capture, self) {
            taking.capture.invalidate();
            self.invalidate();
            return Err(CAPTURE_ISOLATION);
        }
        taking.come_behind(nodes)
    }
}

impl Taking {
    fn graph(&self) -> Done<Arc<Graph>> {
        if !self.capture.is_valid() {
            return Err(CAPTURE_INVALIDATED);
        }
        self.capture.graph()
    }

    /// Adds a node.
    pub(crate) fn add(&self, kind: Kind) -> Done {
        let graph = self.graph()?;
        let mut tail = locked(&self.tail);
        *tail = vec![graph.add(kind, &tail)?];
        Ok(())
    }

    /// The next node comes behind these, too.
    pub(crate) fn come_behind(&self, nodes: &[usize]) -> Done {
        // All are of its graph.
        self.graph()?.are_before(nodes, nodes).then_some(()).ok_or(INVALID_VALUE)?;
        let mut tail = locked(&self.tail);
        for node in nodes {
            if !tail.contains(node) {
                tail.push(*node);
            }
        }
        Ok(())
    }

    /// The next node comes behind these alone.
    pub(crate) fn go_on_behind(&self, nodes: &[usize]) -> Done {
        self.graph()?.are_before(nodes, nodes).then_some(()).ok_or(INVALID_VALUE)?;
        let left = std::mem::replace(&mut *locked(&self.tail), nodes.to_vec());
        self.capture.state().left.extend(left);
        Ok(())
    }

    /// The nodes that what comes next comes behind.
    pub(crate) fn tail(&self) -> Vec<usize> {
        locked(&self.tail).clone()
    }

    /// The same, for others to wait for.
    pub(crate) fn record(&self) -> Done<Vec<usize>> {
        self.graph()?;
        Ok(self.tail())
    }

    /// It was to wait for something outside.
    pub(crate) fn refuse_from_outside(&self) -> Done {
        self.capture.invalidate();
        Err(CAPTURE_ISOLATION)
    }
}
