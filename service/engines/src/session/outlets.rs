//! Outputs of a session: its tenant, the proxy engines, and the mailbox where those reply.

mod answers;
mod outbox;
mod proxies;
mod replies;
mod socket;

use std::sync::Arc;

use mccs_tenants::session::Session;

pub(super) use self::answers::Answers;
pub(super) use self::outbox::ProxyOutbox;
pub(super) use self::proxies::Place;
pub use self::proxies::{GpuProxy, Proxies, ProxyQueues};
pub(super) use self::replies::Replies;
pub(super) use self::socket::TenantSocket;

/// See the module's documentation.
pub(super) struct Outlets {
    pub(super) session: Arc<Session>,
    pub(super) answers: Answers,
    /// The proxy engines, as the service has them.
    pub(super) proxies: Arc<Proxies>,
    pub(super) outbox: ProxyOutbox,
    pub(super) replies: Replies,
}
