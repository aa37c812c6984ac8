//! The calls, as programs make them: two devices of one folder, and a queue pair on each.

use std::ffi::{c_int, c_void};
use std::net::Ipv4Addr;
use std::ptr::{null, null_mut};
use std::time::Duration;

use crate::abi::{
    self, AhAttr, AsyncEvent, Context, Cq, Mr, Pd, Qp, QpAttr, QpCap, QpInitAttr, RecvWr, SendWr, Sge, Wc,
};
use crate::control::{Fault, carried, make};
use crate::entries::completions::{ibv_create_cq, ibv_destroy_cq};
use crate::entries::devices::{ibv_close_device, ibv_get_async_event};
use crate::entries::memory::{ibv_alloc_pd, ibv_dealloc_pd, ibv_dereg_mr, ibv_reg_mr_iova2};
use crate::entries::queue_pairs::{ibv_create_qp, ibv_destroy_qp, ibv_modify_qp};
use crate::entries::tested::open_listed;
use crate::fabric::{Fabric, LinkCarried, carried_by_links};
use crate::files::{Listed, RingShape, write_list};

/// A test that has not got further for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const ALL: u32 =
    abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_WRITE | abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_ATOMIC;
const ALL_ATTRIBUTES: c_int = 0x1f_ffff;

struct Side {
    context: *mut Context,
    pd: *mut Pd,
    cq: *mut Cq,
    qp: *mut Qp,
    memory: Vec<u64>,
    mr: *mut Mr,
    listed: Listed,
    /// Flow label of the packets that it sends.
    flow_label: u32,
}

/// Two sides that are connected.
struct Pair {
    sides: [Side; 2],
    folder: tempfile::TempDir,
}

impl Side {
    fn new(folder: &std::path::Path, listed: Listed, words: usize) -> Side {
        let mut memory = vec![0_u64; words];
        let context = open_listed(folder, &listed);
        assert!(!context.is_null());
        let pd = ibv_alloc_pd(context);
        let address: *mut c_void = memory.as_mut_ptr().cast();
        // SAFETY: an open context and what was made of it; the memory lives as long as the registration.
        let (cq, mr) = unsafe {
            let cq = ibv_create_cq(context, 1000, null_mut(), null_mut(), 0);
            (cq, ibv_reg_mr_iova2(pd, address, words * 8, address as u64, ALL))
        };
        let cap = QpCap { max_send_wr: 64, max_recv_wr: 64, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };
        let mut init = QpInitAttr {
            qp_context: null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: null_mut(),
            cap,
            qp_type: abi::QPT_RC,
            sq_sig_all: 1,
        };
        // SAFETY: what was made above.
        let qp = unsafe { ibv_create_qp(pd, &raw mut init) };
        assert!(!qp.is_null() && !mr.is_null());
        Side { context, pd, cq, qp, memory, mr, listed, flow_label: 0 }
    }

    fn number(&self) -> u32 {
        // SAFETY: it lives as long as this.
        unsafe { (*self.qp).qp_num }
    }

    fn part(&self, word: usize, bytes: u32) -> Sge {
        // SAFETY: as above.
        Sge { addr: self.memory.as_ptr() as u64 + word as u64 * 8, length: bytes, lkey: unsafe { (*self.mr).lkey } }
    }

    fn step(&self, state: u32, peer: Option<(u32, [u8; 16])>) {
        let (dest_qp_num, gid) = peer.unwrap_or_default();
        let dgid = [0, 8].map(|at| u64::from_ne_bytes(gid[at..at + 8].try_into().expect("eight")));
        // SAFETY: integers alone.
        let mut attr: QpAttr = unsafe { std::mem::zeroed() };
        attr.qp_state = state;
        attr.qp_access_flags = ALL;
        attr.dest_qp_num = dest_qp_num;
        attr.ah_attr = AhAttr { dgid, flow_label: self.flow_label, is_global: 1, port_num: 1, ..attr.ah_attr };
        // 4 ms, eight times; a receiver that is not ready is asked three times, after 0.1 ms.
        (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) = (10, 7, 3, 8);
        // SAFETY: a queue pair that lives.
        assert_eq!(unsafe { ibv_modify_qp(self.qp, &raw mut attr, ALL_ATTRIBUTES) }, 0, "state {state}");
    }

