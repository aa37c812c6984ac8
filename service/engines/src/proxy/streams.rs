//! The streams of all sessions.

use std::collections::HashMap;
use std::sync::Arc;

use mccs_ipc::types::Handle;
use mccs_model::SessionId;
use mccs_tenants::session::Session;

use super::gates::StreamGate;
use super::stream::Stream;

/// By session, and by the index of the stream's word.
#[derive(Default)]
pub(super) struct Streams {
    by_session: HashMap<SessionId, Vec<Option<Stream>>>,
}

impl Streams {
    /// Sessions that have streams.
    pub(super) fn len(&self) -> usize {
        self.by_session.len()
    }

    pub(super) fn get_mut(&mut self, session: SessionId, index: u32) -> Option<&mut Stream> {
        self.by_session.get_mut(&session)?.get_mut(index as usize)?.as_mut()
    }

    /// A session's stream, which begins here if it is new.
    pub(super) fn open(&mut self, session: &Arc<Session>, handle: Handle) -> &mut Stream {
        let stream = self.slot(session.id, handle).get_or_insert_with(|| Stream::new(Arc::clone(session), handle));
        stream.handle = handle;
        stream
    }

    /// Begins a stream whose operations wait for a GPU.
    pub(super) fn open_gated(&mut self, session: Arc<Session>, handle: Handle, gate: StreamGate) {
        let id = session.id;
        *self.slot(id, handle) = Some(Stream::gated(session, handle, gate));
    }

    pub(super) fn close(&mut self, session: SessionId, index: u32) {
        if let Some(slot) = self.by_session.get_mut(&session).and_then(|streams| streams.get_mut(index as usize)) {
            *slot = None;
        }
    }

    /// Closes all streams of a session.
    pub(super) fn close_all(&mut self, session: SessionId) {
        self.by_session.remove(&session);
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
