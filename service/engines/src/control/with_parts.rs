//! Operators' requests about a communicator of several parts: asked of the whole first, then of
//! each rail. The whole knows best what is wrong with it; rails carry its bytes between hosts.
//!
//! A change of what GPUs run by is of communicators on GPUs alone, and stays with the one that it names.

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_config::change::StrategyChange;
use mccs_registry::{CommInfo, PartOf};

use crate::proxy::{OperatorAnswer, OperatorRequest, OperatorResult};

/// A request that is on its way from one communicator to the next.
#[derive(Debug)]
pub(super) struct WithParts {
    /// The answer of the whole.
    of_whole: Option<OperatorAnswer>,
    /// Parts that have done it.
    done: Vec<String>,
    /// The part that is asked now; `None`: the whole.
    asked: Option<String>,
    left: VecDeque<Wanted>,
}

/// A request to a part.
#[derive(Debug)]
struct Wanted {
    number: u64,
    name: String,
    request: OperatorRequest,
}

/// The step behind an answer.
#[derive(Debug)]
pub(super) enum Then {
    /// The operator is told.
    Tell(OperatorResult),
    /// The communicator with this number is asked next.
    Ask(u64, OperatorRequest),
}

impl WithParts {
    /// Requests to rails that follow from a request of a communicator; `None` if it has none.
    pub(super) fn of(comms: &[Arc<CommInfo>], whole: u64, request: &OperatorRequest) -> Option<WithParts> {
        if matches!(request, OperatorRequest::Change { change, .. } if !change.is_of_hosts()) {
            return None;
        }
        let rail = |comm: &Arc<CommInfo>| {
            let part = comm.part.as_ref().filter(|part| part.whole == whole && part.is_rail)?;
            Some(Wanted { number: comm.number, name: part.name.clone(), request: of_part(request, part) })
        };
        let mut left: Vec<Wanted> = comms.iter().filter_map(rail).collect();
        left.sort_by(|one, other| one.name.cmp(&other.name));
        let left: VecDeque<Wanted> = left.into();
        (!left.is_empty()).then_some(WithParts { of_whole: None, done: Vec::new(), asked: None, left })
    }

    /// Whoever is asked has answered.
    pub(super) fn answered(&mut self, answer: OperatorResult) -> Then {
        let answer = match (answer, &self.asked) {
            (Ok(answer), _) => answer,
            (Err(refused), None) => return Then::Tell(Err(refused)),
            (Err(mut refused), Some(name)) => {
                let before = self.done.iter().map(|name| format!(" and its {name}")).collect::<String>();
                refused.reason = format!(
                    "its {name} refuses: {}; the communicator{before} have changed: ask again, or for what was before",
                    refused.reason
                );
                return Then::Tell(Err(refused));
            }
        };
        match self.asked.take() {
            None => self.of_whole = Some(answer),
            Some(name) => self.done.push(name),
        }
        match self.left.pop_front() {
            Some(Wanted { number, name, request }) => {
                self.asked = Some(name);
                Then::Ask(number, request)
            }
            None => Then::Tell(Ok(self.of_whole.take().unwrap_or(OperatorAnswer::Done))),
        }
    }
}

/// A request of a whole as one of a part: rings go through the part's ranks in the order in which they go through the whole's.
fn of_part(request: &OperatorRequest, part: &PartOf) -> OperatorRequest {
    let OperatorRequest::Change { change, window } = request else { return request.clone() };
    let place = |rank: &u32| part.ranks.iter().position(|own| own == rank).map(|place| place as u32);
    let ring = |ring: &Vec<u32>| ring.iter().filter_map(place).collect();
    let rings = change.rings.as_ref().map(|rings| rings.iter().map(ring).collect());
    OperatorRequest::Change { change: Box::new(StrategyChange { rings, ..(**change).clone() }), window: *window }
}

#[cfg(test)]
mod tests {
    use mccs_model::Refused;
    use mccs_registry::Family;

    use super::*;
    use crate::proxy::Reconfigured;

    fn rail(ranks: &[u32]) -> PartOf {
        let (family, name) = (Arc::new(Family::default()), "rail 1 of 2".into());
        PartOf { whole: 1, family, name, ranks: ranks.to_vec(), is_rail: true, reduction_ring: Vec::new() }
    }

    fn two_rails() -> WithParts {
        let wanted = |number| Wanted { number, name: format!("rail {number} of 2"), request: OperatorRequest::Unpin };
        WithParts { of_whole: None, done: Vec::new(), asked: None, left: [1, 2].map(wanted).into() }
    }

    #[test]
    fn rings_of_a_rail_go_through_hosts_as_those_of_the_whole() {
        let change = StrategyChange {
            rings: Some(vec![vec![0, 1, 4, 5, 2, 3], vec![3, 2, 1, 0, 5, 4]]),
            channels: Some(2),
            ..StrategyChange::default()
        };
        let request = OperatorRequest::Change { change: Box::new(change.clone()), window: Some(3) };
        let rings = Some(vec![vec![0, 2, 1], vec![1, 0, 2]]);
        let expected =
            OperatorRequest::Change { change: Box::new(StrategyChange { rings, ..change }), window: Some(3) };
        assert_eq!(of_part(&request, &rail(&[1, 3, 5])), expected);
        assert_eq!(of_part(&OperatorRequest::Unpin, &rail(&[1, 3, 5])), OperatorRequest::Unpin);
    }

    #[test]
    fn rails_are_asked_behind_the_whole_whose_answer_the_operator_gets() {
        let mut all = two_rails();
        let answer = OperatorAnswer::Reconfigured(Reconfigured { epoch: 4, cut: 9 });
        assert!(matches!(all.answered(Ok(answer.clone())), Then::Ask(1, OperatorRequest::Unpin)));
        let of_rail = OperatorAnswer::Reconfigured(Reconfigured { epoch: 1, cut: 2 });
        assert!(matches!(all.answered(Ok(of_rail.clone())), Then::Ask(2, OperatorRequest::Unpin)));
        assert!(matches!(all.answered(Ok(of_rail)), Then::Tell(Ok(told)) if told == answer));
    }

    #[test]
    fn who_refuses_is_named_with_what_has_changed_before() {
        assert!(matches!(two_rails().answered(Err(Refused::own("no"))), Then::Tell(Err(told)) if told.reason == "no"));
        let mut all = two_rails();
        let _ = all.answered(Ok(OperatorAnswer::Done));
        let _ = all.answered(Ok(OperatorAnswer::Done));
        let Then::Tell(Err(told)) = all.answered(Err(Refused::own("no such NIC"))) else { panic!("it goes on") };
        assert!(told.reason.starts_with("its rail 2 of 2 refuses: no such NIC; the communicator and its rail 1 of 2"));
    }
}
