//! Policy and topology in force at the controller, as read, put in force, taken back, and before.
//!
//! ```text
//! files --read--> checked against each other and the hosts --> in force --refused by a communicator--> taken back
//!                            |
//!                            +--> refused: what was in force stays, and both are tried again when hosts change
//! ```
//!
//! Texts of two files that only fit together may be saved one after the other. The first is refused, and is put in force with the second.

use std::sync::Arc;
use std::time::Instant;

use mccs_config::topology::ActualHost;

use crate::config::cluster_config::{ClusterConfig, Text};
use crate::config::files_on_disk::{Disk, FileRole};
use crate::messages::answer::FileView;

/// Texts of the operator's two files; `None` where one is not known, or not meant.
#[derive(Debug, Clone, Default)]
pub(crate) struct Texts {
    pub(crate) topology: Option<Text>,
    pub(crate) policy: Option<Text>,
}

impl Texts {
    pub(crate) fn are_none(&self) -> bool {
        self.topology.is_none() && self.policy.is_none()
    }

    /// These, or else the others.
    pub(crate) fn or(self, others: Texts) -> Texts {
        Texts { topology: self.topology.or(others.topology), policy: self.policy.or(others.policy) }
    }

    fn both(self) -> Option<(Text, Text)> {
        self.topology.zip(self.policy)
    }

    /// Their names in messages.
    pub(crate) fn names(&self) -> String {
        let names = [&self.topology, &self.policy].into_iter().flatten().map(|text| &*text.name);
        names.collect::<Vec<_>>().join(" and ")
    }
}

/// The configuration that follows from texts that were read.
#[derive(Default)]
pub(crate) struct Chosen {
    /// To be put in force, where it says anything else than what is.
    pub(crate) config: Option<ClusterConfig>,
    /// Why one of the files is not in force as it was last read, where the other one is.
    pub(crate) refused: Option<String>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct ConfigStore {
    in_force: Option<Arc<ClusterConfig>>,
    /// Texts that were last read, whatever was thought of them; if they were taken back, those that are in force again.
    read: Texts,
    /// Texts that were last read, if they were taken back.
    taken_back: Texts,
    /// The policy that was in force before this one.
    policy_before: Option<Text>,
    /// The files as they are on the disk.
    disk: Disk,
    /// The last texts were refused, perhaps for hosts' equipment then.
    is_refused: bool,
    is_to_try_again: bool,
}

impl ConfigStore {
    pub(crate) fn in_force(&self) -> Option<&ClusterConfig> {
        self.in_force.as_deref()
    }

    /// The same, shared.
    pub(crate) fn shared(&self) -> Option<&Arc<ClusterConfig>> {
        self.in_force.as_ref()
    }

    /// The policy that an operator may want again.
    pub(crate) fn policy_before(&self) -> Option<&Text> {
        self.policy_before.as_ref()
    }

