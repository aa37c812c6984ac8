//! The store of the cluster, on a thread of its own: calls of it block, and engines do not.
//!
//! ```text
//! engine <-- StoreNews: who has the office, texts, history, trouble -- thread --> Store
//!        --- StoreWrite: texts in force, history -------------------->    ^
//!                                                          watch: something has changed
//! ```
//!
//! The thread campaigns for the controller's office where its host may be elected, and looks who has it where not. It looks a few
//! times within a lease, and at once when the office changes.
//!
//! Writes of the controller are guarded by its term: once another one is in office, nothing of the earlier one is written. A
//! failed write is tried again while the term lasts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use mccs_config::service::StoreKind;
use mccs_store::election::{Campaign, Holder};
use mccs_store::{
    EtcdSettings, EtcdStore, FolderStore, Guard, Keys, Outcome, Revision, Store, StoreError, Transaction, Write,
};

use super::identity::Identity;
use super::shared_texts::{self, Kind, SharedText, SharedTexts};

/// The key of the office.
const OFFICE: &str = "controller";
/// Prefix of the history's keys; their numbers follow, so that they are in order.
const HISTORY: &str = "history/";
/// Entries of the history that are kept, by their numbers.
const HISTORY_KEPT: u64 = 4096;
/// Entries that wait to be written.
const HISTORY_WAITS_MAX: usize = 4096;
/// Entries that are written at once; etcd does 128 things in a transaction.
const HISTORY_AT_ONCE: usize = 50;
/// Keys of old entries that are removed with them.
const HISTORY_OLD_AT_ONCE: usize = 20;
/// Words to the thread that wait.
const WORDS_MAX: usize = 1024;
/// How often a host looks that cannot be elected, where nothing is told to have changed.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How often texts are read where nothing is told to have changed.
const READ_EVERY: Duration = Duration::from_secs(10);
/// How long a watch waits at a time.
const WATCH_TIME: Duration = Duration::from_secs(2);
/// How soon a watch that has ended is begun again.
const WATCH_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// News of the thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreNews {
    /// The holder of the office, or why nothing is known.
    Holder(Result<Holder, StoreError>),
    /// The cluster's topology and policy.
    Texts(SharedTexts),
    /// History of earlier terms; before this host is told of a term of its own.
    History(SharedHistory),
    /// Whether all was written that was to be.
    Written(Result<(), StoreError>),
}

/// The store's part of the history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedHistory {
    /// Entries as they were written, in order.
    pub(super) lines: Vec<Vec<u8>>,
    /// The last number that was given, also of an entry that cannot be read.
    pub(super) last: u64,
}

/// Configurations and entries that the controller writes.
#[derive(Debug)]
pub(super) enum StoreWrite {
    /// A text that is in force now.
    Text(SharedText),
    /// An entry of the history, by its number.
    History(u64, Vec<u8>),
}

/// To the thread.
enum Word {
    /// Something was put or has gone; whether it is one of the texts.
    Changed { is_text: bool },
    /// To be written in a term.
    Write { term: u64, write: StoreWrite },
    /// A host knows of that term, which is not less than this host's.
    Superseded { by: u64 },
}

/// Opens the store of a configuration: reads files, asks nobody.
///
/// # Errors
/// The mistake in a file or a URL.
pub fn open_store(config: &mccs_config::service::Store) -> Result<Box<dyn Store>, StoreError> {
    Ok(match config.kind {
        StoreKind::Etcd => Box::new(EtcdStore::new(&EtcdSettings {
            endpoints: config.endpoints.clone(),
            prefix: config.prefix(),
            authority: config.authority.clone(),
            identity: config.certificate.clone().zip(config.key.clone()),
            user: config.user.clone().zip(config.password_file.clone()),
            timeout: config.timeout.0,
        })?),
        StoreKind::Folder => {
            let folder = config.folder.as_ref().expect("invariant: a checked store in a folder names it");
            Box::new(FolderStore::open(&folder.join(&config.cluster)))
        }
    })
}

