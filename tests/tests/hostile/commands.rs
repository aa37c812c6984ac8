//! Commands and rings that lie.

use std::time::Duration;

use mccs_ipc::command::{Command, FLAG_GROUP_CONTINUES, FLAG_SCALAR_AT, Opcode};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response, ResponseEnvelope};
use mccs_ipc::types::{Handle, RedOp};

use crate::raw::{Raw, receive};
use crate::victim::{attack, call_fails, session_ends};

#[test]
fn wrong_numbers_fail_the_call() {
    assert!(call_fails(|c| c.opcode = 99).contains("unknown opcode 99"));
    assert!(call_fails(|c| c.dtype = 12).contains("unknown data type 12"));
    assert!(call_fails(|c| c.redop = u32::MAX).contains("unknown reduction"));
    assert!(call_fails(|c| c.kind = 9).contains("unknown collective 9"));
    assert!(call_fails(|c| c.root = 1).contains("1 of 1 ranks"));
}

#[test]
fn memory_that_is_not_the_tenants_fails_the_call() {
    assert!(call_fails(|c| c.send.region.index = 7).contains("does not exist"));
    assert!(call_fails(|c| c.recv.region.generation += 1).contains("does not exist"));
    assert!(call_fails(|c| c.count = 1025).contains("leaves its region of 4096 bytes"));
    assert!(call_fails(|c| c.send.offset_bytes = 4093).contains("leaves its region"));
    assert!(call_fails(|c| c.send.offset_bytes = u64::MAX - 3).contains("leaves its region"));
    assert!(call_fails(|c| c.count = u64::MAX / 2).contains("larger than memory"));
    assert!(call_fails(|c| c.recv.offset_bytes = 4).contains("overlap"));
    for offset in [4093, u64::MAX - 3] {
        let scaled = |c: &mut Command| {
            (c.redop, c.flags, c.scalar_bits) = (RedOp::PreMulSum.to_wire(), FLAG_SCALAR_AT, offset);
        };
        assert!(call_fails(scaled).contains(&format!("the scalar at offset {offset} leaves its region of 4096 bytes")));
    }
}

#[test]
fn forged_handles_and_tickets_end_the_session() {
    assert!(session_ends(|c| c.stream.index = 5).contains("stream"));
    assert!(session_ends(|c| c.stream.generation = 0).contains("stream"));
    assert!(session_ends(|c| c.comm.index = 5).contains("communicator"));
    assert!(session_ends(|c| c.ticket = 2).contains("ticket 2"));
}

/// Puts a number into the first slot of the ring that no command has.
fn lie_about_first_slot(raw: &Raw) {
    // Behind the ring's header of four pairs of lines.
    let number = raw.segment.at::<u64>(raw.layout.commands_offset + 4 * 128, 1).expect("the first slot");
    // SAFETY: inside the mapping; the service reads it atomically.
    unsafe { number.write_volatile(u64::MAX / 2) };
    raw.doorbell.ring();
}

#[test]
fn who_leaves_its_socket_full_still_hears_why_its_session_ends() {
    /// For which a service that reads on has room.
    const ROOM_WITHIN: Duration = Duration::from_millis(500);
    attack(|service| {
        let (raw, mut other) = (Raw::connect(service), Raw::connect(service));
        // The service reads no more once an answer has found no room.
        let ask = |id| {
            raw.socket.send(&RequestEnvelope { id, request: Request::DestroyStream { stream: Handle::NONE } }, &[])
        };
        let asked = (1000..).take_while(|id| ask(*id).is_ok() || raw.socket.wait_writable(ROOM_WITHIN)).count();
        lie_about_first_slot(&raw);
        // Sessions have their turns one after the other: it has had several by then.
        (0..10).for_each(|_| drop(other.ask(Request::DestroyStream { stream: Handle::NONE }, &[])));
        let answers: Vec<_> = std::iter::from_fn(|| receive(&raw.socket)).map(|(envelope, _)| envelope).collect();
        assert!((2..asked).contains(&answers.len()), "{} of {asked}", answers.len());
        let Some(ResponseEnvelope { id: 0, response: Response::Error { message, .. } }) = answers.last() else {
            panic!("{:?}", answers.last())
        };
        assert!(message.contains("contradicts"), "{message}");
    });
}

#[test]
fn a_ring_index_that_lies_ends_the_session() {
    attack(|service| {
        let raw = Raw::connect(service);
        lie_about_first_slot(&raw);
        assert!(raw.fenced().contains("contradicts"));
    });
    // An index that lies is looked at only to count what waits, and harms its own session's order at most.
    attack(|service| {
        let mut raw = Raw::connect(service);
        let produced = raw.segment.at::<u64>(raw.layout.commands_offset, 1).expect("the ring's header");
        // SAFETY: inside the mapping; the service reads it atomically.
        unsafe { produced.write_volatile(u64::MAX / 2) };
        let Response::Done = raw.ask(Request::DestroyStream { stream: raw.stream }, &[]) else { panic!("not done") };
    });
}

#[test]
fn a_group_that_never_ends_ends_the_session() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        (command.opcode, command.flags) = (Opcode::Send as u32, FLAG_GROUP_CONTINUES);
        for ticket in 1..=65 {
            command.ticket = ticket;
            raw.push(&command);
        }
        assert!(raw.fenced().contains("at most 64 operations in a group"));
    });
}

/// Failures pile up unread: the ring of completions is full, the words still rise, the session lives.
#[test]
fn a_session_that_never_reads_its_failures_is_released_all_the_same() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        command.dtype = 99;
        for ticket in 1..=500 {
            command.ticket = ticket;
            while !raw.push(&command) {
                std::thread::yield_now();
            }
        }
        assert!(raw.word().wait(500, Duration::ZERO, Duration::from_secs(600)));
        assert!(matches!(raw.ask(Request::CreateStream, &[]), Response::Stream { .. }));
    });
}
