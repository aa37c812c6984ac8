//! Groups: operations that start together, as between `ncclGroupStart` and `ncclGroupEnd`. A group
//! belongs to the thread that opens it.
//!
//! Programs in Rust use [`Group`]. The functions are for bindings of other languages, where begin and end of a group are calls
//! (`mccs::bindings`).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use mccs_ipc::command::{Command, FLAG_GROUP_CONTINUES, Opcode};

use crate::communicator::CommShared;
use crate::cuda::CollectedCall;
use crate::cuda::p2p::{self, Collected as CollectedP2p};
use crate::{Error, Stream};

/// An open group of the calling thread: its operations are collected, and enqueued together by [`Group::end`]. On each stream the collectives come
/// first, in the order of the calls, then all sends and receives, which start together. Groups nest; the outermost one enqueues. A group that is
/// dropped without `end`, as `?` does, drops all that it and the groups around it have collected.
///
/// ```no_run
/// # fn pass_on(comm: &mccs::Communicator, own: mccs::Span, other: mccs::Span, stream: &mccs::Stream) -> Result<(), mccs::Error> {
/// let group = mccs::Group::begin();
/// comm.send(own, 1024, mccs::DataType::F32, 1, stream)?;
/// comm.recv(other, 1024, mccs::DataType::F32, 1, stream)?;
/// group.end()
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a group that is dropped enqueues nothing"]
pub struct Group {
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Group {
    /// Opens a group.
    pub fn begin() -> Group {
        group_start();
        Group { thread: PhantomData }
    }

    /// Closes the group. The outermost one enqueues what was collected.
    ///
    /// # Errors
    /// As [`group_end`]; [`Error::InvalidArgument`] where a group inside was dropped.
    pub fn end(self) -> Result<(), Error> {
        std::mem::forget(self);
        group_end()
    }

    /// As [`group_estimate_us`].
    #[must_use]
    pub fn estimate_us(&self) -> Option<f64> {
        group_estimate_us()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        group_refuse(Error::argument("a group inside was dropped before its end; all of the group is dropped"));
        let _ = group_drop();
    }
}

#[derive(Default)]
struct Collection {
    /// Why nothing is to be enqueued: a group inside was dropped, or a call failed.
    refusal: Option<Error>,
    depth: u32,
    operations: Vec<Collected>,
    /// Collectives of GPUs.
    calls: Vec<CollectedCall>,
    /// Sends and receives between GPUs.
    p2p: Vec<CollectedP2p>,
}

/// An operation that waits for the end of its group.
struct Collected {
    stream: Stream,
    comm: Arc<CommShared>,
    command: Command,
}

/// A command with the communicator that numbers it.
pub(crate) type Numbered = (Arc<CommShared>, Command);

thread_local! {
    static GROUP: RefCell<Collection> = RefCell::default();
}

/// `None` while the thread ends and its group is gone: an operation from a destructor there is on its own.
fn with_group<T>(f: impl FnOnce(&mut Collection) -> T) -> Option<T> {
    GROUP.try_with(|group| f(&mut group.borrow_mut())).ok()
}

/// Opens a group: operations of this thread are collected until the matching [`group_end`]. Groups nest.
pub fn group_start() {
    with_group(|group| group.depth += 1);
}

/// Closes a group. Returns what it has collected, if it is the outermost one.
fn close() -> Result<Collection, Error> {
    let collected = with_group(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { Collection::default() })
    });
    collected.flatten().ok_or_else(|| Error::argument("group_end without group_start"))
}

/// How long the calls of the thread's group would take so far, in microseconds: those of a communicator one after the other, beside those of
/// others. By what was measured on idle GPUs; nothing where the service carries any of it out, of which nothing is known.
#[must_use]
pub fn group_estimate_us() -> Option<f64> {
    let estimate = |group: &mut Collection| {
        if !group.operations.is_empty() {
            return None;
        }
        let mut took: BTreeMap<usize, f64> = BTreeMap::new();
        for call in &group.calls {
            let (comm, us) = call.estimate_us()?;
            *took.entry(comm).or_default() += us;
        }
        let mut sent: BTreeMap<usize, u64> = BTreeMap::new();
        for point in &group.p2p {
            let (comm, bytes) = point.sends()?;
            *sent.entry(comm).or_default() += bytes;
        }
        let sends = sent.values().map(|bytes| p2p::estimate_us(*bytes));
        Some(took.values().copied().chain(sends).fold(0.0, f64::max))
    };
    with_group(estimate).flatten()
}

