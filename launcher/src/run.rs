//! Carries out a [`Plan`]: reaches hosts, starts services and jobs at their times, ends everything.
//!
//! ```text
//! hosts -> services -> all ready -> ranks and timed views -> all ended well -> views at the end -> services asked to end
//!     \________\__________\________________\_______________ first failure: everything is ended ____________/
//! ```
//!
//! One thread decides; it waits in one place, for signals, the hosts' news and deadlines together. The first failure is
//! the run's cause and decides the exit status; what the launcher ended because of it is not blamed.

mod hosts;
mod jobs;
mod process;

use std::collections::BTreeSet;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mccs_config::DurationText;
use nix::sys::signal::Signal;

use self::hosts::Hosts;
pub use self::process::{Outcome, Process};
use crate::host;
use crate::link::News;
use crate::logs::{Screen, Sink};
use crate::signals::Signals;
use crate::spec::{Plan, ProcessSpec, Role};
use crate::summary::Summary;
use crate::wire::{FromAgent, Start, ToAgent};

/// The line by which a service says that its sockets take connections.
const READY_LINE: &str = "mccs-service ready";
/// Exit status of a time-out, as of `timeout(1)`.
const EXIT_TIMEOUT: u8 = 124;
/// Exit status where a service, a host or the launcher itself failed without one of its own.
const EXIT_FAILED: u8 = 1;
/// Exit status where nothing could be started.
const EXIT_REFUSED: u8 = 2;
/// How long the output of ended processes may take to come: only one that left its group can hold it up.
const DRAIN: Duration = Duration::from_secs(2);

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// In words.
    pub text: String,
    /// The launcher's exit status.
    pub exit_code: u8,
}

/// Runs `plan` to its end, whatever that is; nothing that it started is left.
///
/// # Errors
/// The operating system refuses what the launcher itself needs. Running processes are then killed.
pub fn run(plan: &Plan, signals: Signals, json: bool) -> Result<Summary> {
    host::output_dir(&plan.output_dir)?;
    let screen = if json { Screen::Stderr } else { Screen::Stdout };
    let (hosts, news) = Hosts::new(plan, &signals);
    let mut run =
        Run { plan, signals, hosts, news, screen, processes: Vec::new(), ready: BTreeSet::new(), cause: None };
    run.phases()?;
    run.stop(|role| *role != Role::Service)?;
    run.stop(|role| *role == Role::Service)?;
    run.judge_services();
    run.finish()
}

struct Run<'a> {
    plan: &'a Plan,
    signals: Signals,
    hosts: Hosts<'a>,
    news: Receiver<(usize, News)>,
    screen: Screen,
    processes: Vec<Process<'a>>,
    /// Services, by their `id`, that have said that they are ready.
    ready: BTreeSet<u32>,
    cause: Option<Cause>,
}

impl<'a> Run<'a> {
    fn phases(&mut self) -> Result<()> {
        self.reach_hosts()?;
        if self.cause.is_none() {
            self.start_services()?;
        }
        if self.cause.is_none() {
            self.run_jobs(Instant::now())?;
        }
        Ok(())
    }

    /// Starts a process.
    fn start(&mut self, spec: &'a ProcessSpec) -> Result<()> {
        // The operator's view is a table; a prefix on each line would only blur it, unless hosts are to be told apart.
        let is_table = matches!(spec.role, Role::Operator { .. }) && !self.plan.names_hosts;
        let prefix = self.plan.prefix && !is_table;
        let prefix = if prefix { format!("[{}] ", spec.label) } else { String::new() };
        let awaited = (spec.role == Role::Service).then_some(READY_LINE);
        let sink = Sink::new(prefix, self.screen.writer(), host::log_file(&spec.log)?, awaited);
        self.processes.push(Process::new(spec, sink.tail()));
        let start = Start {
            id: spec.id,
            program: spec.program.clone(),
            arguments: spec.arguments.clone(),
            env: spec.env.clone(),
            working_dir: spec.working_dir.clone(),
        };
        self.hosts.start(spec.host, spec.id, sink, start);
        Ok(())
    }

