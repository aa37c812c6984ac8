// Loads, stores and waits: what direct kernels and reductions say to memory that several GPUs share.
#pragma once
#include <cstdint>

namespace mccs {

constexpr uint32_t TURNS_BETWEEN_ABORT_POLLS = 1000;

// The largest power of two up to 16 that divides an address.
__device__ inline uint32_t alignment(uint64_t address) {
    uint32_t low = uint32_t(address) | 16;
    return low & -low;
}

__device__ inline uint4 load_aligned(uint64_t from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// What another GPU wrote: past the first-level cache, which knows nothing of it.
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

// `bytes` (at most 8) of memory at any address, in the low bytes of the result, by accesses of `align` bytes.
__device__ inline uint64_t load8(uint64_t from, uint32_t align, uint32_t bytes) {
    uint64_t v = 0;
    if (bytes == 8 && align >= 8) {
        v = *reinterpret_cast<const volatile uint64_t*>(from);
    } else if (bytes % 4 == 0 && align >= 4) {
        for (uint32_t i = 0; i < bytes; i += 4) v |= uint64_t(*reinterpret_cast<const volatile uint32_t*>(from + i)) << 8 * i;
    } else if (bytes % 2 == 0 && align >= 2) {
        for (uint32_t i = 0; i < bytes; i += 2) v |= uint64_t(*reinterpret_cast<const volatile uint16_t*>(from + i)) << 8 * i;
    } else {
        for (uint32_t i = 0; i < bytes; i++) v |= uint64_t(*reinterpret_cast<const volatile uint8_t*>(from + i)) << 8 * i;
    }
    return v;
}

__device__ inline void store8(uint64_t to, uint64_t v, uint32_t align, uint32_t bytes) {
    if (bytes == 8 && align >= 8) {
        *reinterpret_cast<volatile uint64_t*>(to) = v;
    } else if (bytes % 4 == 0 && align >= 4) {
        for (uint32_t i = 0; i < bytes; i += 4) *reinterpret_cast<volatile uint32_t*>(to + i) = uint32_t(v >> 8 * i);
    } else if (bytes % 2 == 0 && align >= 2) {
        for (uint32_t i = 0; i < bytes; i += 2) *reinterpret_cast<volatile uint16_t*>(to + i) = uint16_t(v >> 8 * i);
    } else {
        for (uint32_t i = 0; i < bytes; i++) *reinterpret_cast<volatile uint8_t*>(to + i) = uint8_t(v >> 8 * i);
    }
}

__device__ inline uint4 vector(uint64_t low, uint64_t high) {
    return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}
__device__ inline uint64_t low(uint4 v) { return v.x | uint64_t(v.y) << 32; }
__device__ inline uint64_t high(uint4 v) { return v.z | uint64_t(v.w) << 32; }

// The rare cases of a vector: an address that is not a multiple of 16, or fewer than 16 bytes left.
__device__ __noinline__ uint4 load_part(uint64_t from, uint32_t bytes) {
    uint32_t align = alignment(from), first = bytes < 8 ? bytes : 8;
    uint64_t head = load8(from, align, first);
    return vector(head, bytes > 8 ? load8(from + 8, align, bytes - 8) : 0);
}
__device__ __noinline__ void store_part(uint64_t to, uint4 v, uint32_t bytes) {
    uint32_t align = alignment(to), first = bytes < 8 ? bytes : 8;
    store8(to, low(v), align, first);
    if (bytes > 8) store8(to + 8, high(v), align, bytes - 8);
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

// Counts the turns of a wait, and looks at the abort word now and then.
struct Patience {
    uint64_t abort_word;
    uint32_t turns = 0;
    __device__ explicit Patience(uint64_t word) : abort_word(word) {}
    // Whether the wait is to be given up.
    __device__ bool exhausted() {
        if (++turns < TURNS_BETWEEN_ABORT_POLLS) return false;
        turns = 0;
        return abort_word != 0 && *reinterpret_cast<const volatile uint64_t*>(abort_word) != 0;
    }
};

// Waits until a word is at least `value`; false: aborted.
__device__ inline bool wait_word(uint64_t word, uint64_t value, uint64_t abort_word) {
    Patience patience(abort_word);
    while (load_acquire(word) < value) {
        if (patience.exhausted()) return false;
    }
    return true;
}

// A packet: eight bytes of data and their flag, twice, in 16 bytes. A store of 16 bytes is seen in parts of 8 or more, so
// whoever sees a flag sees the four bytes beside it.
__device__ inline void store_packet(uint64_t to, uint64_t data, uint32_t flag) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(uint32_t(data)), "r"(flag),
                 "r"(uint32_t(data >> 32)), "r"(flag)
                 : "memory");
}

__device__ inline uint4 load_packet(uint64_t from) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ inline bool packet_complete(uint4 packet, uint32_t flag) { return packet.y == flag && packet.w == flag; }
__device__ inline uint64_t packet_data(uint4 packet) { return packet.x | uint64_t(packet.z) << 32; }

// Waits for a packet; false: aborted.
__device__ inline bool wait_packet(uint64_t from, uint32_t flag, uint64_t abort_word, uint4& packet) {
    Patience patience(abort_word);
    while (!packet_complete(packet, flag)) {
        if (patience.exhausted()) return false;
        packet = load_packet(from);
    }
    return true;
}

}  // namespace mccs
