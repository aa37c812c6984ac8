//! Operators' words on links (`mccsctl link`) on disk at the controller's host. They are known
//! again after the services of all hosts have ended.
//!
//! A whole file takes the place of the one before, so that there is always one that can be read. An unreadable or unwritable file
//! is said, and harms nothing else: hosts keep the same words for as long as one of them runs.

use std::path::PathBuf;

use mccs_controller::links::link_overrides::{self, LinkOverride};

use super::kept_file::{put_aside, read, replace};

/// Bytes of the file: thousands of links with the longest names.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// See the module's documentation.
pub(super) struct LinkOverrideStore {
    path: PathBuf,
    /// How many words were known when it was last written.
    written: Option<u64>,
}

impl LinkOverrideStore {
    pub(super) fn new(path: PathBuf) -> Self {
        LinkOverrideStore { path, written: None }
    }

    /// The overrides that were kept. Nothing, where there is no file yet.
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

fn parse(text: &[u8]) -> Result<Vec<LinkOverride>, String> {
    let links: Vec<LinkOverride> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    links.chunks(link_overrides::LINKS_PER_MESSAGE).try_for_each(link_overrides::check).map_err(str::to_owned)?;
    Ok(links)
}

#[cfg(test)]
mod tests {
    use mccs_controller::links::LinkState;
    use mccs_controller::links::link_overrides::WordNumber;

    use super::*;

    fn link(lower: &str) -> LinkOverride {
        LinkOverride {
            lower: lower.into(),
            upper: "spine0".into(),
            state: LinkState::Down,
            number: WordNumber { life: u64::MAX, count: 1 },
        }
    }

    #[test]
    fn what_is_kept_is_known_again_and_written_only_when_there_is_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("links.json");
        let mut store = LinkOverrideStore::new(path.clone());
        assert_eq!(store.load(), Ok(Vec::new()));
        store.store(0, || panic!("nothing was said")).unwrap();
        let links = vec![link("leaf0"), link("leaf1")];
        store.store(2, || links.clone()).unwrap();
        store.store(2, || panic!("it is written")).unwrap();
        assert_eq!(LinkOverrideStore::new(path).load(), Ok(links));
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
            let reason = LinkOverrideStore::new(path.clone()).load().unwrap_err();
            assert!(reason.contains("links.json.unreadable"), "{reason}");
            assert!(!path.exists());
            assert_eq!(std::fs::read_to_string(folder.path().join("links.json.unreadable")).unwrap(), text);
        }
        std::fs::create_dir(&path).unwrap();
        assert!(LinkOverrideStore::new(path.clone()).load().unwrap_err().contains("no file"));
        assert!(path.is_dir(), "a folder is nobody's to move");
        let mut nowhere = LinkOverrideStore::new(folder.path().join("missing").join("links.json"));
        assert!(nowhere.store(1, Vec::new).unwrap_err().contains("cannot be written"));
    }
}
