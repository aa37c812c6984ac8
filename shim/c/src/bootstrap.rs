//! C API: bootstrap (`mccsBootstrapAllGather`, barrier) and log handler.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use mccs::{Bootstrap, Error, LogLevel, UniqueId};

use super::handle::{Kind, handle_of, object, take};
use super::{CClient, SUCCESS, Status, guard, put};

/// Behind `mccsBootstrap_t`.
pub struct CBootstrap(Mutex<Bootstrap>);

impl Kind for CBootstrap {
    const WORD: &'static str = "bootstrap";
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBootstrapInit(
    bootstrap: *mut *mut CBootstrap,
    client: *mut CClient,
    nranks: i32,
    id: *const UniqueId,
    own_rank: i32,
    root_address: *const c_char,
) -> Status {
    guard(|| {
        if bootstrap.is_null() {
            return Err(Error::argument("bootstrap is null"));
        }
        // SAFETY: the caller's contract.
        let builder = unsafe { super::communicators::builder(client, own_rank, nranks, id, root_address) }?;
        let made = handle_of(CBootstrap(Mutex::new(builder.join_bootstrap()?)))?;
        // SAFETY: the caller's contract.
        unsafe { put(bootstrap, made, "bootstrap") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBootstrapAllGather(
    bootstrap: *mut CBootstrap,
    own: *const c_void,
    all: *mut c_void,
    bytes: usize,
) -> Status {
    guard(|| {
        let bootstrap = object(bootstrap, "bootstrap")?;
        let mut bootstrap = bootstrap.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > 0 && (own.is_null() || all.is_null()) {
            return Err(Error::argument("own or all is null"));
        }
        // SAFETY: the caller's contract: `own` leads to so many bytes.
        let sent = if bytes == 0 { &[] } else { unsafe { std::slice::from_raw_parts(own.cast::<u8>(), bytes) } };
        let gathered = bootstrap.all_gather(sent)?;
        if let Some(other) = gathered.iter().position(|of| of.len() != bytes) {
            let found = gathered[other].len();
            return Err(Error::argument(format!("rank {other} has {found} bytes to tell, this rank {bytes}")));
        }
        for (index, of) in gathered.iter().enumerate() {
            // SAFETY: the caller's contract: `all` has room for as many of each rank.
            unsafe { std::ptr::copy_nonoverlapping(of.as_ptr(), all.cast::<u8>().add(index * bytes), bytes) };
        }
        Ok(SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBootstrapBarrier(bootstrap: *mut CBootstrap) -> Status {
    guard(|| {
        let bootstrap = object(bootstrap, "bootstrap")?;
        let mut bootstrap = bootstrap.0.lock().unwrap_or_else(PoisonError::into_inner);
        bootstrap.barrier().map(|()| SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBootstrapDestroy(bootstrap: *mut CBootstrap) -> Status {
    guard(|| take(bootstrap, "bootstrap").map(|_| SUCCESS))
}

/// A program's function, and what it is called with.
struct Handler {
    function: unsafe extern "C" fn(i32, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the program says in `mccs.h`'s terms that its function may be called from any thread with this pointer.
unsafe impl Send for Handler {}
// SAFETY: as above.
unsafe impl Sync for Handler {}

impl Handler {
    fn tell(&self, level: LogLevel, message: &str) {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the program's function, which takes these; the text lives until it returns.
        unsafe { (self.function)(level as i32, message.as_ptr(), self.user) };
    }
}

/// See `mccs.h`.
///
/// # Safety
/// The function may be called from any thread until this is called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsSetLogHandler(
    function: Option<unsafe extern "C" fn(i32, *const c_char, *mut c_void)>,
    user: *mut c_void,
) -> Status {
    guard(|| {
        match function {
            None => mccs::clear_log_handler(),
            Some(function) => {
                let handler = Handler { function, user };
                mccs::set_log_handler(move |level, message| handler.tell(level, message));
            }
        }
        Ok(SUCCESS)
    })
}
