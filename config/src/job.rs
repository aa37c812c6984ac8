//! `job.toml`: what `mccs-launch` runs: hosts with a service each, jobs with their ranks and
//! environment, and operators' views.
//!
//! A file without hosts is about this machine. `service.config_file` and a job's `working_dir` are relative to the job
//! file; `run.output_dir` is relative to where the launcher is started.

mod host;
mod placement;
mod source;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::host::{Host, LOCAL};
pub use self::placement::{Place, Placement};
use crate::document;
use crate::error::ConfigError;
use crate::limits;
use crate::units::DurationText;
use crate::validate::{Problem, Problems, Validate, nearest};

/// Variables that the launcher gives every rank; a job cannot set them.
pub const RANK_VARIABLES: [&str; 8] = [
    "MCCS_SOCKET",
    "MCCS_RANK",
    "MCCS_NRANKS",
    "MCCS_UNIQUE_ID",
    "MCCS_JOB",
    "MCCS_ROOT_ADDRESS",
    "MCCS_HOST",
    "MCCS_DEVICE",
];

/// A whole `job.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    /// The services that the jobs use, one a host.
    #[serde(default)]
    pub service: ServiceRun,
    /// How hosts are reached over ssh.
    #[serde(default)]
    pub ssh: Ssh,
    /// The hosts. None: this machine, as [`Host::local`].
    #[serde(default, rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
    /// How the run is watched and where its output goes.
    #[serde(default)]
    pub run: Run,
    /// The jobs, at least one.
    #[serde(rename = "job")]
    pub jobs: Vec<Job>,
    /// Folder of the file, which relative paths start from. Set by `load` and `parse`.
    #[serde(skip)]
    pub directory: PathBuf,
    /// The text that it was read from, and the file's name. Set by `load` and `parse`.
    #[serde(skip)]
    source: (String, String),
}

/// `[service]`: the services that the jobs use, one a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ServiceRun {
    /// Whether the launcher starts them, in private runtime folders. Otherwise `config_file` is of those that run.
    pub start: bool,
    /// The executable. Absent: `mccs-service` beside the launcher, then in `PATH`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary: Option<PathBuf>,
    /// A `service.toml`, or the pattern of one with places such as `{host}`, filled in for each host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_file: Option<PathBuf>,
    /// The content of a `service.toml`, which may have places too; read by [`JobFile::service_config`]. The launcher
    /// adds the tenants that jobs name, and gives each its own socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(with = "Option<serde_json::Map<String, serde_json::Value>>"))]
    pub config: Option<toml::Table>,
    /// Time to say that it is ready.
    pub ready_timeout: DurationText,
}

impl Default for ServiceRun {
    fn default() -> Self {
        ServiceRun { start: true, binary: None, config_file: None, config: None, ready_timeout: DurationText::secs(30) }
    }
}

/// `[ssh]`: how hosts are reached over ssh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Ssh {
    /// The client.
    pub program: String,
    /// Its options for all hosts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The launcher's executable on those hosts. Absent: where it is here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<PathBuf>,
    /// A host that hears nothing from the launcher for so long ends everything. Otherwise a dead network would leave it.
    pub lost_after: DurationText,
}

impl Default for Ssh {
    fn default() -> Self {
        Ssh { program: "ssh".to_owned(), options: Vec::new(), agent: None, lost_after: DurationText::secs(60) }
    }
}

/// `[run]`: how the run is watched and where its output goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// Time to reach all hosts.
    pub connect_timeout: DurationText,
    /// From the first job's start to the last process's end; then everything is ended.
    pub timeout: DurationText,
    /// Time between asking a process to end and killing it.
    pub grace: DurationText,
    /// Folder of the logs. Absent: `out/<file's name>-<launcher's pid>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_dir: Option<PathBuf>,
    /// Whether the folder stays when all went well. It always stays otherwise.
    pub keep_output: bool,
    /// What stands before a process's lines on the terminal.
    pub prefix: Prefix,
    /// What the operator looks at while the service runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operator: Vec<OperatorView>,
}

impl Default for Run {
    fn default() -> Self {
        Run {
            connect_timeout: DurationText::secs(30),
            timeout: DurationText::secs(600),
            grace: DurationText::secs(5),
            output_dir: None,
            keep_output: true,
            prefix: Prefix::All,
            operator: Vec::new(),
        }
    }
}

