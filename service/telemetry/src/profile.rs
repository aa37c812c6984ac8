//! Traffic profile of a communicator: period, duration and beginning of its bursts.
//!
//! Training computes and communicates in turn. Collectives with short pauses between them are one *burst*; the long pauses, of which
//! there is one an iteration, divide bursts. A profile is there while bursts come at a steady period, and is told anew
//! when it no longer says when the next burst comes.
//!
//! Only the last bursts count: a job that others make room for comes more often, and has to be expected then. Whether a job is steady
//! its pauses say, which are its own; the network may stretch bursts, and stops when others make room.
//!
//! A period says little of a burst that is several periods away: each burst takes as long as the network lets it, and all that follow
//! are as late. So every burst is also foreseen by itself, when the one before ends: a pause later. That takes bursts of as
//! many collectives each; where their numbers differ nobody knows which is the last.
//!
//! A job that has a window sends when that is open, which says nothing of the job: its profile stays what it was, and only that it does not come
//! less often than its window is looked at. If it does, as when its bursts have become longer than the window, it has no profile any more, and is
//! measured anew once the window has gone; from then on by its longest bursts.
//!
//! Deliberately absent: what the network would allow. How long a burst takes is what it took when least was in its way, among the last; and a
//! period is that and the pause that follows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Collectives that are looked at: some iterations of a job with a hundred buckets.
const COLLECTIVES_MAX: usize = 1024;
/// Bursts without which nothing is said.
const BURSTS_MIN: usize = 6;
/// Bursts that count. Half of them are enough for another period to be seen.
const BURSTS_MAX: usize = 8;
/// The longest pauses may be a job's own (a checkpoint), and say nothing of iterations.
const OUTLIERS: usize = 2;
/// Shorter pauses are no computation.
const PAUSE_MIN: Duration = Duration::from_micros(200);
/// Part of the period, in percent: with shorter pauses the network is busy all the time.
const PAUSE_PERCENT: u32 = 3;
/// By how much pauses may differ, in percent of the period; the longest may be anything (a checkpoint).
const SPREAD_PERCENT: u32 = 20;
/// By how much of the period a burst may come at another time than told: who makes room for it allows for about as much.
const LATE_PERCENT: u32 = 1;
/// Bursts that come more often are not foreseen one by one: hosts would hear of them too late, and of nothing else.
const FORESEEN_PERIOD_MIN: Duration = Duration::from_millis(10);
/// Under a window bursts are counted in so many at a time.
const COUNTED: usize = 8;
/// So much of the time that as many windows take, in percent, they may take.
const WINDOWS_PERCENT: u128 = 108;
/// So many times in a row they must take longer: a job may pause for once.
const SLOW_MAX: u32 = 2;
/// How often a profile is worked out, and told, at most.
const EVERY: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// From the beginning of a burst to the beginning of the next.
    pub period: Duration,
    /// How long a burst takes.
    pub busy: Duration,
    /// When one began.
    pub began: Instant,
}

/// A burst that is foreseen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// When it begins.
    pub begins: Instant,
    /// How long it takes.
    pub lasts: Duration,
}

/// A collective's news of its communicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Noted {
    /// Its profile, if that is news: `None` in it where there is none any more.
    pub profile: Option<Option<Measured>>,
    /// Its next burst, if one has ended.
    pub burst: Option<Burst>,
}

impl Measured {
    /// Whether this one is worth telling where `told` was: periods and lengths differ, or bursts come at other times.
    fn differs(&self, told: &Measured) -> bool {
        let apart = |a: Duration, b: Duration, percent: u32| a.abs_diff(b) * 100 > a.max(b) * percent;
        if apart(self.period, told.period, 3) || apart(self.busy, told.busy, 10) {
            return true;
        }
        let since = self.began.saturating_duration_since(told.began).as_nanos();
        let late = Duration::from_nanos((since % told.period.as_nanos().max(1)) as u64);
        late.min(told.period.saturating_sub(late)) * 100 > self.period * LATE_PERCENT
    }
}

