//! Slots of tenants: which container has which, and the tenants of the service that follow from that.
//!
//! ```text
//! free --PreStartContainer: pods name its container--> a tenant is added --no pod names it any more--> taken away
//! ```
//!
//! kubelet alone knows who has a slot, and says when a container starts, never when it has ended: that is looked at. Both are done
//! under one lock, so that no look from before takes a tenant away that has just been added.
//!
//! A kubelet that has just started knows no pod, and hears of them one after the other once the API server answers. Its answer says who
//! has a slot; that somebody has none, only once it has [settled](Settling).

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use mccs_config::KubernetesFile;
use mccs_config::service::TenantConfig;
use mccs_control::tenants::{self, Removed, TenantError};
use mccs_control::{ControlAnswer, ControlRequest, call};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use crate::kubelet;

/// Prefix of names of tenants of pods.
const PREFIX: &str = "k8s-";
/// The label that only such tenants have: others of the same beginning are somebody else's.
const OWN_LABEL: &str = "pod";

/// Kinds of tenants and numbers of slots.
pub fn slots(file: &KubernetesFile) -> impl Iterator<Item = (&str, u32)> {
    file.tenant.iter().flat_map(|(kind, of)| (0..of.slots).map(move |slot| (kind.as_str(), slot)))
}

/// Kubelet's name for a slot.
#[must_use]
pub fn id(kind: &str, slot: u32) -> String {
    format!("{kind}-{slot}")
}

/// Resource that pods ask for.
#[must_use]
pub fn resource(kind: &str) -> String {
    format!("mccs.io/tenant-{kind}")
}

/// The tenant of a slot.
#[must_use]
pub fn tenant_name(kind: &str, slot: u32) -> String {
    format!("{PREFIX}{}", id(kind, slot))
}

/// Holder of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Namespace of the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// Its container.
    pub container: String,
}

/// A kubelet that has named a pod that has a slot, which it knows from the API server alone.
struct Settling {
    /// Its socket: another start of kubelet has another one.
    socket: SocketId,
    /// When it has named the first.
    since: Instant,
}

/// Looks after which such a kubelet has named all.
const LOOKS_TO_SETTLE: u32 = 15;

/// Device, number and time of a socket's file: the number may be had again, at another time.
type SocketId = [u64; 4];

fn socket_id(path: &Path) -> Option<SocketId> {
    let of = path.metadata().ok()?;
    Some([of.dev(), of.ino(), of.ctime() as u64, of.ctime_nsec() as u64])
}

/// See the module's documentation.
pub struct Slots {
    file: KubernetesFile,
    /// Held while kubelet is asked and the service does what follows.
    asking: Mutex<Option<Settling>>,
}

impl Slots {
    /// The slots of a node.
    #[must_use]
    pub fn new(file: KubernetesFile) -> Self {
        Slots { file, asking: Mutex::default() }
    }

    /// The operator's file.
    #[must_use]
    pub fn file(&self) -> &KubernetesFile {
        &self.file
    }

    /// Holders of tenants, as kubelet says.
    async fn holders(&self, asking: &mut Option<Settling>) -> anyhow::Result<BTreeMap<String, Holder>> {
        let asked = socket_id(&self.file.pod_resources);
        let pods = kubelet::pods(&self.file.pod_resources).await?;
        let mut holders = BTreeMap::new();
        for pod in pods {
            for container in &pod.containers {
                for (kind, device) in self.own_devices(container) {
                    let holder = Holder {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        container: container.name.clone(),
                    };
                    holders.insert(tenant_name(kind, device), holder);
                }
            }
        }
        // Which of two has answered is not known.
        let socket = asked.filter(|_| asked == socket_id(&self.file.pod_resources));
        if asking.as_ref().map(|settling| settling.socket) != socket {
            *asking = None;
        }
        if asking.is_none() && !holders.is_empty() {
            *asking = socket.map(|socket| Settling { socket, since: Instant::now() });
        }
        Ok(holders)
    }

