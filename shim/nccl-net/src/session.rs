//! The process' session at the host's service, which its connections share.

use std::sync::Once;

use mccs::bindings::ProcessClient;
use mccs::{Client, Error};

use crate::logger;

/// Variables of NCCL's own networks, and the operator's key that decides the same here.
const OVERRULED: [(&str, &str); 6] = [
    ("NCCL_IB_HCA", "[rdma] devices"),
    ("NCCL_IB_GID_INDEX", "[rdma] gid_index"),
    ("NCCL_IB_TC", "[rdma] traffic_class"),
    ("NCCL_IB_QPS_PER_CONNECTION", "[rdma] qps"),
    ("NCCL_NSOCKS_PERTHREAD", "[tcp] connections"),
    ("NCCL_SOCKET_NTHREADS", "[runtime] transport_engines"),
];

/// Says which variables of the process have no effect here, once.
pub(crate) fn tell_overruled() {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        for (variable, key) in OVERRULED.iter().filter(|(variable, _)| std::env::var_os(variable).is_some()) {
            logger::info(&format!("{variable} has no effect: {key} of the operator's service.toml decides"));
        }
    });
}

/// This process' session; see [`ProcessClient`].
pub(crate) fn client() -> Result<Client, Error> {
    static CLIENT: ProcessClient = ProcessClient::new();
    CLIENT.get(|| ())
}
