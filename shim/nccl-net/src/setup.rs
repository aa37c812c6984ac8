//! Set-up of a connection, on a thread of its own: calls of NCCL's ask how far it is, and never wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mccs::Error;

use crate::link::{Link, Meeting};
use crate::locked;

/// See the module's documentation.
pub(crate) struct Setup {
    progress: Mutex<Progress>,
    is_given_up: AtomicBool,
}

enum Progress {
    Joining,
    Joined(Link),
    Failed(Error),
    Taken,
}

impl Setup {
    /// Begins to wait for the peer.
    pub(crate) fn begin(meeting: Meeting) -> Result<Arc<Self>, Error> {
        let setup = Arc::new(Setup { progress: Mutex::new(Progress::Joining), is_given_up: AtomicBool::new(false) });
        let own = Arc::clone(&setup);
        let join = move || {
            let joined = Link::join(&meeting, || !own.is_given_up());
            let progress = joined.map_or_else(Progress::Failed, Progress::Joined);
            let before = std::mem::replace(&mut *locked(&own.progress), progress);
            if let Progress::Taken = before {
                own.give_up();
            }
        };
        let started = std::thread::Builder::new().name("mccs-net-join".into()).spawn(join);
        started.map_err(|error| Error::refused_by_system("cannot start a thread", error))?;
        Ok(setup)
    }

    /// Takes what has been made; none if it is not there yet.
    ///
    /// # Errors
    /// Why it will not be.
    pub(crate) fn take(&self) -> Result<Option<Link>, Error> {
        let mut progress = locked(&self.progress);
        match &*progress {
            Progress::Joining | Progress::Taken => Ok(None),
            Progress::Failed(error) => Err(error.clone()),
            Progress::Joined(_) => match std::mem::replace(&mut *progress, Progress::Taken) {
                Progress::Joined(link) => Ok(Some(link)),
                _ => Ok(None),
            },
        }
    }

    /// Nobody wants it any more.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
        let made = std::mem::replace(&mut *locked(&self.progress), Progress::Taken);
        if let Progress::Joined(link) = made {
            link.close(false);
        }
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }
}
