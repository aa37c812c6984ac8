// Kernels that test and measure port channels, by the header that programs use. Launched by tests and
// mccs-cuda-puts with one argument by value.
#include "mccs/device.cuh"

using mccs::u64;

// Words are stored and loaded as other GPUs see them: so a simulation shows a fence that is missing.

struct PutsArgs {
    // What signals go by, and what they are waited for by: of two blocks each has its own.
    mccs::PortChannel out[2], in[2];
    // Memories of the channels, as this GPU sees them.
    u64 source, destination;
    // Of a put.
    u64 bytes;
    u64 rounds;
    // What words of a put are made of, here and at the peer.
    u64 own_seed, peer_seed;
    // Where two words go: what was wrong, and nanoseconds.
    u64 result;
    // Whether the first block signals first.
    u64 begins;
};

#ifdef __CUDA_ARCH__
__device__ u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
#endif

// A word of a put: another one of every rank, round and place.
MCCS_DEVICE u64 word_of(u64 seed, u64 round, u64 at) {
    u64 x = seed + round * 0x9e3779b97f4a7c15ull + at * 0xd1342543de82ef95ull;
    x = (x ^ x >> 31) * 0x94d049bb133111ebull;
    return x ^ x >> 29;
}

MCCS_DEVICE void tell(const PutsArgs& args, u64 wrong, u64 ns) {
    u64* result = reinterpret_cast<u64*>(args.result);
    if (wrong != 0) mccs::detail::add_own(result, wrong);
    if (ns != 0) mccs::detail::store(result + 1, ns);
}

// Both ranks put to each other, and look at what has come; one block. Into two places in turn, as a peer is at most a round ahead; from
// one, which is written again behind each flush.
extern "C" __global__ void mccs_puts_exchange(const PutsArgs args) {
    const mccs::PortChannel channel = args.out[0];
    const u64 words = args.bytes / sizeof(u64);
    u64 wrong = 0;
    for (u64 round = 0; round < args.rounds; ++round) {
        const u64 place = (round & 1) * words;
        u64* source = reinterpret_cast<u64*>(args.source);
        const u64* destination = reinterpret_cast<const u64*>(args.destination) + place;
        for (u64 at = threadIdx.x; at < words; at += blockDim.x) mccs::detail::store(source + at, word_of(args.own_seed, round, at));
        __syncthreads();
        if (threadIdx.x == 0) {
            const u64 offset = place * sizeof(u64);
            // In turn: with a flush at once, and with one later.
            if (round & 1) {
                wrong += !channel.put_with_signal_and_flush(0, offset, args.bytes);
            } else {
                wrong += !channel.put(0, offset, args.bytes) || !channel.signal() || !channel.flush();
            }
            wrong += !channel.wait();
        }
        __syncthreads();
        for (u64 at = threadIdx.x; at < words; at += blockDim.x) wrong += destination[at] != word_of(args.peer_seed, round, at);
        __syncthreads();
    }
    tell(args, wrong, 0);
}

// Every thread puts its part and signals, and waits or polls for a signal; then all of what has come is looked at. One block.
extern "C" __global__ void mccs_puts_by_all(const PutsArgs args) {
    const mccs::PortChannel channel = args.out[0];
    const u64 words = args.bytes / sizeof(u64);
    u64* source = reinterpret_cast<u64*>(args.source) + threadIdx.x * words;
    const u64* destination = reinterpret_cast<const u64*>(args.destination);
    u64 wrong = 0;
    for (u64 at = 0; at < words; ++at) mccs::detail::store(source + at, word_of(args.own_seed, threadIdx.x, at));
    const u64 offset = threadIdx.x * args.bytes;
    wrong += !channel.put_with_signal(offset, offset, args.bytes);
    if (threadIdx.x % 2 == 0) {
        wrong += !channel.wait();
    } else {
        while (!channel.poll()) {
            if (channel.has_ended()) {
                ++wrong;
                break;
            }
            mccs::detail::pass();
        }
    }
    __syncthreads();
    for (u64 at = threadIdx.x; at < words * blockDim.x; at += blockDim.x) {
        wrong += destination[at] != word_of(args.peer_seed, at / words, at % words);
    }
    wrong += !channel.flush();
    tell(args, wrong, 0);
}

// Signals to and fro, behind puts if there are bytes; by the first thread of each block.
extern "C" __global__ void mccs_puts_ping_pong(const PutsArgs args) {
    if (threadIdx.x != 0) return;
    const unsigned block = blockIdx.x;
    const mccs::PortChannel out = args.out[block], in = args.in[block];
    const bool begins = args.begins != 0 && block == 0;
    const u64 offset = block * args.bytes;
    u64 wrong = 0;
    const u64 began = now_ns();
    for (u64 round = 0; round < args.rounds && wrong == 0; ++round) {
        if (!begins) wrong += !in.wait();
        wrong += args.bytes == 0 ? !out.signal() : !out.put_with_signal(offset, offset, args.bytes);
        if (begins) wrong += !in.wait();
    }
    const u64 ns = now_ns() - began;
    tell(args, wrong, block == 0 ? ns : 0);
}

// Triggers as fast as threads can write them: signals, or puts if there are bytes; each thread so many, and a flush at the end.
// Another time is when all were written, with some still to be read.
extern "C" __global__ void mccs_puts_triggers(const PutsArgs args) {
    const mccs::PortChannel channel = args.out[0];
    u64 wrong = 0;
    __syncthreads();
    const u64 began = now_ns();
    for (u64 round = 0; round < args.rounds; ++round) {
        wrong += args.bytes == 0 ? !channel.signal() : !channel.put(0, 0, args.bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        wrong += !channel.flush();
        tell(args, wrong, now_ns() - began);
    } else {
        tell(args, wrong, 0);
    }
}

// Waits for a signal; what was wrong is 1 if none comes any more, and 2 if one has come.
extern "C" __global__ void mccs_puts_waits(const PutsArgs args) {
    if (threadIdx.x == 0) tell(args, args.in[0].wait() ? 2 : 1, 0);
}
