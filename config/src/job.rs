//! `job.toml`: what the launcher runs. One service, the jobs that use it, and how they are watched.
//!
//! `service.config_file` and a job's `working_dir` are relative to the job file; `run.output_dir` is relative to where
//! the launcher is started.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::document;
use crate::error::ConfigError;
use crate::limits;
use crate::service::ServiceConfig;
use crate::units::DurationText;
use crate::validate::{Problems, Validate};

/// Variables that the launcher gives every rank; a job cannot set them.
pub const RANK_VARIABLES: [&str; 6] =
    ["MCCS_SOCKET", "MCCS_RANK", "MCCS_NRANKS", "MCCS_UNIQUE_ID", "MCCS_JOB", "MCCS_ROOT_ADDRESS"];

/// A whole `job.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    /// The service that the jobs use.
    #[serde(default)]
    pub service: ServiceRun,
    /// How the run is watched and where its output goes.
    #[serde(default)]
    pub run: Run,
    /// The jobs, at least one.
    #[serde(rename = "job")]
    pub jobs: Vec<Job>,
    /// Folder of the file, which relative paths start from. Set by `load` and `parse`.
    #[serde(skip)]
    pub directory: PathBuf,
}

/// `[service]`: the service that the jobs use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceRun {
    /// Whether the launcher starts one, in a private runtime folder. Otherwise `config_file` is of the one that runs.
    pub start: bool,
    /// The executable. Absent: `mccs-service` beside the launcher, then in `PATH`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binary: Option<PathBuf>,
    /// A `service.toml`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_file: Option<PathBuf>,
    /// The content of a `service.toml`. The launcher adds the tenants that jobs name, and gives each its own socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<ServiceConfig>,
    /// Time to say that it is ready.
    pub ready_timeout: DurationText,
}

impl Default for ServiceRun {
    fn default() -> Self {
        ServiceRun { start: true, binary: None, config_file: None, config: None, ready_timeout: DurationText::secs(30) }
    }
}

/// `[run]`: how the run is watched and where its output goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
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
#[serde(rename_all = "snake_case")]
pub enum Prefix {
    /// `[job rank]`, or the process's role.
    All,
    /// Nothing.
    None,
}

/// `[[run.operator]]`: a command whose output shows the service from outside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorView {
    /// Program and arguments; `{control}` is the path of the control socket, `{output}` the folder of the logs.
    pub command: Vec<String>,
    /// From the start of the jobs. Absent, or later than their end: when all ranks have ended well, before the service is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<DurationText>,
}

/// `[[job]]`: processes that form one communicator's ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Name, as in `MCCS_JOB`, prefixes and log files.
    pub name: String,
    /// Tenant that its ranks connect as. Absent: the job's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Processes.
    pub ranks: u32,
    /// Program and arguments. A program without a slash is looked up beside the launcher, then in `PATH`.
    pub command: Vec<String>,
    /// Variables added to the launcher's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Folder that the processes start in. Absent: the launcher's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<PathBuf>,
    /// From the moment that the service is ready.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start_after: DurationText,
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
        document::load(path).map(|file: JobFile| file.in_folder_of(path))
    }

    /// Reads and checks `text`, which complaints call `file_name`.
    ///
    /// # Errors
    /// As [`JobFile::load`].
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ConfigError> {
        document::parse(text, file_name).map(|file: JobFile| file.in_folder_of(Path::new(file_name)))
    }

    fn in_folder_of(mut self, path: &Path) -> Self {
        path.parent().unwrap_or(Path::new("")).clone_into(&mut self.directory);
        self
    }
}

impl Validate for JobFile {
    fn validate(&self, problems: &mut Problems) {
        self.service.validate(problems);
        self.run.validate(problems);
        let count = u32::try_from(self.jobs.len()).unwrap_or(u32::MAX);
        problems.within("job", &count, &limits::JOBS);
        for (i, job) in self.jobs.iter().enumerate() {
            job.validate_at(&format!("job[{i}]"), problems);
            if let Some(j) = self.jobs[..i].iter().position(|other| other.name == job.name) {
                problems.add(format!("job[{i}].name"), format!("job[{j}] is already called {:?}", job.name));
            }
        }
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
        if let Some(config) = &self.config {
            // The launcher gives each tenant its own socket: one that is not set must not count as shared.
            let mut config = config.clone();
            for tenant in &mut config.tenants {
                tenant.socket = format!("{}.sock", tenant.name).into();
            }
            problems.nested("service.config", &config);
            if config.service.runtime_dir.is_some() {
                problems
                    .add("service.config.service.runtime_dir", "is chosen by the launcher for each run; leave it out");
            }
        }
    }
}

