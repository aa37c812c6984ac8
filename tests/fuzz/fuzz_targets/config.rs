//! Whatever an operator may write: refused or accepted, and what is accepted survives being printed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mccs_config::ServiceConfig;

fuzz_target!(|text: &str| {
    if let Ok(config) = ServiceConfig::parse(text, "fuzz") {
        assert!(ServiceConfig::parse(&config.to_toml(), "printed").is_ok_and(|again| again == config));
    }
});
