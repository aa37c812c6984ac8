//! What operators have said of links, on the disk of the controller's host: known again when the services of all hosts have ended.
//!
//! A whole file takes the place of the one before, so that there is always one that can be read. What cannot be read or written is
//! said, and harms nothing else: hosts keep the same words for as long as one of them runs.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use mccs_controller::link_overrides::{self, LinkOverride};

/// Bytes of the file: thousands of links with the longest names.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// See the module's documentation.
pub(super) struct Memory {
    path: PathBuf,
    /// How many words were known when it was last written.
    written: Option<u64>,
}

impl Memory {
    pub(super) fn new(path: PathBuf) -> Self {
        Memory { path, written: None }
    }

    /// What was kept. Nothing, where there is no file yet.
    ///
    /// # Errors
    /// It is there and cannot be read: in words. A file is put aside, so that it is not lost; what is none is left alone.
    pub(super) fn load(&self) -> Result<Vec<LinkOverride>, String> {
        let Some(text) = read(&self.path, FILE_BYTES_MAX)? else { return Ok(Vec::new()) };
        parse(&text).map_err(|reason| put_aside(&self.path, &reason))
    }

    /// Keeps all that is known, where that is more than last time: `words` were heard so far.
    ///
    /// # Errors
    /// In words; it is tried again with the next word.
    pub(super) fn store(&mut self, words: u64, links: impl FnOnce() -> Vec<LinkOverride>) -> Result<(), String> {
        if self.written.replace(words).unwrap_or(0) == words {
            return Ok(());
        }
        let json = serde_json::to_vec_pretty(&links()).map_err(|error| error.to_string())?;
        replace(&self.path, &json).map_err(|error| format!("{} cannot be written: {error}", self.path.display()))
    }
}

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

fn parse(text: &[u8]) -> Result<Vec<LinkOverride>, String> {
    let links: Vec<LinkOverride> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    links.chunks(link_overrides::LINKS_PER_MESSAGE).try_for_each(link_overrides::check).map_err(str::to_owned)?;
    Ok(links)
}

#[cfg(test)]
mod tests {
    use mccs_controller::links::LinkState;

    use super::*;

    fn link(lower: &str) -> LinkOverride {
        LinkOverride { lower: lower.into(), upper: "spine0".into(), state: LinkState::Down, number: (u64::MAX, 1) }
    }

    #[test]
    fn what_is_kept_is_known_again_and_written_only_when_there_is_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("links.json");
        let mut memory = Memory::new(path.clone());
        assert_eq!(memory.load(), Ok(Vec::new()));
        memory.store(0, || panic!("nothing was said")).unwrap();
        let links = vec![link("leaf0"), link("leaf1")];
        memory.store(2, || links.clone()).unwrap();
        memory.store(2, || panic!("it is written")).unwrap();
        assert_eq!(Memory::new(path).load(), Ok(links));
    }

    #[test]
    fn what_cannot_be_read_is_put_aside_and_what_cannot_be_written_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("links.json");
        let mut nobody = link("leaf0");
        nobody.lower.clear();
        let impossible = serde_json::to_string(&[nobody]).unwrap();
        for text in ["", "{}", "[{\"lower\":\"a\"}]", &*impossible] {
            std::fs::write(&path, text).unwrap();
            let reason = Memory::new(path.clone()).load().unwrap_err();
            assert!(reason.contains("links.json.unreadable"), "{reason}");
            assert!(!path.exists());
            assert_eq!(std::fs::read_to_string(folder.path().join("links.json.unreadable")).unwrap(), text);
        }
        std::fs::create_dir(&path).unwrap();
        assert!(Memory::new(path.clone()).load().unwrap_err().contains("no file"));
        assert!(path.is_dir(), "a folder is nobody's to move");
        let mut nowhere = Memory::new(folder.path().join("missing").join("links.json"));
        assert!(nowhere.store(1, Vec::new).unwrap_err().contains("cannot be written"));
    }
}
