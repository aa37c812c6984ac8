//! Whether this host has the controller's role, and may act in it now: by configuration, by the
//! votes of hosts, or by the store.

use std::collections::VecDeque;
use std::time::Instant;

use mccs_controller::agent::{Agent, Obedience};
use mccs_controller::election::Office;
use mccs_controller::election::candidate::{Candidate, Claim};
use mccs_controller::election::voter::{Vote, Voter};
use mccs_controller::messages::answer::StoreView;
use mccs_exchange::protocol::Name;
use mccs_runtime::Mailbox;
use mccs_store::StoreError;
use mccs_store::election::Holder;

use super::identity::Identity;
use super::input::{ControllerChoice, ControllerInput, ControllerSettings, StoreSettings};
use super::shared_texts::SharedTexts;
use super::store::{SharedHistory, StoreThreads, StoreWrite};
use super::unix_time;

/// See the module's documentation.
pub(super) enum Elections {
    /// The configuration names a host.
    Configured,
    /// Hosts elect: this one, if it may be.
    ByOrder(Option<Box<Candidate>>),
    /// The store elects.
    InStore(Box<InStore>),
}

/// Writes that wait for room on the way to the store; of more the last are written.
const UNWRITTEN_MAX: usize = 4096;

/// Knowledge of the store.
pub(super) struct InStore {
    kind: String,
    /// It ends with this.
    threads: StoreThreads,
    /// The cluster's topology and policy, as the store has them.
    texts: SharedTexts,
    /// History of earlier terms, for the term that begins.
    history: SharedHistory,
    /// Writes that found no room on the way to the store.
    unwritten: VecDeque<(u64, StoreWrite)>,
    /// Why the store does not have what was to be written.
    unwritten_for: Option<StoreError>,
    /// The office, if this host has it.
    office: Option<Office>,
    /// The host that had it last and had not given it up.
    last: Option<Name>,
    trouble: Option<StoreError>,
    /// How often there was other trouble than before, or none.
    turns: u64,
}

impl Elections {
    /// The agent of this host, which obeys the elected controller, and this host's part in the election.
    ///
    /// # Errors
    /// The store's or the exchange's files cannot be read.
    pub(super) fn open(
        settings: &ControllerSettings,
        mailbox: &Mailbox<ControllerInput>,
        now: Instant,
    ) -> anyhow::Result<(Agent, Self)> {
        let (candidates, store, vote_lease, host_timeout) = match &settings.choice {
            ControllerChoice::Host(host) => return Ok((Agent::new(host.clone()), Elections::Configured)),
            ControllerChoice::Elected { candidates, store, vote_lease, host_timeout } => {
                (candidates.clone(), store, *vote_lease, *host_timeout)
            }
        };
        let is_candidate = settings.may_be_here();
        let (voter, elections) = match store {
            Some(settings_of_store) => {
                let StoreSettings { store, authority } = &**settings_of_store;
                let identity = Identity::new(&settings.own, &settings.hosts, authority, &store.prefix());
                let identity = identity.map_err(anyhow::Error::msg)?;
                let engine = mailbox.sender();
                let tell = Box::new(move |news| engine.send(ControllerInput::Store(news)).is_ok());
                let threads = StoreThreads::start(store, identity, is_candidate, tell)?;
                (None, Elections::in_store(format!("{:?}", store.kind).to_lowercase(), threads))
            }
            None => {
                let (own, nhosts) = (&settings.own, settings.hosts.len());
                let new = || Box::new(Candidate::new(own, &candidates, nhosts, vote_lease, host_timeout, now));
                (Some(Voter::new(vote_lease)), Elections::ByOrder(is_candidate.then(new)))
            }
        };
        Ok((Agent::obeying(Obedience::Elected { candidates, voter }), elections))
    }

    fn in_store(kind: String, threads: StoreThreads) -> Self {
        Elections::InStore(Box::new(InStore {
            kind,
            threads,
            texts: SharedTexts::default(),
            history: SharedHistory::default(),
            unwritten: VecDeque::new(),
            unwritten_for: None,
            office: None,
            last: None,
            trouble: None,
            turns: 0,
        }))
    }

    /// The host takes part from now on: no other program of it does any more.
    pub(super) fn begin(&self) {
        if let Elections::InStore(store) = self {
            store.threads.begin();
        }
    }

    /// The term that this host was elected in, also while it may not act.
    pub(super) fn term(&self) -> Option<u64> {
        match self {
            Elections::Configured => None,
            Elections::ByOrder(candidate) => candidate.as_ref()?.term(),
            Elections::InStore(store) => store.office.map(|office| office.term),
        }
    }

    /// Whether this host, if it has the role, may act now.
    pub(super) fn acts(&self, now: Instant) -> bool {
        match self {
            Elections::Configured => true,
            Elections::ByOrder(candidate) => {
                candidate.as_ref().is_some_and(|candidate| candidate.office(now).is_some())
            }
            Elections::InStore(store) => store.office.is_some_and(|office| now < office.until),
        }
    }

    /// Grows when the store comes or goes.
    pub(super) fn turns(&self) -> u64 {
        if let Elections::InStore(store) = self { store.turns } else { 0 }
    }

