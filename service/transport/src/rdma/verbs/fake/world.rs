//! State of a fake fabric, which its hosts share, and how its queue pairs move bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::driver::{
    Access, AsyncEvent, Completion, Gid, QpShape, QpStep, Raw, Read, Registered, WcStatus, Write,
};
use super::objects::{Channel, Cq, Device, Entry, OpenDevice, Posted, Qp, Region, State};
use super::{FabricOptions, SourcePorts};

const LOCAL_PROTECTION: u32 = 4;
const REMOTE_ACCESS: u32 = 10;
const RETRY_EXCEEDED: u32 = 12;
const RNR_EXCEEDED: u32 = 13;
/// Delay that a receiver that is not ready asks for.
const RNR_DELAY: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct World {
    pub(super) options: FabricOptions,
    pub(super) now: Option<Instant>,
    pub(super) hosts: u32,
    pub(super) devices: Vec<Device>,
    pub(super) open: BTreeMap<Raw, OpenDevice>,
    pub(super) pds: BTreeMap<Raw, Raw>,
    regions: BTreeMap<u32, Region>,
    pub(super) channels: BTreeMap<Raw, Channel>,
    pub(super) cqs: BTreeMap<Raw, Cq>,
    pub(super) qps: BTreeMap<Raw, Qp>,
    next: usize,
    /// Completions that found no room.
    pub(super) overruns: u64,
    /// Memory that is a GPU's, and whether its driver speaks for it.
    pub(super) gpu: Option<(std::ops::Range<u64>, bool)>,
    /// Fates of a host's next writes.
    pub(super) bad_luck: Vec<(u32, u32)>,
    /// Hosts whose devices say no more of writes.
    pub(super) withheld: BTreeSet<u32>,
    pub(super) source_ports_told: usize,
    pub(super) unresolved: usize,
    random: u64,
}

pub(super) fn event_fd() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).expect("descriptor")
}

impl World {
    pub(super) fn new(options: FabricOptions) -> Self {
        World {
            options,
            now: None,
            hosts: 0,
            devices: Vec::new(),
            open: BTreeMap::new(),
            pds: BTreeMap::new(),
            regions: BTreeMap::new(),
            channels: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            next: 0,
            overruns: 0,
            gpu: None,
            bad_luck: Vec::new(),
            withheld: BTreeSet::new(),
            source_ports_told: 0,
            unresolved: 0,
            random: options.seed,
        }
    }

    pub(super) fn name(&mut self) -> Raw {
        self.next += 1;
        Raw(self.next)
    }

    fn random_up_to(&mut self, most: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % (most + 1)
    }

    /// Index of a host's device.
    pub(super) fn device(&self, host: u32, place: u8) -> usize {
        self.devices.iter().position(|it| it.host == host && it.place == place).expect("a device")
    }

    /// Whether an open device is still there.
    pub(super) fn there(&self, context: Raw) -> Result<(), Errno> {
        if self.open.get(&context).is_some_and(|open| open.is_dead) { Err(Errno::EIO) } else { Ok(()) }
    }

    fn device_of(&self, context: Raw) -> Option<&Device> {
        self.devices.get(self.open.get(&context)?.device)
    }

    fn host_of(&self, qp: &Qp) -> Option<u32> {
        self.device_of(qp.context).map(|device| device.host)
    }

    pub(super) fn tell(&mut self, device: usize, event: AsyncEvent) {
        for open in self.open.values_mut().filter(|open| open.device == device) {
            open.events.push_back(event);
            open.fd.write(1).expect("counts");
        }
    }

    pub(super) fn register(
        &mut self,
        pd: Raw,
        address: u64,
        bytes: u64,
        access: Access,
        is_dma_buffer: bool,
    ) -> Result<Registered, Errno> {
        let host = |pd: Raw| Some(self.device_of(*self.pds.get(&pd)?)?.host);
        let ours = host(pd);
        self.there(*self.pds.get(&pd).ok_or(Errno::EINVAL)?)?;
        let pinned = self.regions.values().filter(|region| host(region.pd) == ours).map(|region| region.bytes);
        if bytes == 0 {
            return Err(Errno::EINVAL);
        }
        if self.options.locked_bytes.is_some_and(|limit| pinned.sum::<u64>() + bytes > limit) {
            return Err(Errno::ENOMEM);
        }
        let has_driver = |(gpu, speaks): &(std::ops::Range<u64>, bool)| *speaks || !gpu.contains(&address);
        if !is_dma_buffer && !self.gpu.as_ref().is_none_or(has_driver) {
            return Err(Errno::EFAULT);
        }
        let raw = self.name();
        let key = raw.0 as u32;
        self.regions.insert(key, Region { pd, address, bytes, access });
        Ok(Registered { raw, lkey: key, rkey: key })
    }

