// Local reduction kernels: of pieces that copy engines bring (large all-reduce), and of the
// service itself. The sources are in this GPU's memory already.
//
// Every block takes a slice of each piece; no block waits for another. The last block of a piece tells of it.
#pragma once
#include "abi.cuh"
#include "memory.cuh"
#include "scalar.cuh"
#include "vectors.cuh"

namespace mccs {

constexpr uint32_t REDUCE_THREADS_MAX = 512;

struct LocalSources {
    const ReduceArgs& a;
    uint64_t at;
    __device__ uint64_t address(uint32_t source) const { return a.sources[source] + at; }
    __device__ bool aligned(uint32_t count) const {
        uint64_t all = at;
        for (uint32_t s = 0; s < count; s++) all |= a.sources[s];
        return (all & 15) == 0;
    }
};

struct LocalDestinations {
    const ReduceArgs& a;
    uint64_t at;
    __device__ bool aligned() const {
        uint64_t all = at;
        for (uint32_t d = 0; d < a.destination_count; d++) all |= a.destinations[d];
        return (all & 15) == 0;
    }
    __device__ void store_part(uint32_t offset, uint4 data, uint32_t bytes) const {
        for (uint32_t d = 0; d < a.destination_count; d++) store_plain(a.destinations[d] + at + offset, data, bytes);
    }
};

// Tells that a block has done its share of a piece. Every thread calls it.
__device__ inline void tell_piece(const ReduceArgs& a, uint32_t piece) {
    __syncthreads();
    if (a.done_word == 0 || threadIdx.x != 0) return;
    uint32_t* counter = reinterpret_cast<uint32_t*>(a.counters) + piece;
    // Orders this block's stores before its count, and the last block's count before the word.
    fence_system();
    if (atomicAdd(counter, 1) + 1 == gridDim.x) {
        *counter = 0;
        fence_system();
        store_relaxed(a.done_word + piece * a.done_stride, a.done_value + piece * a.done_step);
    }
}

// Waits until all sources of a piece are there. True: aborted.
__device__ inline bool await_piece(const ReduceArgs& a, uint32_t piece) {
    uint32_t source = threadIdx.x;
    bool ok = source >= a.source_count || a.flags[source] == 0 ||
              wait_word(a.flags[source] + piece * a.flag_stride, a.flag_value + piece * a.flag_step, a.abort_word);
    return __syncthreads_or(!ok);
}

template <class T>
__device__ void reduce_pieces(const ReduceArgs& a) {
    IN_SHARED_MEMORY(uint64_t, scalar);
    bool lies_there = a.scaled == 2;
    if (lies_there && threadIdx.x == 0) scalar = load_scalar<T>(a.scalars[0]);
    __syncthreads();
    Arithmetic how{Op(a.op), a.divisor, lies_there ? &scalar : a.scaled != 0 ? a.scalars : nullptr};
    for (uint32_t piece = 0; piece < a.pieces; piece++) {
        if (await_piece(a, piece)) return;
        uint64_t begin = piece * a.piece_bytes, bytes = min(a.piece_bytes, a.bytes - begin);
        uint64_t each = ((bytes + gridDim.x - 1) / gridDim.x + 127) / 128 * 128;
        uint64_t mine = min(bytes, blockIdx.x * each), end = min(bytes, mine + each);
        // In parts that 32-bit offsets reach.
        for (; mine < end; mine += 1u << 30) {
            uint64_t at = begin + mine;
            uint32_t part = uint32_t(min(uint64_t(1) << 30, end - mine));
            reduce_vectors<T, 64>(LocalDestinations{a, at}, LocalSources{a, at}, a.source_count, part, how,
                              threadIdx.x, blockDim.x);
        }
        tell_piece(a, piece);
    }
}

// Contributions of hosts, in the slot of a rail.
struct PartSources {
    const CombineArgs& a;
    uint64_t at;
    __device__ uint64_t address(uint32_t part) const { return at + (part == a.own_place ? a.own : a.first + part * a.stride); }
    __device__ bool aligned(uint32_t) const { return ((at | a.first | a.stride | a.own) & 15) == 0; }
};

struct OneDestination {
    uint64_t to;
    __device__ bool aligned() const { return (to & 15) == 0; }
    __device__ void store_part(uint32_t offset, uint4 data, uint32_t bytes) const { store_plain(to + offset, data, bytes); }
};

// Combines them all. Every block takes a slice.
template <class T>
__device__ void combine_parts(const CombineArgs& a) {
    uint64_t each = ((a.bytes + gridDim.x - 1) / gridDim.x + 127) / 128 * 128;
    uint64_t at = min(a.bytes, blockIdx.x * each), end = min(a.bytes, at + each);
    // In parts that 32-bit offsets reach.
    for (; at < end; at += 1u << 30) {
        uint32_t bytes = uint32_t(min(uint64_t(1) << 30, end - at));
        reduce_vectors<T, 64>(OneDestination{a.to + at}, PartSources{a, at}, a.parts, bytes, Arithmetic{Op(a.op), a.divisor, nullptr},
                          threadIdx.x, blockDim.x);
    }
}

}  // namespace mccs
