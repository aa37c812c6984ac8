//! `mccsctl why-stuck`.

use mccs_service::telemetry::stuck::{StuckClass, StuckReport};

/// What is wrong, who is to blame, and how far each host is.
pub fn print(report: &StuckReport) {
    let verdict = match report.class {
        StuckClass::NotStuck => "nobody waits",
        StuckClass::Rank => "waits for ranks that have not called",
        StuckClass::Gpu => "waits for GPUs",
        StuckClass::Flow => "waits for data that does not come",
        StuckClass::Host => "hosts do not answer",
        StuckClass::Busy => "not known, hosts are too busy to say; ask again",
        StuckClass::Failed => "has failed",
    };
    say!("communicator {}: {verdict}", report.communicator);
    for culprit in &report.culprits {
        let rank = culprit.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
        let pid = culprit.pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
        say!("  {}{rank}{pid}: {}", culprit.host, culprit.what);
    }
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
        for rank in account.ranks.iter().filter(|rank| !rank.waits_in.is_empty()) {
            say!("    rank {} (process {}) waits in {}", rank.rank, rank.pid, rank.waits_in.join(", "));
        }
    }
}
