use super::*;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A controller whose exchange takes nothing, and what that was to tell.
fn stuck() -> (ControllerEngine, Mailbox<Request>) {
    let exchange = Mailbox::new(1);
    let settings = ControllerSettings {
        own: name("a"),
        host: name("a"),
        hosts: vec![name("a"), name("b"), name("c")],
        addresses: (Vec::new(), None),
        files: None,
        links: None,
    };
    let outputs = (exchange.sender(), Mailbox::new(1).sender());
    let engine = ControllerEngine::new(&settings, Mailbox::new(8), outputs, Arc::default(), Arc::default());
    (engine, exchange)
}

/// All that hosts were to be told and were.
fn told(engine: &mut ControllerEngine, exchange: &Mailbox<Request>) -> Vec<(Name, ControllerMessage)> {
    let mut told = Vec::new();
    while {
        engine.settle(Instant::now());
        engine.push_backlog();
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
        assert!(engine.backlog.len() <= BACKLOG_MAX);
    }
    let told = told(&mut engine, &exchange);
    let is_sync = |(_, message): &&(Name, ControllerMessage)| matches!(message, ControllerMessage::Sync { .. });
    let anew: Vec<&Name> = told.iter().filter(is_sync).map(|(host, _)| host).collect();
    // It is to report anew; the others, of whom nothing was dropped, are not.
    assert!(!anew.is_empty() && anew.iter().all(|host| **host == name("b")), "{anew:?}");
}
