//! The world that Python has joined, the communicators that are split off, and requests: by handle.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mccs::{CollectiveKind, DataType, RedOp, ReduceOperator};
use pyo3::prelude::*;

use crate::communicator::PyCommunicator;
use crate::lane::{Lane, Waited};
use crate::operation::{Call, Kind, Operation};
use crate::process::OfProcess;

/// Handle of the world; others follow.
pub(super) const WORLD: usize = 1;
/// Handle of no communicator, and of no request.
pub(super) const NULL: usize = 0;

/// A rank's place in a communicator.
pub(super) struct Comm {
    lane: Arc<Lane>,
    pub(super) rank: u32,
    pub(super) nranks: u32,
}

/// Operands of a call.
pub(super) struct What {
    pub(super) kind: Kind,
    pub(super) data_type: DataType,
    pub(super) op: ReduceOperator,
    pub(super) count: u64,
}

impl What {
    /// Bytes, which nobody combines.
    pub(super) fn bytes(kind: Kind, count: u64) -> Self {
        What { kind, data_type: DataType::U8, op: RedOp::Sum.into(), count }
    }
}

/// An operation under way.
pub(super) struct Request {
    comm: Arc<Comm>,
    operation: Arc<Operation>,
}

impl Comm {
    /// As Python's exceptions have it.
    pub(super) fn error(&self, call: &str, message: &str) -> String {
        format!("rank {} of {}, {call}: {message}", self.rank, self.nranks)
    }

    /// Begins a call. `send` and `recv` have the addresses of parts of `count` elements each.
    pub(super) fn begin(
        self: &Arc<Self>,
        what: What,
        peer: u32,
        send: Vec<usize>,
        recv: Vec<usize>,
    ) -> Result<Request, String> {
        let What { kind, data_type, op, count } = what;
        if peer >= self.nranks {
            return Err(self.error(kind.name(), &format!("there is no rank {peer}")));
        }
        let call = Call { kind, data_type, op, root: peer, count, send, recv };
        let operation = Arc::new(Operation::new(call, Vec::new(), None));
        self.lane.submit(&operation).map_err(|error| self.error(kind.name(), &error.to_string()))?;
        Ok(Request { comm: Arc::clone(self), operation })
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.lane.close();
    }
}

impl Request {
    pub(super) fn finish(self) -> Result<(), String> {
        let Request { comm, operation } = self;
        match comm.lane.wait(&operation, None, || true) {
            Waited::Ended(Ok(())) => Ok(()),
            Waited::Ended(Err(error)) => Err(comm.error(operation.call.kind.name(), &error.to_string())),
            Waited::TimedOut | Waited::Interrupted => Err(comm.error(operation.call.kind.name(), "the wait has ended")),
        }
    }
}

/// All that handles stand for.
struct Tables {
    /// Those that could not be made have the reason in their place.
    comms: HashMap<usize, Result<Arc<Comm>, String>>,
    requests: HashMap<usize, Request>,
    last: usize,
    /// It closes when Python forgets it.
    _world: Py<PyCommunicator>,
}

static TABLES: Mutex<Option<OfProcess<Mutex<Tables>>>> = Mutex::new(None);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_tables<T>(use_them: impl FnOnce(&mut Tables) -> Result<T, String>) -> Result<T, String> {
    let tables = locked(&TABLES);
    let tables = tables.as_ref().ok_or("this process has no communicator: mccs.jax.initialize() joins it")?;
    let tables = tables.here().ok_or("this process was forked from the one that has the communicator")?;
    use_them(&mut locked(tables))
}

/// Makes a communicator MPI's world, until [`finalize`].
#[pyfunction]
pub(crate) fn mpi_serve(communicator: Bound<'_, PyCommunicator>) -> PyResult<()> {
    let (rank, nranks) = communicator.get().place();
    let world = Arc::new(Comm { lane: Arc::clone(communicator.get().lane()?), rank, nranks });
    let tables = Tables {
        comms: HashMap::from([(WORLD, Ok(world))]),
        requests: HashMap::new(),
        last: WORLD,
        _world: communicator.unbind(),
    };
    *locked(&TABLES) = Some(OfProcess::new(Mutex::new(tables)));
    Ok(())
}

/// Leaves all communicators.
pub(super) fn finalize() {
    let tables = locked(&TABLES).take();
    drop(tables);
}

/// The communicator of a handle.
pub(super) fn comm(handle: usize) -> Result<Arc<Comm>, String> {
    with_tables(|tables| tables.comms.get(&handle).cloned().unwrap_or_else(|| Err("no such communicator".into())))
}

