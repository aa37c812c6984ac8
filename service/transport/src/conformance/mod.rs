//! Conformance suite of transports: one over the traits, run for each transport and for each under
//! bad luck.
//!
//! Tests never wait for a fixed time and have no upper bounds on it; a watchdog ends one that makes no progress. Both
//! sides run on the test's thread, so that they are always in a known state.

pub(super) mod abilities;
pub(super) mod carrying;
pub(super) mod endings;
mod harness;
pub(super) mod setup;
mod sizes;

use std::time::{Duration, Instant};

pub(crate) use self::harness::Random;
use super::faulty::{Faults, Faulty};
use super::{FlowOptions, ListenOptions, Transport};

/// A transport under test.
pub(crate) trait Fixture {
    type Transport: Transport;

    /// A fresh network.
    fn new() -> Self;

    /// Adds a host.
    fn transport(&mut self) -> Self::Transport;

    /// The time, which only goes forward.
    fn now(&mut self) -> Instant;

    /// Lets time pass at once.
    fn skip(&mut self, by: Duration);

    /// How flows are carried.
    fn options(&self) -> FlowOptions {
        FlowOptions::default()
    }

    /// Options of listeners.
    fn listen_options(&self) -> ListenOptions {
        ListenOptions::default()
    }

    /// How many flows there can be at once.
    fn flows(&self) -> u64;

    /// Whether flows may fail by themselves. Then only what they say before is checked.
    fn is_deadly(&self) -> bool {
        false
    }

    /// How much less data a transport under bad luck gets, so that tests end soon.
    fn thrift(&self) -> u64 {
        1
    }
}

/// The whole suite for a fixture; with an attribute for every test, if need be.
macro_rules! suite {
    (@each $attributes:tt $fixture:ty; $module:ident: [$($test:ident),+]) => {
        $(suite!(@one $attributes $fixture; $module: $test);)+
    };
    (@one [$(#[$attribute:meta])?] $fixture:ty; $module:ident: $test:ident) => {
        #[test]
        $(#[$attribute])?
        fn $test() {
            $crate::conformance::run::<$fixture>($crate::conformance::$module::$test);
        }
    };
    ($(#[$attribute:meta])? $fixture:ty) => {
        suite!(@each [$(#[$attribute])?] $fixture; carrying: [
            sizes_and_what_lies_around, many_requests_in_order, both_directions_at_once, sender_ahead_is_held_back,
            receiver_ahead_waits, progress_is_true_and_never_falls, posted_before_connected, tags_come_with_messages,
            flush_completes, sleeping_on_the_descriptor, thousands_of_flows
        ]);
        suite!(@each [$(#[$attribute])?] $fixture; setup: [
            late_accepts, nobody_accepts, nobody_connects, numbers_are_used_once, numbers_end, refused_handles,
            closed_listeners, thousands_of_listeners, options_are_checked, stale_names_find_nothing, memory_in_use_stays
        ]);
        suite!(@each [$(#[$attribute])?] $fixture; endings: [
            sender_closes_at_every_stage, receiver_closes_at_every_stage, peer_dies_at_every_stage,
            completed_messages_survive_the_senders_close, too_long_a_message_fails_the_flow, tables_have_room_again
        ]);
        suite!(@each [$(#[$attribute])?] $fixture; abilities: [
            paths_are_set, packets_are_counted, unknown_devices_are_refused, gpu_memory_is_taken_or_refused
        ]);
    };
}
pub(super) use suite;

/// The test with a message of a gibibyte; apart, since one transport is enough.
pub(super) fn a_gibibyte<F: Fixture>() {
    run::<F>(sizes::a_gibibyte);
}

/// A fixture's transports, whose flows die at random bytes.
pub(crate) struct Deadly<F> {
    of: F,
    hosts: u64,
}

impl<F: Fixture> Fixture for Deadly<F>
where
    F::Transport: 'static,
{
    type Transport = Faulty;

    fn new() -> Self {
        Deadly { of: F::new(), hosts: 0 }
    }

    fn transport(&mut self) -> Faulty {
        self.hosts += 1;
        let stall = Duration::from_micros(200);
        let faults = Faults { seed: self.hosts, stalls_percent: 20, stall, accept_delay: stall, ..Faults::default() };
        let faults = Faults { death_bytes: Some(1_000_000), refusals_percent: 5, ..faults };
        Faulty::new(Box::new(self.of.transport()), faults)
    }

    fn now(&mut self) -> Instant {
        self.of.now()
    }

    fn skip(&mut self, by: Duration) {
        self.of.skip(by);
    }

    fn options(&self) -> FlowOptions {
        // A side that waits for a peer that was refused waits for so long.
        let timeout = Duration::from_millis(100);
        FlowOptions { connect_timeout: timeout, peer_timeout: Some(timeout), ..self.of.options() }
    }

    fn flows(&self) -> u64 {
        self.of.flows()
    }

    fn is_deadly(&self) -> bool {
        true
    }
}

/// For fixtures whose flows may die: data is right as far as it comes.
pub(super) fn flows_die_at_random_bytes<F: Fixture>() {
    run::<F>(endings::flows_die_at_random_bytes);
}

pub(super) fn run<F: Fixture>(test: impl FnOnce(&mut harness::Pair<F>)) {
    test(&mut harness::Pair::new());
}
