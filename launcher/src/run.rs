//! Carries out a [`Plan`]: the service first, then the jobs at their times, the operator's views, and the end of it all.
//!
//! ```text
//! service -> ready -> ranks and timed views -> all ended well -> views at the end -> service asked to end -> summary
//!     \________\________________\_________________ first failure: everything is ended ________________/
//! ```
//!
//! One thread decides; it waits in one place, for signals, children and deadlines together. The first failure is the
//! run's cause and decides the exit status; what the launcher ended because of it is not blamed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mccs_config::DurationText;
use nix::sys::signal::Signal;

use crate::guard::Guard;
use crate::host;
use crate::logs::{Awaited, Screen};
use crate::process::{Process, shell_code, status_text};
use crate::signals::Signals;
use crate::spec::{Plan, ProcessSpec, Role, ServiceSpec};
use crate::summary::Summary;

/// The line by which the service says that its sockets take connections.
const READY_LINE: &str = "mccs-service ready";
/// Exit status of a time-out, as of `timeout(1)`.
const EXIT_TIMEOUT: u8 = 124;
/// Exit status where the service, or the launcher itself, failed without one of its own.
const EXIT_FAILED: u8 = 1;

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
/// The operating system refuses what the launcher itself needs. What runs is then killed.
pub fn run(plan: &Plan, signals: Signals, json: bool) -> Result<Summary> {
    host::output_dir(&plan.output_dir)?;
    let mut run = Run {
        plan,
        signals,
        guard: Guard::start(&plan.runtime_dir)?,
        screen: if json { Screen::Stderr } else { Screen::Stdout },
        processes: Vec::new(),
        cause: None,
    };
    run.phases()?;
    run.stop(|role| *role != Role::Service)?;
    run.stop(|role| *role == Role::Service)?;
    run.judge_service();
    run.finish()
}

struct Run<'a> {
    plan: &'a Plan,
    signals: Signals,
    guard: Guard,
    screen: Screen,
    processes: Vec<Process>,
    cause: Option<Cause>,
}

