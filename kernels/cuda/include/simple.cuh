// Simple kernels for middle sizes: chunks through slots of the symmetric buffers, with flags
// behind them.
//
// Every block owns a slice of each message, with its slots, flags and acknowledgements; no block waits for another of
// its grid. Inside a block three roles run side by side, so that a chunk is pushed, an earlier one combined and passed on,
// and one before that taken out at the same time:
//
//   push    send buffer -> slots of phase 0 in the symmetric buffers of those who own the parts
//   middle  slots of phase 0 -> combined or copied -> receive buffer, and slots of phase 1 in others' symmetric buffers
//   out     slots of phase 1 -> receive buffer
//
// A role is a gate warp (waits for what a step needs), workers (move bytes), and a post warp (fence, then tells others).
//
//   gate, workers: meet at `go` -> workers: work -> workers, post: meet at `did` -> post: tell
//
// Links do not treat all multiprocessors alike: with a slice each, some end a third later than others. In long operations chunks are
// therefore dealt out while it runs: whoever is done sooner gets more. Blocks of the same number on all ranks work on the same chunks,
// so one rank deals for all: its push gate, some steps ahead.
//
// Words are operation number << 32 | steps, so they only grow. Within an operation a slot is written again when the
// receiver has acknowledged the step that used it. Between operations the halves of the symmetric buffer alternate, which is safe for
// the reason given for packets: heads make every operation here a full exchange. An acknowledgement that nobody waits for
// is not sent.
#pragma once
#include "symmetric_buffer.cuh"
#include "ll.cuh"
#include "vectors.cuh"

