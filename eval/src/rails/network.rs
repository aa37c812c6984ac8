//! Network of the rails simulator: the service's schedules, replayed message by message.

use std::collections::HashMap;
use std::sync::Arc;

use mccs_collective::{CostModel, Problem, Program, Schedule, Shape, Step, Strategy, build};
use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;
use mccs_rails::Move;

use super::agenda::{Agenda, Event, Link, NetworkEvent};
use super::machine::{Machine, RailTimes};
use super::{Design, SimulationError};

/// Messages that a step asks for at a time: the one that it works on, and `RECEIVES_AHEAD` of the transport engine.
const ASKED_AT_A_TIME: usize = 4;

#[derive(Debug, Clone, Copy, Default)]
struct Message {
    bytes: u64,
    is_posted: bool,
    is_credited: bool,
    is_sent: bool,
    has_arrived: bool,
}

/// A program's progress in a move.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    step: usize,
    /// Messages of the step that have come.
    come: usize,
    /// Messages of the step that were asked for.
    asked: usize,
}

/// A move at a host.
#[derive(Debug, Default)]
struct Running {
    is_told: bool,
    has_begun: bool,
    has_ended: bool,
    /// By channel.
    cursors: Vec<Cursor>,
    /// Sent, and not acknowledged.
    unacknowledged: usize,
}

/// Messages of a link.
#[derive(Debug, Clone, Default)]
struct Messages {
    all: Vec<Message>,
    /// How many the sender has posted, or is about to.
    posted: usize,
    /// How many the receiver has asked for, and how many it has taken.
    asked: usize,
    taken: usize,
}

pub(super) struct Network {
    rail: RailTimes,
    design: Design,
    element_bytes: u64,
    /// By move.
    schedules: Vec<Arc<Schedule>>,
    /// By host, and move.
    running: Vec<Vec<Running>>,
    /// By move; by channel, sender and receiver while it is under way.
    links: Vec<Vec<Messages>>,
    /// By move: hosts at which it has ended.
    ended: Vec<usize>,
    thread_free_ns: Vec<f64>,
    egress_free_ns: Vec<f64>,
    ingress_free_ns: Vec<f64>,
    /// Bytes that the first host has sent.
    sent_bytes: u64,
}

impl Network {
    /// `moves` by host: all have the same collectives in the same order.
    pub(super) fn new(
        machine: &Machine,
        design: &Design,
        moves: Vec<Vec<Move>>,
        element_bytes: u64,
    ) -> Result<Self, SimulationError> {
        let hosts = moves.len();
        let mut known: HashMap<Problem, Arc<Schedule>> = HashMap::new();
        let mut schedules = Vec::new();
        for moved in moves.first().into_iter().flatten() {
            let problem = Problem {
                kind: moved.kind,
                nranks: hosts as u32,
                root: moved.root,
                count: moved.count,
                premultiply: false,
                leaves_own: moved.kind == CollectiveKind::AllToAll,
                one_hop: moved.only_from.is_some(),
            };
            let schedule = match known.get(&problem) {
                Some(schedule) => Arc::clone(schedule),
                None => Arc::new(schedule(&problem, machine.rail.channels, element_bytes)?),
            };
            known.insert(problem, Arc::clone(&schedule));
            schedules.push(schedule);
        }
        let running = |of: &Vec<Move>| of.iter().map(|_| Running::default()).collect();
        Ok(Network {
            rail: machine.rail.clone(),
            design: *design,
            element_bytes,
            running: moves.iter().map(running).collect(),
            links: vec![Vec::new(); schedules.len()],
            ended: vec![0; schedules.len()],
            schedules,
            thread_free_ns: vec![0.0; hosts],
            egress_free_ns: vec![0.0; hosts],
            ingress_free_ns: vec![0.0; hosts],
            sent_bytes: 0,
        })
    }

    /// How long the first host has been sending.
    pub(super) fn egress_ns(&self) -> f64 {
        self.sent_bytes as f64 / self.rail.link_bytes_per_ns
    }

    /// A stream has come to a move.
    pub(super) fn tell(&mut self, host: usize, number: usize, at_ns: f64, agenda: &mut Agenda) {
        self.running[host][number].is_told = true;
        self.begin_next(host, at_ns, agenda);
    }

    /// Begins moves in order, as many at a time as may run.
    fn begin_next(&mut self, host: usize, at_ns: f64, agenda: &mut Agenda) {
        let under_way = self.running[host].iter().filter(|of| of.has_begun && !of.has_ended).count();
        let next = self.running[host].iter().position(|of| !of.has_begun);
        let Some(next) = next.filter(|next| self.running[host][*next].is_told) else { return };
        if under_way < self.design.moves_at_a_time {
            self.running[host][next].has_begun = true;
            let begins = NetworkEvent::Begins { host, number: next };
            agenda.at(at_ns + self.rail.begin_ns, Event::Network(begins));
            self.begin_next(host, at_ns, agenda);
        }
    }

