//! Samples of the neighbours' benchmark: a line of JSON each, so that a run that is cut off goes on
//! where it was.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::stats::median;

/// One side of one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The flood, or the one it is compared with.
    pub flood: String,
    /// Payload of the victim's calls.
    pub bytes: u64,
    /// Hosts of the victim.
    pub hosts: usize,
    /// Number of the round.
    pub round: usize,
    /// Whether hogs were beside the victim, and not the flood.
    pub beside_hogs: bool,
    /// None where no call ended in the time that it had.
    pub mean_us: Option<f64>,
    /// The same.
    pub p99_us: Option<f64>,
    /// Calls that ended.
    pub calls: usize,
}

impl Measured {
    fn is_same_side(&self, other: &Measured) -> bool {
        let of = |one: &Measured| (one.flood.clone(), one.bytes, one.hosts, one.beside_hogs);
        of(self) == of(other)
    }
}

/// All of them, in a file.
pub struct Samples {
    file: File,
    all: Vec<Measured>,
}

impl Samples {
    /// Opens the file, which may have some.
    ///
    /// # Errors
    /// It cannot be opened, or has something else.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let text = if path.exists() { std::fs::read_to_string(path)? } else { String::new() };
        // The last line may have been cut off.
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let all = whole.lines().map(serde_json::from_str).collect::<Result<_, _>>();
        let all = all.with_context(|| format!("{} has something else; name another file", path.display()))?;
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        file.set_len(whole.len() as u64)?;
        Ok(Samples { file, all })
    }

    /// Whether this side of this round is there.
    #[must_use]
    pub fn has(&self, one: &Measured) -> bool {
        self.all.iter().any(|other| other.is_same_side(one) && other.round == one.round)
    }

    /// Keeps another.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn add(&mut self, one: Measured) -> anyhow::Result<()> {
        writeln!(self.file, "{}", serde_json::to_string(&one)?)?;
        self.all.push(one);
        Ok(())
    }

    /// A row for each flood and payload: medians of both sides, and their ratios with the smallest and the largest of a round.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<12} {:>8} {:>5} {:>10} {:>10} {:>22} {:>10} {:>10} {:>22}\n",
            "flood", "bytes", "hosts", "hogs us", "mean us", "ratio", "hogs p99", "p99 us", "ratio"
        );
        let firsts = self
            .all
            .iter()
            .enumerate()
            .filter(|(at, one)| !one.beside_hogs && !self.all[..*at].iter().any(|other| other.is_same_side(one)));
        for (_, one) in firsts {
            let [means, p99s] =
                [|one: &Measured| one.mean_us, |one: &Measured| one.p99_us].map(|of| self.compare(one, of));
            text += &format!("{:<12} {:>8} {:>5} {means} {p99s}\n", one.flood, one.bytes, one.hosts);
        }
        text
    }

    fn compare(&self, one: &Measured, of: fn(&Measured) -> Option<f64>) -> String {
        let side = |beside_hogs| {
            let wanted = Measured { beside_hogs, ..one.clone() };
            let mut side: Vec<_> = self.all.iter().filter(|other| other.is_same_side(&wanted)).collect();
            side.sort_by_key(|one| one.round);
            // A call without an end counts as endless.
            side.into_iter().map(|one| (one.round, of(one).unwrap_or(f64::INFINITY))).collect::<Vec<_>>()
        };
        let [hogs, flooded] = [side(true), side(false)];
        let ratios: Vec<_> =
            flooded.iter().filter_map(|(round, us)| Some(us / hogs.iter().find(|(of, _)| of == round)?.1)).collect();
        let middle = |of: &[(usize, f64)]| median(&of.iter().map(|(_, us)| *us).collect::<Vec<_>>());
        let [least, most] = [f64::min, f64::max].map(|pick| ratios.iter().copied().reduce(pick).unwrap_or(f64::NAN));
        let ratio = format!("{:.2} ({least:.2} to {most:.2})", median(&ratios));
        format!("{:>10.1} {:>10.1} {ratio:>22}", middle(&hogs), middle(&flooded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_there_again_and_a_line_that_was_cut_off_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let one = |round, beside_hogs, us| Measured {
            flood: "churn".into(),
            bytes: 8,
            hosts: 1,
            round,
            beside_hogs,
            mean_us: us,
            p99_us: us,
            calls: 3,
        };
        let mut samples = Samples::open(&path).unwrap();
        for (round, us) in [(0, 4.0), (1, 2.0), (2, 8.0)] {
            samples.add(one(round, true, Some(2.0))).unwrap();
            samples.add(one(round, false, Some(us))).unwrap();
        }
        let table = samples.table();
        assert!(table.contains("2.00 (1.00 to 4.00)"), "{table}");
        write!(samples.file, "{{\"flood\":").unwrap();
        drop(samples);
        let mut again = Samples::open(&path).unwrap();
        assert_eq!(again.table(), table);
        assert!(again.has(&one(1, false, None)) && !again.has(&one(3, false, None)));
        // One that never ended is worse than all.
        again.add(one(3, false, None)).unwrap();
        again.add(one(3, true, Some(2.0))).unwrap();
        drop(again);
        assert!(Samples::open(&path).unwrap().table().contains("to inf)"));
        std::fs::write(&path, "something else\n").unwrap();
        assert!(Samples::open(&path).is_err());
    }
}