    /// Slots among a container's devices.
    fn own_devices<'a>(
        &'a self,
        container: &'a crate::api::ContainerResources,
    ) -> impl Iterator<Item = (&'a str, u32)> + 'a {
        container.devices.iter().flat_map(move |devices| {
            let kind = self.file.tenant.keys().find(|kind| resource(kind) == devices.resource_name);
            kind.into_iter().flat_map(move |kind| {
                devices.device_ids.iter().filter_map(move |device| Some((kind.as_str(), self.slot_of(kind, device)?)))
            })
        })
    }

    /// The slot that kubelet calls so.
    #[must_use]
    pub fn slot_of(&self, kind: &str, device: &str) -> Option<u32> {
        let slot: u32 = device.strip_prefix(kind)?.strip_prefix('-')?.parse().ok()?;
        (slot < self.file.tenant.get(kind)?.slots && id(kind, slot) == device).then_some(slot)
    }

    /// A container that has a slot is about to start.
    ///
    /// # Errors
    /// No pod has the slot, or the service does not have the tenant. The container does not start then.
    pub async fn start(&self, kind: &str, slot: u32) -> anyhow::Result<()> {
        let mut asking = self.asking.lock().await;
        let name = tenant_name(kind, slot);
        let holder = self.holders(&mut asking).await?.remove(&name);
        let holder = holder.with_context(|| format!("kubelet names no pod that has {}", id(kind, slot)))?;
        let tenant = self.tenant(kind, name, &holder)?;
        let (control, timeout) = (self.file.control_socket(), self.file.timeout.0);
        let added = tenant.clone();
        spawn_blocking(move || add(&control, &added, timeout))
            .await?
            .context("the service does not have the tenant")?;
        tracing::info!(tenant = tenant.name, ?holder, "a container has a tenant");
        Ok(())
    }

    fn tenant(&self, kind: &str, name: String, holder: &Holder) -> anyhow::Result<TenantConfig> {
        let Some(of) = self.file.tenant.get(kind) else { bail!("there is no [tenant.{kind}]") };
        let Holder { namespace, pod, container } = holder.clone();
        let labels = [("namespace", namespace), (OWN_LABEL, pod.clone()), ("container", container), ("job", pod)];
        let tenant = of.terms.tenant_called(name);
        Ok(TenantConfig {
            rules: tenant.rules.or(Some(kind.to_owned())),
            labels: labels.into_iter().map(|(label, value)| (label.to_owned(), value)).collect(),
            ..tenant
        })
    }

    /// Takes tenants away whose pods have ended. Returns whether the service answers.
    ///
    /// # Errors
    /// kubelet does not answer: nothing is taken away then.
    pub async fn sweep(&self) -> anyhow::Result<bool> {
        let mut asking = self.asking.lock().await;
        let control = self.file.control_socket();
        let listed = {
            let control = control.clone();
            spawn_blocking(move || own_tenants(&control)).await?
        };
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                tracing::warn!(%error, "the service does not answer");
                return Ok(false);
            }
        };
        if listed.is_empty() {
            return Ok(true);
        }
        let holders = self.holders(&mut asking).await?;
        let settles_within = LOOKS_TO_SETTLE * self.file.look_every.0;
        if asking.as_ref().is_none_or(|settling| settling.since.elapsed() < settles_within) {
            return Ok(true);
        }
        for name in listed.into_iter().filter(|name| !holders.contains_key(name)) {
            let (control, gone) = (control.clone(), name.clone());
            // Containers that start do not wait for those that end: what is left of a tenant goes by itself.
            match spawn_blocking(move || tenants::remove(&control, &gone, Duration::ZERO)).await? {
                Ok(Removed::Gone | Removed::Unknown) => {
                    tracing::info!(tenant = name, "nothing is left of a pod's tenant")
                }
                Ok(Removed::Leaving(row)) => {
                    tracing::info!(tenant = name, ?row, "a pod's tenant is ending")
                }
                Err(error) => {
                    tracing::warn!(tenant = name, %error, "the tenant of a pod that has ended is still there")
                }
            }
        }
        Ok(true)
    }
}

/// Adds a tenant. One of another pod, which has had the slot before, is taken away first: nobody inherits anything.
fn add(control: &Path, tenant: &TenantConfig, timeout: Duration) -> Result<PathBuf, TenantError> {
    match tenants::add(control, tenant, timeout) {
        Err(TenantError::Refused(_)) => {
            tenants::remove(control, &tenant.name, timeout)?;
            tenants::add(control, tenant, timeout)
        }
        added => added,
    }
}

/// Tenants of pods that the service has, and that are not being taken away.
fn own_tenants(control: &Path) -> Result<Vec<String>, TenantError> {
    match call(control, &ControlRequest::Tenants)? {
        ControlAnswer::Tenants(rows) => Ok(rows
            .into_iter()
            .filter(|row| row.added.is_some() && !row.leaving)
            .filter(|row| row.tenant.starts_with(PREFIX) && row.labels.contains_key(OWN_LABEL))
            .map(|row| row.tenant)
            .collect()),
        answer => Err(TenantError::Answer(format!("{answer:?}"))),
    }
}
