//! FIFOs of port channels whose words are whatever their tenant writes: each lie ends its own communicator, with a reason, and
//! writes nothing outside what was registered.

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::Duration;

use mccs::UniqueId;
use mccs_ipc::port_channels::{
    Kinds, OFFSET_MAX, PUT_BYTES_MAX, PortChannelAnswer, PortChannelRequest, PortChannelSegment, PutMemories, Trigger,
};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::Handle;
use mccs_tests::TestService;

use crate::raw::Raw;

const SLOTS: u32 = 8;

/// A rank alone, with port channel 0 to itself from the first to the second 1 KiB of its memory's first half.
struct Forger {
    raw: Raw,
    segment: PortChannelSegment,
    source: Handle,
}

impl Forger {
    fn new(service: &TestService) -> Self {
        let mut raw = Raw::connect(service);
        let (comm, region) = (raw.comm, raw.region);
        let open = Request::PortChannel { comm, request: PortChannelRequest::Open { fifo_slots: SLOTS } };
        let (Response::PortChannels { layout }, fds) = raw.ask_with_fds(open, &[]) else { panic!("no segment") };
        let segment = PortChannelSegment::map(fds[0].as_fd(), layout).expect("a segment");
        let mut forger = Forger { raw, segment, source: Handle::NONE };
        let memory = |forger: &mut Forger, offset_bytes| {
            let request = PortChannelRequest::Register { region, offset_bytes, bytes: 1024 };
            let PortChannelAnswer::Memory(memory) = forger.ask(request) else { panic!("no memory") };
            memory
        };
        forger.source = memory(&mut forger, 0);
        let destination = memory(&mut forger, 1024);
        let connection = forger.ask(PortChannelRequest::Connect { peer: 0, tag: 5 });
        assert_eq!(connection, PortChannelAnswer::Connection(0));
        let memories = Some(PutMemories { source: forger.source, destination });
        let channel = forger.ask(PortChannelRequest::OpenChannel { connection: 0, memories });
        assert_eq!(channel, PortChannelAnswer::Channel(0));
        forger
    }

    fn ask(&mut self, request: PortChannelRequest) -> PortChannelAnswer {
        match self.raw.ask(Request::PortChannel { comm: self.raw.comm, request }, &[]) {
            Response::PortChannel { answer } => answer,
            other => panic!("{other:?}"),
        }
    }

    fn write(&self, trigger: Trigger) {
        let fifo = self.segment.producer().expect("a FIFO");
        let position = fifo.claim();
        assert!(fifo.wait_for_room(position, Duration::ZERO, Duration::from_secs(600)));
        if fifo.write(position, &trigger) {
            self.raw.doorbell.ring();
        }
    }

    /// The reason for which the communicator fails. The session goes on.
    fn failure(mut self) -> String {
        let Response::Stream { .. } = self.raw.ask(Request::CreateStream, &[]) else { panic!("the session has ended") };
        self.raw.reports(1).remove(0).1
    }
}

fn put(bytes: u64, source_offset: u64, destination_offset: u64) -> Trigger {
    Trigger { kinds: Kinds::PUT, channel: 0, bytes, source_offset, destination_offset }
}

/// The service's answer to a trigger behind a right one.
fn said_to(trigger: Trigger) -> String {
    let service = TestService::start("");
    let forger = Forger::new(&service);
    forger.write(put(1024, 0, 0));
    forger.write(trigger);
    let said = forger.failure();
    assert!(said.contains("rank 0 made an invalid call"), "{said}");
    said
}

#[test]
fn triggers_that_lie_end_their_communicator() {
    for (trigger, says) in [
        (put(1025, 0, 0), "takes 1025 bytes at offset 0 of memory"),
        (put(1, 1024, 0), "takes 1 bytes at offset 1024 of memory"),
        (put(1024, 0, 1), "takes 1024 bytes at offset 1 of memory"),
        (put(PUT_BYTES_MAX, OFFSET_MAX, 0), "which has 1024"),
        (put(1, 0, OFFSET_MAX), "which has 1024"),
        (Trigger { channel: 1, ..put(1, 0, 0) }, "port channel 1 is not open"),
        (Trigger { channel: (1 << 14) - 1, ..put(1, 0, 0) }, "port channel 16383 is not open"),
    ] {
        let said = said_to(trigger);
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn a_trigger_that_asks_for_nothing_ends_its_communicator() {
    let service = TestService::start("");
    let forger = Forger::new(&service);
    forger.write(Trigger { kinds: Kinds::NONE, ..put(0, 0, 0) });
    let said = forger.failure();
    assert!(said.contains("asks for nothing"), "{said}");
}

#[test]
fn a_channel_that_was_closed_and_a_memory_that_was_freed_are_of_no_use() {
    let service = TestService::start("");
    let mut forger = Forger::new(&service);
    assert_eq!(forger.ask(PortChannelRequest::CloseChannel { channel: 0 }), PortChannelAnswer::Done);
    forger.write(put(1, 0, 0));
    let said = forger.failure();
    assert!(said.contains("port channel 0 is not open"), "{said}");
    let service = TestService::start("");
    let mut forger = Forger::new(&service);
    let memory = forger.source;
    assert_eq!(forger.ask(PortChannelRequest::Free { memory }), PortChannelAnswer::Done);
    forger.write(put(1, 0, 0));
    let said = forger.failure();
    assert!(said.contains("which was freed"), "{said}");
}

#[test]
fn a_peer_that_goes_under_puts_releases_who_waits_for_it() {
    let (service, id, is_there) = (TestService::start(""), mccs::unique_id().expect("an id"), Barrier::new(2));
    let text = std::thread::scope(|scope| {
        let (client, is_there) = (service.connect(0), &is_there);
        let peer = scope.spawn(move || {
            let comm = client.communicator(id, 1, 2).join().expect("joined");
            let channel = comm.port_channels().expect("opened").signal_channel(0, 1).expect("a channel");
            is_there.wait();
            channel.wait().expect("signalled");
            channel.wait().expect_err("rank 0 has gone").to_string()
        });
        let mut raw = Raw::join(&service, UniqueId(id.0), 0, 2);
        let comm = raw.comm;
        let open = Request::PortChannel { comm, request: PortChannelRequest::Open { fifo_slots: SLOTS } };
        let (Response::PortChannels { layout }, fds) = raw.ask_with_fds(open, &[]) else { panic!("no segment") };
        let segment = PortChannelSegment::map(fds[0].as_fd(), layout).expect("a segment");
        let mut forger = Forger { raw, segment, source: Handle::NONE };
        assert_eq!(forger.ask(PortChannelRequest::Connect { peer: 1, tag: 1 }), PortChannelAnswer::Connection(0));
        let signals = PortChannelRequest::OpenChannel { connection: 0, memories: None };
        assert_eq!(forger.ask(signals), PortChannelAnswer::Channel(0));
        forger.write(Trigger { kinds: Kinds::SIGNAL, ..put(0, 0, 0) });
        // A hole, behind which nothing is read, and then the end.
        forger.segment.producer().expect("a FIFO").claim();
        forger.write(Trigger { kinds: Kinds::SIGNAL, ..put(0, 0, 0) });
        // The first has been taken when its slot is free.
        let fifo = forger.segment.producer().expect("a FIFO");
        assert!(fifo.wait_for_room(SLOTS.into(), Duration::ZERO, Duration::from_secs(600)));
        is_there.wait();
        drop((forger, fifo));
        peer.join().expect("rank 1")
    });
    assert!(text.contains("signal 2 of (0, tag 1)") && text.contains("has gone"), "{text}");
}
