//! Views with made-up values, for tests of other crates. Each function returns one object; tests
//! replace the fields that they are about.

use std::collections::BTreeMap;
use std::time::Duration;

use mccs_controller::messages::answer::StoreView;
use mccs_runtime::RuntimeInfo;
use mccs_telemetry::bandwidth::{KindView, PairSide, PairView, TenantKindView};
use mccs_telemetry::flows::{PathView, WireView};
use mccs_telemetry::histogram::Histogram;
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::placed::Allotment;

use crate::overview::{Omitted, Overview, PushesView, QuotaView, RefusedView, TenantView};
use crate::{CommView, GpuView, HostView, OfficeView, RankView};

/// An overview with one object of each kind, and every optional field that metrics are made of.
#[must_use]
pub fn overview() -> Overview {
    Overview {
        host: "h0".into(),
        version: "1".into(),
        at_ns: 2_000_000_000,
        tenants: vec![tenant()],
        communicators: vec![communicator()],
        joining: vec![late()],
        flows: Vec::new(),
        paths: vec![path()],
        hosts: vec![peer("h1")],
        gpus: vec![GpuView {
            lost: Some("CUDA_ERROR_ILLEGAL_ADDRESS (700)".into()),
            nic_access: Some("bounce".into()),
            nic_access_reason: Some("no NIC".into()),
            ..gpu("GPU-1")
        }],
        memory: None,
        draining: true,
        draining_reason: None,
        certificate_end: Some(2_000_000_000),
        office: Some(office()),
        clock_error_ns: Some(250_000),
        clock: None,
        pushes: Some(PushesView { accepted: 12, failed: 13, trouble: Some("no answer in time".into()) }),
        runtimes: vec![runtime()],
        engines: Vec::new(),
        lines_suppressed: 6,
        refused: vec![RefusedView { endpoint: "metrics".into(), connections: 1 }],
        omitted: Omitted::default(),
    }
}

/// Tenant `a`, with a quota, a label, and an allotment.
#[must_use]
pub fn tenant() -> TenantView {
    let durations = Histogram::default();
    [1, 3, 1000].iter().for_each(|us| durations.count(Duration::from_micros(*us)));
    TenantView {
        tenant: "a".into(),
        rules: "all".into(),
        labels: BTreeMap::from([("job".to_owned(), "47\"11".to_owned())]),
        quotas: vec![QuotaView { resource: "memory_bytes".into(), used: 5, limit: 6, limit_from: None }],
        in_flight: 1,
        communicators: 1,
        operations: 10,
        pairs: 4,
        bytes: 4096,
        failed: 2,
        kinds: vec![TenantKindView { collective: "all_reduce".into(), bytes: 77, durations: durations.view() }],
        allotment: Some(Allotment {
            weight_milli: Some(1500),
            flow_cap_bps: Some(8000),
            host_cap_bps: Some(24_000),
            allotted_bps: Some(16_000),
        }),
    }
}

/// Communicator 5 of tenant `a`: a rail of communicator 4, on hosts `h0` and `h1`, over TCP.
#[must_use]
pub fn communicator() -> CommView {
    CommView {
        communicator: 5,
        unique_id: "u".into(),
        name: "data \"parallel\"".into(),
        job: "4711 train".into(),
        traffic_class: None,
        tenant: "a".into(),
        device: "host".into(),
        operations: 10,
        pairs: 4,
        puts: 2,
        put_bytes: 200,
        bytes: 4096,
        bus_bytes: 100,
        busy_ns: 500_000_000,
        multiprocessor_ns: 2_500_000_000,
        gpu_memory_bytes: 29 << 20,
        kinds: vec![KindView { collective: "all_reduce".into(), busbw_gbps: 2.5, exec_us: 12.0 }],
        pair_sides: vec![PairView { side: PairSide::Recv, busbw_gbps: 1.5, exec_us: 20.0 }],
        busbw_gbps: 0.2,
        failed: 2,
        epoch: 3,
        on_gpus: None,
        is_for_training: false,
        graphs_keep: None,
        nranks: 4,
        hosts: vec!["h0".into(), "h1".into()],
        links: Some(0),
        part_of: Some(4),
        part: Some("rail 1 of 2".into()),
        transport: Some(mccs_config::service::TransportKind::Tcp),
        transport_reason: Some("host h1: no RDMA".into()),
        reduction_ring: Vec::new(),
        ranks: vec![rank(1)],
    }
}

/// A rank that is late, with a tag.
#[must_use]
pub fn rank(rank: u32) -> RankView {
    RankView {
        rank,
        session: 3,
        pid: 4,
        enqueued: 9,
        started: 8,
        completed: 7,
        late_ns: 1_500_000_000,
        user_tag: Some(4711),
    }
}

/// A communicator of tenant `a` that waits for its second rank.
#[must_use]
pub fn late() -> LateView {
    LateView {
        unique_id: "v".into(),
        tenant: "a".into(),
        joined: 1,
        nranks: 2,
        waits_for: "rank 1 of 2".into(),
        since_seconds: 10,
    }
}

/// Flows over TCP to host `h1`.
#[must_use]
pub fn path() -> PathView {
    PathView {
        peer: "h1".into(),
        path: "-".into(),
        sends: true,
        flows: 2,
        bytes: 8,
        messages: 3,
        paths_left: 4,
        wire: WireView { segments: 900, retransmits: 9, round_trip_us: Some(70) },
    }
}

/// Another host, which can be reached.
#[must_use]
pub fn peer(host: &str) -> HostView {
    HostView {
        host: host.to_owned(),
        address: ([127, 0, 0, 1], 1).into(),
        own: false,
        up: true,
        since_seconds: 1,
        last_error: None,
        rdma: None,
        no_rdma: None,
    }
}

/// A GPU without faults.
#[must_use]
pub fn gpu(uuid: &str) -> GpuView {
    GpuView {
        gpu: uuid.to_owned(),
        name: "a GPU".into(),
        pci_bus_id: "0000:17:00.0".into(),
        unreached: Vec::new(),
        lost: None,
        nics: Vec::new(),
        nic_access: None,
        nic_access_reason: None,
    }
}

/// Host `a`, elected controller, with a store that is full.
fn office() -> OfficeView {
    OfficeView {
        controller: Some("a".into()),
        term: Some(17),
        is_here: true,
        paused: None,
        candidates: vec!["a".into(), "b".into()],
        store: Some(StoreView { kind: "etcd".into(), trouble: Some("it is full".into()) }),
    }
}

fn runtime() -> RuntimeInfo {
    RuntimeInfo {
        index: 0,
        name: "mccs-main".into(),
        tid: 1,
        rounds: 11,
        parks: 2,
        cpus: "0-3".into(),
        bound_to: String::new(),
    }
}
