//! Events from transport engines to a proxy engine.

use std::sync::Arc;

use mccs_ipc::types::Handle;
use mccs_model::link::{FlowWait, LinksId};
use mccs_transport::{ListenerHandle, TransportError};

use super::{ChannelFault, TransportHandle};

/// From a transport engine, or their pool, to a proxy engine.
pub enum TransportEvent {
    /// A job has ended. Nothing uses its operations' memory any more.
    JobDone {
        /// As it was launched.
        job: Handle,
        /// Why it failed, if it did.
        fault: Option<Arc<ChannelFault>>,
    },
    /// An engine listens for a communicator that is to be, or cannot.
    Listening {
        /// The communicator's links.
        links: LinksId,
        /// Which of its engines.
        engine: usize,
        /// How others reach it.
        listener: Result<ListenerHandle, TransportError>,
    },
    /// Links of a communicator have failed at an engine.
    LinksFailed {
        /// The communicator's links.
        links: LinksId,
        /// Why.
        fault: Arc<ChannelFault>,
    },
    /// An engine has made the links of a strategy to come, or cannot.
    EpochPrepared {
        /// The communicator's links.
        links: LinksId,
        /// The strategy's number.
        epoch: u32,
        /// Whether it could.
        made: Result<(), TransportError>,
    },
    /// An engine tells what a communicator's channels wait for.
    FlowWaits {
        /// As it was asked.
        question: u64,
        /// Flows that they wait for.
        waits: Vec<FlowWait>,
    },
    /// The pool of engines has changed.
    PoolChanged(Vec<TransportHandle>),
}

/// Takes an event, or gives it back for lack of room.
type Take = dyn Fn(TransportEvent) -> Result<(), TransportEvent> + Send + Sync;

/// Outlet of events.
#[derive(Clone)]
pub struct TransportEvents(Arc<Take>);

impl TransportEvents {
    /// Events that `take` takes, or gives back for lack of room.
    pub fn to(take: impl Fn(TransportEvent) -> Result<(), TransportEvent> + Send + Sync + 'static) -> Self {
        TransportEvents(Arc::new(take))
    }

    /// Tells.
    ///
    /// # Errors
    /// There is no room: the event comes back.
    pub fn send(&self, event: TransportEvent) -> Result<(), TransportEvent> {
        (self.0)(event)
    }
}
