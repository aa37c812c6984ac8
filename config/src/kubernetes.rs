//! `kubernetes.toml`: which tenants pods of a node may ask for, and where kubelet is.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::job_terms::JobTerms;
use crate::limits::{self, Limit};
use crate::service::{CONTROL_SOCKET, TENANTS_FOLDER};
use crate::units::DurationText;
use crate::validate::{Problems, Validate};

/// A whole `kubernetes.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesFile {
    /// The service's `runtime_dir`.
    pub runtime_dir: PathBuf,
    /// kubelet's folder of device plugins' sockets.
    pub plugin_dir: PathBuf,
    /// kubelet's socket that tells which pods have which devices.
    pub pod_resources: PathBuf,
    /// Where the container runtime looks for CDI specifications.
    pub cdi_dir: PathBuf,
    /// The folder of libraries that containers get, in the same place.
    pub library_dir: PathBuf,
    /// The library in it that processes load before all others. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preload: Option<String>,
    /// How often it is looked whether pods have ended, and whether the service and kubelet are there.
    pub look_every: DurationText,
    /// How long the service may take to have a tenant, or to take it away.
    pub timeout: DurationText,
    /// Kinds of tenants: what pods ask for is `mccs.io/tenant-NAME`.
    pub tenant: BTreeMap<String, KubernetesTenant>,
}

/// A kind of tenants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesTenant {
    /// Containers of a node that may have one at once.
    pub slots: u32,
    /// What each of them gets.
    pub terms: JobTerms,
}

/// Slots of a kind of tenants: the service has no more tenants.
const SLOTS: Limit<u32> =
    Limit { min: 1, max: 1_024, reason: "each slot may be a tenant of the service, which has 1,024 at most" };
/// Longest name of a kind: with the prefix and a slot it is a device, whose name has 63 bytes at most.
const KIND_BYTES_MAX: usize = 40;

impl Default for KubernetesTenant {
    fn default() -> Self {
        KubernetesTenant { slots: 16, terms: JobTerms::default() }
    }
}

impl Default for KubernetesFile {
    fn default() -> Self {
        KubernetesFile {
            runtime_dir: "/run/mccs".into(),
            plugin_dir: "/var/lib/kubelet/device-plugins".into(),
            pod_resources: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            cdi_dir: "/var/run/cdi".into(),
            library_dir: "/usr/lib/mccs".into(),
            preload: None,
            look_every: DurationText::secs(2),
            timeout: DurationText::secs(10),
            tenant: BTreeMap::new(),
        }
    }
}

crate::document!(KubernetesFile, written);

impl KubernetesFile {
    /// The service's control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.runtime_dir.join(CONTROL_SOCKET)
    }

    /// The folder of a tenant.
    #[must_use]
    pub fn tenant_folder(&self, name: &str) -> PathBuf {
        self.runtime_dir.join(TENANTS_FOLDER).join(name)
    }
}

impl Validate for KubernetesFile {
    fn validate(&self, problems: &mut Problems) {
        for (key, path) in [
            ("runtime_dir", &self.runtime_dir),
            ("plugin_dir", &self.plugin_dir),
            ("pod_resources", &self.pod_resources),
            ("cdi_dir", &self.cdi_dir),
            ("library_dir", &self.library_dir),
        ] {
            if !path.is_absolute() {
                problems.add(key, format!("must be an absolute path, not {:?}", path.display()));
            }
        }
        self.preload.iter().for_each(|library| problems.name("preload", library));
        problems.within("timeout", &self.timeout, &limits::SCHEDULER_TIMEOUT);
        problems.within("look_every", &self.look_every, &limits::SCHEDULER_LOOK);
        if self.tenant.is_empty() {
            problems.add("tenant", "there is no [tenant.NAME]: pods could ask for nothing");
        }
        for (name, kind) in &self.tenant {
            let key = format!("tenant.{name}");
            problems.name(&key, name);
            if name.len() > KIND_BYTES_MAX {
                problems
                    .add(&key, format!("a name has at most {KIND_BYTES_MAX} bytes, since devices have it in theirs"));
            }
            problems.within(format!("{key}.slots"), &kind.slots, &SLOTS);
            kind.terms.validate_at(&format!("{key}.terms"), problems);
        }
        let slots: u32 = self.tenant.values().map(|kind| kind.slots.min(SLOTS.max)).fold(0, u32::saturating_add);
        if self.tenant.len() > 1 {
            problems.within("tenant", &slots, &SLOTS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_reads_back() {
        let text = include_str!("../examples/kubernetes.toml");
        let file = KubernetesFile::parse(text, "kubernetes.toml").expect("right");
        assert_eq!(KubernetesFile::parse(&file.to_toml(), "kubernetes.toml").expect("right"), file);
        assert_eq!((file.tenant["training"].slots, file.tenant["training"].terms.weight), (8, Some(2)));
        let empty: toml::Table = toml::from_str(&KubernetesFile::default().to_toml()).unwrap();
        let said: toml::Table = toml::from_str(text).unwrap();
        assert!(empty.keys().all(|key| said.contains_key(key)), "the example says every key");
    }

    #[test]
    fn mistakes_have_a_reason() {
        for (text, says) in [
            ("look_every = \"1s\"\n", "there is no [tenant.NAME]"),
            ("plugin_dir = \"a\"\n[tenant.a]\n", "1:1: plugin_dir: must be an absolute path"),
            ("[tenant.a]\nslots = 0\n", "2:1: tenant.a.slots: must be from 1 to 1024"),
            ("[tenant.a]\nslots = 1000\n[tenant.b]\nslots = 25\n", "must be from 1 to 1024, not 1025"),
            ("[tenant.a.terms]\nweight = 101\n", "tenant.a.terms.weight: must be from 1 to 100"),
            ("[tenant.\"a b\"]\n", "a name has"),
            ("[tenant.a]\nslot = 1\n", "did you mean `slots`?"),
            ("preload = \"../x.so\"\n[tenant.a]\n", "a name has"),
            ("look_every = \"0s\"\n[tenant.a]\n", "look_every"),
        ] {
            let why = KubernetesFile::parse(text, "kubernetes.toml").expect_err(text).to_string();
            assert!(why.contains(says), "{text}: {why}");
        }
        let long = format!("[tenant.{}]\n", "x".repeat(41));
        assert!(KubernetesFile::parse(&long, "kubernetes.toml").expect_err("long").to_string().contains("40 bytes"));
    }
}
