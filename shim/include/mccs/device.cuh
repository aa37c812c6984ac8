// Channels for kernels: put, signal and wait from threads of a GPU. CUDA C++ for sm_80 and later, NVRTC included:
// this header needs no other.
//
// PortChannel: any number of threads ask, and the service copies. MemoryChannel: the threads copy, between GPUs
// of one host that reach each other.
//
// A rank makes a port channel (PortChannels::channel, mccsPortChannelCreate), asks it for what kernels use
// (PortChannel::device, mccsPortChannelDevice), and passes that to kernels by value:
//
//     __global__ void exchange(mccs::PortChannel channel, size_t bytes) {
//         if (threadIdx.x == 0) {
//             channel.put_with_signal(0, 0, bytes);  // the peer's memory gets this rank's
//             channel.wait();                        // the peer's bytes are here
//             channel.flush();                       // this rank's memory may be written again
//         }
//         __syncthreads();
//     }
//
// Memory channels (CudaCommunicator::open_memory_channels, mccsMemoryChannelDevice) are passed alike:
//
//     __global__ void exchange(mccs::MemoryChannel channel, size_t bytes) {
//         channel.put(0, bytes, bytes, threadIdx.x, blockDim.x);  // all threads of the block copy
//         __syncthreads();
//         if (threadIdx.x == 0) {
//             channel.signal();
//             channel.wait();
//         }
//         __syncthreads();
//     }
//
// A thread puts what it sees when it calls: other threads' stores come before by a barrier of the block, as
// __syncthreads. Awaited data is seen by the waiting thread, and by others behind such a barrier.
//
// Calls that wait return false when the communicator has failed, or the peer or this rank has left: then nothing
// comes any more. Nothing becomes of later puts and signals. The host is told the reason.
//
// A processor's compiler takes this header as well, for tests.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MCCS_DEVICE __device__ __forceinline__
#else
#define MCCS_DEVICE inline
#endif

