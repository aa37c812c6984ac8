//! A trace for a browser: has the service record for a while, one trace at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use mccs_control::trace_window::{TraceError, trace_up_to};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;

/// Records of a trace: some 60 MB of JSON, which the console keeps until they are sent. No other trace is made meanwhile.
const RECORDS_MAX: usize = 512 << 10;

/// Makes traces, one after the other.
pub struct Tracer {
    turn: Arc<Semaphore>,
}

/// A trace that is to be sent.
struct Made {
    text: Vec<u8>,
    _turn: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Made {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

/// Ends a trace whose browser has gone.
struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Tracer {
    /// With nothing to do.
    pub fn new() -> Self {
        Tracer { turn: Arc::new(Semaphore::new(1)) }
    }

    /// The turn, unless another trace is made now.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.turn).try_acquire_owned().ok()
    }

    /// A trace for Perfetto. `turn` is over when it has been sent, or where nobody waits any more when the service has been left.
    pub async fn trace(
        &self,
        turn: OwnedSemaphorePermit,
        socket: PathBuf,
        duration: Duration,
        communicator: Option<u64>,
    ) -> Result<Bytes, TraceError> {
        let is_gone = Arc::new(AtomicBool::new(false));
        let _gone = Gone(Arc::clone(&is_gone));
        let made = spawn_blocking(move || {
            let is_over = || is_gone.load(Ordering::Relaxed);
            let window = trace_up_to(RECORDS_MAX, &socket, duration, communicator, &is_over)?;
            let mut text = Vec::new();
            // Nothing but memory refuses what is written to it.
            mccs_telemetry::trace::write(&window, &mut text).map_err(|_| TraceError::Answer)?;
            Ok(Bytes::from_owner(Made { text, _turn: turn }))
        });
        made.await.unwrap_or(Err(TraceError::Answer))
    }
}
