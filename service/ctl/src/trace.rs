//! `mccsctl trace`: a window of operations, for Perfetto; and `mccsctl merge-traces`, those of several hosts as one.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use mccs_control::trace_window::trace;
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_telemetry::trace::merge::merge;
use mccs_telemetry::trace::write;

/// Record ranks, channels and messages for a while, into a file for Perfetto (ui.perfetto.dev).
#[derive(Args)]
pub struct Trace {
    /// One communicator: its number here, or its unique id, which is the same on all its hosts.
    #[arg(long, value_name = "NUMBER|ID")]
    communicator: Option<String>,
    /// How long.
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    seconds: f64,
    /// Path of the trace.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

impl Trace {
    /// Records, reads, and writes the file.
    pub fn run(&self, socket: &Path) -> anyhow::Result<()> {
        anyhow::ensure!(self.seconds.is_finite() && self.seconds > 0.0, "--seconds is more than 0");
        // Before the window: a trace that cannot be written is not worth waiting for.
        let cannot = || format!("cannot write {}", self.out.display());
        let file = File::options().create(true).write(true).truncate(false).open(&self.out).with_context(cannot)?;
        let only = self.communicator.as_deref().map(|name| number(socket, name)).transpose()?;
        let window = trace(socket, Duration::try_from_secs_f64(self.seconds)?, only, &|| false)?;
        // Only now: what is there already may be all there will be. A pipe has no length.
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            file.set_len(0).with_context(cannot)?;
        }
        let mut out = BufWriter::new(file);
        write(&window, &mut out).and_then(|()| out.flush()).with_context(cannot)?;
        let records: usize = window.engines.iter().map(|(_, records)| records.len()).sum();
        let lost = if window.lost == 0 { String::new() } else { format!("; {} more came too fast", window.lost) };
        // Not to where the trace may go: `--out /dev/stdout`.
        eprintln!("{records} records in {}{lost}", self.out.display());
        if window.is_cut {
            let ms = window.until_ns.saturating_sub(window.from_ns) / 1_000_000;
            eprintln!("mccsctl: warning: these are all that it keeps; the trace ends after {ms} ms");
        }
        Ok(())
    }
}

/// Number of the communicator that is called so.
fn number(socket: &Path, name: &str) -> anyhow::Result<u64> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let ControlAnswer::Communicators(comms) = call(socket, &ControlRequest::Communicators)? else {
        anyhow::bail!("the service answered something else");
    };
    let named = comms.iter().find(|comm| comm.unique_id == name);
    named.map(|comm| comm.communicator).with_context(|| format!("no communicator here has the unique id {name}"))
}

/// Merge traces that `trace` wrote on several hosts at the same time, by the controller's clock. Asks no
/// service.
#[derive(Args)]
pub struct MergeTraces {
    /// The hosts' traces.
    #[arg(required = true, value_name = "FILE")]
    traces: Vec<PathBuf>,
    /// Path of the trace; an existing file is replaced.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

impl MergeTraces {
    /// Reads, and writes the file.
    pub fn run(&self) -> anyhow::Result<()> {
        let open = |path: &PathBuf| {
            let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            anyhow::Ok((path.display().to_string(), BufReader::new(file)))
        };
        let traces = self.traces.iter().map(open).collect::<anyhow::Result<_>>()?;
        let cannot = || format!("cannot write {}", self.out.display());
        if std::fs::metadata(&self.out).is_ok_and(|metadata| !metadata.is_file()) {
            // A pipe, or a terminal.
            let mut out = BufWriter::new(File::options().write(true).open(&self.out).with_context(cannot)?);
            merge(traces, &mut out)?;
            return out.flush().with_context(cannot);
        }
        // A trace that is there stays until there is another: it may be one of those that are merged.
        let mut part = self.out.clone().into_os_string();
        part.push(".part");
        let mut out = BufWriter::new(File::create(&part).with_context(cannot)?);
        let merged = merge(traces, &mut out).map_err(anyhow::Error::from).and_then(|()| Ok(out.flush()?));
        let merged = merged.and_then(|()| std::fs::rename(&part, &self.out).with_context(cannot));
        merged.inspect_err(|_| _ = std::fs::remove_file(&part))
    }
}
