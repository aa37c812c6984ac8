//! What the services of a cluster tell each other: set-up of communicators, failures, agreement on changes.
//!
//! ```text
//! proxy engine --Request--> engines/exchange --> protocol (no I/O, no clock) --frames--> link (TCP, TLS) --> other hosts
//!              <--Event----                  <--                            <--
//! ```
//!
//! [`protocol`] decides everything, and can be simulated under a seed; [`link`] moves frames over mutually authenticated
//! connections; [`crate::engines::exchange`] joins the two on a runtime. [`keys`] makes certificates to try it with.

pub mod keys;
pub mod limits;
pub mod link;
pub mod protocol;
pub mod tls;
