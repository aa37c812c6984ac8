//! Output of processes: each line to the terminal with its prefix, every byte to the log, the last lines in memory.
//!
//! One thread a process reads one pipe that is both its standard output and its standard error, so that their order
//! stays. A pump never stops reading because the terminal or the disk fails: the process must not block on its output.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::eventfd::EventFd;

/// Longest line shown whole; longer ones are broken, so that a process without newlines takes no memory.
const LINE_BYTES_MAX: u64 = 64 * 1024;
/// Lines kept for error messages.
const TAIL_LINES: usize = 20;
/// How long a pump may go on after its process has ended: only a process that left the group can hold the pipe.
const DRAIN: Duration = Duration::from_secs(2);

/// Where the terminal's lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Screen {
    /// Standard output.
    Stdout,
    /// Standard error, where standard output is for programs.
    Stderr,
}

impl Screen {
    /// What writes there; one `write_all` is one whole line, not mixed with others.
    #[must_use]
    pub fn writer(self) -> Box<dyn Write + Send> {
        match self {
            Screen::Stdout => Box::new(std::io::stdout()),
            Screen::Stderr => Box::new(std::io::stderr()),
        }
    }
}

/// A line that somebody waits for: the flag is set and the waiter woken when it comes.
#[derive(Clone)]
pub struct Awaited {
    /// The whole line.
    pub line: &'static str,
    /// Set when it came.
    pub seen: Arc<AtomicBool>,
    /// Written when it came.
    pub wake: Arc<EventFd>,
}

/// What a pump does with the lines.
pub struct Sink {
    /// Before each line on the terminal.
    pub prefix: String,
    /// The terminal; see [`Screen::writer`].
    pub screen: Box<dyn Write + Send>,
    /// Keeps every byte.
    pub log: File,
    /// The line to look for.
    pub awaited: Option<Awaited>,
}

/// The reading thread of one process.
pub struct Pump {
    tail: Arc<Mutex<VecDeque<String>>>,
    done: Receiver<()>,
}

impl Pump {
    /// Starts to read `pipe`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(pipe: PipeReader, sink: Sink) -> Result<Self> {
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let (ended, done) = channel();
        let shared = Arc::clone(&tail);
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || pump(pipe, sink, &shared, ended))
            .context("no thread for a process's output")?;
        Ok(Pump { tail, done })
    }

    /// Waits until all output of an ended process is written; false where somebody still holds its pipe.
    #[must_use]
    pub fn drain(&self) -> bool {
        // The thread sends nothing: it hangs up when it is done.
        self.done.recv_timeout(DRAIN) == Err(RecvTimeoutError::Disconnected)
    }

    /// The last lines.
    #[must_use]
    pub fn tail(&self) -> Vec<String> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().cloned().collect()
    }
}

fn pump(pipe: PipeReader, mut sink: Sink, tail: &Mutex<VecDeque<String>>, ended: Sender<()>) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    let mut shown = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        // A full disk must not stop the process; its lines still go to the terminal.
        let _ = sink.log.write_all(&line);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        shown.clear();
        shown.extend_from_slice(sink.prefix.as_bytes());
        shown.extend_from_slice(text);
        shown.push(b'\n');
        // A terminal that is gone takes nothing.
        let _ = sink.screen.write_all(&shown);
        remember(tail, text);
        if let Some(awaited) = &sink.awaited
            && text == awaited.line.as_bytes()
        {
            awaited.seen.store(true, Ordering::Release);
            // The counter cannot overflow by ones, and a waiter that is gone needs no waking.
            let _ = awaited.wake.write(1);
        }
    }
    drop(ended);
}

fn remember(tail: &Mutex<VecDeque<String>>, text: &[u8]) {
    let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
    if tail.len() == TAIL_LINES {
        tail.pop_front();
    }
    tail.push_back(String::from_utf8_lossy(text).into_owned());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_kept_and_the_awaited_line_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let (reader, mut writer) = std::io::pipe().unwrap();
        let awaited = Awaited { line: "ready", seen: Arc::default(), wake: Arc::new(EventFd::new().unwrap()) };
        let sink = Sink {
            prefix: "[x] ".to_owned(),
            screen: Box::new(std::io::sink()),
            log: File::create(&path).unwrap(),
            awaited: Some(awaited.clone()),
        };
        let pump = Pump::start(reader, sink).unwrap();
        let long = vec![b'x'; 200_000];
        writer.write_all(b"not ready\nready\n\xff\xfe\n").unwrap();
        writer.write_all(&long).unwrap();
        writer.write_all(b"\nno newline").unwrap();
        drop(writer);
        assert!(pump.drain());
        assert_eq!(awaited.wake.read().unwrap(), 1);
        assert!(awaited.seen.load(Ordering::Acquire));
        let expected = [b"not ready\nready\n\xff\xfe\n".as_slice(), &long, b"\nno newline"].concat();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(pump.tail().last().unwrap(), "no newline");
    }

    #[test]
    fn the_tail_is_bounded() {
        let tail = Mutex::default();
        (0..100).for_each(|i| remember(&tail, i.to_string().as_bytes()));
        let tail = tail.into_inner().unwrap();
        assert_eq!((tail.len(), tail[0].as_str()), (TAIL_LINES, "80"));
    }
}
