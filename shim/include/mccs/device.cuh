// Port channels for kernels: put, signal, flush, wait and poll from any number of threads of a GPU. The
// service carries it. CUDA C++ for sm_80 and later, NVRTC included: this header needs no other.
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
// What a thread puts is what it sees when it calls: other threads' stores come before by a barrier of the block, as
// __syncthreads. What is waited for is seen by the waiting thread, and by others behind such a barrier.
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
void pass();  // lets some time pass: the test's
#endif

constexpr u64 PARITY = 1ull << 63;
constexpr u64 ENDED = 1ull << 62;
// A put of more bytes is several triggers.
constexpr u64 PUT_AT_ONCE = ((1ull << 31) - 1) / 4096 * 4096;

// What a trigger asks for, in this order.
constexpr unsigned PUT = 1, SIGNAL = 2, FLUSH = 4;

MCCS_DEVICE u64 counted(u64 word) { return word & (ENDED - 1); }

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
        const u64 arrived = detail::counted(detail::load(arrived_));
        u64 taken = detail::load_own(taken_);
        while (taken < arrived) {
            const u64 seen = detail::exchange_own(taken_, taken, taken + 1);
            if (seen == taken) {
                detail::fence();
                return true;
            }
            taken = seen;
        }
        return false;
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
        // What is past the largest offset is past the end of every memory, and stays so.
        const u64 from = from_offset < OFFSET_MAX ? from_offset : OFFSET_MAX;
        const u64 to = into_offset < OFFSET_MAX ? into_offset : OFFSET_MAX;
        const u64 first = parity | from << 24 | (bytes & 0xffffff);
        const u64 second = parity | to << 24 | (bytes >> 24 & 0x7f) << 17 | u64(number_) << 3 | kinds;
        // What was stored before is there for whoever sees the trigger.
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

}  // namespace mccs