namespace mccs {

using u64 = unsigned long long;

namespace detail {

#if defined(__CUDA_ARCH__)
// Past the caches that know nothing of what others write.
MCCS_DEVICE u64 load(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
// A count in memory of this GPU.
MCCS_DEVICE u64 load_own(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
MCCS_DEVICE void store(u64* to, u64 value) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory"); }
// Both words of a trigger at once.
MCCS_DEVICE void store_pair(u64* to, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
// Orders all before with all behind, for the service, its copy engines and other GPUs.
MCCS_DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
MCCS_DEVICE u64 add_own(u64* to, u64 value) { return atomicAdd(to, value); }
MCCS_DEVICE void max_own(u64* to, u64 value) { atomicMax(to, value); }
MCCS_DEVICE u64 exchange_own(u64* at, u64 expected, u64 value) { return atomicCAS(at, expected, value); }
MCCS_DEVICE void load_pair(const u64* from, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
MCCS_DEVICE unsigned load_byte(const unsigned char* from) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
MCCS_DEVICE void store_byte(unsigned char* to, unsigned value) {
    asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
MCCS_DEVICE void pass() {}
#elif defined(MCCS_DEVICE_INSTRUCTIONS)
#include MCCS_DEVICE_INSTRUCTIONS
#else
MCCS_DEVICE u64 load(const u64* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
MCCS_DEVICE u64 load_own(const u64* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
MCCS_DEVICE void store(u64* to, u64 value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
MCCS_DEVICE void store_pair(u64* to, u64 first, u64 second) {
    store(to, first);
    store(to + 1, second);
}
MCCS_DEVICE void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
MCCS_DEVICE u64 add_own(u64* to, u64 value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
MCCS_DEVICE void max_own(u64* to, u64 value) {
    u64 seen = load_own(to);
    while (seen < value && !__atomic_compare_exchange_n(to, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
MCCS_DEVICE u64 exchange_own(u64* at, u64 expected, u64 value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
MCCS_DEVICE void load_pair(const u64* from, u64& first, u64& second) {
    first = load(from);
    second = load(from + 1);
}
MCCS_DEVICE unsigned load_byte(const unsigned char* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
MCCS_DEVICE void store_byte(unsigned char* to, unsigned value) {
    __atomic_store_n(to, static_cast<unsigned char>(value), __ATOMIC_RELAXED);
}
void pass();  // lets some time pass: the test's
#endif

constexpr u64 PARITY = 1ull << 63;
constexpr u64 ENDED = 1ull << 62;
// A put of more bytes is several triggers.
constexpr u64 PUT_AT_ONCE = ((1ull << 31) - 1) / 4096 * 4096;

// Bits of a trigger's request, in this order.
constexpr unsigned PUT = 1, SIGNAL = 2, FLUSH = 4;

MCCS_DEVICE u64 counted(u64 word) { return word & (ENDED - 1); }

// Takes one of what was counted and not taken, if there is one.
MCCS_DEVICE bool take(u64* taken, u64 counted) {
    u64 before = load_own(taken);
    while (before < counted) {
        const u64 seen = exchange_own(taken, before, before + 1);
        if (seen == before) {
            fence();
            return true;
        }
        before = seen;
    }
    return false;
}

}  // namespace detail

// A port channel as the host has made it: plain data, as mccs::DevicePortChannel in Rust and mccsDevicePortChannel_t in C.
// Offsets are in the channel's memories. Members with a final underscore are the library's.
struct PortChannel {
    // Positions of the FIFO that were claimed, and how many had been read when somebody last looked: in this GPU's memory.
    u64* head_;
    u64* seen_tail_;
    // Signals of the connection that were taken: in this GPU's memory.
    u64* taken_;
    // Memory of the host, which the service reads and writes.
    u64* slots_;
    const u64* tail_;
    const u64* arrived_;
    const u64* flushed_;
    u64* awaited_;
    unsigned number_;
    unsigned slots_log2_;

    // Begins to copy `bytes` bytes from this rank's memory into the peer's. The source stays as it is until a flush has returned.
    MCCS_DEVICE bool put(u64 from_offset, u64 into_offset, u64 bytes) const {
        return put_and(detail::PUT, from_offset, into_offset, bytes) != NOWHERE;
    }

    // Tells the peer that all puts before are there: one of its waits ends.
    MCCS_DEVICE bool signal() const { return push(detail::SIGNAL, 0, 0, 0) != NOWHERE; }

    MCCS_DEVICE bool put_with_signal(u64 from_offset, u64 into_offset, u64 bytes) const {
        return put_and(detail::PUT | detail::SIGNAL, from_offset, into_offset, bytes) != NOWHERE;
    }

    MCCS_DEVICE bool put_with_signal_and_flush(u64 from_offset, u64 into_offset, u64 bytes) const {
        return wait_for_flush(put_and(detail::PUT | detail::SIGNAL | detail::FLUSH, from_offset, into_offset, bytes));
    }

    // Returns when all that this thread called before on channels of this peer and tag has ended.
    MCCS_DEVICE bool flush() const { return wait_for_flush(push(detail::FLUSH, 0, 0, 0)); }

    // Takes a signal of the peer, waiting for it: puts before it are here. Each signal ends one wait.
    MCCS_DEVICE bool wait() const {
        const u64 number = detail::add_own(taken_, 1) + 1;
        unsigned looks = 0;
        for (;;) {
            const u64 word = detail::load(arrived_);
            if (detail::counted(word) >= number) {
                detail::fence();
                return true;
            }
            if (word & detail::ENDED) return false;
            // The service counts how long one has waited; other threads may wait for later ones.
            if (looks++ % LOOKS_BETWEEN_WORDS == 0) detail::store(awaited_, number);
            detail::pass();
        }
    }

    // Takes a signal of the peer if one has come.
    MCCS_DEVICE bool poll() const {
        return detail::take(taken_, detail::counted(detail::load(arrived_)));
    }

    // Whether no signal comes any more: the communicator has failed, or the peer has left.
    MCCS_DEVICE bool has_ended() const { return (detail::load(arrived_) & detail::ENDED) != 0; }

private:
    static constexpr u64 NOWHERE = ~0ull;
    static constexpr unsigned LOOKS_BETWEEN_WORDS = 1u << 14;

    // Hands over a put, in as many triggers as it takes; `kinds` is for the last.
    MCCS_DEVICE u64 put_and(unsigned kinds, u64 from_offset, u64 into_offset, u64 bytes) const {
        while (bytes > detail::PUT_AT_ONCE) {
            if (push(detail::PUT, from_offset, into_offset, detail::PUT_AT_ONCE) == NOWHERE) return NOWHERE;
            from_offset += detail::PUT_AT_ONCE;
            into_offset += detail::PUT_AT_ONCE;
            bytes -= detail::PUT_AT_ONCE;
        }
        return push(kinds, from_offset, into_offset, bytes);
    }

    // Writes a trigger, and returns its position. Waits while the FIFO is full.
    MCCS_DEVICE u64 push(unsigned kinds, u64 from_offset, u64 into_offset, u64 bytes) const {
        constexpr u64 OFFSET_MAX = (1ull << 39) - 1;
        const u64 position = detail::add_own(head_, 1);
        const u64 slots = 1ull << slots_log2_;
        if (position >= slots && detail::load_own(seen_tail_) <= position - slots) {
            u64 tail = detail::load(tail_);
            while (detail::counted(tail) <= position - slots) {
                if (tail & detail::ENDED) return NOWHERE;
                detail::pass();
                tail = detail::load(tail_);
            }
            detail::max_own(seen_tail_, detail::counted(tail));
        }
        const u64 parity = (position >> slots_log2_) % 2 == 0 ? detail::PARITY : 0;
        // An offset past the largest is past the end of every memory, and stays so.
        const u64 from = from_offset < OFFSET_MAX ? from_offset : OFFSET_MAX;
        const u64 to = into_offset < OFFSET_MAX ? into_offset : OFFSET_MAX;
        const u64 first = parity | from << 24 | (bytes & 0xffffff);
        const u64 second = parity | to << 24 | (bytes >> 24 & 0x7f) << 17 | u64(number_) << 3 | kinds;
        // Earlier stores are there for whoever sees the trigger.
        detail::fence();
        detail::store_pair(slots_ + 2 * (position & (slots - 1)), first, second);
        return position;
    }

    MCCS_DEVICE bool wait_for_flush(u64 position) const {
        if (position == NOWHERE) return false;
        for (;;) {
            const u64 word = detail::load(flushed_);
            if (detail::counted(word) > position) {
                detail::fence();
                return true;
            }
            if (word & detail::ENDED) return false;
            detail::pass();
        }
    }
};

static_assert(sizeof(PortChannel) == 72, "as the host has it");

// A memory channel as the host has made it: plain data, as mccs::cuda::DeviceMemoryChannel in Rust and
// mccsDeviceMemoryChannel_t in C. Offsets are in the memories that the two ranks gave.
//
// Threads that copy together call with the same arguments but `thread`, which counts from 0 to `threads` - 1. Calls
// return false, and do nothing, where a range leaves its memory or is not aligned as they ask.
struct MemoryChannel {
    // Memory of this rank and of its peer, as this GPU sees them.
    unsigned char* own_;
    unsigned char* peer_;
    u64 own_bytes_;
    u64 peer_bytes_;
    // Signals that have come, in this GPU's memory: the peer's kernels raise it. The same at the peer.
    const u64* arrived_;
    u64* arrived_at_peer_;
    // Signals that were sent, told the peer, and taken: in this GPU's memory.
    u64* counts_;
    // In memory of the host: not zero when the communicator has failed.
    const u64* abort_;

    // Copies `bytes` bytes of this rank's memory into the peer's. Fastest where both offsets are multiples of 16.
    MCCS_DEVICE bool put(u64 from_offset, u64 into_offset, u64 bytes, unsigned thread, unsigned threads) const {
        if (!is_inside(own_bytes_, from_offset, bytes) || !is_inside(peer_bytes_, into_offset, bytes)) return false;
        copy(peer_ + into_offset, own_ + from_offset, bytes, thread, threads);
        return true;
    }

    // Copies `bytes` bytes of the peer's memory into this rank's.
    MCCS_DEVICE bool get(u64 from_offset, u64 into_offset, u64 bytes, unsigned thread, unsigned threads) const {
        if (!is_inside(peer_bytes_, from_offset, bytes) || !is_inside(own_bytes_, into_offset, bytes)) return false;
        copy(own_ + into_offset, peer_ + from_offset, bytes, thread, threads);
        return true;
    }

    // One of the peer's waits ends. It sees what this thread has put, and others of the block before a barrier.
    MCCS_DEVICE void signal() const {
        const u64 number = detail::add_own(counts_ + SENT, 1) + 1;
        // Threads that signal at once do so in turn, so that the count at the peer grows: not all GPUs can add there.
        while (detail::load_own(counts_ + TOLD) != number - 1) detail::pass();
        detail::fence();
        detail::store(arrived_at_peer_, number);
        detail::fence();
        detail::store(counts_ + TOLD, number);
    }

    // Takes a signal of the peer, waiting for it: what was put before it is here. Each signal ends one wait.
    MCCS_DEVICE bool wait() const {
        const u64 number = detail::add_own(counts_ + TAKEN, 1) + 1;
        for (unsigned looks = 0; detail::load(arrived_) < number; ++looks) {
            if (is_in_vain(looks)) return false;
        }
        detail::fence();
        return true;
    }

    // Takes a signal of the peer if one has come.
    MCCS_DEVICE bool poll() const { return detail::take(counts_ + TAKEN, detail::load(arrived_)); }

    // Packets (LL) tell by themselves that they have come: no signal, no fence, and twice the bytes on the way. They suit
    // short data. A flag is another one than what lies at the place: count up from 1, in memory that was zero.

    // Copies `bytes` bytes, a multiple of 8, into packets at the peer, where they take twice as many. `from_offset` is a
    // multiple of 8, `into_offset` of 16.
    MCCS_DEVICE bool put_packets(u64 from_offset, u64 into_offset, u64 bytes, unsigned flag, unsigned thread,
                                 unsigned threads) const {
        if (!is_inside(own_bytes_, from_offset, bytes) || !has_packets(peer_bytes_, into_offset, from_offset, bytes)) return false;
        const u64* from = reinterpret_cast<const u64*>(own_ + from_offset);
        for (u64 at = thread; at < bytes / 8; at += threads) store_packet(peer_ + into_offset + 16 * at, detail::load(from + at), flag);
        return true;
    }

    // Takes what the peer has put into packets of this rank's memory, waiting for it. `from_offset` is a multiple of 16,
    // `into_offset` of 8, and so is `bytes`. Data that other threads took is seen behind a barrier of the block.
    MCCS_DEVICE bool take_packets(u64 from_offset, u64 into_offset, u64 bytes, unsigned flag, unsigned thread,
                                  unsigned threads) const {
        if (!is_inside(own_bytes_, into_offset, bytes) || !has_packets(own_bytes_, from_offset, into_offset, bytes)) return false;
        u64* into = reinterpret_cast<u64*>(own_ + into_offset);
        for (u64 at = thread; at < bytes / 8; at += threads) {
            u64 value;
            if (!load_packet(own_ + from_offset + 16 * at, flag, value)) return false;
            detail::store(into + at, value);
        }
        return true;
    }

    // A packet of its own: eight bytes from a register, into 16 at the peer.
    MCCS_DEVICE bool put_packet(u64 into_offset, u64 value, unsigned flag) const {
        if (!has_packets(peer_bytes_, into_offset, 0, 8)) return false;
        store_packet(peer_ + into_offset, value, flag);
        return true;
    }

    // Takes a packet into a register, waiting for it.
    MCCS_DEVICE bool take_packet(u64 from_offset, unsigned flag, u64& value) const {
        return has_packets(own_bytes_, from_offset, 0, 8) && load_packet(own_ + from_offset, flag, value);
    }

    // Whether nothing comes any more: the communicator has failed.
    MCCS_DEVICE bool has_ended() const { return detail::load(abort_) != 0; }

private:
    static constexpr unsigned SENT = 0, TOLD = 1, TAKEN = 2;
    // The host's word takes longer to look at.
    static constexpr unsigned LOOKS_BETWEEN_ABORTS = 1u << 8;
    // Loads that are under way together.
    static constexpr unsigned PAIRS_AT_ONCE = 4;

    MCCS_DEVICE static bool is_inside(u64 all, u64 offset, u64 bytes) { return bytes <= all && offset <= all - bytes; }

    // Whether packets of so many bytes are inside, and all is aligned.
    MCCS_DEVICE static bool has_packets(u64 all, u64 packets, u64 data, u64 bytes) {
        return packets % 16 == 0 && data % 8 == 0 && bytes % 8 == 0 && bytes <= all && is_inside(all, packets, 2 * bytes);
    }

    // Whether a wait is to be given up, after so many looks.
    MCCS_DEVICE bool is_in_vain(unsigned looks) const {
        detail::pass();
        return looks % LOOKS_BETWEEN_ABORTS == LOOKS_BETWEEN_ABORTS - 1 && has_ended();
    }

    // Each half is stored as one: four bytes, and their flag.
    MCCS_DEVICE static void store_packet(unsigned char* to, u64 value, unsigned flag) {
        const u64 above = u64(flag) << 32;
        detail::store_pair(reinterpret_cast<u64*>(to), (value & 0xffffffff) | above, value >> 32 | above);
    }

    MCCS_DEVICE bool load_packet(const unsigned char* from, unsigned flag, u64& value) const {
        for (unsigned looks = 0;; ++looks) {
            u64 low, high;
            detail::load_pair(reinterpret_cast<const u64*>(from), low, high);
            if (low >> 32 == flag && high >> 32 == flag) {
                value = (low & 0xffffffff) | high << 32;
                return true;
            }
            if (is_in_vain(looks)) return false;
        }
    }

    MCCS_DEVICE static void copy(unsigned char* to, const unsigned char* from, u64 bytes, unsigned thread, unsigned threads) {
        const bool is_aligned = ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) & 15) == 0;
        const u64 pairs = is_aligned ? bytes / 16 : 0;
        const u64* source = reinterpret_cast<const u64*>(from);
        u64* target = reinterpret_cast<u64*>(to);
        u64 at = thread;
        for (; at + (PAIRS_AT_ONCE - 1) * u64(threads) < pairs; at += PAIRS_AT_ONCE * u64(threads)) {
            u64 first[PAIRS_AT_ONCE], second[PAIRS_AT_ONCE];
            for (unsigned i = 0; i < PAIRS_AT_ONCE; ++i) detail::load_pair(source + 2 * (at + i * u64(threads)), first[i], second[i]);
            for (unsigned i = 0; i < PAIRS_AT_ONCE; ++i) detail::store_pair(target + 2 * (at + i * u64(threads)), first[i], second[i]);
        }
        for (; at < pairs; at += threads) {
            u64 first, second;
            detail::load_pair(source + 2 * at, first, second);
            detail::store_pair(target + 2 * at, first, second);
        }
        for (u64 byte = 16 * pairs + thread; byte < bytes; byte += threads) detail::store_byte(to + byte, detail::load_byte(from + byte));
    }
};

static_assert(sizeof(MemoryChannel) == 64, "as the host has it");

}  // namespace mccs
