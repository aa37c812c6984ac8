//! `ecmp`: the baseline policy; every flow goes where the switches' hash puts it. Rings are as
//! wanted.

use super::{Decisions, Policy, View, flows, shares};

/// See the module's documentation.
pub(super) struct Ecmp;

impl Policy for Ecmp {
    fn name(&self) -> &'static str {
        "ecmp"
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let mut decisions = flows::leave_to_hash(view);
        shares::weigh(view, &mut decisions);
        decisions
    }
}
