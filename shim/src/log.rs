//! Log handler of the library: its messages for programs that ask; it prints nothing itself.

use std::sync::{PoisonError, RwLock};

/// How important a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(i32)]
pub enum LogLevel {
    /// Something is of no use any more: a communicator, or the session.
    Error = 1,
    /// A call was refused.
    Warning = 2,
    /// A session or a communicator begins or ends.
    Info = 3,
}

type Handler = dyn Fn(LogLevel, &str) + Send + Sync;

static HANDLER: RwLock<Option<Box<Handler>>> = RwLock::new(None);

/// Has the library tell a program's function what happens, from any of the program's threads, within its calls. The function may
/// call nothing of this library's. It replaces the one before.
pub fn set_log_handler(handler: impl Fn(LogLevel, &str) + Send + Sync + 'static) {
    *HANDLER.write().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(handler));
}

/// Has the library tell nobody. Returns once no thread is in the handler.
pub fn clear_log_handler() {
    *HANDLER.write().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Tells the handler, if there is one. The message is made only then.
pub(crate) fn log(level: LogLevel, message: impl FnOnce() -> String) {
    if let Some(handler) = &*HANDLER.read().unwrap_or_else(PoisonError::into_inner) {
        handler(level, &message());
    }
}
