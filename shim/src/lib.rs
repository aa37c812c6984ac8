//! The tenant's library: hands collectives to the host's `mccs-service` over shared memory.
//!
//! A [`Client`] is one connected session. It makes [`Communicator`]s, [`Stream`]s and memory ([`Region`]). Operations are enqueued on a
//! stream, return at once, and complete in the order of the stream; [`Stream::synchronize`] waits for them.
//!
//! ```no_run
//! use mccs::{Client, Collective, Collectives, CommunicatorBuilder, RedOp};
//!
//! # fn main() -> Result<(), mccs::Error> {
//! let client = Client::from_env()?;
//! let comm = CommunicatorBuilder::from_env(&client)?.join()?;
//! let stream = client.create_stream()?;
//! let memory = client.allocate(1 << 20)?;
//! // SAFETY: no operation is in flight.
//! unsafe { memory.slice_mut::<f32>(0..1 << 18)? }.fill(comm.rank() as f32);
//! let data = memory.at(0).elements::<f32>(1 << 18);
//! comm.enqueue(&Collective::AllReduce { send: data, recv: data, op: RedOp::Sum.into() }, &stream)?;
//! stream.synchronize()?;
//! // SAFETY: the operation has ended.
//! println!("{}", unsafe { memory.slice::<f32>(0..1)? }[0]);
//! # Ok(())
//! # }
//! ```
//!
//! # Threads and order
//!
//! Everything here may be used from any thread, at the same time. Some order is the program's to keep:
//!
//! - All ranks of a communicator make the same calls in the same order. A program whose threads share a communicator sees to that.
//! - A communicator's operations complete in the order of its calls, also where they are on several streams.
//! - A [`Group`] collects what its thread calls, also within libraries.
//! - [`Stream::synchronize`] tells each failure once: to all who wait for the stream at that time.
//!
//! # What waits
//!
//! An operation waits only while the session has as many in flight as its ring holds, and on GPUs while an operator's change is made. It
//! costs the caller one copy of 128 bytes into the ring. A small collective costs the copy of its contribution to a shared-memory exchange,
//! where its peers find it.
//!
//! | call | waits for |
//! | --- | --- |
//! | [`CommunicatorBuilder::join`] and kin | all ranks |
//! | [`Stream::synchronize`], [`Stream::synchronize_for`] | the stream's operations, so for the ranks that take part in them |
//! | [`Communicator::destroy`], [`CudaCommunicator::finalize`](cuda::CudaCommunicator::finalize) | this rank's operations |
//! | a [`Communicator`] that is dropped | nobody: its operations go on |
//! | a [`CudaCommunicator`](cuda::CudaCommunicator) that is dropped | this rank's operations; abort first where a rank may never come |
//! | all else | the service's answer, at most |
//!
//! # Errors
//!
//! [`Error::ends`] says what an error has ended: the call alone, its communicator, or the session. Every call can fail with
//! [`Error::ServiceGone`], and one that asks the operating system for something with [`Error::System`].
//!
//! # The process
//!
//! The library never prints, and changes nothing about the process; [`set_log_handler`] has it tell what happens. A communicator reads the
//! job's name from the environment (`MCCS_JOB`, or what Slurm, PBS and LSF set), which operators see. It starts threads for these alone:
//!
//! | thread | while |
//! | --- | --- |
//! | `mccs-watch` | communicators of GPUs wait for the service |
//! | `mccs-graphs` | CUDA graphs outlive their communicator |
//! | `mccs-join` | a communicator of several hosts captures its first CUDA graph |
//! | `mccs-gives-up` | a rank has given up joining, until it is out |
//! | one without a name | a communicator of GPUs ends, until the service has answered |
//!
//! Counts, offsets and sizes of memory are `u64`, as the service and other hosts know them. Lengths of mapped memory fit a
//! `usize`: [`Region::len_bytes`], [`Region::slice`], and the memory that [`Client::register`] takes.

#![deny(missing_docs)]

#[doc(hidden)]
pub mod bindings;
mod bootstrap;
mod builder;
mod client;
mod collectives;
mod communicator;
pub mod cuda;
mod element;
mod error;

mod group;
mod handles;
mod job;
mod log;
mod memory;
mod operator;
pub mod port_channels;
mod process_client;
mod requests;
mod shm_exchange;
mod stream;
mod submission;

pub use bootstrap::Bootstrap;
pub use builder::CommunicatorBuilder;
pub use client::{Client, unique_id};
pub use collectives::{Collective, Collectives, CudaPlace, CudaSlice, CudaStreamRef, HostSlice, Place, Slice};
pub use communicator::Communicator;
pub use element::Element;
pub use error::{Error, Origin, Scope};
pub use group::Group;
pub use log::{LogLevel, clear_log_handler, set_log_handler};
pub use mccs_ipc::types::{CollectiveKind, DataType, ErrorClass, ParseError, RedOp, UniqueId};
pub use memory::{Region, Span};
pub use operator::{ReduceOperator, Scalar};
pub use port_channels::{DevicePortChannel, PortChannel, PortChannels, RegisteredMemory, RemoteMemory};
pub use stream::Stream;
