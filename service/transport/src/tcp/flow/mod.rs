//! A TCP flow as the transport keeps it, and [`Flows`](flows::Flows), which owns them all.

pub(in crate::tcp) mod busy_polling;
pub(in crate::tcp) mod connection;
pub(in crate::tcp) mod flows;
pub(in crate::tcp) mod opening;
pub(in crate::tcp) mod queues;
pub(in crate::tcp) mod receiver;
pub(in crate::tcp) mod reorder_window;
pub(in crate::tcp) mod retransmission;
pub(in crate::tcp) mod sender;

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_runtime::Share;

use self::receiver::Receiver;
use self::sender::Sender;
use crate::tcp::accept::listener::Arrivals;
use crate::tcp::accept::port::welcome;
use crate::tcp::watches::{Watched, Watches};
use crate::{Fault, FlowOptions, FlowSpec, FlowState, TransportError};

/// The result of a turn of a flow.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::tcp) struct Pumped {
    /// Something moved.
    pub(in crate::tcp) moved: bool,
    /// The turn ended before there was nothing more to do.
    pub(in crate::tcp) more: bool,
    /// Messages wait for acknowledgements.
    pub(in crate::tcp) is_unsettled: bool,
    /// A path is dead: it is to be looked at.
    pub(in crate::tcp) is_cut: bool,
}

/// Which side of the flow this is.
#[derive(Debug)]
pub(in crate::tcp) enum Half {
    Send(Sender),
    Recv(Receiver),
}

/// A flow that waits to be connected.
#[derive(Debug)]
struct Waiting {
    options: FlowOptions,
    since: Instant,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Flow {
    peer: String,
    number: u64,
    /// Listener of an accepted flow, until it has ended.
    listener: Option<Handle>,
    pub(in crate::tcp) half: Half,
    fault: Option<Fault>,
    silence_timeout: Duration,
    /// Its tenant's share.
    share: Share,
    /// Is in the queue of flows with something to do.
    queued: bool,
    /// Is among the receivers that may wait for a message.
    waits: bool,
    /// Is in the queue of news.
    is_news: bool,
    /// Is among those whose messages wait for acknowledgements.
    is_unsettled: bool,
    /// Its user has closed it.
    lingers: bool,
    /// Until it is connected.
    waiting: Option<Waiting>,
    /// Options of an accepted flow, once it is connected: further sockets of it may come.
    accepted_with: Option<FlowOptions>,
}

impl Flow {
    /// A flow that waits to be connected; an accepted one at a listener.
    fn new(spec: &FlowSpec, half: Half, listener: Option<Handle>, now: Instant) -> Self {
        Flow {
            peer: spec.peer.clone(),
            number: spec.number,
            listener,
            half,
            fault: None,
            silence_timeout: spec.options.silence_timeout,
            share: spec.options.share,
            queued: false,
            waits: false,
            is_news: false,
            is_unsettled: false,
            lingers: false,
            waiting: Some(Waiting { options: spec.options.clone(), since: now }),
            accepted_with: None,
        }
    }

    /// All sockets of an accepted flow are there. Returns how many, and whether all were welcomed; `None` where it waits for none.
    pub(in crate::tcp) fn complete(
        &mut self,
        handle: Handle,
        arrivals: Arrivals,
        watches: &mut Watches,
    ) -> Option<(usize, Result<(), Fault>)> {
        let Waiting { options, .. } = self.waiting.take()?;
        let Half::Recv(receiver) = &mut self.half else { return None };
        receiver.start(arrivals.hello(), arrivals.into_sockets());
        let mut welcomed = Ok(());
        for (connection, (socket, watch, resumption)) in receiver.sockets().enumerate() {
            watches.change(watch, Watched::Connection { flow: handle, connection: connection as u16 });
            let received = (resumption > 0).then_some(0);
            welcomed = welcomed.and_then(|()| welcome(socket, &options, received));
        }
        self.accepted_with = Some(options);
        Some((receiver.sockets().count(), welcomed))
    }

    pub(in crate::tcp) fn error(&self, fault: Fault) -> TransportError {
        let direction = if matches!(self.half, Half::Send(_)) { "to" } else { "from" };
        TransportError::of_flow(&self.peer, direction, self.number, fault)
    }

    pub(in crate::tcp) fn check(&self) -> Result<(), TransportError> {
        self.fault.map_or(Ok(()), |fault| Err(self.error(fault)))
    }

    pub(in crate::tcp) fn state(&self) -> Result<FlowState, TransportError> {
        self.check()?;
        Ok(if self.is_connected() { FlowState::Connected } else { FlowState::Connecting })
    }

    fn is_connected(&self) -> bool {
        match &self.half {
            Half::Send(sender) => sender.is_connected(),
            Half::Recv(receiver) => receiver.is_connected(),
        }
    }

    /// Until when it may stay unconnected, and how long that is.
    fn patience(&self) -> Option<(Instant, Duration)> {
        let waiting = self.waiting.as_ref()?;
        let has_reached = match &self.half {
            Half::Send(sender) => sender.has_reached_peer(),
            Half::Recv(_) => true,
        };
        let timeout = if has_reached { waiting.options.peer_timeout? } else { waiting.options.connect_timeout };
        Some((waiting.since + timeout, timeout))
    }
}
