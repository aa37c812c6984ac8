//! Acts by token: what is done and by whom it is said to be, and what is refused, each for its own reason.

use std::time::Duration;

use mccs_control::acts::{ACT_BYTES_MAX, Right, SignedAct, TokenMade, TokenWanted};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;
use ring::hmac;
use serde_json::json;

use super::documents::cluster;
use super::fixture::{Answer, Console};

const ROLLBACK: &str = r#"{"act":"policy_rollback"}"#;
const DRAIN: &str = r#"{"act":"drain","reason":"a fan"}"#;
const UNDRAIN: &str = r#"{"act":"undrain"}"#;

fn token(service: &TestService, rights: &[Right], acts: u32) -> TokenMade {
    let token = TokenWanted { name: "on-call".into(), rights: rights.to_vec(), seconds: 3600, acts };
    match call(&service.control_socket(), &ControlRequest::AddToken { token }) {
        Ok(ControlAnswer::Token(made)) => made,
        other => panic!("{other:?}"),
    }
}

/// As a client signs.
fn sign(token: &TokenMade, nonce: u128, body: &str) -> SignedAct {
    let (id, secret) = token.token.split_once('.').expect("an id and a secret");
    let text = format!("mccs-act-1\n{id}\n{nonce:032x}\n{body}");
    let mac = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()), text.as_bytes());
    let mac = mac.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    SignedAct { id: id.to_owned(), nonce: format!("{nonce:032x}"), mac, body: body.to_owned() }
}

fn send(console: &Console, act: &SignedAct, headers: &[(&str, &str)]) -> Answer {
    let SignedAct { id, nonce, mac, body } = act;
    let authorization = format!("mccs id=\"{id}\", nonce=\"{nonce}\", mac=\"{mac}\"");
    let mut all = vec![("Authorization", &*authorization), ("Content-Type", "application/json")];
    all.extend(headers);
    console.ask("POST", "/api/v1/acts", &all, body)
}

fn refused(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status, answer.code().as_str()), (status, code), "{answer:?}");
}

fn is_draining(service: &TestService) -> bool {
    service.service().registry.is_draining()
}

#[test]
fn a_token_acts_at_the_observers_socket_and_each_misuse_has_its_reason() {
    let service = TestService::start("[observers]\nusers = [0]\n");
    let console = Console::start(&service.control_socket().with_file_name("mccs-observers.sock"));
    let own = token(&service, &[Right::Host], 3);
    refused(&console.ask("POST", "/api/v1/acts", &[], DRAIN), 401, "no_token");
    refused(&console.ask("POST", "/api/v1/acts", &[("Authorization", "Bearer x")], DRAIN), 400, "bad_signature");
    let signed = sign(&own, 1, DRAIN);
    let altered = SignedAct { body: UNDRAIN.into(), ..signed.clone() };
    refused(&send(&console, &altered, &[]), 401, "wrong_token");
    let stranger = SignedAct { id: "0".repeat(16), ..signed.clone() };
    refused(&send(&console, &stranger, &[]), 401, "wrong_token");
    refused(&send(&console, &sign(&own, 1, ROLLBACK), &[]), 403, "no_right");
    refused(&send(&console, &sign(&own, 1, "{}"), &[]), 400, "bad_act");
    refused(&send(&console, &signed, &[("Origin", "http://evil.test")]), 403, "other_site");
    refused(&send(&console, &sign(&own, 1, &" ".repeat(ACT_BYTES_MAX + 1)), &[]), 413, "too_long");
    assert!(!is_draining(&service), "nothing was done yet");

    let done = send(&console, &signed, &[]);
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(done.json()["answer"]["drain"]["draining"], true);
    assert!(is_draining(&service));
    refused(&send(&console, &signed, &[]), 409, "replayed");
    assert_eq!(send(&console, &sign(&own, 2, UNDRAIN), &[]).status, 200);
    let view = send(&console, &sign(&own, 3, r#"{"act":"token"}"#), &[]).json()["answer"]["tokens"][0].clone();
    assert_eq!((view["acts_left"].as_u64(), view["name"].as_str()), (Some(0), Some("on-call")), "{view}");
    refused(&send(&console, &sign(&own, 4, DRAIN), &[]), 403, "spent");
    assert!(!is_draining(&service));

    let taken = token(&service, &[Right::Host], 9);
    let remove = ControlRequest::RemoveToken { id: taken.id.clone() };
    assert_eq!(call(&service.control_socket(), &remove).expect("an answer"), ControlAnswer::Done);
    refused(&send(&console, &sign(&taken, 1, DRAIN), &[]), 401, "removed");
    assert!(matches!(call(&service.control_socket(), &remove), Ok(ControlAnswer::Refused(_))), "once");
}

#[test]
fn observers_make_no_tokens() {
    let service = TestService::start("[observers]\nusers = [0]\n");
    let observers = service.control_socket().with_file_name("mccs-observers.sock");
    let wanted = TokenWanted { name: "x".into(), rights: Right::ALL.to_vec(), seconds: 3600, acts: 1 };
    for request in [
        ControlRequest::AddToken { token: wanted },
        ControlRequest::Tokens,
        ControlRequest::RemoveToken { id: "x".into() },
    ] {
        let answer = call(&observers, &request).expect("an answer");
        assert!(matches!(&answer, ControlAnswer::Refused(why) if why.contains("observers")), "{answer:?}");
    }
}

#[test]
fn a_policy_is_applied_and_history_says_by_whom() {
    let folder = tempfile::tempdir().expect("a directory");
    let hosts: TestHosts = cluster(folder.path());
    let console = Console::start(&hosts.service(0).control_socket());
    while console.get("/api/v1/policy").status != 200 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let own = token(hosts.service(0), &[Right::Policy], 1000);
    let apply = |text: &str| json!({ "act": "policy_apply", "text": text }).to_string();
    let ffa = apply("[policy]\nname = \"ffa\"\n");
    let wrong = send(&console, &sign(&own, 1, &apply("[policy]\nname = \"none\"\n")), &[]);
    refused(&wrong, 409, "refused");
    // The policy of the start may still be on its way.
    let is_early = |answer: &Answer| String::from_utf8_lossy(&answer.body).contains("is being put in force");
    let mut number = 2;
    let mut done = send(&console, &sign(&own, number, &ffa), &[]);
    while is_early(&done) {
        std::thread::sleep(Duration::from_millis(50));
        number += 1;
        done = send(&console, &sign(&own, number, &ffa), &[]);
    }
    assert_eq!(done.status, 200, "{done:?}");
    assert!(done.json()["answer"]["controller"]["applied"]["changed"].is_array(), "{done:?}");
    let history = console.document("policy/history?acts=true").to_string();
    assert!(history.contains("token on-call of uid"), "{history}");
}
