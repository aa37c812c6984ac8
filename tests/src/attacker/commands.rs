//! Attackers' commands through the ring, right and wrong.

use bytemuck::Zeroable as _;
use mccs_ipc::command::{
    BufferRef, Command, FLAG_COPIED, FLAG_GROUP_CONTINUES, FLAG_ONE_HOP, FLAG_POSTED, FLAG_ROUND, FLAG_SCALAR_AT,
    FLAG_TWIN, Opcode,
};
use mccs_ipc::queue::Push;
use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp};

use super::session::Session;
use super::{Decide, Tally};

impl Session {
    /// Pushes a command that may be right, with at most a few fields that are not.
    pub(super) fn command(&mut self, tally: &mut Tally, decide: &mut Decide<'_>) {
        let mut command = Command { opcode: Opcode::Collective as u32, ..Command::zeroed() };
        if !self.streams.is_empty() {
            let at = decide(self.streams.len() as u64) as usize;
            (command.stream, command.ticket) = (self.streams[at].handle, self.streams[at].next_ticket);
            self.streams[at].next_ticket += 1;
        }
        let (region, bytes) = match self.regions.len() as u64 {
            0 => (Handle::NONE, 4096),
            many => self.regions[decide(many) as usize],
        };
        // Ranks that call the same are more likely than others.
        let room = bytes / 8;
        command.count = if decide(4) > 0 { room.min(256) } else { decide(room + 1) } / 4;
        command.kind = CollectiveKind::AllReduce.to_wire();
        (command.dtype, command.redop) = (DataType::F32.to_wire(), RedOp::Sum.to_wire());
        command.send = BufferRef { region, offset_bytes: 0 };
        command.recv = BufferRef { region, offset_bytes: bytes / 2 / 64 * 64 };
        let comm = decide(self.comms.len().max(1) as u64) as usize;
        command.comm = self.handle(self.comms.get(comm).map(|comm| comm.handle), decide);
        if let Some(comm) = self.comms.get_mut(comm) {
            // As the library tells rounds of the shared-memory exchange, in which it posts nothing itself.
            let call = CollectiveSignature::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Sum, 0, command.count);
            if comm.shm_exchange.is_some_and(|layout| layout.takes(&call)) {
                command.flags |= FLAG_ROUND;
                comm.rounds += 1;
            }
            command.rounds = comm.rounds;
        }
        let mistakes = if self.kind.errs_in_commands(decide) { 1 + decide(2) } else { 0 };
        (0..mistakes).for_each(|_| err(&mut command, decide));
        match self.commands.try_push(&command) {
            Ok(Push::Pushed { consumer_sleeps }) => {
                tally.count("commands");
                if consumer_sleeps {
                    self.doorbell.ring();
                }
            }
            Ok(Push::Full) => tally.count("commands without room"),
            Err(_) => tally.count("commands to a ring that lies"),
        }
    }
}

/// Makes something of a command another thing.
fn err(command: &mut Command, decide: &mut Decide<'_>) {
    match decide(15) {
        0 => command.opcode = decide(8) as u32,
        1 => command.kind = decide(CollectiveKind::ALL.len() as u64 + 4) as u32,
        2 => command.dtype = decide(DataType::ALL.len() as u64 + 4) as u32,
        3 => command.redop = decide(RedOp::ALL.len() as u64 + 4) as u32,
        4 => command.count = u64::MAX >> decide(64),
        5 => command.flags ^= FLAG_GROUP_CONTINUES,
        6 => command.flags ^= FLAG_ROUND,
        7 => command.flags ^= FLAG_POSTED | FLAG_ROUND,
        8 => (command.flags, command.scalar_bits) = (command.flags ^ FLAG_SCALAR_AT, u64::MAX >> decide(64)),
        9 => command.rounds = decide(4),
        10 => command.root = decide(5) as u32,
        11 => command.flags ^= FLAG_TWIN,
        12 => command.flags ^= FLAG_COPIED,
        13 => command.flags ^= FLAG_ONE_HOP,
        _ => command.send.offset_bytes = u64::MAX >> decide(64),
    }
}
