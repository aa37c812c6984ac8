//! Surfacing of other ranks' failures: in calls at once, or by the asynchronous error first, as in
//! NCCL.
//!
//! NCCL's calls succeed after a peer has gone, and programs learn of it from `ncclCommGetAsyncError`. A communicator that surfaces
//! failures in this way passes over a call of which nothing can come. Its stream goes on, so a program that asks for no
//! asynchronous error would take old data for results. Calls therefore fail once the program was told, and in any case
//! [`PASSED_OVER_FOR`] after the first call that was passed over. A captured call fails at once: a graph would lack it for good
//! (`docs/decisions/048-where-failures-surface.md`).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mccs_cuda::RawStream;
use mccs_ipc::types::ErrorClass;

use crate::Error;

/// Watchdogs of frameworks ask several times meanwhile.
const PASSED_OVER_FOR: Duration = Duration::from_secs(2);

/// Knowledge of a communicator's program of the failure of another rank.
#[derive(Default)]
pub(super) struct Surfacing {
    /// Whether calls pass over it until the program knows.
    is_by_asynchronous_error: AtomicBool,
    is_told: AtomicBool,
    first_passed_over: OnceLock<Instant>,
}

impl Surfacing {
    /// From now on by the asynchronous error first.
    pub(super) fn by_asynchronous_error(&self) {
        self.is_by_asynchronous_error.store(true, Ordering::Relaxed);
    }

    /// The program was told, or has ended the communicator itself.
    pub(super) fn told(&self) {
        self.is_told.store(true, Ordering::Relaxed);
    }

    /// Result of a call into these streams.
    ///
    /// # Safety
    /// The streams must live.
    pub(super) unsafe fn of_call(&self, result: Result<(), Error>, streams: &[RawStream]) -> Result<(), Error> {
        let Err(error) = result else { return Ok(()) };
        // SAFETY: the caller's contract.
        let is_captured = || streams.iter().any(|stream| unsafe { stream.is_capturing() }.unwrap_or(true));
        if !self.passes_over(&error, Instant::now()) || is_captured() {
            return Err(error);
        }
        Ok(())
    }

    fn passes_over(&self, error: &Error, now: Instant) -> bool {
        let is_of_others = matches!(error, Error::Failed { class: ErrorClass::Remote | ErrorClass::Timeout, .. });
        is_of_others
            && self.is_by_asynchronous_error.load(Ordering::Relaxed)
            && !self.is_told.load(Ordering::Relaxed)
            && now.saturating_duration_since(*self.first_passed_over.get_or_init(|| now)) < PASSED_OVER_FOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(class: ErrorClass) -> Error {
        Error::Failed { class, message: "rank 1 aborted".into(), origin: None }
    }

    #[test]
    fn failures_of_others_surface_by_the_asynchronous_error_first_where_that_was_asked_for() {
        let (start, surfacing) = (Instant::now(), Surfacing::default());
        assert!(!surfacing.passes_over(&failed(ErrorClass::Remote), start));
        surfacing.by_asynchronous_error();
        for class in [ErrorClass::Remote, ErrorClass::Timeout] {
            assert!(surfacing.passes_over(&failed(class), start));
        }
        surfacing.told();
        assert!(!surfacing.passes_over(&failed(ErrorClass::Remote), start));
    }

    #[test]
    fn a_program_that_never_asks_is_told_by_a_call_in_the_end() {
        let (start, surfacing) = (Instant::now(), Surfacing::default());
        surfacing.by_asynchronous_error();
        let passes_over = |after| surfacing.passes_over(&failed(ErrorClass::Remote), start + after);
        assert!(passes_over(Duration::ZERO) && passes_over(PASSED_OVER_FOR - Duration::from_nanos(1)));
        assert!(!passes_over(PASSED_OVER_FOR));
    }

    #[test]
    fn mistakes_of_the_caller_and_of_this_host_fail_at_once() {
        let surfacing = Surfacing::default();
        surfacing.by_asynchronous_error();
        let own = [
            failed(ErrorClass::InvalidUsage),
            failed(ErrorClass::System),
            Error::argument("no"),
            Error::ServiceGone("it has gone".into()),
            Error::Cuda { code: Some(700), message: "an illegal address".into(), source: None },
        ];
        assert!(own.iter().all(|error| !surfacing.passes_over(error, Instant::now())));
    }
}
