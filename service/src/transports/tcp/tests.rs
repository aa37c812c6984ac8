//! The suite over TCP, in several settings and under bad luck, and what only TCP can get wrong.

use std::time::Duration;

use super::*;
use crate::transports::FlowOptions;
use crate::transports::conformance::{self, Fixture, raise_descriptor_limit, suite};
use crate::transports::faulty::{Faults, Faulty};

/// Real time, and what was skipped of it.
#[derive(Default)]
struct Clock(Duration);

impl Clock {
    fn now(&self) -> Instant {
        Instant::now() + self.0
    }
}

/// Flows with a source each test runs beside thousands of others: half of what the process may have, for both ends.
fn flows() -> u64 {
    (raise_descriptor_limit() / 6).min(3000)
}

macro_rules! fixture {
    ($name:ident, $transport:ty, $options:expr, $flows:expr, $wrap:expr) => {
        struct $name(Clock);

        impl Fixture for $name {
            type Transport = $transport;

            fn new() -> Self {
                $name(Clock::default())
            }

            fn transport(&mut self) -> $transport {
                $wrap(TcpTransport::new().expect("descriptor"))
            }

            fn now(&mut self) -> Instant {
                self.0.now()
            }

            fn skip(&mut self, by: Duration) {
                self.0.0 += by;
            }

            fn options(&self) -> FlowOptions {
                $options
            }

            fn flows(&self) -> u64 {
                $flows
            }
        }
    };
}

fixture!(OneSocket, TcpTransport, FlowOptions::default(), flows(), std::convert::identity);
mod one_socket {
    use super::*;
    suite!(OneSocket);

    #[test]
    fn a_gibibyte() {
        conformance::a_gibibyte::<OneSocket>();
    }
}

fn several() -> FlowOptions {
    FlowOptions { connections: 4, chunk_bytes: 20_000, requests: 16, ..FlowOptions::default() }
}

fixture!(FourSockets, TcpTransport, several(), 50, std::convert::identity);
mod four_sockets {
    use super::*;
    suite!(FourSockets);

    #[test]
    fn a_gibibyte() {
        conformance::a_gibibyte::<FourSockets>();
    }
}

/// Every read and write is a partial one.
fn tiny() -> FlowOptions {
    let options = FlowOptions { connections: 3, chunk_bytes: 4096, ..FlowOptions::default() };
    // A receive buffer below some of loopback's segments would make the kernel wait for its timers.
    FlowOptions { send_buffer_bytes: Some(4096), receive_buffer_bytes: Some(256 << 10), requests: 4, ..options }
}

fixture!(TinyBuffers, TcpTransport, tiny(), 50, std::convert::identity);
mod tiny_buffers {
    use super::*;
    suite!(TinyBuffers);
}

fn delays() -> Faults {
    let stall = Duration::from_micros(200);
    Faults { seed: 5, stalls_percent: 20, stall, accept_delay: stall, ..Faults::default() }
}

fixture!(Delayed, Faulty, several(), 50, |tcp| Faulty::new(Box::new(tcp), delays()));
mod delayed {
    use super::*;
    suite!(Delayed);
}

struct Deadly(Clock, u64);

impl Fixture for Deadly {
    type Transport = Faulty;

    fn new() -> Self {
        Deadly(Clock::default(), 0)
    }

    fn transport(&mut self) -> Self::Transport {
        self.1 += 1;
        let faults = Faults { seed: self.1, death_bytes: Some(1_000_000), refusals_percent: 5, ..delays() };
        Faulty::new(Box::new(TcpTransport::new().expect("descriptor")), faults)
    }

    fn now(&mut self) -> Instant {
        self.0.now()
    }

    fn skip(&mut self, by: Duration) {
        self.0.0 += by;
    }

    fn options(&self) -> FlowOptions {
        // Who waits for a peer that was refused waits for so long.
        FlowOptions { connect_timeout: Duration::from_millis(100), ..several() }
    }

    fn flows(&self) -> u64 {
        50
    }

    fn is_deadly(&self) -> bool {
        true
    }
}

#[test]
fn flows_die_at_random_bytes() {
    conformance::flows_die_at_random_bytes::<Deadly>();
}