/// Forgets a communicator's handle.
pub(super) fn free(handle: usize) {
    // Nothing is left where the world is gone.
    let freed = with_tables(|tables| Ok(tables.comms.remove(&handle)));
    drop(freed);
}

/// A handle of a request.
pub(super) fn keep(request: Request) -> Result<usize, String> {
    with_tables(|tables| {
        tables.last += 1;
        tables.requests.insert(tables.last, request);
        Ok(tables.last)
    })
}

/// The request of a handle, which ends.
pub(super) fn take(handle: usize) -> Result<Request, String> {
    with_tables(|tables| tables.requests.remove(&handle).ok_or_else(|| "no such request".into()))
}

/// A rank's record when the world is split: text, of a fixed length.
const RECORD_BYTES: usize = 320;

/// A rank's part of a split.
struct Record {
    color: i32,
    key: i32,
    id: String,
    root_address: Option<String>,
}

impl Record {
    fn write(&self) -> Result<[u8; RECORD_BYTES], String> {
        let Record { color, key, id, root_address } = self;
        let text = format!("{color} {key} {id} {}", root_address.as_deref().unwrap_or_default());
        let mut bytes = [b' '; RECORD_BYTES];
        let place = bytes.get_mut(..text.len()).ok_or("the service's address is too long for a split")?;
        place.copy_from_slice(text.as_bytes());
        Ok(bytes)
    }

    fn read(bytes: &[u8]) -> Option<Record> {
        let mut words = std::str::from_utf8(bytes).ok()?.split_ascii_whitespace();
        let (color, key) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Record { color, key, id: words.next()?.into(), root_address: words.next().map(str::to_owned) })
    }
}

/// The world's ranks of one color, in the order of their keys; `None` for this rank where it has no color. All ranks of the world call
/// it. The handle is given also where the split fails: each call on it says why.
pub(super) fn split(parent: usize, color: Option<i32>, key: i32) -> Result<usize, String> {
    let made = comm(parent).and_then(|world| split_off(&world, color, key));
    let Some(made) = made.transpose() else { return Ok(NULL) };
    with_tables(|tables| {
        tables.last += 1;
        tables.comms.insert(tables.last, made.map(Arc::new));
        Ok(tables.last)
    })
}

fn split_off(world: &Arc<Comm>, color: Option<i32>, key: i32) -> Result<Option<Comm>, String> {
    let client = world.lane.client();
    let failed = |message: &str| world.error("split", message);
    let id = mccs::unique_id().map_err(|error| failed(&error.to_string()))?;
    // Colors are not negative; a negative one is of ranks without.
    let own = Record {
        color: color.unwrap_or(-1),
        key,
        id: id.to_string(),
        root_address: client.root_address().map(str::to_owned),
    };
    let own = own.write()?;
    let mut all = vec![0; RECORD_BYTES * world.nranks as usize];
    let recv = all.as_mut_ptr().expose_provenance();
    let parts = (0..world.nranks as usize).map(|part| recv + part * RECORD_BYTES).collect();
    let what = What::bytes(Kind::Collective(CollectiveKind::AllGather), RECORD_BYTES as u64);
    world.begin(what, 0, vec![own.as_ptr().expose_provenance()], parts)?.finish()?;
    let records: Option<Vec<_>> = all.chunks_exact(RECORD_BYTES).map(Record::read).collect();
    let records = records.ok_or_else(|| failed("ranks have other versions of mccs"))?;
    let Some(color) = color else { return Ok(None) };
    let mut members: Vec<_> = (0..world.nranks).zip(&records).filter(|(_, record)| record.color == color).collect();
    members.sort_by_key(|(rank, record)| (record.key, *rank));
    // JAX's keys are ranks of the group. Those of a rank that makes another group meanwhile would be told apart by nothing else.
    let keys: Vec<_> = members.iter().map(|(_, record)| record.key).collect();
    if !keys.iter().copied().eq(0..keys.len() as i32) {
        return Err(failed(&format!(
            "the group's ranks are 0 to {} and not {keys:?}: processes make different groups, or have several devices each",
            keys.len().saturating_sub(1)
        )));
    }
    let rank = members.iter().position(|(rank, _)| *rank == world.rank).unwrap_or_default() as u32;
    let (nranks, first) = (members.len() as u32, members[0].1);
    let id = first.id.parse().map_err(|_| failed("ranks have other versions of mccs"))?;
    let builder = client.communicator(id, rank, nranks).root_address(first.root_address.as_deref()).name("jax group");
    let joined = builder.join().map_err(|error| failed(&error.to_string()))?;
    Ok(Some(Comm { lane: Lane::new(client.clone(), joined), rank, nranks }))
}
