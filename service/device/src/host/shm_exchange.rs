//! Shared-memory exchanges on the service's side: the memory, charged to a tenant, and times of
//! rounds.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mccs_ipc::shm_exchange::ShmExchange;
use mccs_tenants::Charge;

use crate::{Reading, Times};

/// A shared-memory exchange, with the tenant's quota for it.
#[derive(Debug)]
pub struct TenantShmExchange {
    shm_exchange: ShmExchange,
    /// Kept for the service's next program.
    descriptor: Option<OwnedFd>,
    _charge: Charge,
    /// Last times of its rounds, and when they were read.
    read: Mutex<(Times, Instant)>,
}

impl TenantShmExchange {
    /// Takes charge of a shared-memory exchange, and keeps a descriptor of it for the service's next program, if there is one.
    #[must_use]
    pub fn new(shm_exchange: ShmExchange, descriptor: Option<OwnedFd>, charge: Charge) -> Self {
        TenantShmExchange {
            shm_exchange,
            descriptor,
            _charge: charge,
            read: Mutex::new((Times::default(), Instant::now())),
        }
    }

    /// The descriptor that is kept, if one is.
    #[must_use]
    pub fn descriptor(&self) -> Option<&OwnedFd> {
        self.descriptor.as_ref()
    }

    /// How long rounds took that have ended between the last call and `now`.
    pub fn take_times(&self, now: Instant) -> Reading {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let (times, at) = &mut *read;
        let within = now.saturating_duration_since(std::mem::replace(at, now));
        times.read_shm_exchange(&self.shm_exchange, within)
    }
}

impl Drop for TenantShmExchange {
    fn drop(&mut self) {
        // Ranks may keep the descriptor; the charge goes.
        self.shm_exchange.give_back();
    }
}

impl std::ops::Deref for TenantShmExchange {
    type Target = ShmExchange;

    fn deref(&self) -> &ShmExchange {
        &self.shm_exchange
    }
}
