//! Fake verbs driver in one process, for tests: devices of several hosts on one fabric.
//!
//! Queue pairs move bytes from registered memory into registered memory, in order, as they are polled; keys and bounds are
//! checked, receivers may not be ready, and queues hold what they were made for. Time is what the test says. Bad luck is
//! what the test says, too: links go down, queue pairs break, memory is refused, completions are late.

mod objects;
mod world;

use std::collections::{BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use nix::errno::Errno;

use self::objects::{Channel, Device, OpenDevice};
use self::world::{World, event_fd};
use super::driver::{
    Access, AsyncEvent, Completion, DeviceLimits, DmaBuffer, Driver, Gid, GidKind, LinkLayer, MadeQp, PortAttributes,
    QpShape, QpStep, Raw, Read, Registered, Write,
};
use super::error::VerbsError;

/// Treatment of a UDP source port by devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourcePorts {
    /// They cannot be told.
    Unknown,
    /// They send from there.
    Taken,
    /// Their driver could, and does not.
    Refused,
}

/// How a fabric behaves.
#[derive(Debug, Clone, Copy)]
pub struct FabricOptions {
    /// Bytes of a write that move at a time.
    pub step_bytes: u64,
    /// Polls by which a completion is late at most.
    pub late_polls: u64,
    /// Decides how late they are.
    pub seed: u64,
    /// Memory that a host may register.
    pub locked_bytes: Option<u64>,
    /// Registrations may relax the order of writes.
    pub takes_relaxed_ordering: bool,
    /// Each device reaches only those of the same place on other hosts; otherwise all reach all.
    pub has_rails: bool,
    pub source_ports: SourcePorts,
    /// Work requests can carry their bytes.
    pub takes_inline: bool,
    /// Queue pairs can be connected only where packets get to the peer's address, as the kernel has it that asks for its neighbours.
    pub resolves: bool,
    /// Places of a completion queue at most.
    pub cq_entries: u32,
}

impl Default for FabricOptions {
    fn default() -> Self {
        FabricOptions {
            step_bytes: 64 << 10,
            late_polls: 0,
            seed: 1,
            locked_bytes: None,
            takes_relaxed_ordering: false,
            has_rails: false,
            source_ports: SourcePorts::Unknown,
            takes_inline: true,
            resolves: false,
            cq_entries: 1 << 16,
        }
    }
}

/// See the module's documentation. Clones are the same fabric.
#[derive(Debug, Clone)]
pub struct Fabric {
    world: Arc<Mutex<World>>,
    /// Gates at which those wait who connect queue pairs, and who register much memory.
    connecting: Arc<Gate>,
    pinning: Arc<Gate>,
}

/// Gate at which those wait who connect queue pairs of a host that looks for an address.
#[derive(Debug, Default)]
struct Gate {
    closed: Mutex<Closed>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct Closed {
    hosts: BTreeSet<u32>,
    waiting: usize,
}

impl Gate {
    fn closed(&self) -> MutexGuard<'_, Closed> {
        self.closed.lock().expect("no test has panicked in here")
    }

    fn close(&self, host: u32, is_closed: bool) {
        let mut closed = self.closed();
        if is_closed {
            closed.hosts.insert(host)
        } else {
            closed.hosts.remove(&host)
        };
        self.opened.notify_all();
    }

    fn pass(&self, host: u32) {
        let mut closed = self.closed();
        closed.waiting += 1;
        while closed.hosts.contains(&host) {
            closed = self.opened.wait(closed).expect("no test has panicked in here");
        }
        closed.waiting -= 1;
    }
}

/// A host of a fabric.
#[derive(Debug)]
pub struct Host {
    fabric: Fabric,
    number: u32,
}

impl Fabric {
    pub fn new(options: FabricOptions) -> Self {
        Fabric { world: Arc::new(Mutex::new(World::new(options))), connecting: Arc::default(), pinning: Arc::default() }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("no test has panicked in here")
    }

