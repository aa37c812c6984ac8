//! What operators have said of links, on the disk of the controller's host: known again when the services of all hosts have ended.
//!
//! A whole file takes the place of the one before, so that there is always one that can be read. What cannot be read or written is
//! said, and harms nothing else: hosts keep the same words for as long as one of them runs.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::controller::said::{self, SaidLink};

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
    pub(super) fn load(&self) -> Result<Vec<SaidLink>, String> {
        if std::fs::metadata(&self.path).is_ok_and(|found| !found.is_file()) {
            return Err(format!("{}: it is no file, and stays", self.path.display()));
        }
        let links = match read(&self.path) {
            Ok(text) => parse(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => Err(error.to_string()),
        };
        links.map_err(|reason| {
            let aside = with_suffix(&self.path, ".unreadable");
            let moved = std::fs::rename(&self.path, &aside);
            let place =
                moved.map_or_else(|error| format!("it stays: {error}"), |()| format!("it is now {}", aside.display()));
            format!("{}: {reason}; {place}", self.path.display())
        })
    }

    /// Keeps all that is known, where that is more than last time: `words` were heard so far.
    ///
    /// # Errors
    /// In words; it is tried again with the next word.
    pub(super) fn store(&mut self, words: u64, links: impl FnOnce() -> Vec<SaidLink>) -> Result<(), String> {
        if self.written.replace(words).unwrap_or(0) == words {
            return Ok(());
        }
        let json = serde_json::to_vec_pretty(&links()).map_err(|error| error.to_string())?;
        self.replace(&json).map_err(|error| format!("{} cannot be written: {error}", self.path.display()))
    }

    fn replace(&self, json: &[u8]) -> std::io::Result<()> {
        let next = with_suffix(&self.path, ".next");
        let mut file = File::create(&next)?;
        file.write_all(json)?;
        file.sync_all()?;
        std::fs::rename(&next, &self.path)
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(std::io::ErrorKind::FileTooLarge.into());
    }
    std::fs::read(path)
}

fn parse(text: &[u8]) -> Result<Vec<SaidLink>, String> {
    let links: Vec<SaidLink> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    links.chunks(said::LINKS_PER_MESSAGE).try_for_each(said::check).map_err(str::to_owned)?;
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::links::LinkState;

    fn link(lower: &str) -> SaidLink {
        SaidLink { lower: lower.into(), upper: "spine0".into(), state: LinkState::Down, number: (u64::MAX, 1) }
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
