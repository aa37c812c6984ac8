//! Strategies of a communicator by epoch: in force, decided for later operations, and being
//! prepared. Pure.
//!
//! ```text
//! propose --> prepare --> engine_prepared, of each --> decide: Commit(cut) --> take_next, from operation `cut` on: in force
//!                          nothing starts from a limit on          Abort   --> as it was
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_collective::{ChannelLink, Schedule, Strategy};
use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_exchange::protocol::Decision;
use mccs_model::Refused;
use mccs_model::link::{EPOCH_MAX, LinkKey};
use mccs_telemetry::placed::Chosen;
use mccs_transport::FlowPath;

use crate::proxy::calls::operation::Operation;
use crate::proxy::communicator::schedule_cache::{PlanError, ScheduleCache};
use crate::proxy::mail::reply_to::ReplyTo;
use crate::transport::links::{HostFlow, PathAssignment};

/// Changes that are decided and not in force. Each holds links.
const DECIDED_MAX: usize = 8;

/// A strategy that is not in force yet.
pub(crate) struct Next {
    epoch: u32,
    schedules: ScheduleCache,
    assignment: Arc<PathAssignment>,
}

impl Next {
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    pub(crate) fn assignment(&self) -> &Arc<PathAssignment> {
        &self.assignment
    }

    /// All links that its collectives use.
    pub(crate) fn links(&self) -> Result<Vec<LinkKey>, PlanError> {
        let key = |ChannelLink { channel, src, dst }| LinkKey { epoch: self.epoch, channel, src, dst };
        Ok(self.schedules.links()?.into_iter().map(key).collect())
    }
}

struct Preparing {
    next: Next,
    window: u32,
    /// Transport engines that have not made its links.
    engines_left: usize,
}

/// Proposer of a change here.
pub(crate) struct Proposal {
    pub(crate) reply_to: ReplyTo,
    /// An operator, not the controller.
    pub(crate) is_by_hand: bool,
}

/// Consequences of a decision.
pub(crate) struct Decided {
    /// Paths of the strategy that was decided, if one was.
    pub(crate) chosen: Option<Arc<PathAssignment>>,
    /// Numbers of strategies that are not going to be.
    pub(crate) over: Vec<u32>,
    /// Proposal that is to be answered here.
    pub(crate) proposal: Option<Proposal>,
}

/// See the module's documentation.
pub(crate) struct Strategies {
    /// Schedules of the strategy in force.
    schedules: ScheduleCache,
    assignment: Arc<PathAssignment>,
    /// With the first operation of each; ascending, also by number.
    decided: VecDeque<(u64, Next)>,
    preparing: Option<Preparing>,
    /// No collective from this number on may start before the change is decided.
    limit: Option<u64>,
    proposal: Option<Proposal>,
}

impl Strategies {
    /// A first one, with these schedules and paths.
    pub(crate) fn new(schedules: ScheduleCache, assignment: Arc<PathAssignment>) -> Self {
        let (decided, preparing) = (VecDeque::new(), None);
        Strategies { schedules, assignment, decided, preparing, limit: None, proposal: None }
    }

    /// The schedule, under the strategy in force, of a collective that all ranks have called alike.
    pub(crate) fn schedule_for(&mut self, operations: &[Operation]) -> Result<Arc<Schedule>, PlanError> {
        self.schedules.schedule_for(operations)
    }

    /// The strategy in force, where no other is decided or being prepared.
    pub(crate) fn at_rest(&self) -> Option<&Strategy> {
        let is_at_rest = self.decided.is_empty() && self.preparing.is_none() && self.proposal.is_none();
        is_at_rest.then(|| self.schedules.strategy())
    }

    /// Whether collective number `number` may start.
    pub(crate) fn allow(&self, number: u64) -> bool {
        self.limit.is_none_or(|limit| number < limit)
    }

    /// Whether collective number `number` puts another strategy in force.
    pub(crate) fn changes_at(&self, number: u64) -> bool {
        self.decided.front().is_some_and(|(cut, _)| *cut <= number)
    }

    /// The communicator has failed: whoever waits is told.
    pub(crate) fn end(&mut self) {
        self.proposal = None;
    }

    /// Whether a change may be proposed, from a strategy that whoever wants it may expect. `in_force` is the number of the one in force.
    pub(crate) fn may_change(&self, in_force: u64, expected: Option<u64>) -> Result<(), Refused> {
        if self.proposal.is_some() {
            return Err(Refused::own("another change is being decided"));
        }
        let (last, ..) = self.last(in_force);
        match expected.filter(|expected| *expected != last) {
            Some(_) => Err(Refused::own(format!("its strategy is number {last} meanwhile"))),
            None => Ok(()),
        }
    }

