//! Hand-over of the running service to another program, beside which it goes on until that one has all it needs.
//!
//! ```text
//! started --Ready--> checked --Started--> beside --stands still, state--> taken --Commit--> this process ends
//!    any step fails or is late: the other program is ended, this one goes on, and the operator hears why
//! ```
//!
//! Until `Commit` is sent the sessions are this program's, and from then on the other's: nothing is ever both.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_config::ServiceConfig;
use mccs_control::{ControlAnswer, UpgradeView};
use mccs_engines::control::{UpgradeDesk, UpgradeRequest};
use mccs_handover::{Handover, Link, LinkError, NotStill, STATE_VERSION, State, ToNext, ToPrevious, WithDescriptors};
use mccs_ipc::loan;
use mccs_ipc::protocol::VERSION;
use mccs_ipc::time_slice::{SHORT, ThreadSlice};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::service::{Received, Service, Settings, obstacle};

/// The option by which a program takes over.
pub const TAKE_OVER: &str = "--take-over";

/// How long another program may take to read its configuration, or a message to be sent.
const STARTS_WITHIN: Duration = Duration::from_secs(10);
/// How long it may take to make its engines, with contexts on GPUs and NICs.
const BEGINS_WITHIN: Duration = Duration::from_secs(30);
/// How long operations that run, and answers that are missing, may take to end. Nobody is served meanwhile.
const STILL_WITHIN: Duration = Duration::from_secs(2);
/// How long another program may take to take the state. Nobody is served meanwhile.
const TAKES_WITHIN: Duration = Duration::from_secs(5);
/// Why there is nothing to hand over.
const ENDS: &str = "the service is ending";

/// The service that hands over, unless it has not begun, has ended or is about to.
#[derive(Clone)]
pub struct Upgrades {
    service: Arc<Mutex<Option<Service>>>,
    ends: Arc<AtomicBool>,
    /// The program that runs, where it is on disk.
    own: PathBuf,
    /// The configuration, if there is a file.
    config: Option<PathBuf>,
    /// Variables that this process has set for itself.
    own_variables: Vec<&'static str>,
}

/// Another program, ended with the value unless it has become the service.
struct Next {
    process: Child,
    link: Link,
    version: String,
}

impl Drop for Next {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Upgrades {
    /// Upgrades of a service that is still to [come](Upgrades::put), with its configuration. `own_variables` of the environment are not the
    /// next program's.
    ///
    /// # Errors
    /// The kernel does not say which program this is.
    pub fn new(config: Option<PathBuf>, own_variables: Vec<&'static str>) -> std::io::Result<Self> {
        let running = std::env::current_exe()?;
        let is_running = |called: &PathBuf| called.is_absolute() && called.canonicalize().is_ok_and(|it| it == running);
        // As it was called, which may be a link to whichever version is there.
        let called = std::env::args_os().next().map(PathBuf::from).filter(is_running);
        let (service, ends, own) = (Arc::default(), Arc::default(), called.unwrap_or(running));
        Ok(Upgrades { service, ends, own, config, own_variables })
    }

    /// The service runs.
    pub fn put(&self, service: Service) {
        *self.service() = Some(service);
    }

    fn service(&self) -> MutexGuard<'_, Option<Service>> {
        self.service.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the service, unless another program is it by then; that one ends, too, then.
    pub fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
        drop(self.service().take());
    }

    /// Serves operators' wishes, on a thread of its own. `tell_manager` hears which process is the service.
    ///
    /// # Errors
    /// The kernel refuses a thread.
    pub fn serve(&self, requests: Receiver<UpgradeRequest>, tell_manager: fn(u32)) -> std::io::Result<()> {
        let own = self.clone();
        let serve = move || {
            // Nobody is served while it waits for a core.
            ThreadSlice::of_this_thread().ask(Some(SHORT));
            for request in requests {
                let reason = own.upgrade(&request, tell_manager);
                tracing::warn!(by = request.by, reason, "the service is not handed over, and goes on");
                request.answer(&ControlAnswer::Refused(reason));
            }
        };
        std::thread::Builder::new().name("mccs-upgrade".into()).spawn(serve).map(drop)
    }

