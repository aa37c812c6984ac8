//! Limits of configuration values: the least and greatest of every key, each with its reason.

use crate::units::{Bytes, DurationText, Rate};

/// Inclusive bounds of a value and why they are.
#[derive(Debug, Clone, Copy)]
pub struct Limit<T> {
    /// Least value.
    pub min: T,
    /// Greatest value.
    pub max: T,
    /// Why, as the operator is told.
    pub reason: &'static str,
}

/// Longest file that is read: thousands of hosts, each with all its NICs.
pub const FILE_BYTES_MAX: Bytes = Bytes::mib(16);

/// Longest policy, however it comes: a request of `mccsctl policy apply` brings all of it, in JSON, where line ends and quotes take two bytes.
pub const POLICY_BYTES_MAX: Bytes = Bytes::kib(120);

/// Names of a console: each is one that somebody has given it.
pub const CONSOLE_NAMES_MAX: usize = 64;

/// Users that may look besides operators: each is a program that somebody has set up.
pub const OBSERVERS_MAX: usize = 64;

/// Slots of a session's command ring; a power of two.
pub const COMMAND_RING: Limit<u32> =
    Limit { min: 64, max: 65_536, reason: "a ring's indices are masked, and each session pays 128 bytes a slot" };

/// Slots of a session's completion ring; a power of two.
pub const COMPLETION_RING: Limit<u32> =
    Limit { min: 16, max: 4_096, reason: "only failures come through it, and each session pays 512 bytes a slot" };

/// Time that ranks have to join a communicator.
pub const INIT_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(10),
    max: DurationText::secs(24 * 3600),
    reason: "a rank must have time to connect, and a waiter must be released some day",
};

/// Time that an operation waits for other ranks.
pub const OPERATION_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(0),
    max: DurationText::secs(30 * 24 * 3600),
    reason: "a rank may work for long between two calls, and a waiter must be released some day",
};

/// Host memory that regions leave free.
pub const MIN_FREE_MEMORY: Limit<Bytes> =
    Limit { min: Bytes(0), max: Bytes::gib(1 << 14), reason: "no host has more than 16 TiB of memory" };

/// Thread blocks of a kernel that carries a collective out.
pub const CUDA_MAX_CTAS: Limit<u32> =
    Limit { min: 1, max: 128, reason: "a kernel has at least one block, and symmetric buffers have room for 128" };

/// Payload up to which kernels meet in pinned memory of the host.
pub const CUDA_PINNED_TO: Limit<Bytes> = Limit {
    min: Bytes(0),
    max: Bytes::kib(32),
    reason: "the LL protocol carries it, which is slower than others for more",
};

/// Longest chunk of what ranks' kernels move in chunks.
pub const CUDA_CHUNK: Limit<Bytes> = Limit {
    min: Bytes::kib(4),
    max: Bytes::kib(256),
    reason: "a communicator's rings have some hundred slots of it for each pair of ranks, and shorter ones are slow",
};

/// Memory for parts to be combined.
pub const CUDA_SLOT: Limit<Bytes> = Limit {
    min: Bytes::kib(256),
    max: Bytes::gib(1),
    reason: "every communicator takes two of them on each of its GPUs, and pieces below some 100 KiB are slow",
};

/// Sessions of a tenant at once.
pub const SESSIONS: Limit<u32> =
    Limit { min: 1, max: 4_096, reason: "each session takes file descriptors and a shared segment of the service" };

/// Sessions of all tenants at once.
pub const ALL_SESSIONS: Limit<u32> =
    Limit { min: 1, max: 1 << 20, reason: "each takes four descriptors of the service, and its segment" };

/// Communicators of a tenant at once.
pub const COMMUNICATORS: Limit<u32> =
    Limit { min: 1, max: 65_536, reason: "each communicator holds a table slot and its plans in the service" };

/// Operations of a session that have begun and not ended.
pub const OPERATIONS_IN_FLIGHT: Limit<u32> =
    Limit { min: 1, max: 1 << 20, reason: "each operation in flight holds memory of the service" };

