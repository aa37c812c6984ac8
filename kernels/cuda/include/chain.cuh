// Chain kernel: a reduce along a chain of ranks, in chunks, to the root. Each rank adds its own
// data to what the rank before it sends, and the root is the last: every link carries the buffer
// once, and the root sends nothing.
//
// A rank has one role (simple.cuh): it takes a chunk out of its slot, combines, and puts the sum into the next rank's slot. All go through phase 0. Chunks
// are dealt out by the first rank, which is ahead of the root by a ring of slots a rank at most, and a few steps.
#pragma once
#include "simple.cuh"

namespace mccs {

// Twelve warps that move bytes, a gate and a post. A slot of 18 KiB is three vectors a thread.
constexpr uint32_t CHAIN_THREADS_MAX = 448;

// The combination of the ranks before, if there are some, and this rank's own data.
struct ChainSources {
    uint64_t before, own;
    __device__ uint64_t address(uint32_t source) const { return source == 0 ? before : own; }
    __device__ bool aligned(uint32_t) const { return (own & 15) == 0; }
};

template <class T>
__device__ void chain_reduce(const DirectArgs& a) {
    IN_SHARED_MEMORY(BlockWords, words);
    if (blockIdx.x == 0) send_head(a, threadIdx.x);
    stamp_begin(a);
    __syncthreads();
    bool is_first = a.recv_mask == 0;
    uint32_t before = is_first ? a.rank : __ffs(a.recv_mask) - 1;
    Slice s(a, a.bytes);
    uint32_t steps = are_dealt(a) ? NO_CHUNK : s.chunks();
    bool aborted = play(
        0, a.push_warps, threadIdx.x / 32, Chunks{a, words.chosen[0], steps, a.rank == a.dealer},
        [&](uint32_t step, uint32_t, uint32_t lane) {
            return (!in(a.recv_mask, lane) || await_data(a, lane, 0, step)) && (!in(a.send_mask, lane) || await_slot(a, lane, 0, step));
        },
        [&](uint32_t step, uint32_t chunk, Worker w) {
            uint64_t own = a.send + s.at(chunk);
            uint64_t slot = a.symmetric[a.rank] + slot_offset(a, peer_index(before, a.rank), 0, blockIdx.x, step);
            Destinations to(a, a.send_mask, 0, step, (a.flags & KEEP) != 0 ? a.recv + s.at(chunk) : 0);
            reduce_vectors<T, 32>(to, ChainSources{is_first ? own : slot, own}, is_first ? 1 : 2, s.bytes(chunk),
                                  Arithmetic{Op(a.op), a.divisor, nullptr}, w.thread, w.threads);
        },
        [&](uint32_t step, uint32_t, uint32_t lane) {
            if (in(a.send_mask, lane)) tell_data(a, lane, 0, step);
            if (in(a.recv_mask, lane)) acknowledge(a, lane, 0, step, steps);
        });
    uint64_t scalar;
    if (blockIdx.x == 0 && !aborted) aborted = !wait_head(a, threadIdx.x, scalar);
    finish(a, aborted);
}

}  // namespace mccs
