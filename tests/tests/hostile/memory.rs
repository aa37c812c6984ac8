//! Memory that is none, or too much.

use std::os::fd::OwnedFd;

use mccs_ipc::command::{Command, FLAG_TWIN, Opcode, P2P_TRACKS};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::shm::{Mapping, make_whole};
use mccs_ipc::types::Handle;
use mccs_tenants::Resource;
use mccs_tenants::process_limits::mappings_of_tenants;
use nix::sys::stat::fstat;

use crate::raw::Raw;
use crate::victim::{attack, call_fails};

#[test]
fn twins_of_what_is_no_rails_memory_are_refused() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let (comm, region) = (raw.comm, raw.region);
        let nowhere = Handle { index: 9, generation: 1 };
        for (comm, region, offset_bytes, bytes, peer, what) in [
            (comm, region, 0, 4096, None, "is no rail of GPUs"),
            (comm, region, 0, 4096, Some(1), "has no messages of GPUs with rank 1"),
            (nowhere, region, 0, 4096, None, "there is no communicator"),
            (nowhere, region, 0, 4096, Some(0), "there is no communicator"),
            (comm, nowhere, 0, 4096, None, "for a twin"),
            (comm, region, 0, 0, None, "for a twin"),
            (comm, region, 1, 4096, Some(u32::MAX), "for a twin"),
            (comm, region, u64::MAX, 2, None, "for a twin"),
        ] {
            match raw.ask(Request::MakeTwin { comm, region, offset_bytes, bytes, peer }, &[]) {
                Response::Error { message, .. } => assert!(message.contains(what), "{message}"),
                other => panic!("{other:?}"),
            }
        }
    });
    assert!(call_fails(|command| command.flags = FLAG_TWIN).contains("a rail that has one"));
    let sends = |change: fn(&mut Command)| {
        call_fails(|command| {
            (command.opcode, command.kind) = (Opcode::Send as u32, 0);
            change(command);
        })
    };
    assert!(sends(|command| command.flags = FLAG_TWIN).contains("whose region has one"));
    assert!(sends(|command| command.kind = P2P_TRACKS).contains("track 2 of 2"));
}

#[test]
fn memory_of_gpus_that_is_none_is_refused() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let refused = |raw: &mut Raw, request, fds: &[OwnedFd]| match raw.ask(request, fds) {
            Response::Error { message, .. } => message,
            other => panic!("{other:?}"),
        };
        let register = Request::RegisterGpuMemory { gpu: [7; 16], ipc_handle: vec![0; 64], bytes: 4096 };
        let said = refused(&mut raw, register, &[]);
        assert!(said.contains("no GPUs") || said.contains("does not have the GPU"), "{said}");
        let name = |bytes: &[u64]| Request::NameGpuSegments { begins: false, bytes: bytes.to_vec() };
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
        let memfd = || Mapping::create("x", 4096).expect("memory").0;
        assert!(refused(&mut raw, name(&[4096]), &[]).contains("a descriptor each"));
        assert!(refused(&mut raw, name(&[]), &[null()]).contains("a descriptor each"));
        assert!(refused(&mut raw, name(&[4096]), &[memfd()]).contains("something else"));
        assert!(refused(&mut raw, name(&[4096, 4095]), &[null(), null()]).contains("not whole pages"));
        // More than a region has, and none of them kept.
        let quota = mccs_tenants::process_limits::descriptors_of_tenant();
        for _ in 0..2 {
            let taken = (0..).take_while(|_| raw.ask(name(&[4096]), &[null()]) == Response::Done).count() as u64;
            assert_eq!(taken, quota);
        }
        // Memory that was named before is dropped: together they would be too many.
        for _ in 0..2 * quota {
            let first = Request::NameGpuSegments { begins: true, bytes: vec![4096] };
            assert_eq!(raw.ask(first, &[null()]), Response::Done);
        }
        let said = refused(&mut raw, Request::RegisterGpuSegments { gpu: [7; 16] }, &[]);
        assert!(said.contains("no GPUs") || said.contains("does not have the GPU"), "{said}");
        assert!(matches!(raw.ask(Request::CreateStream, &[]), Response::Stream { .. }), "the session goes on");
    });
}

