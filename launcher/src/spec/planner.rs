//! Plans a job file: the environment of each rank's process (`MCCS_RANK`, `MCCS_NRANKS`,
//! `MCCS_UNIQUE_ID`), programs and folders.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use mccs_config::job::{Host, Job, OperatorView, Prefix};
use mccs_config::service::TenantConfig;
use mccs_config::{JobFile, ServiceConfig};

use super::cluster;
use super::{HostSpec, JobSpec, Plan, PrivateFile, ProcessSpec, Role, ServiceSpec, ViewSpec};
use crate::{host, reach};

/// The service's executable where the file names none.
const SERVICE_PROGRAM: &str = "mccs-service";
/// The generated configuration's name in the private folder of its host.
const SERVICE_FILE: &str = "service.toml";
/// Parent of private folders on hosts whose user's runtime folder is not known from here.
const FAR_PARENT: &str = "/tmp";

/// The configuration of the service on `host`, the `index`-th, that `file`'s jobs use: of a new one with its sockets in
/// `runtime_dir`, each tenant its own and open to this user; or of the one that runs.
///
/// # Errors
/// The file that it names is refused, or knows not all tenants.
pub fn service_config(file: &JobFile, index: usize, host: &Host, runtime_dir: &Path) -> Result<ServiceConfig> {
    let mut config = file.service_config(index, host, runtime_dir)?;
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

/// A host while the plan is made.
pub(super) struct Site {
    pub(super) host: Host,
    pub(super) config: ServiceConfig,
    pub(super) runtime_dir: PathBuf,
    pub(super) keys: Vec<PrivateFile>,
}

/// Common state of all processes of a plan while it is made.
struct Planner<'a> {
    file: &'a JobFile,
    sites: Vec<Site>,
    names_hosts: bool,
    current_dir: PathBuf,
    output_dir: PathBuf,
    next_id: u32,
}

impl Plan {
    /// Plans the run of `file`, read from `path`. `run_name` tells its private folders from other runs'.
    ///
    /// # Errors
    /// As [`service_config`]; or a fabric does not tell its hosts' addresses. A missing executable is none: see
    /// [`Plan::require_programs`].
    pub fn new(path: &Path, file: &JobFile, run_name: &str) -> Result<Plan> {
        let current_dir = std::env::current_dir().context("the current folder is gone")?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let output_dir =
            file.run.output_dir.clone().unwrap_or_else(|| format!("out/{stem}-{}", std::process::id()).into());
        let names_hosts = !file.hosts.is_empty();
        let mut hosts = file.hosts();
        reach::find_addresses(&mut hosts)?;
        let site = |(index, host): (usize, Host)| {
            let runtime_dir = runtime_dir(&host, run_name, names_hosts);
            let config = service_config(file, index, &host, &runtime_dir)?;
            Ok(Site { config, host, runtime_dir, keys: Vec::new() })
        };
        let mut sites: Vec<Site> = hosts.into_iter().enumerate().map(site).collect::<Result<_>>()?;
        if file.service.start {
            cluster::connect(file, &mut sites)?;
        }
        let mut planner =
            Planner { file, sites, names_hosts, output_dir: current_dir.join(output_dir), current_dir, next_id: 0 };
        let run = &file.run;
        let mut plan = Plan {
            keep_output: run.keep_output,
            prefix: run.prefix == Prefix::All,
            names_hosts,
            connect_timeout: run.connect_timeout.0,
            ready_timeout: file.service.ready_timeout.0,
            timeout: run.timeout.0,
            grace: run.grace.0,
            lost_after: file.ssh.lost_after.0,
            hosts: (0..planner.sites.len()).map(|site| planner.host(site)).collect::<Result<_>>()?,
            jobs: file.jobs.iter().map(|job| planner.job(job)).collect::<Result<_>>()?,
            views: run.operator.iter().enumerate().map(|(index, view)| planner.view(index, view)).collect(),
            output_dir: planner.output_dir,
        };
        plan.name_programs();
        Ok(plan)
    }

    /// Tells each host which programs it must have.
    fn name_programs(&mut self) {
        let mut programs = vec![BTreeSet::new(); self.hosts.len()];
        for process in self.processes().filter(|process| process.found.is_none()) {
            let base = process.working_dir.clone().unwrap_or_else(|| ".".into());
            programs[process.host].insert((process.program.clone(), base));
        }
        for (host, programs) in self.hosts.iter_mut().zip(programs) {
            host.programs = programs.into_iter().collect();
        }
    }
}

fn runtime_dir(host: &Host, run_name: &str, names_hosts: bool) -> PathBuf {
    let parent = match (&host.runtime_parent, &host.ssh) {
        (Some(parent), _) => parent.clone(),
        (None, Some(_)) => FAR_PARENT.into(),
        (None, None) => host::private_parent(),
    };
    let name = if names_hosts { format!("mccs-{run_name}-{}", host.name) } else { format!("mccs-{run_name}") };
    parent.join(name)
}

