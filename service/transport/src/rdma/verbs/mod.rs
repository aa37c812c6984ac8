//! Verbs, in three levels: what the library is (`sys`), its calls with results (`result`), types
//! that own (`owning`).
//!
//! Between the last two lies the seam [`Driver`]: the production code above it also runs on a fake driver, which lives in one
//! process, moves bytes as queue pairs do, and has bad luck as a test says.
//!
//! Entry points are looked up with their versions (`sys.rs`). Deliberately absent:
//!
//! | of libibverbs | why |
//! | --- | --- |
//! | `ibv_fork_init` | the service starts no process, and the call makes every registration slower |
//! | `ibv_query_qp` | the transport knows what it made; what breaks a queue pair is in its completions |
//! | `ibv_event_type_str` | names are those of the specification: `event_text` |

mod driver;
mod error;
pub mod fake;
#[cfg(test)]
mod layout;
mod owning;
mod port_speed;
mod result;
mod structures;
mod sys;

pub use self::driver::{
    AsyncEvent, Completion, DeviceLimits, DmaBuffer, Driver, Gid, GidKind, LinkLayer, PortAttributes, QpPath, QpShape,
    QpStep, QpTimers, Raw, Read, WcStatus, Write, event_text,
};
pub use self::error::{GpuRefusal, Unavailable, VerbsError};
pub use self::owning::{CompletionChannel, CompletionQueue, Context, MemoryRegion, ProtectionDomain, QueuePair};
pub use self::result::Verbs;
pub use crate::completion_status::{FLUSHED, RESPONSE_TIMEOUT, is_of_connection, is_silence};
