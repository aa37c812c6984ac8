//! Streams of a call by rails: the caller's, and those beside it for segments that run at once.
//!
//! ```text
//! 0         segments before the first move, and whole calls that are not forked: the caller's stream
//! 1, 2      segments behind moves, of forked calls
//! inward    what begins moves: their order is that of the words that tell of them, whatever lane comes to them
//! outward   copies from slots to their twins
//! ```
//!
//! Lanes beside the caller's are streams of the communicator's own, and wait for each other by events. Work of each comes behind
//! something of the caller's stream, which comes behind all of it at the end. In a capture they are branches of the graph: the caller's
//! stream goes on behind other nodes. So captures need no streams, which each would have for itself until it ends.
//!
//! All is enqueued in an order in which it could run one after the other. So a program whose streams share one queue of the GPU
//! (`CUDA_DEVICE_MAX_CONNECTIONS=1`) goes on.

use std::cell::RefCell;
use std::time::Duration;

use mccs_cuda::{Context, Event, GraphNode, OwnedStream, RawStream};
use mccs_rails::SLOTS_MAX;

use crate::Error;
use crate::cuda::cuda_error;

/// How long a wait for lanes sleeps between looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_micros(50);
/// Priority of segments' streams, which end what callers wait for: the driver takes the first that the GPU has.
const PRIORITY: i32 = i32::MIN;

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// The lane of a segment's stream; 0 is the caller's.
    Segment(usize),
    Inward,
    Outward,
}

/// Segments' lanes.
const SEGMENTS: usize = 3;
const LANES: usize = SEGMENTS + 2;

/// Marks that others come behind, by slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// A segment has come to a move, or to its end where this rank has none.
    Staged(u64),
    /// The service has been told of it.
    Told(u64),
    /// Moved data is in the twin.
    Arrived(u64),
    /// The slice has ended.
    Ended(u64),
    /// A lane has come to the call's end.
    Joined(usize),
}

const MARKS: usize = 4 * SLOTS_MAX as usize + SEGMENTS;

impl Lane {
    fn index(self) -> usize {
        match self {
            Lane::Segment(number) => number,
            Lane::Inward => SEGMENTS,
            Lane::Outward => SEGMENTS + 1,
        }
    }
}

impl Mark {
    fn index(self) -> usize {
        let slots = SLOTS_MAX as usize;
        match self {
            Mark::Staged(slot) => slot as usize,
            Mark::Told(slot) => slots + slot as usize,
            Mark::Arrived(slot) => 2 * slots + slot as usize,
            Mark::Ended(slot) => 3 * slots + slot as usize,
            Mark::Joined(segment) => 4 * slots + segment,
        }
    }
}

/// Streams of a communicator beside callers' streams.
pub(super) struct Beside {
    /// By [`Lane::index`], from the second on; no segments' where no call is forked.
    streams: [Option<OwnedStream>; LANES - 1],
    /// By [`Mark::index`].
    events: Vec<Event>,
}

impl Beside {
    pub(super) fn new(context: &Context, may_fork: bool) -> Result<Self, Error> {
        let make = || {
            let of_segment = || may_fork.then(|| OwnedStream::with_priority(context, PRIORITY)).transpose();
            let [second, third] = [of_segment()?, of_segment()?];
            let copies = [Some(OwnedStream::new(context)?), Some(OwnedStream::new(context)?)];
            let [inward, outward] = copies;
            let events = (0..MARKS).map(|_| Event::new(context, false)).collect::<Result<Vec<_>, _>>()?;
            Ok(Beside { streams: [second, third, inward, outward], events })
        };
        make().map_err(cuda_error)
    }

