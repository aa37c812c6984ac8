//! Output and events of an agent that it has yet to send: events at once, output as fast as the launcher reads it.
//!
//! A process that writes faster than its lines travel waits in its own pipe, and never holds up the news of another.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::wire::FromAgent;

/// Output that may wait to be sent; beyond it, pumps wait.
const OUTPUT_BYTES_MAX: usize = 1 << 20;

/// A queue to one sending thread.
#[derive(Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<FromAgent>,
    output_bytes: usize,
}

impl Outbox {
    /// Adds a message without waiting.
    pub fn news(&self, message: FromAgent) {
        self.lock().messages.push_back(message);
        self.changed.notify_all();
    }

    /// Adds output; waits while too much of it is queued.
    pub fn output(&self, id: u32, bytes: Vec<u8>) {
        let mut queue = self.lock();
        while queue.output_bytes > OUTPUT_BYTES_MAX {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.output_bytes += bytes.len();
        queue.messages.push_back(FromAgent::Output { id, bytes });
        drop(queue);
        self.changed.notify_all();
    }

    /// Takes the oldest message; waits for one.
    pub fn next(&self) -> FromAgent {
        let mut queue = self.lock();
        loop {
            if let Some(message) = queue.messages.pop_front() {
                if let FromAgent::Output { bytes, .. } = &message {
                    queue.output_bytes -= bytes.len();
                    self.changed.notify_all();
                }
                return message;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn output_waits_for_its_reader_and_news_does_not() {
        let outbox = Arc::new(Outbox::default());
        let writer = Arc::clone(&outbox);
        let pump = std::thread::spawn(move || {
            for _ in 0..100 {
                writer.output(1, vec![0; 64 << 10]);
            }
        });
        for id in 0..10 {
            outbox.news(FromAgent::Closed { id });
        }
        let mut counts = (0, 0);
        while counts != (100, 10) {
            assert!(outbox.lock().output_bytes <= OUTPUT_BYTES_MAX + (64 << 10));
            match outbox.next() {
                FromAgent::Output { .. } => counts.0 += 1,
                _ => counts.1 += 1,
            }
        }
        pump.join().unwrap();
        assert_eq!(outbox.lock().output_bytes, 0);
    }
}
