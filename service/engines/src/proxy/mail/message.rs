//! Messages to proxy engines: an enum of each sender.

use std::sync::Arc;

use mccs_config::change::StrategyChange;
use mccs_device::{DeviceEvent, DeviceEvents};
use mccs_exchange::protocol::{self as exchange, CommId};
use mccs_ipc::types::Handle;
use mccs_model::rate_limit::Pace;
use mccs_model::{Refused, SessionId};
use mccs_runtime::Sender;
use mccs_tenants::session::Session;

use crate::proxy::calls::channel_order::{ChannelOrder, TriggerBatch};
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::operation::{JoinRequest, Operation, ProxyReply};
use crate::proxy::calls::resumed::ResumedComm;
use crate::proxy::mail::reply_to::{DiagnosisRounds, ForwardedRequest, OperatorAnswer, OperatorRequest, ReplyTo};
use crate::proxy::streams::semaphores::StreamSemaphore;
use crate::transport::{TransportEvent, TransportEvents};

/// To a proxy engine.
pub enum ProxyMessage {
    /// From a session, in its tenant's queue; or, behind what the session has sent to another proxy engine, from that one.
    Session(SessionMessage),
    /// From the device.
    Device(DeviceEvent),
    /// From transport engines.
    Transport(TransportEvent),
    /// News from other hosts.
    Exchange(exchange::Event),
    /// From the controller's agent on this host.
    Controller(ControllerOrder),
    /// From operators.
    Operator(OperatorMessage),
    /// From the proxy engine of another device: a communicator with this number has failed, the whole or a part of it.
    FamilyFailed { whole: u64, failure: Failure },
    /// Communicators of the program before.
    Resume(Vec<ResumedComm>),
}

/// From a session engine.
pub enum SessionMessage {
    /// An operation was enqueued.
    Operation(Operation),
    /// A rank joins.
    Join(Box<JoinRequest>),
    /// A rank leaves when its operations have ended. Answered to `request`, or because its whole is left.
    Leave { comm: Handle, rank: u32, request: Option<u64>, tenant_comm: Handle, reply: Sender<ProxyReply> },
    /// A tenant ends a communicator, which it calls so. Its session, if it waits, hears once all ranks can know.
    Abort { comm: Handle, rank: u32, cuda_error: Option<u32>, reply: Option<(Handle, Sender<ProxyReply>)> },
    /// The session has ended: everything it had goes.
    Closed { session: SessionId },
    /// A rank has posted to a shared-memory exchange on which this engine waits for a post.
    Posted { comm: Handle },
    /// A stream begins whose operations wait for a GPU.
    StreamOrdered { session: Arc<Session>, stream: Handle, semaphore: StreamSemaphore },
    /// A rank asks something of its port channels.
    PortChannel(Box<ChannelOrder>),
    /// Triggers of port channels.
    Triggers(TriggerBatch),
    /// A stream has ended.
    StreamClosed { session: SessionId, stream: u32 },
}

/// From the controller's agent.
pub enum ControllerOrder {
    /// How the flows of a communicator are to leave this host.
    SetPace { comm: CommId, pace: Arc<Pace> },
    /// Another strategy for the communicator with this number; see [`CommInfo::number`](mccs_registry::CommInfo::number). At most `window` more collectives
    /// start while hosts agree. Refused if the strategy that was decided last is not that of epoch `expected`.
    Reconfigure { number: u64, change: Box<StrategyChange>, window: Option<u32>, expected: u64, reply_to: ReplyTo },
}

/// From operators, here or on other hosts.
pub enum OperatorMessage {
    /// Why the communicator with this number is stuck.
    WhyStuck { number: u64, rounds: DiagnosisRounds, reply_to: ReplyTo },
    /// Something of the communicator with this number; forwarded to the host of its root.
    Request { number: u64, request: OperatorRequest, reply_to: ReplyTo },
    /// The result of a request that an operator on another host has made.
    ForwardedResponse { request: ForwardedRequest, answer: Result<OperatorAnswer, Refused> },
}

impl ProxyMessage {
    /// Outlet for transport engines' events to the proxy engine with this mailbox.
    #[must_use]
    pub fn transport_events(proxy: Sender<ProxyMessage>) -> TransportEvents {
        TransportEvents::to(move |event| match proxy.send(ProxyMessage::Transport(event)) {
            Err(ProxyMessage::Transport(event)) => Err(event),
            _ => Ok(()),
        })
    }

    /// Outlet for a device's events to the proxy engine with this mailbox.
    #[must_use]
    pub fn device_events(proxy: Sender<ProxyMessage>) -> DeviceEvents {
        DeviceEvents::new(Box::new(move |event| match proxy.send(ProxyMessage::Device(event)) {
            Err(ProxyMessage::Device(event)) => Err(event),
            _ => Ok(()),
        }))
    }
}

impl From<SessionMessage> for ProxyMessage {
    fn from(message: SessionMessage) -> Self {
        ProxyMessage::Session(message)
    }
}

impl From<ControllerOrder> for ProxyMessage {
    fn from(order: ControllerOrder) -> Self {
        ProxyMessage::Controller(order)
    }
}

impl From<OperatorMessage> for ProxyMessage {
    fn from(message: OperatorMessage) -> Self {
        ProxyMessage::Operator(message)
    }
}
