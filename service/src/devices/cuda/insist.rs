//! The thread that insists: streams of the service's that are let go wait for words that tenants can write as well, and a hostile one writes over what lets
//! them go, as long as it likes. Nothing could be freed meanwhile (`frees.rs`). How often a GPU looks depends on what else it does: all the time while nothing else
//! is there (decision 028), and seldom where processes take turns. So from some milliseconds on these words are written without pause for
//! a while, and again: a stream that looks at any such moment finds itself let go as often as not.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Between the times; before the first, most have gone.
const PAUSE: Duration = Duration::from_millis(20);
/// How long it is written then, for all together: a tenth of a core at most.
const INSIST_FOR: Duration = Duration::from_millis(2);

/// Something that is to be let go as long as it is there.
pub(super) trait Held: Send + Sync + 'static {
    /// Says so, once.
    fn let_go(&self);
}

/// To the thread, which ends when nobody has this any more.
pub(super) struct Insists<H>(mpsc::Sender<Weak<H>>);

impl<H> Clone for Insists<H> {
    fn clone(&self) -> Self {
        Insists(self.0.clone())
    }
}

impl<H: Held> Insists<H> {
    pub(super) fn start() -> std::io::Result<Self> {
        let (sender, held) = mpsc::channel();
        std::thread::Builder::new().name("mccs-cuda-insist".into()).spawn(move || run(&held))?;
        Ok(Insists(sender))
    }

    /// Lets it go until nobody has it any more.
    pub(super) fn insist(&self, held: &Arc<H>) {
        // It lives as long as somebody can send to it.
        let _ = self.0.send(Arc::downgrade(held));
    }
}

fn run<H: Held>(come: &Receiver<Weak<H>>) {
    let mut all = Vec::new();
    loop {
        if all.is_empty() {
            let Ok(first) = come.recv() else { return };
            all.push(first);
        }
        std::thread::sleep(PAUSE);
        all.extend(come.try_iter());
        all.retain(|held| held.strong_count() > 0);
        let each = INSIST_FOR / (all.len() as u32).max(1);
        for held in all.iter().filter_map(Weak::upgrade) {
            let since = Instant::now();
            while since.elapsed() < each {
                held.let_go();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;

    #[derive(Default)]
    struct Word(AtomicU64);

    impl Held for Word {
        fn let_go(&self) {
            self.0.store(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_writes_over_it_all_the_time_does_not_always_win() {
        let (insists, word) = (Insists::start().expect("a thread"), Arc::new(Word::default()));
        insists.insist(&Arc::new(Word::default()));
        insists.insist(&word);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    word.0.store(0, Ordering::Relaxed);
                }
            });
            // Looks seldom.
            while word.0.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
