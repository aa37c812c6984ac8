//! NCCL's profiler plugin interface: a library that `NCCL_PROFILER_PLUGIN` names hears of a
//! program's calls.
//!
//! ```text
//! GroupApi ── CollApi ── Coll ── KernelCh      one KernelCh an operation outside of graphs whose kernel leaves a stamp,
//!    │    └── P2pApi ─── P2p                   told when the stamp has been read (kernels.rs)
//!    └─────── KernelLaunch                     one a communicator and group
//! ```
//!
//! Versions before 5 hear of `Group`, with `Coll` and `P2p` in it. A collective by the service's copy engines is a `CeColl` to
//! versions that know such. Absent: events of proxies and networks, which are the service's here (`mccsctl` and its traces show
//! them). Without a plugin a call costs one branch.

mod calls;
mod events;
mod kernels;
mod layouts;
mod plugin;

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mccs::cuda::CudaCommunicator;

use self::events::{Event, Named};
use self::kernels::Kernels;
use self::plugin::{About, Handle, Plugin};

pub(crate) use self::calls::{
    Collective, PointToPoint, collective, drop_group, end_group, p2p, user_tag, with_user_tag,
};
pub(crate) use self::events::{
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, Function, GATHER, RECV, REDUCE, REDUCE_SCATTER, SCATTER, SEND,
};

/// A communicator, as a plugin knows it.
pub(crate) struct Profile {
    plugin: &'static Plugin,
    context: *mut c_void,
    rank: c_int,
    name: CString,
    id: u64,
    /// Collectives so far, by function.
    sequences: [AtomicU64; Function::COUNT],
    kernels: Option<Kernels>,
    is_closed: AtomicBool,
}

// SAFETY: the context is the plugin's own pointer, which it takes from any thread.
unsafe impl Send for Profile {}
// SAFETY: as above; the rest may be shared.
unsafe impl Sync for Profile {}

impl Profile {
    /// Tells the plugin of a communicator that is made, on so many hosts. Nothing where there is none, or it wants none.
    pub(crate) fn of(comm: &CudaCommunicator, name: &str, id: u64, hosts: usize) -> Option<Arc<Self>> {
        let plugin = Plugin::get()?;
        let (rank, nranks) = (comm.rank() as c_int, comm.nranks() as c_int);
        // Names have no zeros within: they came as text that ends.
        let name = CString::new(name).unwrap_or_default();
        let named = (!name.is_empty()).then_some(&*name);
        let context = plugin.init(&About { name: named, id, hosts: hosts as c_int, nranks, rank })?;
        // Without stamps there are no events of kernels.
        let kernels = comm.stamp_reader().ok().flatten().map(Kernels::new);
        let (sequences, is_closed) = (Default::default(), AtomicBool::new(false));
        Some(Arc::new(Profile { plugin, context, rank, name, id, sequences, kernels, is_closed }))
    }

    /// The number of a function's next collective.
    fn next_sequence(&self, function: &Function) -> u64 {
        self.sequences[function.index()].fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, event: &Event<'_>, parent: Handle) -> Handle {
        self.plugin.start(self.context, event, parent, self.rank, &Named { name: &self.name, hash: self.id })
    }

    /// The communicator is about to leave: events of kernels come first.
    pub(crate) fn close(&self) {
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.drain_kernels();
        self.plugin.finalize(self.context);
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        self.close();
    }
}
