//! Sends and receives between GPUs through the service: lanes, tracks and slots of host memory.
//!
//! ```text
//! lane of a peer and a direction:  copy in | ready = n |            | done >= n |          send
//!                                          | ready = n | (service)  | done >= n | copy out recv
//! ```
//!
//! Messages to a peer, or from it, have a *lane*: a stream of the GPU's, and slots. So a message that waits for its other end holds up no other of its
//! group. A message goes in pieces of [`PIECE_BYTES`], which both ends cut alike; each is a send or a receive of the service's. Pieces take the lane's
//! *tracks* in turn, which have an ordered stream of the service's each: one of a track travels at a time, matched by order. Lanes of a group are filled in
//! turn, and as many pieces of each are under way as it has slots. A group of one lane is done in the caller's stream itself; others fork from it, and it
//! waits for them all.
//!
//! Slots are memory of the host. If NICs reach memory of the GPU, long messages are in the slots' *twins* there (`twin.rs`), and nothing of
//! them is in memory of the host. Each end decides alone: pieces are the same either way.
//!
//! In graphs (`captured.rs`) it is the same by lanes of another session. Their commands are sent again at each replay, all of a group at once. So
//! there must be room for them among what the tenant may have in flight.
//!
//! The tenant's limit of operations in flight (`max_operations_in_flight`) holds called pieces back. So ranks for which one thread calls in
//! turn should not send each other more than so many MiB in a group.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use mccs_cuda::{Context, DeviceAddress, Event, MappedMemory, OwnedStream, RawStream};
use mccs_ipc::command::P2P_TRACKS;
use mccs_ipc::types::DataType;
use mccs_kernels::cuda::{MESSAGES_MAX, OwnMessage, P2pError, P2pMessage, pairs_with_oneself};

use super::LOOK_AGAIN_AFTER;
use super::captured::{Captured, Captures};
use super::ordered_stream::{Access, OrderedStream, Ticket};
use super::twin::{self, Owner};
use crate::client::locked;
use crate::communicator::P2pCall;
use crate::cuda::cuda_error;
use crate::cuda::p2p::capture_of;
use crate::log::{LogLevel, log};
use crate::{Client, Communicator, Error, Span, Stream};

/// Longest piece: large enough that what it costs besides its bytes is little.
const PIECE_BYTES: u64 = 1 << 20;
/// Slots of a track: one that travels, and one that is copied in or out.
const TRACK_SLOTS: u64 = 2;
/// Pieces of a lane that are under way.
const LANE_SLOTS: u64 = TRACK_SLOTS * P2P_TRACKS as u64;
/// Longest message that one kernel copies, and waits for: from there on copy engines are as fast.
const KERNEL_BYTES_MAX: u64 = 64 << 10;
/// Messages from this length on are in memory of the GPU, where NICs reach it. Each end decides alone.
const DIRECT_BYTES_MIN: u64 = 256 << 10;

/// Parts of a communicator's sends and receives: kept by the communicator, and by groups to their end.
pub(crate) struct HostStagedP2p {
    comm: Arc<Communicator>,
    context: Context,
    access: Access,
    captures: Arc<Captures>,
    order: Mutex<Order>,
}

/// Common properties of a lane's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    peer: u32,
    is_send: bool,
}

impl Key {
    fn of(message: &P2pMessage) -> Self {
        Key { peer: message.peer, is_send: message.is_send }
    }
}
type Lanes = HashMap<Key, Lane>;

/// State that is changed in one order, under one lock.
struct Order {
    lanes: Lanes,
    /// Those of graphs.
    captured: Lanes,
    /// To order streams of one group.
    joint: Event,
    has_left: bool,
}

/// See the module's documentation.
struct Lane {
    tracks: [Track; P2P_TRACKS as usize],
    /// For groups of several lanes.
    own: OwnedStream,
    /// Behind its last message.
    last: Event,
    /// Pieces so far.
    pieces: u64,
}

/// See the module's documentation.
struct Track {
    ordered: Arc<OrderedStream>,
    twin: TrackTwin,
}

/// Memory of the GPU in the place of a track's slots.
enum TrackTwin {
    /// No message has been long enough.
    Unasked,
    Direct(MappedMemory),
    /// NICs do not reach it.
    Refused,
}