impl Validate for Run {
    fn validate(&self, problems: &mut Problems) {
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
        problems.within(format!("{key}.ranks"), &self.ranks, &limits::RANKS);
        command(problems, key, &self.command);
        for (name, value) in &self.env {
            let at = format!("{key}.env.{name}");
            if RANK_VARIABLES.contains(&name.as_str()) {
                problems.add(at, "is set by the launcher for each rank; leave it out");
            } else if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                problems.add(at, "a variable has a name without '=', and no NUL in name or value");
            }
        }
        if self.start_after > limits::RUN_TIME.max {
            problems.within(format!("{key}.start_after"), &self.start_after, &limits::RUN_TIME);
        }
        if let Some(timeout) = &self.timeout {
            problems.within(format!("{key}.timeout"), timeout, &limits::RUN_TIME);
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
mod tests {
    use super::*;
    use crate::error::Diagnostic;

    const JOB: &str = "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"true\"]\n";

    fn refused(text: &str) -> Vec<Diagnostic> {
        let error = JobFile::parse(text, "job.toml").expect_err("the file is wrong");
        error.diagnostics().to_vec()
    }

    fn only(text: &str, line: usize, key: &str, part: &str) {
        let all = refused(text);
        assert_eq!(all.len(), 1, "{all:?}");
        let found = &all[0];
        assert_eq!((found.line, found.key.as_str()), (line, key), "{found}");
        assert!(found.message.contains(part), "{found}");
    }

    #[test]
    fn a_job_needs_a_name_ranks_and_a_command() {
        let file = JobFile::parse(JOB, "jobs/job.toml").unwrap();
        assert_eq!(file.jobs[0].tenant(), "a");
        assert!(file.service.start);
        assert_eq!(file.directory, Path::new("jobs"));
        only("[[job]]\nname = \"a\"\nranks = 1\n", 1, "job[0]", "missing field `command`");
        only("", 1, "", "missing field `job`");
        only("job = []\n", 1, "job", "from 1");
    }

    #[test]
    fn the_example_is_read() {
        let text = include_str!("../examples/job.toml");
        let file = JobFile::parse(text, "job.toml").unwrap();
        assert_eq!(file.jobs.len(), 2);
        assert_eq!(file.run.operator.len(), 2);
        assert_eq!(file.service.config.unwrap().tenants[0].max_memory.0, 1 << 30);
    }

    #[test]
    fn mistakes_in_a_job_get_their_line() {
        only(&format!("{JOB}start = 1\n"), 5, "job[0].start", "did you mean `start_after`?");
        only(&JOB.replace("= 2", "= 0"), 3, "job[0].ranks", "from 1 to 4096");
        only(&JOB.replace("\"true\"", ""), 4, "job[0].command", "is empty");
        only(&JOB.replace("\"a\"", "\"a/b\""), 2, "job[0].name", "\"a/b\"");
        only(&format!("{JOB}timeout = \"0\"\n"), 5, "job[0].timeout", "from 1ms");
        only(&format!("{JOB}[job.env]\nMCCS_RANK = \"1\"\n"), 6, "job[0].env.MCCS_RANK", "launcher");
        only(&format!("{JOB}{JOB}"), 6, "job[1].name", "job[0]");
    }

    #[test]
    fn mistakes_in_the_nested_service_file_get_their_line() {
        let with = |text: &str| format!("{text}\n{JOB}");
        only(&with("[service.config.strategy]\nchannels = 0"), 2, "service.config.strategy.channels", "from 1 to 64");
        only(&with("[service.config.stratgy]"), 1, "service.config.stratgy", "did you mean `strategy`?");
        only(
            &with("[service.config.service]\nruntime_dir = \"/run/x\""),
            2,
            "service.config.service.runtime_dir",
            "chosen by the launcher",
        );
        let two = "[[service.config.tenant]]\nname = \"a\"\n[[service.config.tenant]]\nname = \"b\"";
        JobFile::parse(&with(two), "job.toml").unwrap();
    }

    #[test]
    fn a_running_service_needs_its_file() {
        only(&format!("[service]\nstart = false\n{JOB}"), 2, "service.start", "config_file");
        let text = format!("[service]\nconfig_file = \"x\"\n[service.config]\n{JOB}");
        only(&text, 3, "service.config", "keep one");
    }
}