/// When a collective, or a burst of them, ran.
#[derive(Debug, Clone, Copy)]
struct Span {
    began: Instant,
    ended: Instant,
}

/// A burst that is over, or the last one.
struct PastBurst {
    span: Span,
    collectives: usize,
}

/// Collectives that are counted.
#[derive(Debug, Clone, Copy)]
struct Count {
    since: Instant,
    collectives: usize,
}

/// The profile of a communicator as its collectives go by. Belongs to its proxy engine.
#[derive(Debug, Default)]
pub struct ProfileMeter {
    /// The last collectives.
    collectives: VecDeque<Span>,
    worked_out: Option<Instant>,
    told: Option<Measured>,
    shape: Option<Shape>,
    /// Collectives of the burst that goes on.
    of_burst: usize,
    /// Collectives of eight bursts, as they were measured last.
    of_counted: usize,
    /// Window of the job, if it has one.
    windowed: Option<Windowed>,
    /// A window of its profile's was too short for the job: its longest bursts count.
    is_cautious: bool,
}

/// A job under a window.
#[derive(Debug, Default)]
struct Windowed {
    period: Duration,
    /// Its count, if it has begun.
    count: Option<Count>,
    slow: u32,
    /// The window has turned out to be too short.
    is_harmful: bool,
}

/// Common shape of all bursts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Collectives in each.
    collectives: usize,
    /// Pauses that are no shorter divide them.
    divides: Duration,
    /// How long they last.
    lasts: Duration,
    /// Pause between them.
    pause: Duration,
}

impl ProfileMeter {
    /// The job may send in windows of this period only, or whenever it wants.
    pub fn set_window(&mut self, period: Option<Duration>) {
        if self.windowed.as_ref().map(|windowed| windowed.period) == period {
            return;
        }
        self.windowed = period.map(|period| Windowed { period, ..Windowed::default() });
        self.collectives.clear();
        (self.worked_out, self.shape, self.of_burst) = (None, None, 0);
    }

    /// A collective has ended.
    pub fn note(&mut self, began: Instant, ended: Instant) -> Noted {
        if let Some(windowed) = &mut self.windowed {
            if windowed.note(ended, self.of_counted) {
                (self.told, self.is_cautious) = (None, true);
                return Noted { profile: Some(None), burst: None };
            }
            return Noted::default();
        }
        let burst = self.foresee(began, ended);
        Noted { profile: self.profile(began, ended), burst }
    }

    /// The burst after the one whose last collective this is.
    fn foresee(&mut self, began: Instant, ended: Instant) -> Option<Burst> {
        let Shape { collectives, divides, lasts, pause } = self.shape?;
        let last = self.collectives.back().map_or(began, |last| last.ended);
        self.of_burst = if began.saturating_duration_since(last) >= divides { 1 } else { self.of_burst + 1 };
        (self.of_burst == collectives).then(|| Burst { begins: ended + pause, lasts })
    }

    fn profile(&mut self, began: Instant, ended: Instant) -> Option<Option<Measured>> {
        if self.collectives.len() == COLLECTIVES_MAX {
            self.collectives.pop_front();
        }
        self.collectives.push_back(Span { began, ended });
        let is_due = self.worked_out.is_none_or(|at| ended.saturating_duration_since(at) >= EVERY);
        if self.collectives.len() <= BURSTS_MIN || !is_due {
            return None;
        }
        self.worked_out = Some(ended);
        let found = measure(&self.collectives, self.is_cautious);
        if let Some(Found { per_burst, .. }) = &found {
            self.of_counted = (per_burst * COUNTED as f64).round() as usize;
        }
        let (measured, shape) = found.map(|found| (found.measured, found.shape)).unzip();
        self.shape = shape.flatten();
        let is_news = match (&measured, &self.told) {
            (Some(measured), Some(told)) => measured.differs(told),
            (measured, told) => measured.is_some() != told.is_some(),
        };
        is_news.then(|| {
            self.told = measured;
            measured
        })
    }
}

