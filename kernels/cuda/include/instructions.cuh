// GPU instructions that C++ lacks: loads and stores as other GPUs see them, and barriers of some
// warps. A simulation of kernels on a processor (tests/tests/simulated_kernels) brings its own.
#pragma once
#include <cstdint>

#ifdef MCCS_SIMULATED
#include MCCS_SIMULATED
#else
#define IN_SHARED_MEMORY(type, name) __shared__ type name

namespace mccs {

__device__ inline uint4 load_aligned(uint64_t from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Data that another GPU wrote: past the first-level cache, which knows nothing of it.
__device__ inline uint4 load_fresh(uint64_t from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ inline void store_aligned(uint64_t to, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline uint64_t load_acquire(uint64_t from) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

__device__ inline void store_relaxed(uint64_t to, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

__device__ inline void store_release(uint64_t to, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// A word of 1, 2, 4 or 8 bytes.
template <class WORD>
__device__ inline WORD load_volatile(uint64_t from) {
    return *reinterpret_cast<const volatile WORD*>(from);
}
template <class WORD>
__device__ inline void store_volatile(uint64_t to, WORD v) {
    *reinterpret_cast<volatile WORD*>(to) = v;
}

// For readers on this GPU, its copy engines and its streams.
__device__ inline void add_release(uint64_t to, uint64_t v) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

__device__ inline void add_relaxed(uint64_t to, uint64_t v) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

// The GPU's clock.
__device__ inline uint64_t global_ns() {
    uint64_t v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

// Limit of a wait, some 10 ms: all warps that wait read one word of the host's memory, one after the other, which takes a
// millisecond.
constexpr uint32_t TURNS_BETWEEN_ABORT_POLLS = 30'000;

// Part of a wait: nothing is to be done on a GPU.
__device__ inline void pass_turn() {}

// Loads and stores under a condition, without a branch: where it does not hold, the value stays.
__device__ inline void load8_if(bool there, uint64_t from, uint32_t& low, uint32_t& high) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.volatile.global.v2.u32 {%0,%1}, [%2]; }"
                 : "+r"(low), "+r"(high)
                 : "l"(from), "r"(uint32_t(there))
                 : "memory");
}
__device__ inline void load4_if(bool there, uint64_t from, uint32_t& v) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.volatile.global.u32 %0, [%1]; }"
                 : "+r"(v)
                 : "l"(from), "r"(uint32_t(there))
                 : "memory");
}
// A piece of 1, 2 or 4 bytes.
template <uint32_t BYTES>
__device__ inline void load_piece_if(bool there, uint64_t from, uint32_t& v) {
    if (BYTES == 4) return load4_if(there, from, v);
    if (BYTES == 2) {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.volatile.global.u16 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(from), "r"(uint32_t(there))
                     : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.volatile.global.u8 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(from), "r"(uint32_t(there))
                     : "memory");
    }
}
__device__ inline void store8_if(bool there, uint64_t to, uint32_t low, uint32_t high) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.volatile.global.v2.u32 [%0], {%1,%2}; }" ::"l"(to), "r"(low),
                 "r"(high), "r"(uint32_t(there))
                 : "memory");
}
__device__ inline void store4_if(bool there, uint64_t to, uint32_t v) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.volatile.global.u32 [%0], %1; }" ::"l"(to), "r"(v),
                 "r"(uint32_t(there))
                 : "memory");
}
template <uint32_t BYTES>
__device__ inline void store_piece_if(bool there, uint64_t to, uint32_t v) {
    if (BYTES == 4) return store4_if(there, to, v);
    if (BYTES == 2) {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.volatile.global.u16 [%0], %1; }" ::"l"(to), "r"(v),
                     "r"(uint32_t(there))
                     : "memory");
    } else {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.volatile.global.u8 [%0], %1; }" ::"l"(to), "r"(v),
                     "r"(uint32_t(there))
                     : "memory");
    }
}
__device__ inline void load_volatile_if(bool there, uint64_t from, uint4& v) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(from), "r"(uint32_t(there))
                 : "memory");
}
__device__ inline void store_volatile_if(bool there, uint64_t to, uint4 v) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4}; }" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(uint32_t(there))
                 : "memory");
}

// Sixteen bytes that another GPU sees in parts of eight or more.
__device__ inline void store_volatile(uint64_t to, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline uint4 load_volatile(uint64_t from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// The same by all lanes of a warp in one instruction; false, and nothing is stored, where they are not together. The condition is the same for all.
__device__ inline bool store_together_if(bool there, uint64_t to, uint4 v) {
    uint32_t together;
    asm volatile(
        "{ .reg .pred p; activemask.b32 %0; setp.eq.u32 p, %0, 0xffffffff; setp.ne.and.u32 p, %6, 0, p;\n\t"
        "@p st.volatile.global.v4.u32 [%1], {%2,%3,%4,%5}; }"
        : "=r"(together)
        : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(uint32_t(there))
        : "memory");
    return together == ~0u;
}
// Lanes that are not together load by instructions of their own, which is as well: lines are whole where they are
// stored.
__device__ inline void load_together_if(bool there, uint64_t from, uint4& v) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; bar.warp.sync 0xffffffff;\n\t@p ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(uint32_t(there))
        : "memory");
}

// A barrier of some of the block's warps that also tells all of them whether any is to stop.
__device__ inline bool meet(uint32_t barrier, uint32_t threads, bool stop) {
    uint32_t stopped;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
        : "=r"(stopped)
        : "r"(barrier), "r"(threads), "r"(uint32_t(stop))
        : "memory");
    return stopped != 0;
}

}  // namespace mccs
#endif
