//! GPU memory (twins) that a communicator's flows use, as registered with a transport.

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_device::cuda::GpuTwin;
use mccs_transport::{MemoryKey, Transport, TransportError};

/// Registered once, and kept until the flows are closed. By number.
#[derive(Default)]
pub(super) struct Twins(BTreeMap<u64, (MemoryKey, Arc<GpuTwin>)>);

impl Twins {
    /// The transport's key for it.
    ///
    /// # Errors
    /// A device does not take it.
    pub(super) fn key(
        &mut self,
        transport: &mut dyn Transport,
        twin: &Arc<GpuTwin>,
    ) -> Result<MemoryKey, TransportError> {
        if let Some((key, _)) = self.0.get(&twin.number()) {
            return Ok(*key);
        }
        let (ptr, kind) = twin.memory().ok_or(TransportError::NoSuch("memory of a GPU"))?;
        // SAFETY: the twin is kept until it has been deregistered.
        let key = unsafe { transport.register(ptr, twin.len_bytes(), kind) }?;
        self.0.insert(twin.number(), (key, Arc::clone(twin)));
        Ok(key)
    }

    /// Has a transport forget it all, whose flows are closed.
    pub(super) fn forget(self, transport: &mut dyn Transport) {
        for (key, twin) in self.0.into_values() {
            if transport.deregister(key).is_err() {
                debug_assert!(false, "bug: flows that are closed use memory of a GPU");
                // A device may still write there.
                std::mem::forget(twin);
            }
        }
    }
}
