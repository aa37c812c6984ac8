//! `ncclCommCount`, `ncclCommUserRank`, `ncclCommGetAsyncError`: queries of a communicator. One
//! that is being made answers what it knows; what takes peers is waited for.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use mccs::Error;

use super::communicators::{Comm, locked};
use super::{IN_PROGRESS, SUCCESS, Status, guard, put, remember, status_of};

/// Properties of a communicator before all ranks have joined.
#[derive(Default)]
pub(crate) struct Expected {
    /// The GPU's number in this process.
    device: OnceLock<c_int>,
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Default)]
struct Stage {
    place: Option<Place>,
    /// Whether it is being made; before, it waits for the end of its group.
    is_begun: bool,
    is_over: bool,
}

#[derive(Clone, Copy)]
struct Place {
    rank: c_int,
    nranks: c_int,
}

impl Expected {
    /// The rank's place. Numbers that make none are left to whoever refuses them.
    pub(crate) fn know(&self, rank: c_int, nranks: c_int) {
        if (0..nranks).contains(&rank) {
            self.change(|stage| stage.place = Some(Place { rank, nranks }));
        }
    }

    /// The GPU.
    pub(crate) fn know_device(&self, device: c_int) {
        self.device.get_or_init(|| device);
    }

    /// A thread makes it from now on.
    pub(crate) fn begin(&self) {
        self.change(|stage| stage.is_begun = true);
    }

    /// It is made, or cannot be.
    pub(crate) fn end(&self) {
        self.change(|stage| stage.is_over = true);
    }

    fn change(&self, change: impl FnOnce(&mut Stage)) {
        change(&mut locked(&self.stage));
        self.changed.notify_all();
    }

    /// The place, once it is known: at once, but for a split, whose ranks tell each other first. Nothing once it is over.
    fn place(&self) -> Result<Option<Place>, Error> {
        let mut stage = locked(&self.stage);
        loop {
            if stage.is_over || stage.place.is_some() {
                return Ok(stage.place);
            }
            if !stage.is_begun {
                let reason = "the communicator is made at the end of its group: call ncclGroupEnd first";
                return Err(Error::InvalidArgument(reason.into()));
            }
            stage = self.changed.wait(stage).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Comm {
    /// The rank's place, waiting for peers only where they decide it.
    fn place(&self) -> Result<Place, Error> {
        if self.made().is_none()
            && let Some(place) = self.expected.place()?
        {
            return Ok(place);
        }
        match self.made() {
            Some(Ok(member)) => Ok(Place { rank: member.rank as c_int, nranks: member.nranks as c_int }),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::system("a bug in mccs: a communicator was neither made nor refused")),
        }
    }

    fn device(&self) -> Result<c_int, Error> {
        match self.made() {
            Some(Ok(member)) => Ok(member.context.gpu().ordinal()),
            Some(Err(error)) => Err(error.clone()),
            None => {
                let unknown = || Error::InvalidArgument("the communicator has no GPU yet".into());
                self.expected.device.get().copied().ok_or_else(unknown)
            }
        }
    }
}

/// See `nccl.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, error: *mut Status) -> Status {
    guard(|| {
        let comm = Comm::behind(comm)?;
        let failure = match comm.made() {
            // SAFETY: the caller's contract.
            None => return unsafe { put(error, IN_PROGRESS, "asyncError") },
            Some(Ok(member)) => member.comm().ok().and_then(|comm| comm.async_error()),
            Some(Err(error)) => Some(error.clone()),
        };
        if let Some(failure) = &failure {
            remember(&failure.to_string());
        }
        // SAFETY: the caller's contract.
        unsafe { put(error, failure.as_ref().map_or(SUCCESS, status_of), "asyncError") }
    })
}

/// Defines a question about a communicator.
macro_rules! question {
    ($name:ident, |$comm:ident| $answer:expr) => {
        /// See `nccl.h`. Known also while the communicator is being made.
        ///
        /// # Safety
        /// The pointer must be null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(comm: *const Comm, answer: *mut c_int) -> Status {
            guard(|| {
                let $comm = Comm::behind(comm)?;
                // SAFETY: the caller's contract.
                unsafe { put(answer, $answer, "the answer") }
            })
        }
    };
}

question!(ncclCommCount, |comm| comm.place()?.nranks);
question!(ncclCommUserRank, |comm| comm.place()?.rank);
question!(ncclCommCuDevice, |comm| comm.device()?);
