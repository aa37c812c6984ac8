//! Fuzz target: messages of a tenant over the session's socket.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mccs_ipc::handshake::decode;
use mccs_ipc::protocol::{RequestEnvelope, ResponseEnvelope};

fuzz_target!(|data: &[u8]| {
    let _ = std::hint::black_box(decode::<RequestEnvelope>(data));
    let _ = std::hint::black_box(decode::<ResponseEnvelope>(data));
});
