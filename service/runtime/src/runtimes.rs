//! Table of all runtimes and engines: started, moved, listed and ended. Its lock is for the control
//! path alone: runtimes' threads (`executor.rs`) are told by orders.

use std::collections::BTreeMap;
use std::os::unix::thread::JoinHandleExt as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use mccs_config::cpus::CpuChoice;
use mccs_ipc::sync::Doorbell;

use super::cpu_affinity::{self, NoCpu, NumaNodes};
use super::executor::{Adopted, Executor, Order, RuntimeStats};
use super::mailbox::{ENGINES_MAX, EngineState, NO_RUNTIME, RUNTIMES_MAX, RuntimeState, RuntimeTable, Waker};
use super::{Account, Engine, EngineId, Share};

/// How runtimes behave.
#[derive(Debug, Clone, Copy)]
pub struct RuntimeOptions {
    /// How long an engine is polled without finding work before it goes to sleep.
    pub spin: Duration,
    /// The same for one that awaits others ([`Engine::awaits_others`]). Both are nothing while others want the core, but for
    /// [`Duration::MAX`], which is for ever.
    pub spin_while_waiting: Duration,
    /// Items an engine may handle in one poll.
    pub budget: usize,
}

/// The operator's view of an engine.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EngineInfo {
    /// Its number.
    pub id: EngineId,
    /// Its name.
    pub name: String,
    /// The runtime it is on.
    pub runtime: u32,
    /// Milliseconds for which it had work, about: one round in some is timed.
    #[serde(default)]
    pub busy_ms: u64,
    /// Milliseconds of work for each tenant, by name, where it works for tenants; about, by kind and bytes of the work.
    #[serde(default)]
    pub tenants: BTreeMap<String, u64>,
    /// The same by number, in nanoseconds: whoever knows the names fills `tenants`.
    #[serde(skip)]
    pub work_ns: Vec<(u32, u64)>,
}

/// Milliseconds of work by engine and tenant. Engines that work for one tenant alone are its `sessions`.
pub fn work_by_tenant(engines: &[EngineInfo]) -> BTreeMap<(&str, &str), u64> {
    const SESSION: &str = "daemon session";
    let mut work = BTreeMap::new();
    for engine in engines {
        let name = if engine.name.starts_with(SESSION) { "sessions" } else { engine.name.as_str() };
        for (tenant, ms) in &engine.tenants {
            *work.entry((name, tenant.as_str())).or_default() += ms;
        }
    }
    work
}

/// The operator's view of a runtime.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RuntimeInfo {
    /// Its number.
    pub index: u32,
    /// Its thread's name.
    pub name: String,
    /// Thread id in the kernel.
    pub tid: i32,
    /// Rounds of polling since it started.
    pub rounds: u64,
    /// Times it went to sleep.
    pub parks: u64,
    /// CPUs on which its thread may run, as the kernel writes them.
    #[serde(default)]
    pub cpus: String,
    /// Its binding: `node 1`, or CPUs. Empty: to nothing.
    #[serde(default)]
    pub bound_to: String,
}

