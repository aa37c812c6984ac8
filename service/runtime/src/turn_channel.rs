//! Queue to a thread that serves tenants in turns: who leaves much waits for its own.
//!
//! For threads that make calls of microseconds and more, into a driver for instance. The cost of an item is measured, since
//! nobody knows it before: the tenant pays for the time from [`TurnReceiver::recv`] to [`TurnReceiver::rest`], or to the next
//! call.
//!
//! Queues have no bound of their own: what a tenant can have in one is bounded by its quotas of what the items are for.

use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, SendError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::turns::{Share, Turns};

struct State<T> {
    turns: Turns<VecDeque<T>>,
    senders: usize,
    has_receiver: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of those who give work.
pub struct TurnSender<T>(Arc<Shared<T>>);

impl<T> std::fmt::Debug for TurnSender<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TurnSender").finish_non_exhaustive()
    }
}

/// The thread's end.
pub struct TurnReceiver<T> {
    shared: Arc<Shared<T>>,
    /// When the item was taken that is worked on.
    began: Option<Instant>,
}

/// A queue of nobody yet.
#[must_use]
pub fn turn_channel<T>() -> (TurnSender<T>, TurnReceiver<T>) {
    let state = State { turns: Turns::default(), senders: 1, has_receiver: true };
    let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
    (TurnSender(Arc::clone(&shared)), TurnReceiver { shared, began: None })
}

impl<T> TurnSender<T> {
    /// Leaves an item. Returns at once.
    ///
    /// # Errors
    /// Gives the item back where the thread has ended.
    pub fn send(&self, share: Share, item: T) -> Result<(), SendError<T>> {
        let mut state = self.0.state();
        if !state.has_receiver {
            return Err(SendError(item));
        }
        state.turns.enter(share).push_back(item);
        drop(state);
        self.0.changed.notify_one();
        Ok(())
    }
}

impl<T> Clone for TurnSender<T> {
    fn clone(&self) -> Self {
        self.0.state().senders += 1;
        TurnSender(Arc::clone(&self.0))
    }
}

impl<T> Drop for TurnSender<T> {
    fn drop(&mut self) {
        self.0.state().senders -= 1;
        self.0.changed.notify_one();
    }
}

impl<T> TurnReceiver<T> {
    /// The next item, of the tenant whose turn it is. Waits for one, at most so long where a time is given.
    ///
    /// # Errors
    /// None has come in that time; or none is left, and nobody who could send one.
    pub fn recv(&mut self, timeout: Option<Duration>) -> Result<T, RecvTimeoutError> {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(item) = self.try_recv() {
                return Ok(item);
            }
            let state = self.shared.state();
            if !state.turns.is_empty() {
                continue;
            }
            if state.senders == 0 {
                return Err(RecvTimeoutError::Disconnected);
            }
            self.wait(state, until)?;
        }
    }

    fn wait(&self, state: MutexGuard<'_, State<T>>, until: Option<Instant>) -> Result<(), RecvTimeoutError> {
        let changed = &self.shared.changed;
        let Some(until) = until else {
            drop(changed.wait(state));
            return Ok(());
        };
        let left = until.checked_duration_since(Instant::now()).ok_or(RecvTimeoutError::Timeout)?;
        drop(changed.wait_timeout(state, left));
        Ok(())
    }

    /// The same, of what is there.
    pub fn try_recv(&mut self) -> Option<T> {
        self.rest();
        let item = self.shared.state().turns.turn().and_then(|(_, queue)| queue.pop_front())?;
        self.began = Some(Instant::now());
        Some(item)
    }

    /// The item that was taken last has been worked on: what comes now is for nobody.
    pub fn rest(&mut self) {
        let Some(began) = self.began.take() else { return };
        let mut state = self.shared.state();
        state.turns.spend(began.elapsed().as_nanos() as u64);
        if state.turns.has_ended_turn() {
            state.turns.leave();
        }
    }

    /// Waits so long, whatever comes; or until nobody is left who could send. Returns whether somebody is.
    pub fn pause(&mut self, pause: Duration) -> bool {
        self.rest();
        let until = Instant::now() + pause;
        loop {
            let state = self.shared.state();
            if state.senders == 0 {
                return false;
            }
            if self.wait(state, Some(until)).is_err() {
                return true;
            }
        }
    }
}

impl<T> Drop for TurnReceiver<T> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.has_receiver = false;
        let left = std::mem::take(&mut state.turns);
        drop(state);
        // They may have senders of this queue.
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(tenant: u32) -> Share {
        Share { tenant, weight: 1 }
    }

    #[test]
    fn one_waits_for_an_item_of_a_flood_and_not_for_all() {
        let (sender, mut receiver) = turn_channel();
        for n in 0..1000 {
            sender.send(share(1), (1, n)).unwrap();
        }
        assert_eq!(receiver.recv(None), Ok((1, 0)));
        sender.send(share(2), (2, 0)).unwrap();
        // Longer than a turn.
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(receiver.try_recv(), Some((2, 0)));
        assert_eq!(receiver.try_recv(), Some((1, 1)), "in order");
    }

    #[test]
    fn both_have_their_part_of_the_time() {
        let (sender, mut receiver) = turn_channel();
        for n in 0..600 {
            sender.send(share(1 + n % 2), (1 + n % 2, n)).unwrap();
        }
        let (mut spent, mut longest) = ([Duration::ZERO; 2], Duration::ZERO);
        for _ in 0..200 {
            let (tenant, _) = receiver.recv(None).expect("an item");
            let began = Instant::now();
            // One's items take ten times as long.
            let until = began + Duration::from_micros(if tenant == 1 { 500 } else { 50 });
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            let took = began.elapsed();
            spent[tenant as usize - 1] += took;
            longest = longest.max(took);
        }
        // A busy host may hold up any item. The party that has had the longest one waits until the other has
        // had as much.
        assert!(spent[0].abs_diff(spent[1]) <= 2 * longest, "{spent:?}, the longest {longest:?}");
    }

    #[test]
    fn the_end_of_either_side_is_seen() {
        let (sender, mut receiver) = turn_channel();
        let other = sender.clone();
        sender.send(share(1), 7).unwrap();
        drop(sender);
        assert_eq!(receiver.recv(Some(Duration::ZERO)), Ok(7));
        assert_eq!(receiver.recv(Some(Duration::ZERO)), Err(RecvTimeoutError::Timeout));
        assert!(receiver.pause(Duration::from_millis(1)));
        drop(other);
        assert_eq!(receiver.recv(None), Err(RecvTimeoutError::Disconnected));
        assert!(!receiver.pause(Duration::from_secs(600)));
        let (sender, receiver) = turn_channel();
        sender.send(share(1), 7).unwrap();
        drop(receiver);
        assert!(sender.send(share(1), 8).is_err());
    }

    #[test]
    fn a_thread_is_woken_by_what_comes() {
        let (sender, mut receiver) = turn_channel();
        let thread = std::thread::spawn(move || std::iter::from_fn(|| receiver.recv(None).ok()).sum::<u32>());
        (1..=100).for_each(|n| sender.send(share(n % 3), n).unwrap());
        drop(sender);
        assert_eq!(thread.join().unwrap(), 5050);
    }
}
