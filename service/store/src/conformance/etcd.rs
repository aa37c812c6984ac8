//! The suite on etcd, and what only etcd can do wrong. They need its program: `tests/store/check`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Open, SUITE, done, put, transaction, value};
use crate::testing::{Etcd, Proxy, Weather};
use crate::{EtcdSettings, EtcdStore, Keys, Store, StoreError, WatchError};

fn open(settings: &EtcdSettings) -> Box<dyn Store> {
    Box::new(EtcdStore::new(settings).unwrap())
}

/// Each test of the suite under a prefix of its own.
fn run(settings: &EtcdSettings) {
    for (number, test) in SUITE.iter().enumerate() {
        let settings = EtcdSettings { prefix: format!("{}{number}/", settings.prefix), ..settings.clone() };
        let open: Open<'_> = &|| open(&settings);
        test(open);
    }
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn on_etcd() {
    run(&Etcd::start().settings("/suite/"));
}

/// Certificates that one authority has signed: of etcd's address, and of a client.
struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        authority.distinguished_name.push(rcgen::DnType::CommonName, "authority of a test");
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = authority.self_signed(&key).unwrap();
        std::fs::write(folder.path().join("authority.crt"), certificate.pem()).unwrap();
        let issuer = rcgen::Issuer::new(authority, key);
        // Etcd's gateway believes nothing of a client with a common name, if there are users.
        for name in ["etcd", "client", "named"] {
            let key = rcgen::KeyPair::generate().unwrap();
            // Addresses of tests.
            let mut names: Vec<String> = vec!["localhost".into()];
            names.extend((1..=250).map(|last| {
                let process = (std::process::id() % 65_000).to_be_bytes();
                format!("127.{}.{}.{last}", 224 + process[2] % 14, process[3])
            }));
            let mut of = rcgen::CertificateParams::new(names).unwrap();
            of.distinguished_name = rcgen::DistinguishedName::new();
            if name != "client" {
                of.distinguished_name.push(rcgen::DnType::CommonName, name);
            }
            // Its gateway is a client of its own.
            of.extended_key_usages =
                vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth, rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let certificate = of.signed_by(&key, &issuer).unwrap();
            std::fs::write(folder.path().join(format!("{name}.crt")), certificate.pem()).unwrap();
            std::fs::write(folder.path().join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        Certificates { folder }
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn over_tls_with_a_user_and_nobody_else() {
    let keys = Certificates::new();
    let text = |name: &str| keys.file(name).display().to_string();
    let arguments = [
        format!("--cert-file={}", text("etcd.crt")),
        format!("--key-file={}", text("etcd.key")),
        format!("--trusted-ca-file={}", text("authority.crt")),
        "--client-cert-auth".to_owned(),
    ];
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let etcd = Etcd::with(1, "https", &arguments);
    let settings = EtcdSettings {
        authority: Some(keys.file("authority.crt")),
        identity: Some((keys.file("client.crt"), keys.file("client.key"))),
        timeout: Duration::from_secs(5),
        ..etcd.settings("/tls/")
    };
    // Users are made by whoever may, while nobody needs to be one.
    let root = EtcdStore::new(&settings).unwrap();
    make_user(root);
    let no_user = open(&settings).read(Keys::Only("a")).unwrap_err();
    // By the name in the certificate of etcd's own gateway, where that has one.
    let is_told = |reason: &str| reason.contains("user name is empty") || reason.contains("permission denied");
    assert!(matches!(&no_user, StoreError::Refused(reason) if is_told(reason)), "{no_user}");
    std::fs::write(keys.file("password"), "secret\n").unwrap();
    let user = |name: &str| Some((name.to_owned(), keys.file("password")));
    run(&EtcdSettings { user: user("mccs"), ..settings.clone() });
    let elsewhere = EtcdSettings { prefix: "/other/".into(), user: user("mccs"), ..settings.clone() };
    let denied = open(&elsewhere).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&denied, StoreError::Refused(reason) if reason.contains("permission denied")), "{denied}");
    std::fs::write(keys.file("password"), "guess").unwrap();
    let wrong = open(&EtcdSettings { user: user("mccs"), ..settings.clone() }).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&wrong, StoreError::Refused(reason) if reason.contains("authentication failed")), "{wrong}");
    std::fs::remove_file(keys.file("password")).unwrap();
    let none = open(&EtcdSettings { user: user("mccs"), ..settings.clone() }).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&none, StoreError::Refused(reason) if reason.contains("password file")), "{none}");
    let named = Some((keys.file("named.crt"), keys.file("named.key")));
    let named = open(&EtcdSettings { identity: named, ..settings.clone() }).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&named, StoreError::Refused(reason) if reason.contains("common name")), "{named}");
    // Another authority's etcd is none; a client without certificate is nobody.
    let others = Certificates::new();
    let stranger = EtcdSettings { authority: Some(others.file("authority.crt")), ..settings.clone() };
    let refused = open(&stranger).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(reason) if reason.contains("certificate")), "{refused}");
    let nobody = open(&EtcdSettings { identity: None, ..settings.clone() }).read(Keys::Only("a"));
    assert!(nobody.is_err(), "{nobody:?}");
    let plain = settings.endpoints.iter().map(|url| url.replace("https", "http")).collect();
    let plain = open(&EtcdSettings { endpoints: plain, ..settings }).read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&plain, StoreError::Invalid(_) | StoreError::Unavailable(_)), "{plain}");
}

