//! Twins of a session's slots: GPU memory that NICs reach, asked for, made by the device's thread,
//! found by commands.

use std::sync::Arc;

use mccs_config::service::TransportKind;
use mccs_device::cuda::{MadeTwin, TwinMaker, TwinOrder};
use mccs_ipc::protocol::{Response, Role};
use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;

use super::memory::Memory;
use super::ranks::{Ranks, ReadyRank};
use super::seat::SlotTwin;
use crate::proxy::{ProxyReply, TwinPart};
use crate::session::outlets::{Outlets, Proxies};

/// Has memory made in the place of a part of a region: for a rail, or for messages with a peer.
pub(crate) fn make(ranks: &Ranks, memory: &Memory, out: &mut Outlets, request: u64, part: TwinPart, bytes: u64) {
    if let Err(why) = begin_to_make(ranks, memory, out, request, part, bytes) {
        out.answers.refuse_for(request, why);
    }
}

fn begin_to_make(
    ranks: &Ranks,
    memory: &Memory,
    out: &mut Outlets,
    request: u64,
    part: TwinPart,
    bytes: u64,
) -> Result<(), SetupError> {
    let TwinPart { region, offset_bytes, .. } = part;
    let known = memory.region(region).and_then(|region| region.range(offset_bytes, bytes));
    if known.is_none() || bytes == 0 {
        let message = format!("there are no {bytes} bytes at {offset_bytes} of region {region:?} for a twin");
        return Err(SetupError { class: ErrorClass::InvalidArgument, message });
    }
    let TwinPlace { gpu, maker } = twin_place(ranks, &out.proxies, part)?;
    out.replies.check_room()?;
    let (replies, tenant) = (out.replies.open(), Arc::clone(&out.session.tenant));
    let reply = Box::new(move |made: Result<MadeTwin, _>| {
        let made = made.map(Box::new);
        drop(replies.send(ProxyReply::TwinMade { request, part, made }));
    });
    maker.make(TwinOrder { gpu, bytes, tenant, reply });
    Ok(())
}

/// On which GPU, and by whom, a twin of a region is made.
struct TwinPlace {
    gpu: usize,
    maker: TwinMaker,
}

/// The place of a twin: for a rail, or for messages of a whole with a peer.
fn twin_place(ranks: &Ranks, proxies: &Proxies, part: TwinPart) -> Result<TwinPlace, SetupError> {
    let TwinPart { comm, peer, region, .. } = part;
    let ReadyRank { info, seat, .. } = ranks.ready(comm)?;
    let gpu = match (seat.role, peer, seat.gpu) {
        (Role::Rail { .. }, None, Some(gpu)) => gpu,
        (Role::Whole, Some(peer), Some(gpu)) if peer < info.nranks => gpu,
        _ => {
            let is_not = match peer {
                None => "is no rail of GPUs".into(),
                Some(peer) => format!("has no messages of GPUs with rank {peer}"),
            };
            let message = format!("communicator {comm:?} {is_not}");
            return Err(SetupError { class: ErrorClass::InvalidArgument, message });
        }
    };
    seat.check_has_room(peer, region)?;
    let system = |message: String| SetupError { class: ErrorClass::System, message };
    let gpus = proxies.gpus.as_ref().map_err(|reason| system(reason.to_string()))?;
    gpus.twins.check().map_err(|reason| system(reason.to_string()))?;
    // Data from rank to rank of a host is copied by processors.
    let is_here = |peer| info.ranks.iter().any(|rank| rank.rank == peer);
    if info.hosts.len() < 2 || peer.map_or(info.ranks.len() != 1, is_here) {
        return Err(system("other ranks of it are at this service".into()));
    }
    let transport = info.placed.as_ref().and_then(|placed| placed.chosen()?.transport);
    if transport == Some(TransportKind::Tcp) {
        let why = info.transport_reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        return Err(system(format!("its flows go over TCP{why}")));
    }
    Ok(TwinPlace { gpu, maker: gpus.twins.clone() })
}

/// A twin was made, or was not.
pub(crate) fn add(
    ranks: &mut Ranks,
    memory: &Memory,
    out: &mut Outlets,
    request: u64,
    TwinPart { comm, peer, region, offset_bytes }: TwinPart,
    made: Result<Box<MadeTwin>, SetupError>,
) {
    let MadeTwin { memory: twin, descriptor, charge, room } = match made {
        Ok(made) => *made,
        Err(why) => return out.answers.refuse_for(request, why),
    };
    let Some(ReadyRank { seat, .. }) = ranks.ready_mut(comm) else {
        return out.answers.refuse(request, ErrorClass::InvalidUsage, "the communicator has been left");
    };
    if memory.region(region).is_none() {
        return out.answers.refuse(request, ErrorClass::InvalidUsage, "the region has been freed");
    }
    if let Err(why) = seat.check_has_room(peer, region) {
        return out.answers.refuse_for(request, why);
    }
    seat.twins.push(SlotTwin { memory: Arc::new(twin), region, peer, offset_bytes });
    out.answers.answer_with(request, Response::Twin { bytes: room }, &[descriptor].into(), Some(charge));
}
