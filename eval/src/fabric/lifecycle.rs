//! Life of a fabric: built under guard, taken down, commands run in it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::error::{FabricError, Result};
use super::guard::Guard;
use super::spec::{FabricSpec, is_name};
use super::state::{self, Draft};
use super::topology::{Topology, namespace};
use super::{execute, plan, remove};

/// Builds a fabric that its guard removes as soon as the returned value is finished or this process dies.
///
/// # Errors
/// The machine or its kernel lacks something, the name is taken, or a command fails; then nothing is left.
pub fn build_guarded(spec: &FabricSpec) -> Result<Guard> {
    execute::require_host()?;
    let draft = Draft::new(spec)?;
    let claim = draft.claim.clone();
    let guard = Guard::start(claim.clone())?;
    let build = || {
        draft.take()?;
        plan::build(spec, &Topology::new(spec)).iter().try_for_each(execute::step)?;
        claim.finish()
    };
    match build() {
        Ok(()) => {
            guard.share(false)?;
            Ok(guard)
        }
        Err(error) => {
            // The first error is the one to tell; what the guard cannot remove it says itself.
            let _ = guard.finish();
            Err(error)
        }
    }
}

/// Builds a fabric that stays.
///
/// # Errors
/// As [`build_guarded`].
pub fn up(spec: &FabricSpec) -> Result<()> {
    build_guarded(spec)?.dismiss()
}

/// Removes a fabric; says whether there was anything to remove.
///
/// # Errors
/// Not root, or something cannot be removed.
pub fn down(name: &str) -> Result<bool> {
    execute::require_host()?;
    if is_name(name) { remove::remove(name) } else { Ok(false) }
}

/// Does `work` while the fabric is up: the one that is, if it was built from the same file, else one that is built and
/// removed.
///
/// # Errors
/// Another fabric has the name, as [`build_guarded`], or `work` fails.
pub fn with<T>(spec: &FabricSpec, work: impl FnOnce() -> Result<T>) -> Result<T> {
    execute::require_host()?;
    match state::find(&spec.name) {
        Ok(up) if up == *spec => work(),
        Ok(_) => Err(FabricError::Differs { name: spec.name.clone() }),
        Err(FabricError::NotUp { .. }) => {
            let guard = build_guarded(spec)?;
            let done = work();
            guard.finish()?;
            done
        }
        Err(error) => Err(error),
    }
}

/// Becomes `command` on a node of a fabric that is up. Returns only on failure.
///
/// # Errors
/// No such fabric or node, or the command cannot be executed.
pub fn exec(fabric: &str, node: &str, command: &[OsString]) -> Result<std::convert::Infallible> {
    execute::require_host()?;
    let topology = Topology::new(&state::find(fabric)?);
    if !topology.nodes().any(|(name, _)| name == node) {
        let known = topology.nodes().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
        return Err(FabricError::NoNode { fabric: fabric.to_owned(), node: node.to_owned(), known });
    }
    // `ip netns exec` also shows the command the node's own /sys.
    let source = Command::new("ip").args(["netns", "exec", &namespace(fabric, node)]).args(command).exec();
    Err(FabricError::Program { program: "ip".to_owned(), source })
}