/// Makes a user with rights for a prefix, and has etcd ask who one is.
fn make_user(mut root: EtcdStore) {
    for (path, body) in [
        ("/v3/auth/user/add", r#"{"name":"root","password":"root"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/role/add", r#"{"name":"mccs"}"#),
        ("/v3/auth/user/add", r#"{"name":"mccs","password":"secret"}"#),
        ("/v3/auth/user/grant", r#"{"user":"mccs","role":"mccs"}"#),
        // "/tls/" to "/tls0".
        (
            "/v3/auth/role/grant",
            r#"{"name":"mccs","perm":{"permType":"READWRITE","key":"L3Rscy8=","range_end":"L3RsczA="}}"#,
        ),
        ("/v3/auth/enable", "{}"),
    ] {
        root.ask(path, body).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn when_its_leader_dies_others_answer_and_nothing_is_lost() {
    let mut etcd = Etcd::with(3, "http", &[]);
    let mut store = open(&etcd.settings("/leader/"));
    let written = AtomicU64::new(0);
    let write = |store: &mut dyn Store| {
        let next = written.load(Ordering::Relaxed) + 1;
        let text = next.to_string();
        loop {
            // Putting the same again is harmless, so what is not known is done again.
            match store.commit(&transaction(vec![], vec![put("n", text.as_bytes())])) {
                Ok(outcome) => {
                    done(outcome);
                    break;
                }
                Err(StoreError::Unavailable(_) | StoreError::Unknown(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        written.store(next, Ordering::Relaxed);
    };
    for member in 0..3 {
        write(&mut *store);
        etcd.kill(member);
        write(&mut *store);
        let entry = loop {
            match store.read(Keys::Only("n")) {
                Ok(snapshot) => break snapshot.entries[0].clone(),
                Err(StoreError::Unavailable(_)) => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(entry.value, written.load(Ordering::Relaxed).to_string().into_bytes());
        etcd.restart(member);
    }
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn a_majority_that_is_away_is_no_store_and_comes_back() {
    let mut etcd = Etcd::with(3, "http", &[]);
    let mut store = open(&etcd.settings("/majority/"));
    done(store.commit(&transaction(vec![], vec![put("n", b"1")])).unwrap());
    let revision = store.read(Keys::Under("")).unwrap().revision;
    let mut watch = store.watch(revision).unwrap();
    etcd.kill(1);
    etcd.kill(2);
    let read = store.read(Keys::Only("n"));
    assert!(matches!(read, Err(StoreError::Unavailable(_))), "{read:?}");
    // Whoever watches the member that is left hears that it has lost the others.
    let ended = std::iter::repeat_with(|| watch.next(Duration::from_secs(1))).find_map(Result::err);
    assert!(matches!(ended, Some(WatchError::Store(StoreError::Unavailable(_)))), "{ended:?}");
    etcd.restart(1);
    while store.read(Keys::Only("n")).is_err() {}
    assert_eq!(store.read(Keys::Only("n")).unwrap().entries[0].value, b"1");
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn a_slow_or_cut_network_ends_calls_in_time_and_says_what_is_not_known() {
    let etcd = Etcd::start();
    let proxy = Proxy::to(etcd.address(0));
    let settings = EtcdSettings {
        endpoints: vec![proxy.url()],
        timeout: Duration::from_millis(300),
        ..etcd.settings("/network/")
    };
    let mut store = open(&settings);
    done(store.commit(&transaction(vec![], vec![put("n", b"1")])).unwrap());
    for weather in [Weather::Slow(Duration::from_secs(1)), Weather::Cut] {
        proxy.set(weather);
        let read = store.read(Keys::Only("n"));
        assert!(matches!(read, Err(StoreError::Unavailable(_))), "{weather:?} {read:?}");
        let written = store.commit(&transaction(vec![], vec![put("n", b"2")]));
        assert!(matches!(written, Err(StoreError::Unknown(_) | StoreError::Unavailable(_))), "{weather:?} {written:?}");
        proxy.set(Weather::Calm);
        while store.read(Keys::Only("n")).is_err() {}
    }
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn a_full_etcd_says_so_and_can_be_read() {
    let etcd = Etcd::with(1, "http", &["--quota-backend-bytes=1048576"]);
    let mut store = open(&etcd.settings("/full/"));
    done(store.commit(&transaction(vec![], vec![put("small", b"1")])).unwrap());
    let full = (0..100)
        .find_map(|n| store.commit(&transaction(vec![], vec![put(&format!("large{n}"), &value(200_000))])).err());
    assert!(matches!(full, Some(StoreError::Full(_))), "{full:?}");
    assert_eq!(store.read(Keys::Only("small")).unwrap().entries[0].value, b"1");
}

#[test]
#[ignore = "needs etcd; see tests/store/check"]
fn changes_that_were_compacted_are_said_to_be() {
    let etcd = Etcd::start();
    let mut store = EtcdStore::new(&etcd.settings("/compacted/")).unwrap();
    let first = done(store.commit(&transaction(vec![], vec![put("n", b"1")])).unwrap());
    let last = (0..5).map(|_| done(store.commit(&transaction(vec![], vec![put("n", b"2")])).unwrap())).last().unwrap();
    store.ask("/v3/kv/compaction", &format!(r#"{{"revision":"{}"}}"#, last.0)).unwrap();
    let mut watch = store.watch(first).unwrap();
    assert_eq!(watch.next(Duration::from_secs(30)), Err(WatchError::Compacted));
}
