//! The daemon `mccs-service`: arguments, descriptor and locked-memory limits, OOM score, systemd
//! (`sd_notify`), SIGTERM.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use mccs_config::error::in_words;
use mccs_config::limits::{FILE_BYTES_MAX, POLICY_BYTES_MAX};
use mccs_config::service::{RdmaUse, TenantConfig};
use mccs_config::topology::ActualHost;
use mccs_controller::config::cluster_config::{ClusterConfig, Text};
use mccs_device::cuda::{MPS_VARIABLE, QUEUES_MAX, QUEUES_VARIABLE};
use mccs_engines::control::UpgradeDesk;
use mccs_engines::controller::{ControllerChoice, ControllerFiles, ControllerSettings, open_store};
use mccs_service::service::{CudaUse, Received, Service, Settings};
use mccs_service::upgrade::{TakingOver, Upgrades};
use mccs_tenants::default_quotas::HostResources;
use mccs_tenants::process_limits::mappings_of_tenants;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use sd_notify::NotifyState;

/// Executes collectives for the jobs of this host.
#[derive(Parser)]
#[command(version = mccs_exchange::version())]
struct Arguments {
    /// The configuration; defaults where absent.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check a configuration and exit.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    check_config: Option<PathBuf>,
    /// Print the configuration in force, defaults included, and exit.
    #[arg(long)]
    print_config: bool,
    /// End when no process holds a shared lock (flock) on this file any more. Whoever starts a service for its users holds one from before.
    #[arg(long, value_name = "FILE")]
    users: Option<PathBuf>,
    /// Go on as the service of the program whose end of a connection is standard input.
    #[arg(long, hide = true)]
    take_over: bool,
}