impl Planner<'_> {
    fn process(&mut self, role: Role, site: usize, words: &[String], working_dir: Option<&Path>) -> ProcessSpec {
        let host = &self.sites[site].host;
        let (label, suffix) = match self.names_hosts {
            true => (format!("{role} {}", host.name), format!(".{}", host.name)),
            false => (role.to_string(), String::new()),
        };
        let log = match &role {
            Role::Service => format!("service{suffix}.log"),
            Role::Rank { job, rank } => format!("{job}.{rank}.log"),
            Role::Operator { index } => format!("operator-{index}{suffix}.log"),
        };
        // A login over ssh has its own folder; everything else is this machine.
        let working_dir = working_dir.or_else(|| host.ssh.is_none().then_some(&self.current_dir)).map(Path::to_owned);
        let program = Path::new(words.first().map_or("", String::as_str));
        let base = working_dir.as_deref().unwrap_or(Path::new("."));
        let found = if host.ssh.is_some() { None } else { Some(host::find_program(program, base)) };
        let id = self.next_id;
        self.next_id += 1;
        ProcessSpec {
            id,
            role,
            label,
            host: site,
            found: found.as_ref().map(Option::is_some),
            program: found.flatten().unwrap_or_else(|| program.to_owned()),
            arguments: words.iter().skip(1).cloned().collect(),
            env: host.env.clone(),
            working_dir,
            log: self.output_dir.join(log),
        }
    }

    fn host(&mut self, index: usize) -> Result<HostSpec> {
        let service = if self.file.service.start { Some(self.service(index)) } else { None };
        let site = &self.sites[index];
        Ok(HostSpec {
            name: site.host.name.clone(),
            command: reach::command(&site.host, &self.file.ssh)?,
            is_remote: site.host.ssh.is_some(),
            runtime_dir: site.runtime_dir.clone(),
            programs: Vec::new(),
            service,
        })
    }

    fn service(&mut self, index: usize) -> ServiceSpec {
        let site = &self.sites[index];
        let (config, path) = (site.config.to_toml(), site.runtime_dir.join(SERVICE_FILE));
        let keys = site.keys.clone();
        let copy = if self.names_hosts { format!("service.{}.toml", site.host.name) } else { SERVICE_FILE.to_owned() };
        let program = self.file.service.binary.as_deref().unwrap_or(Path::new(SERVICE_PROGRAM));
        let words = [program.display().to_string(), "--config".to_owned(), path.display().to_string()];
        ServiceSpec {
            process: self.process(Role::Service, index, &words, None),
            config,
            config_name: SERVICE_FILE.to_owned(),
            config_copy: self.output_dir.join(copy),
            keys,
        }
    }

    fn job(&mut self, job: &Job) -> Result<JobSpec> {
        let hosts: Vec<Host> = self.sites.iter().map(|site| site.host.clone()).collect();
        let places = job.places(&hosts).map_err(|wrong| anyhow::anyhow!("job {:?}: {}", job.name, wrong.message))?;
        let unique_id: String = rand::random::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let working_dir = job.working_dir.as_ref().map(|dir| self.current_dir.join(&self.file.directory).join(dir));
        let root = places.first().context("invariant: a job has ranks")?.host;
        // A service whose host has all ranks joins them by itself.
        let spread = places.iter().any(|place| place.host != root);
        let root_address = if spread { self.sites[root].service_name() } else { String::new() };
        let mut ranks = Vec::new();
        for (rank, place) in (0..).zip(&places) {
            let role = Role::Rank { job: job.name.clone(), rank };
            let mut process = self.process(role, place.host, &job.command, working_dir.as_deref());
            process.env.extend(job.env.clone());
            let own: BTreeMap<&str, String> = [
                ("MCCS_SOCKET", self.sites[place.host].tenant_socket(job.tenant())?),
                ("MCCS_RANK", rank.to_string()),
                ("MCCS_NRANKS", places.len().to_string()),
                ("MCCS_UNIQUE_ID", unique_id.clone()),
                ("MCCS_JOB", job.name.clone()),
                ("MCCS_ROOT_ADDRESS", root_address.clone()),
                ("MCCS_HOST", hosts[place.host].name.clone()),
                ("MCCS_DEVICE", place.device.to_string()),
            ]
            .into();
            process.env.extend(own.into_iter().map(|(name, value)| (name.to_owned(), value)));
            ranks.push(process);
        }
        let after = job.after.as_ref().and_then(|name| self.file.jobs.iter().position(|other| other.name == *name));
        let (name, timeout) = (job.name.clone(), job.timeout.map(|timeout| timeout.0));
        Ok(JobSpec { name, ranks, start: job.start.0, after, timeout })
    }

    fn view(&mut self, index: usize, view: &OperatorView) -> ViewSpec {
        let output = self.output_dir.display().to_string();
        let mut processes = Vec::new();
        for site in 0..self.sites.len() {
            if view.host.as_ref().is_some_and(|name| *name != self.sites[site].host.name) {
                continue;
            }
            let control = self.sites[site].config.control_socket().display().to_string();
            let fill = |word: &String| word.replace("{control}", &control).replace("{output}", &output);
            let words: Vec<String> = view.command.iter().map(fill).collect();
            processes.push(self.process(Role::Operator { index }, site, &words, None));
        }
        ViewSpec { processes, after: view.after.map(|after| after.0) }
    }
}

impl Site {
    /// Other services' name for this host's.
    fn service_name(&self) -> String {
        self.config.service.name.clone().unwrap_or_else(|| self.host.name.clone())
    }

    fn tenant_socket(&self, name: &str) -> Result<String> {
        let tenant = self.config.tenants.iter().find(|tenant| tenant.name == name);
        let tenant = tenant.context("invariant: the configuration has every job's tenant")?;
        Ok(self.config.tenant_socket(tenant).display().to_string())
    }
}
