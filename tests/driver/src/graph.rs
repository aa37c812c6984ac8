//! Graphs: what was captured, and what is launched of it; and what programs have kept as long as these.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::code::{Done, INVALID_VALUE, NOT_SUPPORTED};
use crate::device::Device;
use crate::registry::Registry;
use crate::stream::{Stream, Work};
use crate::wait::until;

/// What a stream was told.
#[derive(Clone)]
pub(crate) enum Node {
    Run(Work),
    /// A point for others to wait for, by its number.
    Record(usize),
    Wait(usize),
}

/// Lists by stream: the first is of the stream that capturing began with.
pub(crate) struct Graph {
    lists: Mutex<Vec<Vec<Node>>>,
    points: AtomicUsize,
    objects: Mutex<Vec<Arc<Object>>>,
}

/// A graph to launch.
pub(crate) struct Executable {
    /// Changed for later launches only.
    lists: Mutex<Vec<Vec<Node>>>,
    points: usize,
    _objects: Vec<Arc<Object>>,
    /// Launches of the same come one behind the other.
    running: Mutex<()>,
}

pub(crate) static GRAPHS: Registry<Graph> = Registry::new(6);
/// What a node is called that is the only one.
const ONLY: usize = 1;
static EXECUTABLES: Registry<Executable> = Registry::new(7);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graph {
    pub(crate) fn new() -> Self {
        Graph { lists: Mutex::default(), points: AtomicUsize::new(0), objects: Mutex::default() }
    }

    pub(crate) fn add_list(&self) {
        locked(&self.lists).push(Vec::new());
    }

    pub(crate) fn push(&self, list: usize, node: Node) {
        locked(&self.lists)[list].push(node);
    }

    pub(crate) fn new_point(&self) -> usize {
        self.points.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether somebody waits for all that streams do which came in.
    pub(crate) fn is_joined(&self) -> bool {
        let lists = locked(&self.lists);
        let is_awaited =
            |point: usize| lists.iter().flatten().any(|node| matches!(node, Node::Wait(other) if *other == point));
        lists.iter().skip(1).all(|list| match list.last() {
            Some(Node::Record(point)) => is_awaited(*point),
            _ => false,
        })
    }
}

/// Makes a graph to launch. Returns its pointer.
pub(crate) fn instantiate(graph: usize) -> Done<usize> {
    let graph = GRAPHS.get(graph).map_err(|_| INVALID_VALUE)?;
    let executable = Executable {
        lists: Mutex::new(locked(&graph.lists).clone()),
        points: graph.points.load(Ordering::Relaxed),
        _objects: locked(&graph.objects).clone(),
        running: Mutex::default(),
    };
    Ok(EXECUTABLES.add(Arc::new(executable)))
}

/// Launches it.
pub(crate) fn launch(executable: usize, stream: &Arc<Stream>) -> Done {
    let executable = EXECUTABLES.get(executable).map_err(|_| INVALID_VALUE)?;
    if stream.taking().is_some() {
        return Err(NOT_SUPPORTED);
    }
    let lists = locked(&executable.lists).clone();
    stream.enqueue(move |device| executable.run(&lists, device))
}

/// Makes an empty graph. Returns its pointer.
pub(crate) fn create() -> usize {
    let graph = Graph::new();
    graph.add_list();
    GRAPHS.add(Arc::new(graph))
}

/// Adds work that depends on nothing to a graph without any. Returns its number.
pub(crate) fn add_only(graph: usize, work: Work) -> Done<usize> {
    let graph = GRAPHS.get(graph).map_err(|_| INVALID_VALUE)?;
    let mut lists = locked(&graph.lists);
    match lists.as_mut_slice() {
        [only] if only.is_empty() => only.push(Node::Run(work)),
        _ => return Err(NOT_SUPPORTED),
    }
    Ok(ONLY)
}

/// Has a graph that was made of one with nothing but some work do other work.
pub(crate) fn set_only(executable: usize, node: usize, work: Work) -> Done {
    let executable = EXECUTABLES.get(executable).map_err(|_| INVALID_VALUE)?;
    let mut lists = locked(&executable.lists);
    let is_only = lists.len() == 1 && lists[0].len() == 1 && node == ONLY;
    lists[0] = if is_only { vec![Node::Run(work)] } else { return Err(INVALID_VALUE) };
    Ok(())
}

pub(crate) fn destroy(graph: usize) -> Done {
    GRAPHS.remove(graph).map(drop).map_err(|_| INVALID_VALUE)
}

/// Launches go on to their end.
pub(crate) fn destroy_executable(executable: usize) -> Done {
    EXECUTABLES.remove(executable).map(drop).map_err(|_| INVALID_VALUE)
}

impl Executable {
    /// All lists at once, on the calling thread and others.
    fn run(&self, lists: &[Vec<Node>], device: &'static Device) -> Done {
        let _alone = locked(&self.running);
        let points: Vec<_> = (0..self.points).map(|_| AtomicBool::new(false)).collect();
        let run = |list: &[Node]| {
            list.iter().try_for_each(|node| match node {
                Node::Run(work) => work(device),
                Node::Record(point) => {
                    points[*point].store(true, Ordering::Release);
                    Ok(())
                }
                Node::Wait(point) => until(device, || points[*point].load(Ordering::Acquire)),
            })
        };
        let Some((first, others)) = lists.split_first() else { return Ok(()) };
        let run = &run;
        std::thread::scope(|scope| {
            let threads: Vec<_> = others.iter().map(|list| scope.spawn(move || fail(device, run(list)))).collect();
            let first = fail(device, run(first));
            threads.into_iter().map(|thread| thread.join().unwrap_or(Ok(()))).fold(first, Result::and)
        })
    }
}

/// The other lists of a graph must know, too.
fn fail(device: &Device, done: Done) -> Done {
    done.inspect_err(|code| device.lose(*code))
}

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
    let mut left = locked(&held.count);
    *left = left.checked_sub(count).ok_or(INVALID_VALUE)?;
    if *left == 0 {
        OBJECTS.remove(object)?;
    }
    Ok(())
}

/// A graph keeps an object: by references of its own, or by the program's.
pub(crate) fn retain_object(graph: usize, object: usize, count: u32, flags: u32) -> Done {
    const MOVE: u32 = 1;
    let graph = GRAPHS.get(graph).map_err(|_| INVALID_VALUE)?;
    let held = OBJECTS.get(object).map_err(|_| INVALID_VALUE)?;
    locked(&graph.objects).push(Arc::clone(&held.object));
    if flags == MOVE { release_object(object, count) } else { Ok(()) }
}
