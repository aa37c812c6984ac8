//! Modelled ranks that carry a plan out together, in any order that it allows.

use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::strides::Strides;
use mccs_ipc::types::{BufferRange, CollectiveKind};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::memory::{Member, exchange};
use super::rank::{Moving, Rank};
use crate::{Exchange, Place};

/// Carries everything out, in an order that nothing but what steps come behind decides: joint stages when all who are in them have come.
pub(super) fn run(layout: &Layout, ranks: &mut [Rank], rng: &mut StdRng) {
    let seats: Vec<_> = (0..layout.nranks()).map(|rank| layout.seat(rank)).collect();
    let streams = ranks[0].streams.len();
    // Time of a try; now and then everything is tried, to see whether something can go on at all.
    let mut patience = 0;
    while !ranks.iter().all(Rank::has_ended) {
        let tries = |rng: &mut StdRng| patience >= 20 || rng.random_range(0..3) > 0;
        let mut has_moved = false;
        for stream in (0..streams).rev() {
            let mut next = vec![None; ranks.len()];
            for (rank, next) in ranks.iter_mut().zip(&mut next).filter(|_| tries(rng)) {
                let (moved, joint) = rank.advance(stream);
                has_moved |= moved;
                *next = joint;
            }
            for host in 0..layout.hosts() {
                let team: Vec<_> = (0..ranks.len()).filter(|rank| seats[*rank].host == host).collect();
                let all = team.iter().map(|rank| next[*rank].map(|(slot, exchange)| (*rank, slot, exchange)));
                let Some(all) = all.collect::<Option<Vec<_>>>() else { continue };
                // A batch has no order.
                let mut times: Vec<_> = (0..all[0].2.each().len()).collect();
                assert!(all.iter().all(|(.., of)| of.each().len() == times.len()), "they differ");
                times.shuffle(rng);
                for time in times {
                    let part = all.iter().map(|(rank, slot, of)| (*rank, *slot, of.each().nth(time).expect("as many")));
                    take_part(ranks, part);
                }
                for (rank, _, _) in all {
                    let number = ranks[rank].streams[stream][0];
                    ranks[rank].stages[number].pop_front();
                }
                has_moved = true;
            }
        }
        for rail in 0..layout.rails() {
            has_moved |= tries(rng) && move_by(layout, &seats, ranks, rail);
        }
        assert!(has_moved || patience < 20, "they wait for each other");
        patience = if has_moved { 0 } else { patience + 1 };
    }
}

/// Carries a rail's next move out, if all its ranks have come to it.
fn move_by(layout: &Layout, seats: &[Seat], ranks: &mut [Rank], rail: u32) -> bool {
    let acts = |rank: usize| {
        let each = layout.rails_each(seats[rank].host);
        (seats[rank].local == rail / each).then_some(rail % each)
    };
    let members: Vec<_> = (0..ranks.len()).filter_map(|rank| Some((rank, acts(rank)?))).collect();
    assert_eq!(members.len(), layout.hosts() as usize);
    let all = members.iter().map(|(rank, own)| Some((*rank, ranks[*rank].next_move(*own)?)));
    let Some(all) = all.collect::<Option<Vec<_>>>() else { return false };
    let all: Vec<_> = all.into_iter().map(|(rank, number)| (rank, number, ranks[rank].moves[number])).collect();
    for (rank, _, Moving { slot, moved, .. }) in &all {
        let memory = &mut ranks[*rank].memory;
        memory.bring(*moved, *slot, moved.goes_in(layout.hosts(), seats[*rank].host));
        memory.swap();
    }
    let parts = all.iter().map(|(rank, _, Moving { slot, moved: of, .. })| {
        let host = seats[*rank].host;
        let bytes = |count: Option<u64>| count.expect("fits");
        let send = bytes(of.kind.send_count(of.count, layout.hosts(), host, of.root));
        let recv = bytes(of.kind.recv_count(of.count, layout.hosts(), host, of.root));
        let (send, recv) = (BufferRange { start: of.send, bytes: send }, BufferRange { start: of.recv, bytes: recv });
        // As the service checks what a tenant names.
        assert!(of.kind.accepts_buffers(host, of.root, send, recv), "{of:?}");
        let place = |at| Place::Slot { rail: of.rail, at };
        let (send, recv) = (place(of.send), place(of.recv));
        let strides = Strides::close(of.count);
        (*rank, *slot, Exchange { kind: of.kind, root: of.root, count: of.count, send, recv, strides })
    });
    let parts: Vec<_> = parts.collect();
    match all.iter().any(|(.., moving)| moving.moved.only_from.is_some()) {
        true => hop(ranks, &all),
        false => take_part(ranks, parts.into_iter()),
    }
    for (rank, number, Moving { slot, moved, .. }) in &all {
        let rank_of = &mut ranks[*rank];
        rank_of.memory.bring(*moved, *slot, moved.comes_out(layout.hosts(), seats[*rank].host));
        rank_of.memory.swap();
        rank_of.moves[*number].has_ended = true;
    }
    true
}

/// A rail's ranks in the order of hosts: what each has goes to the next one of the ring.
fn hop(ranks: &mut [Rank], members: &[(usize, usize, Moving)]) {
    let count = members[0].2.moved.count;
    let sent = members.iter().map(|(rank, _, Moving { slot, moved: of, .. })| {
        assert_eq!((of.kind, of.count), (CollectiveKind::AllGather, count), "they differ");
        ranks[*rank].memory.read(Place::Slot { rail: of.rail, at: of.send }, *slot, count)
    });
    let sent: Vec<_> = sent.collect();
    for (rank, _, Moving { slot, moved: of, .. }) in members {
        let previous = of.only_from.expect("all go one place");
        let at = of.recv + u64::from(previous) * count;
        ranks[*rank].memory.write(Place::Slot { rail: of.rail, at }, *slot, &sent[previous as usize]);
    }
}

/// Ranks in order, each with its slot and its part.
fn take_part(ranks: &mut [Rank], members: impl Iterator<Item = (usize, usize, Exchange)>) {
    let mut each = ranks.iter_mut().enumerate();
    let mut members: Vec<_> = members
        .map(|(rank, slot, exchange)| {
            let (_, found) = each.find(|(index, _)| *index == rank).expect("ascending");
            Member { memory: &mut found.memory, slot, exchange }
        })
        .collect();
    exchange(&mut members);
}
