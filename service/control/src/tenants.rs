//! Client of run-time tenants: adds one, and takes one away until nothing is left of it. For `mccsctl` and schedulers' programs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mccs_config::service::TenantConfig;
use mccs_ipc::handshake::HandshakeError;

use super::{ControlAnswer, ControlError, ControlRequest, TenantRow, call};

/// How often it is tried again. Each look that changes nothing doubles it,
const LOOK: Duration = Duration::from_millis(2);
/// and so long is the longest.
const LOOK_MAX: Duration = Duration::from_millis(100);

/// Why a tenant is not there, or not gone.
#[derive(Debug, thiserror::Error)]
pub enum TenantError {
    /// The service has not answered.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It does not want to.
    #[error("refused: {0}")]
    Refused(String),
    /// It could not in this time.
    #[error("not within {within:?}: {why}")]
    Late { within: Duration, why: String },
    /// It answers something else.
    #[error("the service answers something else: {0}")]
    Answer(String),
}

impl TenantError {
    /// Whether no service is there at all.
    #[must_use]
    pub fn is_nobody_there(&self) -> bool {
        matches!(self, TenantError::Control(ControlError::Handshake(HandshakeError::NobodyThere { .. })))
    }
}

/// The result of taking a tenant away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removed {
    /// Nothing is left of it.
    Gone,
    /// There was none.
    Unknown,
    /// Its sessions end, and this is what it still holds.
    Leaving(Box<TenantRow>),
}

/// Has the service that listens on `path` know a tenant, within a time in which it may be busy. Returns where the tenant connects.
///
/// # Errors
/// [`TenantError`].
pub fn add(path: &Path, tenant: &TenantConfig, within: Duration) -> Result<PathBuf, TenantError> {
    let request = ControlRequest::AddTenant { tenant: Box::new(tenant.clone()) };
    match until_it_may(path, &request, within)? {
        ControlAnswer::TenantAdded { socket } => Ok(socket),
        answer => Err(TenantError::Answer(format!("{answer:?}"))),
    }
}

/// Has it forget one, and waits until nothing is left of it, or the time is over.
///
/// # Errors
/// [`TenantError`].
pub fn remove(path: &Path, name: &str, within: Duration) -> Result<Removed, TenantError> {
    let began = Instant::now();
    match until_it_may(path, &ControlRequest::RemoveTenant { name: name.to_owned() }, within)? {
        ControlAnswer::NoTenant => return Ok(Removed::Unknown),
        ControlAnswer::Done => {}
        answer => return Err(TenantError::Answer(format!("{answer:?}"))),
    }
    let mut look = LOOK;
    loop {
        // One that is added anew meanwhile is another one.
        match find(path, name)?.filter(|row| row.leaving) {
            None => return Ok(Removed::Gone),
            Some(left) if began.elapsed() >= within => return Ok(Removed::Leaving(Box::new(left))),
            Some(_) => std::thread::sleep(look),
        }
        look = (2 * look).min(LOOK_MAX);
    }
}

/// The tenant of a name.
///
/// # Errors
/// [`TenantError`].
pub fn find(path: &Path, name: &str) -> Result<Option<TenantRow>, TenantError> {
    match call(path, &ControlRequest::Tenants)? {
        ControlAnswer::Tenants(tenants) => Ok(tenants.into_iter().find(|row| row.tenant == name)),
        answer => Err(TenantError::Answer(format!("{answer:?}"))),
    }
}

/// Asks again for as long as the reason is one that passes.
fn until_it_may(path: &Path, request: &ControlRequest, within: Duration) -> Result<ControlAnswer, TenantError> {
    let (began, mut look) = (Instant::now(), LOOK);
    loop {
        match call(path, request)? {
            ControlAnswer::TryAgain(why) if began.elapsed() >= within => return Err(TenantError::Late { within, why }),
            ControlAnswer::TryAgain(_) => std::thread::sleep(look),
            ControlAnswer::Refused(reason) => return Err(TenantError::Refused(reason)),
            answer => return Ok(answer),
        }
        look = (2 * look).min(LOOK_MAX);
    }
}
