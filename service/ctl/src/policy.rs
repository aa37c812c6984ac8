//! `mccsctl policy` and `mccsctl link`: files checked and applied, strategies, rates, history,
//! links up or down.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Subcommand;
use mccs_config::limits::POLICY_BYTES_MAX;
use mccs_config::service::AlgorithmChoice;
use mccs_config::{PolicyFile, Rate, ServiceConfig, TopologyFile};
use mccs_control::ControlRequest;
use mccs_controller::config::cluster_config::{not_enforced, not_there};
use mccs_controller::history::Went;
use mccs_controller::links::LinkState;
use mccs_controller::messages::answer::{
    Applied, ControllerAnswer, ControllerRequest, FileStanding, FileView, HistoryView, LinkRateView, OfficeView,
    PathRateView, PolicyView, RatesView, Standing, StrategyView,
};
use mccs_policy::Profile;

use crate::diff;

#[derive(Subcommand)]
pub enum PolicyCommand {
    /// Check a policy file. Asks no service.
    Check {
        /// The file.
        file: PathBuf,
        /// The topology. Without it, paths and caps are not checked.
        #[arg(long, value_name = "FILE")]
        topology: Option<PathBuf>,
        /// A host's service.toml. Without it, tenants are not checked.
        #[arg(long, value_name = "FILE")]
        service: Option<PathBuf>,
    },
    /// Show what a policy file would change of every communicator.
    Diff {
        /// The file.
        file: PathBuf,
    },
    /// Put a policy in force. Returns when all hosts have agreed. If one cannot, all go back to the policy before.
    Apply {
        /// The file.
        file: PathBuf,
    },
    /// Put the previous policy in force again. The file on disk stays as it is.
    Rollback,
    /// Show what is in force, and which file differs.
    Show,
    /// Show what was done, when, why, by whom, and how it went.
    History {
        /// Operators' acts alone.
        #[arg(long)]
        acts: bool,
    },
}

#[derive(clap::Args)]
pub struct Link {
    /// One end: a leaf and a spine, or a host and a leaf, in either order.
    lower: String,
    /// The other end.
    upper: String,
    /// "up", as the topology says; "down"; or what each direction carries, such as 25Gbit/s.
    state: State,
}

#[derive(Clone, Copy)]
struct State(LinkState);

impl FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(State(match text {
            "up" => LinkState::Up,
            "down" => LinkState::Down,
            rate => {
                let rate: Rate = rate.parse().map_err(|error| format!("{error}; or say up, or down"))?;
                LinkState::Rate(rate)
            }
        }))
    }
}

impl Link {
    pub fn request(&self) -> ControlRequest {
        let (lower, upper, State(state)) = (self.lower.clone(), self.upper.clone(), self.state);
        ControlRequest::Controller { request: ControllerRequest::Link { lower, upper, state } }
    }
}

fn read(file: &Path) -> anyhow::Result<(String, String)> {
    Ok((file.display().to_string(), mccs_config::document::read_text(file, POLICY_BYTES_MAX)?))
}

impl PolicyCommand {
    /// The request to the service; nothing if the file alone says it all.
    pub fn request(&self, json: bool) -> anyhow::Result<Option<ControlRequest>> {
        let request = match self {
            PolicyCommand::Check { file, topology, service } => {
                check(file, topology.as_deref(), service.as_deref(), json)?;
                return Ok(None);
            }
            PolicyCommand::Diff { file } => {
                let (name, text) = read(file)?;
                ControllerRequest::Diff { name, text }
            }
            PolicyCommand::Apply { file } => {
                let (name, text) = read(file)?;
                ControllerRequest::Apply { name, text }
            }
            PolicyCommand::Show => ControllerRequest::Show,
            PolicyCommand::History { acts } => ControllerRequest::History { acts: *acts },
            PolicyCommand::Rollback => ControllerRequest::Rollback,
        };
        Ok(Some(ControlRequest::Controller { request }))
    }
}

fn check(file: &Path, topology: Option<&Path>, service: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let (name, text) = read(file)?;
    let topology = topology.map(TopologyFile::load).transpose()?;
    let policy = match &topology {
        Some(topology) => PolicyFile::parse_for(&text, &name, topology, &mccs_policy::names())?,
        None => PolicyFile::parse(&text, &name)?,
    };
    let policies = mccs_policy::names();
    anyhow::ensure!(
        policies.contains(&policy.policy.name.as_str()),
        "{name}: there is no policy {:?}; there are {}",
        policy.policy.name,
        policies.join(", ")
    );
    let mut besides = not_enforced(&policy, topology.as_ref());
    if let Some(service) = service.map(ServiceConfig::load).transpose()? {
        let there = service.tenants.iter().map(|tenant| &*tenant.name).collect();
        besides.extend(not_there(policy.tenants_named(), &there));
    }
    if json {
        let answer = serde_json::json!({ "policy": policy.policy.name, "not_enforced": besides });
        say!("{}", serde_json::to_string_pretty(&answer)?);
        return Ok(());
    }
    say!("{name}: no mistakes found");
    for what in besides {
        say!("  decided, not enforced: {what}");
    }
    Ok(())
}

