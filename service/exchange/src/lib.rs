//! What the services of a cluster tell each other: set-up of communicators, failures, agreement on changes.
//!
//! ```text
//! proxy engine --Request--> engines/exchange --> protocol (no I/O, no clock) --frames--> link (TCP, TLS) --> other hosts
//!              <--Event----                  <--                            <--
//! ```
//!
//! [`protocol`] decides everything, and can be simulated under a seed; [`link`] moves frames over mutually authenticated
//! connections. An engine of the service joins the two on a runtime. [`keys`] makes certificates to try it with.
//!
//! Imports `mccs-model` and `mccs-net`. Its most important types: [`protocol::Exchange`], [`protocol::Message`] and [`link::Links`].

pub mod keys;
pub mod limits;
pub mod link;
pub mod protocol;
pub mod tls;