    fn start_services(&mut self) -> Result<()> {
        let plan = self.plan;
        let services: Vec<_> = plan.hosts.iter().filter_map(|host| host.service.as_ref()).collect();
        for service in &services {
            std::fs::write(&service.config_copy, &service.config)
                .with_context(|| format!("{} cannot be written", service.config_copy.display()))?;
            self.start(&service.process)?;
        }
        let deadline = Instant::now() + plan.ready_timeout;
        while self.cause.is_none() && self.ready.len() < services.len() {
            if Instant::now() >= deadline {
                self.fail_unready();
                break;
            }
            self.wait(Some(deadline))?;
        }
        Ok(())
    }

    fn fail_unready(&mut self) {
        let silent = |process: &&Process<'_>| !self.ready.contains(&process.spec.id);
        let late: Vec<&Process<'_>> = self.processes.iter().filter(silent).collect();
        let time = DurationText(self.plan.ready_timeout);
        let Some(first) = late.first() else { return };
        let others = if late.len() > 1 { format!(", nor did {} others", late.len() - 1) } else { String::new() };
        let who = self.service_name(first.spec);
        let text = format!("{who} did not say {READY_LINE:?} within {time}{others}{}", first.last_words());
        self.fail(text, EXIT_TIMEOUT);
    }

    fn service_name(&self, spec: &ProcessSpec) -> String {
        let host = &self.plan.hosts[spec.host].name;
        if self.plan.names_hosts { format!("the service on {host}") } else { "the service".to_owned() }
    }

    /// Waits for something to happen, takes note of it, and finds out whether it is a failure. Says whether an ending
    /// signal came.
    fn wait(&mut self, deadline: Option<Instant>) -> Result<bool> {
        let ping = self.hosts.ping();
        // News that came while only children mattered has not been heard yet, and nothing else would wake us for it.
        if self.hear_news()? {
            return Ok(false);
        }
        let signal = self.signals.wait(deadline.into_iter().chain(ping).min())?;
        self.hear_news()?;
        if let Some(signal) = signal {
            self.fail_by(signal);
        }
        Ok(signal.is_some())
    }

    fn hear_news(&mut self) -> Result<bool> {
        let mut any = false;
        while let Ok((host, news)) = self.news.try_recv() {
            any = true;
            match news {
                News::Agent(message) => self.hear(host, message)?,
                News::Awaited { id } => {
                    self.ready.insert(id);
                }
                News::Gone { reason } => self.lose(host, reason)?,
            }
        }
        Ok(any)
    }

    fn hear(&mut self, host: usize, message: FromAgent) -> Result<()> {
        match message {
            FromAgent::Prepared { missing } => self.prepared(host, &missing),
            FromAgent::Refused { reason } => self.refused(host, &reason),
            FromAgent::Started { id, pid } => {
                if let Some(process) = self.find(host, id) {
                    process.pid = Some(pid);
                }
            }
            FromAgent::NotStarted { id, reason } => {
                if let Some(process) = self.find(host, id) {
                    process.end(Outcome::NotStarted, None);
                    let label = process.spec.label.clone();
                    self.fail(format!("[{label}] cannot be started: {reason}"), EXIT_FAILED);
                }
            }
            FromAgent::Ended { id, status, after } => {
                let outcome = Outcome::Status(std::os::unix::process::ExitStatusExt::from_raw(status));
                if let Some(process) = self.find(host, id) {
                    process.end(outcome, Some(after));
                    self.judge(id)?;
                }
            }
            FromAgent::Closed { id } => {
                if let Some(process) = self.find(host, id) {
                    process.is_drained = true;
                }
            }
            FromAgent::Output { .. } => {}
        }
        Ok(())
    }