/// A controller's answer. A request that did not come about is an error.
pub fn print(answer: &ControllerAnswer) {
    match answer {
        ControllerAnswer::Office(view) => office(view),
        ControllerAnswer::Show(view) => show(view),
        ControllerAnswer::History(entries) => entries.iter().for_each(history),
        ControllerAnswer::Diff(view) => diff::print(view),
        ControllerAnswer::Applied(applied) => print_applied(applied),
        ControllerAnswer::Noted => say!("noted; it goes with what is being put in force now"),
    }
}

/// Why an answer is a failure, if it is one.
pub fn failure(answer: &ControllerAnswer) -> Option<String> {
    let ControllerAnswer::Applied(applied) = answer else { return None };
    applied.failure()
}

fn print_applied(applied: &Applied) {
    say!("in force; {} communicators changed, {} paced otherwise", applied.changed.len(), applied.paced.len());
    applied.changed.iter().for_each(|comm| say!("  {comm}"));
    applied
        .paced
        .iter()
        .for_each(|comm| say!("  {comm}: hosts were told other caps, shares, windows or times to yield"));
    applied.kept.iter().for_each(|(comm, why)| say!("  {comm} keeps its strategy, and is asked again: {why}"));
    applied.not_enforced.iter().for_each(|what| say!("  decided, not enforced: {what}"));
    if !applied.away.is_empty() {
        say!("  not there, and get it when they are: {}", applied.away.join(", "));
    }
}

/// A strategy, line by line.
pub(crate) fn strategy(strategy: &StrategyView) -> Vec<String> {
    let mut lines = Vec::new();
    if strategy.algorithm != AlgorithmChoice::Auto {
        lines.push(format!("algorithm {}", strategy.algorithm.name()));
    }
    lines.extend(strategy.transport.map(|transport| format!("flows over {transport}")));
    for (channel, ring) in (0..).zip(&strategy.rings) {
        let ranks: Vec<String> = ring.iter().map(u32::to_string).collect();
        lines.push(format!("channel {channel}: ring {}", ranks.join(" ")));
        for flow in strategy.flows.iter().filter(|flow| flow.channel == channel) {
            let priority = flow.priority.map(|priority| format!(", priority {priority}")).unwrap_or_default();
            let class = flow.class_dscp.map(|dscp| format!(", class of code point {dscp}")).unwrap_or_default();
            lines.push(format!("  {} -> {}: {}{priority}{class}", flow.from, flow.to, flow.path));
        }
    }
    lines
}

fn office(view: &OfficeView) {
    let term = view.term.map(|term| format!(", term {term}")).unwrap_or_default();
    match &view.controller {
        Some(host) => {
            say!("the controller is host {host}{term}{}", if view.is_here { ", which is this one" } else { "" })
        }
        None => say!("no host was elected controller yet"),
    }
    if let Some(why) = &view.paused {
        say!("  it decides nothing now: {why}");
    }
    if !view.candidates.is_empty() {
        say!("  elected among {}", view.candidates.join(", "));
    }
    if let Some(store) = &view.store {
        let state = store.trouble.as_deref().unwrap_or("usable");
        say!("  store {}: {state}", store.kind);
    }
}