    /// The last change that is decided, or else the strategy in force, with `change`. `hosts` are the communicator's.
    pub(crate) fn next(&self, change: &StrategyChange, epoch: u64, hosts: &[String]) -> Result<Next, Refused> {
        if change.is_of_gpus() {
            return Err("large_from, ll128 and max_ctas are for communicators whose collectives GPUs carry out".into());
        }
        let (_, schedules, assignment) = self.last(0);
        let number = u32::try_from(epoch).ok().filter(|epoch| *epoch <= EPOCH_MAX);
        let number = number.ok_or_else(|| Refused::own(format!("a communicator has at most {EPOCH_MAX} changes")))?;
        let schedules = schedules.changed(change, epoch).map_err(|error| error.to_string())?;
        let channels = schedules.strategy().ring_orders.len();
        let assignment = Arc::new(changed_assignment(assignment, change, channels, hosts)?);
        Ok(Next { epoch: number, schedules, assignment })
    }

    /// The last decision, as watchers are told of it.
    pub(crate) fn chosen(&self, in_force: u64, hosts: &[String]) -> Chosen {
        let (epoch, schedules, assignment) = self.last(in_force);
        let host = |place: u16| hosts.get(usize::from(place)).cloned().unwrap_or_default();
        let flow = |(flow, path): (&HostFlow, &u16)| FlowChoice {
            channel: flow.channel.into(),
            from: host(flow.from),
            to: host(flow.to),
            path: (*path).into(),
        };
        let mut flows: Vec<FlowChoice> = assignment.chosen.iter().map(flow).collect();
        flows.sort_by(|a, b| (a.channel, &a.from, &a.to).cmp(&(b.channel, &b.from, &b.to)));
        let (rings, algorithm) = (schedules.strategy().ring_orders.clone(), schedules.strategy().choice);
        let paths = assignment.paths.iter().map(mccs_config::service::FlowPath::from).collect();
        Chosen { epoch, rings, algorithm, transport: assignment.transport, paths, flows }
    }

    /// The strategy that was decided last, and its paths.
    fn last(&self, in_force: u64) -> (u64, &ScheduleCache, &PathAssignment) {
        match self.decided.back() {
            Some((_, next)) => (next.epoch.into(), &next.schedules, &next.assignment),
            None => (in_force, &self.schedules, &self.assignment),
        }
    }

    /// Somebody here waits for a decision.
    pub(crate) fn propose(&mut self, proposal: Proposal) {
        self.proposal = Some(proposal);
    }

    /// Nothing will be decided.
    pub(crate) fn take_proposal(&mut self) -> Option<Proposal> {
        self.proposal.take()
    }

    /// Whether another change may be prepared.
    pub(crate) fn check_room(&self) -> Result<(), Refused> {
        if self.decided.len() < DECIDED_MAX {
            return Ok(());
        }
        Err(Refused::own(format!("{DECIDED_MAX} changes wait for their first operation already")))
    }

    /// Transport engines, so many, make the links of a strategy. At most `window` collectives start from when they have until it is decided.
    pub(crate) fn prepare(&mut self, next: Next, window: u32, engines: usize) {
        self.preparing = Some(Preparing { next, window, engines_left: engines });
    }

    /// Whether the strategy with this number is being prepared.
    pub(crate) fn prepares(&self, epoch: u32) -> bool {
        self.preparing.as_ref().is_some_and(|preparing| preparing.next.epoch == epoch)
    }

    /// A transport engine has made the links; `launched` collectives have started. Returns whether it was the last.
    pub(crate) fn engine_prepared(&mut self, launched: u64) -> bool {
        let Some(preparing) = &mut self.preparing else { return false };
        preparing.engines_left = preparing.engines_left.saturating_sub(1);
        let are_all = preparing.engines_left == 0;
        if are_all {
            self.limit = Some(launched.saturating_add(preparing.window.into()));
        }
        are_all
    }

    /// A change is decided on all hosts; `started` collectives have started here.
    ///
    /// # Errors
    /// It is one that this host has not prepared: a bug.
    pub(crate) fn decide(&mut self, change: u64, decision: &Decision, started: u64) -> Result<Decided, String> {
        self.limit = None;
        let preparing = self.preparing.take();
        let (mut over, mut chosen) = (Vec::new(), None);
        match decision {
            Decision::Commit { cut } => {
                let prepared = preparing.filter(|p| u64::from(p.next.epoch) == change && started <= *cut);
                let Preparing { next, .. } = prepared.ok_or_else(|| {
                    format!("change {change} holds from {cut} on, for which this host is not prepared")
                })?;
                while let Some((_, never)) = self.decided.pop_back_if(|(earlier, _)| *earlier >= *cut) {
                    over.push(never.epoch);
                }
                chosen = Some(Arc::clone(&next.assignment));
                self.decided.push_back((*cut, next));
            }
            Decision::Abort { .. } => over.extend(preparing.map(|preparing| preparing.next.epoch)),
        }
        Ok(Decided { chosen, over, proposal: self.proposal.take() })
    }

