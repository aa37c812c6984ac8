//! A control socket without a service: answers as one of 100 hosts with 1,000 communicators would, for the console's tests and figures.
//! Its figures move: counters rise with time, one communicator stands still, and names are those of a hostile tenant.
//!
//! `crowd SOCKET [COMMUNICATORS [HOSTS]]`; `ready` on standard output says that it listens.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_control::{Call, Chunk, ControlAnswer, ControlRequest, chunks};
use mccs_controller::messages::answer::ControllerRequest;
use mccs_ipc::handshake::{Listener, Socket, SocketError};
use serde_json::{Value, json};

/// The communicator that stands still, and the rank that it waits for.
const STILL: u64 = 7;
/// The communicator with a name that would be markup.
const HOSTILE: u64 = 3;
const HOSTILE_NAME: &str = "<img src=x onerror=alert(1)>";
const RANKS: u64 = 4;

struct Crowd {
    began: Instant,
    communicators: u64,
    hosts: u64,
}

fn host(number: u64) -> String {
    format!("host-{number:03}")
}

fn tenant(number: u64) -> String {
    format!("team-{:02}", number % 20)
}

impl Crowd {
    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Operations of a communicator so far: each has another rate.
    fn operations(&self, number: u64) -> u64 {
        if number == STILL { 41 } else { (self.seconds() * (5.0 + (number % 97) as f64)) as u64 }
    }

    fn rank(&self, number: u64, rank: u64) -> Value {
        let done = self.operations(number);
        let waits = number == STILL && rank != 3;
        json!({ "rank": rank, "session": number * RANKS + rank, "pid": 10_000 + number * RANKS + rank, "enqueued": done + u64::from(waits),
            "started": done, "completed": done, "late_ns": done * rank * (1 + number % 7) * 1_000 })
    }

    fn communicator(&self, number: u64) -> Value {
        let (done, bytes) = (self.operations(number), 1_u64 << (12 + number % 14));
        let hosts = [number % self.hosts, (number + 1) % self.hosts].map(host);
        json!({ "communicator": number, "unique_id": format!("{number:016x}"), "tenant": tenant(number), "device": "host",
            "name": if number == HOSTILE { HOSTILE_NAME.to_owned() } else { format!("dp-{number}") }, "job": format!("slurm-{}", 4000 + number / 8),
            "operations": done, "pairs": 0, "bytes": done * bytes, "bus_bytes": done * bytes * 3 / 2, "busy_ns": done * (1 + number % 9) * 1_000_000,
            "multiprocessor_ns": 0, "gpu_memory_bytes": 0, "kinds": [{ "collective": "all_reduce", "busbw_gbps": 3.5, "exec_us": 812.0 }],
            "busbw_gbps": 3.5, "failed": 0, "epoch": 1, "on_gpus": null, "is_for_training": false, "nranks": 2 * RANKS, "hosts": hosts,
            "links": number, "transport": "tcp", "ranks": (0..RANKS).map(|rank| self.rank(number, rank)).collect::<Vec<_>>() })
    }

    fn tenants(&self) -> Vec<Value> {
        let of = |at: u64| {
            let own = || (0..self.communicators).filter(|number| number % 20 == at);
            let done: u64 = own().map(|number| self.operations(number)).sum();
            let quota =
                |resource: &str, used: u64, limit: u64| json!({ "resource": resource, "used": used, "limit": limit });
            json!({ "tenant": tenant(at), "in_flight": own().count(), "communicators": own().count(), "operations": done, "pairs": 0,
                "bytes": done << 16, "failed": 0,
                "quotas": [quota("memory_bytes", (1 + at) << 30, 64 << 30), quota("sessions", 4 * own().count() as u64, 1024)],
                "kinds": [{ "collective": "all_reduce", "bytes": done << 16, "durations": { "buckets": [0, 0, 0, 0, 0, 0, done, done / 2, done / 9], "sum_ns": done * 1000 } }],
                "allotment": { "weight_milli": 1000 * (1 + at % 3), "flow_cap_bps": null, "allotted_bps": 40_000_000_000_u64 } })
        };
        (0..20).map(of).collect()
    }

    fn host_views(&self) -> Vec<Value> {
        let view = |at: u64| {
            json!({ "host": host(at), "address": format!("10.0.{}.{}:7400", at / 200, 1 + at % 200), "own": at == 0, "up": at != 42,
                "since_seconds": 3600 + at, "last_error": (at == 42).then_some("connection refused") })
        };
        (0..self.hosts).map(view).collect()
    }

