//! Memory that NICs reach, in the place of a rail's slots: asked for, made by the device's thread, and found by commands that say so.

use std::os::fd::AsFd;
use std::sync::Arc;

use mccs_config::service::TransportKind;
use mccs_device::cuda::{MadeTwin, TwinMaker, TwinOrder};
use mccs_ipc::protocol::{Response, Role};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;

use super::SessionEngine;
use super::requests::OPENING_MAX;
use super::tables::{CommSlot, SlotTwin};
use crate::proxy::ProxyReply;

/// Why a rail has no twin.
type NoTwin = (ErrorClass, String);

impl SessionEngine {
    /// Has memory made for a rail, in the place of a part of a region.
    pub(super) fn make_twin(&mut self, id: u64, comm: Handle, (region, offset_bytes, bytes): (Handle, u64, u64)) {
        let known = self.tables.regions.get(region).and_then(|region| region.range(offset_bytes, bytes));
        if known.is_none() || bytes == 0 {
            let message = format!("there are no {bytes} bytes at {offset_bytes} of region {region:?} for a twin");
            return self.refuse(id, ErrorClass::InvalidArgument, message);
        }
        let (gpu, maker) = match self.twin_of(comm) {
            Ok(found) => found,
            Err((class, message)) => return self.refuse(id, class, message),
        };
        if self.opening >= OPENING_MAX {
            return self.refuse(id, ErrorClass::InvalidUsage, "the session opens too much memory at a time");
        }
        self.opening += 1;
        let (replies, part, tenant) = (self.replies.sender(), (region, offset_bytes), Arc::clone(&self.session.tenant));
        // The mailbox has room for so many.
        let reply = Box::new(move |made| {
            drop(replies.send(ProxyReply::TwinMade { request: id, tenant_comm: comm, part, made }));
        });
        maker.make(TwinOrder { gpu, bytes, tenant, reply });
    }

    /// On which GPU, and by whom, a twin for a communicator is made.
    fn twin_of(&self, comm: Handle) -> Result<(usize, TwinMaker), NoTwin> {
        let Some(CommSlot::Ready { info, seat, .. }) = self.tables.comms.get(comm) else {
            return Err((ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}")));
        };
        let (Role::Rail { .. }, Some(gpu)) = (seat.role, seat.gpu) else {
            return Err((ErrorClass::InvalidArgument, format!("communicator {comm:?} is no rail of GPUs")));
        };
        if seat.twin.is_some() {
            return Err((ErrorClass::InvalidUsage, "the rail has a twin".into()));
        }
        let system = |message: String| (ErrorClass::System, message);
        let gpus = self.proxies.gpus.as_ref().map_err(|reason| system(reason.to_string()))?;
        gpus.twins.check().map_err(|reason| system(reason.to_string()))?;
        // What goes from rank to rank of a host is copied by processors.
        if info.hosts.len() < 2 || info.ranks.len() != 1 {
            return Err(system("several ranks of the rail are at this service".into()));
        }
        let transport = info.placed.as_ref().and_then(|placed| placed.chosen()?.transport);
        if transport == Some(TransportKind::Tcp) {
            let why = info.transport_reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
            return Err(system(format!("its flows go over TCP{why}")));
        }
        Ok((gpu, gpus.twins.clone()))
    }

    /// A twin was made, or was not.
    pub(super) fn add_twin(
        &mut self,
        request: u64,
        comm: Handle,
        (region, offset_bytes): (Handle, u64),
        made: Result<MadeTwin, SetupError>,
    ) {
        let MadeTwin { memory, descriptor, room } = match made {
            Ok(made) => made,
            Err(SetupError { class, message }) => return self.refuse(request, class, message),
        };
        let Some(slot @ CommSlot::Ready { .. }) = self.tables.comms.get_mut(comm) else {
            return self.refuse(request, ErrorClass::InvalidUsage, "the rail has been left");
        };
        let seat = slot.seat_mut();
        if seat.twin.is_some() {
            return self.refuse(request, ErrorClass::InvalidUsage, "the rail has a twin");
        }
        seat.twin = Some(SlotTwin { memory: Arc::new(memory), region, offset_bytes });
        self.answer(request, Response::Twin { bytes: room }, &[descriptor.as_fd()]);
    }
}
