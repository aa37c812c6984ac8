//! The program `mccs-device-plugin`: one a node, beside kubelet.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mccs_config::KubernetesFile;
use mccs_config::error::in_words;
use tokio::signal::unix::{SignalKind, signal};

/// Gives containers that ask kubelet for mccs.io/tenant-NAME a tenant of this node's mccs-service.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Which tenants there are, and where kubelet is.
    #[arg(long, value_name = "FILE", env = "MCCS_KUBERNETES_CONFIG", default_value = "/etc/mccs/kubernetes.toml")]
    config: PathBuf,
    /// Check the file, print the CDI specification that follows from it, and exit.
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mccs-device-plugin: {}", in_words(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let file = KubernetesFile::load(&arguments.config)?;
    if arguments.check {
        println!("{}", serde_json::to_string_pretty(&mccs_device_plugin::cdi::specification(&file))?);
        return Ok(());
    }
    let level = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            ended = mccs_device_plugin::run(file) => ended,
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}