/// Streams of a session.
pub const STREAMS: Limit<u32> =
    Limit { min: 1, max: 16_384, reason: "each stream has a cache line of the session's segment" };

/// Memory regions of a session.
pub const REGIONS: Limit<u32> =
    Limit { min: 1, max: 65_536, reason: "each region is a mapping in the service, and Linux allows a process 65,530" };

/// Memory of a tenant, all sessions together.
pub const MEMORY: Limit<Bytes> =
    Limit { min: Bytes::kib(4), max: Bytes::gib(1 << 20), reason: "less than a page holds no buffer" };

/// Memory of GPUs of a tenant's communicators.
pub const GPU_MEMORY: Limit<Bytes> =
    Limit { min: Bytes::kib(0), max: Bytes::gib(1 << 20), reason: "no host has as much" };

/// Tenants of a service.
pub const TENANTS: Limit<u32> =
    Limit { min: 0, max: 1_024, reason: "each tenant's socket is a listening file descriptor" };

/// How long a scheduler's program waits for the service.
pub const SCHEDULER_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::secs(1),
    max: DurationText::secs(300),
    reason: "schedulers end programs that take long (PrologEpilogTimeout of Slurm)",
};

/// How often it is looked whether pods have ended.
pub const SCHEDULER_LOOK: Limit<DurationText> = Limit {
    min: DurationText::millis(50),
    max: DurationText::secs(60),
    reason: "a pod that has ended holds what it had until then",
};

/// Labels of a tenant.
pub const LABELS: Limit<u32> = Limit { min: 0, max: 8, reason: "each is part of a series of metrics" };

/// Transport engines of a service.
pub const TRANSPORT_ENGINES: Limit<u32> =
    Limit { min: 1, max: 64, reason: "each may be a thread of its own; beyond the cores they only take turns" };

/// How long an idle runtime spins before it parks.
pub const SPIN: Limit<DurationText> =
    Limit { min: DurationText::micros(0), max: DurationText::millis(10), reason: "an idle service must not burn CPU" };

/// Largest contribution to a collective that ranks do among themselves.
pub const SHM_EXCHANGE_LIMIT: Limit<Bytes> = Limit {
    min: Bytes(0),
    max: Bytes::mib(1),
    reason: "each communicator holds two such contributions a rank; larger ones are faster through the service",
};

/// Largest operation that the proxy engine executes itself.
pub const INLINE_BYTES: Limit<Bytes> = Limit {
    min: Bytes(0),
    max: Bytes::mib(16),
    reason: "the proxy serves all communicators of the device and must not be held by one",
};

/// Unit of work of a transport engine.
pub const PIECE_BYTES: Limit<Bytes> = Limit {
    min: Bytes::kib(4),
    max: Bytes::mib(64),
    reason: "below a page the bookkeeping dominates; one poll's work must stay bounded",
};

/// Size from which stores bypass the cache.
pub const STREAMING_THRESHOLD: Limit<Bytes> = Limit {
    min: Bytes::kib(64),
    max: Bytes::gib(1 << 20),
    reason: "smaller results are read again while they are still cached",
};

/// Channels of a communicator.
pub const CHANNELS: Limit<u32> =
    Limit { min: 1, max: 64, reason: "each channel has its own connections and its share of every chunk" };

/// Sockets of a flow. As the transports have it.
pub const FLOW_CONNECTIONS: Limit<u32> = Limit { min: 1, max: 16, reason: "beyond that a flow only costs" };

/// Code points of differentiated services.
pub const DSCP: Limit<u32> = Limit { min: 0, max: 63, reason: "the field has six bits" };

/// Priority of a socket.
pub const PRIORITY: Limit<u32> = Limit { min: 0, max: 6, reason: "higher ones need a capability" };

/// Longest name of a congestion control: the kernel's own limit, which includes a zero.
pub const CONGESTION_CONTROL_NAME_MAX: usize = 15;

/// Longest name of a device: verbs' own limit, which includes a zero. Those of network interfaces are shorter.
pub const DEVICE_NAME_MAX: usize = 63;

/// Buffer of a socket.
pub const SOCKET_BUFFER: Limit<Bytes> = Limit {
    min: Bytes::kib(4),
    max: Bytes::gib(1),
    reason: "the kernel takes no less, and the host has no more to spare",
};