impl Run<'_> {
    fn phases(&mut self) -> Result<()> {
        if let Some(service) = &self.plan.service {
            self.start_service(service)?;
        }
        let ready_at = Instant::now();
        let views_done = self.run_jobs(ready_at)?;
        for (view, done) in self.plan.views.iter().zip(views_done) {
            if self.cause.is_none() && !done {
                self.start(&view.process, None);
                self.wait_for_all_but_service(ready_at + self.plan.timeout)?;
            }
        }
        Ok(())
    }

    /// Starts a process. One that cannot be is the run's cause.
    fn start(&mut self, spec: &ProcessSpec, awaited: Option<Awaited>) {
        // What the operator sees is a table; a prefix on each line would only blur it.
        let prefix = self.plan.prefix && !matches!(spec.role, Role::Operator { .. });
        match Process::start(spec, &mut self.guard, self.screen, prefix, awaited) {
            Ok(process) => self.processes.push(process),
            Err(error) => self.fail(format!("cannot be started: {error:#}"), EXIT_FAILED),
        }
    }

    fn start_service(&mut self, service: &ServiceSpec) -> Result<()> {
        std::fs::write(&service.config_path, &service.config)
            .with_context(|| format!("{} cannot be written", service.config_path.display()))?;
        let ready = Arc::new(AtomicBool::new(false));
        let awaited = Awaited { line: READY_LINE, seen: Arc::clone(&ready), wake: self.signals.waker() };
        let deadline = Instant::now() + service.ready_timeout;
        self.start(&service.process, Some(awaited));
        while self.cause.is_none() && !ready.load(Ordering::Acquire) {
            if Instant::now() >= deadline {
                let text = format!(
                    "the service did not say {READY_LINE:?} within {}{}",
                    DurationText(service.ready_timeout),
                    self.service_tail()
                );
                self.fail(text, EXIT_TIMEOUT);
                break;
            }
            self.wait(Some(deadline))?;
        }
        Ok(())
    }

    /// Starts jobs and views at their times and waits until all have ended or one has failed. Returns, for each view,
    /// whether it was started.
    fn run_jobs(&mut self, ready_at: Instant) -> Result<Vec<bool>> {
        let plan = self.plan;
        let mut started = vec![None; plan.jobs.len()];
        let mut viewed = vec![false; plan.views.len()];
        while self.cause.is_none() {
            let now = Instant::now();
            let mut deadlines = vec![ready_at + plan.timeout];
            if now >= deadlines[0] {
                self.fail_late("the run", plan.timeout);
                break;
            }
            for (job, started) in plan.jobs.iter().zip(&mut started) {
                let due = ready_at + job.start_after;
                if started.is_none() && now >= due {
                    *started = Some(now);
                    for rank in &job.ranks {
                        if self.cause.is_none() {
                            self.start(rank, None);
                        }
                    }
                }
                match (*started, job.timeout) {
                    (None, _) => deadlines.push(due),
                    (Some(at), Some(timeout)) if self.is_running(&job.name) => {
                        if now >= at + timeout {
                            self.fail_late(&format!("job {}", job.name), timeout);
                        }
                        deadlines.push(at + timeout);
                    }
                    (Some(_), _) => {}
                }
            }
            for (view, viewed) in plan.views.iter().zip(&mut viewed) {
                let Some(due) = view.after.map(|after| ready_at + after) else {
                    continue;
                };
                if !*viewed && now >= due {
                    *viewed = true;
                    self.start(&view.process, None);
                } else if !*viewed {
                    deadlines.push(due);
                }
            }
            let all_started = started.iter().all(Option::is_some);
            if self.cause.is_some() || (all_started && !self.anyone_runs()) {
                break;
            }
            self.wait(deadlines.into_iter().min())?;
        }
        Ok(viewed)
    }

    fn wait_for_all_but_service(&mut self, deadline: Instant) -> Result<()> {
        while self.cause.is_none() && self.anyone_runs() {
            if Instant::now() >= deadline {
                self.fail_late("the run", self.plan.timeout);
                break;
            }
            self.wait(Some(deadline))?;
        }
        Ok(())
    }

    fn is_running(&self, name: &str) -> bool {
        self.processes
            .iter()
            .any(|process| process.ended.is_none() && matches!(&process.role, Role::Rank { job, .. } if job == name))
    }

    fn anyone_runs(&self) -> bool {
        self.processes.iter().any(|process| process.ended.is_none() && process.role != Role::Service)
    }

    /// Waits for something to happen, takes note of it, and finds out whether it is a failure.
    fn wait(&mut self, deadline: Option<Instant>) -> Result<bool> {
        let signal = self.signals.wait(deadline)?;
        for i in 0..self.processes.len() {
            if self.processes[i].observe(&mut self.guard)? {
                self.judge(i);
            }
        }
        if let Some(signal) = signal {
            let code = u8::try_from(128 + signal as i32).unwrap_or(EXIT_FAILED);
            self.fail(format!("ended by {signal}"), code);
        }
        Ok(signal.is_some())
    }

    /// Decides whether the end of a process fails the run.
    fn judge(&mut self, i: usize) {
        let process = &self.processes[i];
        let Some(ended) = process.ended else { return };
        if process.asked {
            return;
        }
        let status = status_text(ended.status);
        match &process.role {
            Role::Service => {
                // Its last lines are about to be shown; the pipe of an ended process closes at once.
                let _ = process.drain();
                let text = format!("the service ended ({status}) before its jobs{}", self.service_tail());
                let code = shell_code(ended.status).max(EXIT_FAILED);
                self.fail(text, code);
            }
            role if !ended.status.success() => {
                let text = format!("[{role}] ended with {status}");
                self.fail(text, shell_code(ended.status));
            }
            _ => {}
        }
    }

    /// A service that did not end well when it was asked fails a run that went well otherwise.
    fn judge_service(&mut self) {
        let service = self.processes.iter().find(|process| process.role == Role::Service && process.asked);
        if let Some(ended) = service.and_then(|process| process.ended) {
            let code = shell_code(ended.status);
            let terminated = 128 + Signal::SIGTERM as i32;
            if code != 0 && i32::from(code) != terminated {
                let status = status_text(ended.status);
                self.fail(format!("the service ended with {status} when asked to end"), code);
            }
        }
    }

    /// Notes the first failure; later ones follow from it.
    fn fail(&mut self, text: String, exit_code: u8) {
        if self.cause.is_none() {
            eprintln!("mccs-launch: {text}");
            self.cause = Some(Cause { text, exit_code });
        }
    }

    fn fail_late(&mut self, who: &str, timeout: Duration) {
        let text = format!("{who} took longer than {}", DurationText(timeout));
        self.fail(text, EXIT_TIMEOUT);
    }

    fn service_tail(&self) -> String {
        let service = self.processes.iter().find(|process| process.role == Role::Service);
        let lines = service.map(Process::tail).unwrap_or_default();
        if lines.is_empty() {
            return "; it wrote nothing".to_owned();
        }
        let lines: Vec<String> = lines.iter().map(|line| format!("\n    {line}")).collect();
        format!("; its last lines:{}", lines.concat())
    }

    /// Asks the processes that `which` picks to end, kills them after the grace time, or at once on a second signal.
    fn stop(&mut self, which: impl Fn(&Role) -> bool) -> Result<()> {
        let mut deadline = Some(Instant::now() + self.plan.grace);
        self.signal(&which, Signal::SIGTERM);
        while self.processes.iter().any(|process| process.ended.is_none() && which(&process.role)) {
            let hurried = self.wait(deadline)?;
            if deadline.is_some_and(|deadline| hurried || Instant::now() >= deadline) {
                deadline = None;
                self.signal(&which, Signal::SIGKILL);
            }
        }
        Ok(())
    }

    fn signal(&mut self, which: &impl Fn(&Role) -> bool, signal: Signal) {
        for process in self.processes.iter_mut().filter(|p| which(&p.role)) {
            process.signal(signal);
        }
    }

    fn finish(self) -> Result<Summary> {
        for process in &self.processes {
            if !process.drain() {
                eprintln!(
                    "mccs-launch: [{}] left a process outside its group that holds its output; the log may be cut",
                    process.role
                );
            }
        }
        let summary = Summary::new(self.plan, &self.processes, self.cause);
        if summary.exit_code == 0 && !self.plan.keep_output {
            std::fs::remove_dir_all(&self.plan.output_dir).context("the output folder cannot be removed")?;
        }
        self.guard.dismiss();
        Ok(summary)
    }
}