    /// Waits until nothing is under way, also of calls that have failed. The context must be current.
    pub(super) fn wait(&self) -> Result<(), Error> {
        for stream in self.streams.iter().flatten() {
            // SAFETY: the stream lives, and the caller has its context current.
            while !unsafe { stream.raw().is_idle() }.map_err(cuda_error)? {
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
        }
        Ok(())
    }
}

/// See the module's documentation. Its unsafe methods enqueue: the caller's stream must live, with its context current, and what is beside it
/// until that has come to what they enqueue.
pub(super) enum Lanes<'a> {
    Streams { caller: RawStream, beside: &'a Beside },
    Branches { stream: RawStream, branches: Box<RefCell<Branches>> },
}

/// Lanes of a call that is captured.
#[derive(Default)]
pub(super) struct Branches {
    /// The one that the stream is on.
    lane: usize,
    /// Nodes that the next node of each other lane comes behind.
    tails: [Vec<GraphNode>; LANES],
    marks: [Vec<GraphNode>; MARKS],
}

impl<'a> Lanes<'a> {
    /// Lanes of a call in a stream that is not captured.
    pub(super) fn of(caller: RawStream, beside: &'a Beside) -> Self {
        Lanes::Streams { caller, beside }
    }

    /// Lanes of a call in one that is.
    pub(super) fn captured(stream: RawStream) -> Self {
        Lanes::Branches { stream, branches: Box::default() }
    }

    /// Lane for work, until another is asked for.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn stream(&self, lane: Lane) -> Result<RawStream, Error> {
        match self {
            Lanes::Streams { caller, beside } => match lane.index().checked_sub(1) {
                None => Ok(*caller),
                Some(index) => beside.streams[index].as_ref().map(OwnedStream::raw).ok_or_else(no_lane),
            },
            // SAFETY: the caller's contract is passed on.
            Lanes::Branches { stream, branches } => unsafe { branches.borrow_mut().turn_to(*stream, lane.index()) },
        }
    }

    /// Marks what a lane has come to.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn mark(&self, lane: Lane, mark: Mark) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let stream = self.stream(lane)?;
            match self {
                Lanes::Streams { beside, .. } => beside.events[mark.index()].record(stream).map_err(cuda_error),
                Lanes::Branches { branches, .. } => {
                    branches.borrow_mut().marks[mark.index()] = stream.captured_tail().map_err(cuda_error)?;
                    Ok(())
                }
            }
        }
    }

    /// Has a lane come behind what was last marked so.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn wait(&self, lane: Lane, mark: Mark) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            match self {
                Lanes::Streams { beside, .. } => {
                    self.stream(lane)?.wait(&beside.events[mark.index()]).map_err(cuda_error)
                }
                Lanes::Branches { stream, branches } => {
                    let branches = &mut *branches.borrow_mut();
                    branches.wait(*stream, lane.index(), mark)
                }
            }
        }
    }

    /// Has the caller's stream come behind so many segments' lanes.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn join(&self, segments: usize) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            for segment in 1..segments {
                self.mark(Lane::Segment(segment), Mark::Joined(segment))?;
                self.wait(Lane::Segment(0), Mark::Joined(segment))?;
            }
            self.stream(Lane::Segment(0)).map(drop)
        }
    }
}

impl Branches {
    /// Has the stream go on where a lane is.
    ///
    /// # Safety
    /// As [`Lanes`] says.
    unsafe fn turn_to(&mut self, stream: RawStream, lane: usize) -> Result<RawStream, Error> {
        if lane != self.lane {
            // SAFETY: the caller's contract; nodes are of this capture.
            unsafe {
                self.tails[self.lane] = stream.captured_tail().map_err(cuda_error)?;
                stream.go_on_behind(&self.tails[lane]).map_err(cuda_error)?;
            }
            self.lane = lane;
        }
        Ok(stream)
    }

    /// # Safety
    /// As [`Lanes`] says.
    unsafe fn wait(&mut self, stream: RawStream, lane: usize, mark: Mark) -> Result<(), Error> {
        let nodes = &self.marks[mark.index()];
        if lane == self.lane && !nodes.is_empty() {
            // SAFETY: the caller's contract; nodes are of this capture.
            return unsafe { stream.wait_for_nodes(nodes) }.map_err(cuda_error);
        }
        let tail = &mut self.tails[lane];
        for node in nodes {
            if !tail.contains(node) {
                tail.push(*node);
            }
        }
        Ok(())
    }
}

fn no_lane() -> Error {
    Error::system("bug: a call is forked where none may be")
}
