//! A connection's bytes, with a time for each stage: a peer that says nothing, says it slowly, or takes nothing is left.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// How long a connection waits for its next request: the page asks each second.
pub const IDLE_WITHIN: Duration = Duration::from_secs(15);
/// How long the head of a request may take from its first byte on.
pub const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// How long the peer may take for each 64 KiB of an answer, or for what is left of it.
pub const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// How long the peer may take for a whole answer: a trace is kept in memory until then.
pub const TAKE_ALL_WITHIN: Duration = Duration::from_secs(120);
/// Bytes of an answer that have a time of their own.
const TAKE_BYTES: usize = 64 << 10;
/// Bytes that are read at once.
const READ_BYTES: usize = 4096;

/// How far a connection is, which its handler says, too.
#[derive(Clone, Default)]
pub struct Stage {
    at: Arc<AtomicU8>,
    is_handled: Arc<AtomicBool>,
}

const IDLE: u8 = 0;
const ASKING: u8 = 1;
const ANSWERING: u8 = 2;
const WRITING: u8 = 3;

impl Stage {
    fn get(&self) -> u8 {
        self.at.load(Ordering::Relaxed)
    }

    fn set(&self, stage: u8) {
        self.at.store(stage, Ordering::Relaxed);
    }

    /// The request is whole: the peer waits now.
    pub fn answering(&self) {
        self.is_handled.store(true, Ordering::Relaxed);
        self.set(ANSWERING);
    }

    /// The handler has ended, with an answer.
    pub fn answered(&self) {
        self.is_handled.store(false, Ordering::Relaxed);
    }
}

/// See the module's documentation.
pub struct Io {
    stream: TcpStream,
    stage: Stage,
    deadline: Pin<Box<Sleep>>,
    /// Bytes of an answer that the peer has taken in its time.
    taken: usize,
    /// When it is to have taken all of it.
    all_until: Instant,
}

impl Io {
    /// A connection that waits for its first request.
    pub fn new(stream: TcpStream, stage: Stage) -> Self {
        Io { stream, stage, deadline: Box::pin(sleep(IDLE_WITHIN)), taken: 0, all_until: Instant::now() }
    }

    fn begin(&mut self, stage: u8, within: Duration) {
        self.begin_until(stage, Instant::now() + within);
    }

    fn begin_until(&mut self, stage: u8, until: Instant) {
        self.stage.set(stage);
        self.deadline.as_mut().reset(until);
    }

    /// Waits on, or not any more.
    fn wait<T>(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<T>> {
        ready!(self.deadline.as_mut().poll(cx));
        if self.stage.get() == WRITING {
            // The kernel would keep the rest of the answer for as long as the peer is there, and takes a byte now and then.
            let _ = self.stream.set_zero_linger();
        }
        Poll::Ready(Err(std::io::ErrorKind::TimedOut.into()))
    }

    fn wrote(&mut self, cx: &mut Context<'_>, written: Poll<std::io::Result<usize>>) -> Poll<std::io::Result<usize>> {
        let now = Instant::now();
        if self.stage.get() != WRITING {
            self.all_until = now + TAKE_ALL_WITHIN;
            self.taken = TAKE_BYTES;
        }
        if self.taken >= TAKE_BYTES {
            self.taken = 0;
            let until = self.all_until.min(now + TAKE_WITHIN);
            self.begin_until(WRITING, until);
        }
        if let Poll::Ready(Ok(bytes)) = &written {
            self.taken += bytes;
        }
        if written.is_pending() { self.wait(cx) } else { written }
    }
}

impl Read for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        let mut bytes = [0; READ_BYTES];
        let room = buf.remaining().min(READ_BYTES);
        let mut read = ReadBuf::new(&mut bytes[..room]);
        let come = Pin::new(&mut self.stream).poll_read(cx, &mut read)?;
        match (come, self.stage.get()) {
            // The handler has its own time for what it does, and a reader for what it takes.
            (Poll::Pending, ANSWERING | WRITING) => Poll::Pending,
            (Poll::Pending, _) => self.wait(cx),
            (Poll::Ready(()), stage) => {
                if stage == IDLE && !read.filled().is_empty() {
                    self.begin(ASKING, HEAD_WITHIN);
                }
                buf.put_slice(read.filled());
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl Write for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.wrote(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// All of the answer is with the kernel, or what precedes it ("100 Continue").
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        if self.stage.get() != WRITING {
            return Poll::Ready(Ok(()));
        }
        if self.stage.is_handled.load(Ordering::Relaxed) {
            self.stage.set(ANSWERING);
            return Poll::Ready(Ok(()));
        }
        self.begin(IDLE, IDLE_WITHIN);
        // Whatever the peer does or does not, the connection is looked at then: it may not be read from before.
        match self.wait(cx) {
            Poll::Pending => Poll::Ready(Ok(())),
            over => over,
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
