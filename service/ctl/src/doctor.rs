//! `mccsctl doctor`: what of this host keeps jobs from running, or from running fast, and what to do.
//!
//! Reading is apart from judging: [`host`] reads the kernel's files, [`service`] asks the service what it has found out at its start,
//! and [`checks`] judges both beside the configuration.

mod checks;
mod host;
mod service;

use std::path::{Path, PathBuf};

use anyhow::ensure;
use clap::Args;
use mccs_config::error::in_words;
use mccs_config::service::ServiceConfig;
use serde::Serialize;

use self::host::HostFacts;
use self::service::ServiceState;

/// Configuration of packages.
const CONFIG: &str = "/etc/mccs/service.toml";

/// Check this host: configuration, service, libraries, driver, peer access, RDMA devices, limits, clocks,
/// and what to do. Fails if it finds a problem.
#[derive(Args)]
pub struct Doctor {
    /// The service's configuration. Default: /etc/mccs/service.toml, if there is one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Some jobs fail or are slow.
    Warning,
    /// Jobs fail, or what the host has is not used.
    Problem,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    /// Advice; none if all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// The configuration, as far as there is one.
enum Configured {
    Absent,
    Wrong(String),
    Right(Box<ServiceConfig>),
}

impl Configured {
    fn read(named: Option<&Path>) -> Self {
        let path = named.unwrap_or(Path::new(CONFIG));
        if named.is_none() && !path.exists() {
            return Configured::Absent;
        }
        match ServiceConfig::load(path) {
            Ok(config) => Configured::Right(Box::new(config)),
            Err(error) => Configured::Wrong(in_words(&error)),
        }
    }

    fn right(&self) -> Option<&ServiceConfig> {
        if let Configured::Right(config) = self { Some(config) } else { None }
    }
}

impl Doctor {
    /// Looks at this host, and prints what it finds.
    pub fn run(&self, socket: &Path, json: bool) -> anyhow::Result<()> {
        let root = Path::new("/");
        let configured = Configured::read(self.config.as_deref());
        let service = ServiceState::ask(root, socket);
        let host = HostFacts::read(root);
        let findings = checks::examine(&configured, &service, &host);
        if json {
            say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "doctor": findings }))?);
        } else {
            findings.iter().for_each(print);
        }
        let problems = findings.iter().filter(|finding| finding.verdict == Verdict::Problem).count();
        ensure!(problems == 0, "{problems} of {} findings are problems", findings.len());
        Ok(())
    }
}

fn print(Finding { check, verdict, found, advice }: &Finding) {
    let verdict = match verdict {
        Verdict::Ok => "ok",
        Verdict::Note => "note",
        Verdict::Warning => "warning",
        Verdict::Problem => "PROBLEM",
    };
    say!("{verdict:<8} {check:<14} {found}");
    if let Some(advice) = advice {
        say!("{:<8} {:<14} {advice}", "", "->");
    }
}