    pub(super) fn deregister(&mut self, mr: Raw) {
        self.regions.remove(&(mr.0 as u32));
    }

    /// Takes all of a host's memory away, whatever it has registered.
    pub(super) fn revoke(&mut self, host: u32) {
        let (pds, open, devices) = (&self.pds, &self.open, &self.devices);
        let host_of = |pd: &Raw| devices.get(open.get(pds.get(pd)?)?.device).map(|device| device.host);
        self.regions.retain(|_, region| host_of(&region.pd) != Some(host));
    }

    pub(super) fn relaxed(&self) -> usize {
        self.regions.values().filter(|region| region.access.relaxed_ordering).count()
    }

    pub(super) fn registrations(&self) -> usize {
        self.regions.len()
    }

    pub(super) fn create_cq(&mut self, channel: Raw, entries: u32) -> Raw {
        let raw = self.name();
        let cq = Cq { channel, entries, waiting: VecDeque::new(), polls: 0, is_armed: false };
        self.cqs.insert(raw, cq);
        raw
    }

    pub(super) fn arm(&mut self, cq: Raw) {
        if let Some(cq) = self.cqs.get_mut(&cq) {
            cq.is_armed = true;
        }
        self.run_out();
    }

    /// A sleeper does not poll: pending events happen now.
    fn run_out(&mut self) {
        while self.run() {}
        for cq in self.cqs.values_mut() {
            cq.waiting.iter_mut().for_each(|entry| entry.visible_at = 0);
        }
    }

    pub(super) fn poll(&mut self, cq: Raw, completions: &mut [Completion]) -> usize {
        // One that is armed is polled by who is going to sleep.
        if self.cqs.get(&cq).is_some_and(|cq| cq.is_armed) {
            self.run_out();
        } else {
            self.run();
        }
        let Some(cq) = self.cqs.get_mut(&cq) else { return 0 };
        cq.polls += 1;
        let mut count = 0;
        while let Some(place) = completions.get_mut(count)
            && let Some(entry) = cq.waiting.pop_front_if(|entry| entry.visible_at <= cq.polls)
        {
            *place = entry.completion;
            count += 1;
            let Some(qp) = self.qps.get_mut(&entry.qp) else { continue };
            match entry.sends_done {
                Some(done) => qp.retired = qp.retired.max(done),
                None => qp.receives_held -= 1,
            }
        }
        count
    }

    fn complete(&mut self, qp: Raw, completion: Completion, sends_done: Option<u64>) {
        let late = self.random_up_to(self.options.late_polls);
        let Some((raw_cq, host)) = self.qps.get(&qp).map(|qp| (qp.cq, self.host_of(qp))) else { return };
        if sends_done.is_some() && host.is_some_and(|host| self.withheld.contains(&host)) {
            return;
        }
        let Some(cq) = self.cqs.get_mut(&raw_cq) else { return };
        if cq.waiting.len() >= cq.entries as usize {
            self.overruns += 1;
            return;
        }
        let behind = cq.waiting.back().map_or(0, |entry| entry.visible_at);
        cq.waiting.push_back(Entry { completion, qp, sends_done, visible_at: behind.max(cq.polls + late) });
        if std::mem::take(&mut cq.is_armed)
            && let Some(channel) = self.channels.get_mut(&cq.channel)
        {
            channel.events.push_back(raw_cq);
            channel.fd.write(1).expect("counts");
        }
    }

    pub(super) fn create_qp(&mut self, pd: Raw, cq: Raw, shape: QpShape) -> Option<(Raw, u32)> {
        let context = *self.pds.get(&pd)?;
        if shape.inline_bytes > 0 && !self.options.takes_inline {
            return None;
        }
        let raw = self.name();
        let number = raw.0 as u32;
        let (sends, receives) = (VecDeque::new(), VecDeque::new());
        let (state, path, timers) = (State::Reset, None, None);
        let (posted, retired, moved, receives_held) = (0, 0, 0, 0);
        let (stuck_since, source_port) = (None, None);
        let qp = Qp {
            number,
            context,
            pd,
            cq,
            shape,
            state,
            path,
            timers,
            sends,
            posted,
            retired,
            moved,
            receives,
            receives_held,
            stuck_since,
            source_port,
        };
        self.qps.insert(raw, qp);
        Some((raw, number))
    }

