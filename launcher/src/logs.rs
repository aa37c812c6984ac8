//! Output of processes: each line to the terminal with its prefix, every byte to the log, the last
//! lines in memory.
//!
//! A sink never fails because the terminal or the disk does: a process must not block on its output.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// Longest line shown whole; longer ones are broken, so that a process without newlines takes no memory.
const LINE_BYTES_MAX: usize = 64 * 1024;
/// Lines kept for error messages.
const TAIL_LINES: usize = 20;

/// Destination of the terminal's lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Screen {
    /// Standard output.
    Stdout,
    /// Standard error, where standard output is for programs.
    Stderr,
}

impl Screen {
    /// A writer to it; one `write_all` is one whole line, not mixed with others.
    #[must_use]
    pub fn writer(self) -> Box<dyn Write + Send> {
        match self {
            Screen::Stdout => Box::new(std::io::stdout()),
            Screen::Stderr => Box::new(std::io::stderr()),
        }
    }
}

/// The last lines of a process; shared with whoever explains its end.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    /// Adds a line and drops the oldest beyond the limit.
    pub fn push(&self, line: &[u8]) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).into_owned());
    }

    /// The lines, oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Destination of one process's output.
pub struct Sink {
    prefix: String,
    screen: Box<dyn Write + Send>,
    log: File,
    awaited: Option<&'static str>,
    tail: Tail,
    /// A line that has begun.
    line: Vec<u8>,
}

impl Sink {
    /// Puts `prefix` before each line on `screen` (see [`Screen::writer`]), and looks for the line `awaited`.
    #[must_use]
    pub fn new(prefix: String, screen: Box<dyn Write + Send>, log: File, awaited: Option<&'static str>) -> Self {
        Sink { prefix, screen, log, awaited, tail: Tail::default(), line: Vec::new() }
    }

    /// Its last lines, now and later.
    #[must_use]
    pub fn tail(&self) -> Tail {
        self.tail.clone()
    }

    /// Takes the next bytes; says whether the awaited line was among them.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        // A full disk must not stop the process; its lines still go to the terminal.
        let _ = self.log.write_all(bytes);
        let mut seen = false;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            for piece in part.chunks(LINE_BYTES_MAX) {
                self.line.extend_from_slice(piece);
                if self.line.ends_with(b"\n") || self.line.len() >= LINE_BYTES_MAX {
                    seen |= self.end_line();
                }
            }
        }
        seen
    }

    /// Shows a last line without its end.
    pub fn finish(&mut self) -> bool {
        !self.line.is_empty() && self.end_line()
    }

    fn end_line(&mut self) -> bool {
        let line = std::mem::take(&mut self.line);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        // A terminal that is gone takes nothing.
        let _ = self.screen.write_all(&[self.prefix.as_bytes(), text, b"\n"].concat());
        self.tail.push(text);
        self.awaited.is_some_and(|awaited| text == awaited.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_kept_and_the_awaited_line_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = File::create(&path).unwrap();
        let mut sink = Sink::new("[x] ".to_owned(), Box::new(std::io::sink()), log, Some("ready"));
        let long = vec![b'x'; 200_000];
        assert!(!sink.write(b"not ready\nrea"));
        assert!(sink.write(b"dy\n\xff\xfe\n"));
        assert!(!sink.write(&long));
        assert!(!sink.write(b"\nno newline"));
        assert!(!sink.finish());
        let expected = [b"not ready\nready\n\xff\xfe\n".as_slice(), &long, b"\nno newline"].concat();
        assert_eq!(std::fs::read(&path).unwrap(), expected);
        assert_eq!(sink.tail().lines().last().unwrap(), "no newline");
        assert!(sink.line.capacity() <= LINE_BYTES_MAX);
    }

    #[test]
    fn the_tail_is_bounded() {
        let tail = Tail::default();
        (0..100).for_each(|i| tail.push(i.to_string().as_bytes()));
        assert_eq!((tail.lines().len(), tail.lines()[0].as_str()), (TAIL_LINES, "80"));
    }
}
