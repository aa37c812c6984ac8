//! As much as goes in.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mccs_ipc::command::{BufferRef, Command, FLAG_GROUP_CONTINUES, Opcode};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::queue::{Producer, Push};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::timeline_semaphore::TimelineSemaphore;
use mccs_tests::TestService;

use crate::raw::Raw;
use crate::victim::{attack, honest_calls};

/// Fills the ring for a while, reads nothing, and leaves without a word.
#[test]
fn a_flood_slows_down_only_itself() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let (mut command, mut ticket) = (raw.command(), 1);
        while ticket < 200_000 {
            command.ticket = ticket;
            if raw.push(&command) {
                ticket += 1;
            } else {
                std::thread::yield_now();
            }
        }
    });
}

/// Closes the socket, but not the segment, and goes on writing commands that never end.
#[test]
fn a_session_whose_socket_is_closed_takes_no_more_than_the_ring_held() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let ordered = Request::CreateOrderedStream { region: raw.region, offset_bytes: 0, overlaps: false };
        let Response::Stream { stream, .. } = raw.ask(ordered, &[]) else { panic!("no stream") };
        let mut command = Command { opcode: Opcode::Nop as u32, stream, ..raw.command() };
        let limit = 64;
        for ticket in 1..=limit {
            command.ticket = ticket;
            assert!(raw.push(&command));
        }
        let sessions = || service.service().registry.sessions();
        // From here on none is taken in turn.
        while !sessions().iter().any(|session| session.in_flight() == limit) {
            std::thread::yield_now();
        }
        let Raw { socket, mut commands, layout, .. } = raw;
        let (mut ticket, most) = (limit, 2 * u64::from(layout.commands_capacity));
        let mut fill = |commands: &mut Producer<Command>| {
            command.ticket = ticket + 1;
            // When the session has ended its pages are gone: that is no sound ring any more.
            while let Ok(Push::Pushed { .. }) = commands.try_push(&command) {
                ticket += 1;
                command.ticket = ticket + 1;
                assert!(ticket - limit <= most, "commands that came after the end are taken");
            }
        };
        fill(&mut commands);
        drop(socket);
        while sessions().iter().any(|session| session.tenant.name == "hostile") {
            (0..1000).for_each(|_| fill(&mut commands));
        }
    });
}

/// A group whose calls are all there before the first may start, and of which each ends as it starts.
#[test]
fn a_long_row_of_calls_that_end_at_once_is_no_chain_of_calls() {
    const CALLS: u64 = 60_000;
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_operations_in_flight = 65536\n");
    let mut raw = Raw::connect(&service);
    let (response, fds) = raw.ask_with_fds(Request::AllocMemory { bytes: 4096 }, &[]);
    let Response::Region { region, .. } = response else { panic!("no memory") };
    let memory = Mapping::map(fds[0].as_fd(), 4096).expect("memory");
    let ordered = Request::CreateOrderedStream { region, offset_bytes: 0, overlaps: false };
    let Response::Stream { stream, .. } = raw.ask(ordered, &[]) else { panic!("no stream") };
    for ticket in 1..=CALLS {
        let flags = if ticket < CALLS { FLAG_GROUP_CONTINUES } else { 0 };
        let command = Command { stream, ticket, flags, ..raw.command() };
        while !raw.push(&command) {
            std::thread::yield_now();
        }
    }
    // SAFETY: the mapping lives to the end of this function.
    unsafe { TimelineSemaphore::at(memory.as_ptr()) }.expect("aligned").open(CALLS);
    let word = StreamWord::at(&raw.segment, raw.layout.words_offset, stream.index).expect("a word");
    assert!(word.wait(CALLS, Duration::ZERO, Duration::from_secs(600)));
}

/// Streams that are made and destroyed without end, by a tenant that is alone and by one that is not.
#[test]
fn requests_without_end_are_served_so_often_a_second_while_others_are_here() {
    const REQUESTS: u32 = 6000;
    let service = TestService::start(
        "[[tenant]]\nname = \"hostile\"\nsocket = \"h\"\n[[tenant]]\nname = \"honest\"\nsocket = \"g\"\n",
    );
    let mut raw = Raw::connect(&service);
    let mut ask_all = || {
        let began = Instant::now();
        for _ in 0..REQUESTS / 2 {
            let Response::Stream { stream, .. } = raw.ask(Request::CreateStream, &[]) else { panic!("no stream") };
            let Response::Done = raw.ask(Request::DestroyStream { stream }, &[]) else { panic!("it is still there") };
        }
        began.elapsed()
    };
    let tenant = service.service().registry.tenants().into_iter().find(|tenant| tenant.name == "hostile");
    let tenant = tenant.expect("the tenant");
    // Nobody waits for anybody else, though these are more than are served at once.
    assert!(!service.service().registry.has_others(&tenant));
    ask_all();
    let honest = service.connect(1);
    assert!(service.service().registry.has_others(&tenant));
    // 4,096 of these are served as they come, and 1,000 each second.
    let took = ask_all();
    assert!(took >= Duration::from_millis(1800), "all are served within {took:?}");
    drop(honest);
}

/// Thirty-two sessions of one tenant push what runs at once on the proxy engine's thread, as fast as they can. Another's call waits
/// for a few of them, not for all that they have enqueued.
#[test]
fn a_flood_of_operations_leaves_others_their_turns() {
    const SESSIONS: usize = 32;
    const FLOATS: u64 = 30_000;
    let service = TestService::start(
        "[[tenant]]\nname = \"hostile\"\nsocket = \"h\"\n[[tenant]]\nname = \"honest\"\nsocket = \"g\"\n",
    );
    let stop = AtomicBool::new(false);
    let taken = || {
        let sessions = service.service().registry.sessions();
        let hostile = sessions.iter().filter(|session| session.tenant.name == "hostile");
        hostile.map(|session| session.counters.commands.load(Ordering::Relaxed)).sum::<u64>()
    };
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let mut sessions: Vec<_> = (0..SESSIONS)
                .map(|_| {
                    let id = mccs::unique_id().expect("an id");
                    let mut raw = Raw::join(&service, id, 0, 1);
                    let bytes = 8 * FLOATS;
                    let Response::Region { region, .. } = raw.ask(Request::AllocMemory { bytes }, &[]) else {
                        panic!("no memory")
                    };
                    let buffer = |offset_bytes| BufferRef { region, offset_bytes };
                    let (send, recv) = (buffer(0), buffer(4 * FLOATS));
                    (Command { count: FLOATS, send, recv, ..raw.command() }, raw)
                })
                .collect();
            while !stop.load(Ordering::Relaxed) {
                for (command, raw) in &mut sessions {
                    while raw.push(command) {
                        command.ticket += 1;
                    }
                }
                std::thread::yield_now();
            }
        });
        // All that its sessions may have in flight.
        while taken() < 20_000 {
            std::thread::yield_now();
        }
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| honest_calls(&service, 30, taken)));
        stop.store(true, Ordering::Relaxed);
        flood.join().expect("the flood");
        let waited = waited.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // If the machine gives this thread no core many go by; in the best case a few do.
        let least = waited.iter().min().expect("calls");
        assert!(*least < 1000, "each call waited for {least} of the flood, or more: {waited:?}");
    });
}