/// What stands before a process's lines on the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Prefix {
    /// `[job rank]`, or the process's role; and the host's name, where the file has hosts.
    All,
    /// Nothing.
    None,
}

/// `[[run.operator]]`: a command whose output shows the service from outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct OperatorView {
    /// Program and arguments; `{control}` is the path of the control socket, `{output}` the folder of the logs.
    pub command: Vec<String>,
    /// Host that it runs on. Absent: each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// From the start of the jobs. Absent, or later than their end: when all ranks have ended well, before the service is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
}

/// `[[job]]`: processes that form one communicator's ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Name, as in `MCCS_JOB`, prefixes and log files.
    pub name: String,
    /// Tenant that its ranks connect as. Absent: the job's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Processes. May be left out beside `place`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u32>,
    /// Hosts that they run on. Absent: all, in the file's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// In which order they go to the hosts.
    #[serde(default)]
    pub placement: Placement,
    /// Instead of the two above: for each rank `host` or `host:device`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub place: Vec<String>,
    /// Program and arguments. A program without a slash is looked up beside the launcher, then in `PATH`.
    pub command: Vec<String>,
    /// Variables added to the launcher's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Folder that the processes start in. Absent: the launcher's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<PathBuf>,
    /// From the moment that all services are ready, or that the job of `after` has ended.
    #[serde(default, alias = "start_after", skip_serializing_if = "is_zero")]
    pub start: DurationText,
    /// A job further up in the file that must have ended well before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// From the job's start to its last rank's end; then everything is ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
}

fn is_zero(time: &DurationText) -> bool {
    *time == DurationText::default()
}

impl Job {
    /// The tenant that its ranks connect as.
    #[must_use]
    pub fn tenant(&self) -> &str {
        self.tenant.as_deref().unwrap_or(&self.name)
    }
}

impl JobFile {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read or is refused; the error's text names file, line, key and what would be right.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&document::read_text(path, Self::BYTES_MAX)?, &path.display().to_string())
    }

    /// Reads and checks `text`, which complaints call `file_name`.
    ///
    /// # Errors
    /// As [`JobFile::load`].
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ConfigError> {
        let mut file: JobFile = document::read(text, file_name)?;
        Path::new(file_name).parent().unwrap_or(Path::new("")).clone_into(&mut file.directory);
        file.source = (text.to_owned(), file_name.to_owned());
        let mut found = document::check(&file, text, file_name);
        found.extend(file.check_services());
        if found.is_empty() {
            return Ok(file);
        }
        found.sort_by_key(|d| (d.line, d.column));
        found.dedup();
        Err(ConfigError::Invalid(found))
    }

    /// The file's hosts, or this machine.
    #[must_use]
    pub fn hosts(&self) -> Vec<Host> {
        if self.hosts.is_empty() { vec![Host::local()] } else { self.hosts.clone() }
    }
}

impl Validate for JobFile {
    fn validate(&self, problems: &mut Problems) {
        self.service.validate(problems);
        self.ssh.validate(problems);
        self.run.validate(problems);
        self.validate_hosts(problems);
        let count = u32::try_from(self.jobs.len()).unwrap_or(u32::MAX);
        problems.within("job", &count, &limits::JOBS);
        let hosts = self.hosts();
        for (i, job) in self.jobs.iter().enumerate() {
            let key = format!("job[{i}]");
            job.validate_at(&key, problems);
            job.validate_places(&key, &hosts, problems);
            if let Some(j) = self.jobs[..i].iter().position(|other| other.name == job.name) {
                problems.add(format!("{key}.name"), format!("job[{j}] is already called {:?}", job.name));
            }
            if let Some(after) = &job.after
                && let Some(why) = self.cannot_follow(i, after)
            {
                problems.add(format!("{key}.after"), why);
            }
        }
        for (i, view) in self.run.operator.iter().enumerate() {
            if let Some(Err(why)) = view.host.as_ref().map(|host| placement::find(host, &hosts)) {
                problems.add(format!("run.operator[{i}].host"), why);
            }
        }
    }
}

impl JobFile {
    fn validate_hosts(&self, problems: &mut Problems) {
        let count = u32::try_from(self.hosts.len()).unwrap_or(u32::MAX);
        if count > limits::HOSTS.max {
            problems.within("host", &count, &limits::HOSTS);
        }
        for (i, host) in self.hosts.iter().enumerate() {
            host.validate_at(&format!("host[{i}]"), problems);
            if let Some(j) = self.hosts[..i].iter().position(|other| other.name == host.name) {
                problems.add(format!("host[{i}].name"), format!("host[{j}] is already called {:?}", host.name));
            }
        }
    }