    /// Adds a host with devices `fake0`, `fake1`...; a device's address is 10.0.HOST.DEVICE + 1.
    pub fn add_host(&self, devices: u8) -> Arc<Host> {
        let mut world = self.world();
        let host = world.hosts;
        world.hosts += 1;
        for device in 0..devices {
            let gid = Gid::of(Self::address(host, device).into());
            let link_local = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host as u8, device]);
            let gids = vec![
                (link_local, GidKind::V1),
                (link_local, GidKind::RoceV2),
                (gid, GidKind::V1),
                (gid, GidKind::RoceV2),
            ];
            world.devices.push(Device::new(host, device, gids));
        }
        drop(world);
        Arc::new(Host { fabric: self.clone(), number: host })
    }

    /// Address of a device.
    pub fn address(host: u32, device: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, host as u8, device + 1)
    }

    /// The time, which only goes forward.
    pub fn set_now(&self, now: Instant) {
        self.world().now = Some(now);
    }

    /// Plugs a device's port in or out.
    pub fn set_link(&self, host: &Host, device: u8, is_up: bool) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        world.devices[index].is_up = is_up;
        world.tell(index, if is_up { AsyncEvent::PortUp(1) } else { AsyncEvent::PortDown(1) });
    }

    /// A thread that connects a queue pair of a host waits from here on, as for an address that is looked for;
    /// or no more.
    pub fn keep_looking(&self, host: &Host, keeps: bool) {
        self.connecting.close(host.number, keeps);
    }

    /// How many wait to connect a queue pair.
    pub fn looking(&self) -> usize {
        self.connecting.closed().waiting
    }

    /// A thread that registers more than 1 MiB at a host waits from here on, as for pages; or no more.
    pub fn keep_pinning(&self, host: &Host, keeps: bool) {
        self.pinning.close(host.number, keeps);
    }

    /// How many wait to register memory.
    pub fn pinning(&self) -> usize {
        self.pinning.closed().waiting
    }

    /// From here on nothing comes through to or from a device, though its link is up; or everything again.
    pub fn silence(&self, host: &Host, device: u8, is_silent: bool) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        world.devices[index].is_silent = is_silent;
    }

    /// A device is to go, of which nobody says anything: it is not listed and cannot be opened, and works until those who have it open
    /// let it go.
    pub fn begin_to_remove(&self, host: &Host, device: u8) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        world.devices[index].is_gone = true;
    }

    /// A device is gone: every call fails, also when another one takes its place. Its driver may say so, or not.
    pub fn remove(&self, host: &Host, device: u8, is_told: bool) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        (world.devices[index].is_up, world.devices[index].is_gone) = (false, true);
        world.tell(index, if is_told { AsyncEvent::DeviceFatal } else { AsyncEvent::PortDown(1) });
        world.open.values_mut().filter(|open| open.device == index).for_each(|open| open.is_dead = true);
    }

    /// A device is there again.
    pub fn put_back(&self, host: &Host, device: u8) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        (world.devices[index].is_up, world.devices[index].is_gone) = (true, false);
    }

    /// How often a device is open.
    pub fn opened(&self, host: &Host, device: u8) -> usize {
        let world = self.world();
        let index = world.device(host.number, device);
        world.open.values().filter(|open| open.device == index).count()
    }

    /// A device gets another address, or loses it: the unspecified one is none.
    pub fn change_address(&self, host: &Host, device: u8, address: Ipv4Addr) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        let gids = &mut world.devices[index].gids;
        // The link-local one, in front, stays.
        gids.truncate(2);
        if !address.is_unspecified() {
            let gid = Gid::of(address.into());
            gids.extend([(gid, GidKind::V1), (gid, GidKind::RoceV2)]);
        }
        world.tell(index, AsyncEvent::AddressChange(1));
    }

    /// A device gets another LID of the subnet's manager.
    pub fn change_lid(&self, host: &Host, device: u8, lid: u16) {
        let mut world = self.world();
        let index = world.device(host.number, device);
        world.devices[index].lid = lid;
        world.tell(index, AsyncEvent::AddressChange(1));
    }

    /// All queue pairs of a host fail.
    pub fn break_qps(&self, host: &Host) {
        self.world().break_qps(host.number);
    }

    /// The keys of a host's memory are no longer good.
    pub fn revoke_memory(&self, host: &Host) {
        self.world().revoke(host.number);
    }

    /// The next write of a host ends with this status; said twice before there is one, it is still one write.
    pub fn fail_next_write(&self, host: &Host, status: u32) {
        let (mut world, luck) = (self.world(), (host.number, status));
        if !world.bad_luck.contains(&luck) {
            world.bad_luck.push(luck);
        }
    }

    /// A host is told no more of writes that it makes from here on.
    pub fn withhold_completions(&self, host: &Host) {
        self.world().withheld.insert(host.number);
    }

    /// How much memory a host may register from here on.
    pub fn limit_locked(&self, bytes: Option<u64>) {
        self.world().options.locked_bytes = bytes;
    }

    /// This memory is a GPU's: written bytes come when a read pushes them. Its driver may speak for it (`nvidia_peermem`).
    pub fn be_gpu(&self, memory: &[u8], has_driver: bool) {
        let start = memory.as_ptr() as u64;
        self.world().gpu = Some((start..start + memory.len() as u64, has_driver));
    }

    /// Completions that found no room in their queue. There must be none.
    pub fn overruns(&self) -> u64 {
        self.world().overruns
    }

    /// How often a queue pair could not be connected since packets did not get to its peer.
    pub fn unresolved(&self) -> usize {
        self.world().unresolved
    }

    /// Registrations whose writes may be seen in any order.
    pub fn relaxed(&self) -> usize {
        self.world().relaxed()
    }

    /// UDP source ports that devices were told, and how often they were.
    pub fn source_ports(&self) -> (Vec<u16>, usize) {
        let world = self.world();
        (world.qps.values().filter_map(|qp| qp.source_port).collect(), world.source_ports_told)
    }

    /// Places of each completion queue of all hosts.
    pub fn cq_entries(&self) -> Vec<u32> {
        self.world().cqs.values().map(|cq| cq.entries).collect()
    }

    /// Queue pairs and registrations of all hosts.
    pub fn held(&self) -> (usize, usize) {
        let world = self.world();
        (world.qps.len(), world.registrations())
    }
}

