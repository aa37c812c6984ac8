//! Mail to and from a proxy engine: messages, their fair turns, and outputs to other engines.

pub(super) mod exchange_mail;
pub(super) mod message;
pub(super) mod other_proxy;
pub(super) mod outlets;
pub(super) mod reply_to;
pub(super) mod transports;
pub(super) mod turns;
