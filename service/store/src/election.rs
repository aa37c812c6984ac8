//! Elects one holder of an office through a store, by a lease.
//!
//! ```text
//! no lease --grant--> lease --key absent: put it with the lease--> in office --lease has ended--> no lease
//!                       |                                            ^   |
//!                       +--key is another's: revoke                  +---+ keep the lease alive, see that the key is there
//! ```
//!
//! The *term* of an office is the revision at which its key came to be, so each term is greater than all before it, and has one
//! holder. A holder acts only until [`Office::until`], which its own clock says: the lease ends later, also if the store's clock
//! runs faster by a tenth. So no two act at once. Whoever is ordered by two (a holder that stood still between looking at its clock
//! and sending, say) obeys the greater term.
//!
//! A store that does not answer ends nobody's office but by time, and makes nobody a holder. A holder whose time is over and whose
//! lease turns out to have lived goes on with its term.
//!
//! Deliberately absent: threads and waiting. Whoever campaigns calls [`Campaign::step`] a few times within a lease.

use std::time::{Duration, Instant};

use crate::{Entry, Guard, Keys, LeaseId, Outcome, Revision, Store, StoreError, Transaction, Write};

/// Clocks of store and holder run alike but for this part of the time, at most.
const CLOCK_MARGIN: u32 = 10;

/// An office that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Office {
    /// Greater than all before.
    pub term: Revision,
    /// Until when its holder may act, by its own clock.
    pub until: Instant,
}

/// Holder of the office.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// The caller.
    Own(Office),
    /// Somebody else, in that term.
    Other {
        /// As it has called itself.
        name: String,
        /// Its term.
        term: Revision,
    },
    /// Nobody now.
    Nobody,
}

impl Holder {
    /// As the entry of the office says it, of another one than who asks.
    #[must_use]
    pub fn other(entry: &Entry) -> Self {
        Holder::Other { name: String::from_utf8_lossy(&entry.value).into_owned(), term: entry.created }
    }
}

/// See the module's documentation.
pub struct Campaign {
    key: String,
    name: String,
    ttl: Duration,
    lease: Option<Leased>,
}

#[derive(Clone, Copy)]
struct Leased {
    id: LeaseId,
    /// It has surely not ended before, by this clock.
    until: Instant,
}

impl Campaign {
    /// For the office of that key, as `name`, with a lease of whole seconds.
    #[must_use]
    pub fn new(key: &str, name: &str, ttl: Duration) -> Self {
        Campaign { key: key.to_owned(), name: name.to_owned(), ttl, lease: None }
    }

    /// Looks who holds the office, and takes it if nobody does. `clock` is asked before each call of the store.
    ///
    /// # Errors
    /// [`StoreError`]: nothing is known anew. An office that is held is held until its time is over.
    pub fn step(&mut self, store: &mut dyn Store, clock: &dyn Fn() -> Instant) -> Result<Holder, StoreError> {
        if let Some(lease) = self.lease {
            let asked = clock();
            self.lease = store.keep_alive(lease.id)?.map(|ttl| Leased { id: lease.id, until: asked + surely(ttl) });
        }
        let snapshot = store.read(Keys::Only(&self.key))?;
        match (snapshot.get(&self.key), self.lease) {
            (Some(entry), Some(lease)) if entry.lease == Some(lease.id) => {
                Ok(Holder::Own(Office { term: entry.created, until: lease.until }))
            }
            (Some(entry), lease) => {
                let holder = Holder::other(entry);
                if let Some(lease) = lease {
                    // It would end by itself.
                    self.lease = None;
                    let _ = store.revoke(lease.id);
                }
                Ok(holder)
            }
            (None, lease) => self.take(store, lease, clock),
        }
    }

    fn take(
        &mut self,
        store: &mut dyn Store,
        lease: Option<Leased>,
        clock: &dyn Fn() -> Instant,
    ) -> Result<Holder, StoreError> {
        let lease = match lease {
            Some(lease) => lease,
            None => {
                let asked = clock();
                Leased { id: store.grant(self.ttl)?, until: asked + surely(self.ttl) }
            }
        };
        // Also if it is not known what becomes of the transaction: the next look tells.
        self.lease = Some(lease);
        let put = Write::Put { key: self.key.clone(), value: self.name.clone().into_bytes(), lease: Some(lease.id) };
        let claim = Transaction { guards: vec![Guard::Absent(self.key.clone())], writes: vec![put] };
        match store.commit(&claim)? {
            Outcome::Done(term) => Ok(Holder::Own(Office { term, until: lease.until })),
            Outcome::Conflict => Ok(Holder::Nobody),
        }
    }

    /// Gives the office up, so that another need not wait for the lease's end.
    ///
    /// # Errors
    /// [`StoreError`]: the lease ends by itself.
    pub fn resign(&mut self, store: &mut dyn Store) -> Result<(), StoreError> {
        self.lease.take().map_or(Ok(()), |lease| store.revoke(lease.id))
    }

    /// How often [`Campaign::step`] is to be called at least.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.ttl / 5
    }
}

/// Rest of a lease's time if the store's clock runs faster.
fn surely(ttl: Duration) -> Duration {
    ttl - ttl / CLOCK_MARGIN
}

#[cfg(test)]
mod tests;
