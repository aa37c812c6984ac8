//! What is up: one file a fabric, which holds its specification with every default said.
//!
//! ```text
//! claim: NAME.building  ->  finish: NAME.toml  ->  removed with the fabric
//! ```
//!
//! Both files are one inode, which tells a fabric from a later one of the same name.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::error::{FabricError, Result};
use super::netns;
use super::remove::remove;
use super::spec::{FabricSpec, is_name};
use super::topology::{PREFIX, Topology};

/// Where the files are.
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

/// A name that is taken.
#[derive(Debug)]
pub struct Claim {
    /// The fabric.
    pub name: String,
    /// Of the file that stands for it.
    pub inode: u64,
}

impl Claim {
    /// Takes the name of `spec`.
    ///
    /// # Errors
    /// It is taken, or the folder cannot be written.
    pub fn take(spec: &FabricSpec) -> Result<Self> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| FabricError::State { path, source }
        };
        std::fs::create_dir_all(FOLDER).map_err(failed(FOLDER.as_ref()))?;
        let path = file(&spec.name, BUILDING);
        let taken = |what| FabricError::Taken { name: spec.name.clone(), what };
        let mut file = match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(taken(Phase::Unfinished)),
            other => other.map_err(failed(&path))?,
        };
        if self::file(&spec.name, UP).exists() {
            std::fs::remove_file(&path).map_err(failed(&path))?;
            return Err(taken(Phase::Up));
        }
        file.write_all(spec.to_toml().as_bytes()).map_err(failed(&path))?;
        let inode = file.metadata().map_err(failed(&path))?.ino();
        Ok(Claim { name: spec.name.clone(), inode })
    }

    /// Says that the fabric is up.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn finish(&self) -> Result<()> {
        let path = file(&self.name, BUILDING);
        std::fs::rename(&path, file(&self.name, UP)).map_err(|source| FabricError::State { path, source })
    }

    /// Removes the fabric, if the name still stands for what was claimed.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn remove(&self) -> Result<()> {
        let inode = |suffix| file(&self.name, suffix).metadata().ok().map(|metadata| metadata.ino());
        if [BUILDING, UP].into_iter().any(|suffix| inode(suffix) == Some(self.inode)) {
            remove(&self.name)?;
        }
        Ok(())
    }
}

/// Gives a name back; says whether it was taken.
///
/// # Errors
/// The folder cannot be written.
pub fn forget(name: &str) -> Result<bool> {
    let mut taken = false;
    for suffix in [UP, BUILDING] {
        let path = file(name, suffix);
        match std::fs::remove_file(&path) {
            Ok(()) => taken = true,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(FabricError::State { path, source }),
        }
    }
    Ok(taken)
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
    /// What it is; absent where it is unfinished.
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
