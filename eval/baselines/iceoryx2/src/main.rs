//! Peer of `mccs-ring-bench`: round trips of 128 bytes between two busy processes through iceoryx2.
//!
//! Two of its patterns: request-response, a request and its response each trip; and publish-subscribe, a service each
//! way, the nearest to two rings. Both with the `ipc` variant, loaned samples, and polling. The program starts itself
//! again as the peer. Payloads are written and read whole, as commands are.

use std::hint::{black_box, spin_loop};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::{Parser, ValueEnum};
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// As large as a command of mccs.
type Payload = [u64; 16];
/// Round trips that are timed together.
const BATCH: usize = 100;

/// Measures iceoryx2 between two processes.
#[derive(Parser)]
struct Arguments {
    #[arg(long, value_enum, value_delimiter = ',', default_value = "request-response,publish-subscribe")]
    patterns: Vec<Pattern>,
    /// Round trips that are timed one by one, and again as many that are timed a hundred together.
    #[arg(long, default_value_t = 200_000)]
    round_trips: u64,
    /// Round trips before those.
    #[arg(long, default_value_t = 20_000)]
    warmup: u64,
    /// Cores of the two processes.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    cores: Vec<usize>,
    /// Be the peer, and find services under this name.
    #[arg(long, hide = true)]
    peer: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pattern {
    RequestResponse,
    PublishSubscribe,
}

impl Arguments {
    fn all_round_trips(&self) -> u64 {
        self.warmup + 2 * self.round_trips
    }