    fn post(&self, opcode: u32, parts: &[Sge], remote: Option<(u64, u32)>, operands: [u64; 2]) -> c_int {
        let (remote_addr, rkey) = remote.unwrap_or_default();
        let is_atomic = matches!(opcode, abi::WR_ATOMIC_CMP_AND_SWP | abi::WR_ATOMIC_FETCH_AND_ADD);
        let mut wr = SendWr {
            wr_id: u64::from(opcode) + 100,
            next: null_mut(),
            sg_list: parts.as_ptr().cast_mut(),
            num_sge: parts.len() as c_int,
            opcode,
            send_flags: 0,
            imm_data: 0x0102_0304,
            remote_addr,
            rkey_or_compare_add: if is_atomic { operands[0] } else { rkey.into() },
            swap: operands[1],
            atomic_rkey: rkey,
            others: [0; 15],
        };
        let mut refused = null_mut();
        // SAFETY: a queue pair that lives; memory lives as long as this.
        unsafe { ((*self.context).ops.post_send)(self.qp, &raw mut wr, &raw mut refused) }
    }

    fn receive(&self, wr_id: u64, parts: &[Sge]) {
        let mut wr =
            RecvWr { wr_id, next: null_mut(), sg_list: parts.as_ptr().cast_mut(), num_sge: parts.len() as c_int };
        let mut refused = null_mut();
        // SAFETY: as above.
        assert_eq!(unsafe { ((*self.context).ops.post_recv)(self.qp, &raw mut wr, &raw mut refused) }, 0);
    }

    fn completion(&self) -> Wc {
        let start = std::time::Instant::now();
        loop {
            let mut wc = Wc::default();
            // SAFETY: a queue that lives, and room for one.
            if unsafe { ((*self.context).ops.poll_cq)(self.cq, 1, &raw mut wc) } == 1 {
                return wc;
            }
            assert!(start.elapsed() < PATIENCE, "no completion");
            std::thread::yield_now();
        }
    }

    fn event(&self) -> AsyncEvent {
        let mut event = AsyncEvent { element: null::<c_void>().cast_mut(), event_type: u32::MAX };
        // SAFETY: an open context.
        assert_eq!(unsafe { ibv_get_async_event(self.context, &raw mut event) }, 0);
        event
    }

    /// Has its keys be nobody's, as deregistration does; the registration is ended with this.
    fn forget_memory(&self) {
        // SAFETY: an open context, and a registration that lives.
        unsafe { crate::entries::tested::nic_of(self.context).regions().remove((*self.mr).rkey) };
    }

    /// Address of a word, for the peer.
    fn remote(&self, word: usize) -> Option<(u64, u32)> {
        // SAFETY: it lives as long as this.
        Some((self.part(word, 8).addr, unsafe { (*self.mr).rkey }))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // SAFETY: each was made once, and is ended once, before what it was made of.
        unsafe {
            ibv_destroy_qp(self.qp);
            ibv_dereg_mr(self.mr);
            ibv_destroy_cq(self.cq);
            ibv_dealloc_pd(self.pd);
            ibv_close_device(self.context);
        }
    }
}

impl Pair {
    fn new(words: usize) -> Pair {
        Pair::shaped(words, RingShape::default())
    }

    fn shaped(words: usize, shape: RingShape) -> Pair {
        let pair = Pair::apart(words, shape);
        pair.connect();
        pair
    }

    /// Not connected yet.
    fn apart(words: usize, shape: RingShape) -> Pair {
        let folder = tempfile::tempdir().expect("a folder");
        shape.write(folder.path()).expect("a shape");
        let listed = [1, 2].map(|number| Listed {
            host: format!("h{number}"),
            name: "nic".into(),
            address: Ipv4Addr::new(10, 0, 0, number),
            mbit_per_s: 100_000,
            latency_ns: 1000,
            is_infiniband: false,
        });
        write_list(folder.path(), &listed).expect("a list");
        let sides = listed.map(|listed| Side::new(folder.path(), listed, words));
        Pair { sides, folder }
    }

    fn connect(&self) {
        for side in 0..2 {
            let (own, peer) = (&self.sides[side], &self.sides[1 - side]);
            own.step(abi::QPS_INIT, None);
            own.step(abi::QPS_RTR, Some((peer.number(), peer.listed.gid())));
            own.step(abi::QPS_RTS, Some((peer.number(), peer.listed.gid())));
        }
    }

