//! Destroys queue pairs of ended connections on a thread of its own (`blocking_worker.rs`).
//!
//! To destroy a queue pair is a call of the kernel that takes long, and a change of strategy ends many between two collectives. Only those come here
//! on which nothing is under way: what they can still read or write is the memory that comes with them.

use std::sync::Arc;

use mccs_runtime::Share;

use crate::rdma::connection::Connection;
use crate::rdma::device::blocking_worker::Work;
use crate::rdma::device::ports::Port;
use crate::rdma::device::queues::Places;
use crate::rdma::flow::Half;
use crate::rdma::verbs::ProtectionDomain;

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Ended {
    /// Its tenant's share.
    share: Share,
    port: usize,
    /// Protection domain of the port's device, as it was opened then.
    pd: Arc<ProtectionDomain>,
    places: Places,
    /// `None` when it has ended. The connection goes before the memory that it knows.
    held: Option<(Connection, Half)>,
}

impl Ended {
    /// A connection that is to end, which has disowned its queue pairs.
    pub(in crate::rdma) fn new(share: Share, connection: Connection, half: Half, pd: &Arc<ProtectionDomain>) -> Self {
        let (port, pd, places) = (connection.port, Arc::clone(pd), connection.places);
        Ended { share, port, pd, places, held: Some((connection, half)) }
    }

    /// It has ended: others may have its places in the completion queue.
    pub(in crate::rdma) fn release(self, ports: &mut [Port]) {
        let opened = ports.get_mut(self.port).and_then(|port| port.opened.as_mut());
        if let Some(opened) = opened.filter(|opened| Arc::ptr_eq(&opened.pd, &self.pd)) {
            opened.queues.release(self.places);
        }
    }
}

impl Work for Ended {
    fn share(&self) -> Share {
        self.share
    }

    fn work(&mut self) {
        self.held = None;
    }
}
