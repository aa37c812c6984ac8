//! Rates of flows in the simulator: how fast they move, until when, and what they have moved since.

use mccs_controller::pace::bursts::CommonBurst;
use mccs_policy::shares::Demand;
use mccs_policy::{Decision, WindowState};

use super::super::islands::Stream;
use super::{Event, Simulation, State};

/// Bits that count as none: what rounding leaves.
const NOTHING_BITS: f64 = 1.0;

impl Simulation<'_> {
    /// How long streams take that only have each other.
    pub(super) fn operation_ns(&mut self, mut streams: Vec<Stream>) -> u64 {
        let (mut seconds, mut rates) = (0.0, Vec::new());
        while !streams.is_empty() {
            let demands: Vec<Demand<'_>> = streams
                .iter()
                .map(|stream| Demand { weight: 1.0, cap: stream.alone_bps, priority: 0, uses: &stream.uses })
                .collect();
            self.filler.fill(&self.capacities, &demands, &mut rates);
            let times = streams.iter().zip(&rates).map(|(stream, rate)| stream.left_bits / rate);
            let step = times.fold(f64::INFINITY, f64::min);
            if !step.is_finite() {
                return u64::MAX;
            }
            seconds += step;
            streams.iter_mut().zip(&rates).for_each(|(stream, rate)| stream.left_bits -= step * rate);
            streams.retain(|stream| stream.left_bits > NOTHING_BITS);
        }
        (seconds * 1e9).ceil() as u64
    }

    /// Moves the streams of an island on to now.
    pub(super) fn settle(&mut self, island: usize) {
        let seconds = (self.now_ns - self.islands[island].settled_ns) as f64 / 1e9;
        self.islands[island].settled_ns = self.now_ns;
        for job in &self.islands[island].jobs {
            if let Some(running) = &mut self.running[*job]
                && matches!(running.state, State::Sending { .. })
            {
                for stream in &mut running.streams {
                    stream.left_bits -= stream.rate_bps * seconds;
                }
            }
        }
    }

    /// Ends collectives of an island that have nothing left.
    pub(super) fn complete(&mut self, island: usize) {
        for place in 0..self.islands[island].jobs.len() {
            let job = self.islands[island].jobs[place];
            let Some(running) = &mut self.running[job] else { continue };
            if let State::Sending { since_ns } = running.state
                && running.streams.iter().all(|stream| stream.left_bits <= NOTHING_BITS)
            {
                running.sending_ns += self.now_ns - since_ns;
                let compute_ns = self.coming[job].work.compute.0.as_nanos() as u64;
                running.foreseen_ns = Some((self.now_ns + compute_ns, self.now_ns - since_ns));
                running.iterations_left -= 1;
                if running.iterations_left == 0 { self.end(job) } else { self.compute(job) }
            }
        }
    }

    /// Gives the streams of an island their rates, and says when that will change.
    pub(super) fn refill(&mut self, island: usize) {
        let version = self.version();
        self.islands[island].version = version;
        let mut next_ns = u64::MAX;
        let (mut demands, mut who) = (Vec::new(), Vec::new());
        for job in &self.islands[island].jobs {
            let Some(running) = &self.running[*job] else { continue };
            let (State::Sending { .. }, Some(decision)) = (running.state, &running.decision) else { continue };
            let (cap_bps, until_ns) = self.limit(decision);
            next_ns = next_ns.min(until_ns);
            for (number, stream) in running.streams.iter().enumerate() {
                if stream.left_bits > NOTHING_BITS {
                    let cap = stream.alone_bps.min(cap_bps);
                    who.push((*job, number));
                    demands.push(Demand {
                        weight: decision.weight,
                        cap,
                        priority: decision.priority,
                        uses: &stream.uses,
                    });
                }
            }
        }
        let mut rates = Vec::new();
        self.filler.fill(&self.capacities, &demands, &mut rates);
        for ((job, number), rate) in who.into_iter().zip(rates) {
            let Some(running) = &mut self.running[job] else { continue };
            let stream = &mut running.streams[number];
            stream.rate_bps = rate;
            if rate > 0.0 {
                next_ns = next_ns.min(self.now_ns + (stream.left_bits / rate * 1e9).ceil() as u64);
            }
        }
        if next_ns < u64::MAX {
            self.push(next_ns, Event::Island { island, version });
        }
    }

    /// Most that each flow may send now, and when that changes next.
    fn limit(&self, decision: &Decision) -> (f64, u64) {
        let (mut cap_bps, mut until_ns) = (f64::INFINITY, u64::MAX);
        if let Some(window) = decision.window {
            let state = window.at(self.now_ns);
            cap_bps = if state.is_open { cap_bps } else { 0.0 };
            until_ns = state.until_ns;
        }
        for held in &decision.yields {
            let high = usize::try_from(held.to).ok().and_then(|job| self.running.get(job)?.as_ref());
            let state = match high.and_then(|high| high.foreseen_ns) {
                Some((begins_ns, lasts_ns)) => during(CommonBurst { begins_ns, lasts_ns }.with_margin(), self.now_ns),
                None => held.window.at(self.now_ns),
            };
            cap_bps = if state.is_open { cap_bps.min(held.cap_bps) } else { cap_bps };
            until_ns = until_ns.min(state.until_ns);
        }
        (cap_bps, until_ns)
    }
}

/// Whether a burst goes on, as a window that opens but once.
fn during(burst: CommonBurst, now_ns: u64) -> WindowState {
    let CommonBurst { begins_ns, lasts_ns } = burst;
    let ends_ns = begins_ns.saturating_add(lasts_ns);
    match now_ns {
        now_ns if now_ns < begins_ns => WindowState { is_open: false, until_ns: begins_ns },
        now_ns if now_ns < ends_ns => WindowState { is_open: true, until_ns: ends_ns },
        _ => WindowState { is_open: false, until_ns: u64::MAX },
    }
}
