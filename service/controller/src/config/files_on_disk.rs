//! Policy and topology files on disk, compared with what is in force.
//!
//! A refused, deleted or unreadable file changes nothing. An operator who applies another policy leaves the file behind. Both are shown until
//! the file says what is in force.

use std::time::Instant;

use crate::config::cluster_config::{ClusterConfig, Text};
use crate::messages::answer::{FileStanding, FileView};

/// Which of the operator's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    /// `topology.toml`.
    Topology,
    /// `policy.toml`.
    Policy,
}

/// Why the file on the disk is not in force.
struct Problem {
    reason: String,
    since: Instant,
    is_unreadable: bool,
}

#[derive(Default)]
struct OnDisk {
    /// As it was last read.
    text: Option<Text>,
    problem: Option<Problem>,
    /// Name of the file if it was never read.
    name: String,
}

impl OnDisk {
    fn read(&mut self, text: Option<&Text>) {
        if let Some(text) = text {
            (self.text, self.problem) = (Some(text.clone()), None);
        }
    }

    fn is_called(&self, reason: &str) -> bool {
        self.text.as_ref().is_some_and(|text| reason.starts_with(&*text.name))
    }

    fn refused(&mut self, reason: &str, since: Instant) {
        self.problem = Some(Problem { reason: reason.to_owned(), since, is_unreadable: false });
    }

    fn view(&self, in_force: Option<&Text>, taken_back: Option<&Text>, now: Instant) -> Option<FileView> {
        let age_ms = |since: Instant| now.saturating_duration_since(since).as_millis() as u64;
        let name = self.text.as_ref().map_or(&self.name, |text| &text.name).clone();
        let standing = match (&self.text, &self.problem) {
            (_, Some(Problem { reason, since, is_unreadable: true })) => {
                FileStanding::Unreadable { reason: reason.clone(), age_ms: age_ms(*since) }
            }
            (None, None) => return None,
            (Some(text), _) if in_force.is_some_and(|in_force| in_force.text == text.text) => FileStanding::InForce,
            (_, Some(Problem { reason, since, .. })) => {
                FileStanding::Refused { reason: reason.clone(), age_ms: age_ms(*since) }
            }
            (Some(text), None) if taken_back == Some(text) => FileStanding::RolledBack,
            (Some(text), None) => match in_force {
                Some(in_force) => first_difference(&text.text, &in_force.text),
                None => FileStanding::NotYet,
            },
        };
        Some(FileView { file: name, standing })
    }
}

/// The first line in which two texts differ.
fn first_difference(on_disk: &str, in_force: &str) -> FileStanding {
    let (mut on_disk, mut in_force) = (on_disk.lines(), in_force.lines());
    let mut line = 0;
    loop {
        line += 1;
        let (left, right) = (on_disk.next(), in_force.next());
        if left != right || left.is_none() {
            let owned = |text: Option<&str>| text.map(str::to_owned);
            return FileStanding::Differs { line, on_disk: owned(left), in_force: owned(right) };
        }
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Disk {
    topology: OnDisk,
    policy: OnDisk,
}

impl Disk {
    /// Files were read; those that have not changed are `None`.
    pub(crate) fn read(&mut self, topology: Option<&Text>, policy: Option<&Text>) {
        self.topology.read(topology);
        self.policy.read(policy);
    }

    /// A file is gone, or cannot be read.
    pub(crate) fn lost(&mut self, role: FileRole, name: &str, reason: &str, since: Instant) {
        let file = match role {
            FileRole::Topology => &mut self.topology,
            FileRole::Policy => &mut self.policy,
        };
        file.name = name.to_owned();
        file.problem = Some(Problem { reason: reason.to_owned(), since, is_unreadable: true });
    }

    /// Read files are refused: the file that the reason begins with, or else both that were read.
    pub(crate) fn refused(&mut self, reason: &str, topology: bool, policy: bool, since: Instant) {
        let of_one = self.topology.is_called(reason) || self.policy.is_called(reason);
        if self.topology.is_called(reason) || (topology && !of_one) {
            self.topology.refused(reason, since);
        }
        if self.policy.is_called(reason) || (policy && !of_one) {
            self.policy.refused(reason, since);
        }
    }

    /// All that was read last is in force, or will be unless a communicator refuses it.
    pub(crate) fn accepted(&mut self) {
        for file in [&mut self.topology, &mut self.policy] {
            file.problem.take_if(|problem| !problem.is_unreadable);
        }
    }

    /// How both stand to what is in force; the texts are those that a communicator refused.
    pub(crate) fn view(
        &self,
        config: Option<&ClusterConfig>,
        topology: Option<&Text>,
        policy: Option<&Text>,
        now: Instant,
    ) -> Vec<FileView> {
        let topology = self.topology.view(config.map(|config| &config.network.text), topology, now);
        let policy = self.policy.view(config.map(|config| &config.policy_text), policy, now);
        policy.into_iter().chain(topology).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named() {
        let differs = |on_disk, in_force| match first_difference(on_disk, in_force) {
            FileStanding::Differs { line, on_disk, in_force } => (line, on_disk, in_force),
            other => panic!("{other:?}"),
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(differs("a\nb\n", "a\nc\n"), (2, some("b"), some("c")));
        assert_eq!(differs("a\n", "a\nc\n"), (2, None, some("c")));
        assert_eq!(differs("", "a"), (1, None, some("a")));
    }
}