    fn overview(&self) -> Value {
        let paths = (1..self.hosts).map(|at| {
            let sent = (self.seconds() * 1e7 * (1 + at % 9) as f64) as u64;
            json!({ "peer": host(at), "path": format!("ports 5{at:02}00-5{at:02}99"), "sends": at % 2 == 0, "flows": 4, "bytes": sent,
                "messages": sent >> 16, "paths_left": 0, "segments": sent / 9000, "retransmits": sent / 90_000_000, "round_trip_us": 40 + at })
        });
        json!({ "host": host(0), "version": "0.1.0", "at_ns": self.began.elapsed().as_nanos() as u64 + 7_200_000_000_000_u64,
            "tenants": self.tenants(), "communicators": (0..self.communicators).map(|number| self.communicator(number)).collect::<Vec<_>>(),
            "joining": self.joining(), "flows": [], "paths": paths.collect::<Vec<_>>(), "hosts": self.host_views(), "draining": false,
            "clock_error_ns": null, "runtimes": [], "engines": [], "lines_suppressed": 0, "refused": [],
            "omitted": { "communicators": 0, "ranks": 0, "flows": 0 } })
    }

    fn joining(&self) -> Value {
        json!([{ "unique_id": "late", "tenant": tenant(5), "joined": 6, "nranks": 8, "waits_for": "ranks 6, 7", "since_seconds": 31 }])
    }

    fn failed(&self) -> Value {
        json!([{ "communicator": 5000, "unique_id": "00000000000000ff", "tenant": tenant(9), "nranks": 8, "hosts": [host(3), host(4)],
            "operations": 812, "reason": "rank 5 (process 4242 on host-004) ended: killed by signal 9", "age_seconds": 600 }])
    }

    fn cluster(&self, stuck: bool) -> Value {
        let hosts = (0..self.hosts).map(|at| {
            let own = (0..self.communicators).filter(|number| number % self.hosts == at);
            let told = own.map(|number| {
                json!({ "communicator": number, "unique_id": format!("{number:016x}"), "tenant": tenant(number), "nranks": 2 * RANKS,
                    "hosts": 2, "operations": self.operations(number) })
            });
            let stuck = if stuck && at == 0 { vec![json!({ "communicator": STILL, "part": null, "tenant": tenant(STILL), "class": "rank", "culprits": [culprit()] })] } else { Vec::new() };
            let summary = json!({ "version": "0.1.0", "draining": at == 17, "draining_reason": (at == 17).then_some("a fan is replaced"),
                "certificate_end": 4_000_000_000_u64, "sessions": 40, "gpus": 8, "gpus_lost": [], "unreachable": [],
                "communicators": told.collect::<Vec<_>>(), "more_communicators": 0, "joining": [], "failed": [], "stuck": stuck,
                "looked_at": 10, "not_looked_at": 0 });
            match at {
                42 => json!({ "host": host(at), "summary": null, "trouble": "connection refused" }),
                _ => json!({ "host": host(at), "summary": summary, "trouble": null }),
            }
        });
        json!({ "asked": host(0), "hosts": hosts.collect::<Vec<_>>() })
    }

    fn stuck(&self, communicator: u64) -> Value {
        let class = if communicator == STILL { "rank" } else { "running" };
        let culprits = if communicator == STILL { vec![culprit()] } else { Vec::new() };
        json!({ "communicator": communicator, "part": null, "class": class, "culprits": culprits, "hosts": [[host(0), null]],
            "progress": null })
    }

    fn policy(&self) -> Value {
        let link = |from: String, to: String, at: u64| {
            let load = 0.5 + 0.5 * (self.seconds() / 7.0 + at as f64).sin();
            json!({ "from": from, "to": to, "bps": (load * 9e10) as u64, "capacity_bps": 100_000_000_000_u64 })
        };
        let leaf = |at: u64| format!("leaf-{}", at / 10);
        let links = (0..self.hosts).flat_map(|at| [link(host(at), leaf(at), at), link(leaf(at), host(at), at + 3)]);
        let paths = (1..self.hosts).map(|at| {
            json!({ "from": host(at - 1), "to": host(at), "path": "spine0", "bps": 3_000_000_000_u64 * (1 + at % 9), "capacity_bps": null })
        });
        let comms = (0..self.communicators).map(|number| {
            let [from, to] = [number % self.hosts, (number + 1) % self.hosts].map(host);
            let flow = |from: &str, to: &str| json!({ "channel": 0, "from": from, "to": to, "path": "spine0" });
            json!({ "name": format!("{from}/18a3f/{number}"), "number": number, "tenant": tenant(number), "epoch": 1, "state": "as_decided",
                "strategy": { "rings": [[0, 1, 2, 3, 4, 5, 6, 7]], "algorithm": "auto", "transport": "tcp",
                    "flows": [flow(&from, &to), flow(&to, &from)] },
                "profile": null, "paces": [], "not_enforced": [] })
        });
        json!({ "life": 1, "policy": "ffa", "policy_file": "/etc/mccs/policy.toml", "topology_file": "/etc/mccs/topology.toml",
            "policy_text": "[policy]\nname = \"ffa\"\n", "files": [], "hosts": (0..self.hosts).map(|at| json!([host(at), at != 42])).collect::<Vec<_>>(),
            "links": [], "dead_links": [["leaf-4", "spine1", "12 flows timed out"]], "communicators": comms.collect::<Vec<_>>(),
            "rates": { "paths": paths.collect::<Vec<_>>(), "links": links.collect::<Vec<_>>(), "more_paths": 0, "more_links": 0, "others_bps": 0 },
            "idle_tenants": [], "refused_bodies": 0 })
    }