/// A part of a message, that goes by a slot or by its twin.
#[derive(Clone, Copy)]
struct Piece {
    buffer: DeviceAddress,
    track: usize,
    /// Address in the place of the slot.
    at: DeviceAddress,
    bytes: u64,
    /// Ticket of its operation at the service.
    ticket: Ticket,
}

/// A piece as the service is told of it.
pub(super) struct Message {
    is_send: bool,
    peer: u32,
    track: u32,
    /// Span of slots, or of the same place in their twin.
    span: Span,
    is_in_twin: bool,
    count: u64,
    dtype: DataType,
}

/// How the service is told.
#[derive(Clone, Copy)]
enum By<'a> {
    /// At once.
    Calling(&'a Communicator),
    /// Whenever a graph is replayed.
    Replaying(&'a Captured),
}

/// Carrier of a part of a message between its buffer and the service.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    /// A slot, by a kernel that tells and waits as well.
    Kernel,
    /// A slot, by copy engines.
    Slot,
    /// The slot's twin, where there is one.
    Twin,
}

/// Messages of a lane in a group.
struct Traffic {
    stream: RawStream,
    /// Parts that are not begun, each with whether it is one of a long message.
    waiting: VecDeque<(P2pMessage, bool)>,
    under_way: VecDeque<Piece>,
}

impl HostStagedP2p {
    pub(super) fn new(
        comm: Arc<Communicator>,
        context: Context,
        access: Access,
        captures: Arc<Captures>,
    ) -> Result<Self, Error> {
        let joint = Event::new(&context, false).map_err(cuda_error)?;
        let order = Mutex::new(Order { lanes: Lanes::new(), captured: Lanes::new(), joint, has_left: false });
        Ok(HostStagedP2p { comm, context, access, captures, order })
    }

    pub(crate) fn nranks(&self) -> u32 {
        self.comm.nranks()
    }

