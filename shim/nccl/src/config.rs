//! `ncclConfig_t`: read and checked as NCCL does. Of what it says only `blocking` has an effect: the rest are hints for NCCL's own kernels
//! and networks, in whose place the operator's strategy stands (`docs/CUDA.md`).

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::size_of;

use mccs::Error;

/// `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: c_int = c_int::MIN;
/// What `NCCL_CONFIG_INITIALIZER` writes.
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
};

/// Whether the call that makes a communicator waits for it; nothing where there is no configuration.
///
/// # Safety
/// The pointer must be null or lead to as many bytes as its first word says.
pub(crate) unsafe fn is_blocking(config: *const c_void) -> Result<Option<bool>, Error> {
    if config.is_null() {
        return Ok(None);
    }
    let mut read = NONE;
    // SAFETY: the caller's contract; any bytes are numbers and pointers, which nobody follows.
    unsafe {
        let bytes = config.cast::<usize>().read_unaligned().min(size_of::<NcclConfig>());
        std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut read).cast(), bytes);
    }
    if read.magic != MAGIC {
        return Err(Error::InvalidArgument("the configuration was not made by NCCL_CONFIG_INITIALIZER".into()));
    }
    let since = |version: c_uint, value: c_int| if read.version < version { UNDEFINED } else { value };
    let switch: fn(c_int) -> bool = |value| (0..=1).contains(&value);
    let positive: fn(c_int) -> bool = |value| value > 0;
    let blocking = since(2_14_00, read.blocking);
    let (min, max) = (since(2_17_00, read.min_ctas), since(2_17_00, read.max_ctas));
    let fields = [
        ("blocking", blocking, switch),
        ("cgaClusterSize", since(2_17_00, read.cga_cluster_size), |value| value >= 0),
        ("minCTAs", min, positive),
        ("maxCTAs", max, positive),
        ("splitShare", read.split_share, switch),
        ("collnetEnable", since(2_27_00, read.collnet_enable), switch),
        ("CTAPolicy", since(2_27_00, read.cta_policy), |value| CTA_POLICIES.contains(&value)),
        ("shrinkShare", since(2_27_00, read.shrink_share), switch),
        ("nvlsCTAs", since(2_27_00, read.nvls_ctas), positive),
        ("nChannelsPerNetPeer", since(2_28_00, read.channels_per_net_peer), |value| {
            (1..=CHANNELS_MAX).contains(&value)
        }),
        ("nvlinkCentricSched", since(2_28_00, read.nvlink_centric_sched), switch),
    ];
    let wrong = fields.iter().find(|(_, value, is_valid)| *value != UNDEFINED && !is_valid(*value));
    if let Some((name, value, _)) = wrong {
        return Err(Error::InvalidArgument(format!("the configuration's {name} is {value}")));
    }
    if min > max {
        return Err(Error::InvalidArgument(format!("the configuration's minCTAs, {min}, are more than its maxCTAs")));
    }
    Ok(Some(blocking != 0))
}
