//! Promises of every store, as tests that run against each.

mod etcd;

use std::time::{Duration, Instant};

use crate::{
    Change, FolderStore, Guard, Keys, LeaseId, Outcome, Revision, Store, StoreError, Transaction, VALUE_BYTES_MAX,
    WatchError, Write,
};

/// Handles of one store.
type Open<'a> = &'a dyn Fn() -> Box<dyn Store>;

/// Long enough for whatever is sure to come; what hangs fails there.
const SURELY: Duration = Duration::from_secs(60);

fn put(key: &str, value: &[u8]) -> Write {
    Write::Put { key: key.into(), value: value.to_vec(), lease: None }
}

fn put_with(key: &str, lease: LeaseId) -> Write {
    Write::Put { key: key.into(), value: b"leased".to_vec(), lease: Some(lease) }
}

fn transaction(guards: Vec<Guard>, writes: Vec<Write>) -> Transaction {
    Transaction { guards, writes }
}

fn done(outcome: Outcome) -> Revision {
    match outcome {
        Outcome::Done(revision) => revision,
        Outcome::Conflict => panic!("a guard did not hold"),
    }
}

/// Random bytes, also such as are no text.
fn value(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| rand::random()).collect()
}

fn keys_are_read_as_they_were_put(open: Open<'_>) {
    let mut store = open();
    let before = store.read(Keys::Under("")).unwrap().revision;
    let (one, other) = (value(1000), value(0));
    let writes = vec![put("a/one", &one), put("a/other", &other), put("b", b"b")];
    let at = done(store.commit(&transaction(vec![], writes)).unwrap());
    assert!(at > before);
    let mut again = open();
    let snapshot = again.read(Keys::Under("a/")).unwrap();
    assert!(snapshot.revision >= at);
    let read: Vec<_> = snapshot.entries.iter().map(|entry| (&*entry.key, &entry.value)).collect();
    assert_eq!(read, [("a/one", &one), ("a/other", &other)]);
    assert!(snapshot.entries.iter().all(|entry| (entry.created, entry.modified, entry.lease) == (at, at, None)));
    assert_eq!(again.read(Keys::Only("a")).unwrap().entries, []);
    assert_eq!(again.read(Keys::Only("b")).unwrap().entries.len(), 1);
    let later = done(store.commit(&transaction(vec![], vec![put("b", b"c")])).unwrap());
    let entry = again.read(Keys::Only("b")).unwrap().get("b").unwrap().clone();
    assert_eq!((entry.value, entry.created, entry.modified), (b"c".to_vec(), at, later));
    done(store.commit(&transaction(vec![], vec![Write::Delete { key: "b".into() }])).unwrap());
    assert_eq!(again.read(Keys::Only("b")).unwrap().entries, []);
}

fn a_transaction_is_done_whole_or_not_at_all(open: Open<'_>) {
    let mut store = open();
    let at = done(store.commit(&transaction(vec![Guard::Absent("k".into())], vec![put("k", b"1")])).unwrap());
    let refused = [
        vec![Guard::Absent("k".into())],
        vec![Guard::Created("k".into(), Revision(at.0 - 1))],
        vec![Guard::Modified("k".into(), Revision(at.0 + 100))],
        vec![Guard::Created("k".into(), at), Guard::Modified("none".into(), at)],
        vec![Guard::Created("none".into(), at)],
    ];
    for guards in refused {
        let writes = vec![put("k", b"2"), put("l", b"2")];
        assert_eq!(store.commit(&transaction(guards, writes)).unwrap(), Outcome::Conflict);
    }
    let next = transaction(vec![Guard::Modified("k".into(), at)], vec![put("k", b"3")]);
    done(store.commit(&next).unwrap());
    assert_eq!(store.commit(&next).unwrap(), Outcome::Conflict, "it was put since");
    done(store.commit(&transaction(vec![Guard::Created("k".into(), at)], vec![put("m", b"4")])).unwrap());
    let values: Vec<_> = store.read(Keys::Under("")).unwrap().entries.into_iter().map(|entry| entry.value).collect();
    assert_eq!(values, [b"3", b"4"]);
}

fn of_many_who_set_one_key_at_once_one_wins_each_time(open: Open<'_>) {
    const WRITERS: u64 = 4;
    const ROUNDS: u64 = 25;
    done(open().commit(&transaction(vec![], vec![put("n", b"0")])).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..WRITERS {
            let mut store = open();
            scope.spawn(move || {
                let mut won = 0;
                while won < ROUNDS {
                    let entry = store.read(Keys::Only("n")).unwrap().entries.remove(0);
                    let next = String::from_utf8(entry.value).unwrap().parse::<u64>().unwrap() + 1;
                    let guards = vec![Guard::Modified("n".into(), entry.modified)];
                    let writes = vec![put("n", next.to_string().as_bytes())];
                    won += u64::from(store.commit(&transaction(guards, writes)).unwrap() != Outcome::Conflict);
                }
            });
        }
    });
    let entry = open().read(Keys::Only("n")).unwrap().entries.remove(0);
    assert_eq!(entry.value, (WRITERS * ROUNDS).to_string().into_bytes());
}

