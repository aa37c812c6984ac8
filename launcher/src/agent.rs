//! `mccs-launch agent`: starts processes on a host for the launcher, and ends them with its
//! channel.
//!
//! ```text
//! launcher --(pipe, `ip netns exec`, or ssh)--> agent --> processes, each the leader of its group
//!                                                 `-----> guard: ends them when the agent itself was killed
//! ```
//!
//! The channel is the agent's standard input and output. When it closes, because the run is over or because the
//! launcher, the connection or the client of ssh died, everything still running is killed and the private folder
//! removed. Over a network a channel may also fall silent without closing; there the launcher says so often that it is
//! alive.
//!
//! One thread decides; it waits in one place, for messages, children, signals and the deadline of silence.

use std::collections::BTreeMap;
use std::io::{PipeReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::eventfd::EventFd;
use nix::sys::signal::Signal;

use crate::guard::Guard;
use crate::host;
use crate::outbox::Outbox;
use crate::process::Process;
use crate::signals::Signals;
use crate::wire::{self, FromAgent, Prepare, Start, ToAgent};

/// Most bytes of one read from a process's pipe.
const CHUNK_BYTES: usize = 32 << 10;

/// Why an agent ends.
enum End {
    /// The channel closed between two messages.
    Closed,
    /// It broke, or brought nonsense.
    Broken(anyhow::Error),
    /// Nothing came for too long.
    Silent(Duration),
    /// Somebody on this host wants it to.
    Signal(Signal),
}

/// Serves one launcher until the channel closes; returns the agent's exit status.
///
/// # Errors
/// No launcher is at the other end, or the operating system refuses what the agent itself needs.
pub fn serve() -> Result<u8> {
    let signals = Signals::block()?;
    let mut output = std::io::stdout();
    // First, so that a launcher of another version learns of it.
    output.write_all(&wire::GREETING).and_then(|()| output.flush()).context("the channel is closed")?;
    if !wire::read_greeting(&mut std::io::stdin().lock()).context("only a launcher starts an agent")? {
        bail!("only a launcher starts an agent");
    }
    let (sender, inbox) = channel();
    let wake = signals.waker();
    thread("channel", move || receive(&sender, &wake))?;
    let outbox = Arc::new(Outbox::default());
    let queue = Arc::clone(&outbox);
    // A launcher that is gone closes the other direction too; that is what ends the agent.
    thread("send", move || while wire::write(&mut output, &queue.next()).is_ok() {})?;
    let agent = Agent { signals, inbox, outbox, guard: None, runtime_dir: None, processes: BTreeMap::new() };
    agent.run()
}

/// Starts a thread that nobody waits for.
///
/// # Errors
/// The operating system refuses.
pub fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).with_context(|| format!("no thread {name:?}"))?;
    Ok(())
}

type Received = std::result::Result<ToAgent, End>;

fn receive(inbox: &Sender<Received>, wake: &EventFd) {
    let mut input = std::io::stdin().lock();
    loop {
        let received = match wire::read(&mut input) {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(End::Closed),
            Err(error) => Err(End::Broken(error)),
        };
        let over = received.is_err();
        // An agent that ends anyway hears nothing.
        let _ = inbox.send(received);
        let _ = wake.write(1);
        if over {
            return;
        }
    }
}

struct Agent {
    signals: Signals,
    inbox: Receiver<Received>,
    outbox: Arc<Outbox>,
    guard: Option<Guard>,
    runtime_dir: Option<PathBuf>,
    processes: BTreeMap<u32, Process>,
}

impl Agent {
    fn run(mut self) -> Result<u8> {
        let served = self.follow();
        // Whatever happened: nothing is left.
        let ended = self.end();
        let end = served?;
        ended?;
        Ok(match end {
            End::Closed => 0,
            End::Broken(error) => return Err(error),
            End::Silent(time) => bail!("the launcher has said nothing for {time:?}"),
            End::Signal(signal) => {
                eprintln!("mccs-launch agent: ended by {signal}");
                u8::try_from(128 + signal as i32).unwrap_or(1)
            }
        })
    }

