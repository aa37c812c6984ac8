//! Unix sockets of tenants and operators: created, owned and permitted. Part of the composition
//! root.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::Context as _;
use mccs_engines::session::{Admission, Proxies};
use mccs_ipc::handshake::Listener;
use mccs_tenants::Tenant;

use crate::settings::TenantSettings;

/// Tenants by socket, in the order of the file.
pub(crate) fn admissions<'a>(tenants: &'a [TenantSettings], proxies: &Proxies) -> Vec<(&'a Path, Vec<Admission>)> {
    let mut sockets: Vec<(&Path, Vec<Admission>)> = Vec::new();
    for settings in tenants {
        let classes = settings.traffic_classes.clone();
        let tenant = Tenant::configured(settings.name.clone(), settings.quota, settings.weight, classes);
        let queues = proxies.open_queues(tenant.share);
        let admission = Admission { tenant, uids: settings.uids.clone(), queues };
        match sockets.iter_mut().find(|(socket, _)| *socket == settings.socket) {
            Some((_, admissions)) => admissions.push(admission),
            None => sockets.push((&settings.socket, vec![admission])),
        }
    }
    sockets
}

/// Refuses a folder in which somebody else could put another socket in the place of ours.
fn check_owner(directory: &Path) -> anyhow::Result<()> {
    const STICKY: u32 = 0o1000;
    const WRITABLE_BY_ALL: u32 = 0o002;
    let metadata = std::fs::metadata(directory).with_context(|| format!("cannot look at {}", directory.display()))?;
    let (own, owner, directory) = (nix::unistd::geteuid().as_raw(), metadata.uid(), directory.display());
    anyhow::ensure!(
        owner == own || owner == 0,
        "{directory} belongs to user {owner}, who could put another socket there: remove it, or set service.runtime_dir to a folder of user {own}"
    );
    anyhow::ensure!(
        metadata.mode() & WRITABLE_BY_ALL == 0 || metadata.mode() & STICKY != 0,
        "every user may replace files in {directory}: take the permission away (chmod o-w), or set service.runtime_dir to another folder"
    );
    Ok(())
}

/// Listens on a path, whose directory is made if it is missing.
pub(crate) fn listen(path: &Path, mode: u32) -> anyhow::Result<Listener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        check_owner(directory)?;
    }
    let listener = Listener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    Ok(listener)
}
