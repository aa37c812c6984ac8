// Loops over 16-byte vectors: copies to several destinations, and reductions of several sources.
//
// A destination set has `aligned()` and `store_part(at, vector, bytes)`; a source set has `aligned(count)` and
// `address(s)`. Loops over ranks stay loops: code is small, and time goes into the bytes in flight.
//
// Tenants' buffers may have any alignment, and are never touched behind their last
// byte; slots are aligned and have room for a whole last vector.
#pragma once
#include "abi.cuh"
#include "arithmetic.cuh"
#include "memory.cuh"

namespace mccs {

// FRESH: the source is a slot, which another GPU wrote.
template <bool FRESH>
__device__ inline uint4 load_vector(uint64_t from) {
    return FRESH ? load_fresh(from) : load_aligned(from);
}

template <bool FRESH, class TO>
__device__ void copy_vectors(const TO& to, uint64_t from, uint32_t bytes, uint32_t thread, uint32_t threads) {
    constexpr uint32_t UNROLL = 4;
    uint32_t whole = bytes / 16, v = thread;
    if ((from & 15) == 0 && to.aligned()) {
        for (; v + (UNROLL - 1) * threads < whole; v += UNROLL * threads) {
            uint4 data[UNROLL];
#pragma unroll
            for (uint32_t u = 0; u < UNROLL; u++) data[u] = load_vector<FRESH>(from + (v + u * threads) * 16);
#pragma unroll
            for (uint32_t u = 0; u < UNROLL; u++) to.store_part((v + u * threads) * 16, data[u], 16);
        }
    }
    for (; v * 16 < bytes; v += threads) {
        uint32_t at = v * 16, length = min(16u, bytes - at);
        bool plain = FRESH || ((from & 15) == 0 && length == 16);
        to.store_part(at, plain ? load_vector<FRESH>(from + at) : load_part(from + at, length), length);
    }
}

struct Arithmetic {
    Op op;
    uint32_t divisor;         // of the sum; 0: none
    const uint64_t* scalars;  // the sources' factors, or null
};

// The reduction of sixteen bytes.
template <class T>
struct VectorFold {
    Fold<T> lower, upper;
    __device__ void first(uint4 data, const uint64_t* scalar) {
        lower.first(low(data), scalar);
        upper.first(high(data), scalar);
    }
    __device__ void next(Op op, uint4 data, const uint64_t* scalar) {
        lower.next(op, low(data), scalar);
        upper.next(op, high(data), scalar);
    }
    __device__ uint4 result(uint32_t divisor) { return vector(lower.result(divisor), upper.result(divisor)); }
};

// Combines vectors `v`, `v` + stride, ... of all sources, in order. ALIGNED: they are whole, and everything is aligned.
template <class T, uint32_t UNROLL, bool ALIGNED, class FROM, class TO>
__device__ void reduce_step(const TO& to, const FROM& from, uint32_t count, uint32_t bytes, Arithmetic how,
                            uint32_t v, uint32_t stride) {
    uint32_t length = ALIGNED ? 16 : min(16u, bytes - v * 16);
    auto load = [&](uint64_t address) {
        return ALIGNED || ((address & 15) == 0 && length == 16) ? load_fresh(address) : load_part(address, length);
    };
    auto scalar = [&](uint32_t source) { return how.scalars != nullptr ? how.scalars + source : nullptr; };
    // The next source's loads are in flight while one is combined.
    VectorFold<T> folds[UNROLL];
    uint4 data[UNROLL], next[UNROLL];
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) data[u] = load(from.address(0) + (v + u * stride) * 16);
    if (count > 1) {
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) next[u] = load(from.address(1) + (v + u * stride) * 16);
    }
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) folds[u].first(data[u], scalar(0));
#pragma unroll 1
    for (uint32_t s = 1; s < count; s++) {
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) data[u] = next[u];
        if (s + 1 < count) {
#pragma unroll
            for (uint32_t u = 0; u < UNROLL; u++) next[u] = load(from.address(s + 1) + (v + u * stride) * 16);
        }
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) folds[u].next(how.op, data[u], scalar(s));
    }
#pragma unroll
    for (uint32_t u = 0; u < UNROLL; u++) to.store_part((v + u * stride) * 16, folds[u].result(how.divisor), length);
}

// Combines `bytes` of `count` sources, in order, several vectors a thread at a time (BYTES of each source), so that enough
// loads are in flight; small types need many registers a vector.
template <class T, uint32_t BYTES, class FROM, class TO>
__device__ void reduce_vectors(const TO& to, const FROM& from, uint32_t count, uint32_t bytes, Arithmetic how,
                               uint32_t thread, uint32_t threads) {
    constexpr uint32_t UNROLL = BYTES / 16 / (sizeof(typename T::Raw) == 1 ? 2 : 1);
    uint32_t whole = bytes / 16, v = thread;
    if (from.aligned(count) && to.aligned()) {
        for (; v + (UNROLL - 1) * threads < whole; v += UNROLL * threads) {
            reduce_step<T, UNROLL, true>(to, from, count, bytes, how, v, threads);
        }
    }
    for (; v * 16 < bytes; v += threads) {
        reduce_step<T, 1, false>(to, from, count, bytes, how, v, threads);
    }
}

// Stores to a tenant's buffer.
__device__ inline void store_plain(uint64_t to, uint4 data, uint32_t bytes) {
    if ((to & 15) == 0 && bytes == 16) {
        store_aligned(to, data);
    } else {
        store_part(to, data, bytes);
    }
}

}  // namespace mccs
