//! From a job file to a [`Plan`]: every process with its program, arguments, variables, folder and log.
//!
//! A plan is data. `--dry-run` shows it, `run` carries it out; nothing is decided afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mccs_config::job::{Job, Prefix};
use mccs_config::service::TenantConfig;
use mccs_config::{DurationText, JobFile, ServiceConfig};
use serde::{Serialize, Serializer};

use crate::host;

/// The service's executable where the file names none.
const SERVICE_PROGRAM: &str = "mccs-service";
/// The generated configuration's name in the output folder.
const SERVICE_FILE: &str = "service.toml";

/// What a process is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The service.
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
    /// What it is for.
    pub role: Role,
    /// Full path of its executable, or the name as written where there is none.
    pub program: PathBuf,
    /// Whether the executable was found.
    pub found: bool,
    /// Arguments after the program.
    pub arguments: Vec<String>,
    /// Variables added to the launcher's own.
    pub env: BTreeMap<String, String>,
    /// Folder that it starts in.
    pub working_dir: PathBuf,
    /// Keeps its output.
    pub log: PathBuf,
}

/// The service of a run.
#[derive(Debug, Clone, Serialize)]
pub struct ServiceSpec {
    /// Its process.
    pub process: ProcessSpec,
    /// Content of its configuration.
    pub config: String,
    /// Where that is written.
    pub config_path: PathBuf,
    /// Time to say that it is ready.
    #[serde(serialize_with = "as_text")]
    pub ready_timeout: Duration,
}

/// A job: ranks that start together.
#[derive(Debug, Clone, Serialize)]
pub struct JobSpec {
    /// Its name.
    pub name: String,
    /// Its processes, by rank.
    pub ranks: Vec<ProcessSpec>,
    /// From the moment that the service is ready.
    #[serde(serialize_with = "as_text")]
    pub start_after: Duration,
    /// From its start to its last rank's end.
    #[serde(serialize_with = "as_optional_text")]
    pub timeout: Option<Duration>,
}

/// An operator's view.
#[derive(Debug, Clone, Serialize)]
pub struct ViewSpec {
    /// Its process.
    pub process: ProcessSpec,
    /// From the moment that the service is ready; none for the end.
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
    /// Private folder of the sockets.
    pub runtime_dir: PathBuf,
    /// Whether lines get their process's name.
    pub prefix: bool,
    /// For all jobs and views.
    #[serde(serialize_with = "as_text")]
    pub timeout: Duration,
    /// From asking to killing.
    #[serde(serialize_with = "as_text")]
    pub grace: Duration,
    /// The service, where the run starts one.
    pub service: Option<ServiceSpec>,
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

/// The configuration of the service that `file`'s jobs use: of a new one with its sockets in `runtime_dir`, each tenant
/// its own and open to this user; or of the one that runs.
///
/// # Errors
/// The file that it names is refused, or knows not all tenants.
pub fn service_config(file: &JobFile, runtime_dir: &Path) -> Result<ServiceConfig> {
    let mut config = match (&file.service.config, &file.service.config_file) {
        (Some(config), _) => config.clone(),
        (None, Some(path)) => ServiceConfig::load(&file.directory.join(path))?,
        (None, None) => ServiceConfig::default(),
    };
    let names: BTreeSet<&str> = file.jobs.iter().map(Job::tenant).collect();
    let known = |name: &str| config.tenants.iter().find(|tenant| tenant.name == name);
    if !file.service.start {
        if let Some(name) = names.iter().find(|name| known(name).is_none()) {
            bail!("the running service's configuration has no tenant {name:?}");
        }
        return Ok(config);
    }
    config.tenants = names
        .iter()
        .map(|name| TenantConfig {
            socket: format!("{name}.sock").into(),
            // The folder is private to this user already.
            uids: None,
            ..known(name).cloned().unwrap_or_else(|| TenantConfig::new(*name, ""))
        })
        .collect();
    config.service.runtime_dir = Some(runtime_dir.to_owned());
    config.service.control_socket = None;
    ServiceConfig::parse(&config.to_toml(), "generated service.toml").map_err(Into::into)
}

/// What all processes of a plan have in common while it is made.
struct Planner<'a> {
    file: &'a JobFile,
    config: ServiceConfig,
    current_dir: PathBuf,
    output_dir: PathBuf,
}

