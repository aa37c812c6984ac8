#![allow(missing_docs)]
use super::schedule as old;
pub use old::{Buffer, Problem, RemoteSpan as RankSpan, Span, Move};
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Send { peer: u32, src: RankSpan },
    Recv { peer: u32, dsts: Vec<RankSpan> },
    RecvReduce { peer: u32, srcs: Vec<RankSpan>, dsts: Vec<RankSpan>, incoming_raw: bool, srcs_raw: bool, finish: bool },
    Reduce { srcs: Vec<RankSpan>, dst: RankSpan },
    Copy { src: RankSpan, dsts: Vec<RankSpan> },
}
impl Step {
    pub fn count(&self) -> u64 {
        match self {
            Step::Send { src, .. } | Step::Copy { src, .. } => src.span.count,
            Step::Recv { dsts, .. } | Step::RecvReduce { dsts, .. } => dsts.first().map_or(0, |d| d.span.count),
            Step::Reduce { dst, .. } => dst.span.count,
        }
    }
}
#[derive(Debug, Clone)]
pub struct Program { pub ranks: Vec<u32>, pub steps: Vec<Step> }
#[derive(Debug, Clone)]
pub struct Channel { pub programs: Vec<Program> }
#[derive(Debug, Clone)]
pub enum Shape { Direct(Vec<Move>), Message(Vec<Channel>) }
#[derive(Debug, Clone)]
pub struct Schedule { pub problem: Problem, pub scratch_count: u64, pub shape: Shape }
pub fn lift(s: &old::Schedule) -> Schedule {
    let shape = match &s.shape {
        old::Shape::Direct(m) => Shape::Direct(m.clone()),
        old::Shape::Message(c) => Shape::Message(c.iter().map(|c| Channel { programs: (0..).zip(&c.programs).map(|(rank, p)| {
            let at = |span: &Span| RankSpan { rank, span: *span };
            Program { ranks: vec![rank], steps: p.iter().map(|s| match s {
                old::Step::Send { peer, src } => Step::Send { peer: *peer, src: at(src) },
                old::Step::Recv { peer, dst } => Step::Recv { peer: *peer, dsts: vec![at(dst)] },
                old::Step::RecvReduce { peer, local, dst, incoming_raw, local_raw, finish } => Step::RecvReduce { peer: *peer, srcs: vec![at(local)], dsts: vec![at(dst)], incoming_raw: *incoming_raw, srcs_raw: *local_raw, finish: *finish },
                old::Step::Copy { src, dst } => Step::Copy { src: at(src), dsts: vec![at(dst)] },
            }).collect() }
        }).collect() }).collect()),
    };
    Schedule { problem: s.problem, scratch_count: s.scratch_count, shape }
}
