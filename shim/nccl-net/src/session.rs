//! The process' session at the host's service, which its connections share.

use std::sync::Mutex;

use mccs::{Client, Error};

use crate::locked;

/// This process' session, made when it is first needed, and again where the service has ended it or been started anew.
pub(crate) fn client() -> Result<Client, Error> {
    static CLIENT: Mutex<Option<(u32, Client)>> = Mutex::new(None);
    let (own, mut known) = (std::process::id(), locked(&CLIENT));
    match known.take() {
        Some((process, client)) if process == own && client.is_alive() => {
            return Ok(known.insert((own, client)).1.clone());
        }
        // Another process', which this one was forked from: to end it is that one's affair.
        Some((process, client)) if process != own => std::mem::forget(client),
        _ => {}
    }
    let made = Client::from_env()?;
    Ok(known.insert((own, made)).1.clone())
}