impl Windowed {
    /// A collective has ended, of which `of_counted` are eight bursts. Says so when the window has turned out to be too short.
    fn note(&mut self, ended: Instant, of_counted: usize) -> bool {
        if self.is_harmful || of_counted == 0 {
            return false;
        }
        let Some(Count { since, collectives }) = &mut self.count else {
            self.count = Some(Count { since: ended, collectives: 0 });
            return false;
        };
        *collectives += 1;
        if *collectives < of_counted {
            return false;
        }
        let took = ended.saturating_duration_since(*since).as_nanos();
        let is_slow = took * 100 > self.period.as_nanos() * COUNTED as u128 * WINDOWS_PERCENT;
        self.slow = if is_slow { self.slow + 1 } else { 0 };
        self.is_harmful = self.slow == SLOW_MAX;
        self.count = Some(Count { since: ended, collectives: 0 });
        self.is_harmful
    }
}

/// Common properties of collectives.
struct Found {
    measured: Measured,
    /// Shape of bursts, if they have as many collectives each.
    shape: Option<Shape>,
    /// Collectives of a burst, on average.
    per_burst: f64,
}

/// The value at a part of the sorted values, in tenths.
fn tenth(sorted: &[Duration], tenths: usize) -> Duration {
    sorted.get((sorted.len().saturating_sub(1)) * tenths / 10).copied().unwrap_or_default()
}

