//! Work that other threads have keeps its memory mapped, whatever becomes of the operations that it was made for.

use std::sync::{Arc, Weak};

use mccs_device::host::{HostDevice, HostOptions};
use mccs_device::{
    BoundSchedule, LaunchError, Launched, Operand, Piece, PieceJob, PointToPoint, Quantum, RemoteMessage, Workers,
};
use mccs_ipc::types::Handle;
use mccs_tenants::regions::{Region, UnmapWorker};
use mccs_tenants::testing::region;
use rand::Rng;

/// Two pieces and a half, of four parts each.
const BYTES: u64 = 5 << 16;
const PIECE_BYTES: u64 = 1 << 17;
const JOB: Handle = Handle { index: 0, generation: 1 };

/// Workers that keep what they are given.
#[derive(Default)]
struct Kept {
    pieces: Vec<Arc<dyn PieceJob>>,
    schedules: Vec<BoundSchedule>,
}

impl Workers for Kept {
    fn run_pieces(&mut self, pieces: Arc<dyn PieceJob>, _job: Handle) {
        self.pieces.push(pieces);
    }

    fn run_channels(&mut self, schedule: BoundSchedule, _job: Handle) -> Result<Launched, LaunchError> {
        self.schedules.push(schedule);
        Ok(Launched::Running)
    }

    fn run_message(
        &mut self,
        schedule: BoundSchedule,
        _src: u32,
        _dst: u32,
        _track: u32,
        _job: Handle,
    ) -> Result<(), LaunchError> {
        self.schedules.push(schedule);
        Ok(())
    }
}

/// A device that runs nothing at once.
fn device() -> HostDevice {
    let options = HostOptions {
        inline_bytes: 0,
        piece_bytes: PIECE_BYTES,
        streaming_bytes: u64::MAX,
        shm_exchange_slot_bytes: 0,
    };
    HostDevice::new(options)
}

fn whole(region: &Arc<Region>) -> Operand {
    Operand::in_region(region, 0, BYTES).expect("all of the region")
}

fn is_mapped(region: &Weak<Region>) -> bool {
    region.upgrade().is_some()
}

#[test]
fn pieces_keep_memory_mapped_until_they_are_dropped() {
    let unmap_worker = UnmapWorker::start().expect("a thread");
    let ((from, source), (to, destination)) =
        (region(BYTES, unmap_worker.clone()), region(BYTES, unmap_worker.clone()));
    let mut sent = vec![0; BYTES as usize];
    rand::rng().fill(&mut *sent);
    // SAFETY: the mapping has as many bytes, and nobody else uses them yet.
    unsafe { source.as_ptr().copy_from_nonoverlapping(sent.as_ptr(), sent.len()) };
    let mut kept = Kept::default();
    let launched = device().copy(&whole(&from), &whole(&to), JOB, &mut kept);
    assert_eq!(launched, Launched::Running);
    let weak = [Arc::downgrade(&from), Arc::downgrade(&to)];
    // The operations have gone: their session has ended, say.
    drop((from, to));
    assert!(weak.iter().all(is_mapped), "the pieces are to come");
    let job = kept.pieces.pop().expect("pieces");
    // Threads take whole pieces and parts as they are shared or not, in any order.
    let random = || if rand::rng().random() { Quantum::Part } else { Quantum::Piece };
    let last = std::iter::repeat_with(|| job.run_piece(random())).find(|piece| *piece != Piece::Ran);
    assert_eq!((last, job.run_piece(random())), (Some(Piece::RanLast), Piece::NoneLeft));
    assert_eq!(job.quantum_ns(Quantum::Piece) / job.quantum_ns(Quantum::Part), 4);
    let mut received = vec![0; sent.len()];
    // SAFETY: as above; the pieces have run.
    unsafe { destination.as_ptr().copy_to_nonoverlapping(received.as_mut_ptr(), received.len()) };
    assert!(received == sent);
    drop(job);
    assert!(!weak.iter().any(is_mapped), "nobody uses them any more");
}

#[test]
fn a_message_to_another_host_keeps_memory_mapped_until_it_is_dropped() {
    let unmap_worker = UnmapWorker::start().expect("a thread");
    let (from, _) = region(BYTES, unmap_worker.clone());
    let (operand, mut kept) = (whole(&from), Kept::default());
    let message = RemoteMessage { src: 0, dst: 1, track: 0, rank: 0, operand: &operand };
    device().exchange(&message, JOB, &mut kept).expect("given to the workers");
    let weak = Arc::downgrade(&from);
    drop((from, operand));
    assert!(is_mapped(&weak), "the message is to be sent");
    kept.schedules.clear();
    assert!(!is_mapped(&weak), "nobody uses it any more");
}

#[test]
fn an_operand_is_inside_its_region() {
    let unmap_worker = UnmapWorker::start().expect("a thread");
    let (region, _) = region(BYTES, unmap_worker.clone());
    let operand = Operand::in_region(&region, BYTES - 8, 8).expect("the last bytes");
    assert_eq!((operand.ptr() as usize - whole(&region).ptr() as usize, operand.bytes()), (BYTES as usize - 8, 8));
    for (offset_bytes, bytes) in [(BYTES - 8, 9), (BYTES + 1, 0), (u64::MAX, 2), (0, u64::MAX)] {
        assert!(Operand::in_region(&region, offset_bytes, bytes).is_none(), "{bytes} bytes at {offset_bytes}");
    }
}