/// Why a runtime or an engine could not be started or moved.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No such engine.
    #[error("no engine has number {0}; `mccsctl engines` lists them")]
    NoSuchEngine(EngineId),
    /// No such runtime.
    #[error("no runtime has number {0}; `mccsctl engines` lists them")]
    NoSuchRuntime(u32),
    /// The table is full.
    #[error("the service has {0}, the most it can have")]
    TooMany(String),
    /// A runtime is to run where the process may not.
    #[error(transparent)]
    NoCpu(#[from] NoCpu),
    /// The kernel refused.
    #[error("cannot start a runtime")]
    Os(#[from] std::io::Error),
}

struct RuntimeHandle {
    stats: Arc<RuntimeStats>,
    name: String,
    bound_to: Option<CpuChoice>,
    thread: Option<JoinHandle<Vec<Box<dyn Engine>>>>,
}

struct EngineRecord {
    name: String,
    state: Arc<EngineState>,
    share: Option<Share>,
    account: Option<Arc<Account>>,
}

impl EngineRecord {
    fn info(&self, id: EngineId) -> Option<EngineInfo> {
        let runtime = self.state.runtime.load(Ordering::Acquire);
        let busy_ns = self.state.busy_ns.load(Ordering::Relaxed);
        let own = self.share.map(|share| (share.tenant, busy_ns));
        let work_ns = self.account.as_ref().map_or_else(|| own.into_iter().collect(), |account| account.read());
        let (name, busy_ms, tenants) = (self.name.clone(), busy_ns / 1_000_000, BTreeMap::new());
        (runtime != NO_RUNTIME).then_some(EngineInfo { id, name, runtime, busy_ms, tenants, work_ns })
    }
}

#[derive(Default)]
struct Tables {
    runtimes: Vec<RuntimeHandle>,
    engines: BTreeMap<EngineId, EngineRecord>,
    next_engine: u64,
}

/// All runtimes of a service. Shared; its lock is taken on the control path only.
pub struct Runtimes {
    table: Arc<RuntimeTable>,
    tables: Mutex<Tables>,
    stop: Arc<AtomicBool>,
    options: RuntimeOptions,
}

/// Orders that may wait at one runtime: moves and starts are rare, sessions start in bursts.
const ORDERS_MAX: usize = ENGINES_MAX;

impl Runtimes {
    /// No runtimes yet.
    #[must_use]
    pub fn new(options: RuntimeOptions) -> Arc<Self> {
        Arc::new(Runtimes {
            table: Arc::new([const { OnceLock::new() }; RUNTIMES_MAX]),
            tables: Mutex::default(),
            stop: Arc::new(AtomicBool::new(false)),
            options,
        })
    }

    fn tables(&self) -> std::sync::MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a runtime and returns its number.
    ///
    /// # Errors
    /// [`RuntimeError::TooMany`], or the kernel's refusal of a thread or descriptor.
    pub fn start_runtime(&self, name: &str) -> Result<u32, RuntimeError> {
        self.start(name, self.options)
    }

    /// Starts a runtime whose engines sleep as soon as they find nothing to do: for what nobody measures, such as set-up.
    ///
    /// # Errors
    /// As [`Runtimes::start_runtime`].
    pub fn start_patient_runtime(&self, name: &str) -> Result<u32, RuntimeError> {
        self.start(name, RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, ..self.options })
    }

    fn start(&self, name: &str, options: RuntimeOptions) -> Result<u32, RuntimeError> {
        let mut tables = self.tables();
        let index = tables.runtimes.len();
        if index == RUNTIMES_MAX {
            return Err(RuntimeError::TooMany(format!("{RUNTIMES_MAX} runtimes")));
        }
        let doorbell = Doorbell::new()?;
        let executor = Executor::new(index as u32, &self.table, &doorbell, options, &self.stop)?;
        let stats = Arc::clone(&executor.stats);
        let state = RuntimeState {
            ready: ArrayQueue::new(ENGINES_MAX),
            orders: ArrayQueue::new(ORDERS_MAX),
            parked: AtomicBool::new(false),
            doorbell,
        };
        // A failed thread start leaves this slot set and unused; the next start overwrites nothing, so report it.
        if self.table[index].set(state).is_err() {
            return Err(RuntimeError::TooMany("a runtime slot in use".into()));
        }
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || executor.run())?;
        // It would be bound as whoever starts it is.
        let allowed = cpu_affinity::of_process();
        if cpu_affinity::of_thread(thread.as_pthread_t()) != allowed {
            cpu_affinity::bind(thread.as_pthread_t(), &allowed)?;
        }
        let (name, bound_to) = (name.to_owned(), None);
        tables.runtimes.push(RuntimeHandle { stats, name, bound_to, thread: Some(thread) });
        Ok(index as u32)
    }

    /// Binds a runtime's thread to CPUs, from now on.
    ///
    /// # Errors
    /// There is no such runtime, no CPU that this process may use, or the kernel refuses.
    pub fn bind(&self, runtime: u32, choice: &CpuChoice, nodes: &NumaNodes) -> Result<(), RuntimeError> {
        let mut tables = self.tables();
        let handle = tables.runtimes.get_mut(runtime as usize).ok_or(RuntimeError::NoSuchRuntime(runtime))?;
        let thread = handle.thread.as_ref().ok_or(RuntimeError::NoSuchRuntime(runtime))?;
        cpu_affinity::bind(thread.as_pthread_t(), &nodes.resolve(choice)?)?;
        handle.bound_to = Some(choice.clone()).filter(|choice| *choice != CpuChoice::Any);
        Ok(())
    }

    /// Starts an engine on a runtime. `make` gets the engine's waker, so that it can hand it to whoever wakes it.
    ///
    /// # Errors
    /// [`RuntimeError::NoSuchRuntime`] or [`RuntimeError::TooMany`].
    pub fn start_engine(
        &self,
        runtime: u32,
        make: impl FnOnce(Waker) -> Box<dyn Engine>,
    ) -> Result<EngineId, RuntimeError> {
        let mut tables = self.tables();
        if runtime as usize >= tables.runtimes.len() {
            return Err(RuntimeError::NoSuchRuntime(runtime));
        }
        tables.engines.retain(|_, record| record.state.runtime.load(Ordering::Acquire) != NO_RUNTIME);
        if tables.engines.len() >= ENGINES_MAX {
            return Err(RuntimeError::TooMany(format!("{ENGINES_MAX} engines")));
        }
        let id = EngineId(tables.next_engine);
        tables.next_engine += 1;
        let state = Arc::new(EngineState {
            id,
            runtime: AtomicU32::new(runtime),
            notified: AtomicBool::new(false),
            busy_ns: AtomicU64::new(0),
        });
        let engine = make(Waker { engine: Arc::clone(&state), table: Arc::clone(&self.table) });
        let (name, share, account) = (engine.name(), engine.share(), engine.account());
        tables.engines.insert(id, EngineRecord { name, state: Arc::clone(&state), share, account });
        self.order(runtime, Order::Adopt(Adopted { engine, state }))?;
        Ok(id)
    }

    /// Moves an engine to another runtime, between two of its polls. Returns before it has moved.
    ///
    /// # Errors
    /// There is no such engine or runtime.
    pub fn move_engine(&self, engine: EngineId, to: u32) -> Result<(), RuntimeError> {
        let tables = self.tables();
        if to as usize >= tables.runtimes.len() {
            return Err(RuntimeError::NoSuchRuntime(to));
        }
        let record = tables.engines.get(&engine).ok_or(RuntimeError::NoSuchEngine(engine))?;
        let from = record.state.runtime.load(Ordering::Acquire);
        if from == NO_RUNTIME {
            return Err(RuntimeError::NoSuchEngine(engine));
        }
        self.order(from, Order::Move { engine, to })
    }

    fn order(&self, runtime: u32, order: Order) -> Result<(), RuntimeError> {
        let state = self.table.get(runtime as usize).and_then(OnceLock::get);
        let state = state.ok_or(RuntimeError::NoSuchRuntime(runtime))?;
        state.orders.push(order).map_err(|_| RuntimeError::TooMany(format!("{ORDERS_MAX} waiting orders")))?;
        state.unpark();
        Ok(())
    }

    /// All engines, by number.
    #[must_use]
    pub fn engines(&self) -> Vec<EngineInfo> {
        self.tables().engines.iter().filter_map(|(id, record)| record.info(*id)).collect()
    }

    /// A tenant begins whose number another one had: its work counts from now on.
    pub fn forget_work_of(&self, tenant: u32) {
        self.tables().engines.values().filter_map(|record| record.account.as_ref()).for_each(|own| own.forget(tenant));
    }

    /// All runtimes, by number.
    #[must_use]
    pub fn runtimes(&self) -> Vec<RuntimeInfo> {
        let info = |(index, handle): (usize, &RuntimeHandle)| RuntimeInfo {
            index: index as u32,
            name: handle.name.clone(),
            tid: handle.stats.tid.load(Ordering::Relaxed) as i32,
            rounds: handle.stats.rounds.load(Ordering::Relaxed),
            parks: handle.stats.parks.load(Ordering::Relaxed),
            cpus: handle
                .thread
                .as_ref()
                .map_or_else(String::new, |thread| cpu_affinity::of_thread(thread.as_pthread_t()).to_string()),
            bound_to: handle.bound_to.as_ref().map_or_else(String::new, ToString::to_string),
        };
        self.tables().runtimes.iter().enumerate().map(info).collect()
    }

    /// Ends all runtimes, drops their engines, and waits for the threads. Not for use on a runtime's own thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        let threads: Vec<_> = self.tables().runtimes.iter_mut().filter_map(|handle| handle.thread.take()).collect();
        for state in self.table.iter().filter_map(OnceLock::get) {
            state.unpark();
        }
        // Engines are dropped only when all threads have ended: one may work on memory that another one holds.
        let engines: Vec<_> = threads.into_iter().map(JoinHandle::join).collect();
        // One that was on its way would stay for ever: what it holds may keep this alive.
        let orders = self.table.iter().filter_map(OnceLock::get).map(|state| &state.orders);
        let on_their_way: Vec<_> = orders.flat_map(|orders| std::iter::from_fn(|| orders.pop())).collect();
        drop((engines, on_their_way));
    }
}
