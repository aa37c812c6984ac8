//! Sends, receives, groups, streams.

use mccs::{CommunicatorBuilder, DataType, Group, RedOp};
use mccs_tests::TestService;

/// Every rank sends to and receives from everybody, itself included, in one group.
#[test]
fn all_to_all_by_a_group_of_sends_and_receives() {
    let (nranks, bytes) = (4u32, 5000u64);
    let service = TestService::start("[host_device]\ninline_bytes = \"1KiB\"\n");
    service.ranks(0, nranks, |rank| {
        let me = rank.comm.rank() as u8;
        let (send, recv) =
            (rank.client.allocate(bytes * 4).expect("memory"), rank.client.allocate(bytes * 4).expect("memory"));
        for round in 0..20u8 {
            // SAFETY: nothing is in flight.
            let (input, output) = unsafe { (send.as_mut_slice(), recv.as_mut_slice()) };
            output.fill(0xa5);
            for peer in 0..nranks as usize {
                input[peer * bytes as usize..][..bytes as usize].fill(round ^ (me * 16 + peer as u8));
            }
            let group = Group::begin();
            for peer in 0..nranks {
                let at = u64::from(peer) * bytes;
                rank.comm.send(send.at(at), bytes, DataType::U8, peer, &rank.stream).expect("send");
                rank.comm.recv(recv.at(at), bytes, DataType::U8, peer, &rank.stream).expect("recv");
            }
            group.end().expect("group");
            rank.stream.synchronize().expect("completed");
            for peer in 0..nranks as usize {
                let right = round ^ (peer as u8 * 16 + me);
                assert!(output[peer * bytes as usize..][..bytes as usize].iter().all(|byte| *byte == right));
            }
        }
    });
}

/// Hundreds of calls in flight on several streams; results depend on the order within each.
#[test]
fn operations_complete_in_stream_order() {
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let count = 300u64;
        let memory = rank.client.allocate(8 * (count + 1)).expect("memory");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        bytes[..8].copy_from_slice(&1u64.to_le_bytes());
        // Each call reads what the one before it wrote: x, 2x, 4x, ... modulo 2^64.
        for i in 0..count {
            let (from, to) = (memory.at(8 * i), memory.at(8 * (i + 1)));
            rank.comm.all_reduce(from, to, 1, DataType::U64, RedOp::Sum, &rank.stream).expect("enqueued");
        }
        let other = rank.client.create_stream().expect("a stream");
        rank.comm.barrier(&other).expect("enqueued");
        other.synchronize().expect("completed");
        assert!(rank.stream.query().expect("no error"), "operations of a communicator complete in order");
        rank.stream.synchronize().expect("completed");
        // SAFETY: all has ended.
        let bytes = unsafe { memory.as_slice() };
        for i in 0..=count as usize {
            let value = u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
            assert_eq!(value, if i < 64 { 1 << i } else { 0 }, "call {i}");
        }
        rank.stream.destroy().expect("idle");
    });
}

/// One thread, one session, several ranks: joined together, used in a group.
#[test]
fn several_ranks_in_one_thread() {
    let service = TestService::start("");
    let client = service.connect(0);
    let id = mccs::unique_id().expect("an id");
    let spec = |rank| client.communicator(id, rank, 3);
    let comms = CommunicatorBuilder::join_all(&[spec(0), spec(1), spec(2)]).expect("joined");
    let memory = client.allocate(3 * 4).expect("memory");
    let streams: Vec<_> = comms.iter().map(|_| client.create_stream().expect("a stream")).collect();
    // SAFETY: nothing is in flight.
    let bytes = unsafe { memory.as_mut_slice() };
    bytes.copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    let group = Group::begin();
    for (comm, stream) in comms.iter().zip(&streams) {
        let place = memory.at(4 * u64::from(comm.rank()));
        comm.all_reduce(place, place, 1, DataType::U32, RedOp::Sum, stream).expect("enqueued");
    }
    group.end().expect("group");
    streams.iter().for_each(|stream| stream.synchronize().expect("completed"));
    assert_eq!(bytes, [6, 0, 0, 0, 6, 0, 0, 0, 6, 0, 0, 0]);
    assert!(mccs::bindings::group_end().is_err(), "no group is open");
}

/// As `?` leaves it: nothing of it is enqueued, and the next group is not part of it.
#[test]
fn a_group_that_is_dropped_enqueues_nothing() {
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let (memory, peer) = (rank.client.allocate(16).expect("memory"), 1 - rank.comm.rank());
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        let exchange = || {
            rank.comm.send(memory.at(0), 1, DataType::U64, peer, &rank.stream).expect("collected");
            rank.comm.recv(memory.at(8), 1, DataType::U64, peer, &rank.stream).expect("collected");
        };
        bytes[0] = 1;
        let group = Group::begin();
        exchange();
        drop(group);
        // One inside takes those around it with it.
        let outer = Group::begin();
        exchange();
        drop(Group::begin());
        let ended = outer.end().expect_err("dropped").to_string();
        assert!(ended.contains("a group inside was dropped"), "{ended}");
        assert_eq!(bytes[8..], [0; 8]);
        bytes[0] = 2;
        let group = Group::begin();
        exchange();
        group.end().expect("enqueued");
        rank.stream.synchronize().expect("completed");
        assert_eq!(bytes[8], 2);
    });
}

