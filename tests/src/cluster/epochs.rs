//! Checker of epochs in the simulated cluster: every collective ran under the same strategy on all
//! hosts.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use mccs_exchange::protocol::CommId;
use mccs_ipc::records::{Read, RecordReader};
use mccs_registry::Registry;
use mccs_telemetry::recorder::Record;

/// A collective of a communicator of several hosts that has begun on one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Begun {
    comm: CommId,
    seq: u64,
    epoch: u64,
}

/// Records of a host's proxy engine.
pub(super) struct EngineRecords {
    reader: RecordReader,
    next: u64,
    /// Names of communicators by the numbers that records have, as of so many changes of communicators. Kept when these are over, as
    /// records are read later.
    comms: BTreeMap<u64, CommId>,
    changes: Option<u64>,
}

impl EngineRecords {
    /// From now on the engine of a registry records. There is one: those of transports are given no recorders here.
    pub(super) fn begin(registry: &Registry) -> Self {
        let recorders = &registry.recorders;
        recorders.begin();
        let rings = recorders.rings();
        let [ring] = &rings[..] else { panic!("not one proxy engine, but {rings:?}") };
        let memory = recorders.memory(ring.ring).expect("memory");
        let reader = RecordReader::map(memory.as_fd()).expect("a ring of records");
        EngineRecords { reader, next: 0, comms: BTreeMap::new(), changes: None }
    }

    /// Operations that have begun since it was last looked at.
    pub(super) fn begun(&mut self, registry: &Registry) -> Vec<Begun> {
        let changes = Some(registry.comm_changes());
        if self.changes != changes {
            self.changes = changes;
            let comms = registry.comms();
            let placed = comms.iter().filter_map(|comm| Some((comm.number, comm.placed.as_ref()?.comm.clone())));
            self.comms.extend(placed);
        }
        if self.next == self.reader.next() {
            return Vec::new();
        }
        let mut records = Vec::new();
        let Read { next, lost } = self.reader.read(self.next, &mut records);
        assert_eq!(lost, 0, "records are looked at after every round");
        self.next = next;
        let begun = |record: Record| match record {
            Record::Started { comm, seq, epoch, .. } => {
                Some(Begun { comm: self.comms.get(&comm)?.clone(), seq, epoch })
            }
            _ => None,
        };
        records.iter().filter_map(Record::from_words).filter_map(begun).collect()
    }
}

/// Epochs of collectives, each with a host on which it ran so.
#[derive(Default)]
pub(super) struct Epochs(BTreeMap<(CommId, u64), (u64, usize)>);

impl Epochs {
    /// Takes note of a collective that has begun on a host.
    pub(super) fn note(&mut self, host: usize, begun: Begun) -> Result<(), String> {
        let Begun { comm, seq, epoch } = begun;
        let (expected, other) = *self.0.entry((comm.clone(), seq)).or_insert((epoch, host));
        if epoch == expected {
            return Ok(());
        }
        Err(format!(
            "collective {seq} of {comm} ran under epoch {expected} on host {other}, and {epoch} on host {host}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use mccs_exchange::protocol::Name;

    use super::*;

    #[test]
    fn epochs_of_a_collective_that_differ_are_found() {
        let comm = |number| CommId { root: Name::new("h0").expect("a name"), incarnation: 1, number };
        let begun = |number, seq, epoch| Begun { comm: comm(number), seq, epoch };
        let mut epochs = Epochs::default();
        for (host, begun) in [(0, begun(1, 7, 2)), (1, begun(1, 7, 2)), (1, begun(1, 8, 3)), (0, begun(2, 7, 0))] {
            assert_eq!(epochs.note(host, begun), Ok(()));
        }
        let fault = epochs.note(2, begun(1, 8, 2)).expect_err("not the same");
        assert!(fault.contains("epoch 3 on host 1, and 2 on host 2"), "{fault}");
    }
}