    /// Why the `i`-th job cannot come after the one called `name`. Only jobs further up can be waited for, so that no
    /// two ever wait for each other.
    fn cannot_follow(&self, i: usize, name: &str) -> Option<String> {
        let above = self.jobs[..i].iter().map(|job| job.name.as_str());
        if above.clone().any(|job| job == name) {
            return None;
        }
        if self.jobs[i..].iter().any(|job| job.name == name) {
            return Some(format!("a job waits for one that stands above it, and {name:?} does not"));
        }
        let suggestion = nearest(name, above).map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        Some(format!("there is no job {name:?}{suggestion}"))
    }
}

impl Validate for Ssh {
    fn validate(&self, problems: &mut Problems) {
        if self.program.is_empty() {
            problems.add("ssh.program", "is empty");
        }
        problems.within("ssh.lost_after", &self.lost_after, &limits::RUN_TIME);
    }
}

impl Validate for ServiceRun {
    fn validate(&self, problems: &mut Problems) {
        problems.within("service.ready_timeout", &self.ready_timeout, &limits::RUN_TIME);
        if self.config.is_some() && self.config_file.is_some() {
            problems.add("service.config", "stands beside service.config_file; keep one of the two");
        }
        if !self.start {
            if self.config_file.is_none() {
                problems.add(
                    "service.start",
                    "is false, so service.config_file must name the service.toml of the one that runs",
                );
            }
            if self.binary.is_some() {
                problems.add("service.binary", "has no use where service.start is false");
            }
        }
    }
}

impl Validate for Run {
    fn validate(&self, problems: &mut Problems) {
        problems.within("run.connect_timeout", &self.connect_timeout, &limits::RUN_TIME);
        problems.within("run.timeout", &self.timeout, &limits::RUN_TIME);
        problems.within("run.grace", &self.grace, &limits::RUN_TIME);
        for (i, view) in self.operator.iter().enumerate() {
            let key = format!("run.operator[{i}]");
            command(problems, &key, &view.command);
            if let Some(after) = &view.after {
                problems.within(format!("{key}.after"), after, &limits::RUN_TIME);
            }
        }
    }
}

impl Job {
    fn validate_at(&self, key: &str, problems: &mut Problems) {
        problems.name(format!("{key}.name"), &self.name);
        if let Some(tenant) = &self.tenant {
            problems.name(format!("{key}.tenant"), tenant);
        }
        command(problems, key, &self.command);
        environment(problems, key, &self.env);
        if self.start > limits::RUN_TIME.max {
            problems.within(format!("{key}.start"), &self.start, &limits::RUN_TIME);
        }
        if let Some(timeout) = &self.timeout {
            problems.within(format!("{key}.timeout"), timeout, &limits::RUN_TIME);
        }
    }
}

impl Job {
    fn validate_places(&self, key: &str, hosts: &[Host], problems: &mut Problems) {
        let ranks = self.ranks.unwrap_or_else(|| u32::try_from(self.place.len()).unwrap_or(u32::MAX));
        if self.ranks.is_some() || !self.place.is_empty() {
            let before = problems.count();
            problems.within(format!("{key}.ranks"), &ranks, &limits::RANKS);
            if problems.count() > before {
                return;
            }
        }
        if let Err(Problem { key: at, message: why }) = self.places(hosts) {
            problems.add(format!("{key}.{at}").trim_end_matches('.'), why);
        }
    }
}

fn environment(problems: &mut Problems, key: &str, env: &BTreeMap<String, String>) {
    for (name, value) in env {
        let at = format!("{key}.env.{name}");
        if RANK_VARIABLES.contains(&name.as_str()) {
            problems.add(at, "is set by the launcher for each rank; leave it out");
        } else if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            problems.add(at, "a variable has a name without '=', and no NUL in name or value");
        }
    }
}

fn command(problems: &mut Problems, key: &str, words: &[String]) {
    let key = format!("{key}.command");
    match words.first() {
        None => problems.add(key, "is empty; the first word is the program"),
        Some(program) if program.is_empty() => problems.add(key, "its first word, the program, is empty"),
        Some(_) if words.iter().any(|word| word.contains('\0')) => {
            problems.add(key, "a word of it holds a NUL, which no argument can");
        }
        Some(_) => {}
    }
}

#[cfg(test)]
mod tests;
