//! Estimated time of GPU collectives (`ncclGroupSimulateEnd`), from what was measured on idle GPUs.
//! It goes by the bytes that an ideal ring moves over each link (`eval/results/cuda-4.md`).
//! Collectives of two and four ranks lie within a sixth of it; a busy GPU or another generation of
//! them does not.

use mccs_ipc::types::CollectiveKind;

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;

/// Bytes over a link, and microseconds: all-reduces of four H200s.
const MEASURED: [(f64, f64); 14] = [
    (0.0, 5.7),
    (96.0 * KIB, 6.4),
    (192.0 * KIB, 7.1),
    (384.0 * KIB, 8.7),
    (768.0 * KIB, 9.7),
    (1.5 * MIB, 12.1),
    (3.0 * MIB, 17.6),
    (6.0 * MIB, 35.5),
    (12.0 * MIB, 53.9),
    (24.0 * MIB, 94.3),
    (48.0 * MIB, 172.5),
    (96.0 * MIB, 318.1),
    (192.0 * MIB, 610.4),
    (768.0 * MIB, 2211.8),
];

/// Microseconds of a collective with so many bytes of payload, as nccl-tests counts them. A single rank copies within its GPU, which is not
/// counted.
pub(super) fn collective_us(kind: CollectiveKind, payload_bytes: u64, nranks: u32) -> f64 {
    if nranks < 2 || (payload_bytes == 0 && kind != CollectiveKind::Barrier) {
        return 0.0;
    }
    let ranks = f64::from(nranks);
    let factor = match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        CollectiveKind::Reduce | CollectiveKind::Broadcast | CollectiveKind::Barrier => 1.0,
        CollectiveKind::AllGather
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllToAll
        | CollectiveKind::Gather
        | CollectiveKind::Scatter => (ranks - 1.0) / ranks,
    };
    over_link_us(payload_bytes as f64 * factor)
}

/// Microseconds of so many bytes over a link: between two measurements along the line that joins them, and beyond all along the last one.
pub(super) fn over_link_us(bytes: f64) -> f64 {
    let last = MEASURED.len() - 1;
    let after = MEASURED.iter().position(|(at, _)| *at > bytes).unwrap_or(last).clamp(1, last);
    let ((from, from_us), (to, to_us)) = (MEASURED[after - 1], MEASURED[after]);
    from_us + (bytes - from) / (to - from) * (to_us - from_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_times_come_back_and_others_lie_between() {
        let close = |got: f64, wanted: f64, part: f64| assert!((got - wanted).abs() <= wanted * part, "{got} {wanted}");
        close(collective_us(CollectiveKind::AllReduce, 64 << 10, 4), 6.4, 0.001);
        close(collective_us(CollectiveKind::AllReduce, 1 << 20, 4), 12.1, 0.001);
        // Figures of eval/results/cuda-4.md and cuda-2.md.
        close(collective_us(CollectiveKind::AllGather, 256 << 20, 4), 561.3, 0.17);
        close(collective_us(CollectiveKind::ReduceScatter, 16 << 20, 4), 55.8, 0.17);
        close(collective_us(CollectiveKind::AllReduce, 256 << 20, 2), 729.4, 0.17);
        let gibibytes = collective_us(CollectiveKind::AllReduce, 4 << 30, 4);
        close(gibibytes, 8.0 * 2211.8, 0.1);
        assert_eq!(collective_us(CollectiveKind::AllReduce, 1 << 20, 1), 0.0);
        assert!((0..30).map(|power| over_link_us(f64::from(1 << power))).is_sorted());
    }
}
