//! The tenant's library: hands collectives to the host's `mccs-service` over shared memory.
//!
//! A [`Client`] is one connected session. Its [`Communicator`]s, [`Stream`]s and [`Region`]s are used from any thread.
//! Operations return without waiting for other ranks, and complete in the order of their stream; [`Stream::synchronize`] waits. A full
//! command ring holds a call back, and so does an operator's change on GPUs, for as long as it lasts. An operation costs the caller one
//! copy of 128 bytes into a ring. A small collective costs the copy of its contribution to a shared-memory exchange, where its peers
//! find it.
//!
//! Every call can fail with [`Error::ServiceGone`], and one that asks the operating system for something with [`Error::System`].
//!
//! The library never panics, prints, or changes anything about the process; [`set_log_handler`] has it tell what happens. Of the
//! environment a communicator reads the job's name (`MCCS_JOB`, or what Slurm, PBS and LSF set), which operators see. It starts
//! threads for these alone:
//!
//! | thread | while |
//! | --- | --- |
//! | `mccs-watch` | communicators of GPUs wait for the service |
//! | `mccs-graphs` | CUDA graphs outlive their communicator |
//! | `mccs-join` | a communicator of several hosts captures its first CUDA graph |
//! | `mccs-gives-up` | a rank has given up joining, until it is out |
//! | one without a name | a communicator of GPUs ends, until the service has answered |
//!
//! Counts, offsets and sizes of memory are `u64`, as the service and other hosts know them. What is mapped here has a `usize`:
//! [`Region::len_bytes`], and the memory that [`Client::register`] takes.
//!
//! ```no_run
//! # fn main() -> Result<(), mccs::Error> {
//! use mccs::{Client, Collective, Collectives, RedOp};
//! let client = Client::connect("/run/mccs/mccs.sock")?;
//! let id: mccs::UniqueId = "00112233445566778899aabbccddeeff".parse()?;
//! let comm = client.communicator(id, 0, 2).join()?;
//! let stream = client.create_stream()?;
//! let memory = client.allocate(1 << 20)?;
//! let data = memory.at(0).elements::<f32>(1 << 18);
//! comm.enqueue(&Collective::AllReduce { send: data, recv: data, op: RedOp::Sum.into() }, &stream)?;
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```

#![deny(missing_docs)]

mod bootstrap;
mod builder;
mod client;
mod collectives;
mod communicator;
pub mod cuda;
mod error;
#[allow(non_snake_case, reason = "names of a C API")]
mod ffi;

mod group;
mod handles;
mod job;
mod log;
mod memory;
mod operator;
pub mod port_channels;
mod requests;
mod shm_exchange;
mod stream;
mod submission;

pub use bootstrap::Bootstrap;
pub use builder::CommunicatorBuilder;
pub use client::{Client, unique_id};
pub use collectives::{Collective, Collectives, CudaPlace, CudaSlice, CudaStreamRef, Element, HostSlice, Place, Slice};
pub use communicator::Communicator;
pub use error::{Error, Origin};
pub use group::Group;
pub use log::{LogLevel, clear_log_handler, set_log_handler};
pub use mccs_ipc::protocol::JoinOptions;
pub use mccs_ipc::types::{CollectiveKind, DataType, ErrorClass, ParseError, RedOp, UniqueId};
pub use memory::{Region, Span};
pub use operator::{ReduceOperator, Scalar};
pub use port_channels::{PortChannel, PortChannels, RegisteredMemory, RemoteMemory};
pub use stream::Stream;

/// For bindings of other languages, where begin and end of a group are calls, and objects have handles. Programs in Rust use [`Group`].
pub mod bindings {
    pub use crate::group::{group_drop, group_end, group_estimate_us, group_start};
    pub use crate::handles::{Held, Table};
}
