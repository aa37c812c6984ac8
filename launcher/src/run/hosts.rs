//! Hosts of a run: all reached before anything starts, all left at the end, and lost in between.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::Result;
use mccs_config::DurationText;

use super::process::{Outcome, indented};
use super::{EXIT_FAILED, EXIT_REFUSED, EXIT_TIMEOUT, Run};
use crate::link::{Desk, Link, News};
use crate::logs::Sink;
use crate::signals::Signals;
use crate::spec::{HostSpec, Plan, ServiceSpec};
use crate::wire::{Prepare, Start, ToAgent};

/// How often a remote host hears of the launcher within the time after which it gives it up.
const PINGS: u32 = 4;
/// How long an agent may take to end what it started, once it was told to or its channel was closed.
pub(super) const LEAVE: Duration = Duration::from_secs(10);
/// How long a channel's child may take to end, once it has closed its end.
const END: Duration = Duration::from_secs(2);

/// How far a host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its agent has not answered yet.
    Awaited,
    /// Its agent has made it ready.
    Ready,
    /// Its channel is closed.
    Gone,
}

struct Site<'a> {
    spec: &'a HostSpec,
    link: Option<Link>,
    state: State,
    /// Whether its agent has made the private folder.
    has_folder: bool,
}

/// The hosts of a run.
pub struct Hosts<'a> {
    sites: Vec<Site<'a>>,
    desk: Desk,
    /// Whether the channels are being closed.
    is_leaving: bool,
    ping_every: Duration,
    next_ping: Instant,
}

impl<'a> Hosts<'a> {
    /// None of them reached yet; also returns where their news come.
    pub fn new(plan: &'a Plan, signals: &Signals) -> (Self, Receiver<(usize, News)>) {
        let (news, receiver) = channel();
        let site = |spec| Site { spec, link: None, state: State::Awaited, has_folder: false };
        let hosts = Hosts {
            sites: plan.hosts.iter().map(site).collect(),
            desk: Desk { news, wake: signals.waker() },
            is_leaving: false,
            ping_every: plan.lost_after / PINGS,
            next_ping: Instant::now(),
        };
        (hosts, receiver)
    }

    /// Queues a message for a host.
    pub fn send(&self, host: usize, message: ToAgent) {
        if let Some(link) = &self.sites[host].link {
            link.send(message);
        }
    }

    /// Has a process started.
    pub fn start(&self, host: usize, id: u32, sink: Sink, start: Start) {
        if let Some(link) = &self.sites[host].link {
            link.add_sink(id, sink);
            link.send(ToAgent::Start(start));
        }
    }

    /// Tells remote hosts that the launcher is alive, if it is time; says when it will be.
    pub fn ping(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let is_due = now >= self.next_ping;
        let mut remote = self.sites.iter().filter(|site| site.spec.is_remote && site.state == State::Ready).peekable();
        remote.peek()?;
        if is_due {
            remote.filter_map(|site| site.link.as_ref()).for_each(|link| link.send(ToAgent::Ping));
            self.next_ping = now + self.ping_every;
        }
        Some(self.next_ping)
    }
}