    pub(super) fn handle(&mut self, event: NetworkEvent, agenda: &mut Agenda) {
        match event {
            NetworkEvent::Begins { host, number } => self.begins(host, number, agenda),
            NetworkEvent::Posted { link, at } => {
                self.message(link, at).is_posted = true;
                self.send(link, at, agenda);
            }
            // Short messages do not wait for theirs.
            NetworkEvent::Credited { link, .. } if self.ended[link.number] == self.running.len() => {}
            NetworkEvent::Credited { link, at } => {
                self.message(link, at).is_credited = true;
                self.send(link, at, agenda);
            }
            NetworkEvent::Head { link, at } => {
                let ns = self.message(link, at).bytes as f64 / self.rail.link_bytes_per_ns;
                let free_ns = &mut self.ingress_free_ns[link.dst];
                *free_ns = free_ns.max(agenda.now_ns()) + ns;
                agenda.at(*free_ns, Event::Network(NetworkEvent::Arrived { link, at }));
            }
            NetworkEvent::Arrived { link, at } => {
                self.message(link, at).has_arrived = true;
                let bytes = self.message(link, at).bytes;
                let is_copied = !self.waits_for_credit(bytes);
                let acknowledged = NetworkEvent::Acknowledged { host: link.src, number: link.number };
                let latency_ns = if is_copied { 0.0 } else { self.rail.latency_ns };
                agenda.at(agenda.now_ns() + latency_ns, Event::Network(acknowledged));
                self.advance(link.dst, link.number, link.channel, agenda);
                self.end_if_done(link.dst, link.number, agenda);
            }
            NetworkEvent::Acknowledged { host, number } => {
                self.running[host][number].unacknowledged -= 1;
                self.end_if_done(host, number, agenda);
            }
        }
    }

    fn link(&mut self, link: Link) -> &mut Messages {
        let (hosts, channels) = (self.running.len(), channels(&self.schedules[link.number]));
        let links = &mut self.links[link.number];
        if links.is_empty() {
            links.resize(channels * hosts * hosts, Messages::default());
        }
        &mut links[(link.channel * hosts + link.src) * hosts + link.dst]
    }

    fn message(&mut self, link: Link, at: usize) -> &mut Message {
        let all = &mut self.link(link).all;
        if all.len() <= at {
            all.resize(at + 1, Message::default());
        }
        &mut all[at]
    }

    /// Whether a message of that length goes straight where its receiver wants it; shorter ones are copied at both sides.
    fn waits_for_credit(&self, bytes: u64) -> bool {
        self.rail.credits_from_bytes.is_some_and(|from| bytes > from)
    }

    /// A NIC sends a message once it is posted and may go.
    fn send(&mut self, link: Link, at: usize, agenda: &mut Agenda) {
        let message = *self.message(link, at);
        let waits = self.waits_for_credit(message.bytes) && !message.is_credited;
        if !message.is_posted || message.is_sent || waits {
            return;
        }
        self.message(link, at).is_sent = true;
        let bytes = message.bytes;
        let start_ns = self.egress_free_ns[link.src].max(agenda.now_ns());
        self.egress_free_ns[link.src] = start_ns + bytes as f64 / self.rail.link_bytes_per_ns;
        self.sent_bytes += if link.src == 0 { bytes } else { 0 };
        agenda.at(start_ns + self.rail.latency_ns, Event::Network(NetworkEvent::Head { link, at }));
    }

    fn begins(&mut self, host: usize, number: usize, agenda: &mut Agenda) {
        let schedule = Arc::clone(&self.schedules[number]);
        let channels = channels(&schedule);
        self.running[host][number].cursors = vec![Cursor::default(); channels];
        for channel in 0..channels {
            if self.design.receives_ahead {
                for step in &program(&schedule, channel, host).steps {
                    if let Step::Recv { peer, .. } = step {
                        (0..self.cut(step).len()).for_each(|_| self.ask(host, number, channel, *peer as usize, agenda));
                    }
                }
            }
            self.advance(host, number, channel, agenda);
        }
        self.end_if_done(host, number, agenda);
    }

    /// Lengths of a step's messages.
    fn cut(&self, step: &Step) -> Vec<u64> {
        let (bytes, most) = (step.count() * self.element_bytes, self.rail.message_bytes);
        (0..bytes.div_ceil(most).max(1)).map(|at| most.min(bytes - at * most)).collect()
    }

