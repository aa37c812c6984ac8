//! `ncclCollConfig_t`: the configuration of one collective, read and checked as NCCL does.
//!
//! The launch event has an effect. The rest is advice on NCCL's own kernels, in whose place the operator's strategy stands; an
//! algorithm that the caller insists on is refused.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use mccs::Error;
use mccs_cuda::RawStream;

use super::communicators::cuda_error;
use super::config::{CTA_POLICIES, MAGIC, UNDEFINED};
use super::refused;

/// The structure of 2.32, in which it appeared. Later versions append to it.
#[derive(Clone, Copy)]
#[repr(C)]
struct NcclCollectiveConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// Options of vendors: a list, which is ignored as in NCCL.
    extensions: *const c_void,
    min_ctas: c_int,
    max_ctas: c_int,
    nvls_ctas: c_int,
    cga_cluster_size: c_int,
    algorithms: *const c_char,
    insists_on_algorithms: c_int,
    cta_policy: c_int,
    user_profiler_tag: u64,
    launch_completion_event: *mut c_void,
}

/// Fields of a configuration that have an effect.
#[derive(Clone, Copy)]
pub(crate) struct CollectiveConfig {
    launch_event: *mut c_void,
    /// Profilers' tag of the call; 0 stands for none.
    pub(crate) user_tag: u64,
}

impl CollectiveConfig {
    /// Reads a configuration; a null pointer is the plain call.
    ///
    /// # Safety
    /// The pointer must be null or lead to as many bytes as its first word says.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what NCCL does not accept either; a refusal where the caller insists on algorithms.
    pub(crate) unsafe fn read(config: *const c_void) -> Result<Self, Error> {
        if config.is_null() {
            return Ok(CollectiveConfig { launch_event: std::ptr::null_mut(), user_tag: 0 });
        }
        let wrong = |what: String| Err(Error::InvalidArgument(format!("the collective's configuration: {what}")));
        // SAFETY: the caller's contract: the size is there.
        if unsafe { config.cast::<usize>().read_unaligned() } < size_of::<NcclCollectiveConfig>() {
            return wrong("it is shorter than that of NCCL 2.32".into());
        }
        // SAFETY: it is as long as that; any bytes are numbers and pointers.
        let config = unsafe { config.cast::<NcclCollectiveConfig>().read_unaligned() };
        if config.magic != MAGIC {
            return wrong("it was not made by NCCL_COLLCONFIG_INITIALIZER".into());
        }
        let positive: fn(c_int) -> bool = |value| value > 0;
        let fields = [
            ("minCTAs", config.min_ctas, positive),
            ("maxCTAs", config.max_ctas, positive),
            ("nvlsCTAs", config.nvls_ctas, positive),
            ("cgaClusterSize", config.cga_cluster_size, |value| (0..=8).contains(&value)),
            ("forceAlgSelection", config.insists_on_algorithms, |value| (0..=1).contains(&value)),
            ("CTAPolicy", config.cta_policy, |value| CTA_POLICIES.contains(&value)),
        ];
        if let Some((name, value, _)) =
            fields.iter().find(|(_, value, is_valid)| *value != UNDEFINED && !is_valid(*value))
        {
            return wrong(format!("{name} is {value}"));
        }
        if config.max_ctas != UNDEFINED && config.min_ctas > config.max_ctas {
            return wrong(format!("minCTAs, {}, are more than maxCTAs, {}", config.min_ctas, config.max_ctas));
        }
        // SAFETY: the caller's contract: null, or a text that ends.
        unsafe { check_algorithms(config.algorithms, config.insists_on_algorithms != 0)? };
        Ok(CollectiveConfig { launch_event: config.launch_completion_event, user_tag: config.user_profiler_tag })
    }

    /// Records the caller's event, if there is one: before the launch, as NCCL does on drivers before CUDA 12.3.
    ///
    /// # Safety
    /// The event and the stream must live, and be of the current context.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) unsafe fn record_launch(&self, stream: *mut c_void) -> Result<(), Error> {
        if self.launch_event.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { RawStream::from_ptr(stream).record(self.launch_event) }.map_err(cuda_error)
    }
}

/// # Safety
/// The pointer must be null, or lead to a text that ends.
unsafe fn check_algorithms(algorithms: *const c_char, is_insisted_on: bool) -> Result<(), Error> {
    // SAFETY: the caller's contract.
    let is_automatic = algorithms.is_null() || unsafe { CStr::from_ptr(algorithms) }.is_empty();
    if is_automatic || !is_insisted_on {
        return Ok(());
    }
    // SAFETY: as above.
    let algorithms = unsafe { CStr::from_ptr(algorithms) }.to_string_lossy();
    let instead = format!(
        "the operator chooses the algorithm, so algSelection {algorithms:?} cannot be promised; leave it out, set \
         forceAlgSelection to 0, or ask the operator (`mccsctl reconfigure`)"
    );
    Err(refused("ncclCollConfig_t", &instead))
}
