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
//! by returning [`Progress::Done`]. A runtime whose engines are all asleep waits in `epoll_wait`: an idle service uses
//! no CPU.
//!
//! Deliberately absent: work stealing (the operator places engines), async/await (an engine's state is visible).

mod engine;
mod executor;
mod mailbox;
mod runtimes;

pub use engine::{Context, Engine, Progress};
pub use mailbox::{Mailbox, Sender, Waker, WakerSlot};
pub use runtimes::{EngineId, EngineInfo, RuntimeError, RuntimeInfo, RuntimeOptions, Runtimes};
