//! A side of a connection: its requests, and the ring that moves them. Sending and receiving sides
//! differ in how they copy.

use std::sync::Mutex;

use mccs::Error;

use crate::link::Link;
use crate::transfers::{Transfer, Transfers};
use crate::{invalid_argument, locked};

/// A side's part of the ring: what it copies.
pub(crate) trait Copies: Default {
    /// Copies what can be. Returns whether anything was.
    ///
    /// # Errors
    /// Why the connection has failed.
    fn copy(&mut self, link: &mut Link, transfers: &mut Transfers) -> Result<bool, Error>;

    /// Whether the peer is still to take what is in the ring.
    fn is_busy(&self) -> bool;
}

/// See the module's documentation.
pub(crate) struct Side<C>(Mutex<State<C>>);

struct State<C> {
    /// None once it has been closed.
    link: Option<Link>,
    ring: C,
    transfers: Transfers,
    failure: Option<Error>,
}

impl<C: Copies> Side<C> {
    pub(crate) fn new(link: Link) -> Self {
        let (ring, transfers) = (C::default(), Transfers::new());
        Side(Mutex::new(State { link: Some(link), ring, transfers, failure: None }))
    }

    /// Begins a send, or a receive. Returns its slot; none while all are taken.
    ///
    /// # Safety
    /// The memory is the transfer's until that has been found done.
    ///
    /// # Errors
    /// Why the connection has failed.
    pub(crate) unsafe fn begin(&self, transfer: Transfer) -> Result<Option<usize>, Error> {
        let mut state = locked(&self.0);
        let slot = state.transfers.begin(transfer);
        state.go_on()?;
        Ok(slot)
    }

    /// Bytes of a transfer that is done; none if it is not yet.
    ///
    /// # Errors
    /// Why the connection has failed, or that it is no request.
    pub(crate) fn test(&self, slot: usize) -> Result<Option<u64>, Error> {
        let mut state = locked(&self.0);
        if let Some(bytes) = state.transfers.take_ended(slot) {
            return Ok(Some(bytes));
        }
        if !state.transfers.is_begun(slot) {
            return Err(invalid_argument("the request has been found done before"));
        }
        // Ended operations count, also before a failure.
        let gone_on = state.go_on();
        let ended = state.transfers.take_ended(slot);
        if ended.is_none() { gone_on.map(|()| None) } else { Ok(ended) }
    }

    /// Ends the connection behind what is in the ring. Transfers that are not done are given up.
    pub(crate) fn close(&self) {
        let mut state = locked(&self.0);
        let is_busy = state.ring.is_busy();
        if let Some(link) = state.link.take() {
            link.close(is_busy);
        }
    }
}

impl<C: Copies> State<C> {
    fn go_on(&mut self) -> Result<(), Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.copy().inspect_err(|error| self.failure = Some(error.clone()))
    }

    fn copy(&mut self) -> Result<(), Error> {
        let link = self.link.as_mut().ok_or_else(|| invalid_argument("the connection has been closed"))?;
        if self.ring.copy(link, &mut self.transfers)? { link.has_moved() } else { link.waits() }
    }
}
