//! `pfa`: priority flow assignment; tenants with reserved paths have them for themselves, the
//! others share the rest. Both go by least excess demand.
//!
//! After MCCS (SIGCOMM 2024). A path stays reserved while its tenant computes: that is what the others pay.

use super::{Decisions, Policy, View, flows, shares};

/// See the module's documentation.
pub(super) struct Pfa;

impl Policy for Pfa {
    fn name(&self) -> &'static str {
        "pfa"
    }

    fn uses_reserves(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let mut decisions = flows::assign(view, |job, spine| view.rules.admits(&job.tenant, spine)).decisions;
        shares::weigh(view, &mut decisions);
        decisions
    }
}
