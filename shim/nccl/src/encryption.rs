//! `ncclSetEncryption`: NCCL's request to encrypt its own sockets, of which processes have none
//! here. Services have the sockets, and encrypt the links between hosts under the operator's
//! certificates (`docs/EXCHANGE.md`).

use std::ffi::{c_char, c_int, c_uint};

use mccs::Error;

use super::config::MAGIC;
use super::{Status, guard, refused};

/// `ncclEncryptionConfig_t`.
#[repr(C)]
pub struct EncryptionConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    mode: c_int,
    key: *const c_char,
}

/// Accepts the mode without encryption, which asks for nothing, and refuses a key of the program's own; see `nccl.h`.
///
/// # Safety
/// The pointer must be null, or lead to as many bytes as its first word says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSetEncryption(config: *const EncryptionConfig) -> Status {
    const NONE: c_int = 0;
    const PRE_SHARED_KEY: c_int = 1;
    guard(|| {
        let wrong = |what: &str| Err(Error::InvalidArgument(format!("ncclSetEncryption: {what}")));
        // SAFETY: the caller's contract; `size` comes first.
        if config.is_null() || unsafe { (*config).size } < size_of::<EncryptionConfig>() {
            return wrong("the configuration is null or too short");
        }
        // SAFETY: it is as long as that, says its first word.
        let (magic, mode) = unsafe { ((*config).magic, (*config).mode) };
        match (magic, mode) {
            (MAGIC, NONE) => Ok(()),
            (MAGIC, PRE_SHARED_KEY) => Err(refused(
                "ncclSetEncryption",
                "services encrypt control messages between hosts, with the operator's keys ([exchange] certificate, key), and no payload",
            )),
            (MAGIC, other) => wrong(&format!("mode {other} does not exist")),
            _ => wrong("the configuration was not made by NCCL_ENCRYPTION_CONFIG_INITIALIZER"),
        }
    })
}
