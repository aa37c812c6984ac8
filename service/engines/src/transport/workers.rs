//! Transport engines as devices see them: workers for pieces, channels and messages.

use std::sync::Arc;

use mccs_collective::Shape;
use mccs_device::{BoundSchedule, LaunchError, Launched, PieceJob, Workers};
use mccs_ipc::types::Handle;
use mccs_model::link::{LinkEngines, LinkKey, LinksId};
use mccs_telemetry::recorder::job_number;

use super::channel_run::{ChannelRun, Remote};
use super::events::TransportEvents;
use super::mail::TransportMail;
use super::{Activity, AssignedJob, ChannelWork, TransportHandle, TransportMessage, WholeJob};

/// How a communicator with ranks on other hosts reaches them.
#[derive(Clone)]
pub struct Network {
    /// Its links.
    pub links: LinksId,
    /// Number of its strategy.
    pub epoch: u32,
    /// The engines that own them.
    pub engines: Vec<TransportHandle>,
    /// Which of them owns which.
    pub placed: LinkEngines,
    /// When they last moved something for it.
    pub activity: Activity,
}

/// Tag in messages to other hosts of the operation that they belong to: the same on all hosts if they call the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Travels with each message.
    pub value: u32,
    /// Whether what is sent may be less than what the receiver has room for. It is one message then, however long.
    pub is_at_most: bool,
}

impl Tag {
    /// Tag of messages whose length both sides know.
    #[must_use]
    pub const fn of(value: u32) -> Self {
        Tag { value, is_at_most: false }
    }

    /// Tag of messages whose length only the sender knows.
    #[must_use]
    pub const fn of_at_most(value: u32) -> Self {
        Tag { value, is_at_most: true }
    }

    /// Whether a message is one of these, where `room_bytes` are asked for.
    pub(super) fn fits(self, value: u32, bytes: u64, room_bytes: u64) -> bool {
        value == self.value && if self.is_at_most { bytes <= room_bytes } else { bytes == room_bytes }
    }

    /// Longest message of a link on which others have so many bytes at most.
    pub(super) fn message_bytes(self, of_link: u64) -> u64 {
        if self.is_at_most { u64::MAX } else { of_link }
    }
}

/// The engines that run one operation.
pub struct PoolWorkers<'a> {
    mail: &'a mut TransportMail,
    /// Hears of the end.
    done: TransportEvents,
    /// Network and tag of messages, if there are other hosts.
    network: Option<(&'a Network, Tag)>,
}

impl<'a> PoolWorkers<'a> {
    /// Workers that tell `done` of the end; `network` where there are other hosts.
    pub fn new(mail: &'a mut TransportMail, done: TransportEvents, network: Option<(&'a Network, Tag)>) -> Self {
        PoolWorkers { mail, done, network }
    }

    fn remote(&self, link: LinkKey, job: Handle) -> Option<Remote> {
        let (network, tag) = self.network?;
        let LinkKey { epoch, channel, .. } = link;
        Some(Remote { links: network.links, epoch, channel, tag, job: job_number(job) })
    }

    /// The engine that runs a channel: the one that owns its links, or one of the pool, counted from whose turn it is.
    fn engine(&self, link: LinkKey, first: usize) -> Result<TransportHandle, LaunchError> {
        let engine = match self.network {
            Some((network, _)) => network.engines.get(network.placed.of(link)),
            None => {
                let engines = self.mail.engines();
                engines.get((first + usize::from(link.channel)) % engines.len().max(1))
            }
        };
        engine.cloned().ok_or(LaunchError::NoWorkers)
    }

    fn run(&mut self, engine: &TransportHandle, run: ChannelRun, link: LinkKey, whole: Arc<WholeJob>) {
        let links = self.network.map(|(network, _)| network.links);
        let pair = (link.channel == LinkKey::PAIRS).then_some(link);
        let work = ChannelWork { job: Box::new(run), channel: link.channel, pair, links, whole };
        self.mail.tell(engine, TransportMessage::RunChannel(work));
    }

    fn whole(&self, job: Handle, channels: usize) -> Arc<WholeJob> {
        WholeJob::new(job, self.done.clone(), channels, self.network.map(|(network, _)| &network.activity))
    }
}

impl Workers for PoolWorkers<'_> {
    fn run_pieces(&mut self, pieces: Arc<dyn PieceJob>, job: Handle) {
        self.mail.share(AssignedJob { job: pieces, handle: job, done: self.done.clone() });
    }

    fn run_channels(&mut self, schedule: BoundSchedule, job: Handle) -> Result<Launched, LaunchError> {
        let count = match &schedule.schedule.shape {
            Shape::Message(channels) => channels.len(),
            Shape::SinglePass(_) => 0,
        };
        if count == 0 || (self.network.is_none() && schedule.is_short) {
            (0..count).for_each(|index| ChannelRun::new(&schedule, index, None).run_to_end());
            return Ok(Launched::Finished);
        }
        let epoch = self.network.map_or(0, |(network, _)| network.epoch);
        let link = |index: usize| LinkKey { epoch, channel: index as u16, src: 0, dst: 0 };
        let first = self.mail.take_turns(if self.network.is_none() { count } else { 0 });
        let whole = self.whole(job, count);
        for index in 0..count {
            // Fails for the first channel or for none.
            let engine = self.engine(link(index), first)?;
            let run = ChannelRun::new(&schedule, index, self.remote(link(index), job));
            self.run(&engine, run, link(index), Arc::clone(&whole));
        }
        Ok(Launched::Running)
    }

    fn run_message(
        &mut self,
        schedule: BoundSchedule,
        src: u32,
        dst: u32,
        track: u32,
        job: Handle,
    ) -> Result<(), LaunchError> {
        let link = LinkKey::of_pair(src, dst, track);
        let remote = self.remote(link, job).ok_or(LaunchError::NoWorkers)?;
        let engine = self.engine(link, 0)?;
        let (run, whole) = (ChannelRun::new(&schedule, 0, Some(remote)), self.whole(job, 1));
        self.run(&engine, run, link, whole);
        Ok(())
    }
}
