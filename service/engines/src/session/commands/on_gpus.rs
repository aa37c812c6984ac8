//! Validation of operations of ranks on GPUs, before copy engines are given them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mccs_device::cuda::GpuOperand;
use mccs_device::{Buffers, DeviceInitiatedGroup, GpuBuffers};
use mccs_ipc::command::{BufferRef, Command, FLAG_COPIED, Opcode};
use mccs_ipc::large::has_large;
use mccs_ipc::types::{BufferRange, CollectiveKind, DataType, RedOp};
use mccs_model::{Action, Scalar};
use mccs_telemetry::LogBudget;
use mccs_tenants::session::Session;

use super::{Fence, Invalid, argument};
use crate::proxy::Operation;
use crate::session::tables::Memory;

/// Distance that stands for ranges of different regions in a check of overlaps: apart.
const APART: u64 = 1 << 62;

/// Checks a command to a communicator of GPUs, and completes its operation.
pub(crate) fn fill_on_gpus(
    operation: &mut Operation,
    memory: &Memory,
    command: &Command,
    group: Option<&Arc<DeviceInitiatedGroup>>,
    nranks: u32,
) -> Result<Result<(), Invalid>, Fence> {
    let Some(copy_engines) = group.and_then(|group| group.large()) else {
        return Err(Fence("a command is for copy engines, and its communicator has none".into()));
    };
    if Opcode::from_wire(command.opcode) != Some(Opcode::Collective) {
        return Err(Fence(format!("a command with opcode {} names a communicator of GPUs", command.opcode)));
    }
    Ok(fill(operation, memory, command, nranks).map(|(send, recv)| {
        operation.buffers = Buffers::Gpu(Box::new(GpuBuffers { copy_engines: Arc::clone(copy_engines), send, recv }));
    }))
}

/// Send and receive operands.
type SendRecv = (Option<GpuOperand>, Option<GpuOperand>);

/// Completes an operation but for its buffers, which are returned.
fn fill(operation: &mut Operation, memory: &Memory, command: &Command, nranks: u32) -> Result<SendRecv, Invalid> {
    let unknown = |what: &str, value: u32| argument(format!("unknown {what} {value}"));
    let dtype = DataType::from_wire(command.dtype).ok_or_else(|| unknown("data type", command.dtype))?;
    let kind = CollectiveKind::from_wire(command.kind).ok_or_else(|| unknown("collective", command.kind))?;
    let redop = RedOp::from_wire(command.redop).ok_or_else(|| unknown("reduction", command.redop))?;
    let (count, rank, root) = (command.count, operation.rank, command.root);
    if root >= nranks {
        return Err(argument(format!("root {root} of {nranks} ranks")));
    }
    if !has_large(kind, redop) {
        return Err(argument(format!("{kind} with {redop} does not go by copy engines")));
    }
    let size = dtype.size_bytes() as u64;
    let bytes = |count: Option<u64>| count.and_then(|count| count.checked_mul(size));
    let send_bytes = bytes(kind.send_count(count, nranks, rank, root));
    let recv_bytes = bytes(kind.recv_count(count, nranks, rank, root));
    // Ranges of all ranks together are addressed, too.
    let whole = bytes(count.checked_mul(u64::from(nranks)));
    let (Some(send_bytes), Some(recv_bytes), Some(_)) = (send_bytes, recv_bytes, whole) else {
        return Err(argument("a buffer would be larger than memory"));
    };
    let send = operand(memory, "send", &command.send, send_bytes)?;
    let recv = operand(memory, "receive", &command.recv, recv_bytes)?;
    let place = |operand: &Option<GpuOperand>| operand.as_ref().map_or(0, |operand| operand.offset_bytes);
    let is_one = matches!((&send, &recv), (Some(send), Some(recv)) if Arc::ptr_eq(&send.region, &recv.region));
    let recv_place = if is_one { place(&recv) } else { APART };
    let send_range = BufferRange { start: place(&send), bytes: send_bytes };
    let recv_range = BufferRange { start: recv_place, bytes: recv_bytes };
    if !kind.accepts_gpu_buffers(rank, root, send_range, recv_range) {
        return Err(argument(format!("{kind}: send and receive buffers overlap, and not as in-place calls do")));
    }
    if command.flags & FLAG_COPIED != 0 {
        note_copied(&operation.session);
    }
    operation.dtype = dtype;
    operation.action = Action::Collective { kind, redop, scalar: Scalar::Bits(command.scalar_bits), root };
    Ok((send, recv))
}

