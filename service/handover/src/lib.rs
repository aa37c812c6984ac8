//! Hand-over of a running service to its next program: what is handed over, how, and when engines stand still for it.
//!
//! Imports wire types and wakers, and knows no engine: engines hand in parts of the [`State`] to the [`Handover`], and the programs
//! pass it on by a [`Link`].
//!
//! ```text
//! old: running --> quieting: sessions take nothing new --> still: proxy engines have ended what ran --Commit--> (ends)
//!         ^                                                   |
//!         +------------------- any failure -------------------+
//! new: still, with the state --Commit--> running
//! ```
//!
//! The most important: [`State`], with its version; [`Handover`], who stands still and what was handed in; [`Link`], between the programs.

mod link;
mod state;
mod stillness;
#[cfg(test)]
mod tests;

pub use self::link::{Link, LinkError, Received, ToNext, ToPrevious};
pub use self::state::{
    CommCounters, CommState, EndedSession, FailureState, KindCounters, MemberState, PendingCommand, RankState,
    RegionState, STATE_VERSION, ServiceCounters, SessionCountersState, SessionState, ShmExchangeState, State,
    StateError, StreamState, TableState, TenantCounters, UnsentAnswer,
};
pub use self::stillness::{
    EndedOperation, Handover, Moment, NotStill, Obstacles, Parts, Phase, SessionPart, WithDescriptors,
};
