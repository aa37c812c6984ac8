//! Devices: where buffers live and reductions run.

pub mod host;

use std::sync::Arc;

use mccs_ipc::types::Handle;

use crate::collective::Schedule;
use crate::engines::proxy::{Operand, Operation};
use crate::engines::transport::links::LinksId;
use crate::engines::transport::{Activity, TransportHandle, TransportMessage};

/// What became of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launched {
    /// It has ended.
    Finished,
    /// It runs; [`crate::engines::proxy::ProxyMessage::JobDone`] tells when it has ended. Until then the caller keeps
    /// the operations, which keep their memory mapped.
    Running,
}

/// How a communicator with ranks on other hosts reaches them.
#[derive(Clone)]
pub struct Network {
    /// Its links.
    pub links: LinksId,
    /// The engines that own them; [`crate::engines::transport::links::LinkKey::engine`] says which owns what.
    pub engines: Vec<TransportHandle>,
    /// When they last moved something for it.
    pub activity: Activity,
}

/// What messages to other hosts say of the operation that they belong to: the same on all hosts if they call the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag(pub u32);

/// A send or receive whose peer is on another host.
pub struct FarPair<'a> {
    /// This host's rank.
    pub rank: u32,
    /// The other.
    pub peer: u32,
    /// What is sent, or where it goes.
    pub operand: &'a Operand,
    /// Whether `rank` sends.
    pub sends: bool,
}

/// A device, as its proxy engine uses it. Calls return at once: what takes long runs on transport engines.
pub trait Device: Send {
    /// Name for the operator.
    fn name(&self) -> String;

    /// Runs a collective, or this host's part of it: `operations` are those of this host's ranks, in rank order. `network`
    /// where there are others.
    fn launch(
        &mut self,
        schedule: &Arc<Schedule>,
        operations: &[Operation],
        network: Option<(&Network, Tag)>,
        job: Handle,
    ) -> Launched;

    /// Runs a matched send and receive of equal length.
    fn copy(&mut self, from: &Operand, to: &Operand, job: Handle) -> Launched;

    /// Runs this host's side of a send and receive.
    fn exchange(&mut self, pair: &FarPair<'_>, network: &Network, tag: Tag, job: Handle) -> Launched;

    /// Uses these transport engines from now on, and sends away those it used and that are not among them.
    fn set_transports(&mut self, transports: Vec<TransportHandle>);

    /// The engines it uses.
    fn transports(&self) -> &[TransportHandle];

    /// Tells a transport engine something, after all that was told before; later, if it has no room now.
    fn tell(&mut self, engine: &TransportHandle, message: TransportMessage);

    /// Hands out what found no room before. Returns whether some still waits.
    fn push_backlog(&mut self) -> bool;
}
