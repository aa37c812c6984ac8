//! Strangers that are not let in, and harm nobody: each test ends with a communicator among the others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use mccs_exchange::keys;
use mccs_exchange::protocol::{Hello, Life};
use mccs_exchange::tls::{Tls, TlsFiles};
use rustls::client::WantsClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, ConfigBuilder, Connection, DigitallySignedStruct, SignatureScheme, StreamOwned,
};

use crate::fixture::{Fixture, key, name};

pub type Stranger = StreamOwned<ClientConnection, TcpStream>;

/// Connects to the second of the fixture's hosts, as which it must prove itself, with these files.
fn connect(fixture: &Fixture, files: &TlsFiles, own: &str) -> Stranger {
    let hosts = [name(own), fixture.names[1].clone()];
    let tls = Tls::load(files, &hosts[0], &hosts).unwrap();
    let Some(Connection::Client(session)) = tls.connect(&fixture.names[1]) else { panic!("no client") };
    StreamOwned::new(session, TcpStream::connect(fixture.hosts[1].settings.listen).unwrap())
}

/// Connects as the first of the fixture's hosts, which does not run.
pub fn connect_as_first(fixture: &Fixture) -> Stranger {
    connect(fixture, &keys::files(&fixture.keys(), "a"), "a")
}

/// Writes, then reads until the other side hangs up. Returns whether it said anything.
fn say(mut stranger: impl Read + Write, bytes: &[u8]) -> bool {
    let _ = stranger.write_all(bytes).and_then(|()| stranger.flush());
    let mut heard = Vec::new();
    let _ = stranger.read_to_end(&mut heard);
    !heard.is_empty()
}

/// First message of a host, in a frame.
pub fn hello(own: &str) -> Vec<u8> {
    frame(&Hello { name: name(own), life: Life { incarnation: 1, generation: 0 }, known: None }.encode())
}

pub fn frame(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

/// Three hosts, of which the first does not run, so that a stranger may take its place.
pub fn fixture_without_first(change: impl Fn(&mut mccs_engines::exchange::ExchangeSettings)) -> Fixture {
    let mut fixture = Fixture::new(3);
    fixture.hosts.iter_mut().for_each(|host| change(&mut host.settings));
    for host in &mut fixture.hosts[1..] {
        host.start().unwrap();
    }
    fixture
}

/// The first host starts after all, and a communicator is set up.
pub fn all_is_well(mut fixture: Fixture) -> Fixture {
    fixture.hosts[0].start().unwrap();
    fixture.join(&key(9), 2, 100);
    fixture.complete(&key(9));
    fixture
}

#[test]
fn who_has_a_certificate_of_another_authority_is_refused_on_both_sides() {
    let mut fixture = Fixture::new(3);
    let theirs = fixture.directory.path().join("theirs");
    keys::make(&["a", "b", "c"], &theirs, false).unwrap();
    let good = fixture.hosts[0].settings.files.clone();
    fixture.hosts[0].settings.files = keys::files(&theirs, "a");
    fixture.start();
    // The one with the wrong keys connects, and finds that it does not trust whom it finds.
    fixture.until(|fixture| fixture.hosts[0].info("b").last_error.is_some_and(|error| error.contains("TLS")));
    fixture.until(|fixture| fixture.hosts[1].refused() > 3);
    assert!(!fixture.hosts[1].info("a").is_up);
    fixture.hosts[0].kill();
    // One that trusts anybody is refused by the other side.
    let before = fixture.hosts[1].refused();
    let files = keys::files(&theirs, "a");
    let certificate = CertificateDer::from_pem_file(&files.certificate).unwrap();
    let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
    let stranger = credulous(&fixture, |builder| builder.with_client_auth_cert(vec![certificate], key).unwrap());
    assert!(!fixture.during(move || say(stranger, &hello("a"))));
    fixture.until(|fixture| fixture.hosts[1].refused() > before);
    fixture.hosts[0].settings.files = good;
    all_is_well(fixture);
}

/// Trusts anybody, as an attacker would.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}

/// Connects to the second host without a look at who it is.
fn credulous(
    fixture: &Fixture,
    identity: impl FnOnce(ConfigBuilder<ClientConfig, WantsClientCert>) -> ClientConfig,
) -> Stranger {
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous));
    let session = ClientConnection::new(Arc::new(identity(builder)), ServerName::try_from("b").unwrap()).unwrap();
    StreamOwned::new(session, TcpStream::connect(fixture.hosts[1].settings.listen).unwrap())
}

#[test]
fn who_has_no_certificate_is_refused() {
    let mut fixture = fixture_without_first(|_| {});
    let stranger = credulous(&fixture, |builder| builder.with_no_client_auth());
    assert!(!fixture.during(move || say(stranger, &hello("a"))));
    fixture.until(|fixture| fixture.hosts[1].refused() == 1);
    all_is_well(fixture);
}

