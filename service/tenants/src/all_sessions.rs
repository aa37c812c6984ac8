//! Bound of the sessions of all tenants together, which share the descriptors of the service's process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{Resource as KernelLimit, getrlimit};

use crate::quota::{OverQuota, Resource};
use crate::tenant::{Charge, Tenant};

/// Descriptors of a session: its socket, its process, its segment, its doorbell.
pub const DESCRIPTORS_OF_SESSION: u64 = 4;
/// Sessions have a part of all descriptors by default: a half of the others is of GPUs' memory and of what is kept, the rest of flows,
/// communicators and the service itself.
const PART_BY_DEFAULT: u64 = 4;
/// The most that the operator may give them.
const PART_AT_MOST: u64 = 2;

/// Why sessions cannot have so many.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "limits.max_sessions = {asked}: each session takes {DESCRIPTORS_OF_SESSION} descriptors, and of the {descriptors} of the service \
     (LimitNOFILE) sessions get half; it may be {most}"
)]
pub struct TooManySessions {
    asked: u64,
    descriptors: u64,
    most: u64,
}

/// Why a process gets no session.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SessionRefused {
    /// Its tenant has as many as it may.
    #[error(transparent)]
    OfTenant(#[from] OverQuota),
    /// All tenants together have.
    #[error(
        "the service has {most} sessions, which is all that its tenants may have together; raise limits.max_sessions in service.toml, or \
         RLIMIT_NOFILE of the service (LimitNOFILE= in its unit), from which it follows by default"
    )]
    OfAll {
        /// How many they may have.
        most: u64,
    },
}

/// See the module's documentation.
#[derive(Debug)]
pub struct AllSessions {
    held: AtomicU64,
    most: u64,
}

/// A session's part of its tenant's quota and of the bound of all, held until dropped.
#[derive(Debug)]
pub struct SessionCharge {
    _of_tenant: Charge,
    of_all: Arc<AllSessions>,
}

impl AllSessions {
    /// As many as the operator says, or else as many as the descriptors of this process allow.
    ///
    /// # Errors
    /// The operator says more than these allow.
    pub fn of_process(asked: Option<u32>) -> Result<Arc<Self>, TooManySessions> {
        let (descriptors, _) = getrlimit(KernelLimit::RLIMIT_NOFILE).unwrap_or((0, 0));
        Ok(Arc::new(AllSessions { held: AtomicU64::new(0), most: most(descriptors, asked)? }))
    }

    /// So many, whatever descriptors there are.
    #[must_use]
    pub fn at_most(most: u64) -> Arc<Self> {
        Arc::new(AllSessions { held: AtomicU64::new(0), most })
    }

    /// How many there may be.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Takes one for a tenant.
    ///
    /// # Errors
    /// There are too many, of the tenant or of all; nothing is taken.
    pub fn charge(self: &Arc<Self>, tenant: &Arc<Tenant>) -> Result<SessionCharge, SessionRefused> {
        let of_tenant = tenant.charge(Resource::Sessions, 1)?;
        let add = |held: u64| (held < self.most).then_some(held + 1);
        let taken = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        taken.map_err(|_| SessionRefused::OfAll { most: self.most })?;
        Ok(SessionCharge { _of_tenant: of_tenant, of_all: Arc::clone(self) })
    }
}

impl Drop for SessionCharge {
    fn drop(&mut self) {
        self.of_all.held.fetch_sub(1, Ordering::Relaxed);
    }
}

fn most(descriptors: u64, asked: Option<u32>) -> Result<u64, TooManySessions> {
    let of_part = |part: u64| (descriptors / part / DESCRIPTORS_OF_SESSION).max(1);
    let (asked, most) = (asked.map(u64::from), of_part(PART_AT_MOST));
    match asked {
        Some(asked) if asked > most => Err(TooManySessions { asked, descriptors, most }),
        Some(asked) => Ok(asked),
        None => Ok(of_part(PART_BY_DEFAULT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quota;

    #[test]
    fn the_sum_of_sessions_never_takes_more_than_its_part_of_the_descriptors() {
        for descriptors in [0, 3, 64, 1024, 20_000, 1 << 20] {
            let by_default = most(descriptors, None).expect("a number");
            assert!(by_default == 1 || by_default * DESCRIPTORS_OF_SESSION <= descriptors / PART_BY_DEFAULT);
        }
        assert_eq!((most(1024, None), most(1024, Some(7)), most(1024, Some(128))), (Ok(64), Ok(7), Ok(128)));
        let refused = most(1024, Some(129)).expect_err("more than a half").to_string();
        assert!(refused.contains("limits.max_sessions = 129") && refused.contains("LimitNOFILE"), "{refused}");
        assert!(refused.ends_with("it may be 128"), "{refused}");
    }

    #[test]
    fn tenants_within_their_quotas_have_no_more_sessions_than_all_may_have_and_hear_which_bound_it_is() {
        let quota = Quota { sessions: 3, ..Quota::least() };
        let (all, tenants) = (AllSessions::at_most(4), ["a", "b"].map(|name| Tenant::new(name.into(), quota)));
        let charge = |tenant: usize| all.charge(&tenants[tenant]);
        let mut of_a: Vec<_> = (0..3).map(|_| charge(0).expect("within both")).collect();
        let own = charge(0).expect_err("the fourth of its own").to_string();
        assert!(own.contains("tenant a") && own.contains("max_sessions"), "{own}");
        let of_b = charge(1).expect("the fourth of all");
        let refused = charge(1).expect_err("the fifth of all").to_string();
        assert!(refused.contains("limits.max_sessions") && refused.contains("LimitNOFILE"), "{refused}");
        assert_eq!(tenants[1].used(Resource::Sessions), 1, "nothing is taken by what is refused");
        of_a.pop();
        let again = charge(1).expect("one has ended");
        drop((of_a, of_b, again));
        assert_eq!((0..3).filter(|_| charge(1).is_ok()).count(), 3, "all has come back");
        assert_eq!(all.held.load(Ordering::Relaxed), 0);
    }
}
