//! Machine models of the rails simulator: measured or published times, each with its source.

use mccs_ipc::types::CollectiveKind;
use mccs_telemetry::bandwidth::Traffic;

use super::SimulationError;

/// Hosts that are alike, as far as a collective's time depends on them.
#[derive(Debug, Clone)]
pub struct Machine {
    /// GPUs of a host. Each has a NIC.
    pub gpus: u32,
    /// Collectives of a host's GPUs.
    pub team: TeamTimes,
    /// Bytes that a GPU sends over NVLink in a nanosecond, and receives at the same time, whatever kernels run.
    pub nvlink_bytes_per_ns: f64,
    /// Bytes that a kernel which combines reads and writes in a nanosecond.
    pub combine_bytes_per_ns: f64,
    /// Time of a kernel in the stream besides its bytes.
    pub kernel_ns: f64,
    /// Time of a word that a stream writes or waits for.
    pub word_ns: f64,
    /// Time that a wait for another stream's event takes a stream.
    pub event_ns: f64,
    /// How many times as long collectives of a host take with the few blocks that they have beside others.
    pub few_blocks_times: f64,
    /// Times of moving data between hosts.
    pub rail: RailTimes,
}

/// One rail, at one host.
#[derive(Debug, Clone)]
pub struct RailTimes {
    /// From the stream's word until the service sends the first message.
    pub begin_ns: f64,
    /// From the last message until the stream goes on.
    pub end_ns: f64,
    /// Bytes of payload that a NIC sends in a nanosecond, and receives at the same time.
    pub link_bytes_per_ns: f64,
    /// How long a message is on its way.
    pub latency_ns: f64,
    /// Channels of a rail.
    pub channels: u32,
    /// Longest message.
    pub message_bytes: u64,
    /// Time of a message for the thread that sends it.
    pub message_ns: f64,
    /// From which length on a message waits until its receiver has told where it goes; `None`: never.
    pub credits_from_bytes: Option<u64>,
    /// Copy engines bring data to slots of host memory and back; `None`: NICs reach memory of the GPU.
    pub copies: Option<CopyTimes>,
}

/// A copy engine between a GPU and its host.
#[derive(Debug, Clone, Copy)]
pub struct CopyTimes {
    /// A rail's part of a call from which they do; kernels read and write shorter ones in host memory.
    pub from_bytes: u64,
    /// Bytes in a nanosecond, each way.
    pub bytes_per_ns: f64,
    /// Time of a copy besides its bytes.
    pub copy_ns: f64,
}

/// How long collectives of one host take by payload, as a table of results has it.
#[derive(Debug, Clone)]
pub struct TeamTimes {
    nranks: u32,
    /// By collective: payload in bytes, and nanoseconds in a stream of calls.
    curves: Vec<(CollectiveKind, Vec<(f64, f64)>)>,
}

impl TeamTimes {
    /// Reads a table that `eval/cuda.py` has made (`eval/results/cuda-8.json`).
    ///
    /// # Errors
    /// It is none.
    pub fn from_results(json: &str) -> Result<Self, SimulationError> {
        let wrong = |what: &str| SimulationError::Results(what.to_owned());
        let data: serde_json::Value = serde_json::from_str(json).map_err(|error| wrong(&error.to_string()))?;
        let nranks = data["nranks"].as_u64().and_then(|nranks| u32::try_from(nranks).ok()).ok_or(wrong("no nranks"))?;
        let mut curves: Vec<(CollectiveKind, Vec<(f64, f64)>)> = Vec::new();
        for line in data["lines"].as_array().ok_or(wrong("no lines"))? {
            let (side, operation) = (line["side"].as_str(), line["operation"].as_str());
            let kind = CollectiveKind::ALL.iter().copied().find(|kind| Some(kind.name()) == operation);
            let (Some("mccs"), Some(kind)) = (side, kind) else { continue };
            let mut rounds: Vec<f64> =
                line["stream_us"].as_array().into_iter().flatten().filter_map(|us| us.as_f64()).collect();
            rounds.sort_unstable_by(f64::total_cmp);
            let (Some(bytes), Some(us)) = (line["bytes"].as_f64(), rounds.get(rounds.len() / 2)) else {
                return Err(wrong("a line without bytes or stream_us"));
            };
            let at = curves.iter().position(|(of, _)| *of == kind).unwrap_or(curves.len());
            if at == curves.len() {
                curves.push((kind, Vec::new()));
            }
            curves[at].1.push((bytes, us * 1e3));
        }
        for (_, curve) in &mut curves {
            curve.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        }
        if nranks < 2 || curves.is_empty() || curves.iter().any(|(_, curve)| curve.len() < 2) {
            return Err(wrong("fewer than two ranks, or than two sizes of a collective"));
        }
        Ok(TeamTimes { nranks, curves })
    }

