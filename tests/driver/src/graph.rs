//! Emulated CUDA graphs: nodes, their order, and launches. Launches in different streams run at the
//! same time, and the branches of one do.
//!
//! Nodes of events are told at the launch which record they are: one that waits does so for the last record before the launch, of a stream or
//! of another graph, and one that records is the last record from the launch on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::code::{Done, INVALID_VALUE, NOT_SUPPORTED};
use crate::device::Device;
use crate::event::{Event, Point};
use crate::object::Object;
use crate::registry::Registry;
use crate::stream::{Stream, Work};
use crate::wait::until;

/// Kind of a node.
#[derive(Clone)]
pub(crate) enum Kind {
    Run(Work),
    Wait(Arc<Event>),
    Record(Arc<Event>),
}

/// A node, and those that it comes behind, by index.
#[derive(Clone)]
struct Node {
    kind: Kind,
    behind: Vec<usize>,
}

/// See the module's documentation.
pub(crate) struct Graph {
    id: usize,
    nodes: Mutex<Vec<Node>>,
    objects: Mutex<Vec<Arc<Object>>>,
}

/// A graph to launch.
pub(crate) struct Executable {
    id: usize,
    /// Changed for later launches only.
    nodes: Mutex<Vec<Node>>,
    /// Nodes by branch: each comes behind the one before.
    branches: Vec<Vec<usize>>,
    _objects: Vec<Arc<Object>>,
    /// Whether the last launch has ended: the next comes behind it.
    last: Mutex<Arc<AtomicBool>>,
}

/// A node of a launch.
enum Step {
    Run(Work),
    Wait(Option<Arc<Point>>),
    Record(Arc<Point>),
}

pub(crate) static GRAPHS: Registry<Graph> = Registry::new(6);
static EXECUTABLES: Registry<Executable> = Registry::new(7);
/// Nodes that a graph has room for, in the numbers by which programs know them.
const NODES_MAX: usize = 1 << 20;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's index in the graph with that number.
fn index_of(id: usize, node: usize) -> Done<usize> {
    (node / NODES_MAX == id).then_some(node % NODES_MAX).ok_or(INVALID_VALUE)
}

impl Graph {
    pub(crate) fn new() -> Self {
        static IDS: AtomicUsize = AtomicUsize::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        Graph { id, nodes: Mutex::default(), objects: Mutex::default() }
    }

    /// Keeps something as long as it lives, and all that is made of it.
    pub(crate) fn keep(&self, object: Arc<Object>) {
        locked(&self.objects).push(object);
    }

    /// Adds a node behind others. Returns what programs know it by.
    pub(crate) fn add(&self, kind: Kind, behind: &[usize]) -> Done<usize> {
        let mut nodes = locked(&self.nodes);
        let behind = behind.iter().map(|node| self.index(nodes.len(), *node)).collect::<Done<_>>()?;
        nodes.push(Node { kind, behind });
        Ok(self.id * NODES_MAX + nodes.len() - 1)
    }

    fn index(&self, count: usize, node: usize) -> Done<usize> {
        index_of(self.id, node).and_then(|index| if index < count { Ok(index) } else { Err(INVALID_VALUE) })
    }

    /// Has nodes come behind others, pair by pair, which they do not yet.
    pub(crate) fn connect(&self, from: &[usize], to: &[usize]) -> Done {
        self.each_pair(from, to, |behind, from| {
            if behind.contains(&from) {
                return Err(INVALID_VALUE);
            }
            behind.push(from);
            Ok(())
        })
    }

    /// Has them come behind others no more, pair by pair.
    pub(crate) fn disconnect(&self, from: &[usize], to: &[usize]) -> Done {
        self.each_pair(from, to, |behind, from| {
            let place = behind.iter().position(|node| *node == from).ok_or(INVALID_VALUE)?;
            behind.swap_remove(place);
            Ok(())
        })
    }

    fn each_pair(&self, from: &[usize], to: &[usize], change: impl Fn(&mut Vec<usize>, usize) -> Done) -> Done {
        let mut nodes = locked(&self.nodes);
        let count = nodes.len();
        from.iter().zip(to).try_for_each(|(from, to)| {
            let (from, to) = (self.index(count, *from)?, self.index(count, *to)?);
            change(&mut nodes[to].behind, from)
        })
    }

    /// Whether all of some nodes are among others, or before them.
    pub(crate) fn are_before(&self, nodes: &[usize], others: &[usize]) -> bool {
        let all = locked(&self.nodes);
        let mut is_before = vec![false; all.len()];
        let mut rest: Vec<_> = others.iter().filter_map(|node| self.index(all.len(), *node).ok()).collect();
        while let Some(node) = rest.pop() {
            if !std::mem::replace(&mut is_before[node], true) {
                rest.extend(&all[node].behind);
            }
        }
        nodes.iter().all(|node| self.index(all.len(), *node).is_ok_and(|index| is_before[index]))
    }
}

/// Nodes in branches. Each node comes behind those that it is to in the branches' order, too: no branch waits for ever. Fails if they go in a
/// circle.
fn branches(nodes: &[Node]) -> Done<Vec<Vec<usize>>> {
    let mut missing: Vec<_> = nodes.iter().map(|node| node.behind.len()).collect();
    let mut ready: Vec<_> = (0..nodes.len()).rev().filter(|node| missing[*node] == 0).collect();
    let (mut branches, mut count) = (Vec::<Vec<usize>>::new(), 0);
    while let Some(node) = ready.pop() {
        count += 1;
        let is_behind = |branch: &&mut Vec<usize>| branch.last().is_some_and(|last| nodes[node].behind.contains(last));
        match branches.iter_mut().find(is_behind) {
            Some(branch) => branch.push(node),
            None => branches.push(vec![node]),
        }
        for next in 0..nodes.len() {
            let edges = nodes[next].behind.iter().filter(|before| **before == node).count();
            if edges > 0 {
                missing[next] -= edges;
                if missing[next] == 0 {
                    ready.push(next);
                }
            }
        }
    }
    if count == nodes.len() { Ok(branches) } else { Err(INVALID_VALUE) }
}

