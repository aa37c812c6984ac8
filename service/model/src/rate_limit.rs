//! Rate limits of a communicator's flows: caps, time windows, token buckets, yielding.
//!
//! A flow is all that goes from this host to another on a channel: of a ring, of all the links between ranks that a schedule without one
//! has there, of strategies before and after a change; or all point-to-point operations. It has a bucket that fills at the rate it may send
//! at, by the clock. A message leaves while the bucket is not below empty, and takes all its bits at once, so that long messages leave
//! whole and the rate is right over a few of them. Unused time is kept for `CREDIT`: an engine that comes late catches up. When a cap
//! begins, the last bytes count as sent under it: they are still on their way.
//!
//! Pacing is no promise: it only ever makes messages wait. Deliberately absent: who may have how much (policies decide), and
//! clocks of other hosts (the controller's): times here are this process's.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::names::Name;

/// For how long a flow may send later what it could have sent: longer than engines sleep by mistake, shorter than queues in
/// switches are patient.
const CREDIT: Duration = Duration::from_millis(5);
/// For how long a message may be on its way: in buffers of hosts and switches.
const ON_ITS_WAY: Duration = Duration::from_millis(100);
/// Messages of a link that may be unfinished while its pace depends on the time: one that leaves, and one that is ready. Whatever more was handed to
/// the network would still be on its way when others' time has come.
const UNDER_WAY_MAX: usize = 2;
/// A window that stays shut is refused by whoever checks paces; a day is as good as never.
const NEVER: Duration = Duration::from_secs(86_400);
/// Edges of windows that a bucket is filled over one by one; what is beyond is taken to be like these.
const EDGES_MAX: usize = 64;

/// The pace of all flows of a communicator that leave this host. Replaced as a whole. If flows have caps of their own, all together
/// send no more than these come to: bytes that no such flow carries are on the same NICs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pace {
    /// Payload in bits per second, of each flow that has no cap of its own.
    pub cap_bps: Option<u64>,
    /// Payload in bits per second that all flows of its tenant send out of this host, other communicators' as well.
    pub host_cap_bps: Option<u64>,
    /// Flows with a cap of their own.
    pub flows: Vec<CappedFlow>,
    /// When they may send. Absent: always.
    pub window: Option<LocalWindow>,
    /// When each of them sends less: payload in bits per second.
    pub yields: Vec<(LocalWindow, u64)>,
}

/// A flow with a cap of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CappedFlow {
    /// Its channel.
    pub channel: u16,
    /// The host that it goes to.
    pub to: Name,
    /// Payload in bits per second.
    pub cap_bps: u64,
}

/// A time that comes again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalWindow {
    /// When it opened, some time ago.
    pub opened: Instant,
    /// From one opening to the next.
    pub period: Duration,
    /// How long it stays open.
    pub length: Duration,
    /// Whether it opens but once, which may be yet to come.
    pub is_once: bool,
}

/// A window at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowState {
    /// Whether flows may send.
    pub is_open: bool,
    /// When that changes; `None` for never.
    pub until: Option<Instant>,
}

impl LocalWindow {
    /// Whether it is open, and how long that stays so.
    #[must_use]
    pub fn at(&self, now: Instant) -> WindowState {
        let is_open_until = |is_open, until| WindowState { is_open, until };
        if self.is_once {
            let until = self.opened + self.length;
            return match now {
                now if now < self.opened => is_open_until(false, Some(self.opened)),
                now if now < until => is_open_until(true, Some(until)),
                _ => is_open_until(false, None),
            };
        }
        if self.length >= self.period {
            return is_open_until(true, None);
        }
        let since_ns = now.saturating_duration_since(self.opened).as_nanos() % self.period.as_nanos().max(1);
        let since = Duration::from_nanos(since_ns as u64);
        if since < self.length {
            is_open_until(true, Some(now + (self.length - since)))
        } else {
            is_open_until(false, Some(now + (self.period - since)))
        }
    }
}

/// A flow's permission at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rate {
    Closed,
    BitsPerSecond(f64),
    Unlimited,
}

impl Pace {
    /// Whether flows are as they would be without.
    #[must_use]
    pub fn is_free(&self) -> bool {
        *self == Pace::default()
    }

