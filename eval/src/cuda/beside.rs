//! Overlap of a collective with a tenant's computation on one GPU: what each costs the other.

use std::time::Duration;

use mccs_cuda::{Event, OwnedStream};

use super::load::Load;
use super::rank::{Rank, Side};
use crate::workload::Call;

/// How long the computation of a measurement takes alone, and one of its kernels.
const LOAD_FOR: Duration = Duration::from_millis(60);
const KERNEL_FOR: Duration = Duration::from_millis(2);

/// Measurements of one run. Times are the slowest rank's.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Beside {
    /// A collective with nothing beside it.
    pub alone_us: f64,
    /// A collective beside the computation.
    pub beside_us: f64,
    /// The computation with nothing beside it.
    pub load_alone_us: f64,
    /// The computation beside collectives.
    pub load_beside_us: f64,
    /// From the beginning of both to the end of both.
    pub both_us: f64,
    /// Multiprocessors that a collective takes from the computation, times how long: what the computation lost.
    pub multiprocessor_us: f64,
}

/// A rank and its computation.
pub struct Bench<'a> {
    own: &'a Rank,
    load: Load,
    stream: OwnedStream,
    events: [Event; 4],
    sms: u32,
    /// Rounds of a kernel of [`KERNEL_FOR`].
    rounds: u32,
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl<'a> Bench<'a> {
    /// A computation on so many multiprocessors, or on all if there are not so many.
    ///
    /// # Errors
    /// The driver's, the service's.
    pub fn new(own: &'a Rank, sms: u32) -> anyhow::Result<Self> {
        const TRIAL: u32 = 10_000;
        let context = own.context();
        let sms = sms.min(context.gpu().multiprocessors);
        let event = || Event::new(context, true);
        let events = [event()?, event()?, event()?, event()?];
        let (load, stream) = (Load::new(context)?, OwnedStream::new(context)?);
        let mut bench = Bench { own, load, stream, events, sms, rounds: TRIAL };
        bench.load_alone(1)?;
        let trial = own.largest(us(bench.load_alone(1)?))?;
        bench.rounds = (f64::from(TRIAL) * us(KERNEL_FOR) / trial) as u32;
        Ok(bench)
    }

    /// Multiprocessors that the computation takes.
    #[must_use]
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// Enqueues the computation, between two events.
    fn enqueue_load(&self, kernels: u32) -> anyhow::Result<()> {
        // SAFETY: stream and events live, and are of one context.
        unsafe { self.events[0].record(self.stream.raw())? };
        for _ in 0..kernels {
            self.load.run(self.stream.raw(), self.sms, self.rounds)?;
        }
        // SAFETY: as above.
        unsafe { Ok(self.events[1].record(self.stream.raw())?) }
    }

    fn load_alone(&self, kernels: u32) -> anyhow::Result<Duration> {
        let _entered = self.own.context().enter()?;
        self.own.largest(0.0)?;
        self.enqueue_load(kernels)?;
        // SAFETY: the stream lives.
        unsafe { self.stream.raw().synchronize()? };
        Ok(self.events[1].elapsed_since(&self.events[0])?)
    }

    /// How many collectives take as long as the computation: on one side, for all, so that what both take together can be compared.
    ///
    /// # Errors
    /// The failure.
    pub fn calls(&self, side: Side, call: &Call) -> anyhow::Result<u32> {
        let estimate = us(self.own.time_back_to_back(side, call, 10)?);
        Ok((us(LOAD_FOR) / self.own.largest(estimate)?).ceil() as u32)
    }

    /// Measures so many collectives, once: alone, the computation alone, and both.
    ///
    /// # Errors
    /// The failure.
    pub fn measure(&self, side: Side, call: &Call, iterations: u32) -> anyhow::Result<Beside> {
        let own = self.own;
        own.time_back_to_back(side, call, 2)?;
        let alone_us = us(own.time_back_to_back(side, call, iterations)?);
        let kernels = (us(LOAD_FOR) / us(KERNEL_FOR)) as u32;
        let load_alone_us = own.largest(us(self.load_alone(kernels)?))?;
        let _entered = own.context().enter()?;
        own.largest(0.0)?;
        self.enqueue_load(kernels)?;
        let [load_begin, load_end, begin, end] = &self.events;
        // SAFETY: streams and events live, and are of one context.
        unsafe {
            begin.record(own.stream())?;
            for _ in 0..iterations {
                own.enqueue_timed(side, call)?;
            }
            end.record(own.stream())?;
            own.stream().synchronize()?;
            self.stream.raw().synchronize()?;
        }
        let own_us = us(end.elapsed_since(begin)?);
        let both = us(load_end.elapsed_since(load_begin)?).max(us(end.elapsed_since(load_begin)?));
        let load_beside_us = own.largest(us(load_end.elapsed_since(load_begin)?))?;
        Ok(Beside {
            alone_us,
            beside_us: own.largest(own_us / f64::from(iterations))?,
            load_alone_us,
            load_beside_us,
            both_us: own.largest(both)?,
            multiprocessor_us: (load_beside_us - load_alone_us) * f64::from(self.sms) / f64::from(iterations),
        })
    }
}
