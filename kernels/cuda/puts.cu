// Kernels that test and measure channels, by the header that programs use. Launched by tests and
// mccs-cuda-puts with one argument by value.
#include "mccs/device.cuh"

using mccs::u64;

// Words are stored and loaded as other GPUs see them: so a simulation shows a fence that is missing.

struct PutsArgs {
    // Channels for signals, and for waits: of two blocks each has its own.
    mccs::PortChannel out[2], in[2];
    // Memories of the channels, as this GPU sees them.
    u64 source, destination;
    // Bytes of a put.
    u64 bytes;
    u64 rounds;
    // Seeds of a put's words, here and at the peer.
    u64 own_seed, peer_seed;
    // Address of two words: the fault, and nanoseconds.
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

MCCS_DEVICE void tell(u64 at, u64 wrong, u64 ns) {
    u64* result = reinterpret_cast<u64*>(at);
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
    tell(args.result, wrong, 0);
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
    tell(args.result, wrong, 0);
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
    tell(args.result, wrong, block == 0 ? ns : 0);
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
        tell(args.result, wrong, now_ns() - began);
    } else {
        tell(args.result, wrong, 0);
    }
}

// Waits for a signal; what was wrong is 1 if none comes any more, and 2 if one has come.
extern "C" __global__ void mccs_puts_waits(const PutsArgs args) {
    if (threadIdx.x == 0) tell(args.result, args.in[0].wait() ? 2 : 1, 0);
}

// Memory channels: the threads of a block copy.

struct MemoryChannelsArgs {
    // In memory of the GPU, two for each block: what it signals and puts by, and what it waits by.
    u64 channels;
    // A rank's memory, as this GPU sees it. Its parts: what is put from, two places for what comes, two for packets.
    u64 memory;
    // Bytes of a put, at most as many as the parts have.
    u64 bytes;
    u64 part_bytes;
    u64 rounds;
    // Seeds of words, here and at the peer.
    u64 own_seed, peer_seed;
    // Address of two words: the fault, and nanoseconds.
    u64 result;
    // Whether messages of ping-pong are packets.
    u64 packets;
    // Whether the first block begins.
    u64 begins;
};

MCCS_DEVICE const mccs::MemoryChannel& memory_channel(const MemoryChannelsArgs& args, unsigned block, bool receives) {
    return reinterpret_cast<const mccs::MemoryChannel*>(args.channels)[2 * block + receives];
}

// Both ranks copy to each other, in turn by puts, gets and packets, and look at what has come; one block. Into two places in turn, as a peer is at
// most a round ahead. `bytes` is a multiple of 8; what is put and got may begin and end anywhere.
extern "C" __global__ void mccs_memory_exchange(const MemoryChannelsArgs args) {
    const mccs::MemoryChannel channel = memory_channel(args, 0, false);
    const u64 part = args.part_bytes, words = args.bytes / sizeof(u64);
    u64* source = reinterpret_cast<u64*>(args.memory);
    u64 wrong = 0;
    for (u64 round = 0; round < args.rounds; ++round) {
        const u64 place = part * (1 + (round & 1)), packets = part * (3 + 2 * (round & 1));
        for (u64 at = threadIdx.x; at < words; at += blockDim.x) mccs::detail::store(source + at, word_of(args.own_seed, round, at));
        __syncthreads();
        switch (round % 3) {
        case 0:
            // Two pieces, the second of which is not aligned.
            wrong += !channel.put(0, place, args.bytes / 2 + 3, threadIdx.x, blockDim.x);
            wrong += !channel.put(args.bytes / 2 + 3, place + args.bytes / 2 + 3, args.bytes - args.bytes / 2 - 3, threadIdx.x, blockDim.x);
            __syncthreads();
            if (threadIdx.x == 0) {
                channel.signal();
                wrong += !channel.wait();
            }
            break;
        case 1:
            // The peer's memory is as it is to be, and stays so until it was got.
            for (int twice = 0; twice < 2; ++twice) {
                if (threadIdx.x == 0) {
                    channel.signal();
                    wrong += !channel.wait();
                }
                __syncthreads();
                if (twice == 0) wrong += !channel.get(0, place, args.bytes, threadIdx.x, blockDim.x);
                __syncthreads();
            }
            break;
        default:
            wrong += !channel.put_packets(0, packets, args.bytes, unsigned(round + 1), threadIdx.x, blockDim.x);
            wrong += !channel.take_packets(packets, place, args.bytes, unsigned(round + 1), threadIdx.x, blockDim.x);
        }
        __syncthreads();
        const u64* came = reinterpret_cast<const u64*>(args.memory + place);
        for (u64 at = threadIdx.x; at < words; at += blockDim.x) wrong += mccs::detail::load(came + at) != word_of(args.peer_seed, round, at);
        __syncthreads();
    }
    // Nothing that leaves a memory, or is not aligned, is begun.
    wrong += channel.put(0, 8 * part, 1, threadIdx.x, blockDim.x) || channel.get(~0ull, 0, 2, threadIdx.x, blockDim.x);
    wrong += channel.put_packets(4, 0, 8, 1, threadIdx.x, blockDim.x) || channel.take_packets(8, 0, 8, 1, threadIdx.x, blockDim.x);
    tell(args.result, wrong, 0);
}

