//! Pool of transport engines: how many there are, and where they run.

use std::sync::{Arc, Mutex, PoisonError};

use mccs_runtime::{Engine as _, Mailbox, RuntimeError, Runtimes};
use mccs_telemetry::recorder::Recorders;
use mccs_transport::TransportError;

use super::events::{TransportEvent, TransportEvents};
use super::links::Links;
use super::{TRANSPORT_MAILBOX_MAX, TRANSPORTS_MAX, TransportEngine, TransportHandle, TransportMessage};

/// Runtimes of the pool's engines.
pub type Placement = Box<dyn FnMut(usize) -> Result<u32, RuntimeError> + Send>;

/// Makes the links of a new engine: none where there are no other hosts.
pub type MakeLinks = Box<dyn FnMut() -> Result<Option<Links>, TransportError> + Send>;

/// All transport engines of a service. Used on the control path only.
pub struct TransportPool {
    runtimes: Arc<Runtimes>,
    /// Runtime of the proxy engines.
    proxies_runtime: u32,
    proxies: Vec<TransportEvents>,
    state: Mutex<State>,
    /// Recorders of engines.
    recorders: Arc<Recorders>,
}

struct State {
    transports: Vec<TransportHandle>,
    next_number: u64,
    /// The runtime of the pool's n-th engine.
    placement: Placement,
    make_links: MakeLinks,
}

/// Why the pool could not be resized.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// None, or too many.
    #[error("a service has 1 to {TRANSPORTS_MAX} transport engines, not {0}")]
    BadSize(usize),
    /// A proxy engine is too busy to be told; nothing has changed.
    #[error("a proxy engine is overloaded and cannot be told of the change; try again")]
    Overloaded,
    /// An engine cannot reach other hosts.
    #[error("a transport engine cannot use the network: {0}")]
    Links(#[from] TransportError),
    /// An engine could not be started.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

impl TransportPool {
    /// An empty pool that serves `proxies`, which are on the runtime `proxies_runtime`.
    #[must_use]
    pub fn new(
        runtimes: Arc<Runtimes>,
        proxies_runtime: u32,
        proxies: Vec<TransportEvents>,
        placement: Placement,
        make_links: MakeLinks,
        recorders: Arc<Recorders>,
    ) -> Self {
        let state = State { transports: Vec::new(), next_number: 0, placement, make_links };
        TransportPool { runtimes, proxies_runtime, proxies, state: Mutex::new(state), recorders }
    }

    /// Number of engines now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).transports.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starts engines, or has the last ones finish their work and end. Returns before they have.
    ///
    /// # Errors
    /// [`PoolError`]; engines started before a failure stay.
    pub fn resize(&self, count: usize) -> Result<(), PoolError> {
        if count == 0 || count > TRANSPORTS_MAX {
            return Err(PoolError::BadSize(count));
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.transports.clone();
        while state.transports.len() < count {
            let mailbox = Mailbox::new(TRANSPORT_MAILBOX_MAX);
            let index = state.transports.len();
            let runtime = (state.placement)(index)?;
            let is_near = runtime == self.proxies_runtime;
            let handle = TransportHandle { number: state.next_number, sender: mailbox.sender(), is_near };
            let links = (state.make_links)()?;
            let engine = TransportEngine::new(handle.number, mailbox, links);
            let recorder = self.recorders.recorder(engine.name());
            self.runtimes.start_engine(runtime, |waker| {
                engine.waker().set(waker);
                Box::new(engine.with_recorder(recorder))
            })?;
            state.next_number += 1;
            state.transports.push(handle);
        }
        state.transports.truncate(count);
        for proxy in &self.proxies {
            if proxy.send(TransportEvent::PoolChanged(state.transports.clone())).is_err() {
                // Told to some proxies or to none: engines that nobody gives work end.
                for started in state.transports.iter().filter(|t| before.iter().all(|b| b.number != t.number)) {
                    let _ = started.sender.send(TransportMessage::Retire);
                }
                state.transports = before;
                return Err(PoolError::Overloaded);
            }
        }
        Ok(())
    }
}