/// Closes a group without enqueuing what it has. An inner group's calls stay with the outer one, which enqueues or drops them.
///
/// # Errors
/// [`Error::InvalidArgument`] without a group.
pub fn group_drop() -> Result<(), Error> {
    close().map(drop)
}

/// Closes a group. The outermost one enqueues what was collected: for each stream first the collectives in their order, then all sends and
/// receives, which start together. Collectives on GPUs follow, in the order of the calls, and on each communicator of GPUs all sends and receives,
/// in one kernel.
///
/// # Errors
/// [`Error::InvalidArgument`] without a group, if a communicator was destroyed inside the group, or if it has more sends
/// and receives than may be in flight: then nothing of the group is enqueued. [`Error::ServiceGone`]. Those of collectives on GPUs:
/// then nothing that comes after it is enqueued.
pub fn group_end() -> Result<(), Error> {
    let Collection { refusal, operations, calls, p2p, .. } = close()?;
    if let Some(why) = refusal {
        return Err(why);
    }
    let mut streams: Vec<(Stream, Vec<Numbered>)> = Vec::new();
    // The service ends a session that names a communicator that is gone.
    if operations.iter().any(|operation| operation.comm.has_left()) {
        return Err(Error::argument("a communicator was destroyed inside a group that uses it; the group is dropped"));
    }
    for Collected { stream, comm, command } in operations {
        match streams.iter_mut().find(|(known, _)| Arc::ptr_eq(&known.shared, &stream.shared)) {
            Some((_, commands)) => commands.push((comm, command)),
            None => streams.push((stream, vec![(comm, command)])),
        }
    }
    let is_collective = |(_, command): &Numbered| command.opcode == Opcode::Collective as u32;
    let pairs = |commands: &[Numbered]| commands.iter().filter(|command| !is_collective(command)).count() as u64;
    // Over all streams of a session: none of them may have to wait in the ring for others that have begun.
    for (stream, _) in &streams {
        let of_session = streams.iter().filter(|(other, _)| Arc::ptr_eq(&other.client.0, &stream.client.0));
        let (count, max) =
            (of_session.map(|(_, commands)| pairs(commands)).sum::<u64>(), stream.client.0.operations_in_flight_max);
        if count > max {
            return Err(Error::argument(format!(
                "a group has {count} sends and receives, and {max} may be in flight; the group is dropped. Make it shorter, or \
                 raise [[tenant]] max_operations_in_flight in service.toml"
            )));
        }
    }
    for (stream, commands) in streams {
        let (mut ordered, mut pairs): (Vec<_>, Vec<_>) = commands.into_iter().partition(is_collective);
        if let Some((_, all_but_last)) = pairs.split_last_mut() {
            all_but_last.iter_mut().for_each(|(_, command)| command.flags |= FLAG_GROUP_CONTINUES);
        }
        ordered.append(&mut pairs);
        stream.client.0.submit_group(&stream.shared, &ordered)?;
    }
    calls.iter().try_for_each(CollectedCall::enqueue)?;
    p2p::launch_together(p2p)
}

/// Has the thread's group, if one is open, enqueue nothing; its end returns why. The first reason stays.
pub fn group_refuse(why: Error) {
    with_group(|group| {
        if group.depth > 0 {
            group.refusal.get_or_insert(why);
        }
    });
}

/// Whether the calling thread has a group open.
pub(crate) fn is_open() -> bool {
    with_group(|group| group.depth > 0) == Some(true)
}

/// Keeps a collective of GPUs for the end of the group, which is open.
pub(crate) fn collect_call(call: CollectedCall) {
    with_group(|group| group.calls.push(call));
}

/// Keeps a send or receive between GPUs for the end of the group. Gives it back where there is no group.
pub(crate) fn collect_p2p(point: CollectedP2p) -> Result<Result<(), Error>, CollectedP2p> {
    let mut alone = Some(point);
    with_group(|group| {
        if group.depth > 0 {
            group.p2p.extend(alone.take());
        }
    });
    alone.map_or(Ok(Ok(())), Err)
}

/// Enqueues an operation, or keeps it for the end of the group.
pub(crate) fn submit(stream: &Stream, comm: &Arc<CommShared>, command: Command) -> Result<(), Error> {
    let in_group = with_group(|group| {
        if group.depth > 0 {
            group.operations.push(Collected { stream: stream.clone(), comm: Arc::clone(comm), command });
        }
        group.depth > 0
    });
    if in_group == Some(true) { Ok(()) } else { stream.client.0.submit(&stream.shared, comm, command) }
}