/// Counts an operation whose buffers had to be copied, and says so of the first of a session.
fn note_copied(session: &Session) {
    static BUDGET: Mutex<LogBudget> = Mutex::new(LogBudget::new());
    if session.counters.copied.fetch_add(1, Ordering::Relaxed) > 0 {
        return;
    }
    let suppressed = BUDGET.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
    if let Some(suppressed) = suppressed {
        let (id, tenant, pid) = (session.id, &session.tenant.name, session.peer.pid);
        tracing::warn!(
            session = id, %tenant, pid, suppressed,
            "large operations of this process copy their buffers first: what cudaMallocAsync and cuMemCreate without descriptors allocate cannot be opened, nor \
             what cudaMalloc does where memory goes by descriptors (docs/CUDA.md)"
        );
    }
}

fn operand(memory: &Memory, what: &str, buffer: &BufferRef, bytes: u64) -> Result<Option<GpuOperand>, Invalid> {
    if bytes == 0 {
        return Ok(None);
    }
    let region = memory.gpu_region(buffer.region);
    let region =
        region.ok_or_else(|| argument(format!("the {what} buffer's region {:?} does not exist", buffer.region)))?;
    if !region.contains(buffer.offset_bytes, bytes) {
        let (offset, size) = (buffer.offset_bytes, region.len_bytes());
        return Err(argument(format!(
            "the {what} buffer, {bytes} bytes at offset {offset}, leaves its region of {size} bytes"
        )));
    }
    Ok(Some(GpuOperand { region: Arc::clone(region), offset_bytes: buffer.offset_bytes }))
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;
    use mccs_device::cuda::Importer;
    use mccs_device::{Ended, SymmetricBuffers};
    use mccs_ipc::types::{ErrorClass, Handle};
    use mccs_tenants::{Quota, Tenant, testing};

    use super::*;
    use crate::proxy::RoundState;

    const NRANKS: u32 = 2;
    const REGION_BYTES: u64 = 1 << 20;

    /// Symmetric buffers of which nobody asks.
    struct Unasked;

    impl SymmetricBuffers for Unasked {
        fn read(&self, _: &Arc<Ended>) {}
    }

    /// A rank's session, with a region.
    struct Fixture {
        memory: Memory,
        group: Arc<DeviceInitiatedGroup>,
        session: Arc<Session>,
        region: Handle,
    }

    impl Fixture {
        fn new() -> Self {
            let tenant = Tenant::new("a".into(), Quota::least());
            let region = Importer::for_tests().by_handle(&tenant, 1, &[1; 64], REGION_BYTES).expect("a region");
            let (memory, region) = Memory::for_tests(&tenant.quota, region);
            let session = testing::session(1, &tenant);
            let group = DeviceInitiatedGroup::for_tests(NRANKS, Box::new(Unasked));
            Fixture { memory, group: Arc::new(group), session, region }
        }

        fn operation(&self, count: u64) -> Operation {
            Operation {
                session: Arc::clone(&self.session),
                stream: Handle::NONE,
                ticket: 1,
                called_at: Instant::now(),
                comm: Handle::NONE,
                tenant_comm: Handle::NONE,
                rank: 1,
                action: Action::Nop,
                track: 0,
                dtype: DataType::U8,
                count,
                buffers: Buffers::NONE,
                group_continues: false,
                overlaps: false,
                one_hop: false,
                rounds: 0,
                round: RoundState::None,
                user_tag: 0,
            }
        }

        /// An all-gather that is right, of 1 KiB from each.
        fn command(&self) -> Command {
            let buffer = |offset_bytes| BufferRef { region: self.region, offset_bytes };
            Command {
                opcode: Opcode::Collective as u32,
                kind: CollectiveKind::AllGather.to_wire(),
                dtype: DataType::F32.to_wire(),
                count: 256,
                send: buffer(0),
                recv: buffer(4096),
                ..Command::zeroed()
            }
        }

        fn fill(&self, command: &Command) -> Result<(Operation, SendRecv), (ErrorClass, String)> {
            let mut operation = self.operation(command.count);
            let filled = fill(&mut operation, &self.memory, command, NRANKS);
            filled.map(|buffers| (operation, buffers)).map_err(|Invalid { class, message }| (class, message))
        }
    }

    #[test]
    fn what_is_right_is_taken_and_copied_buffers_are_counted() {
        let fixture = Fixture::new();
        let (filled, (send, recv)) = fixture.fill(&fixture.command()).expect("right");
        let offsets = [&send, &recv].map(|operand| operand.as_ref().map(|operand| operand.offset_bytes));
        assert_eq!((offsets, filled.dtype), ([Some(0), Some(4096)], DataType::F32));
        let copied = || fixture.session.counters.copied.load(Ordering::Relaxed);
        assert_eq!(copied(), 0);
        assert!(fixture.fill(&Command { flags: FLAG_COPIED, ..fixture.command() }).is_ok());
        assert_eq!(copied(), 1);
        // In place: a rank's part of what it receives is what it sends.
        let in_place = BufferRef { region: fixture.region, offset_bytes: 4096 + 1024 };
        assert!(fixture.fill(&Command { send: in_place, ..fixture.command() }).is_ok());
    }

    #[test]
    fn what_a_hostile_tenant_writes_fails_that_call() {
        type Change = fn(&mut Command);
        let changes: [(Change, &str); 12] = [
            (|c| c.dtype = 99, "unknown data type 99"),
            (|c| c.kind = 99, "unknown collective 99"),
            (|c| c.redop = 99, "unknown reduction 99"),
            (|c| c.root = NRANKS, "root 2 of 2 ranks"),
            (|c| c.kind = CollectiveKind::Reduce.to_wire(), "does not go by copy engines"),
            (|c| c.kind = CollectiveKind::Barrier.to_wire(), "does not go by copy engines"),
            (|c| c.count = u64::MAX, "larger than memory"),
            (|c| c.count = u64::MAX / 8 + 1, "larger than memory"),
            (|c| c.send.region = Handle { index: 7, generation: 1 }, "does not exist"),
            (|c| c.recv.region.generation += 1, "does not exist"),
            (|c| c.recv.offset_bytes = REGION_BYTES - 2047, "leaves its region of 1048576 bytes"),
            (|c| c.send.offset_bytes = u64::MAX, "leaves its region"),
        ];
        let fixture = Fixture::new();
        for (change, expected) in changes {
            let mut command = fixture.command();
            change(&mut command);
            let (class, message) = fixture.fill(&command).err().expect(expected);
            assert!(message.contains(expected), "{message}");
            assert_eq!(class, ErrorClass::InvalidArgument, "{message}");
        }
        let mut overlapping = fixture.command();
        overlapping.send.offset_bytes = 4096 + 512;
        let (_, message) = fixture.fill(&overlapping).err().expect("an overlap");
        assert!(message.contains("overlap"), "{message}");
    }

    #[test]
    fn a_region_that_was_given_back_is_none() {
        let mut fixture = Fixture::new();
        assert!(fixture.memory.free_on_gpu(fixture.region).is_ok());
        assert!(fixture.fill(&fixture.command()).err().expect("stale").1.contains("does not exist"));
    }

    #[test]
    fn commands_for_copy_engines_that_are_not_there_fence_the_session() {
        let fixture = Fixture::new();
        for group in [None, Some(&fixture.group)] {
            let mut operation = fixture.operation(1);
            let fenced = fill_on_gpus(&mut operation, &fixture.memory, &fixture.command(), group, NRANKS);
            assert!(fenced.is_err_and(|Fence(reason)| reason.contains("its communicator has none")));
        }
    }
}
