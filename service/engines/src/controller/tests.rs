use std::collections::BTreeSet;

use mccs_controller::communicators::communicator::{ORDER_TIME, PAUSE};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest, Standing};
use mccs_controller::messages::message::Report;
use mccs_controller::messages::outbox::{Output, Question, Ticket};
use mccs_exchange::protocol::CommId;
use mccs_telemetry::placed::{Began, Chosen, HostRanks};

use super::outbox::BACKLOG_MAX;
use super::*;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Settings of the first of these hosts, which is the controller.
fn settings(hosts: &[&str]) -> ControllerSettings {
    ControllerSettings {
        own: name(hosts[0]),
        choice: ControllerChoice::Host(name(hosts[0])),
        hosts: hosts.iter().map(|host| name(host)).collect(),
        addresses: (Vec::new(), None),
        inventory: Inventory::default(),
        files: None,
        links: None,
        history: None,
    }
}

/// The example's topology, and a policy.
fn files(folder: &std::path::Path, policy: &str) -> Option<ControllerFiles> {
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let topology = file("topology.toml", include_str!("../../../../config/examples/topology.toml"));
    Some(ControllerFiles { topology, policy: file("policy.toml", policy) })
}

/// A controller whose exchange takes nothing, and what that was to tell.
fn stuck() -> (ControllerEngine, Mailbox<Request>) {
    stuck_with(&settings(&["a", "b", "c"]))
}

fn stuck_with(settings: &ControllerSettings) -> (ControllerEngine, Mailbox<Request>) {
    let exchange = Mailbox::new(1);
    let (inputs, proxy) = (Mailbox::new(8), Mailbox::new(1).sender());
    let engine = ControllerEngine::new(settings, inputs, exchange.sender(), proxy, Arc::default(), Arc::default());
    (engine.unwrap(), exchange)
}

/// All that hosts were to be told and were.
fn told(engine: &mut ControllerEngine, exchange: &Mailbox<Request>) -> Vec<(Name, ControllerMessage)> {
    let mut told = Vec::new();
    while {
        engine.settle(Instant::now());
        engine.outbox.push();
        let request = exchange.pop();
        if let Some(Request::Tell { to, body }) = &request {
            told.extend(ControllerMessage::decode(body).ok().map(|message| (to.clone(), message)));
        }
        request.is_some()
    } {}
    told
}

#[test]
fn what_a_controller_is_to_tell_is_bounded_and_told_anew_where_it_was_dropped() {
    let (mut engine, exchange) = stuck();
    let now = Instant::now();
    engine.take(ControllerInput::Exchange(Event::Met { host: name("b") }), now);
    engine.take(ControllerInput::Exchange(Event::Met { host: name("c") }), now);
    told(&mut engine, &exchange);
    // A host that asks for the time again and again, and is not answered.
    let question = AgentMessage::AskTime { question: 1 }.encode().unwrap();
    for _ in 0..2 * BACKLOG_MAX {
        let asks = Event::Told { from: name("b"), body: question.clone() };
        engine.take(ControllerInput::Exchange(asks), now);
        engine.settle(now);
        assert!(engine.outbox.len() <= BACKLOG_MAX);
    }
    let told = told(&mut engine, &exchange);
    let is_sync = |(_, message): &&(Name, ControllerMessage)| matches!(message, ControllerMessage::Sync { .. });
    let anew: Vec<&Name> = told.iter().filter(is_sync).map(|(host, _)| host).collect();
    // It is to report anew; the others, of whom nothing was dropped, are not.
    assert!(!anew.is_empty() && anew.iter().all(|host| **host == name("b")), "{anew:?}");
}

/// Polls until there is nothing to do, and returns when time alone makes work again.
fn poll(engine: &mut ControllerEngine, now: Instant) -> Option<Instant> {
    loop {
        match engine.poll(&Context::new(now, 64)) {
            Progress::Idle { wake_at } => return wake_at,
            Progress::Busy => {}
            Progress::Done => panic!("it does not end"),
        }
    }
}

