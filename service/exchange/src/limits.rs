//! Limits of the exchange, each with its reason: frames, windows, queues, time-outs. All are
//! checked where a peer's bytes come in, or where memory is taken.

use std::time::Duration;

pub use mccs_model::limits::{
    ACCOUNT_BYTES_MAX, CHANGE_BYTES_MAX, CONTROL_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, TEXT_BYTES_MAX,
};

/// Hosts of a cluster: each pair has a link, which is a descriptor on both. As in the configuration.
pub const HOSTS_MAX: usize = 1024;
/// Bytes of payloads in one message: large ones are cut, so that no communicator holds a link for long.
pub const PART_BYTES: usize = 32 << 10;
/// Bytes of a frame. The largest are parts of payloads, lists of all hosts, and lists of all ranks of a host.
pub const FRAME_BYTES_MAX: usize = 128 << 10;
/// Bytes of the first frame of a connection, which comes before it is known who sends it.
pub const HELLO_BYTES_MAX: usize = 256;

/// Messages to a host that are sent and not acknowledged: enough for a round trip at the rate of set-up.
pub const WINDOW_MESSAGES: usize = 256;
/// Bytes of messages to a host that are sent and not acknowledged: bounds what both sides buffer.
pub const WINDOW_BYTES: usize = 1 << 20;
/// Messages to a host that are not acknowledged, sent or not. A host that is so far behind is given up.
pub const QUEUE_MESSAGES_MAX: usize = 1 << 16;
/// As [`QUEUE_MESSAGES_MAX`], in bytes.
pub const QUEUE_BYTES_MAX: usize = 64 << 20;
/// Payloads are only queued behind fewer messages than this: they wait where they are, and control messages pass them.
pub const BULK_BEHIND_MESSAGES: usize = 64;
/// Received messages after which an acknowledgement does not wait any longer.
pub const ACK_AFTER_MESSAGES: u32 = 32;
/// Received bytes after which an acknowledgement does not wait any longer.
pub const ACK_AFTER_BYTES: usize = WINDOW_BYTES / 4;
/// How long an acknowledgement waits for a message to ride on.
pub const ACK_DELAY: Duration = Duration::from_millis(20);

/// Communicators that a service sets up at a time.
pub const SETUPS_MAX: usize = 4096;
/// As [`SETUPS_MAX`], of one tenant: none can keep others from joining.
pub const SETUPS_PER_TENANT_MAX: usize = 512;
/// Complete communicators of a service.
pub const COMMS_MAX: usize = 1 << 16;
/// Time that hosts have to connect to each other once all ranks have joined: they take milliseconds, and whoever cannot be reached does not
/// become so by waiting.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(30);
/// Ranks that join within this time are reported to the root in one message.
pub const REPORT_DELAY: Duration = Duration::from_micros(500);
/// Longest time that a late rank waits to be reported: the delay grows with the time that the others have waited.
pub const REPORT_DELAY_MAX: Duration = Duration::from_millis(20);
/// Operations that a rank may launch between its report and the decision on a change.
pub const CHANGE_WINDOW_MAX: u32 = 1 << 20;

/// Connections that have not proved who they are. More wait to be accepted.
pub const STRANGERS_MAX: usize = 64;
/// As [`STRANGERS_MAX`], of one address: a single stranger cannot keep others out.
pub const STRANGERS_PER_ADDRESS_MAX: usize = 32;
/// Bytes that wait to be written to a link. The window bounds messages; this bounds answers to a peer that does not read.
pub const LINK_BUFFER_BYTES_MAX: usize = 4 << 20;
/// Requests that may wait at the exchange engine: a burst of joins of every session.
pub const MAILBOX_MAX: usize = 4096;