    /// Hands the service over, and ends this process. Returns why not.
    fn upgrade(&self, request: &UpgradeRequest, tell_manager: fn(u32)) -> String {
        let started = self.check(request).and_then(|binary| {
            tracing::info!(by = request.by, binary = %binary.display(), "an upgrade begins");
            self.start(&binary)
        });
        let mut next = match started {
            Ok(next) => next,
            Err(reason) => return reason,
        };
        // Nobody ends the service from here on before it is decided whose it is.
        let guard = self.service();
        let Some(service) = guard.as_ref() else { return ENDS.into() };
        if let Err(reason) = self.begin(service, &next) {
            service.move_again();
            return reason;
        }
        let began = Instant::now();
        let handed = self.hand_over(service, &mut next, request.ends_sessions);
        let HandedOver { sessions, ended, communicators } = match handed {
            Ok(handed) => handed,
            Err(reason) => {
                service.move_again();
                return reason;
            }
        };
        let pid = next.process.id();
        let (version, gap_us) = (next.version.clone(), began.elapsed().as_micros() as u64);
        tell_manager(pid);
        tracing::info!(pid, version, sessions, ended, communicators, gap_us, "another process is the service");
        request.answer(&ControlAnswer::Upgraded(UpgradeView { pid, version, sessions, ended, communicators, gap_us }));
        // Pages that nobody gives back stay with the tenants that have them mapped.
        service.give_memory_back();
        if self.ends.load(Ordering::SeqCst) {
            // Whoever has ended this process meant the service.
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
        }
        // Without the end of anything else: sockets and memory are the other's.
        // SAFETY: ends the process at once.
        unsafe { nix::libc::_exit(0) }
    }

    /// Whether the service can be handed over, as far as that is known while it runs; and the program that is to go on.
    fn check(&self, request: &UpgradeRequest) -> Result<PathBuf, String> {
        let guard = self.service();
        let service = guard.as_ref().ok_or(ENDS)?;
        if let Some(obstacle) = obstacle() {
            return Err(obstacle.into());
        }
        let obstacles = service.ask(STILL_WITHIN).map_err(|error| error.to_string())?;
        if !request.ends_sessions && !obstacles.0.is_empty() {
            return Err(cannot(NotStill::Sessions(obstacles)));
        }
        let permitted = self.config.as_deref().map(ServiceConfig::binary_in).transpose();
        program(permitted.map_err(|error| error.to_string())?.flatten(), request.binary.as_deref(), &self.own)
    }

    /// Starts another program, which reads its configuration.
    fn start(&self, binary: &PathBuf) -> Result<Next, String> {
        let named = binary.display();
        let (link, other) = Link::pair().map_err(|error| error.to_string())?;
        let mut command = Command::new(binary);
        command.args(arguments(std::env::args_os().skip(1))).arg(TAKE_OVER).stdin(Stdio::from(other));
        for name in &self.own_variables {
            command.env_remove(name);
        }
        let process = command.spawn().map_err(|error| format!("{named} cannot be started: {error}"))?;
        // The other end is the other program's alone, so that its end is heard.
        drop(command);
        let mut next = Next { process, link, version: String::new() };
        let heard = next.hear(STARTS_WITHIN).map_err(|why| format!("{named}: {why}"))?;
        match heard {
            ToPrevious::Ready { state_version: STATE_VERSION, session_version: VERSION, version } => {
                next.version = version;
            }
            ToPrevious::Ready { state_version, session_version, version } => {
                return Err(format!(
                    "{named} is version {version}, which takes state of version {state_version} and session protocol \
                     {session_version}; this service has {STATE_VERSION} and {VERSION}"
                ));
            }
            other => return Err(format!("{named} answers {other:?}")),
        }
        Ok(next)
    }

    /// Has the other program listen beside this one.
    fn begin(&self, service: &Service, next: &Next) -> Result<(), String> {
        let (listening, added) = (service.listening(), service.freeze_tenants().map_err(|error| error.to_string())?);
        let all = || listening.sockets.iter().chain(&added);
        let paths: Vec<_> = all().map(|(path, _)| path.as_path()).collect();
        let sockets = all().flat_map(|(_, own)| own);
        let descriptors: Vec<_> =
            sockets.chain(&listening.metrics).chain(&listening.exchange).map(|fd| fd.as_fd()).collect();
        let others = [listening.metrics.is_some(), listening.exchange.is_some()];
        let begun = next.link.send_begin(&paths, &descriptors, others, STARTS_WITHIN);
        begun.map_err(|error| next.broken(&error))?;
        match next.hear(BEGINS_WITHIN)? {
            ToPrevious::Started => Ok(()),
            other => Err(format!("the new program answers {other:?}")),
        }
    }

