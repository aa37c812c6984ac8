//! `ncclConfig_t`: its fields (`blocking`, `commName`, `trafficClass`, `maxCTAs` and others), read
//! and checked as NCCL does. `blocking`, `commName` and `trafficClass` have an effect: the rest is
//! advice for NCCL's own kernels and networks, in whose place the operator's strategy stands
//! (`docs/NCCL.md`).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::size_of;

use mccs::Error;
use mccs::bindings::JoinOptions;

/// `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: c_int = c_int::MIN;
/// Value that `NCCL_CONFIG_INITIALIZER` writes.
pub(crate) const MAGIC: c_uint = 0xcafe_beef;
/// Channels that a communicator of NCCL's may have.
const CHANNELS_MAX: c_int = 64;
/// Values of `CTAPolicy`: default, efficiency, or zero multiprocessors.
pub(crate) const CTA_POLICIES: std::ops::RangeInclusive<c_int> = 0..=2;

/// The structure as of 2.32. Programs that were built with another version say how much of it they have.
#[derive(Clone, Copy)]
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
    graph_usage_mode: c_int,
    rma_contexts: c_int,
    p2p_peers_max: c_int,
    graph_stream_ordering: c_int,
    launch_order_implicit: c_int,
    rma_signals: c_int,
    rma_eager_init: c_int,
    host_cft_mode: c_int,
    nvls_host_mode: c_int,
}

const NONE: NcclConfig = NcclConfig {
    size: size_of::<NcclConfig>(),
    magic: 0,
    version: 0,
    blocking: UNDEFINED,
    cga_cluster_size: UNDEFINED,
    min_ctas: UNDEFINED,
    max_ctas: UNDEFINED,
    net_name: std::ptr::null(),
    split_share: UNDEFINED,
    traffic_class: UNDEFINED,
    comm_name: std::ptr::null(),
    collnet_enable: UNDEFINED,
    cta_policy: UNDEFINED,
    shrink_share: UNDEFINED,
    nvls_ctas: UNDEFINED,
    channels_per_net_peer: UNDEFINED,
    nvlink_centric_sched: UNDEFINED,
    graph_usage_mode: UNDEFINED,
    rma_contexts: UNDEFINED,
    p2p_peers_max: UNDEFINED,
    graph_stream_ordering: UNDEFINED,
    launch_order_implicit: UNDEFINED,
    rma_signals: UNDEFINED,
    rma_eager_init: UNDEFINED,
    host_cft_mode: UNDEFINED,
    nvls_host_mode: UNDEFINED,
};

/// Fields of a communicator's configuration that have an effect. Nothing is said where there is no configuration: what is made of another
/// communicator inherits its own then.
#[derive(Debug, Default)]
pub(crate) struct CommConfig {
    /// Whether the call that makes a communicator waits for it.
    pub(crate) is_blocking: Option<bool>,
    /// The request to the service.
    pub(crate) options: Option<JoinOptions>,
}

impl CommConfig {
    /// Reads a configuration.
    ///
    /// # Safety
    /// The pointer must be null or lead to as many bytes as its first word says; a name in it ends.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what NCCL does not accept either.
    pub(crate) unsafe fn read(config: *const c_void) -> Result<Self, Error> {
        if config.is_null() {
            return Ok(CommConfig::default());
        }
        let mut read = NONE;
        // SAFETY: the caller's contract; any bytes are numbers and pointers.
        unsafe {
            let bytes = config.cast::<usize>().read_unaligned().min(size_of::<NcclConfig>());
            std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut read).cast(), bytes);
        }
        read.check()?;
        let class = read.since(2_25_00, read.traffic_class);
        let traffic_class = match class {
            UNDEFINED => None,
            class => Some(u8::try_from(class).map_err(|_| wrong("trafficClass", class))?),
        };
        // SAFETY: the caller's contract: a text that ends.
        let name = (!read.comm_name.is_null()).then(|| unsafe { CStr::from_ptr(read.comm_name) });
        let name = name.map_or_else(String::new, |name| JoinOptions::name_of(&name.to_string_lossy()));
        let is_blocking = Some(read.since(2_14_00, read.blocking) != 0);
        Ok(CommConfig { is_blocking, options: Some(JoinOptions { name, traffic_class, ..JoinOptions::default() }) })
    }
}

fn wrong(field: &str, value: c_int) -> Error {
    Error::InvalidArgument(format!("the configuration's {field} is {value}"))
}

impl NcclConfig {
    /// A field that programs of older versions do not have.
    fn since(&self, version: c_uint, value: c_int) -> c_int {
        if self.version < version { UNDEFINED } else { value }
    }

    fn check(&self) -> Result<(), Error> {
        if self.magic != MAGIC {
            return Err(Error::InvalidArgument("the configuration was not made by NCCL_CONFIG_INITIALIZER".into()));
        }
        let switch: fn(c_int) -> bool = |value| (0..=1).contains(&value);
        let positive: fn(c_int) -> bool = |value| value > 0;
        let not_negative: fn(c_int) -> bool = |value| value >= 0;
        let (min, max) = (self.since(2_17_00, self.min_ctas), self.since(2_17_00, self.max_ctas));
        let fields = [
            ("blocking", self.since(2_14_00, self.blocking), switch),
            ("cgaClusterSize", self.since(2_17_00, self.cga_cluster_size), not_negative),
            ("minCTAs", min, positive),
            ("maxCTAs", max, positive),
            ("splitShare", self.split_share, switch),
            ("collnetEnable", self.since(2_27_00, self.collnet_enable), switch),
            ("CTAPolicy", self.since(2_27_00, self.cta_policy), |value| CTA_POLICIES.contains(&value)),
            ("shrinkShare", self.since(2_27_00, self.shrink_share), switch),
            ("nvlsCTAs", self.since(2_27_00, self.nvls_ctas), positive),
            ("nChannelsPerNetPeer", self.since(2_28_00, self.channels_per_net_peer), |value| {
                (1..=CHANNELS_MAX).contains(&value)
            }),
            ("nvlinkCentricSched", self.since(2_28_00, self.nvlink_centric_sched), switch),
            ("graphUsageMode", self.since(2_29_00, self.graph_usage_mode), |value| (0..=2).contains(&value)),
            ("numRmaCtx", self.since(2_29_00, self.rma_contexts), not_negative),
            ("maxP2pPeers", self.since(2_30_00, self.p2p_peers_max), positive),
            ("graphStreamOrdering", self.since(2_30_05, self.graph_stream_ordering), switch),
            ("numRmaSig", self.since(2_31_00, self.rma_signals), not_negative),
            ("hostCftMode", self.since(2_31_02, self.host_cft_mode), |value| (1..=3).contains(&value)),
            ("nvlsHostMode", self.since(2_31_00, self.nvls_host_mode), not_negative),
        ];
        let faulty = fields.iter().find(|(_, value, is_valid)| *value != UNDEFINED && !is_valid(*value));
        if let Some((name, value, _)) = faulty {
            return Err(wrong(name, *value));
        }
        if min > max {
            return Err(Error::InvalidArgument(format!(
                "the configuration's minCTAs, {min}, are more than its maxCTAs"
            )));
        }
        Ok(())
    }
}