namespace mccs {

constexpr uint32_t SIMPLE_THREADS_MAX = 768;

struct Worker {
    uint32_t thread, threads;
    // The workers' part in the `index`th of `count` copies that they make side by side, by warps; empty-handed beyond.
    __device__ bool share(uint32_t index, uint32_t count, Worker& part) const {
        uint32_t warp = thread / 32, warps = threads / 32;
        if (warps < count) {  // too few: everybody for each in turn
            part = *this;
            return true;
        }
        part = Worker{warp / count * 32 + thread % 32, (warps - index + count - 1) / count * 32};
        return warp % count == index;
    }
};

// As many steps as chunks, one after the other.
struct Counted {
    uint32_t steps;
    __device__ bool more(uint32_t step) const { return step < steps; }
    __device__ bool choose(uint32_t, uint32_t) const { return true; }
    __device__ uint32_t chunk(uint32_t step) const { return step; }
};

constexpr uint32_t NO_CHUNK = ~0u;  // there are no more

// Runs the caller's part of a role for all steps. CHUNKS says which chunk each is about: `choose` by the gate (false: aborted), `chunk` by
// everybody. True: aborted.
template <class CHUNKS, class GATE, class WORK, class POST>
__device__ bool play(uint32_t role, uint32_t workers, uint32_t warp, CHUNKS chunks, GATE gate, WORK work, POST post) {
    uint32_t go = 1 + 2 * role, did = go + 1, threads = 32 * (workers + 1), lane = threadIdx.x % 32;
    for (uint32_t step = 0; chunks.more(step); step++) {
        bool stop;
        uint32_t chunk = NO_CHUNK;
        if (warp == 0) {
            stop = !chunks.choose(step, lane);
            if (!stop) chunk = chunks.chunk(step);
            if (chunk != NO_CHUNK) stop = !gate(step, chunk, lane);
            stop = meet(go, threads, stop);
        } else if (warp == 1) {
            stop = meet(did, threads, false);
            if (!stop) chunk = chunks.chunk(step);
            if (chunk != NO_CHUNK) {
                fence_system();
                post(step, chunk, lane);
            }
        } else {
            stop = meet(go, threads, false);
            if (!stop) chunk = chunks.chunk(step);
            if (chunk != NO_CHUNK) work(step, chunk, Worker{(warp - 2) * 32 + lane, workers * 32});
            stop = meet(did, threads, stop);
        }
        if (stop) return true;
        if (chunk == NO_CHUNK) return false;
    }
    return false;
}

__device__ inline bool are_dealt(const DirectArgs& a) { return a.dealer < a.nranks; }

// This block's slice of a message, or all of it where chunks are dealt out, cut in chunks.
struct Slice {
    uint64_t begin, end;
    uint32_t chunk_bytes;
    __device__ Slice(const DirectArgs& a, uint64_t bytes) : begin(0), end(bytes), chunk_bytes(a.chunk_bytes) {
        if (are_dealt(a)) return;
        begin = min(bytes, blockIdx.x * uint64_t(a.slice_bytes));
        end = min(bytes, begin + a.slice_bytes);
    }
    __device__ uint32_t chunks() const { return uint32_t((end - begin + chunk_bytes - 1) / chunk_bytes); }
    __device__ uint64_t at(uint32_t chunk) const { return begin + uint64_t(chunk) * chunk_bytes; }
    __device__ uint32_t bytes(uint32_t chunk) const {
        return at(chunk) >= end ? 0 : uint32_t(min(uint64_t(chunk_bytes), end - at(chunk)));
    }
    // From where a part of the send buffer begins, and of the receive buffer.
    __device__ uint64_t send_at(uint32_t chunk) const { return at(chunk); }
    __device__ uint64_t recv_at(uint32_t chunk) const { return at(chunk); }
};

// The same of a batch, whose chunks are dealt out: each message has as many, which follow those of the one before.
struct BatchSlice {
    const DirectArgs& a;
    Slice message;
    __device__ BatchSlice(const DirectArgs& args, uint64_t bytes) : a(args), message(a, bytes) {}
    __device__ uint32_t chunks() const { return a.chunks; }
    __device__ uint32_t bytes(uint32_t chunk) const { return message.bytes(chunk % a.batch_share); }
    __device__ uint64_t send_at(uint32_t chunk) const { return at(chunk, a.send_batch_stride); }
    __device__ uint64_t recv_at(uint32_t chunk) const { return at(chunk, a.recv_batch_stride); }
    __device__ uint64_t at(uint32_t chunk, uint64_t apart) const {
        return batch_place(a, chunk / a.batch_share) * apart + message.at(chunk % a.batch_share);
    }
};

// If chunks are dealt out, those of the first steps are not waited for.
constexpr uint32_t UNDEALT_STEPS = 2;
// A gate is at most that many steps ahead of the post, less one.
constexpr uint32_t STEPS_APART = 4;

// Marks that tell the chunk of a step, but for the chunk: the operation's number, and whether its place is used an even time in this
// operation. One word, since a packet that is written over another of its operation may be seen half new, half old. Whoever waits has seen
// what was there before.
__device__ inline uint64_t deal_word(const DirectArgs& a, uint32_t step) {
    return uint64_t(number_of(a)) << 32 | uint64_t(step / DEALS % 2) << 31;
}

// The dealer's: a chunk for this block, two steps from now.
__device__ inline void deal(const DirectArgs& a, uint32_t step, uint32_t lane) {
    uint32_t chunk = 0;
    if (lane == 0) {
        auto dealt = reinterpret_cast<unsigned long long*>(a.symmetric[a.rank] + DEALT_OFFSET);
        if (step == UNDEALT_STEPS) atomicMax(dealt, uint64_t(number_of(a)) << 32);
        chunk = UNDEALT_STEPS * gridDim.x + uint32_t(atomicAdd(dealt, 1ull));
    }
    chunk = __shfl_sync(~0u, chunk, 0);
    if (lane < a.nranks) store_relaxed(deal_at(a, lane, blockIdx.x, step), deal_word(a, step) | chunk);
}

// Waits for the chunk of a step; false: aborted.
__device__ inline bool await_deal(const DirectArgs& a, uint32_t step, uint32_t& chunk) {
    Patience patience(a.abort_word);
    for (;;) {
        uint64_t word = load_acquire(deal_at(a, a.rank, blockIdx.x, step)) ^ deal_word(a, step);
        if (word >> 31 == 0) {
            chunk = uint32_t(word);
            return true;
        }
        if (patience.exhausted()) return false;
    }
}

// The chunks of a role.
struct Chunks {
    const DirectArgs& a;
    volatile uint32_t* chosen;  // by step % STEPS_APART, where they are dealt out
    uint32_t steps;             // 0: the role has nothing to do
    bool deals;
    __device__ bool more(uint32_t step) const { return step < steps; }
    __device__ bool choose(uint32_t step, uint32_t lane) const {
        if (!are_dealt(a)) return true;
        if (deals) deal(a, step + UNDEALT_STEPS, lane);
        uint32_t chunk = step * gridDim.x + blockIdx.x;
        bool ok = step < UNDEALT_STEPS || lane != 0 || await_deal(a, step, chunk);
        if (lane == 0) chosen[step % STEPS_APART] = chunk < a.chunks ? chunk : NO_CHUNK;
        __syncwarp();
        return __all_sync(~0u, ok);
    }
    __device__ uint32_t chunk(uint32_t step) const { return are_dealt(a) ? chosen[step % STEPS_APART] : step; }
};

template <class SLICE = Slice>
__device__ inline SLICE slice_of(const DirectArgs& a, uint32_t owner) { return SLICE(a, part_bytes(a, owner)); }
__device__ inline uint64_t word(const DirectArgs& a, uint32_t steps) { return uint64_t(number_of(a)) << 32 | steps; }

// For messages that end at, or start from, some ranks.
template <class SLICE>
__device__ uint32_t steps_of(const DirectArgs& a, uint32_t mask, SLICE slice) {
    uint32_t steps = 0;
    for (uint32_t r = 0; r < a.nranks; r++) steps = in(mask, r) ? max(steps, slice(r).chunks()) : steps;
    return are_dealt(a) && mask != 0 ? NO_CHUNK : steps;
}

// Waits until this block has sent a step's chunk; false: aborted.
__device__ inline bool await_pushed(const volatile uint32_t* pushed, uint32_t step, uint64_t abort_word) {
    Patience patience(abort_word);
    while (*pushed <= step) {
        if (patience.exhausted()) return false;
    }
    return true;
}

// Waits until a peer has emptied the slot that a step fills.
__device__ inline bool await_slot(const DirectArgs& a, uint32_t peer, uint32_t phase, uint32_t step) {
    return step < a.slots ||
           wait_word(ack_at(a, a.rank, peer, phase, blockIdx.x), word(a, step - a.slots + 1), a.abort_word);
}
__device__ inline bool await_data(const DirectArgs& a, uint32_t peer, uint32_t phase, uint32_t step) {
    return wait_word(flag_at(a, a.rank, peer, phase, blockIdx.x), word(a, step + 1), a.abort_word);
}
// After a fence.
__device__ inline void tell_data(const DirectArgs& a, uint32_t peer, uint32_t phase, uint32_t step) {
    store_relaxed(flag_at(a, peer, a.rank, phase, blockIdx.x), word(a, step + 1));
}
__device__ inline void acknowledge(const DirectArgs& a, uint32_t peer, uint32_t phase, uint32_t step, uint32_t steps) {
    if (steps == NO_CHUNK || step + a.slots < steps) store_relaxed(ack_at(a, peer, a.rank, phase, blockIdx.x), word(a, step + 1));
}

// Destinations of a chunk: slots in the symmetric buffers of some peers, and this rank's receive buffer (unless `result`
// is 0).
struct Destinations {
    const DirectArgs& a;
    uint32_t mask;
    uint64_t below, above;  // the slot's offset in symmetric buffers of lower and of higher ranks
    uint64_t result;
    __device__ Destinations(const DirectArgs& args, uint32_t peers, uint32_t phase, uint32_t step, uint64_t keep)
        : a(args), mask(peers), result(keep) {
        above = slot_offset(a, a.rank, phase, blockIdx.x, step);
        below = above - uint64_t(a.slots) * a.slot_bytes;
    }
    __device__ bool aligned() const { return (result & 15) == 0; }
    __device__ void store_part(uint32_t at, uint4 data, uint32_t bytes) const {
#pragma unroll 1
        for (uint32_t left = mask; left != 0; left &= left - 1) {
            uint32_t peer = __ffs(left) - 1;
            store_aligned(a.symmetric[peer] + (peer < a.rank ? below : above) + at, data);
        }
        if (result != 0) store_plain(result + at, data, bytes);
    }
};

// Sources of a chunk: peers' slots of phase 0, and this rank's own part.
struct SlotSources {
    uint32_t rank;
    uint64_t first, stride, own;
    __device__ SlotSources(const DirectArgs& a, uint32_t step, uint64_t own_part)
        : rank(a.rank), stride(uint64_t(a.slots) * a.slot_bytes), own(own_part) {
        first = a.symmetric[a.rank] + slot_offset(a, 0, 0, blockIdx.x, step);
    }
    __device__ uint64_t address(uint32_t source) const {
        return source == rank ? own : first + (source - (source > rank)) * stride;
    }
    __device__ bool aligned(uint32_t) const { return (own & 15) == 0; }
};

// Words by which the warps of a block tell each other.
struct BlockWords {
    volatile uint32_t pushed;  // steps
    volatile uint32_t chosen[3][STEPS_APART];
};

template <class SLICE>
__device__ inline bool simple_push(const DirectArgs& a, uint32_t warp, BlockWords& words) {
    bool shared = a.shard_bytes == 0 && a.send_stride == 0;
    uint64_t own_from = send_part(a, a.rank), own_to = recv_part(a, a.rank);
    bool own = (a.flags & OWN) != 0 && (a.shard_bytes != 0 ? a.send != a.recv : own_from != own_to);
    uint32_t mask = a.send_mask | (own && a.shard_bytes == 0 ? 1u << a.rank : 0);
    auto slice = [&](uint32_t peer) { return slice_of<SLICE>(a, peer); };
    return play(
        0, a.push_warps, warp, Chunks{a, words.chosen[0], steps_of(a, mask, slice), a.rank == a.dealer},
        [&](uint32_t step, uint32_t chunk, uint32_t lane) {
            return !in(a.send_mask, lane) || slice(lane).bytes(chunk) == 0 || await_slot(a, lane, 0, step);
        },
        [&](uint32_t step, uint32_t chunk, Worker w) {
            if (shared) {
                SLICE s(a, a.bytes);
                Destinations to(a, a.send_mask, 0, step, own ? own_to + s.recv_at(chunk) : 0);
                copy_vectors<false>(to, a.send + s.send_at(chunk), s.bytes(chunk), w.thread, w.threads);
                return;
            }
            uint32_t count = __popc(mask), index = 0;
            for (uint32_t i = 1; i <= a.nranks; i++) {
                uint32_t peer = (a.rank + i) % a.nranks;
                Worker part;
                if (!in(mask, peer) || !w.share(index++, count, part)) continue;
                SLICE s = slice(peer);
                uint64_t from = send_part(a, peer) + s.send_at(chunk);
                uint64_t keep = peer == a.rank || a.shard_bytes != 0 ? recv_part(a, peer) + s.recv_at(chunk) : 0;
                Destinations to(a, peer == a.rank ? 0 : 1u << peer, 0, step, own ? keep : 0);
                copy_vectors<false>(to, from, s.bytes(chunk), part.thread, part.threads);
            }
        },
        [&](uint32_t step, uint32_t chunk, uint32_t lane) {
            if (lane == a.rank) words.pushed = step + 1;
            if (in(a.send_mask, lane) && slice(lane).bytes(chunk) != 0) tell_data(a, lane, 0, step);
        });
}

// The middle role: `work(step, send_at, recv_at, bytes, worker)` makes a chunk of the result.
template <class SLICE, class WORK>
__device__ bool simple_middle(const DirectArgs& a, uint32_t warp, BlockWords& words, WORK work) {
    if (a.recv_mask == 0) return false;
    // One shot, in place, everybody's data for everybody: a chunk of the result lies where one is still to be sent from. (In
    // two shots a part comes back only after it was sent; elsewhere what is sent is not where results go.)
    bool in_place = a.send == a.recv && a.shard_bytes == 0 && a.send_stride == 0 && a.send_mask != 0;
    SLICE s = slice_of<SLICE>(a, a.rank);
    uint32_t steps = are_dealt(a) ? NO_CHUNK : s.chunks();
    return play(
        1, a.middle_warps, warp, Chunks{a, words.chosen[1], steps, false},
        [&](uint32_t step, uint32_t chunk, uint32_t lane) {
            return s.bytes(chunk) == 0 || ((!in(a.recv_mask, lane) || await_data(a, lane, 0, step)) &&
                                           (!in(a.relay_mask, lane) || await_slot(a, lane, 1, step)) &&
                                           (!in_place || lane != a.rank || await_pushed(&words.pushed, step, a.abort_word)));
        },
        [&](uint32_t step, uint32_t chunk, Worker w) { work(step, s.send_at(chunk), s.recv_at(chunk), s.bytes(chunk), w); },
        [&](uint32_t step, uint32_t chunk, uint32_t lane) {
            if (s.bytes(chunk) == 0) return;  // a short shard's last
            if (in(a.relay_mask, lane)) tell_data(a, lane, 1, step);
            if (in(a.recv_mask, lane)) acknowledge(a, lane, 0, step, steps);
        });
}

__device__ inline bool simple_out(const DirectArgs& a, uint32_t warp, BlockWords& words) {
    auto slice = [&](uint32_t peer) { return slice_of(a, peer); };
    return play(
        2, a.out_warps, warp, Chunks{a, words.chosen[2], steps_of(a, a.out_mask, slice), false},
        [&](uint32_t step, uint32_t chunk, uint32_t lane) {
            return !in(a.out_mask, lane) || slice(lane).bytes(chunk) == 0 || await_data(a, lane, 1, step);
        },
        [&](uint32_t step, uint32_t chunk, Worker w) {
            uint32_t count = __popc(a.out_mask), index = 0;
            for (uint32_t i = 1; i < a.nranks; i++) {
                uint32_t peer = (a.rank + i) % a.nranks;
                Worker part;
                if (!in(a.out_mask, peer) || !w.share(index++, count, part)) continue;
                Slice s = slice(peer);
                uint64_t from = a.symmetric[a.rank] + slot_offset(a, peer_index(peer, a.rank), 1, blockIdx.x, step);
                copy_vectors<true>(Destinations(a, 0, 1, step, recv_part(a, peer) + s.at(chunk)), from, s.bytes(chunk),
                                   part.thread, part.threads);
            }
        },
        [&](uint32_t step, uint32_t, uint32_t lane) {
            if (in(a.out_mask, lane)) acknowledge(a, lane, 1, step, are_dealt(a) ? NO_CHUNK : slice(lane).chunks());
        });
}

// Gives each warp its role. MIDDLE(warp, words) plays the middle role.
template <class SLICE, class MIDDLE>
__device__ void simple(const DirectArgs& a, MIDDLE middle) {
    IN_SHARED_MEMORY(BlockWords, words);
    if (threadIdx.x == 0) words.pushed = 0;
    if (blockIdx.x == 0) send_head(a, threadIdx.x);
    stamp_begin(a);
    __syncthreads();
    uint32_t warp = threadIdx.x / 32, push = 2 + a.push_warps, both = push + 2 + a.middle_warps;
    bool aborted = warp < push   ? simple_push<SLICE>(a, warp, words)
                   : warp < both ? middle(warp - push, words)
                                 : simple_out(a, warp - both, words);
    uint64_t scalar;
    if (blockIdx.x == 0 && !aborted) aborted = !wait_head(a, threadIdx.x, scalar);
    finish(a, aborted);
}

template <class SLICE>
__device__ void simple_copy(const DirectArgs& a) {
    simple<SLICE>(a, [&](uint32_t warp, BlockWords& words) {
        return simple_middle<SLICE>(a, warp, words, [&](uint32_t step, uint64_t, uint64_t recv_at, uint32_t bytes, Worker w) {
            uint32_t count = __popc(a.recv_mask), index = 0;
            for (uint32_t i = 1; i < a.nranks; i++) {
                uint32_t peer = (a.rank + i) % a.nranks;
                Worker part;
                if (!in(a.recv_mask, peer) || !w.share(index++, count, part)) continue;
                uint64_t result = recv_part(a, a.shard_bytes != 0 ? a.rank : peer) + recv_at;
                uint64_t from = a.symmetric[a.rank] + slot_offset(a, peer_index(peer, a.rank), 0, blockIdx.x, step);
                Destinations to(a, a.relay_mask, 1, step, result);
                copy_vectors<true>(to, from, bytes, part.thread, part.threads);
            }
        });
    });
}

template <class SLICE, class T>
__device__ void simple_reduce(const DirectArgs& a) {
    IN_SHARED_MEMORY(Scalars, scalars);
    if ((a.flags & SCALED) != 0) {
        if (blockIdx.x == 0) send_head(a, threadIdx.x);
        if (!gather_scalars(a, scalars)) return finish(a, true);
    }
    simple<SLICE>(a, [&](uint32_t warp, BlockWords& words) {
        return simple_middle<SLICE>(a, warp, words, [&](uint32_t step, uint64_t send_at, uint64_t recv_at, uint32_t bytes, Worker w) {
            uint64_t result = (a.flags & KEEP) != 0 ? recv_part(a, a.rank) + recv_at : 0;
            Arithmetic how{Op(a.op), a.divisor, (a.flags & SCALED) != 0 ? scalars : nullptr};
            reduce_vectors<T, 32>(Destinations(a, a.relay_mask, 1, step, result),
                                  SlotSources(a, step, send_part(a, a.rank) + send_at), a.nranks, bytes, how,
                                  w.thread, w.threads);
        });
    });
}

}  // namespace mccs