    /// Why this host may not act, although it was elected.
    ///
    /// # Errors
    /// In words.
    pub(super) fn may_act(&self, now: Instant) -> Result<(), String> {
        if self.acts(now) {
            return Ok(());
        }
        Err(match self {
            Elections::InStore(store) => match &store.trouble {
                Some(trouble) => format!("the lease of this controller is not confirmed: {trouble}"),
                None => "the lease of this controller is not confirmed".into(),
            },
            Elections::Configured | Elections::ByOrder(_) => {
                "most hosts do not confirm the term of this controller".into()
            }
        })
    }

    /// The host that had the role before and may be lost.
    pub(super) fn lost(&self) -> Option<Name> {
        if let Elections::InStore(store) = self { store.last.clone() } else { None }
    }

    /// A term's beginning: texts, and the history of earlier ones.
    pub(super) fn shared(&self) -> Option<(SharedTexts, &SharedHistory)> {
        let Elections::InStore(store) = self else { return None };
        Some((store.texts.clone(), &store.history))
    }

    /// Has something written in a term.
    pub(super) fn write(&mut self, term: u64, writes: Vec<StoreWrite>) {
        let Elections::InStore(store) = self else { return };
        store.unwritten.extend(writes.into_iter().map(|write| (term, write)));
        let excess = store.unwritten.len().saturating_sub(UNWRITTEN_MAX);
        store.unwritten.drain(..excess);
        while let Some((term, write)) = store.unwritten.pop_front() {
            if let Err(write) = store.threads.write(term, write) {
                store.unwritten.push_front((term, write));
                break;
            }
        }
    }

    /// The store's thread has found who has the office. Returns somebody else who has it, and in which term.
    pub(super) fn hear_store(&mut self, found: Result<Holder, StoreError>) -> Option<(Name, u64)> {
        let Elections::InStore(store) = self else { return None };
        store.note_trouble(found.as_ref().err());
        match found.ok()? {
            Holder::Own(office) => {
                store.office = Some(Office { term: office.term.0, until: office.until });
                None
            }
            Holder::Other { name, term } => {
                store.office = None;
                store.last = Name::new(&name);
                store.last.clone().map(|name| (name, term.0))
            }
            Holder::Nobody => {
                store.office = None;
                None
            }
        }
    }

    /// The store has other texts than before.
    pub(super) fn set_texts(&mut self, texts: SharedTexts) {
        if let Elections::InStore(store) = self {
            store.texts = texts;
        }
    }

    /// All was written that was to be, or why not.
    pub(super) fn written(&mut self, trouble: Option<StoreError>) {
        if let Elections::InStore(store) = self {
            let kind = std::mem::discriminant::<StoreError>;
            if store.unwritten_for.as_ref().map(kind) != trouble.as_ref().map(kind) {
                store.turns += 1;
                if let Some(error) = &trouble {
                    tracing::error!(%error, "policy and history are in the controller's memory alone");
                }
            }
            store.unwritten_for = trouble;
        }
    }

    /// Takes the history of earlier terms.
    pub(super) fn set_history(&mut self, history: SharedHistory) {
        if let Elections::InStore(store) = self {
            store.history = history;
        }
    }

    pub(super) fn met(&mut self, host: &Name) {
        if let Elections::ByOrder(Some(candidate)) = self {
            candidate.met(host);
        }
    }

    pub(super) fn lost_host(&mut self, host: &Name, now: Instant) {
        if let Elections::ByOrder(Some(candidate)) = self {
            candidate.lost(host, now);
        }
    }

    pub(super) fn voted(&mut self, from: &Name, question: u64, term: u64, vote: &Vote, now: Instant) {
        if let Elections::ByOrder(Some(candidate)) = self {
            candidate.voted(from, question, term, vote, now);
        }
    }

    /// Somebody has a greater term.
    pub(super) fn superseded(&mut self, term: u64, now: Instant) {
        match self {
            Elections::ByOrder(Some(candidate)) => candidate.superseded(term, now),
            Elections::InStore(store) if store.office.is_some_and(|office| term >= office.term) => {
                store.threads.superseded(term);
            }
            _ => {}
        }
    }

    /// Hosts to ask for votes now.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Claim> {
        match self {
            Elections::ByOrder(Some(candidate)) => candidate.poll(unix_time().as_nanos() as u64, now),
            _ => None,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if let Elections::ByOrder(Some(candidate)) = self { Some(candidate.next_deadline()) } else { None }
    }

    pub(super) fn store_view(&self) -> Option<StoreView> {
        let Elections::InStore(store) = self else { return None };
        let trouble = store.trouble.as_ref().or(store.unwritten_for.as_ref());
        Some(StoreView { kind: store.kind.clone(), trouble: trouble.map(ToString::to_string) })
    }
}

impl InStore {
    /// Says once that the store is in trouble, of which kind, and that it is not any more.
    fn note_trouble(&mut self, trouble: Option<&StoreError>) {
        let kind = std::mem::discriminant::<StoreError>;
        if self.trouble.as_ref().map(kind) != trouble.map(kind) {
            self.turns += 1;
            match trouble {
                Some(error) => tracing::error!(%error, "the cluster's store: what runs goes on, and nobody is elected"),
                None => tracing::info!("the cluster's store can be used"),
            }
        }
        self.trouble = trouble.cloned();
    }
}