    /// Stands still, and hands the state over. Returns what has become of it.
    fn hand_over(&self, service: &Service, next: &mut Next, ends_sessions: bool) -> Result<HandedOver, String> {
        let WithDescriptors { state, descriptors } =
            service.stand_still(STILL_WITHIN, ends_sessions).map_err(cannot)?;
        let bytes = state.encode().map_err(|error| error.to_string())?;
        let sent = next.link.send_state(&bytes, &descriptors, ends_sessions, TAKES_WITHIN);
        sent.map_err(|error| next.broken(&error))?;
        let handed = match next.hear(TAKES_WITHIN)? {
            ToPrevious::Taken { sessions, ended, communicators } => HandedOver { sessions, ended, communicators },
            other => return Err(format!("the new program answers {other:?}")),
        };
        if self.ends.load(Ordering::SeqCst) {
            return Err(ENDS.into());
        }
        next.link.send(&ToNext::Commit, &[], TAKES_WITHIN).map_err(|error| next.broken(&error))?;
        Ok(handed)
    }
}

/// The fate of sessions and communicators.
struct HandedOver {
    sessions: u64,
    ended: u64,
    communicators: u64,
}

/// Why a service that does not stand still is not handed over, and what helps.
fn cannot(error: NotStill) -> String {
    match error {
        NotStill::Sessions(_) => format!("{error}; mccsctl upgrade --force ends them"),
        error => error.to_string(),
    }
}

/// The program that goes on: the one that runs, unless service.toml permits another. `named`: by the operator.
fn program(permitted: Option<PathBuf>, named: Option<&Path>, own: &Path) -> Result<PathBuf, String> {
    let there = |path: &Path| path.canonicalize().map_err(|error| format!("{}: {error}", path.display()));
    match (permitted, named) {
        (None, None) => Ok(own.to_owned()),
        (None, Some(_)) => {
            Err("service.toml permits no program but the one that runs: name it, or its folder, as service.binary"
                .into())
        }
        (Some(folder), None) if folder.is_dir() => Ok(own.to_owned()),
        (Some(folder), Some(named)) if folder.is_dir() => {
            let (binary, folder) = (there(&folder.join(named))?, there(&folder)?);
            let outside = || format!("{} is not in {}, which is service.binary", binary.display(), folder.display());
            if binary.starts_with(&folder) { Ok(binary) } else { Err(outside()) }
        }
        (Some(binary), None) => Ok(binary),
        (Some(binary), Some(named)) if there(&binary)? == there(named)? => Ok(binary),
        (Some(binary), Some(_)) => Err(format!("service.toml permits {} alone: service.binary", binary.display())),
    }
}

/// Arguments of the next program: as this one's.
fn arguments(own: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    own.filter(|argument| argument != TAKE_OVER)
}

impl Next {
    /// The other program's next message; an error if it refuses.
    fn hear(&self, within: Duration) -> Result<ToPrevious, String> {
        match self.link.receive::<ToPrevious>(Some(within)) {
            Ok((ToPrevious::Refused { reason }, _)) => Err(format!("the new program refuses: {reason}")),
            Ok((said, _)) => Ok(said),
            Err(error) => Err(self.broken(&error)),
        }
    }

    fn broken(&self, error: &LinkError) -> String {
        format!("the new program, process {}, has ended, hangs, or is no mccs-service: {error}", self.process.id())
    }
}

/// The program that takes over: until it has, whatever fails is told the running one, and harms nothing.
pub struct TakingOver {
    link: Arc<Link>,
}

