//! Accepting side of the TCP transport, until a connection is part of a flow.
//! [`Acceptor`](acceptor::Acceptor) owns all of it.

pub(in crate::tcp) mod acceptor;
pub(in crate::tcp) mod listener;
pub(in crate::tcp) mod port;
