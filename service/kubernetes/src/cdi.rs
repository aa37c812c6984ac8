//! CDI specification of all slots: what the container runtime adds to a container that has one.

use std::path::Path;

use anyhow::Context as _;
use mccs_config::KubernetesFile;
use mccs_config::service::TENANT_SOCKET;
use serde_json::{Value, json};

use crate::slots::slots;

/// Vendor and class of the devices.
pub const KIND: &str = "mccs.io/tenant";
/// The specification's file.
pub const FILE: &str = "mccs.io-tenant.json";
/// Folder of a container's tenant.
pub const IN_CONTAINER: &str = "/run/mccs";

/// The name by which a container is given a slot.
#[must_use]
pub fn device(slot: &str) -> String {
    format!("{KIND}={slot}")
}

/// The specification. A slot's folder is mounted, not its socket: a service that starts anew makes another one in it.
#[must_use]
pub fn specification(file: &KubernetesFile) -> Value {
    let library = |name: &String| file.library_dir.join(name).display().to_string();
    let mut env = vec![format!("MCCS_SOCKET={IN_CONTAINER}/{TENANT_SOCKET}")];
    env.extend(file.preload.iter().map(|name| format!("LD_PRELOAD={}", library(name))));
    let mount = |host: &Path, container: &Path| json!({"hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "bind"]});
    let one = |kind: &str, slot: u32| {
        let (id, tenant) = (crate::slots::id(kind, slot), crate::slots::tenant_name(kind, slot));
        let mounts =
            [mount(&file.tenant_folder(&tenant), Path::new(IN_CONTAINER)), mount(&file.library_dir, &file.library_dir)];
        json!({"name": id, "containerEdits": {"env": env, "mounts": mounts}})
    };
    let devices: Vec<Value> = slots(file).map(|(kind, slot)| one(kind, slot)).collect();
    json!({"cdiVersion": "0.5.0", "kind": KIND, "devices": devices})
}

/// Writes it where the container runtime looks: all of it, or nothing.
///
/// # Errors
/// The folder cannot be made or written.
pub fn write(file: &KubernetesFile) -> anyhow::Result<()> {
    let folder = &file.cdi_dir;
    let text = serde_json::to_string_pretty(&specification(file))?;
    // A name that the runtime does not take for a specification.
    let next = folder.join(format!(".{FILE}.next"));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&next, text))
        .and_then(|()| std::fs::rename(&next, folder.join(FILE)));
    written.with_context(|| format!("cannot write the CDI specification in {}", folder.display()))
}