impl Host {
    fn world(&self) -> MutexGuard<'_, World> {
        self.fabric.world()
    }
}

fn refused(call: &'static str) -> impl Fn(Errno) -> VerbsError {
    move |errno| VerbsError::new(call, errno)
}

impl Driver for Host {
    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        let world = self.world();
        let there = world.devices.iter().filter(|it| it.host == self.number && !it.is_gone);
        Ok(there.map(|it| it.name.clone()).collect())
    }

    fn open(&self, device: &str) -> Result<Raw, VerbsError> {
        let mut world = self.world();
        let is_it = |it: &Device| it.host == self.number && it.name == device && !it.is_gone;
        let device = world.devices.iter().position(is_it);
        let device = device.ok_or(VerbsError::new("ibv_open_device", Errno::ENODEV))?;
        let raw = world.name();
        world.open.insert(raw, OpenDevice { device, events: Default::default(), fd: event_fd(), is_dead: false });
        Ok(raw)
    }

    fn close(&self, context: Raw) {
        let mut world = self.world();
        assert!(!world.pds.values().any(|of| *of == context), "closed while in use");
        world.open.remove(&context);
    }

    fn limits(&self, _: Raw) -> Result<DeviceLimits, VerbsError> {
        Ok(DeviceLimits {
            ports: 1,
            queue_wrs: 1 << 14,
            cq_entries: self.world().options.cq_entries,
            qps: 1 << 17,
            mr_bytes: u64::MAX,
        })
    }

    fn port(&self, context: Raw, _: &str, _: u8) -> Result<PortAttributes, VerbsError> {
        let world = self.world();
        world.there(context).map_err(refused("ibv_query_port"))?;
        let device = &world.devices[world.open[&context].device];
        Ok(PortAttributes {
            is_active: device.is_up,
            link_layer: LinkLayer::Ethernet,
            mtu: 3,
            gids: device.gids.len() as u32,
            pkeys: 1,
            message_bytes: 1 << 30,
            lid: device.lid,
            gbit_per_s: 100,
        })
    }

    fn gid(&self, context: Raw, _: &str, _: u8, index: u32) -> Result<Option<(Gid, GidKind)>, VerbsError> {
        let world = self.world();
        Ok(world.devices[world.open[&context].device].gids.get(index as usize).copied())
    }

    fn events_fd(&self, context: Raw) -> RawFd {
        self.world().open[&context].fd.as_fd().as_raw_fd()
    }

    fn next_event(&self, context: Raw) -> Option<AsyncEvent> {
        let mut world = self.world();
        let open = world.open.get_mut(&context)?;
        let event = open.events.pop_front();
        if event.is_none() {
            // Nothing to read is as good as read.
            let _ = open.fd.read();
        }
        event
    }

    fn alloc_pd(&self, context: Raw) -> Result<Raw, VerbsError> {
        let mut world = self.world();
        world.there(context).map_err(refused("ibv_alloc_pd"))?;
        let raw = world.name();
        world.pds.insert(raw, context);
        Ok(raw)
    }

    fn dealloc_pd(&self, pd: Raw) {
        self.world().pds.remove(&pd);
    }

    unsafe fn register(&self, pd: Raw, address: u64, bytes: u64, access: Access) -> Result<Registered, VerbsError> {
        if access.relaxed_ordering && !self.world().options.takes_relaxed_ordering {
            return Err(VerbsError::new("ibv_reg_mr_iova2", Errno::EOPNOTSUPP));
        }
        if bytes > 1 << 20 {
            self.fabric.pinning.pass(self.number);
        }
        self.world().register(pd, address, bytes, access, false).map_err(refused("ibv_reg_mr"))
    }

    unsafe fn register_dma_buffer(
        &self,
        pd: Raw,
        buffer: DmaBuffer,
        address: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Registered, VerbsError> {
        // Devices of this fabric take those that begin where the memory does.
        if buffer.offset != 0 {
            return Err(VerbsError::new("ibv_reg_dmabuf_mr", Errno::EOPNOTSUPP));
        }
        self.world().register(pd, address, bytes, access, true).map_err(refused("ibv_reg_dmabuf_mr"))
    }

    fn deregister(&self, mr: Raw) {
        self.world().deregister(mr);
    }

    fn create_channel(&self, _: Raw) -> Result<(Raw, RawFd), VerbsError> {
        let mut world = self.world();
        let (raw, channel) = (world.name(), Channel { events: VecDeque::new(), fd: event_fd() });
        let raw_fd = channel.fd.as_fd().as_raw_fd();
        world.channels.insert(raw, channel);
        Ok((raw, raw_fd))
    }

    fn destroy_channel(&self, channel: Raw) {
        self.world().channels.remove(&channel);
    }

    fn next_cq_event(&self, channel: Raw) -> Option<Raw> {
        let mut world = self.world();
        let channel = world.channels.get_mut(&channel)?;
        let event = channel.events.pop_front();
        if channel.events.is_empty() {
            // Nothing to read is as good as read.
            let _ = channel.fd.read();
        }
        event
    }

    fn create_cq(&self, context: Raw, channel: Raw, entries: u32) -> Result<Raw, VerbsError> {
        let mut world = self.world();
        world.there(context).map_err(refused("ibv_create_cq"))?;
        if entries > world.options.cq_entries {
            return Err(VerbsError::new("ibv_create_cq", Errno::EINVAL));
        }
        Ok(world.create_cq(channel, entries))
    }

    fn destroy_cq(&self, cq: Raw) {
        self.world().cqs.remove(&cq);
    }

    fn arm_cq(&self, context: Raw, cq: Raw) -> Result<(), VerbsError> {
        let mut world = self.world();
        world.there(context).map_err(refused("ibv_req_notify_cq"))?;
        world.arm(cq);
        Ok(())
    }

    fn poll_cq(&self, context: Raw, cq: Raw, completions: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut world = self.world();
        world.there(context).map_err(refused("ibv_poll_cq"))?;
        Ok(world.poll(cq, completions))
    }

    fn create_qp(&self, pd: Raw, cq: Raw, shape: QpShape) -> Result<MadeQp, VerbsError> {
        let made = self.world().create_qp(pd, cq, shape).ok_or(VerbsError::new("ibv_create_qp", Errno::EINVAL));
        made.map(|(raw, number)| MadeQp { raw, number, inline_bytes: shape.inline_bytes })
    }

    fn modify_qp(&self, qp: Raw, step: QpStep) -> Result<(), VerbsError> {
        if matches!(step, QpStep::Receive(_)) {
            self.fabric.connecting.pass(self.number);
        }
        self.world().modify_qp(qp, step).map_err(refused("ibv_modify_qp"))
    }

    fn set_source_port(&self, qp: Raw, source_port: u16) -> Result<bool, VerbsError> {
        self.world().set_source_port(qp, source_port).map_err(refused("mlx5dv_modify_qp_udp_sport"))
    }

    fn destroy_qp(&self, qp: Raw) {
        self.world().destroy_qp(qp);
    }

    unsafe fn post_writes(&self, qp: Raw, writes: &[Write]) -> Result<(), VerbsError> {
        self.world().post_writes(qp, writes).map_err(refused("ibv_post_send"))
    }

    unsafe fn post_read(&self, qp: Raw, read: &Read) -> Result<(), VerbsError> {
        self.world().post_read(qp, read).map_err(refused("ibv_post_send"))
    }

    fn post_receives(&self, qp: Raw, wr_id: u64, count: u32) -> Result<(), VerbsError> {
        self.world().post_receives(qp, wr_id, count).map_err(refused("ibv_post_recv"))
    }
}
