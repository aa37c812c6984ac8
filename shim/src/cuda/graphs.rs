//! CUDA graphs with a communicator's operations: their order, and what lives as long as they do.
//!
//! ```text
//! a graph:         wait for `last` | operation 1 | operation 2 | ... | operation n | record `last`
//! outside graphs:  wait for `last` | operation | record `last`
//! ```
//!
//! All ranks must run a communicator's operations in one order. The hosts' launches have such an order, GPUs alone do not: so the driver
//! is to chain launches. It resolves a graph's event nodes when the graph is launched. A launch thus waits for all launches before it, of graphs
//! and of calls, in whatever streams they are.
//!
//! A graph has one node that waits, before its first operation, and one that records, behind its last: each further operation moves
//! it. No stream depends on the node that records. Inside a graph an operation in another stream than the one before depends on that.
//!
//! Threads that launch must agree on an order, and on the same one on all ranks, as with NCCL.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use mccs_cuda::{Capture, Context, Event, GraphNode, RawStream};
use mccs_ipc::device_initiated::ControlPage;

use super::cuda_error;
use crate::Error;
use crate::client::locked;

/// Orders operations of a communicator in graphs with each other, and with calls. See the module's documentation.
pub(super) struct GraphOrder {
    /// Marks the last operation.
    last: Arc<Event>,
    /// Captures of graphs that live.
    captures: Vec<Captured>,
    living: Arc<LivingGraphs>,
}

/// A capture with operations.
struct Captured {
    id: u64,
    has_gone: Arc<AtomicBool>,
    /// The last operation's nodes.
    tail: Vec<GraphNode>,
    /// The node that records, behind `tail`; none before the first operation is captured.
    record: Option<GraphNode>,
}

impl GraphOrder {
    /// Before the first operation; `living` counts the graphs.
    pub(super) fn new(context: &Context, living: Arc<LivingGraphs>) -> Result<Self, Error> {
        let last = Arc::new(Event::new(context, false).map_err(cuda_error)?);
        Ok(GraphOrder { last, captures: Vec::new(), living })
    }

    /// Event that graphs refer to.
    pub(super) fn event(&self) -> Arc<Event> {
        Arc::clone(&self.last)
    }

    /// Has a captured stream come behind the operations before: those of its graph, or all that were launched when that is. Returns what
    /// says whether the graph has gone. In a capture that is invalid it does nothing: the driver refuses what is captured next.
    ///
    /// # Safety
    /// The stream must live, and be of this capture, which goes on.
    pub(super) unsafe fn begin(&mut self, stream: RawStream, capture: Capture) -> Result<Arc<AtomicBool>, Error> {
        if !capture.is_valid() {
            return Ok(Arc::new(AtomicBool::new(true)));
        }
        // SAFETY: the caller's contract; the event is kept as long as graphs live.
        unsafe {
            if let Some(known) = self.captures.iter().rfind(|known| known.id == capture.id) {
                // By nodes: the driver tells no id of a stream that is captured, and pointers of streams come again.
                let tail = stream.captured_tail().map_err(cuda_error)?;
                if !known.tail.iter().all(|node| tail.contains(node)) {
                    stream.wait_for_nodes(&known.tail).map_err(cuda_error)?;
                }
                return Ok(Arc::clone(&known.has_gone));
            }
            self.captures.retain(|known| !known.has_gone.load(Ordering::Acquire));
            let has_gone = self.living.add(capture)?;
            stream.wait_in_graph(&self.last).map_err(cuda_error)?;
            let tail = stream.captured_tail().map_err(cuda_error)?;
            let captured = Captured { id: capture.id, has_gone: Arc::clone(&has_gone), tail, record: None };
            self.captures.push(captured);
            Ok(has_gone)
        }
    }

    /// An operation has been captured, behind what [`GraphOrder::begin`] had the stream come behind.
    ///
    /// # Safety
    /// As [`GraphOrder::begin`].
    pub(super) unsafe fn end(&mut self, stream: RawStream, capture: Capture) -> Result<(), Error> {
        let known = self.captures.iter_mut().rfind(|known| known.id == capture.id);
        let Some(known) = known.filter(|_| capture.is_valid()) else { return Ok(()) };
        // SAFETY: the caller's contract; the event is kept as long as graphs live.
        unsafe {
            let tail = stream.captured_tail().map_err(cuda_error)?;
            let is_moved = known.record.is_some_and(|record| capture.move_behind(record, &known.tail, &tail).is_ok());
            if !is_moved {
                // A driver that refuses to change edges gets one node more, behind the one before.
                let behind: Vec<_> = tail.iter().copied().chain(known.record).collect();
                known.record = Some(capture.record(&self.last, &behind).map_err(cuda_error)?);
            }
            known.tail = tail;
        }
        Ok(())
    }