impl Run<'_> {
    /// Reaches every host and has it made ready; one that cannot be is the run's cause.
    pub(super) fn reach_hosts(&mut self) -> Result<()> {
        let plan = self.plan;
        for (index, host) in plan.hosts.iter().enumerate() {
            match Link::open(index, &host.command, self.hosts.desk.clone()) {
                Ok(link) => {
                    link.send(ToAgent::Prepare(Prepare {
                        runtime_dir: host.runtime_dir.clone(),
                        files: host.service.iter().flat_map(ServiceSpec::files).collect(),
                        programs: host.programs.clone(),
                        lost_after: host.is_remote.then_some(plan.lost_after),
                    }));
                    self.hosts.sites[index].link = Some(link);
                }
                Err(error) => self.fail(format!("host {:?} cannot be reached: {error:#}", host.name), EXIT_REFUSED),
            }
        }
        let deadline = Instant::now() + plan.connect_timeout;
        while self.cause.is_none() {
            let silent: Vec<&str> = self.awaited().map(|site| site.spec.name.as_str()).collect();
            if silent.is_empty() {
                break;
            }
            if Instant::now() >= deadline {
                let (names, time) = (silent.join(", "), DurationText(plan.connect_timeout));
                self.fail(format!("no answer from {names} within {time}"), EXIT_TIMEOUT);
                break;
            }
            self.wait(Some(deadline))?;
        }
        Ok(())
    }

    fn awaited(&self) -> impl Iterator<Item = &Site<'_>> {
        self.hosts.sites.iter().filter(|site| site.state == State::Awaited)
    }

    /// An agent has made its host ready, except that programs are missing.
    pub(super) fn prepared(&mut self, host: usize, missing: &[PathBuf]) {
        let site = &mut self.hosts.sites[host];
        site.state = State::Ready;
        site.has_folder = true;
        if !missing.is_empty() {
            let missing: Vec<String> = missing.iter().map(|program| program.display().to_string()).collect();
            let text = format!(
                "host {:?} has no executable {}: a name is looked up beside its mccs-launch and in PATH, a path from the \
                 job's folder",
                site.spec.name,
                missing.join(", ")
            );
            self.fail(text, EXIT_REFUSED);
        }
    }

    /// An agent cannot make its host ready.
    pub(super) fn refused(&mut self, host: usize, reason: &str) {
        let text = format!("host {:?}: {reason}", self.hosts.sites[host].spec.name);
        self.fail(text, EXIT_REFUSED);
    }

    /// A host's channel has closed; what ran there has been ended by the agent, or by its guard.
    pub(super) fn lose(&mut self, host: usize, reason: Option<String>) -> Result<()> {
        let before = std::mem::replace(&mut self.hosts.sites[host].state, State::Gone);
        if self.hosts.is_leaving {
            return Ok(());
        }
        self.wait_for_child(host, Instant::now() + END)?;
        for process in self.processes.iter_mut().filter(|process| process.spec.host == host && process.runs()) {
            process.end(Outcome::Lost, None);
        }
        let site = &mut self.hosts.sites[host];
        let Some(link) = &mut site.link else { return Ok(()) };
        let how = match link.ended()? {
            Some(status) => status.to_string(),
            None => "its channel closed".to_owned(),
        };
        link.kill();
        let why = [Some(how), reason].into_iter().flatten().collect::<Vec<_>>().join("; ");
        let said = indented(&link.complaints());
        let name = &site.spec.name;
        let (text, code) = match before {
            State::Awaited => (format!("host {name:?} cannot be reached ({why}){said}"), EXIT_REFUSED),
            _ => (format!("host {name:?} is lost: its agent ended ({why}){said}"), EXIT_FAILED),
        };
        self.fail(text, code);
        Ok(())
    }

    /// Cuts off a host whose agent does not answer; a guard does what the agent should have done.
    pub(super) fn give_up(&mut self, host: usize) -> Result<()> {
        if let Some(link) = &mut self.hosts.sites[host].link {
            link.kill();
        }
        self.lose(host, Some(format!("it did not answer for {}", DurationText(LEAVE))))
    }

    /// Waits until a host's child has ended, or `deadline` has passed.
    fn wait_for_child(&mut self, host: usize, deadline: Instant) -> Result<()> {
        loop {
            let Some(link) = &mut self.hosts.sites[host].link else { return Ok(()) };
            if link.ended()?.is_some() || Instant::now() >= deadline {
                return Ok(());
            }
            // News stay queued meanwhile; only children and time matter here.
            if let Some(signal) = self.signals.wait(Some(deadline))? {
                self.fail_by(signal);
            }
        }
    }

    /// Closes all channels, and waits until the agents have removed what they made.
    pub(super) fn leave_hosts(&mut self) -> Result<()> {
        self.hosts.is_leaving = true;
        self.hosts.sites.iter_mut().filter_map(|site| site.link.as_mut()).for_each(Link::close);
        let now = Instant::now();
        for host in 0..self.hosts.sites.len() {
            let spec = self.hosts.sites[host].spec;
            let is_ready = self.hosts.sites[host].state == State::Ready;
            if self.hosts.sites[host].has_folder && !is_ready && !spec.is_remote {
                // Its guard removes it, unless both were killed, as by the removal of a whole namespace.
                let _ = std::fs::remove_dir_all(&spec.runtime_dir);
            }
            // Nothing was started where no agent has answered, and none may ever do.
            self.wait_for_child(host, now + if is_ready { LEAVE } else { END })?;
            let Some(link) = &mut self.hosts.sites[host].link else { continue };
            let how = match link.ended()? {
                Some(status) if status.success() => continue,
                Some(status) => status.to_string(),
                None => format!("still there after {}", DurationText(LEAVE)),
            };
            link.kill();
            let said = indented(&link.complaints());
            if is_ready {
                self.fail(format!("host {:?}: its agent did not end well ({how}){said}", spec.name), EXIT_FAILED);
            }
        }
        Ok(())
    }
}