    /// Whether a link that has so many unfinished messages may have another one.
    #[must_use]
    pub fn has_room(&self, under_way: usize) -> bool {
        let is_timed = self.window.is_some() || !self.yields.is_empty();
        !is_timed || under_way < UNDER_WAY_MAX
    }

    /// Cap of the flow of `channel` to `host`, in bits per second.
    #[must_use]
    pub fn cap_of(&self, channel: u16, host: &Name) -> Option<u64> {
        let own = self.flows.iter().find(|flow| flow.channel == channel && flow.to == *host).map(|flow| flow.cap_bps);
        own.or(self.cap_bps)
    }

    /// Rate of all flows together, in bits per second, if that is bounded.
    #[must_use]
    pub fn common_bps(&self) -> Option<u64> {
        let sum = self.flows.iter().fold(0_u64, |sum, flow| sum.saturating_add(flow.cap_bps));
        (!self.flows.is_empty()).then_some(sum)
    }

    /// Permission of a flow with this cap, and until when that stays so.
    fn rate_at(&self, cap_bps: Option<u64>, now: Instant) -> (Rate, Option<Instant>) {
        let mut until: Option<Instant> = None;
        let mut look = |window: &LocalWindow| {
            let state = window.at(now);
            until = [until, state.until].into_iter().flatten().min();
            state.is_open
        };
        let is_closed = self.window.as_ref().is_some_and(|window| !look(window));
        let yields = self.yields.iter().filter_map(|(window, cap_bps)| look(window).then_some(*cap_bps)).min();
        let rate = match [cap_bps, yields].into_iter().flatten().min() {
            _ if is_closed => Rate::Closed,
            Some(cap_bps) => Rate::BitsPerSecond(cap_bps as f64),
            None => Rate::Unlimited,
        };
        (rate, until)
    }
}

/// As `Bucket`, for what several engines send, who share no lock: until when what has left is paid for. A debt is paid at the rate at which
/// it was made, also when there is another by then.
#[derive(Debug, Default)]
pub struct SharedBucket {
    begun: OnceLock<Instant>,
    /// Since then.
    paid_ns: AtomicU64,
}

impl SharedBucket {
    /// Whether something may be sent at a rate.
    ///
    /// # Errors
    /// When to ask again.
    pub fn may_send(&self, now: Instant) -> Result<(), Instant> {
        // Nothing else is read by it; that two engines see the same and both send is paid for by those that come after.
        let ahead_ns = self.paid_ns.load(Ordering::Relaxed).saturating_sub(self.since_ns(now));
        if ahead_ns == 0 { Ok(()) } else { Err(now + Duration::from_nanos(ahead_ns)) }
    }

    /// Something was sent.
    pub fn sent(&self, bytes: u64, bps: u64, now: Instant) {
        self.take_turn(bytes, bps, now);
    }

    /// When a message may leave, behind all that were sent or have a turn. It is paid for by that, whenever it leaves. A bucket that asks
    /// again and again instead comes last for as long as others are quicker to ask.
    pub fn take_turn(&self, bytes: u64, bps: u64, now: Instant) -> Instant {
        let took_ns = (bytes as f64 * 8e9 / bps.max(1) as f64) as u64;
        let since_ns = self.since_ns(now);
        let credit_ns = since_ns.saturating_sub(CREDIT.as_nanos() as u64);
        let pay = |paid_ns: u64| Some(paid_ns.max(credit_ns).saturating_add(took_ns));
        let (Ok(before_ns) | Err(before_ns)) = self.paid_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay);
        now + Duration::from_nanos(before_ns.saturating_sub(since_ns))
    }

    fn since_ns(&self, now: Instant) -> u64 {
        let begun = *self.begun.get_or_init(|| now);
        u64::try_from(now.saturating_duration_since(begun).as_nanos()).unwrap_or(u64::MAX)
    }

    /// As [`Bucket::may_send`].
    ///
    /// # Errors
    /// When to ask again.
    pub fn may_send_by(&self, pace: &Pace, cap_bps: Option<u64>, now: Instant) -> Result<(), Instant> {
        let (rate, until) = pace.rate_at(cap_bps, now);
        let ready = match rate {
            Rate::Unlimited => return Ok(()),
            Rate::BitsPerSecond(_) => match self.may_send(now) {
                Ok(()) => return Ok(()),
                Err(ready) => Some(ready),
            },
            Rate::Closed => None,
        };
        Err([ready, until].into_iter().flatten().min().unwrap_or(now + NEVER))
    }

    /// As [`Bucket::sent`].
    pub fn sent_by(&self, pace: &Pace, cap_bps: Option<u64>, bytes: u64, now: Instant) {
        if let (Rate::BitsPerSecond(bps), _) = pace.rate_at(cap_bps, now) {
            self.sent(bytes, bps as u64, now);
        }
    }
}

