//! Channel to one host's agent, at the launcher: a child process (ssh, say) and its standard input
//! and output.
//!
//! Three threads a link: one sends, one receives and puts output where it belongs, one keeps what the child complains
//! about. The deciding thread never waits for a host: it queues messages, and is woken for what comes. When the queue's
//! end is dropped the channel closes, which is how an agent learns that it is over.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::eventfd::EventFd;
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

use crate::agent::thread;
use crate::logs::{Sink, Tail};
use crate::wire::{self, FromAgent, ToAgent};

/// News of a link for the deciding thread.
#[derive(Debug)]
pub enum News {
    /// A message that is not output.
    Agent(FromAgent),
    /// The line that was waited for has come.
    Awaited {
        /// The process that wrote it.
        id: u32,
    },
    /// The channel closed, or what came made no sense.
    Gone {
        /// Why, where it did not just close.
        reason: Option<String>,
    },
}

/// Desk on which links put their news.
#[derive(Clone)]
pub struct Desk {
    /// With the host's index.
    pub news: Sender<(usize, News)>,
    /// Written for each.
    pub wake: Arc<EventFd>,
}

impl Desk {
    fn put(&self, host: usize, news: News) {
        // A run that is over takes no news.
        let _ = self.news.send((host, news));
        let _ = self.wake.write(1);
    }
}

/// How long the complaints of a child that has ended may take to come.
const LISTEN: Duration = Duration::from_secs(2);

/// A host's channel. Dropped, it is closed, and its child is killed.
pub struct Link {
    child: Child,
    queue: Option<Sender<ToAgent>>,
    sinks: Sender<(u32, Sink)>,
    complaints: Tail,
    listening: Receiver<()>,
    status: Option<ExitStatus>,
}

impl Link {
    /// Starts the command that reaches the `host`-th host.
    ///
    /// # Errors
    /// It cannot be executed.
    pub fn open(host: usize, words: &[String], desk: Desk) -> Result<Self> {
        let (program, arguments) = words.split_first().context("invariant: a command has a program")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in the terminal is for the launcher, which ends the others in order.
            .process_group(0);
        // SAFETY: the closure runs between fork and exec and calls only sigprocmask, which is async-signal-safe.
        unsafe {
            // The launcher waits for signals with them blocked; ssh and others want theirs.
            command.pre_exec(|| Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?));
        }
        let mut child = command.spawn().with_context(|| program.clone())?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(errors)) = pipes else {
            bail!("invariant: all three are pipes");
        };
        let (queue, messages) = channel();
        let (sinks, new_sinks) = channel();
        let (done, listening) = channel();
        let complaints = Tail::default();
        let tail = complaints.clone();
        // From here on a failure ends the child, too.
        let link = Link { child, queue: Some(queue), sinks, complaints, listening, status: None };
        thread("send", move || send(input, &messages))?;
        thread("receive", move || receive(host, output, &new_sinks, &desk))?;
        thread("complaints", move || listen(errors, &tail, done))?;
        Ok(link)
    }

    /// Queues a message. A host that is gone gets none; its end is news of its own.
    pub fn send(&self, message: ToAgent) {
        if let Some(queue) = &self.queue {
            let _ = queue.send(message);
        }
    }

    /// Says where the output of process `id` goes. Before it is started.
    pub fn add_sink(&self, id: u32, sink: Sink) {
        // A host that is gone writes nothing.
        let _ = self.sinks.send((id, sink));
    }

    /// Closes the channel, once all that is queued has been sent.
    pub fn close(&mut self) {
        self.queue = None;
    }

    /// Whether the child has ended, and how.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait().context("wait")?;
        }
        Ok(self.status)
    }

    /// Kills the child, and waits for it.
    pub fn kill(&mut self) {
        self.close();
        if self.status.is_none() {
            // One that has just ended is no error.
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
        }
    }

    /// Complaints of the child; all of them, if the child has ended.
    pub fn complaints(&self) -> Vec<String> {
        if self.status.is_some() {
            // The thread sends nothing: it hangs up when it has read all. Only what the child left behind delays that.
            let _ = self.listening.recv_timeout(LISTEN);
        }
        self.complaints.lines()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.kill();
    }
}

fn send(mut input: ChildStdin, messages: &Receiver<ToAgent>) {
    // Whoever is not there to take it is noticed by the receiving side.
    if input.write_all(&wire::GREETING).and_then(|()| input.flush()).is_err() {
        return;
    }
    for message in messages {
        if wire::write(&mut input, &message).is_err() {
            return;
        }
    }
}

fn receive(host: usize, mut output: ChildStdout, new_sinks: &Receiver<(u32, Sink)>, desk: &Desk) {
    let mut sinks = HashMap::new();
    let end = follow(host, &mut output, &mut sinks, new_sinks, desk);
    // Output without a newline is shown, too.
    sinks.values_mut().for_each(|sink| {
        sink.finish();
    });
    desk.put(host, News::Gone { reason: end.err().map(|error| format!("{error:#}")) });
}

fn follow(
    host: usize,
    output: &mut impl Read,
    sinks: &mut HashMap<u32, Sink>,
    new_sinks: &Receiver<(u32, Sink)>,
    desk: &Desk,
) -> Result<()> {
    if !wire::read_greeting(output)? {
        return Ok(());
    }
    while let Some(message) = wire::read(output)? {
        // A sink is queued before its process is started, so that it is here before its output.
        sinks.extend(new_sinks.try_iter());
        match message {
            FromAgent::Output { id, bytes } => {
                if sinks.get_mut(&id).is_some_and(|sink| sink.write(&bytes)) {
                    desk.put(host, News::Awaited { id });
                }
            }
            message => {
                if let FromAgent::Closed { id } = &message
                    && sinks.remove(id).is_some_and(|mut sink| sink.finish())
                {
                    desk.put(host, News::Awaited { id: *id });
                }
                desk.put(host, News::Agent(message));
            }
        }
    }
    Ok(())
}

fn listen(errors: impl Read, complaints: &Tail, done: Sender<()>) {
    for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
        complaints.push(&line);
    }
    drop(done);
}
