//! Unix sockets of tenants and operators: created, owned and permitted. Part of the composition
//! root.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use anyhow::Context as _;
use mccs_engines::session::{Admission, Proxies};
use mccs_ipc::handshake::Listener;
use mccs_tenants::{Caps, Tenant, Terms};

use crate::settings::TenantSettings;

/// Caps that tenants of the same rules share, by the rules' name, while there are some.
#[derive(Default)]
pub(crate) struct CapsByRules(BTreeMap<String, Weak<Caps>>);

impl CapsByRules {
    fn of(&mut self, rules: &str) -> Arc<Caps> {
        self.0.retain(|_, caps| caps.strong_count() > 0);
        self.0.get(rules).and_then(Weak::upgrade).unwrap_or_else(|| {
            let caps = Arc::default();
            self.0.insert(rules.to_owned(), Arc::downgrade(&caps));
            caps
        })
    }
}

/// A tenant that may connect.
pub(crate) fn admission(settings: &TenantSettings, proxies: &Proxies, caps: &mut CapsByRules) -> Admission {
    let terms = Terms {
        name: settings.name.clone(),
        rules: settings.rules.clone(),
        labels: settings.labels.clone(),
        weight: settings.weight,
        traffic_classes: settings.traffic_classes.clone(),
    };
    let tenant = Tenant::on_terms(terms, settings.quota, caps.of(&settings.rules));
    let queues = proxies.open_queues(tenant.share);
    Admission { tenant, uids: settings.uids.clone(), cgroup: settings.cgroup.clone(), queues }
}

/// Tenants by socket, in the order of the file.
pub(crate) fn admissions<'a>(
    tenants: &'a [TenantSettings],
    proxies: &Proxies,
    caps: &mut CapsByRules,
) -> Vec<(&'a Path, Vec<Admission>)> {
    let mut sockets: Vec<(&Path, Vec<Admission>)> = Vec::new();
    for settings in tenants {
        let admission = admission(settings, proxies, caps);
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

/// Sockets of the program before.
#[derive(Default)]
pub struct Received {
    sockets: BTreeMap<PathBuf, [OwnedFd; 2]>,
    metrics: Option<TcpListener>,
    exchange: Option<TcpListener>,
}

impl Received {
    /// Two descriptors for each path, and then metrics' and that for other hosts, if they come.
    ///
    /// # Errors
    /// There are more or fewer.
    pub fn new(
        paths: Vec<PathBuf>,
        [has_metrics, has_exchange]: [bool; 2],
        descriptors: Vec<OwnedFd>,
    ) -> anyhow::Result<Self> {
        let others = usize::from(has_metrics) + usize::from(has_exchange);
        let (count, needed) = (descriptors.len(), 2 * paths.len() + others);
        anyhow::ensure!(count == needed, "{needed} descriptors of sockets were announced, and {count} came");
        let mut descriptors = descriptors.into_iter().peekable();
        let mut sockets = BTreeMap::new();
        for path in paths {
            if let (Some(socket), Some(lock)) = (descriptors.next(), descriptors.next()) {
                sockets.insert(path, [socket, lock]);
            }
        }
        let mut next = |comes: bool| descriptors.next_if(|_| comes).map(TcpListener::from);
        let (metrics, exchange) = (next(has_metrics), next(has_exchange));
        Ok(Received { sockets, metrics, exchange })
    }

    /// That for other hosts, if it listens there.
    pub(crate) fn take_exchange(&mut self, at: SocketAddr) -> Option<TcpListener> {
        self.exchange.take_if(|listener| listener.local_addr().is_ok_and(|own| own == at))
    }

    /// Metrics' socket, if it listens there.
    pub(crate) fn take_metrics(&mut self, at: SocketAddr) -> Option<TcpListener> {
        let is_there = |own: SocketAddr| own.ip() == at.ip() && (own.port() == at.port() || at.port() == 0);
        self.metrics.take_if(|listener| listener.local_addr().is_ok_and(is_there))
    }
}

/// A socket and its lock, by path.
pub(crate) type SocketAndLock = (PathBuf, [OwnedFd; 2]);

/// Sockets on which another program goes on listening.
#[derive(Default)]
pub struct Listening {
    /// The sockets.
    pub sockets: Vec<SocketAndLock>,
    /// Metrics' socket.
    pub metrics: Option<OwnedFd>,
    /// That for other hosts.
    pub exchange: Option<OwnedFd>,
    /// Sockets of the program before that are none of this one's. Their paths go with them.
    pub(crate) retired: Vec<Listener>,
}

impl Listening {
    pub(crate) fn add(&mut self, listener: &Listener) -> anyhow::Result<()> {
        self.sockets.push(socket_and_lock(listener)?);
        Ok(())
    }

    /// Keeps what of the program before was not asked for.
    pub(crate) fn without(mut self, received: Received) -> Self {
        let rest = received.sockets.into_iter();
        self.retired = rest.filter_map(|(path, own)| Listener::receive(&path, own).ok()).collect();
        self
    }
}

/// Another reference to each.
pub(crate) fn socket_and_lock(listener: &Listener) -> std::io::Result<SocketAndLock> {
    let [socket, lock] = listener.descriptors().map(|fd| fd.try_clone_to_owned());
    Ok((listener.path().to_owned(), [socket?, lock?]))
}

/// Listens on a path, whose directory is made if it is missing; with the socket of the program before, if that has listened there.
pub(crate) fn listen(path: &Path, mode: u32, received: &mut Received) -> anyhow::Result<Listener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        check_owner(directory)?;
    }
    let listener = match received.sockets.remove(path) {
        Some(own) => Listener::receive(path, own)?,
        None => Listener::bind(path)?,
    };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    Ok(listener)
}
