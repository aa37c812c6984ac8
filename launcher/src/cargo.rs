//! Builds the workspace's other executables under `cargo run`, which leaves them out.
//!
//! `cargo run -p mccs-launcher` builds this package alone, and a package cannot depend on another's executables. By the
//! time that this program runs, cargo has released its lock, so that it can be asked for the rest in the same profile.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::host;

/// Cargo's invocation that would build what lies beside this executable.
#[derive(Debug, PartialEq, Eq)]
struct Build {
    manifest: PathBuf,
    target_dir: PathBuf,
    profile: String,
}

impl Build {
    /// `None` where the package that cargo runs is not this one, or `exe_dir` is no `<target dir>/<profile>`.
    fn new(package_dir: &Path, exe_dir: &Path) -> Option<Build> {
        if package_dir != Path::new(env!("CARGO_MANIFEST_DIR")) {
            return None;
        }
        let manifest = package_dir.parent()?.join("Cargo.toml");
        let target_dir = exe_dir.parent()?.to_path_buf();
        let profile = match exe_dir.file_name()?.to_str()? {
            "debug" => "dev",
            other => other,
        };
        Some(Build { manifest, target_dir, profile: profile.to_owned() })
    }
}

/// Builds the other executables if this program was started by `cargo run`; does nothing otherwise.
///
/// # Errors
/// The build fails; cargo has said why.
pub fn build_executables() -> Result<()> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(cargo), Some(package)) = (variable("CARGO"), variable("CARGO_MANIFEST_DIR")) else {
        return Ok(());
    };
    let Some(build) = host::own_folder().and_then(|exe_dir| Build::new(&package, &exe_dir)) else {
        return Ok(());
    };
    eprintln!("mccs-launch: building mccs-service, mccsctl and mccs-perf (profile {}) ...", build.profile);
    let mut command = Command::new(cargo);
    command
        .args(["build", "--package", "mccs-service", "--package", "mccs-ctl", "--package", "mccs-eval", "--bins"])
        .arg("--manifest-path")
        .arg(&build.manifest)
        .arg("--target-dir")
        .arg(&build.target_dir)
        .args(["--profile", &build.profile])
        .stdin(Stdio::null());
    if !std::io::stderr().is_terminal() {
        command.arg("--quiet");
    }
    let status = command.status().context("cargo cannot be started")?;
    if !status.success() {
        bail!("the executables cannot be built ({status}); --no-build runs what is there");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_for_cargo_run_of_this_package_only() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        // Whatever the target folder holds: cargo does not mark one that was there before it.
        let build = Build::new(package, Path::new("/t/release")).unwrap();
        assert_eq!(build.manifest, package.parent().unwrap().join("Cargo.toml"));
        assert_eq!(build.target_dir, Path::new("/t"));
        assert_eq!(build.profile, "release");
        assert_eq!(Build::new(package, Path::new("/t/debug")).unwrap().profile, "dev");
        assert_eq!(Build::new(Path::new("/another/package"), Path::new("/t/release")), None);
        assert_eq!(Build::new(package, Path::new("/")), None);
    }
}
