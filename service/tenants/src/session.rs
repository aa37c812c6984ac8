//! Shared state of a session for all engines: stream words, failures, operations in flight,
//! counters.

use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use mccs_ipc::command::Completion;
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::queue::{Producer, Push};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::tickets::Tickets;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SessionId;
use mccs_runtime::WakerSlot;
use nix::unistd::geteuid;

use crate::tenant::Tenant;

/// Shared by the session's daemon engine and the proxy engines that run its operations.
pub struct Session {
    /// Its number.
    pub id: SessionId,
    /// Its owner.
    pub tenant: Arc<Tenant>,
    /// The process at the other end.
    pub peer: PeerCredentials,
    segment: Arc<Mapping>,
    words_offset: u64,
    /// By word.
    tickets: Box<[Tickets]>,
    completions: Mutex<Producer<Completion>>,
    in_flight: AtomicU64,
    /// Set by the daemon engine while it leaves commands in the ring because too many are in flight.
    throttled: AtomicBool,
    /// Wakes the session's daemon engine.
    pub waker: WakerSlot,
    /// Counters for the operator.
    pub counters: SessionCounters,
    /// Asked once: a look at /proc.
    opens: OnceLock<Opens>,
    /// The job that it is part of, as its launcher calls it.
    job: OnceLock<String>,
    /// Whether the segment's pages go with the session, whoever keeps its descriptor.
    gives_back: AtomicBool,
}

impl Drop for Session {
    fn drop(&mut self) {
        if *self.gives_back.get_mut() {
            self.segment.give_back();
        }
    }
}

/// Kinds of memory that the GPUs' driver opens in one process when another has named it by a handle, as decision 039
/// has seen it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Opens {
    /// Memory: where the number that each process has in its own PID namespace is not the other's. A handle with the opener's own number the driver takes
    /// for the opener's own, and refuses.
    pub memory: bool,
    /// Events: between processes of one user, in one PID namespace, with one `/dev/shm`.
    pub events: bool,
    /// Whether no two ranks share a process. For a communicator; a session alone is apart.
    pub apart: bool,
}

fn has_our_shared_memory(pid: i32) -> bool {
    let folder = |root: &str| std::fs::metadata(format!("{root}/dev/shm")).map(|of| (of.dev(), of.ino())).ok();
    folder("").is_some_and(|own| folder(&format!("/proc/{pid}/root")) == Some(own))
}

/// The numbers of a process: in this one's PID namespace, and in each below to its own.
fn numbers_of(pid: i32) -> Option<Vec<u32>> {
    // A process may call itself anything.
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?
        .split_whitespace()
        .map(|number| number.parse().ok())
        .collect()
}

/// Counters of a session, since it began.
#[derive(Debug, Default)]
pub struct SessionCounters {
    /// Operations taken from the ring, without rounds of shared-memory exchanges.
    pub commands: AtomicU64,
    /// Rounds of communicators that have ended; those of the others stand on their shared-memory exchanges.
    pub rounds: AtomicU64,
    /// Operations that failed.
    pub failed: AtomicU64,
    /// Operations of which buffers had to be copied first, since the service cannot open them.
    pub copied: AtomicU64,
    /// Failures that could not be told because the tenant does not read its completion ring.
    pub untold: AtomicU64,
}

/// Words of a session's streams in its segment.
#[derive(Debug, Clone, Copy)]
pub struct StreamWords {
    /// First byte of the first word.
    pub offset: u64,
    /// How many there are: most streams the session can have.
    pub count: u32,
}

impl Session {
    /// A session over its segment.
    #[must_use]
    pub fn new(
        id: SessionId,
        tenant: Arc<Tenant>,
        peer: PeerCredentials,
        segment: Arc<Mapping>,
        words: StreamWords,
        completions: Producer<Completion>,
        waker: WakerSlot,
    ) -> Self {
        Session {
            id,
            tenant,
            peer,
            segment,
            words_offset: words.offset,
            tickets: (0..words.count).map(|_| Tickets::new()).collect(),
            completions: Mutex::new(completions),
            in_flight: AtomicU64::new(0),
            throttled: AtomicBool::new(false),
            waker,
            counters: SessionCounters::default(),
            opens: OnceLock::new(),
            job: OnceLock::new(),
            gives_back: AtomicBool::new(false),
        }
    }

    /// A session that another program has served so far: `ended` are the last operations that have ended on its streams, by word.
    #[must_use]
    pub fn resumed(mut self, ended: &[u64], counted: [u64; 4], job: &str) -> Self {
        for (tickets, ended) in self.tickets.iter_mut().zip(ended) {
            *tickets = Tickets::resume(*ended);
        }
        let SessionCounters { commands, rounds, failed, untold, .. } = &self.counters;
        for (counter, counted) in [commands, rounds, failed, untold].into_iter().zip(counted) {
            counter.store(counted, Ordering::Relaxed);
        }
        self.is_of_job(job);
        self
    }

    /// Failures that were written for the tenant.
    #[must_use]
    pub fn completions_produced(&self) -> u64 {
        self.completions.lock().unwrap_or_else(PoisonError::into_inner).produced()
    }

    /// Kinds of its process' memory that the GPUs' driver opens in this one, and the other way round.
    #[must_use]
    pub fn opens(&self) -> Opens {
        *self.opens.get_or_init(|| {
            // A process that cannot be looked at opens nothing.
            numbers_of(self.peer.pid).map_or(Opens::default(), |numbers| Opens {
                memory: numbers.last().is_some_and(|own| *own != std::process::id()),
                events: numbers.len() == 1
                    && self.peer.uid == geteuid().as_raw()
                    && has_our_shared_memory(self.peer.pid),
                apart: true,
            })
        })
    }

