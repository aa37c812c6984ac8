//! What wakes a sleeping transport, and is looked at now and then while completions keep it awake: its control channels, its devices, what is done
//! aside; and when it wakes by itself.

use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollTimeout};

use crate::DataPath;
use crate::rdma::RdmaTransport;
use crate::rdma::data_path::memory::PORTS_MAX;
use crate::rdma::device::ports::Port;
use mccs_runtime::{Context, Progress};

/// How often it is asked whether control channels or devices have something to say while completions keep the engine awake: a system call, for
/// what seldom happens.
const ASIDE_EVERY: Duration = Duration::from_millis(5);
/// How often memory whose region has gone is looked for while nothing else happens.
const MEMORY_LOOKED_AT_EVERY: Duration = Duration::from_millis(500);

/// What a sleeping transport waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) enum Watched {
    Control,
    /// Of this port's queues.
    Completions(usize),
    /// Of this port's device.
    Events(usize),
    /// What is done aside.
    Aside,
}

/// Control channels, what connects and what pins, and two things of each port.
const WATCHED_MAX: usize = 3 + 2 * PORTS_MAX;

impl Watched {
    /// As epoll gives it back.
    pub(in crate::rdma) fn token(self) -> u64 {
        match self {
            Watched::Control => u64::MAX,
            Watched::Aside => u64::MAX - 1,
            Watched::Completions(port) => 2 * port as u64,
            Watched::Events(port) => 2 * port as u64 + 1,
        }
    }

    fn of(token: u64) -> Self {
        match token {
            u64::MAX => Watched::Control,
            token if token == Watched::Aside.token() => Watched::Aside,
            token if token % 2 == 0 => Watched::Completions((token / 2) as usize),
            token => Watched::Events((token / 2) as usize),
        }
    }
}

/// What there is, besides completions.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::rdma) struct Woken {
    pub(in crate::rdma) by_control: bool,
    pub(in crate::rdma) by_events: bool,
}

impl RdmaTransport {
    /// Asks what there is, once for all, so that nothing else is asked in vain.
    pub(in crate::rdma) fn look_aside(&mut self, now: Instant) -> Woken {
        let mut woken = Woken::default();
        let mut events = [EpollEvent::empty(); WATCHED_MAX];
        // One that fails is as good as one that finds nothing: what is there wakes again.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in events.iter().take(count) {
            match Watched::of(event.data()) {
                Watched::Control => woken.by_control = true,
                Watched::Events(_) => woken.by_events = true,
                Watched::Aside => {
                    self.connector.hear();
                    self.memory.pinner.hear();
                }
                Watched::Completions(port) => {
                    if let Some(queues) = self.ports.get_mut(port).and_then(Port::queues) {
                        queues.take_events();
                    }
                }
            }
        }
        self.look_aside_at = Some(now + ASIDE_EVERY);
        woken
    }

    /// Looks at the control channels. Returns whether there was anything.
    pub(in crate::rdma) fn poll_control_channels(&mut self, cx: &Context) -> bool {
        // What the runtime has seen may have been seen in a poll that did not come here.
        self.control_said = self.tcp.poll(&Context { is_readable: true, ..*cx });
        let mut any = self.control_said == Progress::Busy;
        while let Some(control) = self.tcp.take_news() {
            any = true;
            // What is said and asked for in answer is for the next look: epoll need not tell of what has come already.
            self.control_said = Progress::Busy;
            if let Some(handle) = self.by_control.get(&control).copied() {
                self.heard(handle, cx.now);
            }
        }
        any
    }

    pub(in crate::rdma) fn waits_until(&self, now: Instant) -> Option<Instant> {
        let channels = if let Progress::Idle { wake_at } = self.control_said { wake_at } else { None };
        let flows = self.unsettled.iter().filter_map(|handle| self.flows.get(*handle)?.due);
        let lingering = self.lingering.iter().filter_map(|handle| self.flows.get(*handle)?.lingers_until);
        let memory = self.memory.keeps().then(|| now + MEMORY_LOOKED_AT_EVERY);
        flows
            .chain(lingering)
            .chain(channels)
            .chain(memory)
            .chain(self.homes_due)
            .chain(self.withheld_until)
            .chain(self.look_for_devices_at)
            .chain(self.look_for_silence_at)
            .min()
    }
}
