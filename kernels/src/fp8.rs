//! The 8-bit floating types E4M3 (no infinities) and E5M2 of the OCP OFP8 specification.

/// Shape of an 8-bit float.
struct Format {
    mantissa_bits: u32,
    bias: i32,
    /// Largest finite value's code.
    max_code: u8,
    nan_code: u8,
}

const E4M3: Format = Format { mantissa_bits: 3, bias: 7, max_code: 0x7e, nan_code: 0x7f };
const E5M2: Format = Format { mantissa_bits: 2, bias: 15, max_code: 0x7b, nan_code: 0x7f };

const fn decode(code: u8, format: &Format) -> f32 {
    let magnitude = code & 0x7f;
    let infinite = format.max_code == 0x7b && magnitude == 0x7c;
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    if infinite {
        return sign * f32::INFINITY;
    }
    if magnitude > format.max_code {
        return f32::NAN;
    }
    let mantissa = (magnitude & ((1 << format.mantissa_bits) - 1)) as u32;
    let exponent = (magnitude >> format.mantissa_bits) as i32;
    // Subnormals have the exponent of the smallest normal, and no hidden bit.
    let (exponent, significand) =
        if exponent == 0 { (1, mantissa) } else { (exponent, mantissa | 1 << format.mantissa_bits) };
    let power = exponent - format.bias - format.mantissa_bits as i32;
    let scale = f32::from_bits(((power + 127) as u32) << 23);
    sign * significand as f32 * scale
}

fn encode(value: f32, format: &Format) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    if value.is_nan() {
        return sign | format.nan_code;
    }
    let magnitude = value.abs();
    let min_exponent = 1 - format.bias;
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(min_exponent);
    // In units of the last place of that exponent; the value has at most 24 significant bits, so this is exact.
    let unit = f64::from(exponent - format.mantissa_bits as i32).exp2();
    let units = (f64::from(magnitude) / unit).round_ties_even();
    let code = if units >= f64::from(1u32 << (format.mantissa_bits + 8)) {
        f64::INFINITY
    } else {
        // A carry out of the mantissa moves into the exponent by itself.
        f64::from((exponent - min_exponent) << format.mantissa_bits) + units
    };
    sign | if code > f64::from(format.max_code) { format.max_code } else { code as u8 }
}

const fn table(format: &Format) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = decode(code as u8, format);
        code += 1;
    }
    values
}

static E4M3_VALUES: [f32; 256] = table(&E4M3);
static E5M2_VALUES: [f32; 256] = table(&E5M2);

/// The value of an E4M3 code.
#[must_use]
pub fn e4m3_to_f32(code: u8) -> f32 {
    E4M3_VALUES[code as usize]
}

/// The value of an E5M2 code.
#[must_use]
pub fn e5m2_to_f32(code: u8) -> f32 {
    E5M2_VALUES[code as usize]
}

/// The E4M3 code nearest to a value, ties to even, saturating.
#[must_use]
pub fn f32_to_e4m3(value: f32) -> u8 {
    encode(value, &E4M3)
}

/// The E5M2 code nearest to a value, ties to even, saturating (infinities too).
#[must_use]
pub fn f32_to_e5m2(value: f32) -> u8 {
    encode(value, &E5M2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes() {
        for (code, value) in [(0x38, 1.0), (0x7e, 448.0), (0x01, 0.001_953_125), (0xb8, -1.0), (0x08, 0.015_625)] {
            assert_eq!(e4m3_to_f32(code), value, "{code:#x}");
        }
        for (code, value) in [(0x3c, 1.0), (0x7b, 57344.0), (0x01, 1.525_878_9e-5), (0x7c, f32::INFINITY)] {
            assert_eq!(e5m2_to_f32(code), value, "{code:#x}");
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e5m2_to_f32(0x7d).is_nan());
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            assert!(value.is_nan() || f32_to_e4m3(value) == code, "{code:#x}");
            let value = e5m2_to_f32(code);
            assert!(!value.is_finite() || f32_to_e5m2(value) == code, "{code:#x}");
        }
    }

    #[test]
    fn values_between_codes_go_to_the_nearest_and_ties_to_even() {
        for (to_f32, from_f32, max) in
            [(e4m3_to_f32 as fn(u8) -> f32, f32_to_e4m3 as fn(f32) -> u8, 0x7e_u8), (e5m2_to_f32, f32_to_e5m2, 0x7b)]
        {
            for code in 0..max {
                let (low, high) = (to_f32(code), to_f32(code + 1));
                let middle = (low + high) / 2.0;
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(from_f32(middle), even, "{low} {high}");
                assert_eq!(from_f32(f32::from_bits(middle.to_bits() - 1)), code);
                assert_eq!(from_f32(f32::from_bits(middle.to_bits() + 1)), code + 1);
                assert_eq!(from_f32(-middle), 0x80 | even);
            }
            assert_eq!(from_f32(1e30), max);
            assert_eq!(from_f32(f32::NEG_INFINITY), 0x80 | max);
            assert!(to_f32(from_f32(f32::NAN)).is_nan());
        }
    }
}