/// The profile, if there is one; by the longest of bursts, or the shortest.
fn measure(collectives: &VecDeque<Span>, by_longest: bool) -> Option<Found> {
    let pause = |(before, after): (&Span, &Span)| after.began.saturating_duration_since(before.ended);
    let pauses = || collectives.iter().zip(collectives.iter().skip(1)).map(pause);
    let mut sorted: Vec<Duration> = pauses().collect();
    sorted.sort_unstable();
    let long = *sorted.get(sorted.len().checked_sub(1 + OUTLIERS)?)?;
    if long < PAUSE_MIN {
        return None;
    }
    // The first burst may have begun before what is remembered.
    let mut bursts: Vec<PastBurst> = Vec::new();
    for (span, pause) in collectives.iter().skip(1).zip(pauses()) {
        match bursts.last_mut() {
            _ if pause >= long / 2 => bursts.push(PastBurst { span: *span, collectives: 1 }),
            Some(burst) => {
                burst.span.ended = span.ended;
                burst.collectives += 1;
            }
            None => {}
        }
    }
    // The last may not have ended.
    let last = bursts.pop()?.span.began;
    if bursts.len() < BURSTS_MIN {
        return None;
    }
    let bursts = &bursts[bursts.len().saturating_sub(BURSTS_MAX)..];
    let begins = || bursts.iter().map(|burst| burst.span.began).chain([last]);
    let sorted = |times: &mut dyn Iterator<Item = Duration>| {
        let mut sorted: Vec<Duration> = times.collect();
        sorted.sort_unstable();
        sorted
    };
    let period = tenth(&sorted(&mut begins().zip(begins().skip(1)).map(|(a, b)| b.duration_since(a))), 5);
    let lengths = sorted(&mut bursts.iter().map(|burst| burst.span.ended.saturating_duration_since(burst.span.began)));
    let ends = bursts.iter().map(|burst| burst.span.ended);
    let pauses = sorted(&mut ends.zip(begins().skip(1)).map(|(end, begin)| begin.saturating_duration_since(end)));
    let is_steady = (tenth(&pauses, 9) - tenth(&pauses, 1)) * 100 <= period * SPREAD_PERCENT;
    let has_pauses = long * 100 >= period * PAUSE_PERCENT;
    let count = bursts.first()?.collectives;
    let have_as_many = bursts.iter().all(|burst| burst.collectives == count);
    let are_alike = period >= FORESEEN_PERIOD_MIN && have_as_many;
    let shape = Shape { collectives: count, divides: long / 2, lasts: tenth(&lengths, 5), pause: tenth(&pauses, 5) };
    let busy = tenth(&lengths, if by_longest { 9 } else { 1 });
    // A job in others' way comes less often than it would. A window of that period would leave it there for ever.
    let period = if have_as_many { period.min(busy + tenth(&pauses, 5)) } else { period };
    let measured = Measured { period, busy, began: last };
    let per_burst = bursts.iter().map(|burst| burst.collectives).sum::<usize>() as f64 / bursts.len() as f64;
    (is_steady && has_pauses).then(|| Found { measured, shape: are_alike.then_some(shape), per_burst })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Collectives of a job, in microseconds: iterations of `buckets` collectives of `length` with `small` pauses between, then
    /// computing for `pause`; everything longer by up to `jitter_percent`, by turns.
    fn job(
        iterations: u64,
        buckets: u64,
        length: u64,
        small: u64,
        pause: u64,
        jitter_percent: u64,
        begin: Instant,
    ) -> Vec<Span> {
        let (mut at, mut all, mut seed) = (begin, Vec::new(), 1_u64);
        let mut vary = |us: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            Duration::from_nanos(us * 1000 + us * 10 * ((seed >> 33) % (jitter_percent + 1)))
        };
        for _ in 0..iterations {
            for bucket in 0..buckets {
                let ended = at + vary(length);
                all.push(Span { began: at, ended });
                at = ended + vary(if bucket + 1 == buckets { pause } else { small });
            }
        }
        all
    }

    fn last_told(collectives: Vec<Span>) -> Option<Measured> {
        let mut meter = ProfileMeter::default();
        collectives.into_iter().filter_map(|span| meter.note(span.began, span.ended).profile).last().flatten()
    }

    proptest! {
        /// Period and length are found of whatever iterations, and where bursts begin.
        #[test]
        fn iterations_are_found(
            buckets in 1_u64..20,
            length in 100_u64..50_000,
            small in 0_u64..100,
            pause in 1_000_u64..200_000,
            jitter_percent in 0_u64..5,
        ) {
            let begin = Instant::now();
            let (burst, small) = (buckets * length, small.min(pause / 5));
            prop_assume!(pause * 100 >= (burst + pause) * u64::from(2 * PAUSE_PERCENT));
            let period = burst + (buckets - 1) * small + pause;
            let iterations = (3_000_000 / period + 10).min(20_000);
            let found = last_told(job(iterations, buckets, length, small, pause, jitter_percent, begin));
            let found = found.expect("a profile");
            let is_near = |found: Duration, us: u64| {
                let us = us as f64;
                (found.as_secs_f64() * 1e6 - us).abs() <= us * (0.01 + 0.01 * jitter_percent as f64)
            };
            prop_assert!(is_near(found.period, period), "{found:?} of {period}");
            prop_assert!(is_near(found.busy, period - pause), "{found:?} of {period} - {pause}");
        }
    }

    #[test]
    fn who_is_always_busy_or_comes_at_random_has_none() {
        let begin = Instant::now();
        assert_eq!(last_told(job(5_000, 1, 1_000, 0, 0, 3, begin)), None);
        assert_eq!(last_told(job(5_000, 1, 20_000, 0, 300, 3, begin)), None);
        let (mut seed, mut at) = (7_u64, begin);
        let mut random = Vec::new();
        for _ in 0..4_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            at += Duration::from_micros(1_000 + (seed >> 40) % 30_000);
            random.push(Span { began: at, ended: at + Duration::from_micros(500) });
        }
        assert_eq!(last_told(random), None);
    }

    #[test]
    fn it_is_told_anew_when_it_no_longer_holds_and_not_before() {
        let begin = Instant::now();
        let mut meter = ProfileMeter::default();
        let mut told = |collectives: &[Span]| {
            collectives.iter().filter_map(|span| meter.note(span.began, span.ended).profile).collect::<Vec<_>>()
        };
        let first = job(1_000, 2, 5_000, 50, 10_000, 0, begin);
        let news = told(&first);
        assert_eq!(news.len(), 1, "{news:?}");
        // The same, half a period later.
        let last = first.last().map_or(begin, |span| span.ended);
        let news = told(&job(1_000, 2, 5_000, 50, 10_000, 0, last + Duration::from_millis(17)));
        assert_eq!(news.len(), 1, "{news:?}");
        assert!(news[0].is_some_and(|profile| profile.period == Duration::from_micros(20_050)));
        // It stops being one.
        let news = told(&job(9_000, 1, 5_000, 0, 0, 0, last + Duration::from_secs(60)));
        assert_eq!(news.last(), Some(&None));
    }

    /// Three bursts of four meet another job's, and take twice as long.
    #[test]
    fn who_is_in_others_way_has_the_period_that_it_would_have_alone() {
        let (mut at, mut collectives) = (Instant::now(), Vec::new());
        for burst in 0..400 {
            let ended = at + Duration::from_millis(if burst % 4 == 0 { 8 } else { 16 });
            collectives.push(Span { began: at, ended });
            at = ended + Duration::from_millis(12);
        }
        let measured = last_told(collectives).expect("a profile");
        assert_eq!((measured.period, measured.busy), (Duration::from_millis(20), Duration::from_millis(8)));
    }

    #[test]
    fn who_comes_less_often_than_its_window_is_measured_anew_and_by_its_longest_bursts() {
        let begin = Instant::now();
        let mut meter = ProfileMeter::default();
        let mut at = begin;
        // Bursts of two collectives, 20 ms apart from begin to begin, or as many as it says.
        let mut run = |meter: &mut ProfileMeter, bursts: u64, period_ms: u64, lengths_us: &[u64]| {
            let mut news = Vec::new();
            for burst in 0..bursts {
                let length = Duration::from_micros(lengths_us[burst as usize % lengths_us.len()]);
                let middle = at + length / 2;
                for (began, ended) in [(at, middle), (middle, at + length)] {
                    news.extend(meter.note(began, ended).profile);
                }
                at += Duration::from_millis(period_ms);
            }
            news
        };
        let news = run(&mut meter, 200, 20, &[8_000]);
        assert_eq!(news.len(), 1, "{news:?}");
        let period = news[0].expect("a profile").period;
        // It goes on under its window, with a pause of a second for once.
        meter.set_window(Some(period));
        assert!(run(&mut meter, 100, 20, &[8_000]).is_empty());
        assert!(run(&mut meter, 1, 1_000, &[8_000]).is_empty());
        meter.set_window(Some(period));
        assert!(run(&mut meter, 100, 20, &[8_000]).is_empty());
        // Then a burst takes two windows every other time.
        assert_eq!(run(&mut meter, 100, 30, &[8_000]), [None], "once");
        meter.set_window(None);
        let news = run(&mut meter, 200, 24, &[8_000, 12_000]);
        assert!(matches!(news[..], [Some(measured)] if measured.busy >= Duration::from_millis(12)), "{news:?}");
    }

    #[test]
    fn every_burst_is_foreseen_when_the_one_before_ends() {
        let begin = Instant::now();
        // Bursts of three collectives, of which each takes longer by up to a half, by turns.
        let (mut at, mut meter, mut foreseen, mut seed) = (begin, ProfileMeter::default(), None::<Burst>, 1_u64);
        let mut hits = 0;
        for burst in 0..40_u64 {
            if let Some(expected) = foreseen.take() {
                assert_eq!(expected.begins, at);
                assert!(expected.lasts >= Duration::from_millis(31) && expected.lasts <= Duration::from_millis(46));
                hits += 1;
            }
            for collective in 0..3 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let ended = at + Duration::from_micros(10_000 + (seed >> 40) % 5_000);
                let Noted { burst, .. } = meter.note(at, ended);
                assert!(burst.is_none() || collective == 2, "not in the midst of one");
                foreseen = burst;
                at = ended + Duration::from_micros(if collective == 2 { 60_000 } else { 500 });
            }
            assert!(foreseen.is_some() || burst < 30, "known by now");
        }
        assert!(hits > 20, "{hits}");
    }
}
