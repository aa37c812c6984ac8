//! Units of values in configuration files: [`Bytes`] ("4MiB"), [`DurationText`] ("50ms") and
//! [`Rate`] ("10Gbit/s").
//!
//! All are whole numbers with one unit, print in the largest unit that is exact, and read back what they print.
//! Deliberately absent: fractions ("1.5GiB") and decimal byte units ("4MB"), which people read in two ways.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Largest first, so that printing takes the first that divides.
const BYTE_UNITS: [(&str, u64); 5] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// In nanoseconds, largest first.
const TIME_UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// In bits per second, largest first. Decimal, as links are sold.
const RATE_UNITS: [(&str, u64); 5] =
    [("Tbit/s", 1_000_000_000_000), ("Gbit/s", 1_000_000_000), ("Mbit/s", 1_000_000), ("kbit/s", 1_000), ("bit/s", 1)];

/// Why a text is no [`Bytes`], [`DurationText`] or [`Rate`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// There are no digits where the number should be.
    #[error("{text:?} does not start with a whole number; write for example {example:?}")]
    NoNumber {
        /// What was written.
        text: String,
        /// A value of this kind.
        example: &'static str,
    },
    /// A fraction.
    #[error("{text:?} is no whole number: write it in a smaller unit, for example {example:?}")]
    Fraction {
        /// What was written.
        text: String,
        /// A value of this kind.
        example: &'static str,
    },
    /// A number alone.
    #[error("{text:?} has no unit; write {suggestion:?}")]
    NoUnit {
        /// What was written.
        text: String,
        /// The same number with a unit of this kind.
        suggestion: String,
    },
    /// The unit is none of ours.
    #[error("unknown unit {unit:?} in {text:?}; units are {known}; write for example {example:?}")]
    UnknownUnit {
        /// What was written.
        text: String,
        /// Its unit.
        unit: String,
        /// The units there are.
        known: String,
        /// A value of this kind.
        example: &'static str,
    },
    /// The number does not fit 64 bits in the smallest unit.
    #[error("{text:?} is too large")]
    TooLarge {
        /// What was written.
        text: String,
    },
}

fn parse(text: &str, units: &[(&str, u64)], bare: Option<u64>, example: &'static str) -> Result<u64, UnitError> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim_start();
    if number.is_empty() {
        return Err(UnitError::NoNumber { text: text.to_owned(), example });
    }
    if unit.starts_with(['.', ',']) {
        return Err(UnitError::Fraction { text: text.to_owned(), example });
    }
    if unit.is_empty() && bare.is_none() {
        let usual = example.trim_start_matches(|c: char| c.is_ascii_digit());
        return Err(UnitError::NoUnit { text: text.to_owned(), suggestion: format!("{number}{usual}") });
    }
    let scale = if unit.is_empty() { bare } else { units.iter().find(|u| u.0 == unit).map(|u| u.1) };
    let scale = scale.ok_or_else(|| UnitError::UnknownUnit {
        text: text.to_owned(),
        unit: unit.to_owned(),
        known: units.iter().map(|u| u.0).collect::<Vec<_>>().join(", "),
        example,
    })?;
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(scale))
        .ok_or_else(|| UnitError::TooLarge { text: text.to_owned() })
}

fn print(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let exact = units.iter().find(|unit| value != 0 && value.is_multiple_of(unit.1));
    match exact {
        Some((name, scale)) => f.pad(&format!("{}{name}", value / scale)),
        None => f.pad("0"),
    }
}

/// A number of bytes, written "512", "64KiB", "4MiB", "2GiB", "1TiB".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Bytes(n << 10)
    }

    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Bytes(n << 20)
    }

    /// `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Bytes(n << 30)
    }
}

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text, &BYTE_UNITS, Some(1), "4MiB").map(Bytes)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, &BYTE_UNITS)
    }
}

/// A span of time, written "100us", "50ms", "2s", "10m", "1h"; "0" needs no unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DurationText(pub Duration);

impl DurationText {
    /// `n` microseconds.
    #[must_use]
    pub const fn micros(n: u64) -> Self {
        DurationText(Duration::from_micros(n))
    }

    /// `n` milliseconds.
    #[must_use]
    pub const fn millis(n: u64) -> Self {
        DurationText(Duration::from_millis(n))
    }

    /// `n` seconds.
    #[must_use]
    pub const fn secs(n: u64) -> Self {
        DurationText(Duration::from_secs(n))
    }
}

impl FromStr for DurationText {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bare = (text.trim() == "0").then_some(1);
        parse(text, &TIME_UNITS, bare, "50ms").map(|ns| DurationText(Duration::from_nanos(ns)))
    }
}

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What was parsed fits; a larger duration made by a program prints as the largest that reads back.
        print(f, u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX), &TIME_UNITS)
    }
}

/// Bits per second, written "500Mbit/s", "1Gbit/s"; "0" needs no unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rate(pub u64);

impl Rate {
    /// `n` Mbit/s.
    #[must_use]
    pub const fn mbit(n: u64) -> Self {
        Rate(n * 1_000_000)
    }