    /// A collective of a payload: between sizes in proportion, beyond the largest as between the last two.
    pub(super) fn ns(&self, kind: CollectiveKind, bytes: f64) -> Result<f64, SimulationError> {
        let (_, curve) = self.curves.iter().find(|(of, _)| *of == kind).ok_or(SimulationError::NoTimes(kind))?;
        let above = curve.partition_point(|(size, _)| *size < bytes).clamp(1, curve.len() - 1);
        let ((from, from_ns), (to, to_ns)) = (curve[above - 1], curve[above]);
        // Less than the smallest takes as long as that.
        Ok(from_ns + (bytes - from).max(0.0) * (to_ns - from_ns) / (to - from))
    }

    /// Bytes that each GPU sends over NVLink for a payload, and receives.
    pub(super) fn link_bytes(&self, kind: CollectiveKind, bytes: u64) -> f64 {
        Traffic::new(kind, bytes / kind.payload_count(1, self.nranks), u64::from(self.nranks)).bus_bytes as f64
    }
}

/// `eval/results/cuda-8.json`: eight H200s. An H100 has the same links.
const EIGHT_GPUS: &str = include_str!("../../results/cuda-8.json");
/// `eval/results/cuda-2.json`: two H200s.
const TWO_GPUS: &str = include_str!("../../results/cuda-2.json");

impl Machine {
    /// Eight H100s a host, each with a NIC of 400 Gbit/s that reaches its memory.
    ///
    /// # Errors
    /// The table of results is none.
    pub fn h100_400g() -> Result<Self, SimulationError> {
        Ok(Machine {
            gpus: 8,
            team: TeamTimes::from_results(EIGHT_GPUS)?,
            // Kernels that copy between two GPUs: 349 to 370 GB/s writing, 372 to 375 reading.
            nvlink_bytes_per_ns: 372.0,
            // 32 of 132 multiprocessors, which read and write 4.24 TB/s together.
            combine_bytes_per_ns: 4_240.0 * 32.0 / 132.0,
            // `cuda-costs`: a launch with 320 bytes and 16 blocks.
            kernel_ns: 3_100.0,
            // `cuda-costs`.
            word_ns: 770.0,
            // As a word that is there and waited for (`cuda-costs`).
            event_ns: 1_810.0,
            // Reduce-scatters of 64 MiB on two H200s take 1.09 times as long with 48 blocks as with 96, and 1.44 times with 32 (decision 053).
            few_blocks_times: 1.17,
            rail: RailTimes {
                // `nics-gpudirect`: an all-gather of 32 KiB takes 38.7 us, of which the team takes 5 and the NIC 5 to 8.
                begin_ns: 12_500.0,
                end_ns: 12_500.0,
                // 50 bytes, less RoCEv2's headers, which take 82 for each 4096.
                link_bytes_per_ns: 50.0 * 4096.0 / (4096.0 + 82.0),
                // Half of a round trip over three tiers (`docs/internals/rdma.md`).
                latency_ns: 11_000.0,
                // One for a NIC, and what that carries in 21.5 us (decision 102).
                channels: 1,
                message_bytes: 1 << 20,
                // Three verbs of 200 ns (`mccs_collective::RdmaHost`).
                message_ns: 600.0,
                // Longer than what fits an inbox.
                credits_from_bytes: Some(4 << 10),
                copies: None,
            },
        })
    }

    /// Two GPUs a host, and a service that sends over TCP on the loopback interface: the machine of `nics-sockets`. Its rail is fitted to
    /// all-gathers of 32 KiB and 16 MiB there.
    ///
    /// # Errors
    /// The table of results is none.
    pub fn two_gpus_over_tcp() -> Result<Self, SimulationError> {
        let h100 = Machine::h100_400g()?;
        let rail = RailTimes {
            begin_ns: 10_000.0,
            end_ns: 10_000.0,
            link_bytes_per_ns: 5.2,
            latency_ns: 10_000.0,
            channels: 2,
            message_bytes: 256 << 10,
            message_ns: 3_000.0,
            credits_from_bytes: None,
            // PCIe 5.0 x16, as copy engines use it; a copy costs 3 us besides.
            copies: Some(CopyTimes { from_bytes: 256 << 10, bytes_per_ns: 50.0, copy_ns: 3_000.0 }),
        };
        Ok(Machine { gpus: 2, team: TeamTimes::from_results(TWO_GPUS)?, rail, ..h100 })
    }
}