    fn fault(&self, side: usize, fault: Fault) {
        make(self.folder.path(), &self.sides[side].listed.host, "nic", fault).expect("a device");
    }
}

/// Words that nobody else has.
fn random(words: usize, seed: u64) -> Vec<u64> {
    let mut word = seed;
    let mut next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        word ^ word >> 29
    };
    (0..words).map(|_| next()).collect()
}

/// Longer than all slots of a queue pair.
const LONG: usize = 400_000;

#[test]
fn a_long_write_arrives_whole_also_when_packets_are_lost() {
    for (seed, loss) in [(1, 0), (2, 100_000)] {
        let mut pair = Pair::new(LONG);
        pair.sides[0].memory.copy_from_slice(&random(LONG, seed));
        pair.fault(0, Fault::LossPpm(loss));
        let [from, to] = &pair.sides;
        to.receive(7, &[]);
        let parts = [from.part(0, 8), from.part(1, LONG as u32 * 8 - 8)];
        assert_eq!(from.post(abi::WR_RDMA_WRITE_WITH_IMM, &parts, to.remote(0), [0; 2]), 0);
        let [sent, come] = [from, to].map(Side::completion);
        assert_eq!((sent.status, sent.wr_id, come.status, come.wr_id), (0, 101, 0, 7));
        assert_eq!((come.imm_data, come.wc_flags, come.byte_len), (0x0102_0304, abi::WC_WITH_IMM, LONG as u32 * 8));
        assert!(from.memory == to.memory, "all words");
        let sent = carried(pair.folder.path(), "h1", "nic").expect("a device").out_bytes;
        // Also without losses: an answer may take longer than the timer, on a busy host.
        assert!(sent > LONG as u64 * 8 - u64::from(loss == 0), "{sent} bytes");
    }
}

#[test]
fn writes_between_leaves_take_the_links_of_their_spine_at_their_rate() {
    let (bytes, shape) = (LONG as u64 * 8, RingShape::default());
    for (port, spine) in [(50_000, 0), (50_150, 1)] {
        let mut pair = Pair::apart(LONG, shape);
        let leaves = ["h1", "h2"].map(|host| vec![host.to_owned()]).to_vec();
        let fabric = Fabric { leaves, spines: 2, mbit_per_s: 800, first_port: 50_000, ports: 100, seed: 0 };
        fabric.write(pair.folder.path()).expect("a fabric");
        pair.sides[0].flow_label = port & 0x3fff;
        pair.sides[0].memory.copy_from_slice(&random(LONG, port.into()));
        pair.connect();
        let [from, to] = &pair.sides;
        let start = std::time::Instant::now();
        assert_eq!(from.post(abi::WR_RDMA_WRITE, &[from.part(0, bytes as u32)], to.remote(0), [0; 2]), 0);
        assert_eq!(from.completion().status, 0);
        // The first packet finds the link idle.
        let least_ns = (bytes - u64::from(shape.slot_bytes)) * 8 * 1000 / fabric.mbit_per_s;
        assert!(start.elapsed() >= Duration::from_nanos(least_ns), "{:?}", start.elapsed());
        assert!(from.memory == to.memory, "all words");
        for LinkCarried { leaf, spine: of, up_bytes, down_bytes } in
            carried_by_links(pair.folder.path()).expect("links")
        {
            let (is_up, is_down) = ((leaf, of) == (0, spine), (leaf, of) == (1, spine));
            assert_eq!((up_bytes >= bytes, down_bytes >= bytes), (is_up, is_down), "leaf {leaf}, spine {of}");
            assert!((is_up || up_bytes == 0) || leaf == 1, "nothing goes by the other spine");
        }
    }
}