fn a_key_goes_with_its_lease(open: Open<'_>) {
    let mut store = open();
    let (kept, left, revoked) = (
        store.grant(Duration::from_secs(2)).unwrap(),
        store.grant(Duration::from_millis(1500)).unwrap(),
        store.grant(Duration::from_secs(600)).unwrap(),
    );
    let began = Instant::now();
    let writes = vec![put_with("kept", kept), put_with("left", left), put_with("revoked", revoked), put("none", b"")];
    done(store.commit(&transaction(vec![], writes)).unwrap());
    assert_eq!(store.read(Keys::Only("left")).unwrap().entries[0].lease, Some(left));
    store.revoke(revoked).unwrap();
    store.revoke(revoked).unwrap();
    assert_eq!(store.read(Keys::Only("revoked")).unwrap().entries, []);
    assert_eq!(store.keep_alive(revoked).unwrap(), None);
    while !store.read(Keys::Only("left")).unwrap().entries.is_empty() {
        let ttl = store.keep_alive(kept).unwrap().expect("it is kept");
        assert!(ttl >= Duration::from_secs(2), "{ttl:?}");
        assert!(began.elapsed() < SURELY);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(began.elapsed() >= Duration::from_millis(1500), "no earlier than was said");
    let keys: Vec<_> = store.read(Keys::Under("")).unwrap().entries.into_iter().map(|entry| entry.key).collect();
    assert_eq!(keys, ["kept", "none"]);
    let late = store.commit(&transaction(vec![], vec![put_with("late", left)]));
    assert!(matches!(late, Err(StoreError::Refused(_) | StoreError::Invalid(_))), "{late:?}");
}

/// Reads changes until they have said so much of each key; the last word on each.
fn told(watch: &mut dyn crate::Watch, until: impl Fn(&[Change]) -> bool) -> Vec<Change> {
    let (mut all, began) = (Vec::<Change>::new(), Instant::now());
    while !until(&all) {
        assert!(began.elapsed() < SURELY, "{all:?}");
        for change in watch.next(Duration::from_secs(1)).unwrap() {
            all.retain(|before| before.key != change.key);
            all.push(change);
        }
    }
    all
}

fn a_watch_tells_what_is_put_and_what_goes(open: Open<'_>) {
    let (mut store, mut writer) = (open(), open());
    done(writer.commit(&transaction(vec![], vec![put("before", b"")])).unwrap());
    let revision = store.read(Keys::Under("")).unwrap().revision;
    let mut watch = store.watch(revision).unwrap();
    assert_eq!(watch.next(Duration::from_millis(20)).unwrap(), []);
    let lease = writer.grant(Duration::from_secs(2)).unwrap();
    let bytes = value(100_000);
    let at = done(writer.commit(&transaction(vec![], vec![put_with("leased", lease), put("large", &bytes)])).unwrap());
    let changes = told(&mut *watch, |changes| changes.len() == 2);
    let large = changes.iter().find(|change| change.key == "large").and_then(|change| change.entry.clone()).unwrap();
    assert_eq!((large.value, large.modified), (bytes, at));
    done(writer.commit(&transaction(vec![], vec![Write::Delete { key: "before".into() }])).unwrap());
    // The lease ends by itself meanwhile.
    let is_gone = |changes: &[Change], key: &str| changes.iter().any(|c| c.key == key && c.entry.is_none());
    let changes = told(&mut *watch, |changes| is_gone(changes, "before") && is_gone(changes, "leased"));
    assert_eq!(changes.len(), 2, "{changes:?}");
}

/// A store may have forgotten; then it says so.
fn a_watch_from_before_tells_all_since_or_that_it_cannot(open: Open<'_>) {
    let mut store = open();
    let revision = store.read(Keys::Under("")).unwrap().revision;
    done(store.commit(&transaction(vec![], vec![put("a", b"1")])).unwrap());
    done(store.commit(&transaction(vec![], vec![Write::Delete { key: "a".into() }, put("b", b"2")])).unwrap());
    let mut watch = store.watch(revision).unwrap();
    match watch.next(SURELY) {
        Err(WatchError::Compacted) => {}
        Err(error) => panic!("{error}"),
        Ok(first) => {
            let mut changes = first;
            while changes.iter().all(|change| change.key != "b") {
                changes.extend(watch.next(SURELY).unwrap());
            }
            assert!(changes.iter().rev().find(|change| change.key == "a").is_some_and(|change| change.entry.is_none()));
        }
    }
}

fn what_is_too_long_is_refused_and_changes_nothing(open: Open<'_>) {
    let mut store = open();
    let long = transaction(vec![], vec![put("a", b"1"), put("long", &vec![0; VALUE_BYTES_MAX + 1])]);
    let refused = store.commit(&long);
    assert!(matches!(&refused, Err(StoreError::Refused(reason)) if reason.contains("long")), "{refused:?}");
    assert_eq!(store.read(Keys::Under("")).unwrap().entries, []);
}

/// Each with a store that is empty.
const SUITE: &[fn(Open<'_>)] = &[
    keys_are_read_as_they_were_put,
    a_transaction_is_done_whole_or_not_at_all,
    of_many_who_set_one_key_at_once_one_wins_each_time,
    a_key_goes_with_its_lease,
    a_watch_tells_what_is_put_and_what_goes,
    a_watch_from_before_tells_all_since_or_that_it_cannot,
    what_is_too_long_is_refused_and_changes_nothing,
];

#[test]
fn in_a_folder() {
    for test in SUITE {
        let folder = tempfile::tempdir().unwrap();
        test(&|| Box::new(FolderStore::open(folder.path())));
    }
}

#[test]
fn a_folder_that_was_written_by_half_or_by_others_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = FolderStore::open(folder.path());
    done(store.commit(&transaction(vec![], vec![put("a", b"1")])).unwrap());
    // A process that has died while it wrote.
    std::fs::write(folder.path().join("store.json.next"), "{").unwrap();
    assert_eq!(store.read(Keys::Only("a")).unwrap().entries.len(), 1);
    std::fs::write(folder.path().join("store.json"), "host = \"a\"\n").unwrap();
    let error = store.read(Keys::Only("a")).unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(reason) if reason.contains("store.json")), "{error}");
    let file = folder.path().join("store.json");
    assert!(matches!(FolderStore::open(&file).read(Keys::Only("a")), Err(StoreError::Unavailable(_))));
}
