//! Buffers of a training rank, and what they must hold after a step.

use anyhow::ensure;
use mccs::{CollectiveKind, DataType, RedOp};
use mccs_cuda::{Context, DeviceAddress, DeviceMemory, copy_from_host, copy_to_host};

use super::plan::{Action, ELEMENT_BYTES, Layout, Plan, Space};
use crate::workload::{Call, POISON};

/// Elements after which a rank's data begin again: a prime, so that data that came to a wrong place differ.
const PERIOD: u64 = 1_000_003;
/// Elements that are checked at a time: at a result's beginning, at its end, and somewhere between.
const WINDOW: u64 = 4096;

/// Buffers, as plans name them.
pub(super) struct Memory {
    source: DeviceMemory,
    staging: DeviceMemory,
    result: DeviceMemory,
    /// One period of every rank's source.
    patterns: Vec<Vec<u8>>,
}

/// One period of a rank's data: small integers, whose sums are exact.
fn pattern(seed: u64, rank: u32, nranks: u32) -> Vec<u8> {
    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::Bf16, RedOp::Sum);
    Call { kind, dtype, redop, root: 0, count: PERIOD, nranks, seed }.input(rank)
}

impl Memory {
    /// Buffers of a rank. The seed is the same on all.
    pub(super) fn new(context: &Context, layout: &Layout, rank: u32, nranks: u32, seed: u64) -> anyhow::Result<Self> {
        let room = |bytes: u64| DeviceMemory::new(context, bytes.max(ELEMENT_BYTES) as usize);
        let (source, staging, result) = (room(layout.source)?, room(layout.staging)?, room(layout.result)?);
        let patterns: Vec<_> = (0..nranks).map(|rank| pattern(seed, rank, nranks)).collect();
        let _entered = context.enter()?;
        let (own, mut at) = (&patterns[rank as usize], 0);
        while at < source.len_bytes() {
            let part = own.len().min(source.len_bytes() - at);
            // SAFETY: inside the buffer; nothing is in flight.
            unsafe { copy_from_host(source.address() + at as u64, &own[..part])? };
            at += part;
        }
        let own = Memory { source, staging, result, patterns };
        own.poison()?;
        Ok(own)
    }

    /// Spoils what steps write. Nothing is in flight; the context is current.
    pub(super) fn poison(&self) -> anyhow::Result<()> {
        let spoiled = vec![POISON; 64 << 20];
        for memory in [&self.staging, &self.result] {
            let mut at = 0;
            while at < memory.len_bytes() {
                let part = spoiled.len().min(memory.len_bytes() - at);
                // SAFETY: inside the buffer; nothing is in flight.
                unsafe { copy_from_host(memory.address() + at as u64, &spoiled[..part])? };
                at += part;
            }
        }
        Ok(())
    }

    pub(super) fn at(&self, space: Space, offset: u64) -> DeviceAddress {
        let memory = match space {
            Space::Source => &self.source,
            Space::Staging => &self.staging,
            Space::Result => &self.result,
        };
        memory.address() + offset
    }

    /// A rank's element of the source, as `f32`.
    fn element(&self, rank: usize, index: u64) -> f32 {
        let at = (index % PERIOD * ELEMENT_BYTES) as usize;
        let bits = u16::from_le_bytes([self.patterns[rank][at], self.patterns[rank][at + 1]]);
        f32::from_bits(u32::from(bits) << 16)
    }

    /// Expected output of a collective at an element.
    fn expected(&self, action: &Action, own: usize, index: u64) -> f32 {
        let Action::Collective { kind, from: (_, at), count, .. } = *action else { return f32::NAN };
        let (first, ranks) = (at / ELEMENT_BYTES, 0..self.patterns.len());
        match kind {
            CollectiveKind::AllGather => self.element((index / count) as usize, first + index % count),
            CollectiveKind::AllToAll => {
                self.element((index / count) as usize, first + own as u64 * count + index % count)
            }
            CollectiveKind::ReduceScatter => {
                ranks.map(|rank| self.element(rank, first + own as u64 * count + index)).sum()
            }
            _ => ranks.map(|rank| self.element(rank, first + index)).sum(),
        }
    }

    /// Elements of a plan's collectives that are wrong, of those that are looked at. The step has ended, the context is current.
    pub(super) fn wrong_elements(&self, plan: &Plan, own: u32, seed: u64) -> anyhow::Result<u64> {
        let (nranks, mut wrong) = (self.patterns.len() as u32, 0);
        for (number, action) in plan.collectives().enumerate() {
            let Action::Collective { kind, from, to, count, .. } = *action else { continue };
            let elements = kind.recv_count(count, nranks, own, 0).unwrap_or(0);
            ensure!(elements > 0, "a collective of a plan has no output: {action:?}");
            let output =
                if kind == CollectiveKind::AllReduce { self.at(from.0, from.1) } else { self.at(Space::Result, to) };
            let length = WINDOW.min(elements);
            let between = seed.wrapping_mul(0x9e37_79b9).wrapping_add(number as u64 * 7919) % (elements - length + 1);
            for begin in [0, between, elements - length] {
                let mut bytes = vec![0; (length * ELEMENT_BYTES) as usize];
                // SAFETY: inside the buffer, as plans are; the step has ended.
                unsafe { copy_to_host(&mut bytes, output + begin * ELEMENT_BYTES)? };
                for (index, element) in bytes.chunks_exact(2).enumerate() {
                    let is = f32::from_bits(u32::from(u16::from_le_bytes([element[0], element[1]])) << 16);
                    let right = self.expected(action, own as usize, begin + index as u64);
                    wrong += u64::from(is.to_bits() != right.to_bits());
                }
            }
        }
        Ok(wrong)
    }
}
