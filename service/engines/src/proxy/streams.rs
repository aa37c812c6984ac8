//! Streams of all sessions, and those among them that wait for a GPU.

pub(super) mod semaphores;
pub(super) mod stream;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use mccs_handover::EndedOperation;
use mccs_ipc::types::Handle;
use mccs_model::SessionId;
use mccs_runtime::Share;
use mccs_tenants::session::Session;

use crate::proxy::calls::failure::Failure;
use crate::proxy::streams::semaphores::{SemaphoreWatch, StreamSemaphore};
use crate::proxy::streams::stream::{Entry, Head, Stream};

/// An operation that fails.
pub(super) struct Failed {
    pub(super) session: SessionId,
    /// Index of its stream.
    pub(super) stream: u32,
    pub(super) ticket: u64,
    /// Whether its rank hears from the communicator.
    pub(super) is_told: bool,
}

/// By session, and by the index of the stream's word.
#[derive(Default)]
pub(super) struct Streams {
    by_session: BTreeMap<SessionId, Vec<Option<Stream>>>,
    /// Those whose next operation waits for its GPU.
    held_back: SemaphoreWatch,
}

impl Streams {
    /// Sessions that have streams.
    pub(super) fn len(&self) -> usize {
        self.by_session.len()
    }

    /// Operations that have ended, and of which their tenants were not told: of groups that have not ended.
    pub(super) fn untold(&self) -> impl Iterator<Item = EndedOperation> {
        self.by_session.iter().flat_map(|(&session, streams)| {
            let streams = (0..).zip(streams).filter_map(|(index, stream)| Some((index, stream.as_ref()?)));
            streams
                .flat_map(move |(stream, of)| of.untold().map(move |ticket| EndedOperation { session, stream, ticket }))
        })
    }

    /// Whether a stream waits for its GPU.
    pub(super) fn await_gpus(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// When to [look](Streams::look) again, if at all.
    pub(super) fn look_at(&self, now: Instant) -> Option<Instant> {
        self.held_back.look_at(now)
    }

    /// Enqueues an operation in a session's stream, which begins here if it is new.
    pub(super) fn enqueue(&mut self, session: &Arc<Session>, handle: Handle, entry: Entry) {
        let stream = self.slot(session.id, handle).get_or_insert_with(|| Stream::new(Arc::clone(session), handle));
        stream.handle = handle;
        stream.push(entry);
    }

    /// The next operation of a stream that may start now. A stream that waits for its GPU is looked at from now on.
    pub(super) fn start_next(&mut self, session: SessionId, index: u32, now: Instant) -> Option<Head> {
        let stream = get_mut(&mut self.by_session, session, index)?;
        let head = stream.start_next(now);
        if head.is_none() && stream.may_be_held_back() && stream.note_watched(true) {
            self.held_back.push(&stream.session.tenant, session, index);
            self.held_back.touch(now);
        }
        head
    }

    /// Looks whether GPUs have come to operations. Streams that may go on are told to `goes_on`, with whose they are.
    pub(super) fn look(&mut self, now: Instant, mut goes_on: impl FnMut(Share, SessionId, u32)) {
        for _ in 0..self.held_back.next_look() {
            let Some((session, index)) = self.held_back.pop() else { return };
            match get_mut(&mut self.by_session, session, index) {
                Some(stream) if stream.is_held_back() => {
                    self.held_back.put_back(session, index);
                    continue;
                }
                Some(stream) => {
                    stream.note_watched(false);
                    goes_on(stream.session.tenant.share, session, index);
                }
                // It has ended.
                None => {}
            }
            self.held_back.touch(now);
        }
    }

    /// A started operation of a stream has ended. Returns whose stream it is if another group of its may start.
    pub(super) fn finish_one(&mut self, session: SessionId, index: u32, ticket: u64, now: Instant) -> Option<Share> {
        let stream = get_mut(&mut self.by_session, session, index)?;
        (stream.finish_one(ticket, now) && stream.has_next()).then(|| stream.session.tenant.share)
    }

    /// An operation of `comm` fails. Its tenant hears why here, once for each stream, where it does not hear from the communicator itself.
    pub(super) fn count_failed(&mut self, failed: &Failed, comm: Handle, failure: &Failure) {
        let Some(stream) = get_mut(&mut self.by_session, failed.session, failed.stream) else { return };
        stream.session.count_failed();
        if !failed.is_told && stream.is_news(comm) {
            stream.session.report(Handle::NONE, stream.handle, failed.ticket, failure.class, &failure.message);
        }
    }

    /// Begins a stream whose operations wait for a GPU.
    pub(super) fn open_ordered(&mut self, session: Arc<Session>, handle: Handle, semaphore: StreamSemaphore) {
        let id = session.id;
        *self.slot(id, handle) = Some(Stream::ordered(session, handle, semaphore));
    }

    pub(super) fn close(&mut self, session: SessionId, index: u32) {
        if let Some(slot) = self.by_session.get_mut(&session).and_then(|streams| streams.get_mut(index as usize)) {
            *slot = None;
        }
    }

    /// Closes all streams of a session that has ended.
    pub(super) fn close_all(&mut self, session: SessionId) {
        self.by_session.remove(&session).iter().flatten().flatten().for_each(Stream::release);
    }

    /// A session, if it has a stream.
    pub(super) fn session(&self, session: SessionId) -> Option<&Arc<Session>> {
        self.by_session.get(&session)?.iter().flatten().next().map(|stream| &stream.session)
    }

    fn slot(&mut self, session: SessionId, handle: Handle) -> &mut Option<Stream> {
        let (streams, index) = (self.by_session.entry(session).or_default(), handle.index as usize);
        if streams.len() <= index {
            streams.resize_with(index + 1, || None);
        }
        &mut streams[index]
    }
}

fn get_mut(
    streams: &mut BTreeMap<SessionId, Vec<Option<Stream>>>,
    session: SessionId,
    index: u32,
) -> Option<&mut Stream> {
    streams.get_mut(&session)?.get_mut(index as usize)?.as_mut()
}

#[cfg(test)]
mod tests {
    use mccs_ipc::timeline_semaphore::TimelineSemaphore;
    use mccs_tenants::regions::UnmapWorker;
    use mccs_tenants::{Quota, Tenant, testing};

    use super::*;

    #[test]
    fn gpus_that_wait_for_a_session_that_ends_are_let_through_before_its_memory_goes() {
        let (region, _) = testing::region(4096, UnmapWorker::start().expect("a thread"));
        let tenant = Tenant::new("a".into(), Quota::least());
        let [closed, ended, others] = [0, 1, 2].map(|number| number * TimelineSemaphore::BYTES);
        let done = |offset| {
            let words = region.range(offset, TimelineSemaphore::BYTES).expect("in the region");
            // SAFETY: the region is mapped as long as it is borrowed.
            unsafe { TimelineSemaphore::at(words) }.expect("aligned").done()
        };
        let mut streams = Streams::default();
        for (session, index, offset) in [(1, 0, closed), (1, 2, ended), (2, 0, others)] {
            let semaphore = StreamSemaphore::new(Arc::clone(&region), offset).expect("in the region");
            streams.open_ordered(testing::session(session, &tenant), Handle { index, generation: 1 }, semaphore);
        }
        streams.close(1, 0);
        streams.close_all(1);
        assert_eq!(
            [closed, ended, others].map(done),
            [0, i64::MAX as u64, 0],
            "a closed stream's words are its tenant's"
        );
    }
}