#[test]
fn rings_of_any_shape_carry_long_writes() {
    for (seed, (slot_bytes, slots)) in (1..).zip([(4096, 2), (1 << 20, 3), (3 << 12, 57)]) {
        let mut pair = Pair::shaped(LONG, RingShape { slot_bytes, slots, on_gpus: false });
        pair.sides[0].memory.copy_from_slice(&random(LONG, seed));
        let [from, to] = &pair.sides;
        assert_eq!(from.post(abi::WR_RDMA_WRITE, &[from.part(0, LONG as u32 * 8)], to.remote(0), [0; 2]), 0);
        assert_eq!(from.completion().status, 0);
        assert!(from.memory == to.memory, "{slots} slots of {slot_bytes} bytes");
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (slot_bytes, slots) in [(0, 16), (1000, 16), (32 << 20, 16), (4096, 1), (4096, 5000)] {
        let refusal = RingShape { slot_bytes, slots, on_gpus: false }
            .write(folder.path())
            .expect_err("no shape of rings")
            .to_string();
        assert!(refusal.contains("whole pages of 4096 bytes"), "{refusal}");
    }
    std::fs::write(folder.path().join("ring"), "65536").expect("a file");
    assert!(RingShape::read(folder.path()).is_err(), "half a shape is none");
}

#[test]
fn a_send_fills_the_parts_of_a_receive() {
    let mut pair = Pair::new(10);
    pair.sides[0].memory.copy_from_slice(&random(10, 3));
    let [from, to] = &pair.sides;
    to.receive(1, &[to.part(8, 16), to.part(0, 24)]);
    assert_eq!(from.post(abi::WR_SEND, &[from.part(0, 32)], None, [0; 2]), 0);
    assert_eq!((from.completion().status, to.completion().byte_len), (0, 32));
    assert_eq!((&to.memory[8..], &to.memory[..2]), (&from.memory[..2], &from.memory[2..4]));
    assert_eq!(to.memory[2..8], [0; 6], "nothing else");
}

#[test]
fn a_read_brings_what_is_there_also_when_answers_are_lost() {
    let mut pair = Pair::new(LONG);
    pair.sides[1].memory.copy_from_slice(&random(LONG, 4));
    pair.fault(1, Fault::LossPpm(20_000));
    let [here, there] = &pair.sides;
    assert_eq!(here.post(abi::WR_RDMA_READ, &[here.part(0, LONG as u32 * 8)], there.remote(0), [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_SUCCESS);
    assert!(here.memory == there.memory, "all words");
}

#[test]
fn atomic_operations_give_what_was_there_also_when_answers_are_lost() {
    let mut pair = Pair::new(4);
    pair.sides[1].memory[1] = 40;
    pair.fault(1, Fault::LossPpm(300_000));
    let [here, there] = &pair.sides;
    for (opcode, operands, was, is) in [
        (abi::WR_ATOMIC_FETCH_AND_ADD, [2, 0], 40, 42),
        (abi::WR_ATOMIC_CMP_AND_SWP, [41, 7], 42, 42),
        (abi::WR_ATOMIC_CMP_AND_SWP, [42, 7], 42, 7),
    ] {
        assert_eq!(here.post(opcode, &[here.part(0, 8)], there.remote(1), operands), 0);
        assert_eq!(here.completion().status, abi::WC_SUCCESS);
        // SAFETY: the devices write behind the compiler's back.
        let found = unsafe { [here.memory.as_ptr().read_volatile(), there.memory.as_ptr().add(1).read_volatile()] };
        assert_eq!(found, [was, is]);
    }
}

#[test]
fn who_names_memory_that_is_none_hears_it_and_so_does_its_peer() {
    let pair = Pair::new(4);
    let [here, there] = &pair.sides;
    let (address, key) = there.remote(0).expect("a place");
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], Some((address, key ^ 4)), [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_REM_ACCESS_ERR);
    let event = there.event();
    assert_eq!((event.event_type, event.element), (abi::EVENT_QP_ACCESS_ERR, there.qp.cast()));
    // Neither goes on.
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(0), [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_WR_FLUSH_ERR);
}

#[test]
fn the_request_at_fault_is_blamed_and_those_behind_it_are_flushed() {
    let pair = Pair::new(4);
    let [here, there] = &pair.sides;
    let (address, key) = there.remote(0).expect("a place");
    // So late that all are under way before anything comes back.
    pair.fault(0, Fault::Latency(20_000_000));
    assert_eq!(here.post(abi::WR_RDMA_READ, &[here.part(0, 8)], there.remote(0), [0; 2]), 0);
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], Some((address, key ^ 4)), [0; 2]), 0);
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(1), [0; 2]), 0);
    let found: Vec<(u64, u32)> = (0..3).map(|_| here.completion()).map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(found[1..], [(100, abi::WC_REM_ACCESS_ERR), (100, abi::WC_WR_FLUSH_ERR)]);
    assert_eq!(found[0].0, 104, "the read, with its answer or flushed");
}

