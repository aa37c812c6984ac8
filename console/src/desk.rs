//! Desk: asks the service, once for all browsers, when somebody looks and what is known has got old.
//!
//! A document is kept with a tag that changes with it. While one browser's question is on its way, others wait for its answer, also where
//! that browser has gone. Nobody looks: nobody asks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use mccs_control::documents::{Document, DocumentError};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Questions to the service at a time, of which it takes sixteen: those that its control engine answers itself,
const QUICK_MAX: usize = 3;
/// those that it asks others, which keep no overview waiting,
const SLOW_MAX: usize = 4;
/// and those that have the controller decide as if.
const DIFFS_MAX: usize = 1;
/// How long a question waits for its turn.
const TURN_WITHIN: Duration = Duration::from_secs(5);
/// Documents that are kept. Those of communicators come and go.
const DOCUMENTS_MAX: usize = 256;

/// A document, or why there is none.
#[derive(Debug, Clone)]
pub struct Look {
    /// The result of the look.
    pub found: Result<Found, Failure>,
    at: Instant,
}

/// A document.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its JSON.
    pub text: Bytes,
    /// Changes with the text; as HTTP has it.
    pub tag: String,
}

/// Why there is no document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The service cannot be asked.
    Away {
        /// Why.
        reason: String,
        /// Since when, in seconds of the Unix epoch.
        since: u64,
    },
    /// It says no.
    Refused(String),
    /// Nobody may ask other hosts.
    NoController,
    /// Too many other questions are being answered.
    Busy,
}

/// See the module's documentation.
pub struct Desk {
    socket: PathBuf,
    /// The run's number: tags of another run are no tags of this one.
    run: u64,
    /// The last tag's number.
    tags: AtomicU64,
    quick: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    diffs: Arc<Semaphore>,
    kept: Mutex<BTreeMap<Document, Kept>>,
    /// Since when the service cannot be asked.
    away_since: Mutex<Option<u64>>,
}

/// Held by whoever asks, until there is an answer.
type Kept = Arc<tokio::sync::Mutex<Option<Look>>>;

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How old a document may be before the service is asked again. Those that ask other hosts cost them something.
fn keeps(document: &Document) -> Duration {
    Duration::from_millis(match document {
        // The page asks a little more often than once a second.
        Document::Overview => 850,
        Document::Cluster | Document::Failed => 4_000,
        Document::Stuck => 10_000,
        Document::WhyStuck(_) => 3_000,
        Document::Policy | Document::History { .. } => 2_500,
        _ => 1_000,
    })
}

impl Desk {
    /// Asks the service that listens on `socket`.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Desk {
            socket,
            run: rand::random(),
            tags: AtomicU64::default(),
            quick: Arc::new(Semaphore::new(QUICK_MAX)),
            slow: Arc::new(Semaphore::new(SLOW_MAX)),
            diffs: Arc::new(Semaphore::new(DIFFS_MAX)),
            kept: Mutex::default(),
            away_since: Mutex::default(),
        }
    }

    /// The service's socket.
    #[must_use]
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// A document, as new as it has to be.
    pub async fn look(self: &Arc<Self>, document: &Document) -> Look {
        let mut look = self.kept(document).lock_owned().await;
        if let Some(look) = look.as_ref().filter(|look| look.at.elapsed() < keeps(document)) {
            return look.clone();
        }
        // As old as the question: who asks at a rate finds a new one each time, however long answers take.
        let at = Instant::now();
        let (desk, document) = (Arc::clone(self), document.clone());
        // A task of its own: whoever comes after somebody who has gone finds the answer, and asks nothing again.
        let asking = tokio::spawn(async move {
            let asked = desk.ask(document).await;
            let found = asked.map(|text| match look.as_ref().map(|look| &look.found) {
                Some(Ok(before)) if before.text == text => before.clone(),
                _ => Found { text, tag: desk.tag() },
            });
            look.insert(Look { found, at }).clone()
        });
        asking.await.unwrap_or_else(|error| Look { found: Err(self.away(&error.to_string())), at })
    }

    /// Asks now, and keeps nothing.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn ask(&self, document: Document) -> Result<Bytes, Failure> {
        let turns = match document {
            Document::Diff(_) => &self.diffs,
            Document::Cluster
            | Document::Stuck
            | Document::WhyStuck(_)
            | Document::Accounts(_)
            | Document::Links
            | Document::Policy
            | Document::History { .. } => &self.slow,
            _ => &self.quick,
        };
        let turn = match timeout(TURN_WITHIN, Arc::clone(turns).acquire_owned()).await {
            Ok(Ok(turn)) => turn,
            Ok(Err(_)) => return Err(self.away("the console ends")),
            Err(_) => return Err(Failure::Busy),
        };
        let socket = self.socket.clone();
        // The turn is over when the service has answered, also where nobody waits for it any more.
        let asked = spawn_blocking(move || {
            let _turn = turn;
            document.text(&socket)
        });
        let result = match asked.await {
            Ok(Ok(text)) => Ok(text.into()),
            Ok(Err(DocumentError::Refused(reason))) => Err(Failure::Refused(reason)),
            Ok(Err(DocumentError::NoController)) => Err(Failure::NoController),
            Ok(Err(error)) => return Err(self.away(&error.to_string())),
            Err(error) => return Err(self.away(&error.to_string())),
        };
        if lock(&self.away_since).take().is_some() {
            tracing::info!("the service answers again");
        }
        result
    }

    /// The service cannot be asked, for that reason.
    pub fn away(&self, reason: &str) -> Failure {
        let mut since = lock(&self.away_since);
        if since.is_none() {
            tracing::warn!(reason, "the service cannot be asked");
        }
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Failure::Away { reason: reason.to_owned(), since: *since.get_or_insert_with(now) }
    }

    /// One that no text has had.
    fn tag(&self) -> String {
        format!("\"{:x}-{}\"", self.run, self.tags.fetch_add(1, Ordering::Relaxed))
    }

    fn kept(&self, document: &Document) -> Kept {
        let mut all = lock(&self.kept);
        if all.len() >= DOCUMENTS_MAX && !all.contains_key(document) {
            // A document that nobody waits for is asked for again when somebody wants it. Documents that
            // everybody wants are kept.
            let is_of_one = |document: &Document| matches!(document, Document::WhyStuck(_) | Document::Accounts(_));
            all.retain(|document, kept| Arc::strong_count(kept) > 1 || !is_of_one(document));
        }
        Arc::clone(all.entry(document.clone()).or_default())
    }
}