/// Takes news to the engine. Returns whether there was room.
pub(super) type Tell = Box<dyn Fn(StoreNews) -> bool + Send>;

/// The threads of a store. They end soon after the value does, and give the office up if their host has it.
pub(super) struct StoreThreads {
    is_over: Arc<AtomicBool>,
    has_begun: Arc<AtomicBool>,
    words: SyncSender<Word>,
}

impl StoreThreads {
    /// Starts them; they campaign from [`StoreThreads::begin`] on. `tell` returns whether there was room for the news.
    ///
    /// # Errors
    /// [`open_store`], or there is no room for a thread.
    pub(super) fn start(
        config: &mccs_config::service::Store,
        identity: Identity,
        is_candidate: bool,
        tell: Tell,
    ) -> Result<Self, StoreError> {
        let (store, watched) = (open_store(config)?, open_store(config)?);
        let (words, heard) = sync_channel(WORDS_MAX);
        let (is_over, has_begun) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let campaign = Campaign::new(OFFICE, identity.own.as_str(), config.lease.0);
        let thread = Thread {
            store,
            campaign,
            identity,
            is_candidate,
            tell,
            lease: config.lease.0,
            term: None,
            texts: None,
            read_at: Instant::now(),
            written: Vec::new(),
            tried: None,
            knows_history: false,
            old_history: Vec::new(),
            text_waits: Vec::new(),
            history_waits: VecDeque::new(),
        };
        let (over, begun, changed) = (Arc::clone(&is_over), Arc::clone(&has_begun), words.clone());
        spawn("mccs-store", move || thread.run(&heard, &begun, &over))?;
        let over = Arc::clone(&is_over);
        spawn("mccs-store-watch", move || watch(watched, &changed, &over))?;
        Ok(StoreThreads { is_over, has_begun, words })
    }

    /// Has them campaign.
    pub(super) fn begin(&self) {
        self.has_begun.store(true, Ordering::Release);
        let _ = self.words.try_send(Word::Changed { is_text: true });
    }

    /// Has something written in a term.
    ///
    /// # Errors
    /// There is no room, and it is given back.
    pub(super) fn write(&self, term: u64, write: StoreWrite) -> Result<(), StoreWrite> {
        match self.words.try_send(Word::Write { term, write }) {
            Err(
                TrySendError::Full(Word::Write { write, .. }) | TrySendError::Disconnected(Word::Write { write, .. }),
            ) => Err(write),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// A host does not obey this one's term, for a term that is not less.
    pub(super) fn superseded(&self, by: u64) {
        // If there is no room, hosts say it again.
        let _ = self.words.try_send(Word::Superseded { by });
    }
}

impl Drop for StoreThreads {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        let _ = self.words.try_send(Word::Changed { is_text: false });
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).map_err(|error| StoreError::Unavailable(format!("no thread: {error}")))
}

/// A text as this thread has written it last, one time after the other.
struct Written {
    kind: Kind,
    at: Revision,
    /// In the place of which ones: the engine may not know yet of those that came later.
    before: Vec<Option<Revision>>,
}

struct Thread {
    store: Box<dyn Store>,
    campaign: Campaign,
    identity: Identity,
    is_candidate: bool,
    tell: Tell,
    lease: Duration,
    /// The office of this host, of which the engine was told: when its key came to be, and the term's number.
    term: Option<(Revision, u64)>,
    /// As the engine was told.
    texts: Option<SharedTexts>,
    /// When they are to be read at the latest.
    read_at: Instant,
    /// Texts that were written in this term.
    written: Vec<Written>,
    /// A text of which it is not known whether it was written.
    tried: Option<SharedText>,
    /// Whether the history was read when the term began. If not, none is written: numbers would begin anew.
    knows_history: bool,
    /// Keys of the history that no number of this term pushes out.
    old_history: Vec<String>,
    /// Texts that are to be written, one of each kind at most.
    text_waits: Vec<SharedText>,
    history_waits: VecDeque<(u64, Vec<u8>)>,
}

impl Thread {
    fn run(mut self, words: &Receiver<Word>, has_begun: &AtomicBool, is_over: &AtomicBool) {
        let pause = if self.is_candidate { self.campaign.interval() } else { LOOK_EVERY };
        let (mut holder, mut written) = (None, None);
        while !has_begun.load(Ordering::Acquire) && !is_over.load(Ordering::Acquire) {
            let _ = words.recv_timeout(pause);
        }
        while !is_over.load(Ordering::Acquire) {
            let began = Instant::now();
            // For an office that is held each word counts: it has another time.
            let news = StoreNews::Holder(self.look());
            self.tell_if_other(news, &mut holder);
            let news = StoreNews::Written(self.write(began + pause));
            self.tell_if_other(news, &mut written);
            let mut word = words.recv_timeout(pause.saturating_sub(began.elapsed()));
            while let Ok(next) = word {
                self.hear(next);
                word = words.try_recv().map_err(|_| RecvTimeoutError::Timeout);
            }
        }
        let _ = self.campaign.resign(&mut *self.store);
    }