    /// The process `id`, if it is one of `host`'s: an agent speaks for its own processes only.
    fn find(&mut self, host: usize, id: u32) -> Option<&mut Process<'a>> {
        self.processes.iter_mut().find(|process| process.spec.id == id && process.spec.host == host)
    }

    /// Decides whether the end of process `id` fails the run.
    fn judge(&mut self, id: u32) -> Result<()> {
        let Some(i) = self.processes.iter().position(|process| process.spec.id == id) else { return Ok(()) };
        let spec = self.processes[i].spec;
        let Some(outcome) = self.processes[i].outcome.filter(|_| !self.processes[i].asked) else { return Ok(()) };
        let status = outcome.text();
        match &spec.role {
            Role::Service if self.cause.is_none() => {
                // Its last lines are about to be shown, and follow its end.
                self.drain(|process| process.spec.id == id)?;
                let who = self.service_name(spec);
                let text = format!("{who} ended ({status}) before its jobs{}", self.processes[i].last_words());
                self.fail(text, outcome.code().unwrap_or(EXIT_FAILED).max(EXIT_FAILED));
            }
            _ if !outcome.is_success() => {
                self.fail(format!("[{}] ended with {status}", spec.label), outcome.code().unwrap_or(EXIT_FAILED));
            }
            _ => {}
        }
        Ok(())
    }

    /// A service that did not end well when it was asked fails a run that went well otherwise.
    fn judge_services(&mut self) {
        let terminated = u8::try_from(128 + Signal::SIGTERM as i32).unwrap_or(EXIT_FAILED);
        let bad = self.processes.iter().filter(|process| process.spec.role == Role::Service && process.asked);
        let bad: Vec<_> = bad
            .filter_map(|process| Some((process.spec, process.outcome?)))
            .filter(|(_, outcome)| outcome.code().is_some_and(|code| code != 0 && code != terminated))
            .collect();
        for (spec, outcome) in bad {
            let text = format!("{} ended with {} when asked to end", self.service_name(spec), outcome.text());
            self.fail(text, outcome.code().unwrap_or(EXIT_FAILED));
        }
    }

    /// Notes the first failure; later ones follow from it.
    fn fail(&mut self, text: String, exit_code: u8) {
        if self.cause.is_none() {
            eprintln!("mccs-launch: {text}");
            self.cause = Some(Cause { text, exit_code });
        }
    }

    fn fail_by(&mut self, signal: Signal) {
        let code = u8::try_from(128 + signal as i32).unwrap_or(EXIT_FAILED);
        self.fail(format!("ended by {signal}"), code);
    }

    fn fail_late(&mut self, who: &str, timeout: Duration) {
        let text = format!("{who} took longer than {}", DurationText(timeout));
        self.fail(text, EXIT_TIMEOUT);
    }

    /// Asks the processes that `which` picks to end, kills them after the grace time, or at once on a second signal. A
    /// host that does not even do that is given up.
    fn stop(&mut self, which: impl Fn(&Role) -> bool) -> Result<()> {
        let mut deadline = Instant::now() + self.plan.grace;
        let mut is_killing = false;
        self.signal(&which, Signal::SIGTERM);
        while let Some(process) = self.processes.iter().find(|process| process.runs() && which(&process.spec.role)) {
            let host = process.spec.host;
            let hurried = self.wait(Some(deadline))?;
            let is_late = Instant::now() >= deadline;
            if !is_killing && (hurried || is_late) {
                is_killing = true;
                deadline = Instant::now() + hosts::LEAVE;
                self.signal(&which, Signal::SIGKILL);
            } else if is_killing && is_late {
                self.give_up(host)?;
            }
        }
        Ok(())
    }

    fn signal(&mut self, which: &impl Fn(&Role) -> bool, signal: Signal) {
        for process in self.processes.iter_mut().filter(|p| p.runs() && which(&p.spec.role)) {
            process.asked = true;
            self.hosts.send(process.spec.host, ToAgent::Signal { id: process.spec.id, signal: signal as i32 });
        }
    }

    /// Waits until the output of the ended processes that `which` picks has come, as long as that takes at most.
    fn drain(&mut self, which: impl Fn(&Process<'_>) -> bool) -> Result<()> {
        let deadline = Instant::now() + DRAIN;
        let open = |process: &Process<'_>| !process.is_drained && !process.runs() && which(process);
        while self.processes.iter().any(&open) && Instant::now() < deadline {
            self.wait(Some(deadline))?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Summary> {
        self.drain(|_| true)?;
        for process in self.processes.iter().filter(|process| !process.is_drained) {
            eprintln!(
                "mccs-launch: [{}] left a process outside its group that holds its output; the log may be cut",
                process.spec.label
            );
        }
        self.leave_hosts()?;
        let summary = Summary::new(self.plan, &self.processes, self.cause);
        if summary.exit_code == 0 && !self.plan.keep_output {
            std::fs::remove_dir_all(&self.plan.output_dir).context("the output folder cannot be removed")?;
        }
        Ok(summary)
    }
}
