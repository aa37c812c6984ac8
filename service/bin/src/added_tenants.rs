//! Tenants that operators add and take away while the service runs: one a job, as its scheduler asks. Part of the composition
//! root.
//!
//! ```text
//!        add: socket, then tenant.toml          remove: tenant.toml goes
//! (none) ------------------------------> there -------------------------> leaving ---nothing is left---> (none), the folder goes
//! ```
//!
//! Each has a folder with its socket and its `tenant.toml`, which another start of the service reads: a tenant is there again for a job
//! that goes on. A folder without the file is of one that was not added to the end, or was taken away. The folder of all is in the runtime
//! folder: with the host's end all jobs have ended, too.

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use mccs_config::limits::{SOCKET_PATH_BYTES_MAX, TENANTS};
use mccs_config::service::{TENANT_SOCKET, TenantConfig};
use mccs_config::validate::Problems;
use mccs_control::ControlAnswer;
use mccs_engines::control::TenantDesk;
use mccs_engines::session::{Acceptor, Admission, SessionFactory};
use mccs_registry::Registry;
use mccs_runtime::{Runtimes, WakerSlot};

use crate::settings::QuotaDefaults;
use crate::sockets::{CapsByRules, Received, SocketAndLock, admission, listen, socket_and_lock};

/// File of a tenant, in its folder.
const TENANT_FILE: &str = "tenant.toml";
/// Why nobody is added or taken away for a moment.
const BEING_HANDED_OVER: &str = "the service is being handed over to its next program: try again";

/// See the module's documentation.
pub(crate) struct AddedTenants {
    folder: PathBuf,
    /// Runtime of their acceptors.
    runtime: u32,
    factory: Arc<SessionFactory>,
    quota_defaults: QuotaDefaults,
    /// Tenants of the configuration.
    configured: usize,
    state: Arc<Mutex<State>>,
    /// Held while one is added or taken away: whether that may be.
    may_change: Mutex<bool>,
}

struct State {
    tenants: BTreeMap<String, Added>,
    caps: CapsByRules,
}

struct Added {
    config: TenantConfig,
    admission: Admission,
    /// Waker of its acceptor.
    waker: WakerSlot,
    /// Socket on which the service's next program goes on listening.
    listening: SocketAndLock,
}

impl AddedTenants {
    /// None yet. `caps` are those of the `configured` tenants.
    pub(crate) fn new(
        folder: PathBuf,
        runtime: u32,
        factory: Arc<SessionFactory>,
        quota_defaults: QuotaDefaults,
        configured: usize,
        caps: CapsByRules,
    ) -> Self {
        let state = Arc::new(Mutex::new(State { tenants: BTreeMap::new(), caps }));
        AddedTenants { folder, runtime, factory, quota_defaults, configured, state, may_change: Mutex::new(true) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Guard that keeps the service from being handed over while a tenant comes or goes; none while it is.
    fn may_change(&self) -> Option<MutexGuard<'_, bool>> {
        Some(lock(&self.may_change)).filter(|may_change| **may_change)
    }

    fn runtimes(&self) -> &Arc<Runtimes> {
        &self.factory.runtimes
    }

    fn registry(&self) -> &Arc<Registry> {
        &self.factory.registry
    }

    /// Those that another start of the service has left: they are there again, with the sockets of the program before, if that runs.
    pub(crate) fn load(&self, received: &mut Received) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        folders.sort();
        for folder in folders {
            if !folder.join(TENANT_FILE).exists() {
                forget_folder(&folder);
                continue;
            }
            let loaded = TenantConfig::load(&folder.join(TENANT_FILE)).map_err(anyhow::Error::from);
            let added = loaded.and_then(|config| {
                anyhow::ensure!(folder.ends_with(&config.name), "it is in a folder of another name");
                self.check(&config).map_err(anyhow::Error::msg)?;
                self.start(config, received)
            });
            if let Err(error) = added {
                let folder = folder.display();
                tracing::error!(%folder, "a tenant of the service before is not there any more: {error:#}");
            }
        }
    }