/// Nothing is heard and nothing is changed: what is due by the controller's own deadlines is done when the engine said that it is to be polled.
#[test]
fn what_time_alone_makes_due_is_done_when_the_engine_says() {
    let folder = tempfile::tempdir().unwrap();
    let [root, other] = ["host-b", "host-c"].map(name);
    let files = files(folder.path(), "[policy]\nname = \"ffa\"\n");
    let settings = ControllerSettings { files, ..settings(&["host-a", "host-b", "host-c", "host-d"]) };
    let (exchange, proxy) = (Mailbox::new(1024), Mailbox::new(1));
    let inputs = Mailbox::new(64);
    let to_engine = inputs.sender();
    let engine =
        ControllerEngine::new(&settings, inputs, exchange.sender(), proxy.sender(), Arc::default(), Arc::default());
    let mut engine = engine.unwrap();
    let told = |exchange: &Mailbox<Request>| {
        let requests = std::iter::from_fn(|| exchange.pop());
        let told = requests
            .filter_map(|request| if let Request::Tell { to, body } = request { Some((to, body)) } else { None });
        told.filter_map(|(to, body)| Some((to, ControllerMessage::decode(&body).ok()?))).collect::<Vec<_>>()
    };
    let is_order =
        |(to, message): &(Name, ControllerMessage)| *to == root && matches!(message, ControllerMessage::Order(_));

    let mut now = Instant::now();
    assert!(to_engine.send(ControllerInput::Exchange(Event::Met { host: root.clone() })).is_ok());
    poll(&mut engine, now);
    let life = told(&exchange).into_iter().find_map(|(to, message)| match message {
        ControllerMessage::Sync { life, .. } if to == root => Some(life),
        _ => None,
    });
    // A communicator of that host and another, which is not there yet.
    let ranks = |host: &Name, rank: u32| HostRanks { host: host.to_string(), ranks: vec![rank], devices: Vec::new() };
    let report = Report {
        comm: CommId { root: root.clone(), incarnation: 1, number: 1 },
        number: 1,
        tenant: "t".into(),
        hosts: vec![ranks(&root, 0), ranks(&other, 1)],
        began_ms: 1,
        arrival: None,
        chosen: Chosen { rings: vec![vec![0, 1]], ..Chosen::default() },
        profile: None,
        is_pinned: false,
        began: Began { channels: 1, ..Began::default() },
    };
    let synced = AgentMessage::Synced { life: life.expect("asked to report"), is_paced: false };
    for message in [AgentMessage::Report(Box::new(report)), synced] {
        let body = message.encode().unwrap();
        assert!(to_engine.send(ControllerInput::Exchange(Event::Told { from: root.clone(), body })).is_ok());
    }
    let mut wake_at = poll(&mut engine, now);
    assert!(!told(&exchange).iter().any(is_order), "the third host is waited for");

    // From now on there is only the clock. First hosts that are not there are waited for no longer.
    let mut pass_until = |is_reached: &mut dyn FnMut(&mut ControllerEngine, Instant) -> bool| {
        loop {
            let at = wake_at.expect("it says when");
            assert!(at > now, "it is polled for nothing");
            now = at;
            wake_at = poll(&mut engine, now);
            if is_reached(&mut engine, now) {
                return now;
            }
        }
    };
    let began = pass_until(&mut |_, _| told(&exchange).iter().any(is_order));
    // Then the order, which nobody answers, is given up, and later given again.
    let refused = |engine: &mut ControllerEngine| {
        let Some(role) = &mut engine.role else { return false };
        let question = Question { ticket: Ticket::MAX, by: String::new() };
        role.controller.asked(ControllerRequest::Show, &question, 0, began);
        let mut outputs = std::iter::from_fn(|| role.controller.poll_output());
        let Some(Output::Answer { answer: Ok(answer), .. }) =
            outputs.find(|output| matches!(output, Output::Answer { .. }))
        else {
            panic!("no answer");
        };
        let ControllerAnswer::Show(view) = *answer else { panic!("something else") };
        matches!(&view.communicators[0].state, Standing::Refused(why) if why.contains("did not answer"))
    };
    let given_up = pass_until(&mut |engine, _| refused(engine));
    assert_eq!(given_up, began + ORDER_TIME);
    let again = pass_until(&mut |_, _| told(&exchange).iter().any(is_order));
    assert_eq!(again, given_up + PAUSE);
}

#[test]
fn the_last_pace_of_a_communicator_is_the_last_that_engines_hear_of() {
    let proxy = Mailbox::new(1);
    let settings = ControllerSettings { choice: ControllerChoice::Host(name("b")), ..settings(&["a", "b"]) };
    let mut engine = ControllerEngine::new(
        &settings,
        Mailbox::new(8),
        Mailbox::new(1).sender(),
        proxy.sender(),
        Arc::default(),
        Arc::default(),
    )
    .unwrap();
    let comm = CommId { root: name("a"), incarnation: 1, number: 1 };
    let mut heard = Vec::new();
    let mut hear = || match proxy.pop() {
        Some(ProxyMessage::Controller(ControllerOrder::SetPace { pace, .. })) => heard.push(pace.cap_bps),
        Some(_) => panic!("something else"),
        None => {}
    };
    for cap_bps in 0..4 {
        let pace = mccs_model::rate_limit::Pace { cap_bps: Some(cap_bps), ..Default::default() };
        engine.execute([AgentOutput::Pace { comm: comm.clone(), pace }]);
        if cap_bps == 1 {
            // There is room for one of them.
            hear();
        }
    }
    while {
        let waits = engine.outbox.push();
        hear();
        waits
    } {}
    hear();
    assert_eq!(heard, (0..4).map(Some).collect::<Vec<_>>());
}