    /// `n` Gbit/s.
    #[must_use]
    pub const fn gbit(n: u64) -> Self {
        Rate(n * 1_000_000_000)
    }
}

impl FromStr for Rate {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bare = (text.trim() == "0").then_some(1);
        parse(text, &RATE_UNITS, bare, "10Gbit/s").map(Rate)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, &RATE_UNITS)
    }
}

struct TextVisitor<T> {
    expecting: &'static str,
    value: std::marker::PhantomData<T>,
}

impl<T: FromStr<Err = UnitError>> de::Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! serde_as_text {
    ($name:ident, $expecting:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(TextVisitor { expecting: $expecting, value: std::marker::PhantomData })
            }
        }
    };
}

serde_as_text!(Bytes, "bytes with their unit as a string, such as \"4MiB\"");
serde_as_text!(DurationText, "a time with its unit as a string, such as \"50ms\"");
serde_as_text!(Rate, "bits per second with their unit as a string, such as \"10Gbit/s\"");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_and_print() {
        for (text, bytes, printed) in [
            ("512", 512, "512B"),
            ("0", 0, "0"),
            ("1024", 1024, "1KiB"),
            ("64KiB", 65536, "64KiB"),
            (" 4 MiB ", 4 << 20, "4MiB"),
            ("1536MiB", 1536 << 20, "1536MiB"),
            ("3TiB", 3 << 40, "3TiB"),
        ] {
            let value: Bytes = text.parse().unwrap();
            assert_eq!((value.0, value.to_string().as_str()), (bytes, printed));
            assert_eq!(value.to_string().parse(), Ok(value));
        }
    }

    #[test]
    fn durations_read_and_print() {
        for (text, ns, printed) in [
            ("0", 0, "0"),
            ("100us", 100_000, "100us"),
            ("50ms", 50_000_000, "50ms"),
            ("2000ms", 2_000_000_000, "2s"),
            ("90s", 90_000_000_000, "90s"),
            ("120s", 120_000_000_000, "2m"),
            ("1h", 3_600_000_000_000, "1h"),
            ("7ns", 7, "7ns"),
        ] {
            let value: DurationText = text.parse().unwrap();
            assert_eq!((value.0.as_nanos(), value.to_string().as_str()), (ns, printed));
            assert_eq!(value.to_string().parse(), Ok(value));
        }
    }

    #[test]
    fn rates_read_and_print() {
        for (text, bits, printed) in [
            ("1Gbit/s", 1_000_000_000, "1Gbit/s"),
            ("500Mbit/s", 500_000_000, "500Mbit/s"),
            ("2500 Mbit/s", 2_500_000_000, "2500Mbit/s"),
            ("0", 0, "0"),
            ("64kbit/s", 64_000, "64kbit/s"),
        ] {
            let value: Rate = text.parse().unwrap();
            assert_eq!((value.0, value.to_string().as_str()), (bits, printed));
            assert_eq!(value.to_string().parse(), Ok(value));
        }
        assert_eq!((Rate::gbit(1), Rate::mbit(500)), ("1Gbit/s".parse().unwrap(), "500Mbit/s".parse().unwrap()));
        assert!(matches!("1GB/s".parse::<Rate>(), Err(UnitError::UnknownUnit { .. })));
        let error = "25".parse::<Rate>().unwrap_err().to_string();
        assert_eq!(error, "\"25\" has no unit; write \"25Gbit/s\"");
        assert!(matches!("2.5Gbit/s".parse::<Rate>(), Err(UnitError::Fraction { .. })));
    }

    #[test]
    fn every_magnitude_round_trips() {
        for shift in 0..64 {
            for value in [1_u64 << shift, (1_u64 << shift) - 1, (1_u64 << shift) | 1] {
                assert_eq!(Bytes(value).to_string().parse(), Ok(Bytes(value)));
                let time = DurationText(Duration::from_nanos(value));
                assert_eq!(time.to_string().parse(), Ok(time));
                assert_eq!(Rate(value).to_string().parse(), Ok(Rate(value)));
            }
        }
    }

    #[test]
    fn wrong_texts_say_what_would_be_right() {
        let error = "4MB".parse::<Bytes>().unwrap_err().to_string();
        assert!(error.contains("\"MB\"") && error.contains("\"4MiB\""), "{error}");
        assert!(matches!("MiB".parse::<Bytes>(), Err(UnitError::NoNumber { .. })));
        assert!(matches!("-1".parse::<Bytes>(), Err(UnitError::NoNumber { .. })));
        assert!(matches!("1.5GiB".parse::<Bytes>(), Err(UnitError::Fraction { .. })));
        assert!(matches!("99999999TiB".parse::<Bytes>(), Err(UnitError::TooLarge { .. })));
        let error = "50".parse::<DurationText>().unwrap_err().to_string();
        assert_eq!(error, "\"50\" has no unit; write \"50ms\"");
        assert!(matches!("".parse::<DurationText>(), Err(UnitError::NoNumber { .. })));
    }
}
