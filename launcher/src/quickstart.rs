//! `mccs-launch quickstart`: a service and a job of two ranks on this machine, and what the operator sees of them.
//!
//! It is an ordinary run ([`crate::run`]) of a job file that is made here. The tour ([`tour`]) is one of its operator's
//! views: it asks `mccsctl` while the ranks sum, and then has them end.

pub mod tour;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use mccs_config::JobFile;

use crate::spec::Plan;
use crate::{cargo, host, run, signals};

/// Programs besides the launcher's own.
const PROGRAMS: [(&str, &str); 3] =
    [("mccs-service", "mccs-service"), ("mccsctl", "mccs-service"), ("mccs-perf", "mccs-tools")];
/// Ranks sum and check again and again, until the tour makes the file.
const RANK: &str = "exec \"$0\" --check --end 256KiB --until \"$1\" > \"$2.$MCCS_RANK\"";
/// Exit statuses of a run that somebody has ended, who wants no logs of it.
const ENDED: [u8; 3] = [129, 130, 143];

/// Runs the tour. Returns the exit status.
///
/// # Errors
/// A program is missing, or the operating system refuses what the launcher itself needs.
pub fn run(no_build: bool) -> Result<u8> {
    if !no_build {
        cargo::build_executables()?;
    }
    let found = |(name, package): (&str, &str)| {
        host::find_program(Path::new(name), Path::new("/")).with_context(|| {
            format!(
                "{name} is neither beside this program nor in PATH: install the package {package}, or `cargo build --workspace --bins`"
            )
        })
    };
    let [_, ctl, perf] = {
        let mut paths = PROGRAMS.into_iter().map(found);
        let mut next = || paths.next().context("invariant: one path a program")?;
        [next()?, next()?, next()?]
    };
    let signals = signals::Signals::block()?;
    let name = format!("{:08x}", rand::random::<u32>());
    let folder = host::private_parent().join(format!("mccs-quickstart-{name}"));
    let own = std::env::current_exe().context("this program's path is not known")?;
    let text = job_file(&folder, &own, &ctl, &perf, std::io::stdout().is_terminal());
    let file = JobFile::parse(&text, "quickstart.toml")?;
    let plan = Plan::new(Path::new("quickstart.toml"), &file, &name)?;
    plan.require_programs()?;
    println!("# Starts a service of its own on this machine, and a job of two ranks.");
    let summary = run::run(&plan, signals, false)?;
    if summary.exit_code == 0 {
        println!("# All of it has ended, and nothing is left on this machine.");
        println!("# Next: a job file of your own (docs/LAUNCHER.md), a service that stays (docs/INSTALL.md).");
    } else {
        println!("{summary}");
    }
    if ENDED.contains(&summary.exit_code) {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(summary.exit_code)
}

/// The run, as a job file.
fn job_file(folder: &Path, own: &Path, ctl: &Path, perf: &Path, slowly: bool) -> String {
    let quoted = |words: &[String]| words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(", ");
    let text = |path: PathBuf| path.display().to_string();
    let (enough, said) = (text(folder.join(tour::ENOUGH)), text(folder.join(tour::SAID)));
    let view = |more: &[&str]| {
        let mut words = vec![text(own.to_owned()), "tour".into(), "--ctl".into(), text(ctl.to_owned())];
        words.extend(["--socket".into(), "{control}".into(), "--folder".into(), text(folder.to_owned())]);
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words.extend(slowly.then(|| "--slowly".to_owned()));
        quoted(&words)
    };
    let rank = quoted(&["sh".into(), "-c".into(), RANK.into(), text(perf.to_owned()), enough, said]);
    format!(
        "[service.config.service]\nname = \"quickstart\"\n\n[run]\noutput_dir = {folder:?}\nkeep_output = false\ntimeout = \"10m\"\n\n\
         [[run.operator]]\ncommand = [{}]\nafter = \"1ms\"\n\n[[run.operator]]\ncommand = [{}]\n\n\
         [[job]]\nname = \"quickstart\"\nranks = 2\ncommand = [{rank}]\n",
        view(&[]),
        view(&["--after"]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_file_is_one_whatever_folders_are_called() {
        let folder = Path::new("/tmp/a \"b\" \\c");
        let text = job_file(folder, &folder.join("mccs-launch"), Path::new("/x/ctl"), Path::new("/x/perf"), true);
        let file = JobFile::parse(&text, "quickstart.toml").unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(file.run.output_dir.as_deref(), Some(folder));
        assert_eq!(file.jobs[0].command[4], folder.join(tour::ENOUGH).display().to_string());
        assert_eq!(file.run.operator[1].command.last().map(String::as_str), Some("--slowly"));
    }
}