/// Permission of a flow to send now.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    level_bits: f64,
    at: Instant,
    /// When a message left last that nothing would have held, and its bits; until they are charged.
    freely_sent: Option<(Instant, f64)>,
    /// Nothing holds the flow.
    is_free: bool,
}

impl Bucket {
    /// The bucket of a flow that begins.
    pub fn new(now: Instant) -> Self {
        Bucket { level_bits: 0.0, at: now, freely_sent: None, is_free: false }
    }

    /// Whether the flow may send now.
    ///
    /// # Errors
    /// When to ask again.
    pub fn may_send(&mut self, pace: &Pace, cap_bps: Option<u64>, now: Instant) -> Result<(), Instant> {
        self.fill(pace, cap_bps, now);
        let (rate, until) = pace.rate_at(cap_bps, now);
        self.is_free = rate == Rate::Unlimited;
        if let Rate::BitsPerSecond(_) = rate {
            self.charge(now);
        }
        let ready = match rate {
            Rate::Unlimited => return Ok(()),
            Rate::BitsPerSecond(_) if self.level_bits >= 0.0 => return Ok(()),
            Rate::BitsPerSecond(bps) => {
                let wait = Duration::from_secs_f64(-self.level_bits / bps.max(1.0));
                Some(now + wait.max(Duration::from_nanos(1)))
            }
            Rate::Closed => None,
        };
        Err([ready, until].into_iter().flatten().min().unwrap_or(now + NEVER))
    }

    /// The flow has sent.
    pub fn sent(&mut self, bytes: u64, now: Instant) {
        let bits = bytes as f64 * 8.0;
        self.level_bits -= bits;
        if self.is_free {
            self.freely_sent = Some((now, bits));
        }
    }

    /// From now on another pace holds. A debt is paid at its rate.
    pub fn repace(&mut self, before: &Pace, cap_bps: Option<u64>, now: Instant) {
        self.fill(before, cap_bps, now);
        self.level_bits = self.level_bits.min(0.0);
    }

    /// A cap holds from `now` on at the latest: what is still on its way counts.
    fn charge(&mut self, now: Instant) {
        if let Some((at, bits)) = self.freely_sent.take()
            && now.saturating_duration_since(at) <= ON_ITS_WAY
        {
            self.level_bits -= bits;
        }
    }