    fn tell_if_other(&self, news: StoreNews, last: &mut Option<StoreNews>) {
        if last.as_ref() != Some(&news) && (self.tell)(news.clone()) {
            *last = Some(news);
        }
    }

    fn hear(&mut self, word: Word) {
        match word {
            Word::Changed { is_text } if is_text => self.read_at = Instant::now(),
            Word::Changed { .. } => {}
            // An earlier term writes nothing.
            Word::Write { term, .. } if self.term.is_none_or(|(_, own)| own != term) => {}
            Word::Write { write: StoreWrite::Text(text), .. } => {
                self.text_waits.retain(|before| before.kind != text.kind);
                self.text_waits.push(text);
            }
            Word::Write { write: StoreWrite::History(number, line), .. } => {
                if self.history_waits.len() >= HISTORY_WAITS_MAX {
                    self.history_waits.pop_front();
                }
                self.history_waits.push_back((number, line));
            }
            Word::Superseded { by } => {
                if let Err(error) = self.rise_above(by) {
                    tracing::warn!(%error, by, "hosts obey a greater term than this controller's");
                }
            }
        }
    }

    /// A host does not obey this one, for a term that is not less. If this one is in office all the same, the store has gone back:
    /// the office is given up, and the next term is above.
    fn rise_above(&mut self, by: u64) -> Result<(), StoreError> {
        let holder = self.campaign.step(&mut *self.store, &Instant::now)?;
        if self.term.is_none_or(|(_, number)| number > by) || !matches!(holder, Holder::Own(_)) {
            return Ok(());
        }
        tracing::warn!(
            by,
            "the store has gone back, as one that was restored: terms begin anew above those that hosts know"
        );
        self.campaign.resign(&mut *self.store)?;
        self.identity.rise_above(by, &mut *self.store)
    }

    /// The holder of the office; and before that is told, whatever else there is to know.
    fn look(&mut self) -> Result<Holder, StoreError> {
        let was_in_office = self.term.is_some();
        if !was_in_office {
            self.identity.check(&mut *self.store)?;
            // Whoever was in office before the record came anew may count on its lease.
            if !self.is_candidate || self.identity.is_younger_than(self.lease) {
                let snapshot = self.store.read(Keys::Only(OFFICE))?;
                let holder = snapshot.get(OFFICE).map_or(Holder::Nobody, Holder::other);
                return Ok(self.identity.numbered(holder));
            }
        }
        // A host with a lease keeps it before all else.
        let holder = self.campaign.step(&mut *self.store, &Instant::now)?;
        let known = self.know(&holder, was_in_office);
        if let Err(StoreError::Refused(_) | StoreError::Invalid(_)) = &known {
            // Another host may be able to.
            let _ = self.campaign.resign(&mut *self.store);
        }
        known.map(|()| self.identity.numbered(holder))
    }

