//! Cooperative runtimes: threads that poll engines and park when all are idle.
//!
//! ```text
//!            adopt                    poll idle for the spin time
//! engine ------------> awake -----------------------------------------> asleep
//!                        ^                                                 |
//!                        +-------- waker, descriptor, or wake_at ----------+
//! ```
//!
//! Engines can be placed on any runtime, moved between runtimes while they work ([`Runtimes::move_engine`]), and ended
//! by returning [`Progress::Done`]. Those of one tenant share a bounded part of each round, whatever their number. A runtime whose engines are all asleep waits in `epoll_wait`: an idle service uses
//! no CPU.
//!
//! A runtime's thread may be bound to CPUs ([`Runtimes::bind`]); engines that are moved there run there.
//!
//! Deliberately absent: work stealing (the operator places engines), async/await (an engine's state is visible).

mod account;
mod cpu_affinity;
mod engine;
mod executor;
mod mailbox;
mod run_queue;
mod runtimes;
mod tenant_queues;
mod time_slice;
mod turn_channel;
mod turn_queue;
mod turns;

pub use account::Account;
pub use cpu_affinity::{NoCpu, NumaNodes};
pub use engine::{AwakeTenants, Context, Engine, EngineId, Progress};
pub use mailbox::{Mailbox, Sender, Waker, WakerSlot};
pub use runtimes::{EngineInfo, RuntimeError, RuntimeInfo, RuntimeOptions, Runtimes, work_by_tenant};
pub use tenant_queues::{TenantQueueOpener, TenantQueueReceiver, TenantQueueSender, TenantQueues};
pub use turn_channel::{TurnReceiver, TurnSender, turn_channel};
pub use turn_queue::TurnQueue;
pub use turns::{Share, Turns, work_ns};
