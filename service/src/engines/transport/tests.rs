use std::sync::Arc;
use std::time::{Duration, Instant};

use super::links::{LinkKey, PeerHost, Peers};
use super::*;
use crate::exchange::protocol::Name;
use crate::transports::Fault;
use crate::transports::memory::{MemoryNetwork, MemoryNetworkOptions};
use crate::transports::{FlowOptions, ListenOptions};

/// A channel whose links are broken.
struct Broken;

impl ChannelJob for Broken {
    fn step(&mut self, _: Option<&mut Links>, _: Instant) -> Result<Stepped, ChannelFault> {
        Err(TransportError::NoSuch("link").into())
    }

    fn waits(&self) -> Vec<FlowWait> {
        Vec::new()
    }

    fn release(&mut self, _: &mut Links) {}
}

struct Setup {
    engine: TransportEngine,
    to_engine: Sender<TransportMessage>,
    to_proxy: Sender<ProxyMessage>,
    proxy: Mailbox<ProxyMessage>,
}

impl Setup {
    fn new() -> Self {
        let mailbox = Mailbox::new(TRANSPORT_MAILBOX_MAX);
        let to_engine = mailbox.sender();
        let transport = MemoryNetwork::new(MemoryNetworkOptions::default()).add_host();
        let listen = ListenOptions::new([127, 0, 0, 1].into());
        let links = Links::new(Box::new(transport), listen, FlowOptions::default());
        let proxy = Mailbox::new(64);
        Setup { engine: TransportEngine::new(0, mailbox, Some(links)), to_engine, to_proxy: proxy.sender(), proxy }
    }

    fn tell(&self, message: TransportMessage) {
        assert!(self.to_engine.send(message).is_ok());
    }

    fn run(&self, job: Handle, links: Option<LinksId>) {
        let whole = WholeJob::new(job, self.to_proxy.clone(), 1, None);
        self.tell(TransportMessage::RunChannel(ChannelWork { job: Box::new(Broken), channel: 0, links, whole }));
    }

    fn poll(&mut self) -> Progress {
        self.engine.poll(&Context::new(Instant::now(), 64))
    }

    /// Jobs that have ended, all as failed.
    fn failed_jobs(&mut self) -> Vec<Handle> {
        let messages = std::iter::from_fn(|| self.proxy.pop());
        let failed = messages.filter_map(|message| match message {
            ProxyMessage::JobDone { job, fault } => Some((job, fault)),
            _ => None,
        });
        failed.map(|(job, fault)| fault.map(|_| job).unwrap()).collect()
    }
}

fn handle(index: u32) -> Handle {
    Handle { index, generation: 1 }
}

#[test]
fn retired_engine_fails_what_comes_until_broken_links_are_closed() {
    let mut setup = Setup::new();
    let links = LinksId(7);
    setup.tell(TransportMessage::Listen { links, engine: 0, reply: setup.to_proxy.clone() });
    setup.tell(TransportMessage::Retire);
    assert_ne!(setup.poll(), Progress::Done, "a communicator may still use its links");
    setup.run(handle(1), Some(links));
    assert_ne!(setup.poll(), Progress::Done, "the communicator has not heard that its links have broken");
    assert_eq!(setup.failed_jobs(), [handle(1)]);
    // On its way before the proxy engine knew.
    setup.run(handle(2), Some(links));
    assert_ne!(setup.poll(), Progress::Done);
    assert_eq!(setup.failed_jobs(), [handle(2)]);
    setup.tell(TransportMessage::CloseLinks { links });
    assert_eq!(setup.poll(), Progress::Done);
}

#[test]
fn channel_that_fails_without_links_ends_its_job() {
    let mut setup = Setup::new();
    setup.run(handle(3), None);
    setup.poll();
    assert_eq!(setup.failed_jobs(), [handle(3)]);
}

/// Rank 1 sends more than rank 0 waits for, and has closed all its links when rank 0 first looks: at the one to rank 1.
#[test]
fn message_of_another_call_is_the_reason_though_the_end_of_another_link_is_seen_first() {
    let (network, id, start) = (MemoryNetwork::new(MemoryNetworkOptions::default()), LinksId(7), Instant::now());
    let links = |_| {
        let listen = ListenOptions::new([127, 0, 0, 1].into());
        Links::new(Box::new(network.add_host()), listen, FlowOptions::default())
    };
    let mut hosts = [0, 1].map(links);
    let listeners = hosts.each_mut().map(|host| host.listen(id).unwrap());
    let names = ["h0", "h1"].map(|name| Name::new(name).unwrap());
    let peer = |(name, listener)| PeerHost { name, listeners: vec![listener] };
    let peers = names.into_iter().zip(listeners).map(peer).collect();
    let peers = Arc::new(Peers { hosts: peers, host_of_rank: vec![0, 1], ways: Arc::default() });
    hosts.iter_mut().for_each(|host| host.set_peers(id, Arc::clone(&peers)));

    let link = |src, dst| LinkKey { epoch: 0, channel: 0, src, dst };
    let [own, other] = &mut hosts;
    let (sends, _) = own.send_flow(id, link(0, 1), start).unwrap();
    other.recv_flow(id, link(0, 1), start).unwrap();
    let (recvs, _) = own.recv_flow(id, link(1, 0), start).unwrap();
    let (their_sends, _) = other.send_flow(id, link(1, 0), start).unwrap();
    let cx = |ms| Context::new(start + Duration::from_millis(ms), 64);
    for ms in 0..100 {
        own.poll(&cx(ms));
        other.poll(&cx(ms));
    }
    let (their_staging, staging) = (other.take_staging().unwrap(), own.take_staging().unwrap());
    own.transport.irecv(recvs, staging.span(12)).unwrap().expect("connected");
    other.transport.isend(their_sends, their_staging.span(64), 0).unwrap().expect("connected");
    for ms in 100..200 {
        other.poll(&cx(ms));
    }
    other.break_off(id);
    own.poll(&cx(200));

    let seen = own.transport.state(sends.into()).unwrap_err();
    assert_eq!(seen.fault(), Some(Fault::Closed));
    match own.reason(id, seen.into()) {
        ChannelFault::Mismatch { rank: 1, host: Some(host), is_pair: false, bytes: 64, expected_bytes: 12 } => {
            assert_eq!(host.as_str(), "h1");
        }
        other => panic!("{other:?}"),
    }
}
