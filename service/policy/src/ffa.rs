//! `ffa`: fair flow assignment; every flow goes to the path with the least excess demand, whoever
//! it belongs to.
//!
//! After MCCS (SIGCOMM 2024), where it is best fit over flows in descending order of demand.

use super::{Decisions, Policy, View, flows, shares};

/// See the module's documentation.
pub(super) struct Ffa;

impl Policy for Ffa {
    fn name(&self) -> &'static str {
        "ffa"
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let mut decisions = flows::assign(view, |_, _| true).decisions;
        shares::weigh(view, &mut decisions);
        decisions
    }
}
