//! Twins of a session's slots: GPU memory that NICs reach, asked for, made by the device's thread,
//! found by commands.

use std::sync::Arc;

use mccs_config::service::TransportKind;
use mccs_device::cuda::{MadeTwin, TwinMaker, TwinOrder};
use mccs_ipc::protocol::{Response, Role};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;

use super::SessionEngine;
use super::requests::OPENING_MAX;
use super::tables::{CommSlot, Seat, SlotTwin};
use crate::proxy::{ProxyReply, TwinPart};

impl Seat {
    /// Whether it takes a twin of a region: a rail has one, messages have one for each region.
    fn check_has_room(&self, peer: Option<u32>, region: Handle) -> Result<(), SetupError> {
        let is_taken = match peer {
            None => !self.twins.is_empty(),
            Some(_) => self.twin(region).is_some(),
        };
        let taken = || SetupError { class: ErrorClass::InvalidUsage, message: "there is a twin already".into() };
        if is_taken { Err(taken()) } else { Ok(()) }
    }
}

impl SessionEngine {
    /// Has memory made in the place of a part of a region: for a rail, or for messages with a peer.
    pub(super) fn make_twin(&mut self, id: u64, part: TwinPart, bytes: u64) {
        let TwinPart { comm, peer, region, offset_bytes } = part;
        let known = self.tables.regions.get(region).and_then(|region| region.range(offset_bytes, bytes));
        if known.is_none() || bytes == 0 {
            let message = format!("there are no {bytes} bytes at {offset_bytes} of region {region:?} for a twin");
            return self.refuse(id, ErrorClass::InvalidArgument, message);
        }
        let (gpu, maker) = match self.twin_of(comm, peer, region) {
            Ok(found) => found,
            Err(SetupError { class, message }) => return self.refuse(id, class, message),
        };
        if self.opening >= OPENING_MAX {
            return self.refuse(id, ErrorClass::InvalidUsage, "the session opens too much memory at a time");
        }
        self.opening += 1;
        let (replies, tenant) = (self.replies.sender(), Arc::clone(&self.session.tenant));
        // The mailbox has room for so many.
        let reply = Box::new(move |made: Result<MadeTwin, _>| {
            let made = made.map(Box::new);
            drop(replies.send(ProxyReply::TwinMade { request: id, part, made }));
        });
        maker.make(TwinOrder { gpu, bytes, tenant, reply });
    }

    /// On which GPU, and by whom, a twin of a region is made: for a rail, or for messages of a whole with a peer.
    fn twin_of(&self, comm: Handle, peer: Option<u32>, region: Handle) -> Result<(usize, TwinMaker), SetupError> {
        let invalid = |message: String| SetupError { class: ErrorClass::InvalidArgument, message };
        let Some(CommSlot::Ready { info, seat, .. }) = self.tables.comms.get(comm) else {
            return Err(invalid(format!("there is no communicator {comm:?}")));
        };
        let gpu = match (seat.role, peer, seat.gpu) {
            (Role::Rail { .. }, None, Some(gpu)) => gpu,
            (Role::Whole, Some(peer), Some(gpu)) if peer < info.nranks => gpu,
            _ => {
                let is_not = match peer {
                    None => "is no rail of GPUs".into(),
                    Some(peer) => format!("has no messages of GPUs with rank {peer}"),
                };
                return Err(invalid(format!("communicator {comm:?} {is_not}")));
            }
        };
        seat.check_has_room(peer, region)?;
        let system = |message: String| SetupError { class: ErrorClass::System, message };
        let gpus = self.proxies.gpus.as_ref().map_err(|reason| system(reason.to_string()))?;
        gpus.twins.check().map_err(|reason| system(reason.to_string()))?;
        // What goes from rank to rank of a host is copied by processors.
        let is_here = |peer| info.ranks.iter().any(|rank| rank.rank == peer);
        if info.hosts.len() < 2 || peer.map_or(info.ranks.len() != 1, is_here) {
            return Err(system("other ranks of it are at this service".into()));
        }
        let transport = info.placed.as_ref().and_then(|placed| placed.chosen()?.transport);
        if transport == Some(TransportKind::Tcp) {
            let why = info.transport_reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
            return Err(system(format!("its flows go over TCP{why}")));
        }
        Ok((gpu, gpus.twins.clone()))
    }

    /// A region goes, and with it what stands for its parts. Operations keep what they use.
    pub(super) fn drop_twins_of(&mut self, region: Handle) {
        if self.proxies.gpus.is_err() {
            return;
        }
        for (_, slot) in self.tables.comms.iter_mut() {
            slot.seat_mut().twins.retain(|twin| twin.region != region);
        }
    }

    /// A twin was made, or was not.
    pub(super) fn add_twin(
        &mut self,
        request: u64,
        TwinPart { comm, peer, region, offset_bytes }: TwinPart,
        made: Result<Box<MadeTwin>, SetupError>,
    ) {
        let MadeTwin { memory, descriptor, charge, room } = match made {
            Ok(made) => *made,
            Err(SetupError { class, message }) => return self.refuse(request, class, message),
        };
        let Some(slot @ CommSlot::Ready { .. }) = self.tables.comms.get_mut(comm) else {
            return self.refuse(request, ErrorClass::InvalidUsage, "the communicator has been left");
        };
        if self.tables.regions.get(region).is_none() {
            return self.refuse(request, ErrorClass::InvalidUsage, "the region has been freed");
        }
        let seat = slot.seat_mut();
        if let Err(SetupError { class, message }) = seat.check_has_room(peer, region) {
            return self.refuse(request, class, message);
        }
        seat.twins.push(SlotTwin { memory: Arc::new(memory), region, peer, offset_bytes });
        self.answer_with(request, Response::Twin { bytes: room }, &[descriptor].into(), Some(charge));
    }
}
