//! Tenants' connections: who may connect, in whose turn, and the session that each becomes.

mod acceptor;
mod admission;
mod arrivals;
mod factory;

pub use self::acceptor::Acceptor;
pub use self::admission::Admission;
pub use self::factory::{SessionFactory, SessionLimits};
pub(super) use self::factory::{SessionParts, replies_of};
