//! Tenants: what each may have, the memory that the service maps for it, and its sessions.
//!
//! Imports plain types, the runtime's shares and wakers, and a tenant's counters. It knows no engine and no device.
//!
//! The most important: [`Tenant`] and [`Charge`], a part of a quota that dropping gives back; [`regions::Region`], memory of a tenant that
//! operations keep mapped; [`session::Session`], the words and failures of one process.

mod all_sessions;
pub mod default_quotas;
mod fd_closer;
mod host_memory;
pub mod memory_bound;
mod numbers;
pub mod process_limits;
mod prompt_close;
mod quota;
pub mod regions;
pub mod session;
mod tenant;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod token_bucket;

pub use all_sessions::{AllSessions, SessionCharge, SessionRefused, TooManySessions};
pub use fd_closer::FdCloser;
pub use host_memory::{HostMemory, NoRoom, Pages, Reservation};
pub use prompt_close::close_promptly;
pub use quota::{OverQuota, Quota, Resource, SessionResource};
pub use tenant::{Caps, Charge, Tenant, Terms};
pub use token_bucket::TokenBucket;
