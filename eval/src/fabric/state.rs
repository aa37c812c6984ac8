//! State files of fabrics that are up, with their specification and every default.
//!
//! ```text
//! draft (no name)  ->  take: NAME.building  ->  finish: NAME.toml  ->  removed with the fabric
//! ```
//!
//! All three are one inode, which tells a fabric from a later one of the same name. The draft is written and its guard
//! knows it before it gets a name, so that there is no moment at which a builder could die and leave a file.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::unistd::linkat;
use serde::Serialize;

use super::error::{FabricError, Result};
use super::netns;
use super::remove::remove;
use super::spec::{FabricSpec, is_name};
use super::topology::{PREFIX, Topology};

/// Folder of the files.
const FOLDER: &str = "/run/mccs-fabric";
const UP: &str = "toml";
const BUILDING: &str = "building";

/// How far a fabric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// All of it is there.
    Up,
    /// It is being built, or its builder and its guard were both killed.
    Unfinished,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Up => "up",
            Phase::Unfinished => "being built, or left unfinished by a builder that was killed",
        })
    }
}

fn file(name: &str, suffix: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{name}.{suffix}"))
}

/// A file that stands for a fabric, as its guard knows it.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The fabric.
    pub name: String,
    /// The file.
    pub inode: u64,
}

/// A file that has no name yet, and is gone with this value.
#[derive(Debug)]
pub struct Draft {
    file: File,
    /// Its claim to names.
    pub claim: Claim,
}

impl Draft {
    /// Writes down `spec`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(spec: &FabricSpec) -> Result<Self> {
        let failed = |source| FabricError::State { path: FOLDER.into(), source };
        std::fs::create_dir_all(FOLDER).map_err(failed)?;
        let nameless = OFlag::O_TMPFILE.bits();
        let mut file =
            OpenOptions::new().write(true).custom_flags(nameless).mode(0o644).open(FOLDER).map_err(failed)?;
        file.write_all(spec.to_toml().as_bytes()).map_err(failed)?;
        let inode = file.metadata().map_err(failed)?.ino();
        Ok(Draft { file, claim: Claim { name: spec.name.clone(), inode } })
    }

    /// Takes the fabric's name.
    ///
    /// # Errors
    /// It is taken, or the folder cannot be written.
    pub fn take(self) -> Result<()> {
        let name = self.claim.name;
        let path = file(&name, BUILDING);
        let draft = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        match linkat(AT_FDCWD, draft.as_str(), AT_FDCWD, &path, AtFlags::AT_SYMLINK_FOLLOW) {
            Ok(()) if file(&name, UP).exists() => Err(FabricError::Taken { name, what: Phase::Up }),
            Ok(()) => Ok(()),
            Err(Errno::EEXIST) => Err(FabricError::Taken { name, what: Phase::Unfinished }),
            Err(errno) => Err(FabricError::State { path, source: errno.into() }),
        }
    }
}

impl Claim {
    /// Says that the fabric is up.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn finish(&self) -> Result<()> {
        let path = file(&self.name, BUILDING);
        std::fs::rename(&path, file(&self.name, UP)).map_err(|source| FabricError::State { path, source })
    }

    /// Removes what the file stands for: the fabric, or a mere attempt to take the name of one that is up.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn remove(&self) -> Result<()> {
        let inode = |suffix| file(&self.name, suffix).metadata().ok().map(|metadata| metadata.ino());
        match (inode(BUILDING), inode(UP)) {
            (_, Some(up)) if up == self.inode => remove(&self.name).map(drop),
            (Some(building), None) if building == self.inode => remove(&self.name).map(drop),
            (Some(building), Some(_)) if building == self.inode => unlink(&self.name, BUILDING).map(drop),
            _ => Ok(()),
        }
    }
}

/// Gives a name back; says whether it was taken.
///
/// # Errors
/// The folder cannot be written.
pub fn forget(name: &str) -> Result<bool> {
    Ok(unlink(name, UP)? | unlink(name, BUILDING)?)
}

fn unlink(name: &str, suffix: &str) -> Result<bool> {
    let path = file(name, suffix);
    match std::fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(source) => Err(FabricError::State { path, source }),
    }
}

/// The specification of a fabric that is up.
///
/// # Errors
/// It is not, or its file is spoilt.
pub fn find(name: &str) -> Result<FabricSpec> {
    let path = file(name, UP);
    if is_name(name) && path.exists() {
        return Ok(FabricSpec::load(&path)?);
    }
    let up: Vec<String> = list()?.into_iter().filter(|f| f.phase == Phase::Up).map(|f| f.name).collect();
    let known = if up.is_empty() { String::new() } else { format!("; there is {}", up.join(", ")) };
    Err(FabricError::NotUp { name: name.to_owned(), known })
}

/// A fabric of which there is something.
#[derive(Debug, Serialize)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// How far it is.
    pub phase: Phase,
    /// Its specification; absent while it is unfinished.
    pub spec: Option<FabricSpec>,
    /// Its nodes, addresses, and the ports of its paths.
    pub topology: Option<Topology>,
}

/// Every fabric of which there is a file or a namespace, by name.
///
/// # Errors
/// A folder cannot be read, or a file is spoilt.
pub fn list() -> Result<Vec<Listed>> {
    let mut found: Vec<(String, Phase)> = Vec::new();
    match std::fs::read_dir(FOLDER) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(source) => return Err(FabricError::State { path: FOLDER.into(), source }),
        Ok(entries) => found.extend(entries.filter_map(|entry| of_file(&entry.ok()?.path()))),
    }
    let namespaces = netns::names(PREFIX)?;
    found.extend(namespaces.iter().filter_map(|name| Some((of_namespace(name)?.to_owned(), Phase::Unfinished))));
    // Up sorts first, so that it is what stays.
    found.sort();
    found.dedup_by(|later, first| later.0 == first.0);
    found
        .into_iter()
        .map(|(name, phase)| {
            let spec = if phase == Phase::Up { Some(FabricSpec::load(&file(&name, UP))?) } else { None };
            let topology = spec.as_ref().map(Topology::new);
            Ok(Listed { name, phase, spec, topology })
        })
        .collect()
}

fn of_file(path: &Path) -> Option<(String, Phase)> {
    let phase = match path.extension()?.to_str()? {
        UP => Phase::Up,
        BUILDING => Phase::Unfinished,
        _ => return None,
    };
    Some((path.file_stem()?.to_str()?.to_owned(), phase))
}

fn of_namespace(namespace: &str) -> Option<&str> {
    Some(namespace.strip_prefix(PREFIX)?.split_once('-')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::topology::namespace;

    #[test]
    fn a_namespace_says_whose_it_is() {
        assert_eq!(of_namespace(&namespace("a_b", "h-0")), Some("a_b"));
        assert_eq!(of_namespace("mccs-x"), None);
        assert_eq!(of_namespace("other-x-h0"), None);
    }

    #[test]
    fn a_file_says_how_far_a_fabric_is() {
        assert_eq!(of_file(&file("a", UP)), Some(("a".to_owned(), Phase::Up)));
        assert_eq!(of_file(&file("a", BUILDING)), Some(("a".to_owned(), Phase::Unfinished)));
        assert_eq!(of_file("/run/mccs-fabric/a.txt".as_ref()), None);
    }
}