fn main() -> ExitCode {
    if std::env::var_os(QUEUES_VARIABLE).is_none() {
        // SAFETY: no other thread has been started.
        unsafe { std::env::set_var(QUEUES_VARIABLE, QUEUES_MAX.to_string()) };
    }
    let arguments = Arguments::parse();
    let taking_over = match arguments.take_over.then(TakingOver::new).transpose() {
        Ok(taking_over) => taking_over,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "mccs-service: cannot take over: {error}");
            return ExitCode::FAILURE;
        }
    };
    match run(&arguments, taking_over.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            taking_over.iter().for_each(|taking_over| taking_over.refuse(&in_words(error.as_ref())));
            // If nobody reads it, nothing is left to do about it.
            let _ = writeln!(std::io::stderr(), "mccs-service: {}", in_words(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Topology and policy, where this host is the controller or may be, and what is needed to reach the store.
fn check_files(controller: &ControllerSettings) -> anyhow::Result<()> {
    if let ControllerChoice::Elected { store: Some(settings), .. } = &controller.choice {
        open_store(&settings.store).context("store")?;
    }
    let Some(ControllerFiles { topology, policy }) = &controller.files else { return Ok(()) };
    let read = |path: &PathBuf, bytes_max| -> anyhow::Result<Text> {
        Ok(Text { name: path.display().to_string(), text: mccs_config::document::read_text(path, bytes_max)? })
    };
    let (topology, policy) = (read(topology, FILE_BYTES_MAX)?, read(policy, POLICY_BYTES_MAX)?);
    // Equipment of hosts is known when they report.
    let cluster: Vec<_> = controller.hosts.iter().map(|host| ActualHost::named(host.as_str())).collect();
    ClusterConfig::new(topology, policy, &cluster, None).map_err(anyhow::Error::msg)?;
    Ok(())
}

/// A thread that panics leaves engines that nobody polls any more: tenants would wait for ever. When the process ends they are
/// told so, and whoever watches over it starts another.
fn end_with_any_thread() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// A client of an MPS server falls with all that are, so the service is none, also where one serves in the place where the driver looks by itself;
/// unless the operator names a place, which is returned.
fn stay_out_of_mps(runtime_dir: &Path) -> Option<OsString> {
    let named = std::env::var_os(MPS_VARIABLE);
    if named.is_none() {
        // A folder of the service's own that nobody makes, and so without a server.
        // SAFETY: no other thread has been started.
        unsafe { std::env::set_var(MPS_VARIABLE, runtime_dir.join("no-mps")) };
    }
    named
}

/// Each session and flow has descriptors, and RDMA devices lock memory; the limits that processes begin with are often low.
fn raise_limits() {
    for resource in [Resource::RLIMIT_NOFILE, Resource::RLIMIT_MEMLOCK] {
        if let Ok((_, most)) = getrlimit(resource) {
            // If it is refused, sessions are refused when they are too many.
            let _ = setrlimit(resource, most, most);
        }
    }
}

/// Descriptors below which the log warns: some hundred sessions, flows, and GPUs' memory.
const DESCRIPTORS_FEW: u64 = 4096;

/// Tells what the kernel allows this process.
fn tell_limits() {
    let of = |resource| getrlimit(resource).map_or(0, |(soft, _)| soft);
    let in_words =
        |limit: u64| if limit == nix::libc::RLIM_INFINITY { "unlimited".to_owned() } else { limit.to_string() };
    let (descriptors, locked_bytes) = (of(Resource::RLIMIT_NOFILE), in_words(of(Resource::RLIMIT_MEMLOCK)));
    let (mappings, oom_score_adj) = (mappings_of_tenants(), oom_score_adj());
    tracing::info!(
        descriptors = in_words(descriptors),
        locked_bytes,
        mappings,
        oom_score_adj,
        "limits of this process"
    );
    if descriptors < DESCRIPTORS_FEW {
        tracing::warn!(
            descriptors,
            "few descriptors: sessions will be refused early; set LimitNOFILE= in the unit, or raise `ulimit -Hn`"
        );
    }
}

const OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";
/// Below all jobs, and not beyond the kernel's reach: if the service itself took all memory it has to go.
const OOM_SCORE_WANTED: i32 = -900;

fn oom_score_adj() -> i32 {
    std::fs::read_to_string(OOM_SCORE_ADJ).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// All jobs' shared pages count as the service's, so that the kernel would end it first when memory runs out, and all jobs with it.
fn survive_others() {
    // Whoever has set another score has had a reason.
    if oom_score_adj() != 0 {
        return;
    }
    if let Err(error) = std::fs::write(OOM_SCORE_ADJ, OOM_SCORE_WANTED.to_string()) {
        tracing::info!(
            %error,
            "cannot lower {OOM_SCORE_ADJ}: if the host runs out of memory the kernel may end the service before a job; set OOMScoreAdjust={OOM_SCORE_WANTED} in its unit"
        );
    }
}

/// Waits for a signal that ends the service.
fn wait_for_the_end(signals: &SigSet) -> anyhow::Result<Signal> {
    loop {
        match signals.wait().context("cannot wait for signals")? {
            Signal::SIGHUP => tracing::info!(
                "SIGHUP changes nothing: service.toml is read at the start alone, policy and topology are followed without a signal, and the log \
                 is standard error"
            ),
            signal => return Ok(signal),
        }
    }
}

/// Ends the service, as SIGTERM does, when its last user has gone. The kernel unlocks for whoever dies.
fn end_with_users(path: &Path) -> anyhow::Result<()> {
    let of_file = || format!("{}: the users' file", path.display());
    let file = File::open(path).with_context(of_file)?;
    let wait = move || {
        // Kept until the end, so that nobody becomes a user of a service that ends. No signal interrupts a thread that has all blocked.
        match Flock::lock(file, FlockArg::LockExclusive) {
            Ok(lock) => std::mem::forget(lock),
            Err((_, error)) => tracing::error!(%error, "cannot wait for the end of the users"),
        }
        tracing::info!("no user is left");
        // The main thread waits for it.
        if let Err(error) = kill(Pid::this(), Signal::SIGTERM) {
            tracing::error!(%error, "cannot end");
        }
    };
    std::thread::Builder::new().name("mccs-users".into()).spawn(wait).context("cannot start a thread")?;
    Ok(())
}

/// Tells systemd, or whoever has started the service as systemd does: what comes behind it in `After=` starts when it is ready.
fn tell_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "whoever named $NOTIFY_SOCKET cannot be told how the service is");
    }
}

/// Quotas that the configuration leaves out, as comments.
fn default_quotas(config: &mccs_config::ServiceConfig) -> String {
    let host = HostResources::find(&config.cuda, config.tenants.len());
    let of = |tenant: &TenantConfig| host.quotas(tenant).as_comments(&tenant.name);
    config.tenants.iter().map(of).collect()
}

/// Finds mistakes in files that a checked configuration names.
fn check_config(path: &Path, config: &mccs_config::ServiceConfig) -> anyhow::Result<()> {
    let settings = Settings::from_config(config);
    if let Some(exchange) = &settings.exchange {
        exchange.load_tls().with_context(|| path.display().to_string())?;
    }
    settings.controller.as_ref().map_or(Ok(()), check_files)?;
    println!("{}: no mistakes found", path.display());
    let between_hosts = settings.exchange.is_some() && config.rdma.usage == RdmaUse::Auto;
    if let Some(obstacle) = config.rdma.obstacle(&config.strategy.paths, &config.tcp).filter(|_| between_hosts) {
        println!("  flows go over TCP, also where there are RDMA devices: {obstacle}");
    }
    Ok(())
}

/// Logs to standard error, as `RUST_LOG` says.
fn start_log() {
    let level = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    // A log that cannot be written (a full disk, a reader that has gone) is no reason to end jobs.
    let log = tracing_subscriber::fmt().with_env_filter(level).with_ansi(colours).log_internal_errors(false);
    log.with_writer(std::io::stderr).init();
}

fn warn_of_mps(mps: &Path) {
    let mps = mps.display();
    tracing::warn!(
        "{MPS_VARIABLE} is set ({mps}): if an MPS server serves there the service is its client, and an illegal access of any other of its clients ends \
         what the service does on every GPU until it starts anew; without the variable it is no client (docs/CUDA.md)"
    );
}

fn run(arguments: &Arguments, taking_over: Option<&TakingOver>) -> anyhow::Result<()> {
    let config = match arguments.check_config.as_ref().or(arguments.config.as_ref()) {
        Some(path) => {
            let config = mccs_config::ServiceConfig::load(path)?;
            Settings::check(&config).with_context(|| path.display().to_string())?;
            config
        }
        None => mccs_config::ServiceConfig::default(),
    };
    if let Some(path) = &arguments.check_config {
        return check_config(path, &config);
    }
    let mps = stay_out_of_mps(&config.runtime_dir());
    let own_variables = if mps.is_none() { vec![MPS_VARIABLE] } else { Vec::new() };
    raise_limits();
    if arguments.print_config {
        print!("{}{}", config.to_toml(), default_quotas(&config));
        return Ok(());
    }
    end_with_any_thread();
    start_log();
    // Blocked before any thread starts, so that all threads inherit it and only the wait below sees them.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block().context("cannot block signals")?;
    let settings = Settings::from_config(&config);
    if let Some(mps) = mps.filter(|_| settings.cuda != CudaUse::Off) {
        warn_of_mps(Path::new(&mps));
    }
    survive_others();
    tell_limits();
    let (desk, requests) = UpgradeDesk::new();
    let upgrades =
        Upgrades::new(arguments.config.clone(), own_variables).context("cannot find out which program this is")?;
    let tell_successor = |pid| tell_manager(NotifyState::MainPid(pid));
    upgrades.serve(requests, tell_successor).context("cannot start a thread")?;
    arguments.users.as_deref().map_or(Ok(()), end_with_users)?;
    // Steps that can fail have been done before another program's sessions are this one's.
    match taking_over {
        Some(taking_over) => taking_over.run(&settings, desk, mccs_exchange::version(), &upgrades)?,
        None => upgrades.put(Service::start_with(&settings, Received::default(), Arc::default(), Some(desk))?),
    }
    for tenant in &settings.tenants {
        tracing::info!(tenant = tenant.name, socket = %tenant.socket.display(), "listening");
    }
    tracing::info!(control = %settings.control_socket.display(), tenants = settings.tenants.len(), "listening");
    // The launcher, and anybody else who starts a service, waits for this line; for a program that goes on nobody does.
    if taking_over.is_none()
        && let Err(error) = writeln!(std::io::stdout(), "mccs-service ready")
    {
        tracing::warn!(%error, "standard output cannot be written: whoever waits there does not hear that the service is ready");
    }
    tell_manager(NotifyState::Ready);
    let signal = wait_for_the_end(&signals)?;
    tracing::info!(%signal, "stopping");
    tell_manager(NotifyState::Stopping);
    upgrades.end();
    Ok(())
}
