//! Files that a service keeps for its next start: replaced atomically, put aside where they cannot
//! be read.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A whole file takes the place of the one that is there, if any.
pub(super) fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let next = with_suffix(path, ".next");
    let mut file = File::create(&next)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&next, path)
}

/// A file that cannot be read is kept under another name. Returns what to say of it.
pub(super) fn put_aside(path: &Path, reason: &str) -> String {
    let aside = with_suffix(path, ".unreadable");
    let moved = std::fs::rename(path, &aside);
    let place = moved.map_or_else(|error| format!("it stays: {error}"), |()| format!("it is now {}", aside.display()));
    format!("{}: {reason}; {place}", path.display())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A file's content; `None` where there is no file.
///
/// # Errors
/// It is there and cannot be read, or is too large to be one of ours: in words. A file is put aside; what is none is left alone.
pub(super) fn read(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, String> {
    let text = std::fs::metadata(path).and_then(|found| match (found.is_file(), found.len() > bytes_max) {
        (false, _) => Ok(None),
        (_, true) => Err(ErrorKind::FileTooLarge.into()),
        _ => std::fs::read(path).map(Some),
    });
    match text {
        Ok(None) => Err(format!("{}: it is no file, and stays", path.display())),
        Ok(text) => Ok(text),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(put_aside(path, &error.to_string())),
    }
}