impl TakingOver {
    /// By the end of the connection that is standard input.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> std::io::Result<Self> {
        loan::begin();
        let link = Arc::new(Link::over(std::io::stdin().as_fd().try_clone_to_owned()?));
        let nothing = std::fs::File::open("/dev/null")?;
        nix::unistd::dup2_stdin(nothing)?;
        Ok(TakingOver { link })
    }

    /// Tells the running program why this one cannot go on.
    pub fn refuse(&self, reason: &str) {
        // A program that does not listen any more hears of this process' end.
        let _ = self.link.send(&ToPrevious::refusal(reason), &[], STARTS_WITHIN);
    }

    /// Starts a service where the running one stands. Returns when it is at `upgrades` and runs, and the other has ended.
    ///
    /// # Errors
    /// Why not: the other one goes on.
    pub fn run(
        &self,
        settings: &Settings,
        desk: UpgradeDesk,
        version: &str,
        upgrades: &Upgrades,
    ) -> anyhow::Result<()> {
        let (state_version, session_version) = (STATE_VERSION, VERSION);
        let ready = ToPrevious::Ready { state_version, session_version, version: version.to_owned() };
        self.link.send(&ready, &[], STARTS_WITHIN)?;
        let (ToNext::Begin { bytes, has_metrics, has_exchange }, mut sockets) = self.link.receive(None)? else {
            anyhow::bail!("the running service says something else than where it listens");
        };
        let paths = Link::read_paths(&first_of(&mut sockets)?, bytes)?;
        let received = Received::new(paths, [has_metrics, has_exchange], sockets)?;
        let handover = Arc::new(Handover::standing_still());
        let mut service = Service::start_with(settings, received, Arc::clone(&handover), Some(desk))?;
        // Nobody is served while this thread waits for a core.
        let mut slice = ThreadSlice::of_this_thread();
        slice.ask(Some(SHORT));
        self.link.send(&ToPrevious::Started, &[], STARTS_WITHIN)?;
        let (ToNext::Take { bytes, ends_sessions }, mut descriptors) = self.link.receive(None)? else {
            anyhow::bail!("the running service says something else than its state");
        };
        let memory = first_of(&mut descriptors)?;
        let state = State::decode(&Link::read_state(&memory, bytes)?, descriptors.len())?;
        let resumed = service.take(state, descriptors, ends_sessions).map_err(anyhow::Error::msg)?;
        let (sessions, ended, communicators) = resumed.counts();
        let waits = self.wait_for_end_of_other(handover)?;
        // An operator's next wish waits until the service is there.
        let mut slot = upgrades.service();
        self.link.send(&ToPrevious::Taken { sessions, ended, communicators }, &[], TAKES_WITHIN)?;
        let (ToNext::Commit, _) = self.link.receive(None)? else {
            anyhow::bail!("the running service does not end");
        };
        // From here on nothing can fail.
        loan::end();
        // The thread waits for it.
        let _ = waits.send(service.go_on(resumed));
        slice.ask(None);
        *slot = Some(service);
        tracing::info!(sessions, ended, communicators, "adopted the sessions of the program before");
        Ok(())
    }
}

impl TakingOver {
    /// A thread that waits for the end of the other program. It drops what it is sent then, and says so.
    fn wait_for_end_of_other<T: Send + 'static>(&self, handover: Arc<Handover>) -> std::io::Result<Sender<T>> {
        let (link, (sender, receiver)) = (Arc::clone(&self.link), channel());
        let wait = move || {
            let Ok(kept) = receiver.recv() else { return };
            // It says nothing more before its end.
            let _ = link.receive::<ToNext>(None);
            drop(kept);
            handover.note_alone();
        };
        std::thread::Builder::new().name("mccs-before".into()).spawn(wait)?;
        Ok(sender)
    }
}

/// The memory that comes before a message's other descriptors.
fn first_of(descriptors: &mut Vec<OwnedFd>) -> anyhow::Result<OwnedFd> {
    anyhow::ensure!(!descriptors.is_empty(), "a message of the running service has no memory");
    Ok(descriptors.remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_one_that_runs_unless_the_operators_file_permits_another() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("versions")).expect("made");
        ["running", "outside", "versions/next"].iter().for_each(|name| std::fs::write(at(name), "").expect("a file"));
        std::os::unix::fs::symlink(at("outside"), at("versions/link")).expect("a link");
        let own = at("running");
        let chosen = |permitted: Option<&str>, named: Option<&Path>| program(permitted.map(at), named, &own);
        assert_eq!(chosen(None, None), Ok(own.clone()));
        assert_eq!(chosen(Some("outside"), None), Ok(at("outside")));
        assert_eq!(chosen(Some("outside"), Some(&at("outside"))), Ok(at("outside")));
        assert_eq!(chosen(Some("versions"), None), Ok(own.clone()));
        let next = at("versions/next").canonicalize().expect("there");
        assert_eq!(chosen(Some("versions"), Some(Path::new("next"))), Ok(next.clone()));
        assert_eq!(chosen(Some("versions"), Some(&at("versions/next"))), Ok(next));
        let refused = [
            (None, at("outside"), "permits no program but the one that runs"),
            (Some("outside"), at("running"), "permits"),
            (Some("versions"), at("outside"), "is not in"),
            (Some("versions"), "../outside".into(), "is not in"),
            (Some("versions"), "link".into(), "is not in"),
            (Some("versions"), "missing".into(), "No such file"),
        ];
        for (permitted, named, reason) in refused {
            let told = chosen(permitted, Some(&named)).expect_err("refused");
            assert!(told.contains(reason), "{named:?}: {told}");
        }
    }
}
