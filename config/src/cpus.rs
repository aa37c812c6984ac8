//! CPU sets, as the kernel writes them ("0-3,8"): which CPUs a thread may be bound to (affinity).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// CPUs that a set can name: as many as Linux can be built for.
pub const CPUS_MAX: u32 = 8192;

/// CPUs by number, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuSet(Vec<u32>);

impl CpuSet {
    /// The numbers.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of `other` as well.
    #[must_use]
    pub fn common(&self, other: &CpuSet) -> CpuSet {
        self.iter().filter(|cpu| other.0.binary_search(cpu).is_ok()).collect()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        CpuSet(cpus)
    }
}

impl FromStr for CpuSet {
    type Err = String;

    /// An empty text is a node without CPUs.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let cpu = text.trim().parse::<u32>().ok().filter(|cpu| *cpu < CPUS_MAX);
            cpu.ok_or_else(|| format!("{text:?} is no CPU; write numbers from 0 to {}", CPUS_MAX - 1))
        };
        let mut cpus = Vec::new();
        for part in text.trim().split(',').filter(|part| !part.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("{part:?} ends before it begins"));
            }
            cpus.extend(first..=last);
        }
        Ok(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|one, next| *next == one + 1);
        for (index, run) in runs.enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match run {
                [] => {}
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// CPUs that a thread may run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpuChoice {
    /// Wherever the process may.
    Any,
    /// On the CPUs of a NUMA node.
    Node(u32),
    /// On these.
    Cpus(CpuSet),
}

impl FromStr for CpuChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: String| format!("{why}; write \"any\", \"node 1\", or CPUs such as \"0-7,16\"");
        match text.trim() {
            "any" => Ok(CpuChoice::Any),
            text => match text.strip_prefix("node") {
                Some(node) => {
                    let number = node.trim().parse();
                    number.map(CpuChoice::Node).map_err(|_| wrong(format!("{node:?} is no number of a node")))
                }
                None => match text.parse::<CpuSet>() {
                    Ok(cpus) if !cpus.is_empty() => Ok(CpuChoice::Cpus(cpus)),
                    Ok(_) => Err(wrong("no CPU is named".into())),
                    Err(why) => Err(wrong(why)),
                },
            },
        }
    }
}

impl fmt::Display for CpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CpuChoice::Any => f.write_str("any"),
            CpuChoice::Node(node) => write!(f, "node {node}"),
            CpuChoice::Cpus(cpus) => cpus.fmt(f),
        }
    }
}

impl Serialize for CpuChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().expect("a list")
    }

    #[test]
    fn lists_are_those_of_the_kernel() {
        for (text, cpus, again) in [
            ("0-3,8\n", vec![0, 1, 2, 3, 8], "0-3,8"),
            ("", vec![], ""),
            ("7", vec![7], "7"),
            ("2,1,0, 1", vec![0, 1, 2], "0-2"),
            ("8191", vec![8191], "8191"),
        ] {
            assert_eq!(set(text).iter().collect::<Vec<_>>(), cpus, "{text:?}");
            assert_eq!(set(text).to_string(), again);
        }
        assert_eq!(set("0-7").common(&set("4-9,1")), set("1,4-7"));
        assert!(set("0-3").common(&set("4-7")).is_empty());
    }

    #[test]
    fn mistakes_in_a_list_are_told() {
        for (text, why) in [
            ("0-4294967295", "no CPU"),
            ("8192", "no CPU"),
            ("-1", "no CPU"),
            ("5-2", "ends before it begins"),
            ("a", "no CPU"),
            ("", "no CPU is named"),
            ("node", "no number of a node"),
            ("node -1", "no number of a node"),
        ] {
            let refusal = text.parse::<CpuChoice>().expect_err("a mistake");
            assert!(refusal.contains(why) && refusal.contains("\"node 1\""), "{text:?}: {refusal}");
        }
    }

    #[test]
    fn choices_read_back_what_they_print() {
        for text in ["any", "node 3", "0-7,16"] {
            assert_eq!(text.parse::<CpuChoice>().expect("a choice").to_string(), text);
        }
        assert_eq!("node1".parse(), Ok(CpuChoice::Node(1)));
    }
}
