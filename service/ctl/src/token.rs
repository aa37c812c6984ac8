//! `mccsctl token`: tokens by which the console's users, and programs, act.

use std::time::Duration;

use clap::{Args, Subcommand};
use mccs_config::DurationText;
use mccs_control::ControlRequest;
use mccs_control::acts::{Right, TokenState, TokenView, TokenWanted};

/// Make tokens by which users of the console act, list them, or take them back. They are in the service's memory
/// alone: all end with it, also at an upgrade or reload.
#[derive(Subcommand)]
pub enum TokenCommand {
    Add(Add),
    /// List tokens, and the last ones that have ended. Secrets are not shown.
    List,
    /// Take a token back, at once.
    Remove {
        /// Its id: what stands before the dot.
        id: String,
    },
}

/// Make a token, and print it: its id, a dot, and its secret. The service tells it this once.
#[derive(Args)]
pub struct Add {
    /// Its owner, for the history.
    name: String,
    /// Its rights: policy (and links), tenants, communicators, host (drain).
    #[arg(long, required = true, value_delimiter = ',', value_name = "RIGHT,...")]
    rights: Vec<Right>,
    /// For how long, 168h at most.
    #[arg(long = "for", value_name = "TIME", default_value = "8h")]
    good_for: DurationText,
    /// How many acts.
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    acts: u32,
}

impl TokenCommand {
    pub fn request(&self) -> ControlRequest {
        match self {
            TokenCommand::Add(Add { name, rights, good_for, acts }) => ControlRequest::AddToken {
                token: TokenWanted {
                    name: name.clone(),
                    rights: rights.clone(),
                    seconds: good_for.0.as_secs(),
                    acts: *acts,
                },
            },
            TokenCommand::List => ControlRequest::Tokens,
            TokenCommand::Remove { id } => ControlRequest::RemoveToken { id: id.clone() },
        }
    }
}

/// All tokens.
pub fn print(tokens: &[TokenView]) {
    say!(
        "{:<16} {:<20} {:<8} {:>8} {:>6} {:>8}  {:<36} made by",
        "id",
        "name",
        "state",
        "left",
        "acts",
        "refused",
        "rights"
    );
    for TokenView { id, name, by, rights, state, seconds_left, acts_left, refused } in tokens {
        let state = match state {
            TokenState::Good => "good",
            TokenState::Expired => "expired",
            TokenState::Spent => "spent",
            TokenState::Removed => "removed",
        };
        let rights: Vec<_> = rights.iter().map(|right| right.name()).collect();
        let left = DurationText(Duration::from_secs(*seconds_left)).to_string();
        say!("{id:<16} {name:<20} {state:<8} {left:>8} {acts_left:>6} {refused:>8}  {:<36} {by}", rights.join(","));
    }
    say!();
}