/// Memory that the program already had, moved under it into shared pages.
#[test]
fn registered_memory_keeps_its_contents_and_address() {
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let bytes = 64 << 10;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) }.cast::<u8>();
        // SAFETY: `bytes` of the allocation.
        unsafe { ptr.write_bytes(3, bytes) };
        // SAFETY: nobody else uses the range.
        let region = unsafe { rank.client.register(ptr, bytes) }.expect("registered");
        assert_eq!(region.as_ptr(), ptr);
        let place = region.at(0);
        rank.comm.all_reduce(place, place, bytes as u64, DataType::U8, RedOp::Sum, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        drop(region);
        // SAFETY: the pages stay where they are.
        let contents = unsafe { std::slice::from_raw_parts(ptr, bytes) };
        assert!(contents.iter().all(|byte| *byte == 6));
        // SAFETY: as the first time.
        let again = unsafe { rank.client.register(ptr, bytes) }.expect("registered again");
        let place = again.at(0);
        rank.comm.all_reduce(place, place, bytes as u64, DataType::U8, RedOp::Sum, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        assert_eq!(contents[bytes - 1], 12);
        // SAFETY: part of what is registered: refused before anything is touched.
        assert!(unsafe { rank.client.register(ptr, bytes / 2) }.is_err());
        drop(again);
        // SAFETY: misaligned and file-backed ranges are refused before anything is touched.
        let misaligned = unsafe { rank.client.register(ptr.wrapping_add(8), 4096) };
        assert!(misaligned.expect_err("refused").to_string().contains("starts at a page"));
        // SAFETY: the mapping made above, which is not used any more; then a new one in its place.
        let fresh = unsafe {
            libc::munmap(ptr.cast(), bytes);
            libc::mmap(ptr.cast(), bytes, protection, flags | libc::MAP_FIXED_NOREPLACE, -1, 0)
        };
        if fresh == ptr.cast() {
            // SAFETY: a new mapping that nobody uses, where a registered one was.
            let region = unsafe { rank.client.register(ptr, bytes) }.expect("other memory at the same address");
            // SAFETY: nothing is in flight.
            assert!(unsafe { region.as_slice() }.iter().all(|byte| *byte == 0));
        }
    });
}

/// Sends and receives of a group start together, so all of them must be allowed in flight.
#[test]
fn a_group_over_the_quota_is_refused_and_nothing_else_happens() {
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_operations_in_flight = 8\n");
    service.ranks(0, 2, |rank| {
        let (memory, peer) = (rank.client.allocate(4096).expect("memory"), 1 - rank.comm.rank());
        for pairs in [5, 4] {
            let group = Group::begin();
            for i in 0..pairs {
                let (send, recv) = (memory.at(i * 8), memory.at(2048 + i * 8));
                rank.comm.send(send, 1, DataType::U64, peer, &rank.stream).expect("collected");
                rank.comm.recv(recv, 1, DataType::U64, peer, &rank.stream).expect("collected");
            }
            let ended = group.end();
            assert_eq!(ended.is_ok(), pairs == 4, "{ended:?}");
            rank.stream.synchronize().expect("completed");
        }
    });
}

/// The quota is the session's, however many streams a group is spread over: sends that all have begun would otherwise wait for receives
/// that have no room behind them.
#[test]
fn a_group_over_several_streams_has_one_quota() {
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_operations_in_flight = 64\n");
    service.ranks(0, 2, |rank| {
        let (memory, me) = (rank.client.allocate(4096).expect("memory"), rank.comm.rank());
        let other = rank.client.create_stream().expect("a stream");
        for operations in [40, 32] {
            let group = Group::begin();
            for i in 0..operations {
                rank.comm.send(memory.at(8 * i), 1, DataType::U64, 1 - me, &rank.stream).expect("collected");
            }
            for i in 0..operations {
                rank.comm.recv(memory.at(2048 + 8 * i), 1, DataType::U64, 1 - me, &other).expect("collected");
            }
            let ended = group.end();
            if operations == 32 {
                ended.expect("as many as may be");
            } else {
                let refused = ended.expect_err("too many").to_string();
                assert!(refused.contains("80 sends and receives") && refused.contains("64"), "{refused}");
            }
            [&rank.stream, &other].iter().for_each(|stream| stream.synchronize().expect("completed"));
        }
    });
}

/// The files of ranges that the program has unmapped are not kept.
#[test]
fn registrations_that_are_unmapped_leave_no_file_behind() {
    // Found by its length, which nobody else's has here.
    let bytes = 37 * 4096;
    let service = TestService::start("");
    let client = service.connect(0);
    let files = || {
        let files = std::fs::read_dir("/proc/self/fd").expect("descriptors").filter_map(Result::ok);
        let is_own = |path: &std::path::Path| {
            std::fs::read_link(path).is_ok_and(|file| file.to_string_lossy().contains("memfd:mccs-registered"))
                && std::fs::metadata(path).is_ok_and(|file| file.len() == bytes as u64)
        };
        files.filter(|file| is_own(&file.path())).count()
    };
    let registered = || {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody else uses.
        unsafe {
            let ptr = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0).cast::<u8>();
            drop(client.register(ptr, bytes).expect("registered"));
            ptr
        }
    };
    for ptr in (0..8).map(|_| registered()).collect::<Vec<_>>() {
        // SAFETY: mapped above, and not used any more.
        unsafe { libc::munmap(ptr.cast(), bytes) };
    }
    // Unmapped memory is found out when something else is registered. The service closes its own descriptors some time after.
    registered();
    while files() > 1 {
        std::thread::yield_now();
    }
}