    fn history(&self) -> Value {
        let entry = |number: u64| {
            json!({ "number": number, "age_ms": 1000 * (200 - number) + (self.seconds() * 1e3) as u64, "what": format!("communicator host-001/18a3f/{number} placed"),
                "why": "it began", "went": "done", "kind": "communicator", "by": null })
        };
        (1..200).map(entry).collect()
    }

    fn answer(&self, request: &ControlRequest) -> Value {
        match request {
            ControlRequest::Overview => json!({ "overview": self.overview() }),
            ControlRequest::Communicators => json!({ "communicators": self.overview()["communicators"] }),
            ControlRequest::Hosts => json!({ "hosts": self.host_views() }),
            ControlRequest::Joining => json!({ "joining": self.joining() }),
            ControlRequest::Failed => json!({ "failed": self.failed() }),
            ControlRequest::Cluster { stuck } => json!({ "cluster": self.cluster(*stuck) }),
            ControlRequest::WhyStuck { communicator } | ControlRequest::Accounts { communicator } => {
                json!({ "stuck": self.stuck(*communicator) })
            }
            ControlRequest::Controller { request: ControllerRequest::Show } => {
                json!({ "controller": { "show": self.policy() } })
            }
            ControlRequest::Controller { request: ControllerRequest::History { .. } } => {
                json!({ "controller": { "history": self.history() } })
            }
            _ => json!({ "refused": "a crowd is no service" }),
        }
    }

    fn serve(&self, socket: &Socket) -> Result<(), Box<dyn std::error::Error>> {
        let wait = || if socket.wait_readable(Duration::from_secs(10)) { Ok(()) } else { Err("nothing came") };
        wait()?;
        while socket.recv_hello()?.is_none() {
            wait()?;
        }
        socket.send_hello(0)?;
        let mut text = Vec::new();
        loop {
            wait()?;
            let Some((Chunk { more, bytes }, _)) = socket.recv::<Chunk>()? else { continue };
            text.extend(bytes);
            if !more {
                break;
            }
        }
        let call: Call = serde_json::from_slice(&text)?;
        // With every key that a service's answer has.
        let answer: ControlAnswer = serde_json::from_value(self.answer(&call.request))?;
        let answer = serde_json::to_vec(&answer)?;
        for chunk in chunks(&answer) {
            while let Err(error) = socket.send(&chunk, &[]) {
                if !matches!(error, SocketError::WouldBlock) {
                    return Err(error.into());
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }
}

fn culprit() -> Value {
    json!({ "host": host(0), "rank": 3, "pid": 10_031, "gpu": null, "seq": 41, "peer": null, "what": "has not called all-reduce #41" })
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().context("crowd SOCKET [COMMUNICATORS [HOSTS]]")?;
    let communicators = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let hosts = arguments.next().map_or(Ok(100), |text| text.parse())?;
    let crowd: &Crowd = Box::leak(Box::new(Crowd { began: Instant::now(), communicators, hosts }));
    // The crowd answers only as a service would.
    let controller = |request| ControlRequest::Controller { request };
    let (show, history) = (controller(ControllerRequest::Show), controller(ControllerRequest::History { acts: false }));
    let stuck = ControlRequest::WhyStuck { communicator: STILL };
    for request in [
        ControlRequest::Overview,
        ControlRequest::Failed,
        ControlRequest::Cluster { stuck: true },
        stuck,
        show,
        history,
    ] {
        serde_json::from_value::<ControlAnswer>(crowd.answer(&request)).with_context(|| format!("{request:?}"))?;
    }
    let listener = Listener::bind(Path::new(&socket))?;
    println!("ready");
    loop {
        match listener.accept()? {
            Some((socket, _)) => drop(std::thread::spawn(move || {
                crowd.serve(&socket).inspect_err(|error| eprintln!("crowd: {error}")).ok()
            })),
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