// Every thread signals, and waits or polls for one; of any number of blocks.
extern "C" __global__ void mccs_memory_by_all(const MemoryChannelsArgs args) {
    const mccs::MemoryChannel channel = memory_channel(args, 0, false);
    u64 wrong = 0;
    for (u64 round = 0; round < args.rounds; ++round) {
        channel.signal();
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
    }
    tell(args.result, wrong, 0);
}

// Messages to and fro by all threads of each block: packets, or puts with a signal; signals alone if there are no bytes.
extern "C" __global__ void mccs_memory_ping_pong(const MemoryChannelsArgs args) {
    const unsigned block = blockIdx.x;
    const mccs::MemoryChannel out = memory_channel(args, block, false), in = memory_channel(args, block, true);
    const bool begins = args.begins != 0 && block == 0;
    // A rank that plays both ends has places for each.
    const u64 theirs = args.part_bytes * (1 + 2 * block), own = args.part_bytes * (gridDim.x == 1 ? 1 : 3 - 2 * block);
    u64 wrong = 0;
    __syncthreads();
    const u64 began = now_ns();
    for (u64 round = 0; round < args.rounds && wrong == 0; ++round) {
        for (int turn = 0; turn < 2; ++turn) {
            const bool sends = begins == (turn == 0);
            if (args.packets != 0) {
                const unsigned flag = unsigned(args.own_seed + round);
                wrong += sends ? !out.put_packets(0, theirs, args.bytes, flag, threadIdx.x, blockDim.x)
                               : !in.take_packets(own, 0, args.bytes, flag, threadIdx.x, blockDim.x);
            } else if (sends) {
                wrong += !out.put(0, theirs, args.bytes, threadIdx.x, blockDim.x);
                __syncthreads();
                if (threadIdx.x == 0) out.signal();
            } else {
                if (threadIdx.x == 0) wrong += !in.wait();
                __syncthreads();
            }
        }
    }
    const u64 ns = now_ns() - began;
    tell(args.result, wrong, block == 0 && threadIdx.x == 0 ? ns : 0);
}

// Each block puts its share of the bytes, signals, and waits for its peer's, again and again: both ways at once.
extern "C" __global__ void mccs_memory_puts(const MemoryChannelsArgs args) {
    const mccs::MemoryChannel out = memory_channel(args, blockIdx.x, false), in = memory_channel(args, blockIdx.x, true);
    const u64 share = (args.bytes / gridDim.x + 15) / 16 * 16, begin = share * blockIdx.x < args.bytes ? share * blockIdx.x : args.bytes;
    const u64 bytes = args.bytes - begin < share ? args.bytes - begin : share;
    u64 wrong = 0;
    __syncthreads();
    const u64 began = now_ns();
    for (u64 round = 0; round < args.rounds; ++round) {
        wrong += !out.put(begin, args.part_bytes + begin, bytes, threadIdx.x, blockDim.x);
        __syncthreads();
        if (threadIdx.x == 0) {
            out.signal();
            wrong += !in.wait();
        }
        __syncthreads();
    }
    tell(args.result, wrong, blockIdx.x == 0 && threadIdx.x == 0 ? now_ns() - began : 0);
}

// Waits for a signal; what was wrong is 1 if none comes any more, and 2 if one has come.
extern "C" __global__ void mccs_memory_waits(const MemoryChannelsArgs args) {
    if (threadIdx.x == 0) tell(args.result, memory_channel(args, 0, true).wait() ? 2 : 1, 0);
}
