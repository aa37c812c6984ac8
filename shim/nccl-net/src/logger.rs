//! NCCL's logger, which `NCCL_DEBUG` turns on: why calls fail, and which service the process uses.

use std::ffi::{CString, c_char, c_int, c_ulong};
use std::sync::Mutex;

use crate::locked;

/// `ncclDebugLogger_t`: a level, subsystems, file, line, and a format with its arguments.
pub(crate) type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// Levels and subsystems of NCCL's.
const WARN: c_int = 2;
const INFO: c_int = 3;
const INIT_AND_NET: c_ulong = 1 | 16;

static LOGGER: Mutex<Option<Logger>> = Mutex::new(None);

/// The logger that NCCL has given last.
pub(crate) fn set(logger: Option<Logger>) {
    *locked(&LOGGER) = logger;
}

pub(crate) fn warn(message: &str) {
    log(WARN, message);
}

pub(crate) fn info(message: &str) {
    log(INFO, message);
}

fn log(level: c_int, message: &str) {
    let Some(logger) = *locked(&LOGGER) else { return };
    let message = CString::new(format!("NET/mccs: {message}").replace('\0', " ")).unwrap_or_default();
    // SAFETY: NCCL's function, which lives as long as NCCL does; texts end with a zero and live until it returns.
    unsafe { logger(level, INIT_AND_NET, c"mccs".as_ptr(), 0, c"%s".as_ptr(), message.as_ptr()) };
}
