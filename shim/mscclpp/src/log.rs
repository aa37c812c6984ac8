//! `mscclppSetLogHandler`: the program's function that is told why calls fail.

use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::sync::{PoisonError, RwLock};

use super::{Status, guard};

type Handler = unsafe extern "C" fn(*const c_char);

static HANDLER: RwLock<Handler> = RwLock::new(mscclppDefaultLogHandler);

/// Tells the handler why a call has failed.
pub(crate) fn tell(message: &str) {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let handler = *HANDLER.read().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the program's function, which takes a text; that lives until it returns.
    unsafe { handler(message.as_ptr()) };
}

/// See `mscclpp.h`.
///
/// # Safety
/// The text must be null or end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDefaultLogHandler(msg: *const c_char) {
    if msg.is_null() {
        return;
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(msg) };
    // A program may have closed its standard error.
    let _ = writeln!(std::io::stderr(), "mscclpp: {}", text.to_string_lossy());
}

/// See `mscclpp.h`.
///
/// # Safety
/// The function takes a text, and may be called from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppSetLogHandler(handler: Option<Handler>) -> Status {
    guard("mscclppSetLogHandler", || {
        *HANDLER.write().unwrap_or_else(PoisonError::into_inner) = handler.unwrap_or(mscclppDefaultLogHandler);
        Ok(())
    })
}