impl Plan {
    /// Plans the run of `file`, read from `path`, with its sockets in `runtime_dir`.
    ///
    /// # Errors
    /// As [`service_config`]. A missing executable is none: see [`Plan::require_programs`].
    pub fn new(path: &Path, file: &JobFile, runtime_dir: &Path) -> Result<Plan> {
        let current_dir = std::env::current_dir().context("the current folder is gone")?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let output_dir =
            file.run.output_dir.clone().unwrap_or_else(|| format!("out/{stem}-{}", std::process::id()).into());
        let planner = Planner {
            file,
            config: service_config(file, runtime_dir)?,
            output_dir: current_dir.join(output_dir),
            current_dir,
        };
        Ok(Plan {
            keep_output: file.run.keep_output,
            runtime_dir: runtime_dir.to_owned(),
            prefix: file.run.prefix == Prefix::All,
            timeout: file.run.timeout.0,
            grace: file.run.grace.0,
            service: file.service.start.then(|| planner.service()),
            jobs: file.jobs.iter().map(|job| planner.job(job)).collect::<Result<_>>()?,
            views: planner.views(),
            output_dir: planner.output_dir,
        })
    }

    /// Every process, in the order of the file.
    pub fn processes(&self) -> impl Iterator<Item = &ProcessSpec> {
        let service = self.service.iter().map(|service| &service.process);
        let ranks = self.jobs.iter().flat_map(|job| &job.ranks);
        service.chain(ranks).chain(self.views.iter().map(|view| &view.process))
    }