    /// Learns what there is to know besides who has the office.
    fn know(&mut self, holder: &Holder, was_in_office: bool) -> Result<(), StoreError> {
        if was_in_office {
            self.identity.check(&mut *self.store)?;
        }
        let term = if let Holder::Own(office) = holder { Some(office.term) } else { None };
        let term = term.map(|created| (created, self.identity.number(created)));
        let is_new = term != self.term;
        if Instant::now() >= self.read_at || is_new && term.is_some() {
            self.read_texts()?;
        }
        if is_new {
            if term.is_some() {
                self.read_history()?;
            }
            self.written.clear();
            self.tried = None;
            self.text_waits.clear();
            self.history_waits.clear();
            self.term = term;
        }
        Ok(())
    }

    /// Reads the history of earlier terms; one that cannot be read holds nobody off.
    fn read_history(&mut self) -> Result<(), StoreError> {
        let entries = match self.store.read(Keys::Under(HISTORY)) {
            Ok(snapshot) => snapshot.entries,
            Err(StoreError::Invalid(reason)) => {
                tracing::error!(reason, "the history in the store");
                self.knows_history = false;
                self.old_history.clear();
                return self.tell_history(SharedHistory::default());
            }
            Err(error) => return Err(error),
        };
        let number = |key: &str| key.strip_prefix(HISTORY)?.parse::<u64>().ok();
        let last = entries.iter().filter_map(|entry| number(&entry.key)).max().unwrap_or_default();
        let is_old = |key: &str| number(key).is_none_or(|number| number.saturating_add(HISTORY_KEPT) <= last);
        let (old, kept): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| is_old(&entry.key));
        self.knows_history = true;
        self.old_history = old.into_iter().map(|entry| entry.key).collect();
        self.tell_history(SharedHistory { lines: kept.into_iter().map(|entry| entry.value).collect(), last })
    }

    fn tell_history(&self, history: SharedHistory) -> Result<(), StoreError> {
        // Without it numbers would begin anew: it is told again, with the next look.
        let is_told = (self.tell)(StoreNews::History(history));
        is_told.then_some(()).ok_or_else(|| StoreError::Unavailable("the controller is too busy to be told".into()))
    }

    fn read_texts(&mut self) -> Result<(), StoreError> {
        let mut texts = shared_texts::read(&self.store.read(Keys::Under(shared_texts::PREFIX))?);
        if let Some(tried) = self.tried.take()
            && let Some(there) = texts.get(tried.kind)
            && there.at > tried.at
            && there.says_the_same(&tried)
            && let Some(at) = there.at
        {
            // It was written, and nobody has said so.
            self.note_written(tried.kind, tried.at, at);
        }
        for text in texts.iter_mut() {
            text.is_own = self.written.iter().any(|written| written.kind == text.kind && Some(written.at) == text.at);
        }
        self.read_at = Instant::now() + READ_EVERY;
        if self.texts.as_ref() != Some(&texts) && (self.tell)(StoreNews::Texts(texts.clone())) {
            self.texts = Some(texts);
        }
        Ok(())
    }

    /// A text was written in the place of that one.
    fn note_written(&mut self, kind: Kind, known: Option<Revision>, at: Revision) {
        let mut before = vec![known];
        for last in self.written.iter().filter(|last| last.kind == kind) {
            before.extend(last.before.iter().copied().chain([Some(last.at)]));
        }
        self.written.retain(|written| written.kind != kind);
        self.written.push(Written { kind, at, before });
    }

