//! Exchange between the services of a cluster: bootstrap of communicators, failures, agreement on
//! changes.
//!
//! ```text
//! proxy engine --Request--> engines/exchange --> protocol (no I/O, no clock) --frames--> link (TCP, TLS) --> other hosts
//!              <--Event----                  <--                            <--
//! ```
//!
//! [`protocol`] decides everything, and can be simulated under a seed; [`link`] moves frames over mutually authenticated
//! connections. An engine of the service joins the two on a runtime. [`keys`] makes certificates to try it with.
//!
//! Imports `mccs-ipc`, `mccs-model` and `mccs-net`. Its most important types: [`protocol::Exchange`], [`protocol::Message`] and [`link::Links`].

use std::sync::LazyLock;

pub mod keys;
pub mod limits;
pub mod link;
pub mod protocol;
pub mod tls;

/// Version of the service's programs: the release, and the protocols by which libraries and other hosts fit to it.
#[must_use]
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let (release, session, exchange) = (env!("CARGO_PKG_VERSION"), mccs_ipc::protocol::VERSION, protocol::VERSION);
        format!("{release} (session protocol {session}, exchange protocol {exchange})")
    });
    &VERSION
}
