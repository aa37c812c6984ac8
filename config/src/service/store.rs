//! `[store]` of `service.toml`: where the cluster keeps what its hosts have in common, and elects
//! its controller.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::units::DurationText;
use crate::validate::Problems;

/// `[store]`: the same on all hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// What it is.
    pub kind: StoreKind,
    /// Name of the cluster: clusters of one store have names of their own.
    pub cluster: String,
    /// Of etcd: URLs of its members' client ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<String>,
    /// Certificates of who may be etcd, PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<PathBuf>,
    /// This service's certificate for etcd, PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// That certificate's key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// As whom etcd is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A file that has that user's password alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
    /// Of a folder: where. All services of the cluster are on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// How long a member may take to answer, before another is asked.
    #[serde(default = "default_timeout")]
    pub timeout: DurationText,
    /// How long the controller stays so when nobody hears of it. Whole seconds.
    #[serde(default = "default_lease")]
    pub lease: DurationText,
}

/// What a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    /// etcd v3.
    Etcd,
    /// A folder that services of one machine share.
    Folder,
}

fn default_timeout() -> DurationText {
    DurationText::millis(500)
}

fn default_lease() -> DurationText {
    DurationText::secs(2)
}

impl Store {
    /// What all keys of the cluster begin with.
    #[must_use]
    pub fn prefix(&self) -> String {
        format!("/mccs/{}/", self.cluster)
    }

    pub(super) fn validate(&self, problems: &mut Problems) {
        problems.name("store.cluster", &self.cluster);
        problems.within("store.timeout", &self.timeout, &limits::STORE_TIMEOUT);
        problems.within("store.lease", &self.lease, &limits::STORE_LEASE);
        if self.lease.0.subsec_nanos() != 0 {
            problems.add("store.lease", format!("must be whole seconds, as etcd's leases are, not {}", self.lease));
        }
        if self.timeout.0.saturating_mul(2) > self.lease.0 {
            let message =
                format!("must be at most half of store.lease, {}: a member that is silent is left in time", self.lease);
            problems.add("store.timeout", message);
        }
        let files = [
            ("authority", &self.authority),
            ("certificate", &self.certificate),
            ("key", &self.key),
            ("password_file", &self.password_file),
            ("folder", &self.folder),
        ];
        for (key, path) in files.iter().filter_map(|(key, path)| path.as_ref().map(|path| (key, path))) {
            if !path.is_absolute() {
                problems.add(format!("store.{key}"), format!("must be an absolute path, not {:?}", path.display()));
            }
        }
        match self.kind {
            StoreKind::Etcd => self.validate_etcd(problems),
            StoreKind::Folder => self.validate_folder(problems),
        }
    }

    fn validate_etcd(&self, problems: &mut Problems) {
        if self.endpoints.is_empty() {
            problems.add("store.endpoints", "must name etcd's members, such as [\"https://10.0.0.1:2379\"]");
        }
        let is_url = |url: &&String| url.starts_with("https://") || url.starts_with("http://");
        if let Some(url) = self.endpoints.iter().find(|url| !is_url(url)) {
            problems.add("store.endpoints", format!("{url:?} is no URL; write for example \"https://10.0.0.1:2379\""));
        }
        if self.authority.is_none() && self.endpoints.iter().any(|url| url.starts_with("https://")) {
            problems.add("store.authority", "must name the certificates of who may be etcd, for https");
        }
        if self.certificate.is_some() != self.key.is_some() {
            problems.add("store.certificate", "and store.key belong together: name both, or neither");
        }
        if self.user.is_some() != self.password_file.is_some() {
            problems.add("store.user", "and store.password_file belong together: name both, or neither");
        }
        if self.folder.is_some() {
            problems.add("store.folder", "is of kind = \"folder\"; leave it out");
        }
    }

    fn validate_folder(&self, problems: &mut Problems) {
        if self.folder.is_none() {
            problems.add("store.folder", "must name the folder that all services of this machine share");
        }
        let of_etcd = [
            ("endpoints", !self.endpoints.is_empty()),
            ("authority", self.authority.is_some()),
            ("certificate", self.certificate.is_some()),
            ("user", self.user.is_some()),
        ];
        for (key, _) in of_etcd.into_iter().filter(|(_, is_there)| *is_there) {
            problems.add(format!("store.{key}"), "is of kind = \"etcd\"; leave it out");
        }
    }
}
