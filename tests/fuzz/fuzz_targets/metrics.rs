//! Fuzz target: HTTP requests to the metrics engine, cut wherever the network cuts.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mccs_engines::metrics::http::{HEAD_BYTES_MAX, answer, asked};

fuzz_target!(|data: &[u8]| {
    let data = &data[..data.len().min(HEAD_BYTES_MAX)];
    let first = (0..=data.len()).find_map(|end| Some((end, asked(&data[..end])?)));
    let Some((end, status)) = first else {
        assert!(data.len() < HEAD_BYTES_MAX, "a head without an end is waited for");
        return;
    };
    // Bytes behind the request change nothing, and every answer says how long it is.
    assert_eq!(asked(data), Some(status), "after {end} bytes it was {status:?}");
    let text = String::from_utf8(answer(status, "x 1\n")).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
});
