//! Completion status codes of RDMA (`ibv_wc_status`): what they mean, and who is at fault.

/// Code of a work request that was not done because its queue pair had failed.
pub const FLUSHED: u32 = 5;
/// Code of one that nobody has answered.
pub const RESPONSE_TIMEOUT: u32 = 20;

/// Meaning of a completion's code, and a remedy.
#[must_use]
pub fn status_text(code: u32) -> &'static str {
    match code {
        1 => "local length error: a message is longer than the port allows",
        2 => "local queue pair operation error",
        4 => "local protection error: memory is used after it was deregistered",
        FLUSHED => "the queue pair had failed before",
        7 => "bad response from the peer",
        8 => "local access error",
        9 => "remote invalid request: the peer's receive queue does not take the message",
        10 => "remote access error: the peer does not let this memory be written; has it ended the operation?",
        11 => "remote operation error: the peer's device failed",
        12 => {
            "transport retry counter exceeded: the peer's device acknowledges nothing; is the link up, and does the fabric let RDMA through?"
        }
        13 => "receiver-not-ready retry counter exceeded: the peer's service does not keep up; raise rdma.rnr_retries",
        19 => "fatal error of the device",
        RESPONSE_TIMEOUT => {
            "response timeout: the device hears nothing of the peer's, or the peer's service does not keep up"
        }
        _ => "an error that the specification does not name",
    }
}

/// Whether a completion's code speaks of the peer, or of the connection to it.
#[must_use]
pub fn is_of_peer(code: u32) -> bool {
    matches!(code, 5 | 7 | 9..=13 | 20)
}

/// Whether a completion's code says that nobody answers: over other ports somebody may.
#[must_use]
pub fn is_silence(code: u32) -> bool {
    matches!(code, 12 | RESPONSE_TIMEOUT)
}

/// Whether another queue pair may do better: nothing was wrong with what was asked for.
#[must_use]
pub fn is_of_connection(code: u32) -> bool {
    matches!(code, 2 | 5 | 7 | 11 | 12 | 19 | 20)
}
