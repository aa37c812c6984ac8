//! Tenants' connections: who may connect, in whose turn, and the session that each becomes.

mod acceptor;
mod arrivals;

pub use self::acceptor::{Acceptor, Admission, SessionFactory, SessionLimits};
