//! `mccsctl why-stuck`: who keeps a communicator waiting.

use mccs_telemetry::stuck::looks::Progress;
use std::path::Path;

use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_telemetry::stuck::{Culprit, StuckClass, StuckPart, StuckReport};

/// Movement between two looks: `12 collectives in the last 100 ms`.
fn moved(Progress { ms, collectives, messages, bytes }: Progress) -> String {
    let count = |number: u64, one: &str, more: &str| match number {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{number} {more}")),
    };
    let parts = [
        count(collectives, "collective", "collectives"),
        count(messages, "send or receive", "sends and receives"),
        count(bytes, "byte between hosts", "bytes between hosts"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let parts = if parts.is_empty() { "something began".to_owned() } else { parts.join(", ") };
    format!("{parts} in the last {ms} ms")
}

/// A communicator's wait, or that it waits for nothing.
pub fn verdict(class: StuckClass, progress: Option<Progress>) -> String {
    match class {
        StuckClass::NotStuck => "nobody waits".to_owned(),
        StuckClass::Running => format!("it runs: {}", progress.map(moved).unwrap_or_default()),
        StuckClass::Rank => "waits for ranks that have not called".to_owned(),
        StuckClass::Gpu => "waits for GPUs".to_owned(),
        StuckClass::Flow => "waits for data that does not come".to_owned(),
        StuckClass::Host => "hosts do not answer".to_owned(),
        StuckClass::Busy => "not known, hosts are too busy to say; ask again".to_owned(),
        StuckClass::Failed => "has failed".to_owned(),
    }
}

/// A communicator, and what it is a part of.
pub fn named(communicator: u64, part: Option<&StuckPart>) -> String {
    let part = part.map(|part| format!(" ({} of communicator {})", part.name, part.whole));
    format!("communicator {communicator}{}", part.unwrap_or_default())
}

/// A rank to blame, in a line.
pub fn culprit(culprit: &Culprit) -> String {
    let rank = culprit.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
    let gpu = culprit.gpu.map(|gpu| format!("GPU {gpu}"));
    let about: Vec<_> = culprit.pid.map(|pid| format!("process {pid}")).into_iter().chain(gpu).collect();
    let about = if about.is_empty() { String::new() } else { format!(" ({})", about.join(", ")) };
    format!("{}{rank}{about}: {}", culprit.host, culprit.what)
}

/// Says what a communicator waits for. One that waits for nothing itself may have parts that do: those are told of besides.
///
/// # Errors
/// The service cannot be asked, or refuses.
pub fn why_stuck(socket: &Path, communicator: u64) -> anyhow::Result<()> {
    let report = ask(socket, communicator)?;
    print(&report);
    let waits = |report: &StuckReport| !matches!(report.class, StuckClass::NotStuck | StuckClass::Running);
    if waits(&report) || report.part.is_some() {
        return Ok(());
    }
    let ControlAnswer::Communicators(all) = call(socket, &ControlRequest::Communicators)? else {
        anyhow::bail!("the service answered something else");
    };
    for part in all.into_iter().filter(|one| one.part_of == Some(communicator)) {
        // One that has ended meanwhile waits for nothing.
        let Ok(report) = ask(socket, part.communicator) else { continue };
        if waits(&report) {
            print(&report);
        }
    }
    Ok(())
}

fn ask(socket: &Path, communicator: u64) -> anyhow::Result<StuckReport> {
    match call(socket, &ControlRequest::WhyStuck { communicator })? {
        ControlAnswer::Stuck(report) => Ok(*report),
        ControlAnswer::Refused(reason) => anyhow::bail!("refused: {reason}"),
        _ => anyhow::bail!("the service answered something else"),
    }
}

/// The fault, the ranks to blame, and the progress of each host.
pub fn print(report: &StuckReport) {
    let named = named(report.communicator, report.part.as_ref());
    say!("{named}: {}", verdict(report.class, report.progress));
    report.culprits.iter().for_each(|one| say!("  {}", culprit(one)));
    for (host, account) in &report.hosts {
        let Some(account) = account else { continue };
        if account.is_busy {
            say!("  {host}: too busy to say");
            continue;
        }
        let last = if account.last.is_empty() { String::new() } else { format!(", last {}", account.last) };
        let state = if account.is_running { "runs" } else { "idle" };
        say!(
            "  {host}: {} collectives started{last}; {state}, nothing moved for {} ms",
            account.started,
            account.idle_ms
        );
        for rank in account.ranks.iter().filter(|rank| !rank.waits().is_empty()) {
            let called = rank.waits_ms.map_or_else(String::new, |ms| format!(", called {ms} ms ago"));
            say!("    rank {} (process {}) waits in {}{called}", rank.rank, rank.pid, rank.waits().join(", "));
        }
    }
}
