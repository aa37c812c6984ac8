//! Executables by name, private folders and log files of a run on this host.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::unistd::AccessFlags;

/// The folder of this program's executable, where its siblings are.
#[must_use]
pub fn own_folder() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_path_buf)
}

/// Finds `program`: with a slash it is a path from `base`, else a name beside this program, then in `PATH`.
#[must_use]
pub fn find_program(program: &Path, base: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 || program.is_absolute() {
        return executable(base.join(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    own_folder().into_iter().chain(std::env::split_paths(&path)).find_map(|folder| executable(folder.join(program)))
}

fn executable(path: PathBuf) -> Option<PathBuf> {
    let is_program = path.metadata().is_ok_and(|meta| !meta.is_dir() && !meta.file_type().is_socket())
        && nix::unistd::access(&path, AccessFlags::X_OK).is_ok();
    is_program.then_some(path)
}

/// Parent of private folders: the user's runtime folder, else `/tmp`. Short, because sockets' paths are.
#[must_use]
pub fn private_parent() -> PathBuf {
    std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|dir| nix::unistd::access(dir, AccessFlags::W_OK).is_ok())
        .unwrap_or_else(|| "/tmp".into())
}

/// Makes the folder of the logs.
///
/// # Errors
/// The folder cannot be made.
pub fn output_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("the output folder {} cannot be made", path.display()))
}

/// Makes the file that keeps a process's output.
///
/// # Errors
/// The file cannot be made.
pub fn log_file(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("the log {} cannot be made", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_path_and_by_name() {
        let root = Path::new("/");
        assert!(find_program(Path::new("sh"), root).is_some());
        assert_eq!(find_program(Path::new("bin/sh"), root), Some("/bin/sh".into()));
        assert_eq!(find_program(Path::new("/etc"), root), None);
        assert_eq!(find_program(Path::new("/etc/passwd"), root), None);
        assert_eq!(find_program(Path::new("no-such-program"), root), None);
    }
}
