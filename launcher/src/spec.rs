//! A [`Plan`]: every host with the way to it, every process with its program, arguments, variables,
//! folder and log.
//!
//! A plan is data. `--dry-run` shows it, `run` carries it out; nothing is decided afterwards, except what only a host
//! reached over ssh knows: whether its programs are there.

mod cluster;
mod planner;
mod show;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use mccs_config::DurationText;
use serde::{Serialize, Serializer};

pub use self::planner::service_config;
use crate::host;

/// Purpose of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The service of its host.
    Service,
    /// A rank of a job.
    Rank {
        /// The job's name.
        job: String,
        /// From 0.
        rank: u32,
    },
    /// An operator's view.
    Operator {
        /// Its place in the file.
        index: usize,
    },
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Service => f.write_str("service"),
            Role::Rank { job, rank } => write!(f, "{job} {rank}"),
            Role::Operator { index } => write!(f, "operator {index}"),
        }
    }
}

/// One process.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessSpec {
    /// Its place among all processes of the plan.
    pub id: u32,
    /// Its purpose.
    pub role: Role,
    /// Its name for people: its role, and its host if the file has hosts.
    pub label: String,
    /// Index of its host.
    pub host: usize,
    /// Full path of its executable; the name as written where there is none, or where only the host knows.
    pub program: PathBuf,
    /// Whether the executable was found; none where only the host knows.
    pub found: Option<bool>,
    /// Arguments after the program.
    pub arguments: Vec<String>,
    /// Variables added to the launcher's own, or to those of a login over ssh.
    pub env: BTreeMap<String, String>,
    /// Folder that it starts in; none for where ssh starts it.
    pub working_dir: Option<PathBuf>,
    /// Keeps its output.
    pub log: PathBuf,
}

/// A file that only its host is to see, and no reader of a plan.
#[derive(Clone)]
pub struct PrivateFile {
    /// Name in the host's private folder.
    pub name: String,
    /// Content.
    pub content: String,
}

impl fmt::Debug for PrivateFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateFile({:?})", self.name)
    }
}

/// A service of a run.
#[derive(Debug, Clone, Serialize)]
pub struct ServiceSpec {
    /// Its process.
    pub process: ProcessSpec,
    /// Content of its configuration.
    pub config: String,
    /// Name of its configuration in the host's private folder.
    pub config_name: String,
    /// Path of a copy.
    pub config_copy: PathBuf,
    /// Its certificates and its key, where services find each other.
    #[serde(skip)]
    pub keys: Vec<PrivateFile>,
}

impl ServiceSpec {
    /// The files that its host must have in its private folder: names and contents.
    pub fn files(&self) -> impl Iterator<Item = (String, String)> {
        let keys = self.keys.iter().map(|file| (file.name.clone(), file.content.clone()));
        std::iter::once((self.config_name.clone(), self.config.clone())).chain(keys)
    }
}

/// A host of a run.
#[derive(Debug, Clone, Serialize)]
pub struct HostSpec {
    /// Its name.
    pub name: String,
    /// Program and arguments that start an agent there.
    pub command: Vec<String>,
    /// Whether it is reached over a network, which may fall silent.
    pub is_remote: bool,
    /// Private folder, of the sockets among others.
    pub runtime_dir: PathBuf,
    /// Programs that the host must have, each with the folder that a path starts from.
    pub programs: Vec<(PathBuf, PathBuf)>,
    /// The service, where the run starts one.
    pub service: Option<ServiceSpec>,
}

/// A job: ranks that start together.
#[derive(Debug, Clone, Serialize)]
pub struct JobSpec {
    /// Its name.
    pub name: String,
    /// Its processes, by rank.
    pub ranks: Vec<ProcessSpec>,
    /// From the moment that all services are ready, or that the job of `after` has ended.
    #[serde(serialize_with = "as_text")]
    pub start: Duration,
    /// Index of a job that must have ended well before.
    pub after: Option<usize>,
    /// From its start to its last rank's end.
    #[serde(serialize_with = "as_optional_text")]
    pub timeout: Option<Duration>,
}

/// An operator's view.
#[derive(Debug, Clone, Serialize)]
pub struct ViewSpec {
    /// Its processes, one a host.
    pub processes: Vec<ProcessSpec>,
    /// From the moment that all services are ready; none for the end.
    #[serde(serialize_with = "as_optional_text")]
    pub after: Option<Duration>,
}

/// Everything that a run starts.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Folder of the logs.
    pub output_dir: PathBuf,
    /// Whether it stays when all went well.
    pub keep_output: bool,
    /// Whether lines get their process's label.
    pub prefix: bool,
    /// Whether the file has hosts, so that people are told them.
    pub names_hosts: bool,
    /// To reach all hosts.
    #[serde(serialize_with = "as_text")]
    pub connect_timeout: Duration,
    /// For each service to say that it is ready.
    #[serde(serialize_with = "as_text")]
    pub ready_timeout: Duration,
    /// For all jobs and views.
    #[serde(serialize_with = "as_text")]
    pub timeout: Duration,
    /// From asking to killing.
    #[serde(serialize_with = "as_text")]
    pub grace: Duration,
    /// How long the launcher may be silent to a far host.
    #[serde(serialize_with = "as_text")]
    pub lost_after: Duration,
    /// The hosts, in the file's order.
    pub hosts: Vec<HostSpec>,
    /// The jobs, in the file's order.
    pub jobs: Vec<JobSpec>,
    /// The operator's views, in the file's order.
    pub views: Vec<ViewSpec>,
}

// Serde hands a field's serializer a reference.
fn as_text<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&DurationText(*time))
}

#[expect(clippy::ref_option, reason = "serde hands a field's serializer a reference")]
fn as_optional_text<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(DurationText).serialize(serializer)
}

impl Plan {
    /// Every process, by its `id`.
    pub fn processes(&self) -> impl Iterator<Item = &ProcessSpec> {
        let services = self.hosts.iter().filter_map(|host| host.service.as_ref()).map(|service| &service.process);
        let ranks = self.jobs.iter().flat_map(|job| &job.ranks);
        services.chain(ranks).chain(self.views.iter().flat_map(|view| &view.processes))
    }

    /// Refuses a plan whose executables are not all on this machine, as far as they are for this machine.
    ///
    /// # Errors
    /// Names each that is missing, and where it was looked for.
    pub fn require_programs(&self) -> Result<()> {
        let missing: BTreeSet<_> = self
            .processes()
            .filter(|process| process.found == Some(false))
            .map(|process| process.program.display().to_string())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let beside = host::own_folder().unwrap_or_default();
        bail!(
            "no executable {}: a name is looked up in {} and in PATH, a path from the job's folder; \
             `cargo build --workspace --bins` builds this project's",
            missing.into_iter().collect::<Vec<_>>().join(", "),
            beside.display()
        )
    }
}

#[cfg(test)]
mod tests;