    /// Tells a sender where its next message goes.
    fn ask(&mut self, host: usize, number: usize, channel: usize, peer: usize, agenda: &mut Agenda) {
        let link = Link { number, channel, src: peer, dst: host };
        let asked = &mut self.link(link).asked;
        let at = std::mem::replace(asked, *asked + 1);
        agenda.at(agenda.now_ns() + self.rail.latency_ns, Event::Network(NetworkEvent::Credited { link, at }));
    }

    /// Does what a program can do now.
    fn advance(&mut self, host: usize, number: usize, channel: usize, agenda: &mut Agenda) {
        let schedule = Arc::clone(&self.schedules[number]);
        let program = program(&schedule, channel, host);
        // Its messages may come before the move has begun here.
        let Some(mut cursor) = self.running[host][number].cursors.get(channel).copied() else { return };
        while let Some(step) = program.steps.get(cursor.step) {
            match step {
                Step::Send { peer, .. } => {
                    let link = Link { number, channel, src: host, dst: *peer as usize };
                    self.post(link, step, agenda);
                }
                Step::Recv { peer, .. } => {
                    let peer = *peer as usize;
                    let messages = self.cut(step).len();
                    while !self.design.receives_ahead && cursor.asked < messages.min(cursor.come + ASKED_AT_A_TIME) {
                        self.ask(host, number, channel, peer, agenda);
                        cursor.asked += 1;
                    }
                    let link = Link { number, channel, src: peer, dst: host };
                    let of = self.link(link);
                    if !of.all.get(of.taken).is_some_and(|message| message.has_arrived) {
                        break;
                    }
                    of.taken += 1;
                    cursor.come += 1;
                    if cursor.come < messages {
                        continue;
                    }
                }
                // A rail moves data only, and its own part lies in place.
                Step::Copy { .. } | Step::RecvReduce { .. } | Step::Reduce { .. } => {}
            }
            cursor = Cursor { step: cursor.step + 1, ..Cursor::default() };
        }
        self.running[host][number].cursors[channel] = cursor;
    }

    /// Has the sender's thread post a step's messages, one after the other.
    fn post(&mut self, link: Link, step: &Step, agenda: &mut Agenda) {
        let lengths = self.cut(step);
        let posted = &mut self.link(link).posted;
        let first = std::mem::replace(posted, *posted + lengths.len());
        self.running[link.src][link.number].unacknowledged += lengths.len();
        for (at, bytes) in (first..).zip(lengths) {
            self.message(link, at).bytes = bytes;
            let free_ns = &mut self.thread_free_ns[link.src];
            *free_ns = free_ns.max(agenda.now_ns()) + self.rail.message_ns;
            agenda.at(*free_ns, Event::Network(NetworkEvent::Posted { link, at }));
        }
    }

    /// A move ends at a host when its programs have, and all that it has sent has arrived.
    fn end_if_done(&mut self, host: usize, number: usize, agenda: &mut Agenda) {
        let schedule = Arc::clone(&self.schedules[number]);
        let has_ended =
            |(channel, cursor): (usize, &Cursor)| cursor.step >= program(&schedule, channel, host).steps.len();
        let running = &mut self.running[host][number];
        if running.cursors.len() < channels(&schedule) || running.has_ended || running.unacknowledged > 0 {
            return;
        }
        if running.cursors.iter().enumerate().all(has_ended) && running.has_begun {
            running.has_ended = true;
            self.ended[number] += 1;
            if self.ended[number] == self.running.len() {
                self.links[number] = Vec::new();
            }
            let now_ns = agenda.now_ns();
            agenda.at(now_ns + self.rail.end_ns, Event::MoveTold { host, number });
            self.begin_next(host, now_ns, agenda);
        }
    }
}

fn channels(schedule: &Schedule) -> usize {
    match &schedule.shape {
        Shape::Message(channels) => channels.len(),
        Shape::SinglePass(_) => 0,
    }
}

fn program(schedule: &Schedule, channel: usize, host: usize) -> &Program {
    static NONE: Program = Program { ranks: Vec::new(), steps: Vec::new() };
    match &schedule.shape {
        Shape::Message(channels) => channels.get(channel).and_then(|of| of.programs.get(host)).unwrap_or(&NONE),
        Shape::SinglePass(_) => &NONE,
    }
}

/// The schedule that services run for a move.
fn schedule(problem: &Problem, channels: u32, element_bytes: u64) -> Result<Schedule, SimulationError> {
    let hosts: Vec<Vec<u32>> = (0..problem.nranks).map(|host| vec![host]).collect();
    let strategy = Strategy::initial(AlgorithmChoice::Auto, problem.nranks, channels, &hosts);
    let algorithm = CostModel::for_hosts(&hosts).of_rail().choose(problem, element_bytes as usize, &strategy)?;
    Ok(build(problem, algorithm, &strategy)?)
}
