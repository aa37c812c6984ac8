//! Link state, as operators say it: up, down or slower.

use mccs_config::units::Rate;
use serde::{Deserialize, Serialize};

/// How a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// As the topology says.
    Up,
    /// It carries nothing.
    Down,
    /// Each of its directions carries so much.
    Rate(Rate),
}

impl std::fmt::Display for LinkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkState::Up => f.write_str("up"),
            LinkState::Down => f.write_str("down"),
            LinkState::Rate(rate) => rate.fmt(f),
        }
    }
}
