//! Policies by name: from a view of the cluster to what every communicator is to do.
//!
//! `decide(view) -> decisions` is pure: no I/O, no clock, no state, and the same view gives the same decisions. The controller
//! calls it on arrival, departure, fault and change of the file; the simulator runs the same code. A decision says ring orders,
//! the NIC and path of every flow between hosts, weights, caps, priorities, and times to send; transports and engines carry
//! it out.
//!
//! A new policy is one file with one `impl Policy`, and one line here, in `policies!`; `docs/guides/policy.md` has a whole one.
//! Helpers that policies share: [`rings`] orders ranks, [`flows`] derives flows from orders and puts them on paths, [`shares`]
//! allocates rates.
//!
//! Deliberately absent: when a change takes effect (the exchange agrees on that), and how it is enforced.

mod decision;
pub mod flows;
pub mod random;
pub mod rings;
pub mod shares;
pub mod topology;
mod view;
pub mod windows;

pub use decision::{CommId, Decision, Decisions, Flow, PathSelection, Window, WindowState, Yield};
pub use view::{HostFlow, Job, Placed, PlacedRank, Profile, RingChoice, Rules, TenantTerms, View, Weights};

/// A way to decide.
pub trait Policy: Sync {
    /// As `policy.toml` names it.
    fn name(&self) -> &'static str;

    /// Whether it looks at profiles: measuring them is work for hosts.
    fn uses_profiles(&self) -> bool {
        false
    }

    /// Whether it looks at tenants' priorities: the operator is told where rules have no effect.
    fn uses_priorities(&self) -> bool {
        false
    }

    /// Whether it keeps others off reserved paths: as above.
    fn uses_reserves(&self) -> bool {
        false
    }

    /// Decides for every communicator of the view, in the view's order.
    fn decide(&self, view: &View<'_>) -> Decisions;
}

/// Makes a module of each policy's file, and [`ALL`] of the policies.
macro_rules! policies {
    ($($(#[$when:meta])* $module:ident::$policy:ident,)+) => {
        $($(#[$when])* mod $module;)+

        /// All policies.
        pub const ALL: &[&dyn Policy] = &[$($(#[$when])* &$module::$policy,)+];
    };
}

// A policy is a file in this folder and a line here.
policies! {
    ecmp::Ecmp,
    ffa::Ffa,
    pfa::Pfa,
    pfa_ts::PfaTs,
    priority::Priority,
    yielding::Yielding,
    // The one that the guide shows, added as the guide says.
    #[cfg(any(test, feature = "guide"))]
    in_turn::InTurn,
}

/// The policy of a name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static dyn Policy> {
    ALL.iter().copied().find(|policy| policy.name() == name)
}

/// Names of all policies, for checks of `policy.toml`.
#[must_use]
pub fn names() -> Vec<&'static str> {
    ALL.iter().map(|policy| policy.name()).collect()
}

#[cfg(test)]
mod tests;

/// The guide's policy is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/policy.md")]
pub struct PolicyGuide;