    /// Times round trips as `mccs-ring-bench` does, and prints the same record.
    fn time(&self, name: &str, mut round_trip: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<()> {
        (0..self.warmup).try_for_each(&mut round_trip)?;
        let (one_by_one, all) = (self.warmup + self.round_trips, self.all_round_trips());
        let mut times_ns = Vec::new();
        for number in self.warmup..one_by_one {
            let start = Instant::now();
            round_trip(number)?;
            times_ns.push(start.elapsed().as_nanos() as u64);
        }
        let mut batches_ns = Vec::new();
        for first in (one_by_one..all).step_by(BATCH) {
            let start = Instant::now();
            (first..first + BATCH as u64).try_for_each(&mut round_trip)?;
            batches_ns.push(start.elapsed().as_nanos() as u64);
        }
        let batched_ns = quantile(&mut batches_ns, 0.5) as f64 / BATCH as f64;
        let [p50_ns, p99_ns] = [0.5, 0.99].map(|part| quantile(&mut times_ns, part));
        let record = serde_json::json!({
            "side": name, "round_trips": self.round_trips, "p50_ns": p50_ns, "p99_ns": p99_ns,
            "batched_ns": batched_ns,
        });
        println!("{record}");
        Ok(())
    }

    fn request_response(&self, node: &Node<ipc::Service>, name: &str, is_peer: bool) -> anyhow::Result<()> {
        let service = node
            .service_builder(&format!("{name}/request-response").as_str().try_into()?)
            .request_response::<Payload, Payload>()
            .max_servers(1)
            .max_clients(1)
            .max_nodes(2)
            .open_or_create()?;
        if is_peer {
            let server = service.server_builder().create()?;
            for _ in 0..self.all_round_trips() {
                let request = poll(|| Ok(server.receive()?))?;
                request.loan_uninit()?.write_payload(*request.payload()).send()?;
            }
            return poll(|| Ok((service.dynamic_config().number_of_clients() == 0).then_some(())));
        }
        let client = service.client_builder().create()?;
        poll(|| Ok((service.dynamic_config().number_of_servers() == 1).then_some(())))?;
        self.time("iceoryx2 request-response", |number| {
            let pending = client.loan_uninit()?.write_payload([number; 16]).send()?;
            let response = poll(|| Ok(pending.receive()?))?;
            ensure!(black_box(*response.payload())[0] == number, "responses out of order");
            Ok(())
        })
    }

    fn publish_subscribe(&self, node: &Node<ipc::Service>, name: &str, is_peer: bool) -> anyhow::Result<()> {
        let service = |direction: &str| -> anyhow::Result<_> {
            let service = node
                .service_builder(&format!("{name}/{direction}").as_str().try_into()?)
                .publish_subscribe::<Payload>()
                .max_publishers(1)
                .max_subscribers(1)
                .max_nodes(2)
                .history_size(0)
                .enable_safe_overflow(false)
                .open_or_create()?;
            Ok(service)
        };
        let (there, back) = (service("there")?, service("back")?);
        let (to, from) = if is_peer { (&back, &there) } else { (&there, &back) };
        let (publisher, subscriber) = (to.publisher_builder().create()?, from.subscriber_builder().create()?);
        let connected = || to.dynamic_config().number_of_subscribers() == 1;
        poll(|| Ok(connected().then_some(())))?;
        if is_peer {
            for _ in 0..self.all_round_trips() {
                let payload = receive(&subscriber)?;
                send(&publisher, payload)?;
            }
            return poll(|| Ok((from.dynamic_config().number_of_publishers() == 0).then_some(())));
        }
        self.time("iceoryx2 publish-subscribe", |number| {
            send(&publisher, [number; 16])?;
            ensure!(black_box(receive(&subscriber)?)[0] == number, "samples out of order");
            Ok(())
        })
    }

    fn run(&self, pattern: Pattern, node: &Node<ipc::Service>, name: &str, is_peer: bool) -> anyhow::Result<()> {
        match pattern {
            Pattern::RequestResponse => self.request_response(node, name, is_peer),
            Pattern::PublishSubscribe => self.publish_subscribe(node, name, is_peer),
        }
    }
}

/// The smallest time that at least this part of the trips stays within.
fn quantile(times_ns: &mut [u64], quantile: f64) -> u64 {
    times_ns.sort_unstable();
    times_ns[((quantile * times_ns.len() as f64).ceil() as usize).max(1) - 1]
}

fn send(publisher: &Publisher<ipc::Service, Payload, ()>, payload: Payload) -> anyhow::Result<()> {
    publisher.loan_uninit()?.write_payload(payload).send()?;
    Ok(())
}

fn receive(subscriber: &Subscriber<ipc::Service, Payload, ()>) -> anyhow::Result<Payload> {
    poll(|| Ok(subscriber.receive()?.map(|sample| *sample.payload())))
}

fn poll<T>(mut attempt: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    loop {
        if let Some(value) = attempt()? {
            return Ok(value);
        }
        spin_loop();
    }
}

fn pin(core: usize) -> anyhow::Result<()> {
    let mut only = CpuSet::new();
    only.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("cannot run on core {core}"))
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let whole_batches = arguments.round_trips > 0 && arguments.round_trips.is_multiple_of(BATCH as u64);
    ensure!(whole_batches, "--round-trips must be a multiple of {BATCH}");
    ensure!(arguments.cores.len() == 2, "--cores takes two, as in 0,1");
    set_log_level(LogLevel::Error);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    if let Some(name) = &arguments.peer {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        pin(arguments.cores[1])?;
        return arguments.run(arguments.patterns[0], &node, name, true);
    }
    pin(arguments.cores[0])?;
    for pattern in &arguments.patterns {
        let name = format!("mccs-eval-{}", std::process::id());
        let value = pattern.to_possible_value().context("bug: a pattern without a name")?;
        let mut peer = std::process::Command::new(std::env::current_exe()?)
            .args(["--peer", &name, "--patterns", value.get_name()])
            .args(["--round-trips", &arguments.round_trips.to_string(), "--warmup", &arguments.warmup.to_string()])
            .arg("--cores")
            .arg(arguments.cores.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
            .spawn()
            .context("cannot start the peer process")?;
        arguments.run(*pattern, &node, &name, false)?;
        ensure!(peer.wait()?.success(), "the peer process failed");
    }
    Ok(())
}
