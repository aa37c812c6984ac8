//! Profiler events, whatever the version of the plugin's interface.

use std::ffi::{CStr, c_int, c_void};

/// Bits of an activation mask, which are types of events too.
pub(super) mod kind {
    pub(crate) const GROUP: u64 = 1 << 0;
    pub(crate) const COLL: u64 = 1 << 1;
    pub(crate) const P2P: u64 = 1 << 2;
    pub(crate) const KERNEL_CH: u64 = 1 << 6;
    pub(crate) const GROUP_API: u64 = 1 << 8;
    pub(crate) const COLL_API: u64 = 1 << 9;
    pub(crate) const P2P_API: u64 = 1 << 10;
    pub(crate) const KERNEL_LAUNCH: u64 = 1 << 11;
    pub(crate) const CE_COLL: u64 = 1 << 12;

    /// Types that belong to calls.
    pub(crate) const OF_CALLS: u64 = GROUP_API | OF_API | P2P_API | KERNEL_LAUNCH | GROUP | P2P;
    /// A collective's call, and what lies in it.
    pub(crate) const OF_API: u64 = COLL_API | COLL | CE_COLL | KERNEL_CH;
}

/// `ncclProfilerEventState_t`, those of events here.
pub(super) mod state {
    use std::ffi::c_int;

    pub(crate) const KERNEL_CH_STOP: c_int = 22;
    pub(crate) const GROUP_START_API_STOP: c_int = 23;
    pub(crate) const GROUP_END_API_START: c_int = 24;
}

/// Fields of an event, besides its type, parent and rank.
pub(super) enum Event<'a> {
    GroupApi { is_captured: bool, depth: c_int },
    CollApi(&'a Coll),
    P2pApi(&'a P2pCall),
    KernelLaunch { stream: *mut c_void },
    Group,
    Coll { coll: &'a Coll, tuning: Tuning, group: *mut c_void },
    CeColl { coll: &'a Coll },
    P2p { p2p: &'a P2pCall, group: *mut c_void },
    KernelCh { began_ns: u64 },
}

/// A collective.
#[derive(Clone, Copy)]
pub(crate) struct Coll {
    pub(super) function: &'static Function,
    pub(super) sequence: u64,
    pub(super) send: *const c_void,
    pub(super) recv: *mut c_void,
    pub(super) count: usize,
    pub(super) root: c_int,
    pub(super) datatype: c_int,
    pub(super) stream: *mut c_void,
    pub(super) is_captured: bool,
    /// Its program's tag; 0 stands for none.
    pub(super) user_tag: u64,
}

/// A send or receive.
#[derive(Clone, Copy)]
pub(crate) struct P2pCall {
    pub(super) function: &'static Function,
    pub(super) buffer: *mut c_void,
    pub(super) count: usize,
    pub(super) peer: c_int,
    pub(super) datatype: c_int,
    pub(super) stream: *mut c_void,
    pub(super) is_captured: bool,
}

/// How a collective is carried out.
#[derive(Clone, Copy)]
pub(super) struct Tuning {
    pub(super) algorithm: &'static CStr,
    pub(super) protocol: &'static CStr,
    /// Channels of which kernel events come.
    pub(super) channels: u8,
    pub(super) warps: u8,
}

/// A function of NCCL's, by name and, for the first version, by number.
pub(crate) struct Function {
    pub(super) name: &'static CStr,
    pub(super) number: u8,
}

impl Function {
    /// One more than the highest number.
    pub(super) const COUNT: usize = 11;

    pub(super) fn index(&self) -> usize {
        usize::from(self.number)
    }
}

/// Defines functions with NCCL's names and numbers.
macro_rules! functions {
    ($($constant:ident = $name:literal, $number:literal;)+) => {
        $(pub(crate) static $constant: Function = Function { name: $name, number: $number };)+
    };
}

functions! {
    BROADCAST = c"Broadcast", 0;
    REDUCE = c"Reduce", 1;
    ALL_GATHER = c"AllGather", 2;
    REDUCE_SCATTER = c"ReduceScatter", 3;
    ALL_REDUCE = c"AllReduce", 4;
    SEND = c"Send", 6;
    RECV = c"Recv", 7;
    ALL_TO_ALL = c"AlltoAll", 8;
    SCATTER = c"Scatter", 9;
    GATHER = c"Gather", 10;
}

/// A communicator as versions before 4 are told of it with each event.
pub(super) struct Named<'a> {
    pub(super) name: &'a CStr,
    pub(super) hash: u64,
}

impl Event<'_> {
    pub(super) fn kind(&self) -> u64 {
        match self {
            Event::GroupApi { .. } => kind::GROUP_API,
            Event::CollApi(_) => kind::COLL_API,
            Event::P2pApi(_) => kind::P2P_API,
            Event::KernelLaunch { .. } => kind::KERNEL_LAUNCH,
            Event::Group => kind::GROUP,
            Event::Coll { .. } => kind::COLL,
            Event::CeColl { .. } => kind::CE_COLL,
            Event::P2p { .. } => kind::P2P,
            Event::KernelCh { .. } => kind::KERNEL_CH,
        }
    }

    /// Events that a plugin wants that is told of such events: as in NCCL, a parent comes with whatever lies in it.
    pub(super) fn wanted_with(&self) -> u64 {
        match self {
            Event::GroupApi { .. } => kind::OF_CALLS,
            Event::CollApi(_) => kind::OF_API,
            Event::P2pApi(_) => kind::P2P_API | kind::P2P,
            Event::Group => kind::GROUP | kind::COLL | kind::CE_COLL | kind::P2P | kind::KERNEL_CH,
            Event::Coll { .. } => kind::COLL | kind::KERNEL_CH,
            Event::KernelLaunch { .. } | Event::CeColl { .. } | Event::P2p { .. } | Event::KernelCh { .. } => {
                self.kind()
            }
        }
    }

    /// Whether a version of the interface has such events.
    pub(super) fn is_known_to(&self, version: u32) -> bool {
        match self {
            Event::Group | Event::Coll { .. } | Event::P2p { .. } => true,
            Event::KernelCh { .. } => version >= 3,
            Event::GroupApi { .. } | Event::CollApi(_) | Event::P2pApi(_) | Event::KernelLaunch { .. } => version >= 5,
            Event::CeColl { .. } => version >= 6,
        }
    }
}