/// A process has a limited number of mappings: a tenant with all of them would leave the service none for anybody.
#[test]
fn regions_without_end_leave_room_for_others() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let bytes = 2 << 20;
        let (memory, _) = Mapping::create("memory", bytes).expect("a memfd");
        make_whole(&memory, bytes).expect("room");
        let message = loop {
            let fd = memory.try_clone().expect("a descriptor");
            match raw.ask(Request::RegisterMemory { bytes }, &[fd]) {
                Response::Region { .. } => {}
                Response::Error { message, .. } => break message,
                other => panic!("{other:?}"),
            }
        };
        assert!(message.contains("over its quota"), "{message}");
        let (maps, most) = (std::fs::read_to_string("/proc/self/maps").expect("the maps"), mappings_of_tenants());
        assert!((maps.lines().count() as u64) < most, "{most} at most");
        // If the kernel allows more than its default, the tenant's memory may come to an end before.
        assert!(message.contains("mappings") || most > 60_000, "{message}");
    });
}

/// Allocates, has the service write, frees, keeps the descriptor, and again: what is charged is what is there.
#[test]
fn memory_that_is_freed_is_gone_for_those_who_keep_it() {
    const BYTES: u64 = 4 << 20;
    attack(|service| {
        let mut raw = Raw::connect(service);
        let tenant = service.service().registry.sessions().into_iter().find(|one| one.tenant.name == "hostile");
        let tenant = std::sync::Arc::clone(&tenant.expect("its session").tenant);
        let before = tenant.used(Resource::MemoryBytes);
        let mut kept = Vec::new();
        for ticket in 1..=8 {
            let (response, fds) = raw.ask_with_fds(Request::AllocMemory { bytes: BYTES }, &[]);
            let Response::Region { region, .. } = response else { panic!("{response:?}") };
            let buffer = |offset_bytes| mccs_ipc::command::BufferRef { region, offset_bytes };
            let (send, recv, count) = (buffer(0), buffer(BYTES / 2), BYTES / 8);
            let command = mccs_ipc::command::Command { send, recv, count, ticket, ..raw.command() };
            assert!(raw.push(&command));
            assert_eq!(raw.ask(Request::FreeMemory { region }, &[]), Response::Done);
            kept.extend(fds);
        }
        assert!(raw.word().wait(8, std::time::Duration::ZERO, std::time::Duration::from_secs(600)));
        while tenant.used(Resource::MemoryBytes) > before {
            std::thread::yield_now();
        }
        let held: i64 = kept.iter().map(|fd| fstat(fd).expect("looks").st_blocks * 512).sum();
        assert_eq!(held, 0, "nothing is charged for it");
    });
}

/// Memory that is free again in a moment is waited for: a program may allocate as much as it has just freed.
#[test]
fn who_frees_all_it_may_have_can_allocate_it_again_at_once() {
    const BYTES: u64 = 64 << 20;
    let service = mccs_tests::TestService::start("[[tenant]]\nname = \"hostile\"\nmax_memory = \"96MiB\"\n");
    let mut raw = Raw::connect(&service);
    for _ in 0..20 {
        let response = raw.ask(Request::AllocMemory { bytes: BYTES }, &[]);
        let Response::Region { region, .. } = response else { panic!("{response:?}") };
        assert_eq!(raw.ask(Request::FreeMemory { region }, &[]), Response::Done);
    }
    assert!(matches!(raw.ask(Request::AllocMemory { bytes: 2 * BYTES }, &[]), Response::Error { .. }));
}

#[test]
fn memory_whose_pages_the_service_would_have_to_make_is_refused() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let (sparse, _) = Mapping::create("sparse", 1 << 20).expect("a memfd");
        let fd = || sparse.try_clone().expect("a descriptor");
        let register = || Request::RegisterMemory { bytes: 1 << 20 };
        let Response::Error { message, .. } = raw.ask(register(), &[fd()]) else { panic!("registered") };
        assert!(message.contains("fallocate()"), "{message}");
        make_whole(&sparse, 1 << 20).expect("room");
        assert!(matches!(raw.ask(register(), &[fd()]), Response::Region { .. }));
    });
}
