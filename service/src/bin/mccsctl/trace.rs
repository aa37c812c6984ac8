//! `mccsctl trace`: a window of operations, for Perfetto.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use mccs_service::control::window::trace;
use mccs_service::telemetry::trace::write;

/// Record what ranks, channels and messages do for a while, as a file that Perfetto (ui.perfetto.dev) loads.
#[derive(Args)]
pub struct Trace {
    /// Only this communicator.
    #[arg(long, value_name = "NUMBER")]
    communicator: Option<u64>,
    /// How long.
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    seconds: f64,
    /// Where to write it.
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
        let window = trace(socket, Duration::try_from_secs_f64(self.seconds)?, self.communicator, &|| false)?;
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
