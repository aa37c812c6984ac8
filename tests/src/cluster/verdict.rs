//! Verdict on a simulated job: how it may end, given what has happened.

use mccs_ipc::types::ErrorClass;

use super::job::RankEnd;
use super::script::{Job, Trouble};

/// The fault in how an undisturbed job has ended, by rank.
pub(super) fn judge(job: &Job, ends: &[RankEnd]) -> Result<(), String> {
    let mut messages = Vec::new();
    for (rank, end) in ends.iter().enumerate() {
        match (job.trouble, end) {
            (Trouble::None, RankEnd::Well) => {}
            (Trouble::None, _) => return Err(format!("rank {rank} ended with {end:?}, and nothing was wrong")),
            (_, RankEnd::Failed(class, message)) => {
                let class = class.ok_or_else(|| format!("rank {rank} failed with no class: {message}"))?;
                messages.push((rank, class, message.as_str()));
            }
            _ => return Err(format!("rank {rank} ended with {end:?} in spite of {:?}", job.trouble)),
        }
    }
    let is_one_of = |classes: &[ErrorClass]| match messages.iter().find(|(_, class, _)| !classes.contains(class)) {
        Some((rank, class, message)) => {
            Err(format!("rank {rank} failed with {class:?}, not {classes:?}, of {:?}: {message}", job.trouble))
        }
        None => Ok(()),
    };
    match job.trouble {
        Trouble::None => Ok(()),
        Trouble::Alike(_) => is_one_of(&[ErrorClass::InvalidUsage]),
        // Messages that nobody wants tell nobody anything.
        Trouble::Unlike(_) => is_one_of(&[ErrorClass::InvalidUsage, ErrorClass::Timeout]),
        Trouble::Abort(culprit) => {
            is_one_of(&[ErrorClass::Remote])?;
            let name = format!("rank {culprit} aborted");
            match messages.iter().find(|(_, _, message)| !message.contains(&name)) {
                Some((rank, _, message)) => Err(format!("rank {rank} was not told that {name}: {message}")),
                None => Ok(()),
            }
        }
        Trouble::Silent(culprit) => {
            is_one_of(&[ErrorClass::Timeout])?;
            let accused = |rank: usize| format!("rank {rank} (process {rank}) has called nothing");
            let is_accused = |rank: usize| messages.iter().find(|(_, _, message)| message.contains(&accused(rank)));
            if is_accused(culprit as usize).is_none() {
                return Err(format!("nobody was told that {}: {messages:?}", accused(culprit as usize)));
            }
            let innocent = (0..ends.len()).filter(|rank| *rank != culprit as usize);
            match innocent.into_iter().find_map(is_accused) {
                Some((rank, _, message)) => Err(format!("rank {rank} was told of a rank that did call: {message}")),
                None => Ok(()),
            }
        }
    }
}