/// Time after which a path is taken for dead.
pub const PATH_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(0),
    max: DurationText::secs(60),
    reason: "operations wait for so long before their flows go on over another path",
};

/// Time-outs of flows.
pub const FLOW_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(1),
    max: DurationText::secs(24 * 3600),
    reason: "zero would fail every flow, and those who wait for a dead host must be released some day",
};

/// Part of a message on a queue pair. As the transports have it.
pub const RDMA_PART: Limit<Bytes> = Limit {
    min: Bytes::kib(4),
    max: Bytes::gib(1),
    reason: "below a page work requests cost more than bytes, and devices take no longer message",
};

/// Ports of RDMA devices that a transport engine uses: a server has half as many.
pub const RDMA_PORTS_MAX: usize = 16;

/// Unfinished writes of a queue pair.
pub const RDMA_OUTSTANDING: Limit<u32> =
    Limit { min: 1, max: 4_096, reason: "each has places in the device's queues on both hosts" };

/// Places of a completion queue.
pub const RDMA_CQ_ENTRIES: Limit<u32> =
    Limit { min: 64, max: 1 << 22, reason: "a flow needs some tens, and no device has queues of more" };

/// Completions that are taken at a time.
pub const RDMA_CQ_POLL: Limit<u32> =
    Limit { min: 1, max: 1_024, reason: "while they are taken, nothing else of the engine has its turn" };

/// Index of a GID.
pub const GID_INDEX: Limit<u32> = Limit { min: 0, max: 255, reason: "work requests say it in a byte" };

/// Time-out of a queue pair, as a power of two.
pub const RDMA_TIMEOUT: Limit<u32> =
    Limit { min: 1, max: 31, reason: "the field has five bits, and 0 would wait for ever on a lost packet" };

/// Retries of a queue pair.
pub const RDMA_RETRIES: Limit<u32> = Limit { min: 0, max: 7, reason: "the field has three bits" };

/// Service level.
pub const SERVICE_LEVEL: Limit<u32> = Limit { min: 0, max: 15, reason: "the field has four bits" };

/// Traffic class.
pub const TRAFFIC_CLASS: Limit<u32> = Limit { min: 0, max: 255, reason: "the field has eight bits" };

/// Index of a partition key.
pub const PKEY_INDEX: Limit<u32> = Limit { min: 0, max: 65_535, reason: "devices have no larger table" };

/// Hosts of a cluster.
pub const CLUSTER_HOSTS: Limit<u32> =
    Limit { min: 1, max: 1_024, reason: "each pair of hosts has a link, which is a file descriptor on both" };

/// How often a quiet link says that it lives.
pub const KEEP_ALIVE: Limit<DurationText> = Limit {
    min: DurationText::millis(10),
    max: DurationText::secs(600),
    reason: "each wakes the service, and its absence is all that tells of a dead host",
};

/// How long nothing may be heard of a link or a host.
pub const HOST_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(50),
    max: DurationText::secs(24 * 3600),
    reason: "a busy host must have time to answer, and those who wait for a dead one must be released some day",
};

/// From one push of metrics to a collector to the next.
pub const OTLP_INTERVAL: Limit<DurationText> = Limit {
    min: DurationText::secs(1),
    max: DurationText::secs(3600),
    reason: "each push looks at all communicators, and a graph needs points",
};

/// Attributes that the operator adds to what is pushed.
pub const OTLP_ATTRIBUTES: Limit<u32> =
    Limit { min: 0, max: 32, reason: "collectors keep them with each series, or look them up for each" };

/// How long a member of the store may take to answer.
pub const STORE_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(50),
    max: DurationText::secs(10),
    reason: "an answer takes a few round trips between members, and a silent member keeps decisions waiting",
};

/// How long the controller's lease lasts.
pub const STORE_LEASE: Limit<DurationText> = Limit {
    min: DurationText::secs(2),
    max: DurationText::secs(60),
    reason: "etcd grants no shorter ones, and a lost controller is replaced when its lease ends",
};

