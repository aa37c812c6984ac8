//! Kubernetes device plugin: a container that asks for `mccs.io/tenant-NAME: 1` gets a tenant of its own, with socket and library.
//!
//! ```text
//! kubelet --Allocate--> the slot as a CDI device: the runtime mounts folder and library, sets variables
//!         --PreStartContainer--> which pod has the slot? (pod resources) --> the service has the tenant
//! every look: tenants whose pods kubelet does not name any more are taken away; the service's health; kubelet's restart
//! ```
//!
//! The most important: [`slots::Slots`], which container has which tenant; [`run`], the plugin.

pub mod api;
pub mod cdi;
pub mod kubelet;
pub mod plugin;
pub mod slots;

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_config::KubernetesFile;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::plugin::Listening;
use crate::slots::Slots;

/// Serves kubelet until the future is dropped. A missing part (kubelet, the service) is waited for, and told in the log.
///
/// # Errors
/// The CDI specification cannot be written, which no waiting mends.
pub async fn run(file: KubernetesFile) -> anyhow::Result<()> {
    cdi::write(&file)?;
    let (kinds, look_every) = (file.tenant.keys().cloned().collect::<Vec<_>>(), file.look_every.0);
    let slots = Arc::new(Slots::new(file));
    // No container is sent here before the service has answered.
    let (served, is_served) = watch::channel(false);
    let mut listening: BTreeMap<String, Listening> = BTreeMap::new();
    let mut looks = tokio::time::interval(look_every);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        match slots.sweep().await {
            Ok(answers) => {
                served.send_if_modified(|before| std::mem::replace(before, answers) != answers);
            }
            Err(error) => tracing::warn!("which pods have ended is not known: {error:#}"),
        }
        listening.retain(|_, plugin| plugin.is_in_place());
        for kind in &kinds {
            if listening.contains_key(kind) {
                continue;
            }
            match begin(&slots, kind, is_served.clone()).await {
                Ok(plugin) => {
                    tracing::info!(resource = slots::resource(kind), "kubelet knows the plugin");
                    listening.insert(kind.clone(), plugin);
                }
                Err(error) => {
                    tracing::warn!(resource = slots::resource(kind), "kubelet does not know the plugin: {error:#}")
                }
            }
        }
    }
}

async fn begin(slots: &Arc<Slots>, kind: &str, is_served: watch::Receiver<bool>) -> anyhow::Result<Listening> {
    let plugin = Listening::start(slots, kind, is_served).await?;
    plugin.register().await?;
    Ok(plugin)
}
