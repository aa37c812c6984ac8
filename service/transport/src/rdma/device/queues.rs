//! Completion queues (CQ) of a port, which many queue pairs share without overrun.
//!
//! A queue pair's work requests, sends and receives, can never make more completions than places that it has reserved, so
//! that no queue overruns. Places of a queue pair that is gone are free once its queue has been seen empty, since its
//! completions may still lie there.

use std::sync::Arc;

use crate::rdma::verbs::{Completion, CompletionChannel, CompletionQueue, Context, VerbsError};

#[derive(Debug)]
struct Queue {
    cq: Arc<CompletionQueue>,
    entries: u32,
    reserved: u32,
    /// Entries of queue pairs that are gone; counted in `reserved`.
    leaving: u32,
    /// Its next completion makes an event, or has made one that was not taken.
    is_armed: bool,
    /// Completions were taken from it since it was armed: there may be an event of one of them.
    has_given: bool,
}

/// Places in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) struct Places {
    queue: usize,
    count: u32,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Queues {
    pub(in crate::rdma) channel: Arc<CompletionChannel>,
    queues: Vec<Queue>,
    /// Entries of a queue, unless one flow needs more.
    entries: u32,
    /// Next queue to take completions from, so that all have their turn.
    turn: usize,
}

impl Queues {
    /// No queues yet; those that are made have so many places.
    pub(in crate::rdma) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsError> {
        let channel = CompletionChannel::new(context)?;
        Ok(Queues { channel, queues: Vec::new(), entries, turn: 0 })
    }

    /// Reserves places in one queue, which is made if none has room.
    pub(in crate::rdma) fn reserve(&mut self, count: u32) -> Result<(Places, Arc<CompletionQueue>), VerbsError> {
        let has_room = |queue: &Queue| queue.entries - queue.reserved >= count;
        let index = match self.queues.iter().position(has_room) {
            Some(index) => index,
            None => {
                let entries = self.entries.max(count);
                let cq = CompletionQueue::new(&self.channel, entries)?;
                self.queues.push(Queue { cq, entries, reserved: 0, leaving: 0, is_armed: false, has_given: false });
                self.queues.len() - 1
            }
        };
        let queue = &mut self.queues[index];
        queue.reserved += count;
        Ok((Places { queue: index, count }, Arc::clone(&queue.cq)))
    }

    /// The queue pairs of reserved places are gone.
    pub(in crate::rdma) fn release(&mut self, places: Places) {
        if let Some(queue) = self.queues.get_mut(places.queue) {
            queue.leaving += places.count;
        }
    }

    /// Takes some completions of the next queue that has any.
    pub(in crate::rdma) fn take(&mut self, taken: &mut Taken) -> Result<(), VerbsError> {
        taken.count = 0;
        for _ in 0..self.queues.len() {
            self.turn = if self.turn + 1 < self.queues.len() { self.turn + 1 } else { 0 };
            let Some(queue) = self.queues.get_mut(self.turn) else { continue };
            taken.count = queue.cq.poll(&mut taken.completions)?;
            if taken.count < taken.completions.len() {
                queue.reserved -= std::mem::take(&mut queue.leaving);
            }
            if taken.count > 0 {
                queue.has_given = queue.is_armed;
                break;
            }
        }
        Ok(())
    }

    /// Has the next completions wake the engine. Earlier completions do not: they are to be taken after this. A queue that
    /// has not said anything since it was armed still is.
    pub(in crate::rdma) fn arm(&mut self) -> Result<(), VerbsError> {
        for queue in self.queues.iter_mut().filter(|queue| !queue.is_armed) {
            queue.cq.arm()?;
            (queue.is_armed, queue.has_given) = (true, false);
        }
        Ok(())
    }

    /// As [`Queues::take_events`], if there have been completions since a queue was armed: its event would only end the next sleep.
    pub(in crate::rdma) fn take_events_of_taken(&mut self) {
        if self.queues.iter().any(|queue| queue.is_armed && queue.has_given) {
            self.take_events();
        }
    }

    /// Takes the events of queues that were armed. With one queue, as mostly, it is asked once.
    pub(in crate::rdma) fn take_events(&mut self) {
        while self.queues.iter().any(|queue| queue.is_armed)
            && let Some(cq) = self.channel.next_event()
        {
            if let Some(queue) = self.queues.iter_mut().find(|queue| queue.cq.is(cq)) {
                queue.is_armed = false;
            }
        }
    }
}

/// Completions that were taken, and room for as many as are taken at a time.
#[derive(Debug, Default)]
pub(in crate::rdma) struct Taken {
    completions: Box<[Completion]>,
    count: usize,
}

impl Taken {
    /// None, with room for so many.
    pub(in crate::rdma) fn with_room(most: u32) -> Self {
        Taken { completions: vec![Completion::EMPTY; most.max(1) as usize].into(), count: 0 }
    }

    pub(in crate::rdma) fn get(&self) -> &[Completion] {
        &self.completions[..self.count]
    }
}