#[test]
fn who_is_not_in_the_list_is_refused() {
    let mut fixture = Fixture::new(3);
    let keys_of_four = fixture.directory.path().join("four");
    keys::make(&["a", "b", "c", "x"], &keys_of_four, false).unwrap();
    for host in &mut fixture.hosts {
        host.settings.files = keys::files(&keys_of_four, host.settings.own.as_str());
    }
    fixture.hosts[1].start().unwrap();
    let stranger = connect(&fixture, &keys::files(&keys_of_four, "x"), "x");
    assert!(!fixture.during(move || say(stranger, b"")));
    fixture.until(|fixture| fixture.hosts[1].refused() == 1);
    fixture.hosts[2].start().unwrap();
    all_is_well(fixture);
}

#[test]
fn who_says_another_name_than_its_certificate_is_refused() {
    let mut fixture = fixture_without_first(|_| {});
    let stranger = connect_as_first(&fixture);
    fixture.during(move || say(stranger, &hello("c")));
    let told = |fixture: &Fixture| {
        fixture.hosts[1].info("a").last_error.is_some_and(|error| error.contains("says that it is host c"))
    };
    fixture.until(told);
    all_is_well(fixture);
}

#[test]
fn who_should_wait_to_be_connected_to_is_refused() {
    let mut fixture = Fixture::new(3);
    for host in &mut fixture.hosts[1..2] {
        host.start().unwrap();
    }
    let stranger = connect(&fixture, &keys::files(&fixture.keys(), "c"), "c");
    fixture.during(move || say(stranger, b""));
    fixture.until(|fixture| fixture.hosts[1].refused() == 1);
    fixture.hosts[2].start().unwrap();
    all_is_well(fixture);
}

#[test]
fn another_version_is_told_and_refused_each_time() {
    let mut fixture = fixture_without_first(|_| {});
    for _ in 0..3 {
        let stranger = connect_as_first(&fixture);
        let mut bytes = hello("a");
        bytes[4 + 5] = 99;
        // It learns with whom it speaks, and can say so to its operator.
        assert!(fixture.during(move || say(stranger, &bytes)));
    }
    let told =
        |fixture: &Fixture| fixture.hosts[1].info("a").last_error.is_some_and(|error| error.contains("version 99"));
    fixture.until(told);
    all_is_well(fixture);
}

#[test]
fn garbage_is_refused_before_and_after_it_is_known_whose() {
    let mut fixture = fixture_without_first(|_| {});
    let address = fixture.hosts[1].settings.listen;
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 100], &[0x16, 0x03, 0x01, 0xff, 0xff, 1, 2, 3]] {
        let bytes = bytes.to_vec();
        let before = fixture.hosts[1].refused();
        fixture.during(move || {
            let mut stranger = TcpStream::connect(address).unwrap();
            let _ = stranger.write_all(&bytes);
            let _ = stranger.shutdown(std::net::Shutdown::Write);
            let _ = stranger.read_to_end(&mut Vec::new());
        });
        fixture.until(|fixture| fixture.hosts[1].refused() > before);
    }
    let greeted = [hello("a"), frame(b"no frame of ours")].concat();
    for bytes in [frame(b"no frame of ours"), frame(&[]), u32::MAX.to_le_bytes().to_vec(), greeted] {
        let stranger = connect_as_first(&fixture);
        fixture.during(move || say(stranger, &bytes));
    }
    fixture.until(|fixture| !fixture.hosts[1].is_up(&fixture.names[0]));
    all_is_well(fixture);
}

#[test]
fn who_stops_halfway_is_let_go() {
    let mut fixture = fixture_without_first(|settings| settings.handshake_timeout = Duration::from_millis(300));
    let address = fixture.hosts[1].settings.listen;
    // Nothing, half a TLS record, half a frame.
    for bytes in [&[][..], &[0x16, 3, 1]] {
        let bytes = bytes.to_vec();
        fixture.during(move || say(TcpStream::connect(address).unwrap(), &bytes));
    }
    assert_eq!(fixture.hosts[1].refused(), 2);
    let told =
        |fixture: &Fixture| fixture.hosts[1].info("a").last_error.is_some_and(|error| error.contains("did not prove"));
    // The last error is told: a dial of the host's own may have failed meanwhile.
    while !told(&fixture) {
        let stranger = connect_as_first(&fixture);
        fixture.during(move || say(stranger, &[100, 0, 0, 0, b'H', b'm']));
    }
    all_is_well(fixture);
}

#[test]
fn who_hangs_up_without_a_word_was_not_refused() {
    let mut fixture = fixture_without_first(|_| {});
    let address = fixture.hosts[1].settings.listen;
    fixture.during(move || drop(TcpStream::connect(address).unwrap()));
    // It was there before whoever comes next.
    fixture.during(move || drop(TcpStream::connect(address).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n")));
    fixture.until(|fixture| fixture.hosts[1].refused() > 0);
    let fixture = all_is_well(fixture);
    assert_eq!(fixture.hosts[1].refused(), 1);
}

#[test]
fn a_crowd_of_strangers_keeps_no_host_out() {
    let mut fixture = fixture_without_first(|_| {});
    let address = fixture.hosts[1].settings.listen;
    let crowd: Vec<_> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    // So many of one address may stay until their time is over; the others are sent away.
    fixture.until(|fixture| fixture.hosts[1].refused() == 8);
    assert_eq!(fixture.hosts[1].engine.as_ref().unwrap().refusals().lines, 1);
    all_is_well(fixture);
    drop(crowd);
}