    fn fill(&mut self, pace: &Pace, cap_bps: Option<u64>, now: Instant) {
        let (from, mut gained_bits, mut most_bps) = (self.at, 0.0, 0.0_f64);
        for _ in 0..EDGES_MAX {
            if self.at >= now {
                return;
            }
            let (rate, until) = pace.rate_at(cap_bps, self.at);
            let to = until.map_or(now, |until| until.min(now));
            match rate {
                Rate::Closed => {}
                Rate::Unlimited => self.level_bits = self.level_bits.max(0.0),
                Rate::BitsPerSecond(bps) => {
                    self.charge(self.at);
                    let gain_bits = (to - self.at).as_secs_f64() * bps;
                    (gained_bits, most_bps) = (gained_bits + gain_bits, most_bps.max(bps));
                    self.level_bits = (self.level_bits + gain_bits).min(CREDIT.as_secs_f64() * bps);
                }
            }
            self.at = to;
        }
        // The rest is as what was looked at. A debt is not forgiven: windows that come often would make it worth nothing.
        let looked_at = (self.at - from).as_secs_f64().max(1e-9);
        let rest_bits = gained_bits * (now.saturating_duration_since(self.at).as_secs_f64() / looked_at);
        (self.level_bits, self.at) = ((self.level_bits + rest_bits).min(CREDIT.as_secs_f64() * most_bps), now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MESSAGE_BYTES: u64 = 256 << 10;

    /// Bits that a flow with endless data sends from `from_ms` to `to_ms`, when it is looked at when it wants, or late by up
    /// to `late_us`.
    fn sent_bits(pace: &Pace, cap_bps: Option<u64>, from_ms: u64, to_ms: u64, late_us: u64, begin: Instant) -> f64 {
        let mut bucket = Bucket::new(begin);
        let (mut now, mut bits, mut round) = (begin, 0.0, 0_u64);
        while now < begin + Duration::from_millis(to_ms) {
            match bucket.may_send(pace, cap_bps, now) {
                Ok(()) => {
                    bucket.sent(MESSAGE_BYTES, now);
                    if now >= begin + Duration::from_millis(from_ms) {
                        bits += MESSAGE_BYTES as f64 * 8.0;
                    }
                    // A link of 100 Gbit/s.
                    now += Duration::from_nanos(20_972);
                }
                Err(at) => {
                    assert!(at > now, "who is refused has to wait");
                    round += 1;
                    now = at + Duration::from_micros(if late_us == 0 { 0 } else { round * 7919 % late_us });
                }
            }
        }
        bits
    }

    fn window(opened: Instant, period_ms: u64, length_ms: u64) -> LocalWindow {
        let (period, length) = (Duration::from_millis(period_ms), Duration::from_millis(length_ms));
        LocalWindow { opened, period, length, is_once: false }
    }

    proptest! {
        /// Whatever the cap, and however late an engine comes within the credit: what leaves is the cap to a hundredth.
        #[test]
        fn a_cap_is_kept_and_used(cap_mbps in 50_u64..20_000, late_us in 0_u64..3_000) {
            let begin = Instant::now();
            let pace = Pace { cap_bps: Some(cap_mbps * 1_000_000), ..Pace::default() };
            let bits = sent_bits(&pace, pace.cap_bps, 0, 4_000, late_us, begin);
            let expected = cap_mbps as f64 * 1e6 * 4.0;
            let message = MESSAGE_BYTES as f64 * 8.0;
            prop_assert!((bits - expected).abs() <= 0.01 * expected + 2.0 * message, "{bits} of {expected}");
        }

        /// Under a window nothing leaves while it is shut, and the cap holds while it is open.
        #[test]
        fn nothing_leaves_through_a_shut_window(period_ms in 20_u64..200, part in 10_u64..90, late_us in 0_u64..500) {
            let begin = Instant::now();
            let (length_ms, cap_bps) = ((period_ms * part / 100).max(1), Some(10_000_000_000));
            let pace = Pace { window: Some(window(begin, period_ms, length_ms)), ..Pace::default() };
            let mut bucket = Bucket::new(begin);
            let (mut now, mut bits) = (begin, 0.0);
            let end = begin + Duration::from_millis(period_ms * 20);
            while now < end {
                match bucket.may_send(&pace, cap_bps, now) {
                    Ok(()) => {
                        let since = (now - begin).as_nanos() % Duration::from_millis(period_ms).as_nanos();
                        prop_assert!(since < Duration::from_millis(length_ms).as_nanos());
                        bucket.sent(MESSAGE_BYTES, now);
                        bits += MESSAGE_BYTES as f64 * 8.0;
                    }
                    Err(at) => now = at + Duration::from_micros(late_us),
                }
            }
            let expected = 10e9 * (length_ms * 20) as f64 / 1e3;
            let slack = 0.01 * expected + 20.0 * (MESSAGE_BYTES as f64 * 8.0 + 10e9 * late_us as f64 / 1e6);
            prop_assert!((bits - expected).abs() <= slack, "{bits} of {expected}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// However many flows have one cap together, of messages of whichever lengths, and however late their engines come within the credit: what
        /// leaves is the cap to a hundredth.
        #[test]
        fn a_cap_of_many_flows_is_kept_and_used(
            cap_mbps in 500_u64..50_000,
            flows in 1_usize..20,
            late_us in 0_u64..3_000,
            is_mixed: bool,
        ) {
            let (begin, cap_bps, bucket) = (Instant::now(), cap_mbps * 1_000_000, SharedBucket::default());
            let bytes = |flow: usize| if is_mixed { MESSAGE_BYTES >> (flow % 4) } else { MESSAGE_BYTES };
            let (mut sent, mut round) = (vec![0.0; flows], 0_u64);
            // When engines look at them, which is late where they had to sleep.
            let mut due = vec![begin; flows];
            let end = begin + Duration::from_secs(2);
            loop {
                let (flow, now) = (0..).zip(&due).map(|(flow, at)| (flow, *at)).min_by_key(|(_, at)| *at).expect("some");
                if now >= end {
                    break;
                }
                let turn = bucket.take_turn(bytes(flow), cap_bps, now);
                round += 1;
                let late = Duration::from_micros(if turn <= now || late_us == 0 { 0 } else { round * 7919 % late_us });
                let at = turn.max(now) + late;
                sent[flow] += if at < end { bytes(flow) as f64 * 8.0 } else { 0.0 };
                // On a link of 400 Gbit/s.
                due[flow] = at + Duration::from_nanos(bytes(flow) / 50);
            }
            let (sum, expected) = (sent.iter().sum::<f64>(), cap_bps as f64 * 2.0);
            let message = MESSAGE_BYTES as f64 * 8.0;
            prop_assert!((sum - expected).abs() <= 0.01 * expected + (flows + 1) as f64 * message, "{sum} of {expected}");
        }
    }

    #[test]
    fn turns_after_a_long_silence_are_no_earlier_than_a_credit() {
        let (begin, bucket) = (Instant::now(), SharedBucket::default());
        bucket.take_turn(1 << 30, 1_000_000_000, begin + Duration::from_millis(1));
        // An engine that has looked at its clock earlier.
        assert!(bucket.take_turn(1, 1_000_000_000, begin) > begin);
        let later = begin + Duration::from_secs(100_000);
        // A thousand messages of a millisecond each.
        let turns: Vec<Instant> = (0..1000).map(|_| bucket.take_turn(125_000, 1_000_000_000, later)).collect();
        assert_eq!(turns[0], later);
        assert_eq!(turns[999], later + Duration::from_millis(999) - CREDIT);
    }

    #[test]
    fn little_is_under_way_where_it_depends_on_the_time() {
        let opens = window(Instant::now(), 1_000, 500);
        let capped = Pace { cap_bps: Some(1_000_000), ..Pace::default() };
        let timed = [
            Pace { window: Some(opens), ..Pace::default() },
            Pace { yields: vec![(opens, 1_000_000)], ..capped.clone() },
        ];
        assert!([Pace::default(), capped].iter().all(|pace| pace.has_room(1_000)));
        for pace in timed {
            assert!(pace.has_room(0) && pace.has_room(UNDER_WAY_MAX - 1) && !pace.has_room(UNDER_WAY_MAX));
        }
    }

    /// An engine looks at two flows of a tenant by turns, of which one has messages sixteen times as long: held to equal rates, they
    /// have sent equal bytes at any time, to a long message.
    #[test]
    fn flows_with_short_and_long_messages_get_equal_bytes() {
        const LENGTHS: [u64; 2] = [64 << 10, 1 << 20];
        let begin = Instant::now();
        let pace = Pace { cap_bps: Some(500_000_000), ..Pace::default() };
        let mut buckets = [Bucket::new(begin); 2];
        let mut sent = [0_u64; 2];
        let mut now = begin;
        while now < begin + Duration::from_secs(2) {
            let mut wake_at = None;
            for flow in 0..2 {
                match buckets[flow].may_send(&pace, pace.cap_bps, now) {
                    Ok(()) => {
                        buckets[flow].sent(LENGTHS[flow], now);
                        sent[flow] += LENGTHS[flow];
                        // On a link of 100 Gbit/s.
                        now += Duration::from_nanos(LENGTHS[flow] * 8 / 100);
                        wake_at = Some(now);
                    }
                    Err(at) => wake_at = wake_at.into_iter().chain([at]).min(),
                }
            }
            assert!(sent[0].abs_diff(sent[1]) <= LENGTHS[1] + LENGTHS[0], "{sent:?} at {:?}", now - begin);
            now = now.max(wake_at.expect("one of them wants to go on"));
        }
        let half = 500e6 * 2.0 / 8.0;
        assert!(sent.iter().all(|bytes| (*bytes as f64 / half - 1.0).abs() < 0.02), "{sent:?}");
    }

    #[test]
    fn a_time_to_yield_slows_down_and_ends() {
        let begin = Instant::now();
        let yields = vec![(window(begin, 1_000, 500), 1_000_000_000)];
        let pace = Pace { yields, ..Pace::default() };
        let cap_bps = Some(10_000_000_000);
        let slow = sent_bits(&pace, cap_bps, 0, 500, 0, begin);
        let both = sent_bits(&pace, cap_bps, 0, 1_000, 0, begin);
        assert!((slow / 0.5e9 - 1.0).abs() < 0.02, "{slow}");
        assert!(((both - slow) / 5e9 - 1.0).abs() < 0.02, "{both}");
        // A debt made under a low cap is not paid at it once the cap is gone.
        let mut bucket = Bucket::new(begin);
        let late = begin + Duration::from_millis(499);
        assert!(bucket.may_send(&pace, None, late).is_ok());
        bucket.sent(100 << 20, late);
        assert_eq!(bucket.may_send(&pace, None, late), Err(begin + Duration::from_millis(500)));
        assert_eq!(bucket.may_send(&pace, None, begin + Duration::from_millis(500)), Ok(()));
    }

    #[test]
    fn what_is_on_its_way_when_a_time_to_yield_begins_counts() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let pace = Pace { yields: vec![(window(begin, 1_000, 500), 10_000_000)], ..Pace::default() };
        let mut bucket = Bucket::new(at(500));
        for ms in [500, 900, 999] {
            assert_eq!(bucket.may_send(&pace, None, at(ms)), Ok(()));
            bucket.sent(125_000, at(ms));
        }
        // The last, of a million bits, takes a tenth of a second at this rate.
        assert_eq!(bucket.may_send(&pace, None, at(1_001)), Err(at(1_100)));
        assert_eq!(bucket.may_send(&pace, None, at(1_100)), Ok(()));
        // Another word about the same times forgives nothing.
        bucket.sent(125_000, at(1_100));
        bucket.repace(&pace, None, at(1_150));
        assert_eq!(bucket.may_send(&pace, None, at(1_150)), Err(at(1_200)));
        // A flow that has been silent before owes nothing.
        assert_eq!(bucket.may_send(&pace, None, at(1_600)), Ok(()));
        bucket.sent(125_000, at(1_600));
        assert_eq!(bucket.may_send(&pace, None, at(2_050)), Ok(()));
    }

    #[test]
    fn a_window_that_opens_once_may_be_yet_to_come() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let once = LocalWindow { is_once: true, ..window(at(100), 50, 20) };
        assert_eq!(once.at(begin), WindowState { is_open: false, until: Some(at(100)) });
        assert_eq!(once.at(at(110)), WindowState { is_open: true, until: Some(at(120)) });
        assert_eq!(once.at(at(160)), WindowState { is_open: false, until: None });
    }

    #[test]
    fn who_was_silent_for_long_has_no_more_than_a_credit() {
        let begin = Instant::now();
        let pace = Pace { window: Some(window(begin, 2, 1)), ..Pace::default() };
        let mut bucket = Bucket::new(begin);
        let later = begin + Duration::from_secs(1000);
        assert_eq!(bucket.may_send(&pace, Some(1_000_000_000), later), Ok(()));
        assert!(bucket.level_bits <= CREDIT.as_secs_f64() * 1e9);
    }

    #[test]
    fn flows_have_their_own_cap_or_the_common_one() {
        let host = |name| Name::new(name).unwrap();
        let pace = Pace {
            cap_bps: Some(5),
            flows: vec![CappedFlow { channel: 1, to: host("b"), cap_bps: 7 }],
            ..Pace::default()
        };
        assert_eq!([pace.cap_of(1, &host("b")), pace.cap_of(0, &host("b"))], [Some(7), Some(5)]);
        assert!(Pace::default().is_free() && !pace.is_free());
    }

    /// A flow that is looked at seldom, beside windows that come often, owes what it owes all the same, and pays at the rate of all of
    /// the time.
    #[test]
    fn many_windows_between_two_looks_forgive_nothing() {
        let begin = Instant::now();
        let (period, length) = (Duration::from_micros(50), Duration::from_micros(25));
        let window = LocalWindow { opened: begin, period, length, is_once: false };
        let pace = Pace { window: Some(window), ..Pace::default() };
        let bits = sent_bits(&pace, Some(20_000_000), 0, 3_000, 20_000, begin);
        let message = MESSAGE_BYTES as f64 * 8.0;
        let due = 0.5 * 20e6 * 3.0;
        assert!((due - 5.0 * message..due + 2.0 * message).contains(&bits), "{bits}, not {due}");
    }
}
