//! Under `cargo run`, builds the workspace's other executables, which that command leaves out.
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
    /// `None` where `exe_dir` is not `<target dir>/<profile>` of the workspace that holds `package_dir`.
    fn new(package_dir: &Path, exe_dir: &Path) -> Option<Build> {
        let manifest = package_dir.parent()?.join("Cargo.toml");
        let target_dir = exe_dir.parent()?.to_path_buf();
        // Cargo marks a target folder so; an installed launcher's folder has no such neighbour.
        if !manifest.is_file() || !target_dir.join("CACHEDIR.TAG").is_file() {
            return None;
        }
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
        .args(["build", "--workspace", "--exclude", "mccs-launcher", "--bins"])
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
    fn only_a_target_folder_of_a_workspace_is_built() {
        let root = tempfile::tempdir().unwrap();
        let (package, release) = (root.path().join("launcher"), root.path().join("t/release"));
        std::fs::create_dir_all(&package).unwrap();
        std::fs::create_dir_all(&release).unwrap();
        std::fs::write(root.path().join("Cargo.toml"), "").unwrap();
        assert_eq!(Build::new(&package, &release), None);
        std::fs::write(root.path().join("t/CACHEDIR.TAG"), "").unwrap();
        let build = Build::new(&package, &release).unwrap();
        assert_eq!(build.profile, "release");
        assert_eq!(build.target_dir, root.path().join("t"));
        let debug = Build::new(&package, &root.path().join("t/debug")).unwrap();
        assert_eq!(debug.profile, "dev");
        assert_eq!(Build::new(Path::new("/"), &release), None);
    }
}
