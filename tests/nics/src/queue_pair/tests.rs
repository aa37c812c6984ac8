//! A queue pair at steps whose times a test chooses. The test acts as its peer, by the words that both share.

use super::*;
use crate::abi::{ACCESS_LOCAL_WRITE, WC_SUCCESS, WR_RDMA_WRITE};
use crate::files::{Listed, RingShape};
use crate::memory::Region;

const RETRY_NS: u64 = 1000;
const WORD_BYTES: u32 = 8;

#[test]
fn what_is_sent_after_a_late_answer_begins_behind_what_was_acknowledged() {
    let folder = tempfile::tempdir().expect("a folder");
    // Two packets fill the peer's ring: nothing more leaves before it has emptied slots.
    RingShape { slot_bytes: 4096, slots: 2, on_gpus: false }.write(folder.path()).expect("a shape");
    let listed = |number| Listed {
        host: format!("h{number}"),
        name: "nic".into(),
        address: std::net::Ipv4Addr::new(10, 0, 0, number),
        mbit_per_s: 100_000,
        latency_ns: 0,
        is_infiniband: false,
    };
    let gids = [listed(1).gid(), listed(2).gid()];
    let ports = [1, 2].map(|number| Port::open(folder.path(), &listed(number)).expect("a port"));
    let [own_port, peers_port] = ports;
    let own = Arc::new(Ring::create(folder.path(), gids[0], 1).expect("a ring"));
    let peers = Ring::create(folder.path(), gids[1], 2).expect("a ring");
    let peer = Peer {
        ring: Ring::open(folder.path(), gids[1], 2).expect("the peer's"),
        port: peers_port,
        bell: Bell::create(folder.path(), gids[1], 1).expect("a bell"),
        route: None,
        twin: None,
    };
    let mut qp = QueuePair::new(1, Arc::clone(&own), [std::ptr::null(); 2], [8; 2]);
    qp.connect(peer);
    (qp.state, qp.signals_all) = (QPS_RTS, true);
    qp.timers = Timers { retry_ns: RETRY_NS, retries: 7, rnr_retries: 7, rnr_ns: 0 };

    // The word that is read into, and those that are written.
    let mut words = [0_u64, 11, 22];
    let base = words.as_mut_ptr() as u64;
    let mut regions = Regions::default();
    let key = regions.add(Region { iova: base, base, bytes: 24, access: ACCESS_LOCAL_WRITE, gpu: None });
    let request = |opcode, word: u64| {
        let part = Sge { addr: base + word * 8, length: WORD_BYTES, lkey: key };
        Request { is_signaled: true, ..Request::new(word, opcode, vec![part], WORD_BYTES) }
    };
    let copies = Mutex::new(Copies::default());
    let step = |qp: &mut QueuePair, now_ns| {
        let mut completions = Vec::new();
        let port = own_port.words();
        let mut lent = Lent { regions: &regions, copies: &copies, port, now_ns, completions: &mut completions };
        qp.step(&mut lent).expect("nothing fails");
        completions.iter().map(|(_, wc)| (wc.wr_id, wc.status)).collect::<Vec<_>>()
    };

    qp.enqueue(request(WR_RDMA_READ, 0), 0);
    qp.enqueue(request(WR_RDMA_WRITE, 1), 0);
    assert_eq!(step(&mut qp, 0), []);
    assert_eq!(peers.words().filled.load(Ordering::Acquire), 2);
    // Both have arrived, and the answer has not: after a time the read is to be sent again, and there is no room.
    peers.words().arrived.store(2, Ordering::Release);
    assert_eq!(step(&mut qp, 1), []);
    assert_eq!(step(&mut qp, 1 + RETRY_NS), []);
    assert_eq!(peers.words().filled.load(Ordering::Acquire), 2);
    let answer = Head { psn: 0, opcode: ANSWER, bytes: WORD_BYTES, total: WORD_BYTES, ..Head::default() };
    // SAFETY: a slot that is not filled is the peer's, and has room for a word.
    unsafe {
        own.data(0).cast::<u64>().write(33);
        own.head(0).write_volatile(answer);
    }
    own.words().filled.store(1, Ordering::Release);
    assert_eq!(step(&mut qp, 2 + RETRY_NS), [(0, WC_SUCCESS), (1, WC_SUCCESS)]);
    // Once there is room, what comes next is the next packet, whole.
    peers.words().emptied.store(2, Ordering::Release);
    qp.enqueue(request(WR_RDMA_WRITE, 2), 3 + RETRY_NS);
    assert_eq!(step(&mut qp, 3 + RETRY_NS), []);
    assert_eq!(peers.words().filled.load(Ordering::Acquire), 3);
    // SAFETY: a filled slot is the peer's.
    let (head, sent) = unsafe { (peers.head(2).read_volatile(), peers.data(2).cast::<u64>().read()) };
    assert_eq!((head.psn, head.offset, head.bytes, sent), (2, 0, WORD_BYTES, 22));
    assert_eq!(words, [33, 11, 22]);
}
