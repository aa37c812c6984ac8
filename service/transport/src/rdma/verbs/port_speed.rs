//! Port speeds (Gbit/s), from what the library, the link and the kernel say.

/// Speed of a port: as the library says it, where it can; else from its link's width and lanes; else as the kernel says it. An XDR lane has no
/// code in the width of the second.
pub(super) fn gbit_per_s(effective: Option<u64>, width: u8, speed: u8, rate: impl FnOnce() -> Option<String>) -> u32 {
    let effective =
        effective.map(|hundreds_of_mbit_per_s| (hundreds_of_mbit_per_s / 10) as u32).filter(|speed| *speed > 0);
    let of_lanes = || Some(lanes_gbit_per_s(width, speed)).filter(|speed| *speed > 0);
    effective.or_else(of_lanes).or_else(|| rate().as_deref().and_then(kernel_rate)).unwrap_or_default()
}

/// Speed as the kernel writes it, such as `800 Gb/sec (4X XDR)` or `2.5 Gb/sec (1X SDR)`.
fn kernel_rate(text: &str) -> Option<u32> {
    let whole = text.split_once(" Gb/sec")?.0.split('.').next()?;
    whole.trim().parse().ok()
}

fn lanes_gbit_per_s(width: u8, speed: u8) -> u32 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let lane_mbit_per_s = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    lanes * lane_mbit_per_s / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_links() {
        let lanes = [(1, 1), (2, 4), (16, 2), (4, 8), (8, 12)];
        let speeds = [(1, 2.5), (2, 5.0), (4, 10.0), (8, 10.0), (16, 14.0), (32, 25.0), (64, 50.0), (128, 100.0)];
        for (width, count) in lanes {
            for (speed, lane) in speeds {
                let expected = (f64::from(count) * lane) as u32;
                assert_eq!(gbit_per_s(None, width, speed, || None), expected, "{count} lanes of {lane}");
            }
        }
        assert_eq!(gbit_per_s(None, 0, 0, || None), 0);
    }

    #[test]
    fn rates_without_a_code_are_asked_for_otherwise() {
        // Four XDR lanes: 256 has no place in a byte.
        let xdr = || Some("800 Gb/sec (4X XDR)\n".to_owned());
        assert_eq!(gbit_per_s(None, 2, 0, xdr), 800);
        assert_eq!(gbit_per_s(Some(8000), 2, 0, || None), 800);
        // Ports of a group together, whatever one link of them says; a library that does not know counts for nothing.
        assert_eq!(gbit_per_s(Some(6000), 2, 64, xdr), 600);
        assert_eq!(gbit_per_s(Some(0), 2, 128, xdr), 400);
        for (text, rate) in
            [("2.5 Gb/sec (1X SDR)", Some(2)), ("1600 Gb/sec (8X XDR)", Some(1600)), ("?", None), ("", None)]
        {
            assert_eq!(kernel_rate(text), rate, "{text}");
        }
    }
}
