//! Conversion of libibverbs' structures: completions, events, access flags, queue-pair attributes
//! (`ibv_modify_qp`).

use super::driver::{Access, AsyncEvent, Completion, Gid, QpStep, Raw, WcStatus};
use super::sys;
use crate::completion_status::FLUSHED;

const HOP_LIMIT: u8 = 64;

pub(super) fn completion_of(wc: &sys::ibv_wc) -> Completion {
    let status = match wc.status {
        0 => WcStatus::Success,
        FLUSHED => WcStatus::Flushed,
        code => WcStatus::Failed(code),
    };
    Completion { wr_id: wc.wr_id, status, bytes: wc.byte_len, imm: u32::from_be(wc.imm_data) }
}

pub(super) fn access_flags(access: Access) -> u32 {
    let flag = |wanted: bool, flag| if wanted { flag } else { 0 };
    sys::ACCESS_LOCAL_WRITE
        | flag(access.remote_write, sys::ACCESS_REMOTE_WRITE)
        | flag(access.remote_read, sys::ACCESS_REMOTE_READ)
        | flag(access.relaxed_ordering, sys::ACCESS_RELAXED_ORDERING)
}

pub(super) fn event(event: &sys::ibv_async_event) -> AsyncEvent {
    let element = event.element as usize;
    let (qp, port) = (Raw(element), element as u8);
    match event.event_type {
        sys::EVENT_PORT_ACTIVE => AsyncEvent::PortUp(port),
        sys::EVENT_PORT_ERR => AsyncEvent::PortDown(port),
        sys::EVENT_LID_CHANGE | sys::EVENT_GID_CHANGE | sys::EVENT_CLIENT_REREGISTER => AsyncEvent::AddressChange(port),
        sys::EVENT_QP_FATAL | sys::EVENT_QP_REQ_ERR | sys::EVENT_QP_ACCESS_ERR | sys::EVENT_PATH_MIG_ERR => {
            AsyncEvent::QpFatal { qp }
        }
        sys::EVENT_CQ_ERR => AsyncEvent::CqFailed,
        sys::EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        other => AsyncEvent::Other(other),
    }
}

/// Arguments of `ibv_modify_qp` for a step: attributes, and the mask that names those which are set.
pub(super) fn attributes(step: QpStep) -> (sys::ibv_qp_attr, u32) {
    // SAFETY: integers only; all zeroes are a value.
    let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
    let mask = match step {
        QpStep::Init { port, pkey_index, may_be_read } => {
            attr.qp_state = sys::QPS_INIT;
            (attr.port_num, attr.pkey_index) = (port, pkey_index);
            let read = if may_be_read { sys::ACCESS_REMOTE_READ } else { 0 };
            attr.qp_access_flags = sys::ACCESS_REMOTE_WRITE | read;
            sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS
        }
        QpStep::Receive(path) => {
            attr.qp_state = sys::QPS_RTR;
            attr.path_mtu = path.mtu.into();
            (attr.dest_qp_num, attr.rq_psn) = (path.peer_qp, path.peer_psn);
            attr.min_rnr_timer = path.min_rnr_timer;
            attr.max_dest_rd_atomic = 1;
            let ah = &mut attr.ah_attr;
            (ah.dlid, ah.sl, ah.port_num) = (path.peer_lid, path.service_level, path.port);
            if let Some(Gid(gid)) = path.peer_gid {
                ah.is_global = 1;
                // SAFETY: the same sixteen bytes.
                ah.grh.dgid = unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(gid) };
                (ah.grh.flow_label, ah.grh.sgid_index) = (path.flow_label, path.gid_index);
                (ah.grh.hop_limit, ah.grh.traffic_class) = (HOP_LIMIT, path.traffic_class);
            }
            let peer = sys::QP_AV | sys::QP_PATH_MTU | sys::QP_DEST_QPN | sys::QP_RQ_PSN;
            peer | sys::QP_MAX_DEST_RD_ATOMIC | sys::QP_MIN_RNR_TIMER
        }
        QpStep::Send(timers) => {
            attr.qp_state = sys::QPS_RTS;
            attr.sq_psn = timers.psn;
            (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (timers.timeout, timers.retries, timers.rnr_retries);
            attr.max_rd_atomic = 1;
            let retries = sys::QP_TIMEOUT | sys::QP_RETRY_CNT | sys::QP_RNR_RETRY;
            retries | sys::QP_SQ_PSN | sys::QP_MAX_QP_RD_ATOMIC
        }
    };
    (attr, mask | sys::QP_STATE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_are_left_alone_have_names() {
        // SAFETY: integers only; all zeroes are a value.
        let mut raw: sys::ibv_async_event = unsafe { std::mem::zeroed() };
        raw.event_type = 13;
        let AsyncEvent::Other(code) = event(&raw) else { panic!("acted on") };
        assert_eq!(crate::rdma::verbs::event_text(code), "the subnet manager is another one");
    }
}