    /// Writes what waits, until the lease is to be looked after again. A refused write waits on, and holds nothing else off.
    fn write(&mut self, until: Instant) -> Result<(), StoreError> {
        let Some((created, _)) = self.term else { return Ok(()) };
        let in_office = Guard::Created(OFFICE.to_owned(), created);
        let mut refused = None;
        for text in std::mem::take(&mut self.text_waits) {
            match self.write_text(&text, &in_office) {
                Ok(()) => {}
                Err(error) => {
                    self.text_waits.push(text);
                    refused = Some(error);
                }
            }
        }
        if let Some(error) = refused.take_if(|error| !matches!(error, StoreError::Refused(_))) {
            return Err(error);
        }
        if !self.knows_history {
            self.history_waits.clear();
            let why = "keys of the history cannot be read, and nothing is written to it; remove them";
            return Err(refused.unwrap_or_else(|| StoreError::Invalid(why.into())));
        }
        while !(self.history_waits.is_empty() && self.old_history.is_empty()) && Instant::now() < until {
            let lines: Vec<_> = self.history_waits.iter().take(HISTORY_AT_ONCE).cloned().collect();
            let (nlines, nold) = (lines.len(), self.old_history.len().min(HISTORY_OLD_AT_ONCE));
            let new = history(lines);
            let is_written = |key: &String| new.iter().any(|write| write.key() == key);
            let old = self.old_history[..nold].iter().filter(|key| !is_written(key));
            let old: Vec<_> = old.map(|key| Write::Delete { key: key.clone() }).collect();
            let transaction = Transaction { guards: vec![in_office.clone()], writes: [new, old].concat() };
            if self.store.commit(&transaction)? == Outcome::Conflict {
                break;
            }
            self.history_waits.drain(..nlines);
            self.old_history.drain(..nold);
        }
        refused.map_or(Ok(()), Err)
    }

    fn write_text(&mut self, text: &SharedText, in_office: &Guard) -> Result<(), StoreError> {
        let (kind, known) = (text.kind, text.at);
        let last = self.written.iter().find(|written| written.kind == kind && written.before.contains(&known));
        let guarded = SharedText { at: last.map(|written| written.at).or(known), ..text.clone() };
        let guards = vec![in_office.clone(), guarded.guard()];
        match self.store.commit(&Transaction { guards, writes: vec![text.write()] }) {
            Ok(Outcome::Done(at)) => self.note_written(kind, known, at),
            // Another operator's text is there by now, and counts; or the term is over.
            Ok(Outcome::Conflict) => {}
            Err(error) => {
                if let StoreError::Unknown(_) = error {
                    self.tried = Some(guarded);
                }
                self.read_at = Instant::now();
                return Err(error);
            }
        }
        self.read_texts()
    }
}

/// Entries to be written, and those that leave for them. An entry that has gone on is there twice: its last word counts.
fn history(lines: Vec<(u64, Vec<u8>)>) -> Vec<Write> {
    let key = |number: u64| format!("{HISTORY}{number:020}");
    let lines: BTreeMap<_, _> = lines.into_iter().collect();
    let old: Vec<_> = lines.keys().filter_map(|number| number.checked_sub(HISTORY_KEPT)).map(key).collect();
    let puts = lines.into_iter().map(|(number, value)| Write::Put { key: key(number), value, lease: None });
    puts.chain(old.into_iter().map(|key| Write::Delete { key })).collect()
}

/// Tells when the office or a text changes.
fn watch(mut store: Box<dyn Store>, changed: &SyncSender<Word>, is_over: &AtomicBool) {
    let is_over = || is_over.load(Ordering::Acquire);
    while !is_over() {
        let watch = store.read(Keys::Only(OFFICE)).and_then(|snapshot| store.watch(snapshot.revision));
        // Before the watch began it may have changed.
        let _ = changed.try_send(Word::Changed { is_text: true });
        if let Ok(mut watch) = watch {
            while !is_over()
                && let Ok(changes) = watch.next(WATCH_TIME)
            {
                let is_text = changes.iter().any(|change| change.key.starts_with(shared_texts::PREFIX));
                if is_text || changes.iter().any(|change| change.key == OFFICE) {
                    let _ = changed.try_send(Word::Changed { is_text });
                }
            }
        }
        std::thread::sleep(WATCH_AGAIN_AFTER);
    }
}