fn show(view: &PolicyView) {
    match (&view.policy, &view.policy_file, &view.topology_file) {
        (Some(policy), Some(file), Some(topology)) => say!("policy {policy} of {file}, topology of {topology}"),
        _ => say!("no policy is in force: `mccsctl policy history` says why"),
    }
    for (host, reason) in &view.turned_away {
        say!("  host {host} turns this service away: {reason}");
    }
    view.files.iter().for_each(file);
    view.not_enforced.iter().for_each(|what| say!("  decided, not enforced: {what}"));
    for (host, reports) in &view.hosts {
        let elsewhere = view.elsewhere.iter().find(|(other, _)| other == host);
        let state = match elsewhere {
            Some((_, controller)) => format!("obeys {controller}: its service.toml names another controller"),
            None if *reports => "reports".to_owned(),
            None => "not there".to_owned(),
        };
        say!("  host {host}: {state}");
    }
    for (lower, upper, state) in &view.links {
        say!("  link {lower} {upper}: {state}");
    }
    view.contradictions.iter().for_each(|what| say!("  contradicts a host: {what}"));
    for [lower, upper, why] in &view.dead_links {
        say!("  link {lower} {upper}: found dead, {why} over it");
    }
    if view.refused_bodies > 0 {
        say!("  {} messages of hosts were refused: the log says why", view.refused_bodies);
    }
    if !view.idle_tenants.is_empty() {
        let names = view.idle_tenants.join(", ");
        say!("  named by the policy, without a communicator of several hosts now: {names}");
    }
    rates(&view.rates);
    for comm in &view.communicators {
        let state = match &comm.state {
            Standing::AsDecided => "as decided".to_owned(),
            Standing::Pinned => "pinned: chosen by hand, until it is unpinned".to_owned(),
            Standing::Ordered => "a change is ordered".to_owned(),
            Standing::Undecided => "nothing is decided yet".to_owned(),
            Standing::Refused(reason) => format!("change refused: {reason}"),
            Standing::Outside(reason) => format!("left as it is: {reason}"),
        };
        say!(
            "communicator {} ({} there), tenant {}, strategy {}: {state}",
            comm.name,
            comm.number,
            comm.tenant,
            comm.epoch
        );
        strategy(&comm.strategy).iter().for_each(|line| say!("  {line}"));
        if let Some(Profile { period_ns, busy_ns, .. }) = comm.profile {
            say!("  sends for {:.2} ms of each {:.2}", busy_ns as f64 / 1e6, period_ns as f64 / 1e6);
        }
        comm.paces.iter().for_each(|(host, pace)| say!("  from {host}: {pace}"));
        comm.not_enforced.iter().for_each(|what| say!("  decided, not enforced: {what}"));
    }
}

/// A file that does not say what is in force.
fn file(FileView { file, standing }: &FileView) {
    let ago = |age_ms: u64| format!("{:.0} s ago", Duration::from_millis(age_ms).as_secs_f64());
    match standing {
        FileStanding::InForce => {}
        FileStanding::NotYet => say!("  file {file}: nothing is in force yet"),
        FileStanding::Refused { reason, age_ms } => {
            say!("  file {file}: refused {}, so the above stays: {reason}", ago(*age_ms));
        }
        FileStanding::Unreadable { reason, age_ms } => {
            say!("  file {file}: not readable since {}, so the above stays: {reason}", ago(*age_ms));
        }
        FileStanding::RolledBack => say!("  file {file}: rolled back, as `mccsctl policy history` says; mend it"),
        FileStanding::Differs { line, on_disk, in_force } => {
            let say_line =
                |text: &Option<String>| text.as_ref().map_or("nothing".to_owned(), |text| format!("{text:?}"));
            let (on_disk, in_force) = (say_line(on_disk), say_line(in_force));
            say!(
                "  file {file}: differs from what an operator put in force: line {line} is {on_disk}, in force is {in_force}"
            );
        }
    }
}

fn rates(view: &RatesView) {
    let mbps = |bps: u64| format!("{:.1}", bps as f64 / 1e6);
    for PathRateView { from, to, path, bps, capacity_bps } in &view.paths {
        let of = capacity_bps.map(|bps| format!(" of {}", mbps(bps))).unwrap_or_default();
        say!("  {from} -> {to} by {path}: {}{of} Mbit/s", mbps(*bps));
    }
    if view.more_paths > 0 {
        say!("  {} paths more carry less", view.more_paths);
    }
    if view.others_bps > 0 {
        say!("  besides, over other paths: {} Mbit/s", mbps(view.others_bps));
    }
    for LinkRateView { from, to, bps, capacity_bps } in &view.links {
        say!("  link {from} -> {to}: {} of {} Mbit/s", mbps(*bps), mbps(*capacity_bps));
    }
    if view.more_links > 0 {
        say!("  {} links more carry less", view.more_links);
    }
}

fn history(entry: &HistoryView) {
    let went = match &entry.went {
        Went::Pending => "under way".to_owned(),
        Went::Done => "done".to_owned(),
        Went::DoneBut(exceptions) => format!("done, but {exceptions}"),
        Went::Failed(reason) => format!("not done: {reason}"),
    };
    let why = if entry.why.is_empty() { String::new() } else { format!(" ({})", entry.why) };
    let seconds = Duration::from_millis(entry.age_ms).as_secs_f64();
    let by = entry.by.as_ref().map(|by| format!(", by {by}")).unwrap_or_default();
    say!("{:>5} {seconds:>10.1} s ago  {}{why}: {went}{by}", entry.number, entry.what);
}
