//! GPU health: GPUs whose context has a sticky CUDA error (as after an Xid) are of no more use
//! ([`DriverError::is_sticky`]).
//!
//! The first that notices tells: all communicators on the GPU end, with the error's name, and later ones are refused. Others go on; a process gets
//! a new context only when it starts anew, so that is what operators are told to do.

use std::sync::Arc;

use mccs_cuda::DriverError;
use mccs_telemetry::GpuInfo;

use crate::{DeviceEvent, DeviceEvents};

/// See the module's documentation.
pub(crate) struct GpuHealth {
    gpus: Arc<[GpuInfo]>,
    device_events: Arc<DeviceEvents>,
}

impl GpuHealth {
    /// None is lost yet of `gpus`, which are in the device's order.
    pub(crate) fn new(gpus: Arc<[GpuInfo]>, device_events: Arc<DeviceEvents>) -> Self {
        GpuHealth { gpus, device_events }
    }

    /// A call in the service's context on a GPU has failed.
    pub(crate) fn note(&self, gpu: usize, error: &DriverError) {
        let Some(info) = self.gpus.get(gpu).filter(|_| error.is_sticky()) else { return };
        if info.lost.set(error.to_string()).is_ok() {
            let reason = describe(info, &error.to_string());
            tracing::error!("{reason}");
            self.device_events.tell(DeviceEvent::GpuLost { gpu, reason: reason.into() });
        }
    }

    /// Whether any is lost: what its streams do is not known any more.
    pub(crate) fn are_some(&self) -> bool {
        self.gpus.iter().any(|info| info.lost.get().is_some())
    }

    /// Why nothing can begin on some GPUs, if one of them is lost.
    pub(crate) fn objection(&self, gpus: &[usize]) -> Option<String> {
        let lost = |gpu: &usize| self.gpus.get(*gpu).and_then(|info| Some(describe(info, info.lost.get()?)));
        gpus.iter().find_map(lost)
    }
}

fn describe(gpu: &GpuInfo, error: &str) -> String {
    format!(
        "GPU {} ({}) is lost to this service: {error}; others go on. To use it again see to it by nvidia-smi; drain, then restart mccs-service",
        gpu.id, gpu.pci_bus_id
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::tests::told;

    fn error(code: u32) -> DriverError {
        DriverError { call: "cuMemcpyAsync", code, name: format!("CUDA_ERROR_{code}") }
    }

    #[test]
    fn a_gpu_is_lost_once_by_what_stays_and_the_others_are_not() {
        let info = |n: u32| GpuInfo::new(format!("GPU-{n}"), "H200".into(), format!("0000:{n}7:00.0"));
        let ((mailbox, events), gpus) = (told(4), Arc::<[GpuInfo]>::from([info(0), info(1)]));
        let gpu_health = GpuHealth::new(Arc::clone(&gpus), events);
        // Memory that is full, and an argument that is wrong, are of one call.
        [2, 1].into_iter().for_each(|code| gpu_health.note(1, &error(code)));
        assert!(mailbox.is_empty() && !gpu_health.are_some() && gpu_health.objection(&[0, 1]).is_none());
        [214, 700].into_iter().for_each(|code| gpu_health.note(1, &error(code)));
        let Some(DeviceEvent::GpuLost { gpu: 1, reason }) = mailbox.pop() else { panic!("nobody was told") };
        assert!(reason.contains("GPU GPU-1 (0000:17:00.0)") && reason.contains("CUDA_ERROR_214 (214)"), "{reason}");
        assert!(mailbox.is_empty() && gpu_health.are_some(), "told once");
        assert_eq!((gpu_health.objection(&[0]), gpu_health.objection(&[0, 1])), (None, Some(reason.to_string())));
        assert_eq!(gpus[1].lost.get().map(String::as_str), Some("cuMemcpyAsync: CUDA_ERROR_214 (214)"));
    }
}
