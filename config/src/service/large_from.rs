//! `large_from` of `[cuda]`: the size from which copy engines carry out each collective
//! (crossover).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::units::Bytes;

/// Collectives that copy engines can carry out.
const COLLECTIVES: [&str; 7] =
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter"];

/// Payload from which a collective goes by copy engines: `"4MiB"`, `"0"` for never, or `"measured"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Crossover {
    /// What measured best, for this collective and number of ranks.
    #[default]
    Measured,
    /// So many bytes.
    Pinned(Bytes),
    /// It never does.
    Never,
}

/// The same of all collectives: `"4MiB"` for all of them, or `"measured, all_reduce=256MiB, broadcast=0"`. Those that are not named have what stands
/// alone, `measured` if nothing does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LargeFrom {
    others: Crossover,
    /// As [`COLLECTIVES`].
    named: [Option<Crossover>; COLLECTIVES.len()],
}

impl LargeFrom {
    /// What holds for a collective, by its name. Those that copy engines cannot carry out never go by them.
    #[must_use]
    pub fn of(&self, collective: &str) -> Crossover {
        let place = COLLECTIVES.iter().position(|name| *name == collective);
        place.map_or(Crossover::Never, |place| self.named[place].unwrap_or(self.others))
    }

    /// The same where what measured best does not hold: only what is pinned goes by copy engines.
    #[must_use]
    pub fn only_pinned(self) -> Self {
        let pinned = |crossover| if crossover == Crossover::Measured { Crossover::Never } else { crossover };
        LargeFrom { others: pinned(self.others), named: self.named.map(|named| named.map(pinned)) }
    }

    /// Whether no collective ever goes by copy engines.
    #[must_use]
    pub fn is_never(&self) -> bool {
        COLLECTIVES.iter().all(|collective| self.of(collective) == Crossover::Never)
    }
}

/// Of all collectives alike.
impl From<Crossover> for LargeFrom {
    fn from(crossover: Crossover) -> Self {
        LargeFrom { others: crossover, named: [None; COLLECTIVES.len()] }
    }
}

impl FromStr for Crossover {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "measured" => Ok(Crossover::Measured),
            text => match text.parse() {
                Ok(Bytes(0)) => Ok(Crossover::Never),
                Ok(bytes) => Ok(Crossover::Pinned(bytes)),
                Err(error) => Err(format!("{error}; \"0\" is never, and \"measured\" what measured best")),
            },
        }
    }
}

impl fmt::Display for Crossover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Crossover::Measured => f.pad("measured"),
            Crossover::Pinned(bytes) => bytes.fmt(f),
            Crossover::Never => f.pad("0"),
        }
    }
}

impl FromStr for LargeFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut others, mut named) = (None, [None; COLLECTIVES.len()]);
        for part in text.split(',') {
            let (what, slot, value) = match part.split_once('=') {
                None => ("what stands alone", &mut others, part),
                Some((name, value)) => {
                    let place = COLLECTIVES.iter().position(|collective| *collective == name.trim());
                    let unknown = || format!("{:?} is none of {}", name.trim(), COLLECTIVES.join(", "));
                    let place = place.ok_or_else(unknown)?;
                    (COLLECTIVES[place], &mut named[place], value)
                }
            };
            if slot.replace(value.parse()?).is_some() {
                return Err(format!("{what} is there twice"));
            }
        }
        Ok(LargeFrom { others: others.unwrap_or_default(), named })
    }
}

impl fmt::Display for LargeFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.others.fmt(f)?;
        let named = COLLECTIVES.iter().zip(self.named);
        named
            .filter_map(|(name, value)| Some((name, value?)))
            .try_for_each(|(name, value)| write!(f, ", {name}={value}"))
    }
}

impl Serialize for LargeFrom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LargeFrom {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_for_all_is_read_and_printed() {
        for (text, from, printed) in [
            ("measured", Crossover::Measured, "measured"),
            ("0", Crossover::Never, "0"),
            ("0MiB", Crossover::Never, "0"),
            (" 4096KiB ", Crossover::Pinned(Bytes::mib(4)), "4MiB"),
        ] {
            let all = LargeFrom::from(from);
            assert_eq!((text.parse(), all.to_string().as_str()), (Ok(all), printed));
            assert_eq!((printed.parse(), all.of("scatter")), (Ok(all), from));
            assert_eq!((all.of("reduce"), all.is_never()), (Crossover::Never, from == Crossover::Never));
        }
        for wrong in ["", "never", "4MB", "-1", "Measured", "99999999TiB", "4MiB,", "all_reduce=often"] {
            let error = wrong.parse::<LargeFrom>().expect_err(wrong);
            assert!(error.contains("\"measured\""), "{error}");
        }
    }

    #[test]
    fn collectives_have_their_own() {
        let from: LargeFrom = "broadcast = 0,all_reduce=256MiB, 4MiB".parse().expect("well-formed");
        let [four, most] = [4, 256].map(|mib| Crossover::Pinned(Bytes::mib(mib)));
        let of = ["all_reduce", "broadcast", "all_gather", "reduce"].map(|name| from.of(name));
        assert_eq!(of, [most, Crossover::Never, four, Crossover::Never]);
        assert_eq!(from.to_string(), "4MiB, all_reduce=256MiB, broadcast=0");
        assert_eq!(from.to_string().parse(), Ok(from));
        let from: LargeFrom = "all_gather=0".parse().expect("well-formed");
        assert_eq!((from.of("all_gather"), from.of("all_reduce")), (Crossover::Never, Crossover::Measured));
        assert!(!from.is_never() && !"0, scatter=1GiB".parse::<LargeFrom>().expect("well-formed").is_never());
        let pinned = "broadcast=4MiB, scatter=measured".parse::<LargeFrom>().expect("well-formed").only_pinned();
        assert_eq!(pinned.to_string(), "0, broadcast=4MiB, scatter=0");
        for (wrong, why) in [
            ("reduce=1MiB", "\"reduce\" is none of all_reduce, "),
            ("allreduce=1MiB", "none of"),
            ("4MiB, measured", "alone is there twice"),
            ("scatter=0, scatter=0", "scatter is there twice"),
        ] {
            let error = wrong.parse::<LargeFrom>().expect_err(wrong);
            assert!(error.contains(why), "{error}");
        }
    }
}