    /// Has a stream that is not captured come behind all operations before.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn wait(&self, stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { stream.wait(&self.last) }.map_err(cuda_error)
    }

    /// Has operations after this come behind what a stream has so far, which is not captured, and came behind all before.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn record(&self, stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.last.record(stream) }.map_err(cuda_error)
    }

    /// Whether all that was launched has ended. Returns the driver's error if some of it has failed.
    pub(super) fn have_ended(&self) -> Result<bool, Error> {
        // Other threads may be capturing in the mode in which nobody may ask.
        mccs_cuda::while_capturing(|| self.last.has_happened()).and_then(|asked| asked).map_err(cuda_error)
    }
}

/// Counts graphs with operations of a communicator, from their first operation on. A graph counts until it has gone with all that was made of
/// it, and no launch of it runs.
pub(super) struct LivingGraphs {
    count: Mutex<u64>,
    has_changed: Condvar,
    /// Page on which this rank's graphs are counted for the service.
    page: Option<(Arc<ControlPage>, u32)>,
}

impl LivingGraphs {
    pub(super) fn new(page: Option<(Arc<ControlPage>, u32)>) -> Arc<Self> {
        Arc::new(LivingGraphs { count: Mutex::new(0), has_changed: Condvar::new(), page })
    }

    /// Counts the graph of a capture. Returns what says whether it has gone.
    ///
    /// # Safety
    /// The capture must be valid, and go on.
    unsafe fn add(self: &Arc<Self>, capture: Capture) -> Result<Arc<AtomicBool>, Error> {
        let has_gone = Arc::new(AtomicBool::new(false));
        self.begin();
        let (living, told) = (Arc::clone(self), Arc::clone(&has_gone));
        let end = move || {
            told.store(true, Ordering::Release);
            living.end();
        };
        // SAFETY: the caller's contract. If it fails, `end` is called all the same.
        unsafe { capture.when_gone(end) }.map_err(cuda_error)?;
        Ok(has_gone)
    }

    fn begin(&self) {
        *locked(&self.count) += 1;
        if let Some((page, rank)) = &self.page {
            page.begin_graph(*rank);
        }
    }

    /// On a thread of the driver's.
    fn end(&self) {
        if let Some((page, rank)) = &self.page {
            page.end_graph(*rank);
        }
        *locked(&self.count) -= 1;
        self.has_changed.notify_all();
    }

    /// Keeps something until no graph lives. Programs may launch graphs of a communicator that they have destroyed: these find their memory,
    /// and nothing else in its place.
    pub(super) fn keep<T: Send + 'static>(self: &Arc<Self>, kept: T) {
        if *locked(&self.count) == 0 {
            return;
        }
        // It stays for good where there is no thread.
        let (kept, living) = (ManuallyDrop::new(kept), Arc::clone(self));
        let keep = move || {
            let count = locked(&living.count);
            let none = living.has_changed.wait_while(count, |count| *count > 0).unwrap_or_else(PoisonError::into_inner);
            drop(none);
            drop(ManuallyDrop::into_inner(kept));
        };
        drop(std::thread::Builder::new().name("mccs-graphs".into()).spawn(keep));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Says when it is dropped.
    struct Kept(mpsc::Sender<()>);

    impl Drop for Kept {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    #[test]
    fn what_graphs_need_is_kept_until_the_last_has_gone() {
        let living = LivingGraphs::new(None);
        let (sender, dropped) = mpsc::channel();
        living.keep(Kept(sender.clone()));
        assert_eq!(dropped.try_recv(), Ok(()), "nobody needs it");
        (0..2).for_each(|_| living.begin());
        living.keep(Kept(sender));
        living.end();
        assert_eq!(dropped.try_recv(), Err(mpsc::TryRecvError::Empty));
        living.end();
        assert_eq!(dropped.recv(), Ok(()));
    }
}
