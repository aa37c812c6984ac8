//! `mccsctl cluster` and `mccsctl stuck`: all hosts, from any of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use mccs_control::cluster::{ClusterHost, HostSummary, StuckSummary};
use mccs_control::documents::{self, Document, DocumentError, THIS_HOST, ask_cluster};
use mccs_control::{ControlAnswer, ControlRequest, call};

use crate::stuck::{culprit, named, verdict};

/// Hosts, their communicators, and what failed within the last hour.
pub fn cluster(socket: &Path, json: bool) -> anyhow::Result<()> {
    if json {
        say!("{}", Document::Cluster.pretty(socket)?);
        return Ok(());
    }
    let view = ask_cluster(socket, false)?.ok_or(DocumentError::NoController)?;
    say!(
        "{:<24} {:<10} {:>8} {:>6} {:>6} {:>12}  remarks",
        "host",
        "version",
        "sessions",
        "comms",
        "GPUs",
        "certificate"
    );
    view.hosts.iter().for_each(host);
    say!();
    let summaries = || view.hosts.iter().filter_map(|host| Some((&host.host, host.summary.as_ref()?)));
    if summaries().any(|(_, summary)| !summary.communicators.is_empty()) {
        say!("{:<32} {:<16} {:>6} {:>6} {:>14}  first rank", "communicator", "tenant", "ranks", "hosts", "operations");
    }
    for (name, summary) in summaries() {
        for comm in &summary.communicators {
            say!(
                "{:<32} {:<16} {:>6} {:>6} {:>14}  {name}, number {} there{}",
                comm.unique_id,
                comm.tenant,
                comm.nranks,
                comm.hosts,
                comm.operations,
                comm.communicator,
                of_job(&comm.job)
            );
        }
        if summary.more_communicators > 0 {
            say!("{} communicators more on {name}", summary.more_communicators);
        }
    }
    for (name, summary) in summaries() {
        for late in &summary.joining {
            let (id, since) = (&late.unique_id, late.since_seconds);
            say!("{id} of {} waits for {} since {since} s ({name})", late.tenant, late.waits_for);
        }
    }
    // Each of its hosts tells of it.
    let mut told = BTreeSet::new();
    for (name, summary) in summaries() {
        for failed in summary.failed.iter().filter(|failed| told.insert(failed.unique_id.clone())) {
            let (id, ago) = (&failed.unique_id, failed.age_seconds);
            let job = of_job(&failed.job);
            say!("{id} of {}{job} failed {ago} s ago ({name}): {}", failed.tenant, failed.reason);
        }
    }
    Ok(())
}

/// The job of something, where that is known.
pub fn of_job(job: &str) -> String {
    if job.is_empty() { String::new() } else { format!(" (job {job})") }
}

fn host(ClusterHost { host, summary, trouble }: &ClusterHost) {
    let Some(summary) = summary else {
        return say!("{host:<24} not known: {}", trouble.as_deref().unwrap_or("it did not answer"));
    };
    let comms = summary.communicators.len() as u64 + summary.more_communicators;
    let HostSummary { version, sessions, gpus, .. } = summary;
    let certificate = certificate_days(summary.certificate_end);
    say!(
        "{host:<24} {version:<10} {sessions:>8} {comms:>6} {gpus:>6} {certificate:>12}  {}",
        remarks(summary).join("; ")
    );
}

/// Time until a certificate ends.
fn certificate_days(end: Option<u64>) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    end.map_or_else(|| "-".to_owned(), |end| format!("{} days", end.saturating_sub(now) / (24 * 3600)))
}

fn remarks(summary: &HostSummary) -> Vec<String> {
    let mut remarks = Vec::new();
    if summary.draining {
        let reason = summary.draining_reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        remarks.push(format!("drained{reason}"));
    }
    if !summary.unreachable.is_empty() {
        remarks.push(format!("cannot reach {}", summary.unreachable.join(", ")));
    }
    remarks.extend(summary.gpus_lost.iter().map(|gpu| format!("lost {gpu}")));
    remarks
}

/// Stuck communicators of the whole cluster; fails if there are any, or if a host could not be asked. On a host that belongs to
/// none, or where no controller is named, what is stuck on it.
pub fn stuck(socket: &Path, json: bool) -> anyhow::Result<()> {
    let view = documents::stuck(socket)?;
    let has_peers =
        || matches!(call(socket, &ControlRequest::Hosts), Ok(ControlAnswer::Hosts(hosts)) if !hosts.is_empty());
    if json {
        say!("{}", documents::pretty(&serde_json::json!({ "stuck": view }))?);
    } else if view.asked == THIS_HOST && has_peers() {
        say!("this host alone: service.toml names no [controller]");
    }
    let (mut looked_at, mut stuck, mut not_looked_at, mut unknown_hosts) = (0, 0, 0, 0);
    for ClusterHost { host, summary, trouble } in &view.hosts {
        let Some(summary) = summary else {
            unknown_hosts += 1;
            if !json {
                say!("{host}: not known: {}", trouble.as_deref().unwrap_or("it did not answer"));
            }
            continue;
        };
        looked_at += summary.looked_at;
        not_looked_at += summary.not_looked_at;
        stuck += summary.stuck.len();
        if !json {
            summary.stuck.iter().for_each(|stuck| print_stuck(host, stuck));
        }
    }
    if !json {
        let besides = if not_looked_at > 0 { format!("; {not_looked_at} more were not asked") } else { String::new() };
        say!("{stuck} of {looked_at} communicators are stuck{besides}");
    }
    anyhow::ensure!(stuck == 0, "{stuck} communicators are stuck");
    anyhow::ensure!(unknown_hosts == 0, "{unknown_hosts} hosts could not be asked");
    Ok(())
}

fn print_stuck(host: &str, StuckSummary { communicator, part, tenant, job, class, culprits }: &StuckSummary) {
    let (named, job) = (named(*communicator, part.as_ref()), of_job(job));
    say!("{named} of {host}, tenant {tenant}{job}: {}", verdict(*class, None));
    culprits.iter().for_each(|one| say!("  {}", culprit(one)));
}