    /// Puts the next strategy in force whose first collective is not after this one. Returns its number.
    pub(crate) fn take_next(&mut self, number: u64) -> Option<u32> {
        let (_, next) = self.decided.pop_front_if(|(cut, _)| *cut <= number)?;
        Some(self.put_in_force(next))
    }

    /// Puts a strategy in force on which nobody else has to agree. Returns its number.
    pub(crate) fn put_in_force(&mut self, next: Next) -> u32 {
        (self.schedules, self.assignment) = (next.schedules, next.assignment);
        next.epoch
    }
}

/// A strategy's paths through the network under a change. `hosts` are the communicator's.
fn changed_assignment(
    assignment: &PathAssignment,
    change: &StrategyChange,
    channels: usize,
    hosts: &[String],
) -> Result<PathAssignment, String> {
    let paths = change.paths.as_ref().map(|paths| paths.iter().map(FlowPath::from).collect());
    let keeps_chosen = change.flows.is_none() && paths.is_none();
    let mut changed = PathAssignment {
        transport: change.transport.or(assignment.transport),
        paths: paths.unwrap_or_else(|| assignment.paths.clone()),
        chosen: assignment.chosen.clone(),
        nics: Arc::clone(&assignment.nics),
        rail: assignment.rail,
    };
    if !keeps_chosen {
        changed.chosen.clear();
    }
    if hosts.is_empty() && (change.paths.is_some() || change.flows.is_some() || change.transport.is_some()) {
        return Err("all ranks of the communicator are on this host: it has no flows".into());
    }
    let place = |host: &String| {
        let at = hosts.iter().position(|known| known == host);
        at.ok_or_else(|| format!("the communicator has no ranks on host {host}; its hosts are {}", hosts.join(", ")))
    };
    for flow in change.flows.iter().flatten() {
        let (from, to) = (place(&flow.from)?, place(&flow.to)?);
        if from == to {
            return Err(format!("host {} needs no flow to itself", flow.from));
        }
        if flow.channel as usize >= channels {
            return Err(format!("there is no channel {}: the strategy has {channels}", flow.channel));
        }
        if flow.path as usize >= changed.paths.len() {
            return Err(format!("there is no path {}: the strategy has {}", flow.path, changed.paths.len()));
        }
        let named = HostFlow { channel: flow.channel as u16, from: from as u16, to: to as u16 };
        changed.chosen.insert(named, flow.path as u16);
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use mccs_config::service::TransportKind;

    use super::*;

    fn change(toml: &str) -> StrategyChange {
        StrategyChange::parse(toml, "change.toml").unwrap()
    }

    #[test]
    fn ways_are_kept_replaced_or_refused() {
        let hosts = ["a".to_owned(), "b".to_owned()];
        let first =
            change("[[path]]\ndscp = 1\n[[path]]\ndscp = 2\n[[flow]]\nchannel = 0\nfrom = 'a'\nto = 'b'\npath = 1");
        let made = changed_assignment(&PathAssignment::default(), &first, 2, &hosts).unwrap();
        let named = HostFlow { channel: 0, from: 0, to: 1 };
        assert_eq!((made.paths.len(), made.chosen.get(&named)), (2, Some(&1)));
        assert_eq!(changed_assignment(&made, &change("algorithm = 'ring'"), 2, &hosts).unwrap(), made);
        assert!(changed_assignment(&made, &change("[[path]]\ndscp = 3"), 2, &hosts).unwrap().chosen.is_empty());
        let flow = |from: &str, to: &str, channel: u32, path: u32| {
            let text = format!("[[flow]]\nchannel = {channel}\nfrom = {from:?}\nto = {to:?}\npath = {path}");
            changed_assignment(&made, &change(&text), 2, &hosts)
        };
        let chosen = flow("b", "a", 1, 0).unwrap().chosen;
        assert_eq!(chosen, [(HostFlow { channel: 1, from: 1, to: 0 }, 0)].into());
        assert!(flow("c", "a", 0, 0).unwrap_err().contains("its hosts are a, b"));
        assert!(flow("a", "a", 0, 0).unwrap_err().contains("itself"));
        assert!(flow("a", "b", 2, 0).unwrap_err().contains("channel 2"));
        assert!(flow("a", "b", 0, 2).unwrap_err().contains("path 2"));
        assert!(changed_assignment(&made, &first, 2, &[]).unwrap_err().contains("no flows"));
        let rdma = changed_assignment(&made, &change("transport = 'rdma'"), 2, &hosts).unwrap();
        assert_eq!(rdma, PathAssignment { transport: Some(TransportKind::Rdma), ..made.clone() });
        assert_eq!(
            changed_assignment(&rdma, &change("channels = 2"), 2, &hosts).unwrap(),
            rdma,
            "what is absent stays"
        );
        assert!(changed_assignment(&made, &change("transport = 'tcp'"), 2, &[]).unwrap_err().contains("no flows"));
    }
}
