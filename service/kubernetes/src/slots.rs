//! Slots of tenants: which container has which, and the tenants of the service that follow from that.
//!
//! ```text
//! free --PreStartContainer: pods name its container--> a tenant is added --no pod names it any more--> taken away
//!                                                      or another pod is given the slot (Allocate)
//! ```
//!
//! Names alone do not tell pods apart: a StatefulSet's next pod has the name of the one before. kubelet gives a slot to a pod once, before
//! its containers start, and again only when that pod has ended. A slot that has been given begins anew.
//!
//! kubelet alone knows who has a slot, and says when a container starts, never when it has ended: that is looked at. Both are done
//! under one lock, so that no look from before takes a tenant away that has just been added.
//!
//! A kubelet that has just started knows no pod, and hears of them one after the other once the API server answers. Its answer says who
//! has a slot; that somebody has none, only once it has [settled](Settling).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
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

/// Tenants of slots that have been given away, shared with calls of the service: those go on when kubelet waits for them no more.
#[derive(Clone, Default)]
struct Gifts(Arc<std::sync::Mutex<BTreeSet<String>>>);

impl Gifts {
    fn all(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module's documentation.
pub struct Slots {
    file: KubernetesFile,
    /// Held while kubelet is asked and the service does what follows.
    asking: Mutex<Option<Settling>>,
    /// Tenants of slots that kubelet has given to a pod, of which no container has started: a tenant of that name is a former pod's.
    given: Gifts,
}

impl Slots {
    /// The slots of a node.
    #[must_use]
    pub fn new(file: KubernetesFile) -> Self {
        Slots { file, asking: Mutex::default(), given: Gifts::default() }
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

    /// kubelet gives a slot to a pod: nothing of the slot's tenant is that pod's.
    pub fn give(&self, kind: &str, slot: u32) {
        self.given.all().insert(tenant_name(kind, slot));
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
        let (added, given) = (tenant.clone(), self.given.clone());
        let adding = move || {
            // Taken first: a gift that comes meanwhile is the next pod's.
            let begins_anew = given.all().remove(&added.name);
            let done = add(&control, &added, begins_anew, timeout);
            if begins_anew && done.is_err() {
                given.all().insert(added.name);
            }
            done
        };
        spawn_blocking(adding).await?.context("the service does not have the tenant")?;
        tracing::info!(tenant = tenant.name, ?holder, "a container has a tenant");
        Ok(())
    }

    fn tenant(&self, kind: &str, name: String, holder: &Holder) -> anyhow::Result<TenantConfig> {
        let Some(of) = self.file.tenant.get(kind) else { bail!("there is no [tenant.{kind}]") };
        let Holder { namespace, pod, container } = holder.clone();
        let job = job_of(&pod).to_owned();
        let labels = [("namespace", namespace), (OWN_LABEL, pod), ("container", container), ("job", job)];
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
        let is_settled = asking.as_ref().is_some_and(|settling| settling.since.elapsed() >= settles_within);
        let given = self.given.all().clone();
        let has_ended = |name: &String| given.contains(name) || (is_settled && !holders.contains_key(name));
        for name in listed.into_iter().filter(has_ended) {
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

/// The job of a pod, by its name. An Indexed Job's pods are named `JOB-INDEX-RANDOM`, and are one job; any other pod is its own.
fn job_of(pod: &str) -> &str {
    /// Letters and digits of random parts of names.
    const RANDOM: &str = "bcdfghjklmnpqrstvwxz2456789";
    const RANDOM_CHARS: usize = 5;
    /// Digits of the greatest index, 99,999. Longer numbers are times, which CronJobs have in names.
    const INDEX_DIGITS_MAX: usize = 5;
    let mut parts = pod.rsplitn(3, '-');
    let (Some(random), Some(index), Some(job)) = (parts.next(), parts.next(), parts.next()) else { return pod };
    let is_random = random.len() == RANDOM_CHARS && random.chars().all(|c| RANDOM.contains(c));
    let is_index = (1..=INDEX_DIGITS_MAX).contains(&index.len())
        && index.bytes().all(|digit| digit.is_ascii_digit())
        && (index == "0" || !index.starts_with('0'));
    if is_random && is_index && !job.is_empty() { job } else { pod }
}

/// Adds a tenant. One of another pod, which has had the slot before, is taken away first: nobody inherits anything.
fn add(control: &Path, tenant: &TenantConfig, begins_anew: bool, timeout: Duration) -> Result<PathBuf, TenantError> {
    if begins_anew {
        tenants::remove(control, &tenant.name, timeout)?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_an_indexed_job_are_one_job() {
        for (pod, job) in [
            ("train-0-x7k2p", "train"),
            ("train-99999-bbbbb", "train"),
            ("llm-70b-12-zz245", "llm-70b"),
            ("set-workers-0-3-9tq4w", "set-workers-0"),
            // Pods of their own, of a StatefulSet, a Deployment, a CronJob, and a Job without indexes.
            ("llm-0", "llm-0"),
            ("web-7d4b9c6f5-x7k2p", "web-7d4b9c6f5-x7k2p"),
            ("nightly-28374920-x7k2p", "nightly-28374920-x7k2p"),
            ("train-x7k2p", "train-x7k2p"),
            // No index, and no random part: it has no vowels, and five characters.
            ("train-007-x7k2p", "train-007-x7k2p"),
            ("train-3-model", "train-3-model"),
            ("train-3-x7k2", "train-3-x7k2"),
            ("-3-x7k2p", "-3-x7k2p"),
            ("", ""),
        ] {
            assert_eq!(job_of(pod), job, "{pod}");
        }
    }
}
