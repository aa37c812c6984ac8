//! Configuration errors: what is wrong with a file, and in which line.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use crate::units::Bytes;

/// An error with its causes, in a line: those that it does not tell itself.
#[must_use]
pub fn in_words(error: &(dyn Error + 'static)) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !words.contains(&text) {
            words = format!("{words}: {text}");
        }
        cause = error.source();
    }
    words
}

/// One complaint about one place of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// File as the caller named it.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Dotted key, such as `tenant[1].uids`; empty where the complaint is about the file as a whole.
    pub key: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: ", self.file, self.line, self.column)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// Why a file was refused. The operator is at fault, and the text is meant for them.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        source: std::io::Error,
    },
    /// It is longer than such a file may be.
    #[error("{}: is longer than {}, the most that such a file may have", .0.display(), .1)]
    TooLong(PathBuf, Bytes),
    /// The file says something that cannot be. At least one complaint, in the order of the file.
    #[error("{}", join(.0))]
    Invalid(Vec<Diagnostic>),
}

impl ConfigError {
    /// The complaints about the file's content; empty where it could not be read.
    #[must_use]
    pub fn diagnostics(&self) -> &[Diagnostic] {
        match self {
            ConfigError::Read { .. } | ConfigError::TooLong(..) => &[],
            ConfigError::Invalid(all) => all,
        }
    }
}

fn join(diagnostics: &[Diagnostic]) -> String {
    let lines: Vec<String> = diagnostics.iter().map(Diagnostic::to_string).collect();
    lines.join("\n")
}