    /// Reads and checks two texts.
    fn check(&self, topology: Text, policy: Text, cluster: &[ActualHost<'_>]) -> Result<ClusterConfig, String> {
        ClusterConfig::new(topology, policy, cluster, self.in_force.as_deref())
    }

    /// Another policy, with the topology that is in force, or was read.
    ///
    /// # Errors
    /// The mistake in it, or that there is no topology.
    pub(crate) fn with_policy(&self, policy: Text, cluster: &[ActualHost<'_>]) -> Result<ClusterConfig, String> {
        let in_force = self.in_force.as_ref().map(|config| config.network.text.clone());
        let topology = in_force.or(self.read.topology.clone()).ok_or("there is no topology yet")?;
        self.check(topology, policy, cluster)
    }

    /// Files have changed on the disk.
    pub(crate) fn note_changed(&mut self, changed: &Texts) {
        self.disk.read(changed.topology.as_ref(), changed.policy.as_ref());
    }

    /// A file of the operator is gone, or cannot be read.
    pub(crate) fn note_lost(&mut self, role: FileRole, file: &str, error: &str, now: Instant) {
        self.disk.lost(role, file, error, now);
    }

    /// The configuration of files that have changed.
    ///
    /// # Errors
    /// They are refused, and why; what is in force stays.
    pub(crate) fn choose(
        &mut self,
        changed: &Texts,
        cluster: &[ActualHost<'_>],
        now: Instant,
    ) -> Result<Chosen, String> {
        let chosen = self.fit(changed, cluster);
        let (topology, policy) = (changed.topology.is_some(), changed.policy.is_some());
        let refused = match &chosen {
            Ok(Chosen { refused: None, .. }) => None,
            Ok(Chosen { refused: Some(reason), .. }) => Some((reason, (!topology, !policy))),
            Err(reason) => Some((reason, (topology, policy))),
        };
        self.is_refused = refused.is_some();
        match refused {
            None => self.disk.accepted(),
            Some((reason, (topology, policy))) => self.disk.refused(reason, topology, policy, now),
        }
        chosen
    }

    /// Finds texts that fit each other among those that were read, taken back and in force.
    fn fit(&mut self, changed: &Texts, cluster: &[ActualHost<'_>]) -> Result<Chosen, String> {
        self.read = changed.clone().or(std::mem::take(&mut self.read));
        self.taken_back.topology.take_if(|_| changed.topology.is_some());
        self.taken_back.policy.take_if(|_| changed.policy.is_some());
        // Until both were read there is nothing to check them against.
        let Some((topology, policy)) = self.read.clone().both() else { return Ok(Chosen::default()) };
        let in_force = self.in_force.as_deref().map(|config| (config.network.text.clone(), config.policy_text.clone()));
        let (topology_in_force, policy_in_force) = in_force.unwrap_or((topology.clone(), policy.clone()));
        // One of two files that only fit together was saved first, and refused. If both do not go together yet, the one that has changed
        // may fit what is in force; and if it does not, that is the mistake in it.
        let (config, refused) = match self.check(topology, policy, cluster) {
            Ok(config) => (config, self.why_taken_back()),
            Err(reason) => match self.with_taken_back(cluster) {
                Some(config) => (config, None),
                None => {
                    let topology = changed.topology.clone().unwrap_or(topology_in_force);
                    let policy = changed.policy.clone().unwrap_or(policy_in_force);
                    (self.check(topology, policy, cluster)?, Some(reason))
                }
            },
        };
        let says = |config: &ClusterConfig| (config.network.text.text.clone(), config.policy_text.text.clone());
        let is_news = self.in_force.as_ref().is_none_or(|before| says(before) != says(&config));
        Ok(Chosen { config: Some(config).filter(|_| is_news), refused })
    }

    /// Reason why files are not in force as they were last read: a communicator has refused them.
    fn why_taken_back(&self) -> Option<String> {
        let file = self.taken_back.topology.as_ref().or(self.taken_back.policy.as_ref())?;
        Some(format!("{} was rolled back, and is tried again when it changes", file.name))
    }

    /// One of two files that were taken back together was mended, and only fits the other one.
    fn with_taken_back(&mut self, cluster: &[ActualHost<'_>]) -> Option<ClusterConfig> {
        self.why_taken_back()?;
        let texts = self.taken_back.clone().or(self.read.clone());
        let (topology, policy) = texts.clone().both()?;
        let config = self.check(topology, policy, cluster).ok()?;
        (self.read, self.taken_back) = (texts, Texts::default());
        Some(config)
    }

    /// Hosts have other devices: files that were refused for what hosts had may be right now.
    pub(crate) fn hosts_have_changed(&mut self) {
        self.is_to_try_again = self.is_refused;
    }

    /// Tries files again that were refused, if hosts have changed. Returns what is to be put in force; if they are still wrong, that was told.
    pub(crate) fn try_again(&mut self, cluster: &[ActualHost<'_>]) -> Option<ClusterConfig> {
        let (topology, policy) = self.read.clone().both()?;
        let config = self.check(topology, policy, cluster).ok()?;
        self.is_refused = false;
        self.disk.accepted();
        // An operator may have said meanwhile what was to be read.
        let is_in_force = |before: &Arc<ClusterConfig>| {
            (&before.network.text, &before.policy_text) == (&config.network.text, &config.policy_text)
        };
        (!self.in_force.as_ref().is_some_and(is_in_force)).then_some(config)
    }

    /// Whether files that were refused are to be tried again; whoever asks then does.
    pub(crate) fn take_try_again(&mut self) -> bool {
        std::mem::take(&mut self.is_to_try_again)
    }

    /// Puts another config in force. Returns the one before.
    pub(crate) fn put_in_force(&mut self, config: Arc<ClusterConfig>) -> Option<Arc<ClusterConfig>> {
        self.in_force.replace(config)
    }

    /// Puts the config in force again that was before. It counts from now on as what was read, so that nothing that is wrong with one file
    /// is put on the other.
    pub(crate) fn take_back(&mut self, before: Arc<ClusterConfig>) {
        if let Some(config) = &self.in_force {
            let take_back = |last: &mut Option<Text>, taken: &mut Option<Text>, of: &Text, before: &Text| {
                if of != before && last.as_ref() == Some(of) {
                    *taken = last.replace(before.clone());
                }
            };
            let (read, taken) = (&mut self.read, &mut self.taken_back);
            take_back(&mut read.topology, &mut taken.topology, &config.network.text, &before.network.text);
            take_back(&mut read.policy, &mut taken.policy, &config.policy_text, &before.policy_text);
        }
        self.in_force = Some(before);
    }

    /// A config stays in force, in place of the one before: an operator may want the policy of that one again.
    pub(crate) fn keep(&mut self, before: Option<&ClusterConfig>, is_said: bool) {
        let Some(config) = &self.in_force else { return };
        if let Some(before) = before.filter(|before| before.policy_text.text != config.policy_text.text) {
            self.policy_before = Some(before.policy_text.clone());
        }
        if is_said {
            // The operator's word holds until the file says something else.
            (self.read.policy, self.taken_back.policy) = (Some(config.policy_text.clone()), None);
        }
    }

    /// How files stand to what is in force.
    pub(crate) fn view(&self, now: Instant) -> Vec<FileView> {
        let Texts { topology, policy } = &self.taken_back;
        self.disk.view(self.in_force.as_deref(), topology.as_ref(), policy.as_ref(), now)
    }
}

#[cfg(test)]
mod tests;
