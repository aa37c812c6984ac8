//! Between the last rank's joining and a communicator's beginning: its device makes what its ranks share.

use std::sync::Arc;
use std::time::Instant;

use mccs_device::{NewGroup, Prepare, Prepared};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::{SessionId, SetupError};
use mccs_tenants::session::Opens;

use super::ProxyEngine;
use super::joining::refuse_all;
use super::operation::JoinRequest;

/// Communicators of a device that are being prepared at a time.
pub(super) const PREPARING_MAX: u32 = 1 << 16;

/// A communicator whose ranks are all there.
pub(super) struct Preparing {
    id: UniqueId,
    requests: Vec<JoinRequest>,
}

impl ProxyEngine {
    /// All ranks of a communicator of this host alone are there.
    pub(super) fn prepare(&mut self, id: UniqueId, requests: Vec<JoinRequest>, now: Instant) {
        let gpus: Vec<_> = requests.iter().map(|request| request.gpu).collect();
        let charges: Vec<_> = requests.iter().map(|request| Arc::clone(&request.charge)).collect();
        let of_each = requests.iter().map(|request| request.session.opens());
        let pids: Vec<_> = requests.iter().map(|request| request.session.peer.pid).collect();
        let opens = Opens {
            apart: of_each.clone().all(|opens| opens.apart)
                && pids.iter().enumerate().all(|(rank, pid)| !pids[..rank].contains(pid)),
            memory: of_each.clone().all(|opens| opens.memory),
            events: of_each.clone().all(|opens| opens.events),
        };
        let key = match self.preparing.insert(Preparing { id, requests }) {
            Ok(key) => key,
            Err(Preparing { requests, .. }) => {
                let message = format!("the service prepares {PREPARING_MAX} communicators, the most it can");
                return refuse_all(&SetupError { class: ErrorClass::System, message }, requests);
            }
        };
        let group = NewGroup { gpus: &gpus, charges: &charges, opens };
        match self.device.prepare(&group, key) {
            Prepare::Ready(prepared) => self.prepared(key, Ok(prepared), now),
            Prepare::Begun => {}
        }
    }

    /// The device has prepared, or cannot. A key that is not known any more is of ranks that have gone.
    pub(super) fn prepared(&mut self, key: Handle, prepared: Result<Prepared, SetupError>, now: Instant) {
        let Some(Preparing { id, requests }) = self.preparing.remove(key) else { return };
        match prepared {
            Ok(prepared) => self.create_comm(id, requests.len() as u32, requests, None, Some(prepared), now),
            Err(refusal) => refuse_all(&refusal, requests),
        }
    }

    /// A session has ended: communicators that it was to be in are not to be.
    pub(super) fn stop_preparing(&mut self, session: SessionId) {
        let of_session = |preparing: &Preparing| preparing.requests.iter().any(|request| request.session.id == session);
        let hit: Vec<_> =
            self.preparing.iter().filter(|(_, preparing)| of_session(preparing)).map(|(key, _)| key).collect();
        for Preparing { id, requests } in
            hit.into_iter().filter_map(|key| self.preparing.remove(key)).collect::<Vec<_>>()
        {
            let (gone, others): (Vec<_>, _) = requests.into_iter().partition(|request| request.session.id == session);
            let rank = gone.first().map_or(0, |request| request.rank);
            let message = format!("rank {rank} left while communicator {id} was being set up");
            refuse_all(&SetupError { class: ErrorClass::Remote, message }, others);
        }
    }
}
