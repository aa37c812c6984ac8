//! A process' session with the host's service, for libraries whose callers have no object for it.

use std::sync::{Mutex, PoisonError};

use crate::{Client, Error};

struct Made {
    process: u32,
    client: Client,
}

/// This process' session: made when it is first needed, and again where the service has ended it or been started anew.
///
/// Threads may use it at once.
pub struct ProcessClient(Mutex<Option<Made>>);

impl ProcessClient {
    /// Nothing is made yet.
    #[must_use]
    pub const fn new() -> Self {
        ProcessClient(Mutex::new(None))
    }

    /// The session, as [`Client::from_env`] makes it. `before` is called where a new one is needed.
    ///
    /// # Errors
    /// [`Client::from_env`].
    pub fn get(&self, before: impl FnOnce()) -> Result<Client, Error> {
        let (process, mut known) = (std::process::id(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        match known.take() {
            Some(made) if made.process == process && made.client.is_alive() => {
                return Ok(known.insert(made).client.clone());
            }
            // Another process', which this one was forked from: to end it is that one's affair.
            Some(made) if made.process != process => std::mem::forget(made.client),
            _ => {}
        }
        before();
        let client = Client::from_env()?;
        Ok(known.insert(Made { process, client }).client.clone())
    }
}

impl Default for ProcessClient {
    fn default() -> Self {
        ProcessClient::new()
    }
}
