//! `mccsctl tenant` and `mccsctl tenants`: tenants that come and go while the service runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use clap::{Args, Subcommand};
use mccs_config::Bytes;
use mccs_config::service::TenantConfig;
use mccs_control::TenantRow;
use mccs_control::tenants::{Removed, add, remove};

/// Add a tenant while the service runs, or take one away. Tenants of service.toml stay.
#[derive(Subcommand)]
pub enum TenantCommand {
    Add(Box<Add>),
    Remove(Remove),
}

/// Add a tenant at a socket of its own, which is printed. It is there until `tenant remove` or the end of the
/// host, also after a restart of the service.
#[derive(Args)]
pub struct Add {
    /// The tenant's name, such as slurm-4711.
    name: String,
    /// Users that may connect, by number. Default: every user.
    #[arg(long = "uid", value_name = "UID")]
    uids: Vec<u32>,
    /// The tenant of policy.toml whose caps, shares and priority hold for it. Default: its name.
    #[arg(long, value_name = "TENANT")]
    rules: Option<String>,
    /// Part of the service's threads beside other tenants, 1 to 100.
    #[arg(long)]
    weight: Option<u32>,
    /// Host memory of all its sessions, such as 64GiB.
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Bytes>,
    /// Memory of its communicators on all GPUs.
    #[arg(long, value_name = "SIZE")]
    max_gpu_memory: Option<Bytes>,
    /// Connected processes.
    #[arg(long, value_name = "COUNT")]
    max_sessions: Option<u32>,
    /// Communicators.
    #[arg(long, value_name = "COUNT")]
    max_communicators: Option<u32>,
    /// A part of the path of the cgroup that its processes must be in.
    #[arg(long, value_name = "NAME")]
    cgroup: Option<String>,
    /// Labels for metrics and tables, such as job=4711.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    patience: Patience,
}

/// Take a tenant away: its sessions end, and its calls fail.
#[derive(Args)]
pub struct Remove {
    /// The tenant's name.
    name: String,
    #[command(flatten)]
    patience: Patience,
}

#[derive(Args)]
struct Patience {
    /// Fail if it is not done after so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    wait: f64,
}

impl Patience {
    fn wait(&self) -> anyhow::Result<Duration> {
        Duration::try_from_secs_f64(self.wait)
            .map_err(|_| anyhow::anyhow!("--wait is a number of seconds, and none below 0"))
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let (label, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((label.to_owned(), value.to_owned()))
}

impl TenantCommand {
    pub fn run(&self, socket: &Path, json: bool) -> anyhow::Result<()> {
        match self {
            TenantCommand::Add(tenant) => {
                let connects = add(socket, &tenant.config(), tenant.patience.wait()?)?;
                if json {
                    say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "socket": connects }))?);
                } else {
                    say!("{}", connects.display());
                }
            }
            TenantCommand::Remove(Remove { name, patience }) => {
                match remove(socket, name, patience.wait()?)? {
                    Removed::Gone => {}
                    Removed::Unknown => anyhow::bail!("no tenant {name} was added while the service ran"),
                    Removed::Leaving(row) => anyhow::bail!(
                        "its sessions end, and it still has {} sessions, {} communicators and {} bytes of memory",
                        row.sessions,
                        row.communicators,
                        row.memory_bytes
                    ),
                }
                if json {
                    say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "gone": true }))?);
                } else {
                    say!("nothing is left of {name}");
                }
            }
        }
        Ok(())
    }
}

impl Add {
    fn config(&self) -> TenantConfig {
        let default = TenantConfig::new(&self.name, "");
        TenantConfig {
            uids: Some(self.uids.clone()).filter(|uids| !uids.is_empty()),
            rules: self.rules.clone(),
            weight: self.weight.unwrap_or(default.weight),
            max_memory: self.max_memory,
            max_gpu_memory: self.max_gpu_memory,
            max_sessions: self.max_sessions,
            max_communicators: self.max_communicators,
            cgroup: self.cgroup.clone(),
            labels: self.labels.iter().cloned().collect(),
            ..default
        }
    }
}

/// All tenants.
pub fn print(tenants: &[TenantRow]) {
    say!(
        "{:<24} {:<16} {:>6} {:>8} {:>6} {:>14}  {:<8} labels",
        "tenant",
        "rules",
        "weight",
        "sessions",
        "comms",
        "memory bytes",
        "state"
    );
    for row in tenants {
        let state = match (&row.added, row.leaving) {
            (_, true) => "leaving",
            (Some(_), false) => "added",
            (None, false) => "-",
        };
        say!(
            "{:<24} {:<16} {:>6} {:>8} {:>6} {:>14}  {state:<8} {}",
            row.tenant,
            row.rules,
            row.weight,
            row.sessions,
            row.communicators,
            row.memory_bytes,
            labels(&row.labels)
        );
    }
    say!();
}

fn labels(labels: &BTreeMap<String, String>) -> String {
    let all: Vec<String> = labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
    if all.is_empty() { "-".into() } else { all.join(" ") }
}
