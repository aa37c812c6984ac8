//! `console.toml`: where `mccs-console` listens, which service it asks, and by which names browsers reach it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::service::{Address, ServiceConfig};
use crate::validate::{Problems, Validate};

/// A whole `console.toml`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ConsoleConfig {
    /// The console itself.
    pub console: ConsoleSection,
}

/// `[console]`: addresses, names and the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ConsoleSection {
    /// Where to listen, over HTTP. Whoever reaches it may look; port 0: the kernel chooses one.
    pub listen: Address,
    /// The service's socket: the observers', or the operators' for a console of their user.
    pub socket: PathBuf,
    /// Names by which browsers reach the console, besides the address that they connect to and `localhost`. A request under any other name
    /// is refused: a hostile page may have a name that leads here.
    pub names: Vec<String>,
}

impl Default for ConsoleSection {
    fn default() -> Self {
        ConsoleSection {
            listen: Address(([127, 0, 0, 1], 9480).into()),
            socket: ServiceConfig::default().runtime_dir().join(crate::service::OBSERVERS_SOCKET),
            names: Vec::new(),
        }
    }
}

impl Validate for ConsoleConfig {
    fn validate(&self, problems: &mut Problems) {
        if !self.console.socket.is_absolute() {
            let socket = self.console.socket.display();
            problems.add("console.socket", format!("must be an absolute path, not {socket:?}"));
        }
        if self.console.names.len() > limits::CONSOLE_NAMES_MAX {
            problems.add("console.names", format!("has at most {} names", limits::CONSOLE_NAMES_MAX));
        }
        self.console.names.iter().for_each(|name| problems.name("console.names", name));
    }
}

crate::document!(ConsoleConfig, written);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_and_the_default_round_trip() {
        let read = |text: &str| ConsoleConfig::parse(text, "console.toml").unwrap();
        for config in [ConsoleConfig::default(), read(include_str!("../examples/console.toml"))] {
            assert_eq!(read(&config.to_toml()), config, "{}", config.to_toml());
        }
    }

    #[test]
    fn a_mistake_has_its_line() {
        for (text, line, key, words) in [
            ("[console]\nlisten = \"everywhere\"\n", 2, "console.listen", ""),
            ("[console]\nsocket = \"here.sock\"\n", 2, "console.socket", "absolute"),
            ("[console]\nnames = [\"a b\"]\n", 2, "console.names", "letters"),
            ("[console]\nname = [\"a\"]\n", 2, "console.name", "`names`"),
        ] {
            let error = ConsoleConfig::parse(text, "console.toml").unwrap_err().to_string();
            let begin = format!("console.toml:{line}:");
            assert!(error.contains(&begin) && error.contains(key) && error.contains(words), "{error}");
        }
    }
}