#[test]
fn a_read_of_memory_that_is_deregistered_meanwhile_is_refused() {
    let pair = Pair::new(LONG);
    let [here, there] = &pair.sides;
    // Slow enough that the answer is not all gone.
    pair.fault(1, Fault::Rate(1000));
    assert_eq!(here.post(abi::WR_RDMA_READ, &[here.part(0, LONG as u32 * 8)], there.remote(0), [0; 2]), 0);
    while carried(pair.folder.path(), "h1", "nic").expect("a device").in_bytes == 0 {
        std::thread::yield_now();
    }
    there.forget_memory();
    assert_eq!(here.completion().status, abi::WC_REM_ACCESS_ERR);
}

#[test]
fn a_receiver_that_never_posts_ends_the_connection() {
    let pair = Pair::new(4);
    let [here, _there] = &pair.sides;
    assert_eq!(here.post(abi::WR_SEND, &[here.part(0, 8)], None, [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_RNR_RETRY_EXC_ERR);
}

#[test]
fn a_peer_whose_port_is_down_ends_the_connection_after_all_retries() {
    let pair = Pair::new(4);
    pair.fault(1, Fault::Down);
    let [here, there] = &pair.sides;
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(0), [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_RETRY_EXC_ERR);
    assert_eq!(there.event().event_type, abi::EVENT_PORT_ERR);
    pair.fault(1, Fault::Up);
    assert_eq!(there.event().event_type, abi::EVENT_PORT_ACTIVE);
}

#[test]
fn a_queue_pair_that_fails_and_a_device_that_is_lost_flush_and_tell() {
    let pair = Pair::new(4);
    let [here, there] = &pair.sides;
    there.receive(5, &[]);
    pair.fault(1, Fault::QueuePair(there.number()));
    assert_eq!((there.completion().status, there.event().event_type), (abi::WC_WR_FLUSH_ERR, abi::EVENT_QP_FATAL));
    here.receive(6, &[]);
    pair.fault(0, Fault::Fatal);
    assert_eq!((here.completion().status, here.event().event_type), (abi::WC_WR_FLUSH_ERR, abi::EVENT_DEVICE_FATAL));
}

#[test]
fn requests_beyond_the_queue_or_before_the_connection_are_refused() {
    let pair = Pair::new(4);
    let [here, there] = &pair.sides;
    pair.fault(0, Fault::Down);
    let mut codes = (0..65).map(|_| here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(0), [0; 2]));
    assert!(codes.by_ref().take(64).all(|code| code == 0));
    assert_eq!(codes.next(), Some(libc::ENOMEM));
    here.step(abi::QPS_RESET, None);
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(0), [0; 2]), libc::EINVAL);
}

#[test]
fn a_peer_that_is_not_there_ends_the_connection_after_all_retries() {
    let pair = Pair::new(4);
    let [here, there] = &pair.sides;
    here.step(abi::QPS_RESET, None);
    here.step(abi::QPS_INIT, None);
    for state in [abi::QPS_RTR, abi::QPS_RTS] {
        here.step(state, Some((there.number() + 1000, there.listed.gid())));
    }
    assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 8)], there.remote(0), [0; 2]), 0);
    assert_eq!(here.completion().status, abi::WC_RETRY_EXC_ERR);
}

#[test]
fn queue_pairs_that_were_reset_are_connected_again() {
    let mut pair = Pair::new(4);
    pair.sides[0].memory.copy_from_slice(&random(4, 5));
    for _ in 0..3 {
        let [here, there] = &pair.sides;
        assert_eq!(here.post(abi::WR_RDMA_WRITE, &[here.part(0, 32)], there.remote(0), [0; 2]), 0);
        assert_eq!(here.completion().status, abi::WC_SUCCESS);
        assert_eq!(here.memory, there.memory);
        pair.sides.iter().for_each(|side| side.step(abi::QPS_RESET, None));
        pair.connect();
        pair.sides[0].memory.reverse();
    }
}