    /// Whether there can be a tenant like this; or why not.
    fn check(&self, config: &TenantConfig) -> Result<(), String> {
        if self.registry().tenant(&config.name).is_some() {
            return Err(format!("service.toml has a tenant {:?} already", config.name));
        }
        let most = TENANTS.max as usize;
        if self.configured + self.state().tenants.len() >= most {
            return Err(format!("there are {most} tenants, the most that there can be: {}", TENANTS.reason));
        }
        let (socket, most) = (self.socket(&config.name), SOCKET_PATH_BYTES_MAX);
        let bytes = socket.as_os_str().len();
        if bytes > most {
            let socket = socket.display();
            return Err(format!(
                "its socket's path {socket} has {bytes} bytes, and may have {most}: choose a shorter name"
            ));
        }
        Ok(())
    }

    /// Has it listen. Its folder is there then, without the file.
    fn start(&self, config: TenantConfig, received: &mut Received) -> anyhow::Result<()> {
        let (name, socket) = (config.name.clone(), self.socket(&config.name));
        make_folder(&self.folder)?;
        make_folder(&self.folder.join(&name))?;
        let listener = listen(&socket, 0o666, received)?;
        let listening = socket_and_lock(&listener).context("no descriptor is left for the socket")?;
        let settings = self.quota_defaults.tenant(&config, socket.clone());
        let admission = admission(&settings, &self.factory.proxies, &mut self.state().caps);
        self.runtimes().forget_work_of(admission.tenant.share.tenant);
        let waker = WakerSlot::default();
        let gone = {
            let (state, factory) = (Arc::clone(&self.state), Arc::clone(&self.factory));
            let (name, folder, waker) = (name.clone(), self.folder.join(&name), waker.clone());
            move || {
                factory.registry.remove_tenant(&name);
                factory.handover.forget_acceptor(&waker);
                forget_folder(&folder);
                lock(&state).tenants.remove(&name);
                tracing::info!(tenant = name, "nothing is left of a tenant that was taken away");
            }
        };
        let (factory, shown) = (Arc::clone(&self.factory), socket.display().to_string());
        let acceptor = Acceptor::new(listener, shown, vec![admission.clone()], factory).when_gone(gone);
        self.factory.handover.register_acceptor(waker.clone());
        self.registry().add_tenant(Arc::clone(&admission.tenant));
        let started = self.runtimes().start_engine(self.runtime, |own| {
            waker.set(own);
            Box::new(acceptor)
        });
        if let Err(error) = started {
            self.registry().remove_tenant(&name);
            self.factory.handover.forget_acceptor(&waker);
            return Err(error.into());
        }
        self.state().tenants.insert(name, Added { config, admission, waker, listening });
        Ok(())
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.folder.join(name).join(TENANT_SOCKET)
    }

    /// Tenants that may connect, by name.
    pub(crate) fn admissions(&self) -> BTreeMap<String, Admission> {
        self.state().tenants.iter().map(|(name, added)| (name.clone(), added.admission.clone())).collect()
    }

    /// From now on nobody is added or taken away, until [`AddedTenants::thaw`]. Returns what another program goes on listening with.
    pub(crate) fn freeze(&self) -> std::io::Result<Vec<SocketAndLock>> {
        *lock(&self.may_change) = false;
        let again =
            |(path, [socket, lock]): &SocketAndLock| Ok((path.clone(), [socket.try_clone()?, lock.try_clone()?]));
        self.state().tenants.values().map(|added| again(&added.listening)).collect()
    }

    /// No other program has taken over.
    pub(crate) fn thaw(&self) {
        *lock(&self.may_change) = true;
    }
}