    /// Whether packets of a queue pair get to an address.
    fn reaches(&self, qp: Raw, address: Option<Gid>) -> bool {
        let is_heard = |device: &&Device| device.is_up && !device.is_silent;
        let here = self.qps.get(&qp).and_then(|qp| self.device_of(qp.context)).filter(is_heard);
        here.is_some_and(|here| {
            let is_near = |device: &&Device| !self.options.has_rails || device.place == here.place;
            let mut near = self.devices.iter().filter(is_heard).filter(is_near);
            near.any(|device| device.gids.iter().any(|(gid, _)| Some(*gid) == address))
        })
    }

    pub(super) fn modify_qp(&mut self, qp: Raw, step: QpStep) -> Result<(), Errno> {
        if let QpStep::Receive(path) = step
            && self.options.resolves
            && !self.reaches(qp, path.peer_gid)
        {
            self.unresolved += 1;
            return Err(Errno::ETIMEDOUT);
        }
        let qp = self.qps.get_mut(&qp).ok_or(Errno::EINVAL)?;
        match (qp.state, step) {
            (State::Reset, QpStep::Init { port: 1, .. }) => qp.state = State::Init,
            (State::Init, QpStep::Receive(path)) if path.port == 1 && (1..=5).contains(&path.mtu) => {
                (qp.state, qp.path) = (State::Receives, Some(path));
            }
            (State::Receives, QpStep::Send(timers)) => (qp.state, qp.timers) = (State::Sends, Some(timers)),
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    /// As mlx5's driver does it: once sends are possible.
    pub(super) fn set_source_port(&mut self, qp: Raw, source_port: u16) -> Result<bool, Errno> {
        self.source_ports_told += 1;
        let qp = self.qps.get_mut(&qp).filter(|qp| qp.state == State::Sends).ok_or(Errno::EOPNOTSUPP)?;
        match self.options.source_ports {
            SourcePorts::Unknown => Ok(false),
            SourcePorts::Refused => Err(Errno::EOPNOTSUPP),
            SourcePorts::Taken => {
                qp.source_port = Some(source_port);
                Ok(true)
            }
        }
    }

    pub(super) fn post_writes(&mut self, qp: Raw, writes: &[Write]) -> Result<(), Errno> {
        self.there(self.qps.get(&qp).ok_or(Errno::EINVAL)?.context)?;
        let qp = self.qps.get_mut(&qp).ok_or(Errno::EINVAL)?;
        if qp.state < State::Sends {
            return Err(Errno::EINVAL);
        }
        for write in writes {
            if qp.posted - qp.retired >= qp.shape.send_wrs.into() {
                return Err(Errno::ENOMEM);
            }
            if write.inline && write.bytes > qp.shape.inline_bytes {
                return Err(Errno::EINVAL);
            }
            // SAFETY: who posts promises that the bytes are readable.
            let bytes = || unsafe { std::slice::from_raw_parts(write.local as *const u8, write.bytes as usize) };
            let inline = write.inline.then(|| if write.bytes == 0 { Vec::new() } else { bytes().to_vec() });
            let of_gpu = |(gpu, _): &(std::ops::Range<u64>, bool)| gpu.contains(&write.local);
            assert!(!write.inline || !self.gpu.as_ref().is_some_and(of_gpu), "the processor cannot read it");
            qp.posted += 1;
            qp.sends.push_back(Posted { write: *write, inline, is_read: false, index: qp.posted });
        }
        Ok(())
    }

    pub(super) fn post_read(&mut self, qp: Raw, read: &Read) -> Result<(), Errno> {
        let qp = self.qps.get_mut(&qp).ok_or(Errno::EINVAL)?;
        if qp.state < State::Sends {
            return Err(Errno::EINVAL);
        }
        if qp.posted - qp.retired >= qp.shape.send_wrs.into() {
            return Err(Errno::ENOMEM);
        }
        let Read { wr_id, local, lkey, bytes, remote, rkey } = *read;
        let write = Write { wr_id, local, lkey, bytes, remote, rkey, imm: None, signaled: true, inline: false };
        qp.posted += 1;
        qp.sends.push_back(Posted { write, inline: None, is_read: true, index: qp.posted });
        Ok(())
    }

    pub(super) fn post_receives(&mut self, qp: Raw, wr_id: u64, count: u32) -> Result<(), Errno> {
        let qp = self.qps.get_mut(&qp).ok_or(Errno::EINVAL)?;
        if qp.state == State::Reset {
            return Err(Errno::EINVAL);
        }
        if qp.receives_held + count > qp.shape.recv_wrs {
            return Err(Errno::ENOMEM);
        }
        qp.receives_held += count;
        qp.receives.extend((0..count).map(|_| wr_id));
        Ok(())
    }

    /// Every queue pair gets a step further. Returns whether anything happened.
    fn run(&mut self) -> bool {
        let qps: Vec<Raw> = self.qps.keys().copied().collect();
        qps.into_iter().fold(false, |any, raw| any | self.step(raw))
    }

    /// The queue pair at the other end, if packets get there.
    fn peer(&self, qp: &Qp) -> Option<Raw> {
        let path = qp.path?;
        let here = self.device_of(qp.context).filter(|device| device.is_up && !device.is_silent)?;
        let raw = Raw(path.peer_qp as usize);
        let peer = self.qps.get(&raw)?;
        let device = self.device_of(peer.context)?;
        if self.options.has_rails && device.place != here.place {
            return None;
        }
        let knows = device.is_up && !device.is_silent && device.gids.iter().any(|(gid, _)| Some(*gid) == path.peer_gid);
        let is_ready = matches!(peer.state, State::Receives | State::Sends);
        (knows && is_ready && peer.path.is_some_and(|back| back.peer_qp == qp.number)).then_some(raw)
    }

    fn covers(&self, pd: Raw, key: u32, address: u64, bytes: u64, may: impl Fn(&Region) -> bool) -> bool {
        self.regions.get(&key).is_some_and(|region| {
            let inside = address >= region.address && address + bytes <= region.address + region.bytes;
            region.pd == pd && inside && may(region)
        })
    }

    fn step(&mut self, raw: Raw) -> bool {
        let Some(qp) = self.qps.get(&raw).filter(|qp| qp.state == State::Sends) else { return false };
        let (Some(posted), Some(timers)) = (qp.sends.front(), qp.timers) else { return false };
        let (write, moved, pd, index) = (posted.write, qp.moved, qp.pd, posted.index);
        let host = self.host_of(qp);
        if let Some(at) = self.bad_luck.iter().position(|(of, _)| Some(*of) == host) {
            let (_, status) = self.bad_luck.remove(at);
            return self.fail(raw, status);
        }
        let Some(peer_raw) = self.peer(qp) else {
            let patience = Duration::from_nanos((4096u64 << timers.timeout) * (u64::from(timers.retries) + 1));
            return self.stuck(raw, patience, RETRY_EXCEEDED);
        };
        let Some(peer) = self.qps.get(&peer_raw) else { return false };
        if write.imm.is_some() && peer.receives.is_empty() {
            let forever = timers.rnr_retries == 7;
            let patience = if forever { Duration::MAX } else { RNR_DELAY * (u32::from(timers.rnr_retries) + 1) };
            return self.stuck(raw, patience, RNR_EXCEEDED);
        }
        let bytes = u64::from(write.bytes);
        let is_read = posted.is_read;
        let may = |region: &Region| if is_read { region.access.remote_read } else { region.access.remote_write };
        if bytes > 0 && !write.inline && !self.covers(pd, write.lkey, write.local, bytes, |_| true) {
            return self.fail(raw, LOCAL_PROTECTION);
        }
        if bytes > 0 && !self.covers(peer.pd, write.rkey, write.remote, bytes, may) {
            self.break_qp(peer_raw);
            return self.fail(raw, REMOTE_ACCESS);
        }
        let part = (bytes - moved).min(self.options.step_bytes);
        let source = posted.inline.as_ref().map_or(write.local as *const u8, |inline| inline.as_ptr());
        let (source, target) = if is_read { (write.remote as *const u8, write.local) } else { (source, write.remote) };
        let (source, target) = (source.wrapping_add(moved as usize), target + moved);
        let device = self.open.get(&peer.context).map(|open| open.device);
        let is_gpu = self.gpu.as_ref().is_some_and(|(gpu, _)| gpu.contains(&target));
        if let Some(device) = device.and_then(|device| self.devices.get_mut(device)) {
            // A read pushes the writes in front of it along.
            let arrive = if is_read { std::mem::take(&mut device.on_the_bus) } else { Vec::new() };
            for (target, bytes) in arrive {
                // SAFETY: was found inside registered memory; tests keep what they let a GPU have.
                unsafe { std::ptr::copy(bytes.as_ptr(), target as *mut u8, bytes.len()) };
            }
            if is_gpu {
                // SAFETY: as below.
                let bytes = unsafe { std::slice::from_raw_parts(source, part as usize) };
                device.on_the_bus.push((target, bytes.to_vec()));
            }
        }
        if !is_gpu {
            // SAFETY: both ranges were found inside registered memory, or the source is the copy of an inline write.
            unsafe { std::ptr::copy(source, target as *mut u8, part as usize) };
        }
        if let Some(qp) = self.qps.get_mut(&raw) {
            qp.stuck_since = None;
            qp.moved += part;
            if qp.moved < bytes {
                return true;
            }
            (qp.moved, _) = (0, qp.sends.pop_front());
        }
        let done = |wr_id, bytes, imm| Completion { wr_id, status: WcStatus::Success, bytes, imm };
        let receive = write.imm.and_then(|imm| Some((imm, self.qps.get_mut(&peer_raw)?.receives.pop_front()?)));
        if let Some((imm, wr_id)) = receive {
            self.complete(peer_raw, done(wr_id, write.bytes, imm), None);
        }
        if write.signaled {
            self.complete(raw, done(write.wr_id, 0, 0), Some(index));
        }
        true
    }

    /// Nothing can move. Returns whether that has been so for too long.
    fn stuck(&mut self, raw: Raw, patience: Duration, status: u32) -> bool {
        let (Some(now), Some(qp)) = (self.now, self.qps.get_mut(&raw)) else { return false };
        let since = *qp.stuck_since.get_or_insert(now);
        now.saturating_duration_since(since) >= patience && self.fail(raw, status)
    }

    /// The first send ends badly, and with it the queue pair.
    fn fail(&mut self, raw: Raw, status: u32) -> bool {
        if let Some(posted) = self.qps.get_mut(&raw).and_then(|qp| qp.sends.pop_front()) {
            let completion =
                Completion { wr_id: posted.write.wr_id, status: WcStatus::Failed(status), bytes: 0, imm: 0 };
            self.complete(raw, completion, Some(posted.index));
        }
        self.flush(raw);
        true
    }

    fn flush(&mut self, raw: Raw) {
        let Some(qp) = self.qps.get_mut(&raw) else { return };
        (qp.state, qp.moved) = (State::Failed, 0);
        let sends: Vec<_> = qp.sends.drain(..).map(|posted| (posted.write.wr_id, Some(posted.index))).collect();
        let receives: Vec<_> = qp.receives.drain(..).map(|wr_id| (wr_id, None)).collect();
        for (wr_id, sends_done) in sends.into_iter().chain(receives) {
            self.complete(raw, Completion { wr_id, status: WcStatus::Flushed, bytes: 0, imm: 0 }, sends_done);
        }
    }

    /// A queue pair fails by itself, and its host is told.
    pub(super) fn break_qp(&mut self, raw: Raw) {
        self.flush(raw);
        let Some(open) = self.qps.get(&raw).and_then(|qp| self.open.get_mut(&qp.context)) else { return };
        open.events.push_back(AsyncEvent::QpFatal { qp: raw });
        open.fd.write(1).expect("counts");
    }

    pub(super) fn destroy_qp(&mut self, raw: Raw) {
        let Some(qp) = self.qps.remove(&raw) else { return };
        // Its completions stay, as with some devices; nothing is late that was there before.
        if let Some(cq) = self.cqs.get_mut(&qp.cq) {
            cq.waiting.iter_mut().for_each(|entry| entry.visible_at = 0);
        }
    }

    /// Breaks all queue pairs of a host.
    pub(super) fn break_qps(&mut self, host: u32) {
        let of_host = |(raw, qp): (&Raw, &Qp)| (self.host_of(qp) == Some(host)).then_some(*raw);
        let broken: Vec<Raw> = self.qps.iter().filter_map(of_host).collect();
        broken.into_iter().for_each(|raw| self.break_qp(raw));
    }
}
