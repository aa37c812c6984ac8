//! Devices: where buffers live and reductions run (host memory, GPUs), and their trait.
//!
//! A [`Device`] is a backend that a proxy engine uses. It makes what the ranks of a new communicator share ([`Device::prepare`]), and that decides how the
//! communicator's operations are executed ([`Shared`]):
//!
//! | execution | who moves the bytes | comes to [`Device::launch`] |
//! | --- | --- | --- |
//! | service-executed | the service's processors, in host memory | each collective that is no exchange round |
//! | device-initiated | kernels in the ranks' own streams | what the group's copy engines carry out |
//!
//! A device runs short work in the call, and hands the rest to [`Workers`], which whoever owns the threads implements. Buffers say where they are
//! ([`Buffers`]). A collective whose buffers are elsewhere is an error ([`LaunchError`]) and ends its communicator: it never counts as done.

mod call;
pub mod cuda;
mod durations;
mod events;
pub mod host;
mod workers;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mccs_ipc::device_initiated::DeviceInitiatedShare;
use mccs_ipc::types::Handle;
use mccs_tenants::Charge;
use mccs_tenants::session::Opens;

pub use self::call::{Buffers, Collective, GpuBuffers, Operand, RankCall, RankCalls, RemoteMessage, TwinPlace};
pub use self::cuda::{
    CarriedOutBy, Counted, DeviceInitiatedGroup, Ended, GpuPut, HeldBytes, NUMBERS_MAX, OpenMemory, OpenPart,
    OpenedPart, OperationCounts, Seen, SymmetricBuffers,
};
pub use self::durations::{Reading, TimedCollective, Times};
pub use self::events::{DeviceEvent, DeviceEvents, EventSink};
use self::host::TenantShmExchange;
pub use self::workers::{BoundSchedule, LaunchError, Launched, Piece, PieceJob, Quantum, Workers};

/// The ranks of a communicator to be, all of this host. The slices are by rank.
#[derive(Debug, Clone, Copy)]
pub struct NewGroup<'a> {
    /// The ranks' GPUs, as the device counts them; none where a rank's buffers are host memory.
    pub gpus: &'a [Option<usize>],
    /// Charges of the ranks' tenant for them. The new parts keep these.
    pub charges: &'a [Arc<Charge>],
    /// Kinds that the GPUs' driver opens between all ranks' processes and this one.
    pub opens: Opens,
    /// Whether the ranks' kernels meet in pinned memory of the host, since their GPUs do not reach each other.
    pub meets_on_host: bool,
}

/// The result of [`Device::prepare`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one is made for a communicator, and moved a few times")]
pub enum Prepare {
    /// It is there.
    Ready(Prepared),
    /// [`DeviceEvent::Prepared`] tells when it is.
    Begun,
}

/// Parts that a new communicator's ranks are given.
#[derive(Debug)]
pub struct Prepared {
    /// Descriptors of what they share, in the order in which they open it.
    pub memory: Vec<OwnedFd>,
    /// The service's side.
    pub shared: Shared,
}

/// Parts that the ranks of a communicator share, and so how its operations are executed.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one is made for a communicator, and moved a few times")]
pub enum Shared {
    /// Nothing: the service executes everything.
    Nothing,
    /// Memory in which they do small collectives themselves; the service executes the others.
    Exchange(Arc<TenantShmExchange>),
    /// A page and symmetric buffers, by which their kernels do collectives: device-initiated execution.
    DeviceInitiated {
        /// The ranks' share.
        share: Box<DeviceInitiatedShare>,
        /// The service's side.
        group: DeviceInitiatedGroup,
    },
}

/// A backend, as its proxy engine uses it. Calls return at once.
pub trait Device: Send {
    /// Name for the operator.
    fn name(&self) -> &'static str;

    /// Makes what the ranks of a new communicator share, or begins to. `key` comes back with the answer.
    fn prepare(&mut self, group: &NewGroup<'_>, key: Handle) -> Prepare;

    /// Runs a collective, or this host's part of it.
    ///
    /// # Errors
    /// It cannot run: nothing was moved, and nothing will be.
    fn launch(
        &mut self,
        collective: &Collective<'_>,
        job: Handle,
        workers: &mut dyn Workers,
    ) -> Result<Launched, LaunchError>;

    /// How the service executes sends and receives here; none where only the ranks' kernels do.
    fn point_to_point(&mut self) -> Option<&mut dyn PointToPoint>;

    /// How the service copies between ranks' memory on GPUs, for port channels; none where ranks have no memory on GPUs.
    fn puts(&mut self) -> Option<&mut dyn Puts>;
}

/// A device on which the service carries out puts of port channels between memories of GPUs.
pub trait Puts {
    /// Copies, and tells the end by [`DeviceEvent::JobDone`].
    ///
    /// # Errors
    /// Its memory is on no GPU of this device, or nobody is left who copies: nothing was copied, and nothing will be.
    fn put(&mut self, put: GpuPut, job: Handle) -> Result<(), LaunchError>;
}

/// A device on which the service executes sends and receives.
pub trait PointToPoint {
    /// Runs a matched send and receive of equal length.
    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle, workers: &mut dyn Workers) -> Launched;

    /// Runs this host's side of a send and receive with another host.
    ///
    /// # Errors
    /// It cannot run: nothing was moved, and nothing will be.
    fn exchange(
        &mut self,
        message: &RemoteMessage<'_>,
        job: Handle,
        workers: &mut dyn Workers,
    ) -> Result<(), LaunchError>;
}

/// The guide's backend is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/backend.md")]
pub struct BackendGuide;
