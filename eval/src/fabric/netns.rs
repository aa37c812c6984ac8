//! Named network namespaces, as `ip netns` keeps them: which there are, and how a thread works in
//! one.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};

use super::error::{FabricError, Result};

/// Folder in which `ip netns` keeps names.
const FOLDER: &str = "/run/netns";

/// The file of a named namespace.
#[must_use]
pub fn path(namespace: &str) -> PathBuf {
    Path::new(FOLDER).join(namespace)
}

/// Names that start with `prefix`, sorted.
///
/// # Errors
/// The folder cannot be read; that there is none means that there are no names.
pub fn names(prefix: &str) -> Result<Vec<String>> {
    let failed = |source| FabricError::State { path: FOLDER.into(), source };
    let entries = match std::fs::read_dir(FOLDER) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        names.extend(name.to_str().filter(|name| name.starts_with(prefix)).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Identity of a namespace; absent if `path` does not exist or may not be looked at.
#[must_use]
pub fn identity(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Does `work` on a thread inside `namespace`. Sockets that it makes belong to the namespace wherever they go.
///
/// # Errors
/// The namespace does not exist or cannot be entered, or `work` fails.
pub fn within<T: Send>(namespace: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let failed = |source| FabricError::Namespace { namespace: namespace.to_owned(), source };
    let file = File::open(path(namespace)).map_err(failed)?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(file, CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))?;
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