    /// Refuses a plan whose executables are not all there.
    ///
    /// # Errors
    /// Names each that is missing, and where it was looked for.
    pub fn require_programs(&self) -> Result<()> {
        let missing: BTreeSet<_> = self
            .processes()
            .filter(|process| !process.found)
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

impl Planner<'_> {
    fn process(&self, role: Role, words: &[String], working_dir: &Path) -> ProcessSpec {
        let log = match &role {
            Role::Service => "service.log".to_owned(),
            Role::Rank { job, rank } => format!("{job}.{rank}.log"),
            Role::Operator { index } => format!("operator-{index}.log"),
        };
        let program = Path::new(words.first().map_or("", String::as_str));
        let found = host::find_program(program, working_dir);
        ProcessSpec {
            role,
            found: found.is_some(),
            program: found.unwrap_or_else(|| program.to_owned()),
            arguments: words.iter().skip(1).cloned().collect(),
            env: BTreeMap::new(),
            working_dir: working_dir.to_owned(),
            log: self.output_dir.join(log),
        }
    }

    fn service(&self) -> ServiceSpec {
        let binary = self.file.service.binary.as_deref();
        let program = binary.unwrap_or(Path::new(SERVICE_PROGRAM));
        let config_path = self.output_dir.join(SERVICE_FILE);
        let words = [program.display().to_string(), "--config".to_owned(), config_path.display().to_string()];
        ServiceSpec {
            process: self.process(Role::Service, &words, &self.current_dir),
            config: self.config.to_toml(),
            config_path,
            ready_timeout: self.file.service.ready_timeout.0,
        }
    }

    fn job(&self, job: &Job) -> Result<JobSpec> {
        let tenant = self
            .config
            .tenants
            .iter()
            .find(|tenant| tenant.name == job.tenant())
            .context("invariant: the configuration has every job's tenant")?;
        let socket = self.config.tenant_socket(tenant);
        let unique_id: String = rand::random::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let working_dir = match &job.working_dir {
            Some(dir) => self.current_dir.join(&self.file.directory).join(dir),
            None => self.current_dir.clone(),
        };
        let ranks = (0..job.ranks).map(|rank| {
            let role = Role::Rank { job: job.name.clone(), rank };
            let mut process = self.process(role, &job.command, &working_dir);
            process.env.clone_from(&job.env);
            let own = [
                ("MCCS_SOCKET", socket.display().to_string()),
                ("MCCS_RANK", rank.to_string()),
                ("MCCS_NRANKS", job.ranks.to_string()),
                ("MCCS_UNIQUE_ID", unique_id.clone()),
                ("MCCS_JOB", job.name.clone()),
                // All ranks are on this host.
                ("MCCS_ROOT_ADDRESS", String::new()),
            ];
            process.env.extend(own.map(|(name, value)| (name.to_owned(), value)));
            process
        });
        Ok(JobSpec {
            name: job.name.clone(),
            ranks: ranks.collect(),
            start_after: job.start_after.0,
            timeout: job.timeout.map(|timeout| timeout.0),
        })
    }

    fn views(&self) -> Vec<ViewSpec> {
        let control = self.config.control_socket().display().to_string();
        let output = self.output_dir.display().to_string();
        let view = |(index, view): (usize, &mccs_config::job::OperatorView)| {
            let words: Vec<String> = view
                .command
                .iter()
                .map(|word| word.replace("{control}", &control).replace("{output}", &output))
                .collect();
            ViewSpec {
                process: self.process(Role::Operator { index }, &words, &self.current_dir),
                after: view.after.map(|after| after.0),
            }
        };
        self.file.run.operator.iter().enumerate().map(view).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "output   {}", self.output_dir.display())?;
        writeln!(f, "sockets  {}", self.runtime_dir.display())?;
        writeln!(f, "timeout  {}", DurationText(self.timeout))?;
        if let Some(service) = &self.service {
            writeln!(f, "\n# {}", service.config_path.display())?;
            writeln!(f, "{}", service.config.trim_end())?;
            write!(f, "\n{}", service.process)?;
        }
        for job in &self.jobs {
            writeln!(f, "\n# job {} at {}", job.name, DurationText(job.start_after))?;
            job.ranks.iter().try_for_each(|rank| rank.fmt(f))?;
        }
        for view in &self.views {
            match view.after {
                Some(after) => writeln!(f, "\n# view at {}", DurationText(after))?,
                None => writeln!(f, "\n# view at the end")?,
            }
            view.process.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for ProcessSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.role)?;
        for (name, value) in &self.env {
            write!(f, " {name}={value}")?;
        }
        write!(f, " {}", self.program.display())?;
        if !self.found {
            f.write_str(" (not found)")?;
        }
        for argument in &self.arguments {
            if argument.is_empty() || argument.contains(char::is_whitespace) {
                write!(f, " {argument:?}")?;
            } else {
                write!(f, " {argument}")?;
            }
        }
        writeln!(f, " > {}", self.log.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Plan {
        let file = JobFile::parse(text, "jobs/two.toml").unwrap();
        Plan::new(Path::new("jobs/two.toml"), &file, Path::new("/run/p")).unwrap()
    }

    const TWO: &str = r#"
        [[service.config.tenant]]
        name = "a"
        max_memory = "1GiB"
        uids = [4242]
        [[run.operator]]
        command = ["sh", "{control}", "x{output}y"]
        [[job]]
        name = "j"
        tenant = "a"
        ranks = 2
        command = ["sh", "-c", "true"]
        env = { X = "1" }
        working_dir = "sub"
        [[job]]
        name = "k"
        ranks = 1
        command = ["no-such-program"]
    "#;

    #[test]
    fn each_tenant_gets_its_own_socket_and_keeps_its_quota() {
        let config = ServiceConfig::parse(&plan(TWO).service.unwrap().config, "x").unwrap();
        let tenants: Vec<_> =
            config.tenants.iter().map(|t| (t.name.as_str(), t.socket.to_str().unwrap(), t.max_memory.0)).collect();
        assert_eq!(tenants, [("a", "a.sock", 1 << 30), ("k", "k.sock", 4 << 30)]);
        assert_eq!(config.tenants[0].uids, None);
        assert_eq!(config.runtime_dir(), Path::new("/run/p"));
    }

    #[test]
    fn ranks_know_who_they_are() {
        let plan = plan(TWO);
        let env = |job: usize, rank: usize, name: &str| plan.jobs[job].ranks[rank].env[name].clone();
        assert_eq!(env(0, 1, "MCCS_RANK"), "1");
        assert_eq!(env(0, 1, "MCCS_NRANKS"), "2");
        assert_eq!(env(0, 0, "MCCS_SOCKET"), "/run/p/a.sock");
        assert_eq!(env(1, 0, "MCCS_SOCKET"), "/run/p/k.sock");
        assert_eq!(env(0, 0, "X"), "1");
        assert_eq!(env(0, 0, "MCCS_UNIQUE_ID").len(), 32);
        assert_eq!(env(0, 0, "MCCS_UNIQUE_ID"), env(0, 1, "MCCS_UNIQUE_ID"));
        assert_ne!(env(0, 0, "MCCS_UNIQUE_ID"), env(1, 0, "MCCS_UNIQUE_ID"));
        assert!(plan.jobs[0].ranks[0].working_dir.ends_with("jobs/sub"));
    }

    #[test]
    fn views_name_the_control_socket_and_missing_programs_are_named() {
        let plan = plan(TWO);
        let arguments = &plan.views[0].process.arguments;
        assert_eq!(arguments[0], "/run/p/mccs-control.sock");
        assert_eq!(arguments[1], format!("x{}y", plan.output_dir.display()));
        let error = plan.require_programs().unwrap_err().to_string();
        assert!(error.contains("no-such-program"), "{error}");
        assert!(plan.to_string().contains("no-such-program (not found)"));
    }
}