impl TenantDesk for AddedTenants {
    fn add(&self, tenant: TenantConfig) -> ControlAnswer {
        let (name, socket) = (tenant.name.clone(), self.socket(&tenant.name));
        let tenant = TenantConfig { socket: socket.clone(), ..tenant };
        if let Err(error) = TenantConfig::parse(&tenant.to_toml(), "the tenant") {
            return ControlAnswer::Refused(error.to_string());
        }
        let Some(_changing) = self.may_change() else { return ControlAnswer::TryAgain(BEING_HANDED_OVER.into()) };
        let state = self.state();
        if let Some(there) = state.tenants.get(&name) {
            if there.admission.tenant.is_removed() {
                return ControlAnswer::TryAgain(format!("the tenant {name:?} before is still being taken away"));
            }
            // Whoever asks twice has what it asks for.
            let is_same = there.config == tenant;
            let other = || ControlAnswer::Refused(format!("there is another tenant {name:?}: take that away first"));
            return if is_same { ControlAnswer::TenantAdded { socket } } else { other() };
        }
        drop(state);
        if let Err(reason) = self.check(&tenant) {
            return ControlAnswer::Refused(reason);
        }
        // The file comes last: what is not whole is none to another start of the service.
        let text = tenant.to_toml();
        let added = self.start(tenant, &mut Received::default()).map(|()| write(&self.folder.join(&name), &text));
        match added {
            Ok(Ok(())) => ControlAnswer::TenantAdded { socket },
            Ok(Err(error)) => {
                self.take_away(&name);
                ControlAnswer::Refused(format!("{TENANT_FILE} cannot be written: {error}"))
            }
            Err(error) => {
                forget_folder(&self.folder.join(&name));
                ControlAnswer::Refused(format!("{error:#}"))
            }
        }
    }

    fn remove(&self, name: &str) -> ControlAnswer {
        let Some(_changing) = self.may_change() else { return ControlAnswer::TryAgain(BEING_HANDED_OVER.into()) };
        self.take_away(name)
    }

    fn socket_of(&self, name: &str) -> Option<PathBuf> {
        self.state().tenants.contains_key(name).then(|| self.socket(name))
    }
}

impl AddedTenants {
    /// One that this start of the service could not have again, and of which nothing but its folder is there: the next start is not to
    /// have it either.
    fn forget_unloaded(&self, name: &str) -> ControlAnswer {
        let mut problems = Problems::default();
        problems.name("name", name);
        let folder = self.folder.join(name);
        if problems.count() > 0 || !folder.is_dir() {
            return ControlAnswer::NoTenant;
        }
        forget_folder(&folder);
        ControlAnswer::Done
    }

    fn take_away(&self, name: &str) -> ControlAnswer {
        let state = self.state();
        let Some(added) = state.tenants.get(name) else { return self.forget_unloaded(name) };
        let tenant = Arc::clone(&added.admission.tenant);
        if !tenant.is_removed() {
            if let Err(error) = std::fs::remove_file(self.folder.join(name).join(TENANT_FILE)) {
                tracing::warn!(tenant = name, %error, "cannot remove {TENANT_FILE} of a tenant that is taken away");
            }
            tenant.remove();
        }
        added.waker.wake();
        drop(state);
        let sessions = self.registry().sessions();
        sessions.iter().filter(|session| Arc::ptr_eq(&session.tenant, &tenant)).for_each(|one| one.waker.wake());
        ControlAnswer::Done
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A folder that all users may enter, and nobody else may change.
fn make_folder(folder: &Path) -> anyhow::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o755).create(folder);
    let open = made.and_then(|()| std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)));
    open.with_context(|| format!("cannot make {}", folder.display()))
}

/// Writes the file of a tenant: all of it, or nothing.
fn write(folder: &Path, text: &str) -> std::io::Result<()> {
    let next = folder.join("tenant.toml.next");
    let mut options = std::fs::File::options();
    let mut file = options.create(true).write(true).truncate(true).mode(0o600).open(&next)?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    std::fs::rename(next, folder.join(TENANT_FILE))
}

fn forget_folder(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder) {
        tracing::warn!(folder = %folder.display(), %error, "cannot remove the folder of a tenant");
    }
}
