//! Topology and policy of the cluster in its store, each a key.
//!
//! The configuration in force is written, by the controller alone. Somebody else's text there is put in force as a changed
//! file is: checked, refused with a reason, and noted in the history.

use std::sync::Arc;

use mccs_controller::config::cluster_config::{ClusterConfig, Text};
use mccs_controller::config::files_on_disk::FileRole;
use mccs_exchange::protocol::Name;
use mccs_store::{Entry, Guard, Revision, Snapshot, Write};
use serde::{Deserialize, Serialize};

/// Prefix of their keys.
pub(super) const PREFIX: &str = "config/";
/// Format that this release writes, and reads.
const FORMAT: u32 = 1;

/// A text's value.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Value {
    format: u32,
    /// The controller's host that has put it in force.
    host: String,
    /// The file that it was in.
    file: String,
    text: String,
}

/// A text as the store has it, or is to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedText {
    /// Which.
    pub(super) kind: Kind,
    /// The controller's host that has put it in force.
    pub(super) host: String,
    /// Its file and what it says; or why it cannot be read.
    pub(super) text: Result<Text, String>,
    /// When it was put; none: there is none yet.
    pub(super) at: Option<Revision>,
    /// Whether this host has put it, in the term that it has: no news for its controller.
    pub(super) is_own: bool,
}

/// Which text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `topology.toml`.
    Topology,
    /// `policy.toml`.
    Policy,
}

/// All of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedTexts {
    pub(super) topology: Option<SharedText>,
    pub(super) policy: Option<SharedText>,
}

impl Kind {
    fn key(self) -> &'static str {
        match self {
            Kind::Topology => "config/topology",
            Kind::Policy => "config/policy",
        }
    }

    /// The same, as the controller calls it.
    pub(super) fn role(self) -> FileRole {
        match self {
            Kind::Topology => FileRole::Topology,
            Kind::Policy => FileRole::Policy,
        }
    }
}

impl SharedTexts {
    pub(super) fn get(&self, kind: Kind) -> Option<&SharedText> {
        match kind {
            Kind::Topology => self.topology.as_ref(),
            Kind::Policy => self.policy.as_ref(),
        }
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut SharedText> {
        self.topology.iter_mut().chain(&mut self.policy)
    }
}

impl SharedText {
    /// The next text, in the place of what the store has.
    pub(super) fn next(kind: Kind, host: &str, text: &Text, before: Option<&SharedText>) -> Self {
        let (host, text) = (host.to_owned(), Ok(text.clone()));
        SharedText { kind, host, text, at: before.and_then(|before| before.at), is_own: true }
    }

    /// Whether the same host has put the same.
    pub(super) fn says_the_same(&self, other: &Self) -> bool {
        let text = |text: &Self| text.text.as_ref().ok().map(|text| text.text.clone());
        self.host == other.host && text(self) == text(other)
    }

    /// Compare and set: nobody has put another one since.
    pub(super) fn guard(&self) -> Guard {
        let key = self.kind.key().to_owned();
        self.at.map_or(Guard::Absent(key.clone()), |at| Guard::Modified(key, at))
    }

    pub(super) fn write(&self) -> Write {
        let (file, text) = match &self.text {
            Ok(Text { name, text }) => (name.clone(), text.clone()),
            Err(_) => Default::default(),
        };
        let value = Value { format: FORMAT, host: self.host.clone(), file, text };
        // Texts can be written.
        let value = serde_json::to_vec(&value).unwrap_or_default();
        Write::Put { key: self.kind.key().to_owned(), value, lease: None }
    }

    fn read(kind: Kind, entry: &Entry) -> Self {
        let name = format!("{} of the store", kind.key());
        let read = serde_json::from_slice::<Value>(&entry.value);
        let (host, text) = match read {
            Ok(Value { format: FORMAT, host, text, .. }) => (host, Ok(Text { name, text })),
            Ok(Value { format, .. }) => {
                (String::new(), Err(format!("it has format {format}, and this release reads {FORMAT}")))
            }
            Err(error) => (String::new(), Err(error.to_string())),
        };
        SharedText { kind, host, text, at: Some(entry.modified), is_own: false }
    }
}

/// Texts of a snapshot.
pub(super) fn read(snapshot: &Snapshot) -> SharedTexts {
    let of = |kind: Kind| snapshot.get(kind.key()).map(|entry| SharedText::read(kind, entry));
    SharedTexts { topology: of(Kind::Topology), policy: of(Kind::Policy) }
}

/// Texts of the store at the controller that is in office.
pub(super) struct Shared {
    own: String,
    /// As the store has them.
    texts: SharedTexts,
    /// As the controller was told.
    told: SharedTexts,
    /// Configuration that was in force when it was last compared.
    seen: Option<Arc<ClusterConfig>>,
}

impl Shared {
    pub(super) fn new(own: &Name, texts: SharedTexts) -> Self {
        Shared { own: own.to_string(), texts, told: SharedTexts::default(), seen: None }
    }

    pub(super) fn has(&self, kind: Kind) -> bool {
        self.texts.get(kind).is_some()
    }

    pub(super) fn set(&mut self, texts: SharedTexts) {
        self.texts = texts;
    }

    /// Texts that the controller was not told of: topology, policy, and those that cannot be read, with their names.
    #[expect(clippy::type_complexity, reason = "each part is told to the controller by itself")]
    pub(super) fn take_news(&mut self) -> (Option<Text>, Option<Text>, Vec<(FileRole, &'static str, String)>) {
        let mut unreadable = Vec::new();
        let mut news = |kind: Kind| {
            let text = self.texts.get(kind)?;
            // Also one that says the same as before: what was in force meanwhile may be something else.
            if text.is_own || self.told.get(kind) == Some(text) {
                return None;
            }
            match &text.text {
                Ok(text) => Some(text.clone()),
                Err(error) => {
                    unreadable.push((kind.role(), kind.key(), error.clone()));
                    None
                }
            }
        };
        let (topology, policy) = (news(Kind::Topology), news(Kind::Policy));
        self.told = self.texts.clone();
        (topology, policy, unreadable)
    }

    /// Texts to be written, where others are in force than before. Somebody's text there that is not in force stays.
    pub(super) fn writes(&mut self, config: &Arc<ClusterConfig>) -> Vec<SharedText> {
        if self.seen.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, config)) {
            return Vec::new();
        }
        self.seen = Some(Arc::clone(config));
        let in_force = [(Kind::Topology, &config.network.text), (Kind::Policy, &config.policy_text)];
        let is_there = |kind: Kind, text: &Text| {
            let there = self.texts.get(kind).and_then(|there| there.text.as_ref().ok());
            there.is_some_and(|there| there.text == text.text)
        };
        let news = in_force.into_iter().filter(|(kind, text)| !is_there(*kind, text));
        news.map(|(kind, text)| SharedText::next(kind, &self.own, text, self.texts.get(kind))).collect()
    }
}