    fn follow(&mut self) -> Result<End> {
        let mut lost_after = None;
        let mut heard = Instant::now();
        loop {
            let deadline = lost_after.map(|time| heard + time);
            if let Some(signal) = self.signals.wait(deadline)? {
                return Ok(End::Signal(signal));
            }
            while let Ok(received) = self.inbox.try_recv() {
                heard = Instant::now();
                match received {
                    Err(end) => return Ok(end),
                    Ok(ToAgent::Prepare(prepare)) => {
                        lost_after = prepare.lost_after;
                        let reply = match self.prepare(prepare) {
                            Ok(missing) => FromAgent::Prepared { missing },
                            Err(error) => FromAgent::Refused { reason: format!("{error:#}") },
                        };
                        self.outbox.news(reply);
                    }
                    Ok(ToAgent::Start(start)) => self.start(&start)?,
                    Ok(ToAgent::Signal { id, signal }) => self.signal(id, signal),
                    Ok(ToAgent::Ping) => {}
                }
            }
            self.observe()?;
            if let Some(time) = lost_after.filter(|time| heard.elapsed() >= *time) {
                return Ok(End::Silent(time));
            }
        }
    }

    fn prepare(&mut self, prepare: Prepare) -> Result<Vec<PathBuf>> {
        if self.guard.is_some() {
            bail!("the host is prepared already");
        }
        let dir = &prepare.runtime_dir;
        // The guard knows the folder before it exists, so that none is left whenever this process is killed.
        let guard = Guard::start(dir)?;
        let made = std::fs::DirBuilder::new().mode(0o700).create(dir);
        if let Err(error) = made {
            guard.dismiss();
            return Err(error).with_context(|| format!("the private folder {} cannot be made", dir.display()));
        }
        self.guard = Some(guard);
        self.runtime_dir = Some(dir.clone());
        for (name, content) in &prepare.files {
            let path = dir.join(name);
            let mut options = std::fs::OpenOptions::new();
            let file = options.write(true).create_new(true).mode(0o600).open(&path);
            file.and_then(|mut file| file.write_all(content.as_bytes()))
                .with_context(|| format!("{} cannot be written", path.display()))?;
        }
        let missing =
            prepare.programs.into_iter().filter(|(program, base)| host::find_program(program, base).is_none());
        Ok(missing.map(|(program, _)| program).collect())
    }

    fn start(&mut self, start: &Start) -> Result<()> {
        let Some(guard) = &mut self.guard else {
            bail!("a process was to be started before the host was prepared");
        };
        let id = start.id;
        match Process::start(start, guard) {
            Ok((process, pipe)) => {
                self.outbox.news(FromAgent::Started { id, pid: process.pid.as_raw() });
                self.processes.insert(id, process);
                let outbox = Arc::clone(&self.outbox);
                thread("output", move || pump(id, pipe, &outbox))?;
            }
            Err(error) => self.outbox.news(FromAgent::NotStarted { id, reason: format!("{error:#}") }),
        }
        Ok(())
    }

    fn signal(&mut self, id: u32, signal: i32) {
        // One that has ended meanwhile is what is wanted; a number that is no signal is nobody's.
        if let (Some(process), Ok(signal)) = (self.processes.get(&id), Signal::try_from(signal)) {
            process.signal(signal);
        }
    }

    fn observe(&mut self) -> Result<()> {
        let Some(guard) = &mut self.guard else { return Ok(()) };
        let mut ended = Vec::new();
        for (id, process) in &mut self.processes {
            if let Some((status, after)) = process.observe(guard)? {
                self.outbox.news(FromAgent::Ended { id: *id, status: status.into_raw(), after });
                ended.push(*id);
            }
        }
        for id in ended {
            self.processes.remove(&id);
        }
        Ok(())
    }

    /// Kills what still runs and removes the private folder.
    fn end(&mut self) -> Result<()> {
        // Dropping a process kills its group and waits for the leader.
        self.processes.clear();
        let removed = match self.runtime_dir.take() {
            Some(dir) => std::fs::remove_dir_all(&dir)
                .with_context(|| format!("the private folder {} cannot be removed", dir.display())),
            None => Ok(()),
        };
        if let Some(guard) = self.guard.take() {
            guard.dismiss();
        }
        removed
    }
}

/// Sends what a process writes, to the end of its pipe.
fn pump(id: u32, mut pipe: PipeReader, outbox: &Outbox) {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match pipe.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => outbox.output(id, chunk[..count].to_vec()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    outbox.news(FromAgent::Closed { id });
}