/// Time that a connection has to prove who it is.
pub const HANDSHAKE_TIMEOUT: Limit<DurationText> = Limit {
    min: DurationText::millis(50),
    max: DurationText::secs(60),
    reason: "a handshake takes a few round trips, and strangers must not hold connections",
};

/// Longest pause between two attempts to reach a host.
pub const RECONNECT_MAX: Limit<DurationText> = Limit {
    min: DurationText::millis(10),
    max: DurationText::secs(60),
    reason: "a host that is back should be found soon, and one that is gone should cost little",
};

/// Jobs of a job file.
pub const JOBS: Limit<u32> = Limit { min: 1, max: 1_024, reason: "one launcher watches all of them" };

/// Hosts of a job file.
pub const HOSTS: Limit<u32> =
    Limit { min: 1, max: 1_024, reason: "the launcher holds a connection and three threads for each" };

/// Devices of a host.
pub const DEVICES: Limit<u32> =
    Limit { min: 1, max: 64, reason: "a host without devices runs nothing, and none has more" };

/// Ranks of a job.
pub const RANKS: Limit<u32> =
    Limit { min: 1, max: 4_096, reason: "the launcher holds a log for each, and its host a process and a thread" };

/// Time-outs and delays of a job file.
pub const RUN_TIME: Limit<DurationText> = Limit {
    min: DurationText::millis(1),
    max: DurationText::secs(30 * 24 * 3600),
    reason: "zero would end a run before it began, and a watchdog must bark some day",
};

/// Rates of links.
pub const LINK_RATE: Limit<Rate> = Limit {
    min: Rate::mbit(1),
    max: Rate::gbit(10_000),
    reason: "slower ones carry no collective, and none is faster",
};

/// Leaves of a topology.
pub const LEAVES: Limit<u32> = Limit { min: 1, max: 4_096, reason: "every leaf has a link to every spine" };

/// Spines of a topology.
pub const SPINES: Limit<u32> = Limit { min: 0, max: 256, reason: "a policy weighs a path a spine for every flow" };

/// Hosts of a topology.
pub const TOPOLOGY_HOSTS: Limit<u32> =
    Limit { min: 1, max: 65_536, reason: "a policy must answer in a second, however large the cluster" };

/// Of a tenant's part of the service's threads.
pub const TENANT_WEIGHT: Limit<u32> = Limit {
    min: 1,
    max: 100,
    reason: "a turn of a tenant of weight 100 is most of a millisecond, for which all others wait",
};

/// Weights of tenants.
pub const WEIGHT: Limit<u32> = Limit { min: 1, max: 1_000, reason: "less than a thousandth of a link is no share" };

/// Guaranteed shares of tenants.
pub const SHARE_PERCENT: Limit<u32> =
    Limit { min: 1, max: 100, reason: "a share is a part of every link that is contended" };

/// Rates that tenants are held to.
pub const CAP: Limit<Rate> =
    Limit { min: Rate::mbit(1), max: Rate::gbit(10_000), reason: "a lower cap would stop the tenant" };

/// Tenants of a policy that have rules.
pub const TENANT_RULES: Limit<usize> = Limit { min: 0, max: 1_024, reason: "no service has more tenants" };

/// Reservations of a policy.
pub const RESERVES: Limit<usize> = Limit { min: 0, max: 1_024, reason: "no service has more tenants" };

/// Paths of a reservation.
pub const RESERVED_PATHS: Limit<usize> = Limit { min: 1, max: 256, reason: "no topology has more spines" };

/// Windows of a policy.
pub const WINDOWS: Limit<usize> =
    Limit { min: 0, max: 100, reason: "none is shorter than a hundredth of its period, and no two overlap" };

/// Periods of windows.
pub const WINDOW_PERIOD: Limit<DurationText> = Limit {
    min: DurationText::millis(1),
    max: DurationText::secs(600),
    reason: "hosts' clocks agree to some tens of microseconds, and a tenant waits for up to a period",
};

/// Longest name of a service, tenant or job.
pub const NAME_BYTES_MAX: usize = 64;

/// Longest path of a Unix socket: `sun_path` has 108 bytes, the last one zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
