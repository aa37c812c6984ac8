//! Errors of the emulated fabric, in words for who typed the command.

use std::io;
use std::path::PathBuf;

use super::plan::Piece;

/// Result of this module.
pub type Result<T> = std::result::Result<T, FabricError>;

/// Errors of an emulated fabric.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The file is refused.
    #[error(transparent)]
    Config(#[from] mccs_config::ConfigError),
    /// The user may not.
    #[error("this needs root: network namespaces are made and entered (CAP_SYS_ADMIN, CAP_NET_ADMIN)")]
    NotRoot,
    /// A program is missing.
    #[error("no {program:?} in PATH: it comes with iproute2 (Debian, Ubuntu: apt-get install iproute2)")]
    NoTool {
        /// Its name.
        program: &'static str,
    },
    /// The kernel cannot do it at all.
    #[error("this kernel has no network namespaces (CONFIG_NET_NS)")]
    NoNamespaces,
    /// A command of the plan failed.
    #[error("`{command}` failed: {said}; it needs {needs}")]
    Command {
        /// As it would be typed.
        command: String,
        /// The tool's output.
        said: String,
        /// The kernel's part that it needs.
        needs: Piece,
    },
    /// A tool could not be run.
    #[error("`{program}`: {source}")]
    Tool {
        /// Its name.
        program: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A setting was refused.
    #[error("{key} cannot be set in {namespace}: {source}; it needs {needs}")]
    Setting {
        /// The namespace.
        namespace: String,
        /// Below `/proc/sys`.
        key: &'static str,
        /// The kernel's part that it needs.
        needs: Piece,
        /// Why.
        source: io::Error,
    },
    /// A namespace could not be entered, or something not be done inside.
    #[error("namespace {namespace}: {source}")]
    Namespace {
        /// Which.
        namespace: String,
        /// Why.
        source: io::Error,
    },
    /// The folder of what is up, or a file of it.
    #[error("{}: {source}", .path.display())]
    State {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The name is taken.
    #[error("a fabric called {name:?} is already {what}; `mccs-fabric down {name}` removes it")]
    Taken {
        /// The name.
        name: String,
        /// In which state it is.
        what: super::state::Phase,
    },
    /// No such fabric.
    #[error("no fabric called {name:?} is up{known}")]
    NotUp {
        /// The name.
        name: String,
        /// Those that are, in words.
        known: String,
    },
    /// Another fabric of this name is up.
    #[error("the fabric {name:?} that is up was built from another file; `mccs-fabric down {name}` removes it")]
    Differs {
        /// The name.
        name: String,
    },
    /// No such node.
    #[error("fabric {fabric:?} has no node {node:?}; its nodes are {known}")]
    NoNode {
        /// The fabric.
        fabric: String,
        /// The node that was asked for.
        node: String,
        /// Its nodes.
        known: String,
    },
    /// The guard process.
    #[error("the guard process {doing}: {source}")]
    Guard {
        /// The step that failed.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A command could not be started.
    #[error("{program}: {source}")]
    Program {
        /// The command's first word.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// Removal did not reach its end.
    #[error("fabric {name:?} is not all gone: {what}")]
    Left {
        /// The fabric.
        name: String,
        /// The remains.
        what: String,
    },
    /// A flow of the check.
    #[error("from {from} to {to}: {source}")]
    Flow {
        /// Source address, and port where one was chosen.
        from: String,
        /// Destination address.
        to: String,
        /// Why.
        source: io::Error,
    },
}