    /// Checks a group as a whole, and makes the lanes that it needs.
    pub(crate) fn plan(&self, list: &[P2pMessage], streams: &[RawStream]) -> Result<(), Error> {
        let mut order = locked(&self.order);
        if order.has_left {
            return Err(Error::argument(
                "a communicator was destroyed inside a group that uses it; the group is dropped",
            ));
        }
        if let Some(error) = self.comm.async_error() {
            return Err(error);
        }
        let refused = |error: P2pError| Error::argument(error.to_string());
        pairs_with_oneself(list, self.comm.rank()).map_err(refused)?;
        if list.len() > MESSAGES_MAX {
            return Err(refused(P2pError::TooMany { count: list.len() }));
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        let keys = keys(list, self.comm.rank());
        if capture_of(streams)?.is_none() {
            let client = self.comm.client();
            keys.iter().try_for_each(|key| self.make_lane(client, &mut order.lanes, *key))?;
            let long = list.iter().filter(|message| is_long(message) && message.peer != self.comm.rank());
            return long.map(Key::of).try_for_each(|key| {
                let mut tracks = order.lanes.get_mut(&key).into_iter().flat_map(|lane| &mut lane.tracks);
                tracks.try_for_each(|track| self.make_twin(track, key))
            });
        }
        self.captures.with(|captured| {
            let others = list.iter().filter(|message| message.peer != self.comm.rank());
            let (pieces, most) =
                (others.map(|message| parts(message).count() as u64).sum::<u64>(), captured.commands_max());
            if pieces > most {
                let message = format!(
                    "a group of {pieces} pieces of {} MiB cannot be captured into a graph: {most} may be in flight \
                     (max_operations_in_flight, limits.command_ring)",
                    PIECE_BYTES >> 20
                );
                return Err(Error::argument(message));
            }
            let make = |key| self.make_lane(captured.client(), &mut order.captured, key);
            mccs_cuda::while_capturing(|| keys.into_iter().try_for_each(make)).map_err(cuda_error)?
        })
    }

    /// Enqueues a group that has been planned. Its streams and buffers are as the callers of
    /// [`CudaCommunicator::send`](crate::cuda::CudaCommunicator::send) have promised.
    pub(crate) fn launch(&self, list: &[P2pMessage], streams: &[RawStream]) -> Result<(), Error> {
        let Some(&main) = streams.first() else { return Ok(()) };
        let mut order = locked(&self.order);
        let Order { lanes, captured, joint, .. } = &mut *order;
        let _entered = self.context.enter().map_err(cuda_error)?;
        // SAFETY: callers vouch for streams and buffers; lanes live as long as the communicator, which does not leave before
        // they are out of use.
        unsafe {
            if let Some(capture) = main.capture().map_err(cuda_error)? {
                return self.captures.with(|own| {
                    own.begin(main, capture)?;
                    let launched = self.launch_joined(captured, joint, By::Replaying(own), list, streams);
                    // Behind what was enqueued in spite of an error, too.
                    launched.and(own.end(main, capture))
                });
            }
        }
        // SAFETY: as above.
        let launched = unsafe { self.launch_joined(lanes, joint, By::Calling(&self.comm), list, streams) };
        if let Err(error) = &launched {
            // The service may have been told of what the GPU never comes to.
            let tracks = || lanes.values().flat_map(|lane| &lane.tracks);
            let release = || tracks().for_each(|track| track.ordered.release());
            let _ = self.comm.abort_for(error.cuda_code(), release);
            release();
        }
        launched
    }

    /// In the first of the streams, behind all of them and before them.
    ///
    /// # Safety
    /// As for sends and receives.
    unsafe fn launch_joined(
        &self,
        lanes: &mut Lanes,
        joint: &Event,
        by: By<'_>,
        list: &[P2pMessage],
        streams: &[RawStream],
    ) -> Result<(), Error> {
        let Some((&main, others)) = streams.split_first() else { return Ok(()) };
        // SAFETY: the caller's contract is passed on.
        unsafe {
            for other in others {
                joint.record(*other).and_then(|()| main.wait(joint)).map_err(cuda_error)?;
            }
            self.launch_on(&mut *lanes, joint, by, list, main)?;
            if !others.is_empty() {
                joint.record(main).map_err(cuda_error)?;
            }
            others.iter().try_for_each(|other| other.wait(joint)).map_err(cuda_error)
        }
    }

    /// # Safety
    /// As for sends and receives.
    unsafe fn launch_on(
        &self,
        lanes: &mut Lanes,
        joint: &Event,
        by: By<'_>,
        list: &[P2pMessage],
        main: RawStream,
    ) -> Result<(), Error> {
        let rank = self.comm.rank();
        let unmatched = |error: P2pError| Error::argument(error.to_string());
        for OwnMessage { send, recv } in pairs_with_oneself(list, rank).map_err(unmatched)? {
            // SAFETY: the caller's contract is passed on.
            unsafe { main.copy(recv.buffer, send.buffer, send.bytes as usize) }.map_err(cuda_error)?;
        }
        let keys = keys(list, rank);
        let is_alone = keys.len() == 1;
        let mut traffic = Vec::new();
        // SAFETY: the caller's contract is passed on; lanes' streams and events live with them.
        unsafe {
            if let (By::Replaying(captured), false) = (by, keys.is_empty()) {
                captured.begin_group(main)?;
            }
            if !is_alone {
                joint.record(main).map_err(cuda_error)?;
            }
            for key in &keys {
                let Some(lane) = lanes.get(key) else { continue };
                let stream = if is_alone { main } else { lane.own.raw() };
                if !is_alone {
                    stream.wait(joint).map_err(cuda_error)?;
                }
                if matches!(by, By::Calling(_)) {
                    // Its slots may be in use in another stream. Captured operations go one behind the other.
                    stream.wait(&lane.last).map_err(cuda_error)?;
                }
                let p2p = list.iter().filter(|message| Key::of(message) == *key);
                let waiting = p2p.flat_map(|message| parts(message).map(|part| (part, is_long(message)))).collect();
                traffic.push((*key, Traffic { stream, waiting, under_way: VecDeque::new() }));
            }
            // Lanes end behind what was enqueued in spite of an error, too.
            let mut done = run(lanes, by, &mut traffic);
            for (key, Traffic { stream, .. }) in &traffic {
                let Some(lane) = lanes.get(key) else { continue };
                let joined =
                    lane.last.record(*stream).and_then(|()| if is_alone { Ok(()) } else { main.wait(&lane.last) });
                done = done.and(joined.map_err(cuda_error));
            }
            done
        }
    }

    fn make_lane(&self, client: &Client, lanes: &mut Lanes, key: Key) -> Result<(), Error> {
        if lanes.contains_key(&key) {
            return Ok(());
        }
        let track = || {
            let ordered = OrderedStream::new(client, &self.context, self.access.clone(), TRACK_SLOTS * PIECE_BYTES)?;
            Ok::<_, Error>(Track { ordered: Arc::new(ordered), twin: TrackTwin::Unasked })
        };
        let tracks = [track()?, track()?];
        let own = OwnedStream::new(&self.context).map_err(cuda_error)?;
        let last = Event::new(&self.context, false).map_err(cuda_error)?;
        lanes.insert(key, Lane { tracks, own, last, pieces: 0 });
        Ok(())
    }

    /// Asks for the twin of a track's slots, once.
    fn make_twin(&self, track: &mut Track, Key { peer, is_send }: Key) -> Result<(), Error> {
        if !matches!(track.twin, TrackTwin::Unasked) {
            return Ok(());
        }
        let (of, bytes) = (Owner { comm: self.comm.handle(), peer: Some(peer) }, TRACK_SLOTS * PIECE_BYTES);
        track.twin = match twin::ask(self.comm.client(), &self.context, of, &track.ordered, bytes)? {
            Ok(memory) => TrackTwin::Direct(memory),
            Err(reason) => {
                let direction = if is_send { "to" } else { "from" };
                log(LogLevel::Info, || {
                    format!("messages {direction} rank {peer} go through memory of the host: {reason}")
                });
                TrackTwin::Refused
            }
        };
        Ok(())
    }

    /// Waits until this rank's messages are done. There are none from here on.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        order.has_left = true;
        for lane in order.lanes.values() {
            while !lane.last.has_happened().map_err(cuda_error)? {
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
        }
        // Before the communicator leaves.
        order.lanes.clear();
        Ok(())
    }
}

/// Fills lanes in turn.
///
/// # Safety
/// As for sends and receives.
unsafe fn run(lanes: &mut Lanes, by: By<'_>, traffic: &mut [(Key, Traffic)]) -> Result<(), Error> {
    let mut any = true;
    while std::mem::take(&mut any) {
        for (key, of_lane) in traffic.iter_mut() {
            let Some(lane) = lanes.get_mut(key) else { continue };
            let next = of_lane.waiting.pop_front();
            let is_one_to_end = of_lane.under_way.len() as u64 == LANE_SLOTS || next.is_none();
            // SAFETY: the caller's contract is passed on.
            unsafe {
                if is_one_to_end && let Some(piece) = of_lane.under_way.pop_front() {
                    lane.end(of_lane.stream, key.is_send, &piece)?;
                    any = true;
                }
                if let Some((part, is_long)) = next {
                    let is_alone = of_lane.waiting.is_empty() && of_lane.under_way.is_empty();
                    let how = match is_long {
                        true => Carries::Twin,
                        false if is_alone && part.bytes <= KERNEL_BYTES_MAX => Carries::Kernel,
                        false => Carries::Slot,
                    };
                    let begun = lane.begin(by, of_lane.stream, &part, how)?;
                    of_lane.under_way.extend(begun);
                    any = true;
                }
            }
        }
    }
    Ok(())
}

/// Whether a message is in memory of the GPU where NICs reach it.
fn is_long(message: &P2pMessage) -> bool {
    message.bytes >= DIRECT_BYTES_MIN
}

/// The track that a piece of a lane takes, and where its slot begins there: the same at both ends.
fn place_of(piece: u64) -> (usize, u64) {
    let tracks = u64::from(P2P_TRACKS);
    ((piece % tracks) as usize, piece / tracks % TRACK_SLOTS * PIECE_BYTES)
}

/// The lanes that a group takes.
fn keys(list: &[P2pMessage], rank: u32) -> Vec<Key> {
    let mut keys = Vec::new();
    for message in list.iter().filter(|message| message.peer != rank) {
        let key = Key::of(message);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// The parts of a message: at least one, so that ends whose messages differ find out.
fn parts(message: &P2pMessage) -> impl Iterator<Item = P2pMessage> + use<> {
    let message = *message;
    let begins = (0..message.bytes.div_ceil(PIECE_BYTES).max(1)).map(|index| index * PIECE_BYTES);
    begins.map(move |at| P2pMessage {
        buffer: message.buffer + at,
        bytes: PIECE_BYTES.min(message.bytes - at),
        ..message
    })
}

impl Message {
    /// Tells the service of it. Returns its ticket.
    pub(super) fn send(&self, comm: &Communicator, stream: &Stream) -> Result<u64, Error> {
        let Message { is_send, peer, track, span, is_in_twin, count, dtype } = *self;
        comm.submit_p2p(P2pCall { is_send, peer, span, count, dtype }, track, is_in_twin, stream)
    }
}

impl Lane {
    /// A piece's command, and what comes before the service's part. None is left of a short one, of which a kernel does all.
    ///
    /// # Safety
    /// As for sends and receives.
    unsafe fn begin(
        &mut self,
        by: By<'_>,
        stream: RawStream,
        part: &P2pMessage,
        how: Carries,
    ) -> Result<Option<Piece>, Error> {
        let P2pMessage { is_send, peer, buffer, bytes, dtype } = *part;
        let (track, slot) = place_of(self.pieces);
        let Track { ordered, twin } = &self.tracks[track];
        let (span, count) = (ordered.span(slot), bytes / dtype.size_bytes() as u64);
        let twin = match twin {
            TrackTwin::Direct(memory) if how == Carries::Twin => Some(memory.address() + slot),
            _ => None,
        };
        let (on, is_in_twin) = (track as u32, twin.is_some());
        let message = Message { is_send, peer, track: on, span, is_in_twin, count, dtype };
        let ticket = match by {
            By::Calling(comm) => Ticket::Known(message.send(comm, &ordered.stream)?),
            By::Replaying(captured) => captured.add_to_group(ordered, message)?,
        };
        self.pieces += 1;
        let at = twin.unwrap_or_else(|| ordered.address(slot));
        // SAFETY: the caller's contract is passed on.
        unsafe {
            if let Some(kernel) = ordered.access.kernel.as_deref().filter(|_| how == Carries::Kernel) {
                let mut args = ordered.words(ticket, true, true);
                if is_send {
                    (args.send, args.slot_in, args.in_bytes) = (buffer, at, bytes);
                } else {
                    (args.recv, args.slot_out, args.out_bytes) = (buffer, at, bytes);
                }
                kernel.function.launch(stream, 1, args.threads(), &args).map_err(cuda_error)?;
                return Ok(None);
            }
            if is_send && bytes > 0 {
                stream.copy(at, buffer, bytes as usize).map_err(cuda_error)?;
            }
            ordered.tell(stream, ticket)?;
        }
        Ok(Some(Piece { buffer, track, at, bytes, ticket }))
    }

    /// Work behind the service's part.
    ///
    /// # Safety
    /// As for sends and receives.
    unsafe fn end(&self, stream: RawStream, is_send: bool, piece: &Piece) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            self.tracks[piece.track].ordered.wait(stream, piece.ticket)?;
            if is_send || piece.bytes == 0 {
                return Ok(());
            }
            stream.copy(piece.buffer, piece.at, piece.bytes as usize).map_err(cuda_error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_pieces_have_slots_of_their_own_as_are_under_way() {
        for first in 0..20 {
            let mut places: Vec<_> = (first..first + LANE_SLOTS).map(place_of).collect();
            assert!(places.windows(2).all(|two| two[0].0 != two[1].0), "neighbours travel at the same time");
            assert!(places.iter().all(|(_, slot)| slot + PIECE_BYTES <= TRACK_SLOTS * PIECE_BYTES));
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len() as u64, LANE_SLOTS);
        }
    }

    #[test]
    fn messages_are_cut_alike_at_both_ends_and_wholly() {
        for bytes in [0, 8, PIECE_BYTES - 8, PIECE_BYTES, PIECE_BYTES + 8, 5 * PIECE_BYTES + 56] {
            let of = |is_send, buffer| {
                parts(&P2pMessage { is_send, peer: 1, buffer, bytes, dtype: DataType::F64 }).collect::<Vec<_>>()
            };
            let (sent, received) = (of(true, 4096), of(false, 80));
            assert!(!sent.is_empty() && sent.iter().all(|part| part.bytes <= PIECE_BYTES));
            let mut at = 0;
            for (from, to) in sent.iter().zip(&received) {
                assert_eq!((from.buffer - 4096, to.buffer - 80, from.bytes), (at, at, to.bytes));
                at += from.bytes;
            }
            assert_eq!((at, sent.len()), (bytes, received.len()));
        }
    }
}