    /// The job that it is part of, as its tenant's operator or its launcher calls it; empty before its first communicator, where no operator has said.
    #[must_use]
    pub fn job(&self) -> &str {
        self.job_of(self.job.get().map_or("", String::as_str))
    }

    /// The job of a communicator whose launcher calls it so.
    #[must_use]
    pub fn job_of<'a>(&'a self, said: &'a str) -> &'a str {
        Some(self.tenant.job()).filter(|job| !job.is_empty()).unwrap_or(said)
    }

    /// A communicator of it says of which job it is; the first one counts.
    pub fn is_of_job(&self, job: &str) {
        if !job.is_empty() {
            self.job.get_or_init(|| job.to_owned());
        }
    }

    /// The tenant has gone, or is not to be trusted: the segment's pages go when the last operation has ended. When it is the service
    /// that goes they stay, so that a tenant reads how far it came.
    pub fn give_back_segment(&self) {
        self.gives_back.store(true, Ordering::Relaxed);
    }

    /// Operations taken from the ring that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Counts an operation in. Only the daemon engine does.
    pub fn begin_operation(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts triggers of port channels in, among the operations. Only the daemon engine does.
    pub fn begin_triggers(&self, count: u64) {
        self.in_flight.fetch_add(count, Ordering::AcqRel);
    }

    /// Triggers have ended.
    pub fn end_triggers(&self, count: u64) {
        if count > 0 {
            self.count_out(count);
        }
    }

    /// Asks to be woken when an operation ends. Returns false if the number in flight fell below `limit` meanwhile.
    #[must_use]
    pub fn throttle(&self, limit: u64) -> bool {
        self.throttled.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let still = self.in_flight() >= limit;
        if !still {
            self.throttled.store(false, Ordering::Relaxed);
        }
        still
    }

    /// Ends operations: raises their stream's word to `ticket`, and calls `behind` for what tells the tenant besides. Failures are
    /// told with [`Session::report`] before.
    pub fn end_operations(&self, word: u32, ticket: u64, count: u64, behind: impl FnOnce()) {
        if let Some(tickets) = self.tickets.get(word as usize) {
            tickets.end(self.word(word), ticket, behind);
        }
        self.count_out(count);
    }

    fn count_out(&self, count: u64) {
        self.in_flight.fetch_sub(count, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.throttled.load(Ordering::Relaxed) && self.throttled.swap(false, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// The last ticket that has ended on a stream.
    #[must_use]
    pub fn last_ended(&self, word: u32) -> u64 {
        self.tickets.get(word as usize).map_or(0, Tickets::last_ended)
    }

    /// Whether the tenant is just being told of what has ended on a stream: its word may not be given to another one yet, for which the
    /// old ticket would count.
    #[must_use]
    pub fn is_telling(&self, word: u32) -> bool {
        self.tickets.get(word as usize).is_some_and(Tickets::is_telling)
    }

    /// Makes a stream's word fit for another stream, whose tickets start at 1. Returns false, and does nothing, unless the tenant has been
    /// told of the stream's `last` ticket.
    #[must_use]
    pub fn reset_word(&self, word: u32, last: u64) -> bool {
        self.tickets.get(word as usize).is_some_and(|tickets| tickets.reset(self.word(word), last))
    }

    fn word(&self, word: u32) -> Option<&StreamWord> {
        StreamWord::at(&self.segment, self.words_offset, word)
    }

    /// Counts an operation that failed with its communicator.
    pub fn count_failed(&self) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Tells the tenant why a communicator failed: once for each of its ranks, before any of the operations that fail
    /// with it ends. One for each operation would fill the ring, and hide the next communicator's failure. The lock is
    /// for failures only: the data path never takes it.
    pub fn report(&self, comm: Handle, stream: Handle, ticket: u64, class: ErrorClass, message: &str) {
        let completion = Completion::new(comm, stream, ticket, class, message);
        let mut completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(completions.try_push(&completion), Ok(Push::Pushed { .. })) {
            // Told all the same, if not which: an operation that failed must not look like one that did not.
            let untold = self.counters.untold.fetch_add(1, Ordering::Relaxed) + 1;
            if let Some(word) = self.word(self.tickets.len() as u32) {
                word.publish(untold);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;
    use crate::testing;

    #[test]
    fn memory_is_opened_of_processes_with_other_numbers_and_events_of_the_user() {
        let tenant = Tenant::new("a".into(), Quota::least());
        // It waits for what does not come; its name is cut after fifteen bytes, inside a character.
        let folder = tempfile::tempdir().expect("a folder");
        let name = folder.path().join("fourteen bytes\u{e9}");
        std::os::unix::fs::symlink("/bin/cat", &name).expect("a link");
        let mut child = std::process::Command::new(name);
        let mut child = child.stdin(std::process::Stdio::piped()).spawn().expect("a process");
        let (other, user) = (child.id() as i32, geteuid().as_raw());
        let opens = |pid, uid| {
            let Opens { memory, events, .. } =
                testing::session_of(1, &tenant, PeerCredentials { pid, uid, gid: 1 }).opens();
            (memory, events)
        };
        assert_eq!(opens(other, user), (true, true));
        assert_eq!(opens(other, user + 1), (true, false));
        assert!(!opens(std::process::id() as i32, user).0, "of this number");
        assert_eq!(opens(0, user), (false, false), "in no PID namespace that this one sees");
        drop(child.stdin.take());
        child.wait().expect("it ends");
        assert_eq!(opens(i32::MAX, user), (false, false), "it has gone");
    }
}