/// Makes a graph to launch. Returns its pointer.
pub(crate) fn instantiate(graph: usize) -> Done<usize> {
    let graph = GRAPHS.get(graph).map_err(|_| INVALID_VALUE)?;
    let nodes = locked(&graph.nodes).clone();
    let branches = branches(&nodes)?;
    let (nodes, _objects) = (Mutex::new(nodes), locked(&graph.objects).clone());
    let last = Mutex::new(Arc::new(AtomicBool::new(true)));
    Ok(EXECUTABLES.add(Arc::new(Executable { id: graph.id, nodes, branches, _objects, last })))
}

/// Launches it.
pub(crate) fn launch(executable: usize, stream: &Arc<Stream>) -> Done {
    /// No launch comes between what another waits for and what it records.
    static LAUNCHES: Mutex<()> = Mutex::new(());
    let executable = EXECUTABLES.get(executable).map_err(|_| INVALID_VALUE)?;
    if stream.taking().is_some() {
        return Err(NOT_SUPPORTED);
    }
    stream.device.check()?;
    // A full stream holds up its own launches alone.
    stream.wait_for_room();
    let _alone = locked(&LAUNCHES);
    let nodes = locked(&executable.nodes).clone();
    let awaited: Vec<_> = nodes
        .iter()
        .map(|node| if let Kind::Wait(event) = &node.kind { event.recorded_last() } else { None })
        .collect();
    let step = |(node, awaited): (Node, _)| match node.kind {
        Kind::Run(work) => (Step::Run(work), node.behind),
        Kind::Wait(_) => (Step::Wait(awaited), node.behind),
        Kind::Record(event) => (Step::Record(event.begin_record()), node.behind),
    };
    let steps: Vec<_> = nodes.into_iter().zip(awaited).map(step).collect();
    let has_ended = Arc::new(AtomicBool::new(false));
    let last = std::mem::replace(&mut *locked(&executable.last), Arc::clone(&has_ended));
    stream.enqueue(move |device| {
        until(device, || last.load(Ordering::Acquire))?;
        let done = executable.run(&steps, device);
        has_ended.store(true, Ordering::Release);
        done
    })
}

/// Makes an empty graph. Returns its pointer.
pub(crate) fn create() -> usize {
    GRAPHS.add(Arc::new(Graph::new()))
}

/// Adds work that depends on nothing to a graph without any. Returns what its node is known by.
pub(crate) fn add_only(graph: usize, work: Work) -> Done<usize> {
    let graph = GRAPHS.get(graph).map_err(|_| INVALID_VALUE)?;
    if locked(&graph.nodes).is_empty() { graph.add(Kind::Run(work), &[]) } else { Err(NOT_SUPPORTED) }
}

/// Has a graph that was made of one with nothing but some work do other work.
pub(crate) fn set_only(executable: usize, node: usize, work: Work) -> Done {
    let executable = EXECUTABLES.get(executable).map_err(|_| INVALID_VALUE)?;
    let mut nodes = locked(&executable.nodes);
    match nodes.as_mut_slice() {
        [Node { kind: kind @ Kind::Run(_), .. }] if index_of(executable.id, node)? == 0 => *kind = Kind::Run(work),
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

/// The graph with a pointer.
pub(crate) fn find(graph: usize) -> Done<Arc<Graph>> {
    GRAPHS.get(graph).map_err(|_| INVALID_VALUE)
}

pub(crate) fn destroy(graph: usize) -> Done {
    GRAPHS.remove(graph).map(drop).map_err(|_| INVALID_VALUE)
}

/// Launches go on to their end.
pub(crate) fn destroy_executable(executable: usize) -> Done {
    EXECUTABLES.remove(executable).map(drop).map_err(|_| INVALID_VALUE)
}

impl Executable {
    /// All branches at once, on the calling thread and others.
    fn run(&self, steps: &[(Step, Vec<usize>)], device: &'static Device) -> Done {
        let ended: Vec<_> = steps.iter().map(|_| AtomicBool::new(false)).collect();
        let run = |branch: &[usize]| {
            branch.iter().try_for_each(|node| {
                let (step, behind) = &steps[*node];
                until(device, || behind.iter().all(|before| ended[*before].load(Ordering::Acquire)))?;
                match step {
                    Step::Run(work) => work(device)?,
                    Step::Wait(Some(point)) => until(device, || point.has_happened())?,
                    Step::Wait(None) => {}
                    Step::Record(point) => point.happen(),
                }
                ended[*node].store(true, Ordering::Release);
                Ok(())
            })
        };
        let Some((first, others)) = self.branches.split_first() else { return Ok(()) };
        let run = &run;
        std::thread::scope(|scope| {
            let threads: Vec<_> = others.iter().map(|branch| scope.spawn(move || fail(device, run(branch)))).collect();
            let first = fail(device, run(first));
            threads.into_iter().map(|thread| thread.join().unwrap_or(Ok(()))).fold(first, Result::and)
        })
    }
}

/// The other branches of a graph must know, too.
fn fail(device: &Device, done: Done) -> Done {
    done.inspect_err(|code| device.lose(*code))
}
