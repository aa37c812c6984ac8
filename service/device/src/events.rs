//! Device events: what a device tells its proxy engine, from whatever thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use mccs_ipc::types::Handle;
use mccs_model::SetupError;

use super::Prepared;

/// From a device to its proxy engine.
#[derive(Debug)]
pub enum DeviceEvent {
    /// A launched job has ended. Nothing uses its operations' memory any more.
    JobDone {
        /// As it was launched.
        job: Handle,
    },
    /// The shared parts of a communicator's ranks are made, or cannot be.
    Prepared {
        /// As it was asked for.
        key: Handle,
        /// Its kind.
        prepared: Result<Box<Prepared>, SetupError>,
    },
    /// The device cannot do what it was given: the communicator ends.
    CommFailed {
        /// Which.
        comm: Handle,
        /// Why.
        message: String,
    },
    /// A GPU is of no use to the device any more.
    GpuLost {
        /// As the device counts them.
        gpu: usize,
        /// Why.
        reason: Arc<str>,
    },
}

/// Takes an event, or gives it back for lack of room.
pub type EventSink = Box<dyn Fn(DeviceEvent) -> Result<(), DeviceEvent> + Send + Sync>;

/// Events in order. Nobody waits for room at the proxy engine, since its own thread tells events, too: it may drop what ends an operation.
pub struct DeviceEvents {
    sink: EventSink,
    untold: Mutex<VecDeque<DeviceEvent>>,
}

impl DeviceEvents {
    /// Events that go to `sink`.
    #[must_use]
    pub fn new(sink: EventSink) -> Self {
        DeviceEvents { sink, untold: Mutex::default() }
    }

    /// Tells now, or when the proxy engine next looks: a mailbox without room has it look again.
    pub fn tell(&self, event: DeviceEvent) {
        self.push(Some(event));
    }

    /// Tells what found no room before. Called by the proxy engine when it has read its mailbox. Returns whether some still waits.
    pub fn push_backlog(&self) -> bool {
        self.push(None)
    }

    fn push(&self, event: Option<DeviceEvent>) -> bool {
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        untold.extend(event);
        while let Some(event) = untold.pop_front() {
            if let Err(event) = (self.sink)(event) {
                untold.push_front(event);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use mccs_runtime::Mailbox;

    use super::*;

    /// Events that go to a mailbox with so much room.
    pub(crate) fn told(room: usize) -> (Mailbox<DeviceEvent>, Arc<DeviceEvents>) {
        let mailbox = Mailbox::new(room);
        let sender = mailbox.sender();
        (mailbox, Arc::new(DeviceEvents::new(Box::new(move |event| sender.send(event)))))
    }

    #[test]
    fn nobody_waits_for_room_and_events_keep_their_order() {
        let (mailbox, events) = told(1);
        let job = |index| Handle { index, generation: 1 };
        (0..3).for_each(|index| events.tell(DeviceEvent::JobDone { job: job(index) }));
        for index in 0..3 {
            assert_eq!(events.push_backlog(), index < 2);
            let told = mailbox.pop();
            assert!(matches!(told, Some(DeviceEvent::JobDone { job: told }) if told == job(index)), "{index}");
        }
        assert!(mailbox.is_empty() && !events.push_backlog());
    }
}
