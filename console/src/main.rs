//! The program `mccs-console`: arguments, configuration, systemd (`sd_notify`), SIGTERM.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::task::Poll;

use anyhow::Context as _;
use clap::Parser;
use mccs_config::ConsoleConfig;
use mccs_config::error::in_words;
use mccs_console::server::Server;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

/// Shows a service and its cluster in the browser, and serves what mccsctl prints as JSON. Acts only
/// by tokens (mccsctl token).
#[derive(Parser)]
#[command(version = mccs_exchange::version())]
struct Arguments {
    /// The configuration; defaults where absent.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check a configuration and exit.
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    check_config: Option<PathBuf>,
    /// Print the API's description (OpenAPI 3.1) and exit.
    #[arg(long)]
    print_openapi: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If nobody reads it, nothing is left to do about it.
            let _ = writeln!(std::io::stderr(), "mccs-console: {}", in_words(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.print_openapi {
        return Ok(writeln!(out, "{}", mccs_console::openapi::description())?);
    }
    if let Some(file) = &arguments.check_config {
        ConsoleConfig::load(file)?;
        return Ok(writeln!(out, "{}: no mistakes found", file.display())?);
    }
    let config = arguments.config.as_deref().map_or_else(|| Ok(ConsoleConfig::default()), ConsoleConfig::load)?;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async {
        let server = Server::listen(&config.console)?;
        let address = server.address()?;
        tracing::info!(%address, service = %config.console.socket.display(), "listening");
        if !address.ip().to_canonical().is_loopback() {
            tracing::warn!(%address, "whoever reaches this address over the network reads all of it: there is no password");
        }
        writeln!(out, "mccs-console is ready: http://{address}/")?;
        out.flush()?;
        tell_manager(NotifyState::Ready);
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
        let serving = tokio::spawn(server.serve());
        std::future::poll_fn(|cx| match (terminate.poll_recv(cx), interrupt.poll_recv(cx)) {
            (Poll::Pending, Poll::Pending) => Poll::Pending,
            _ => Poll::Ready(()),
        })
        .await;
        tell_manager(NotifyState::Stopping);
        serving.abort();
        anyhow::Ok(())
    })?;
    // A service that answers late is not waited for.
    runtime.shutdown_background();
    Ok(())
}

fn tell_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}