/// A life of the controller ends, and the next one knows what it has done.
#[test]
fn the_history_of_a_life_is_known_to_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let history = Some(folder.path().join("history.jsonl"));
    let settings = ControllerSettings { history, ..settings(&["a", "b"]) };
    let start = || {
        ControllerEngine::new(
            &settings,
            Mailbox::new(8),
            Mailbox::new(64).sender(),
            Mailbox::new(1).sender(),
            Arc::default(),
            Arc::default(),
        )
        .unwrap()
    };
    let entries = |engine: &mut ControllerEngine| {
        let history = engine.role.as_mut().unwrap().controller.history();
        history.iter().map(|entry| (entry.number, entry.what.clone())).collect::<Vec<_>>()
    };
    let now = Instant::now();
    for life in 1..=3_u64 {
        let mut engine = start();
        engine.begin(now);
        assert_eq!(entries(&mut engine).len() as u64, life - 1);
        for event in [Event::Met { host: name("b") }, Event::Lost { host: name("b") }] {
            engine.take(ControllerInput::Exchange(event), now);
        }
        engine.settle(now);
        assert_eq!(entries(&mut engine).last(), Some(&(life, "host b lost".to_owned())));
    }
}

/// A single decision may be more than what else may wait for the exchange.
#[test]
fn a_decision_is_told_whole_however_large_it_is() {
    const HOSTS: [&str; 4] = ["host-a", "host-b", "host-c", "host-d"];
    // An order, and a pace for each host.
    const COMMS: usize = BACKLOG_MAX / HOSTS.len() + 1;
    let folder = tempfile::tempdir().unwrap();
    let policy = "[policy]\nname = \"ecmp\"\n[[tenant]]\nname = \"t\"\ncap = \"1Gbit/s\"\n";
    let settings = ControllerSettings { files: files(folder.path(), policy), ..settings(&HOSTS) };
    // It takes one message at a time.
    let (mut engine, exchange) = stuck_with(&settings);
    let now = Instant::now();
    for host in &HOSTS[1..] {
        engine.take(ControllerInput::Exchange(Event::Met { host: name(host) }), now);
    }
    let syncs = told(&mut engine, &exchange);
    let life = syncs.iter().find_map(|(_, message)| match message {
        ControllerMessage::Sync { life, .. } => Some(*life),
        _ => None,
    });
    let mut say = |host: &str, message: AgentMessage| {
        let body = message.encode().unwrap();
        engine.take(ControllerInput::Exchange(Event::Told { from: name(host), body }), now);
    };
    let ranks = |(rank, host): (u32, &&str)| HostRanks { host: (*host).into(), ranks: vec![rank], devices: Vec::new() };
    for number in 0..COMMS as u64 {
        let report = Report {
            comm: CommId { root: name("host-a"), incarnation: 1, number },
            number,
            tenant: "t".into(),
            hosts: (0..).zip(&HOSTS).map(ranks).collect(),
            began_ms: number,
            arrival: None,
            chosen: Chosen { rings: vec![vec![0, 1, 2, 3]], ..Chosen::default() },
            profile: None,
            is_pinned: false,
            began: Began { channels: 1, ..Began::default() },
        };
        say("host-a", AgentMessage::Report(Box::new(report)));
    }
    for host in HOSTS {
        say(host, AgentMessage::Synced { life: life.expect("asked to report"), is_paced: false });
    }
    let told = told(&mut engine, &exchange);
    let mut paced = BTreeSet::new();
    for (to, message) in &told {
        match message {
            ControllerMessage::Pace { comm, pace, .. } => {
                assert_eq!(pace.cap_bps, Some(1_000_000_000));
                assert!(paced.insert((to, comm)), "told twice");
            }
            message => assert!(!matches!(message, ControllerMessage::Sync { .. }), "{to} is to report anew"),
        }
    }
    assert_eq!(paced.len(), COMMS * HOSTS.len());
}
