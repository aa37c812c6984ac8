// Loads, stores and waits on memory that several GPUs share (memory order, abort).
#pragma once
#include "instructions.cuh"

namespace mccs {

__device__ inline uint4 vector(uint64_t low, uint64_t high) {
    return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}
__device__ inline uint64_t low(uint4 v) { return v.x | uint64_t(v.y) << 32; }
__device__ inline uint64_t high(uint4 v) { return v.z | uint64_t(v.w) << 32; }

// A piece of memory of 1, 2, 4 or 8 bytes at a time.
template <class WORD>
__device__ inline uint64_t load_words(uint64_t from, uint32_t bytes) {
    uint64_t v = 0;
    for (uint32_t i = 0; i < bytes; i += sizeof(WORD)) {
        v |= uint64_t(load_volatile<WORD>(from + i)) << 8 * i;
    }
    return v;
}
template <class WORD>
__device__ inline void store_words(uint64_t to, uint64_t v, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += sizeof(WORD)) store_volatile<WORD>(to + i, WORD(v >> 8 * i));
}

// `bytes` (at most 8) of memory at any address, in the low bytes of the result.
__device__ __noinline__ uint64_t load8_part(uint64_t from, uint32_t bytes) {
    uint32_t together = uint32_t(from) | bytes;
    if ((together & 7) == 0) return load_words<uint64_t>(from, bytes);
    if ((together & 3) == 0) return load_words<uint32_t>(from, bytes);
    if ((together & 1) == 0) return load_words<uint16_t>(from, bytes);
    return load_words<uint8_t>(from, bytes);
}
__device__ __noinline__ void store8_part(uint64_t to, uint64_t v, uint32_t bytes) {
    uint32_t together = uint32_t(to) | bytes;
    if ((together & 7) == 0) return store_words<uint64_t>(to, v, bytes);
    if ((together & 3) == 0) return store_words<uint32_t>(to, v, bytes);
    if ((together & 1) == 0) return store_words<uint16_t>(to, v, bytes);
    store_words<uint8_t>(to, v, bytes);
}

// The usual cases inline: code that is not there yet is what the smallest sends wait for.
__device__ inline uint64_t load8(uint64_t from, uint32_t bytes) {
    if ((from & 7) == 0 && bytes == 8) return load_volatile<uint64_t>(from);
    if ((from & 3) == 0 && bytes == 4) return load_volatile<uint32_t>(from);
    return load8_part(from, bytes);
}
__device__ inline void store8(uint64_t to, uint64_t v, uint32_t bytes) {
    if ((to & 7) == 0 && bytes == 8) {
        store_volatile<uint64_t>(to, v);
    } else if ((to & 3) == 0 && bytes == 4) {
        store_volatile<uint32_t>(to, uint32_t(v));
    } else {
        store8_part(to, v, bytes);
    }
}

// The rare cases of a vector: an address that is not a multiple of 16, or fewer than 16 bytes left.
__device__ __noinline__ uint4 load_part(uint64_t from, uint32_t bytes) {
    uint64_t head = load8_part(from, min(8u, bytes));
    return vector(head, bytes > 8 ? load8_part(from + 8, bytes - 8) : 0);
}
__device__ __noinline__ void store_part(uint64_t to, uint4 v, uint32_t bytes) {
    store8_part(to, low(v), min(8u, bytes));
    if (bytes > 8) store8_part(to + 8, high(v), bytes - 8);
}

// Counts the turns of a wait, and looks at the abort word now and then.
struct Patience {
    uint64_t abort_word;
    uint32_t turns = 0;
    __device__ explicit Patience(uint64_t word) : abort_word(word) {}
    // Whether the wait is to be given up.
    __device__ bool exhausted() {
        pass_turn();
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
    store_volatile(to, make_uint4(uint32_t(data), flag, uint32_t(data >> 32), flag));
}

__device__ inline uint4 load_packet(uint64_t from) { return load_volatile(from); }
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
