//! Caller of an operator's request: user, process and command, for history and log.

use std::ffi::OsString;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Characters of a command that are told.
const COMMAND_CHARS_MAX: usize = 300;
/// Characters of a user's name that are told.
const NAME_CHARS_MAX: usize = 64;

/// The caller, as the asking program says. The service adds the user's number, which the kernel says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Caller {
    /// The user's name. A service never looks names up: a directory that does not answer would block it.
    #[serde(default)]
    pub user: Option<String>,
    /// The user who became that user by `sudo`.
    #[serde(default)]
    pub login: Option<String>,
    /// The command.
    #[serde(default)]
    pub command: String,
}

impl Caller {
    /// This process.
    #[must_use]
    pub fn this_process() -> Self {
        let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
        let login = std::env::var("SUDO_USER").ok();
        Caller { user: user.map(|user| user.name), login, command: command(std::env::args_os()) }
    }

    /// In a line: `uid 0 (root, by sudo of alice): mccsctl policy apply new.toml`. Whatever the program says, it stays one line.
    #[must_use]
    pub fn of_user(&self, uid: u32) -> String {
        let command = match one_line(&self.command, COMMAND_CHARS_MAX) {
            command if command.is_empty() => "a program".to_owned(),
            command => command,
        };
        format!("{}: {command}", self.user(uid))
    }

    /// The same without the command.
    #[must_use]
    pub fn user(&self, uid: u32) -> String {
        let names = [self.user.clone(), self.login.as_ref().map(|login| format!("by sudo of {login}"))];
        let names: Vec<String> = names.into_iter().flatten().map(|name| one_line(&name, NAME_CHARS_MAX)).collect();
        let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        format!("uid {uid}{names}")
    }
}

/// The words of a command; its program without folders.
fn command(words: impl IntoIterator<Item = OsString>) -> String {
    let mut words = words.into_iter();
    let program = words.next().unwrap_or_default();
    let program = Path::new(&program).file_name().map_or(program.clone(), Into::into);
    let words: Vec<String> = std::iter::once(program).chain(words).map(|word| word.to_string_lossy().into()).collect();
    words.join(" ")
}

fn one_line(text: &str, chars_max: usize) -> String {
    let cut = text.chars().take(chars_max).map(|c| if c.is_control() { '?' } else { c });
    let rest = if text.chars().nth(chars_max).is_some() { "..." } else { "" };
    cut.collect::<String>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_told_in_a_line_whatever_it_says() {
        let caller = |user: Option<&str>, login: Option<&str>, command: &str| Caller {
            user: user.map(Into::into),
            login: login.map(Into::into),
            command: command.into(),
        };
        let told = caller(Some("root"), Some("alice"), "mccsctl drain").of_user(0);
        assert_eq!(told, "uid 0 (root, by sudo of alice): mccsctl drain");
        assert_eq!(caller(None, None, "").of_user(7), "uid 7: a program");
        let told = caller(Some(&"x".repeat(1000)), None, &"a\nb\u{1b}".repeat(1000)).of_user(1);
        assert!(told.len() < 500 && !told.chars().any(char::is_control), "{told}");
    }

    #[test]
    fn a_command_has_no_folders() {
        let words = ["/usr/bin/mccsctl", "policy", "apply", "/etc/p.toml"].map(OsString::from);
        assert_eq!(command(words), "mccsctl policy apply /etc/p.toml");
        assert_eq!(command([]), "");
    }
}
