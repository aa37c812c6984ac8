//! Keepalive of RDMA connections: finds those of which the device reports no error, though nothing
//! is acknowledged.
//!
//! A device tells of a write that nobody acknowledges when its retries are exceeded. Some retry for ever (soft-RoCE with seven), all do where the
//! receiver is not ready and may be waited for, and writes that nobody waits for tell nothing when they arrive. So now and then, while
//! something is under way, all of it is asked after, and a connection that does not answer is broken, as one whose device says so.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::rdma::flow::{Flow, Stage};
use crate::rdma::flows::Flows;
use crate::rdma::verbs::RESPONSE_TIMEOUT;
use crate::{Fault, FlowOptions};

/// So much of the time for which a flow may be silent: others are to be tried in the rest.
const PATIENCE_SHARE: u32 = 4;

/// How long a connection may take to answer.
fn patience(options: &FlowOptions) -> Duration {
    options.silence_timeout / PATIENCE_SHARE
}

/// Flows whose connections say nothing, if it is time to look.
pub(in crate::rdma) fn silent(now: Instant, flows: &mut Flows) -> Vec<(Handle, Fault)> {
    if !flows.timers_mut().take_keepalive(now) {
        return Vec::new();
    }
    let (mut silent, mut any_waits) = (Vec::new(), false);
    for (handle, flow) in flows.iter_mut().filter(|(_, flow)| flow.stage == Stage::Open && !flow.is_hung_up) {
        match ask(flow, now) {
            Ok(waits) => any_waits |= waits,
            Err(fault) => silent.push((handle, fault)),
        }
    }
    if any_waits {
        flows.timers_mut().plan_keepalive(Some(now));
    }
    silent
}

/// Asks after what is under way on a flow's connection. Returns whether anything is.
fn ask(flow: &mut Flow, now: Instant) -> Result<bool, Fault> {
    let Some(connection) = &mut flow.connection else { return Ok(false) };
    let mut waits = None;
    for qp in &mut connection.qps {
        qp.ask();
        // SAFETY: what asks reads no bytes, and nothing else is in the batch: it was empty.
        unsafe { qp.post(true) }?;
        if qp.awaits() {
            waits = Some(qp.pair().number);
        }
    }
    let Some(qp) = waits else { return Ok(false) };
    let since = *flow.silent_since.get_or_insert(now);
    let is_silent = now.saturating_duration_since(since) >= patience(&flow.spec.options);
    if is_silent { Err(Fault::QueuePair { qp, status: RESPONSE_TIMEOUT }) } else { Ok(true) }
}
