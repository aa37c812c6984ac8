//! NCCL, for comparison.

use std::ffi::c_void;
use std::ptr::null_mut;

use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use crate::cuda::{Library, Stream};

type Comm = *mut c_void;
type Collective = unsafe extern "C" fn(u64, u64, usize, u32, u32, Comm, *mut c_void) -> i32;
type Move = unsafe extern "C" fn(u64, u64, usize, u32, Comm, *mut c_void) -> i32;
type Rooted = unsafe extern "C" fn(u64, u64, usize, u32, i32, Comm, *mut c_void) -> i32;
type RootedReduce = unsafe extern "C" fn(u64, u64, usize, u32, u32, i32, Comm, *mut c_void) -> i32;

pub struct Nccl {
    all_reduce: Collective,
    reduce_scatter: Collective,
    all_gather: Move,
    all_to_all: Option<Move>,
    broadcast: Rooted,
    reduce: RootedReduce,
    comms: Vec<usize>,
}

impl Nccl {
    pub fn open(path: &str, devices: i32) -> Result<Nccl, String> {
        let library = Library::open(path)?;
        // SAFETY: the types are those of nccl.h, version 2.28 for ncclAlltoAll.
        unsafe {
            let init: unsafe extern "C" fn(*mut Comm, i32, *const i32) -> i32 = library.function("ncclCommInitAll");
            let mut comms = vec![null_mut(); devices as usize];
            if init(comms.as_mut_ptr(), devices, std::ptr::null()) != 0 {
                return Err("ncclCommInitAll failed".into());
            }
            Ok(Nccl {
                all_reduce: library.function("ncclAllReduce"),
                reduce_scatter: library.function("ncclReduceScatter"),
                all_gather: library.function("ncclAllGather"),
                all_to_all: Some(library.function("ncclAlltoAll")),
                broadcast: library.function("ncclBroadcast"),
                reduce: library.function("ncclReduce"),
                comms: comms.into_iter().map(|comm| comm as usize).collect(),
            })
        }
    }

    /// Enqueues a sum of floats or a move of them; false where NCCL has no such call.
    pub fn run(&self, kind: CollectiveKind, rank: usize, send: u64, recv: u64, count: usize, stream: Stream) -> bool {
        let (comm, stream) = (self.comms[rank] as Comm, stream as *mut c_void);
        let (dtype, op) = (DataType::F32.to_wire(), RedOp::Sum.to_wire());
        // SAFETY: buffers of the bench, large enough for any kind.
        let result = unsafe {
            match kind {
                CollectiveKind::AllReduce => (self.all_reduce)(send, recv, count, dtype, op, comm, stream),
                CollectiveKind::ReduceScatter => (self.reduce_scatter)(send, recv, count, dtype, op, comm, stream),
                CollectiveKind::AllGather => (self.all_gather)(send, recv, count, dtype, comm, stream),
                CollectiveKind::Broadcast => (self.broadcast)(send, recv, count, dtype, 0, comm, stream),
                CollectiveKind::Reduce => (self.reduce)(send, recv, count, dtype, op, 0, comm, stream),
                CollectiveKind::AllToAll => match self.all_to_all {
                    Some(all_to_all) => all_to_all(send, recv, count, dtype, comm, stream),
                    None => return false,
                },
                _ => return false,
            }
        };
        assert_eq!(result, 0, "NCCL failed");
        true
    }
}
