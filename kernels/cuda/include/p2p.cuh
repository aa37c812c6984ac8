// Send and receive kernel: all of a group's in one launch, whatever their number.
//
// A message goes from one rank to another through *lanes*: rings of slots in the receiver's symmetric buffer, for each direction of each
// pair of ranks. A lane counts the steps that went through it, on both ends and for good, in the symmetric buffers. So messages of a
// direction are matched by their order alone: no number says which operation they belong to, other ranks are not
// concerned, and a kernel that is replayed goes on where it left off. A step is written when the receiver has acknowledged
// the one that used the slot before.
//
// A lane has two rings. Steps of the first are packets, which carry data and flag together: short messages, and the header of
// every message, in lane 0, by which the receiver sees that both mean the same. Steps of the second are chunks with a flag
// behind them. How a message is cut follows from its length, so both ends cut it alike; where they do not mean the same
// length, lane 0 ends the communicator, and nothing was written outside of the receive buffer, whose length alone the
// receiver believes.
//
// A block is one lane to or from one peer: some warps send, the others take what the peer sends, in the order of the list,
// and neither waits for the other. So no message of a group waits for one of another direction or pair.
#pragma once
#include "simple.cuh"

namespace mccs {

constexpr uint32_t P2P_THREADS_MAX = 640;
// A gate, sixteen workers and a post: a worker's four vectors at a time make a whole slot. Eight workers do so in two rounds.
constexpr uint32_t WARPS_ALONE = 18;
constexpr uint32_t MESSAGES_FEW = 32;
constexpr uint32_t MESSAGES_MANY = 1024;

struct Message {
    uint64_t buffer;
    uint64_t header;  // bytes, and the element type in the highest byte
};

struct P2pHead {
    uint64_t symmetric[RANKS_MAX];
    uint64_t abort_word;
    uint64_t fault;           // in pinned host memory: where a contradiction is told
    uint64_t lanes_offset;    // [peer][lane] LaneWords
    uint64_t ll_offset;  // [peer][lane][slot]
    uint64_t simple_offset;     // [peer][lane][slot]
    uint64_t sent_bytes;      // of all messages that this rank sends
    uint32_t rank;
    uint32_t nranks;
    uint32_t lanes;         // for each direction of a pair
    uint32_t slots;         // of a ring, a power of two
    uint32_t slot_bytes;    // the longest chunk
    uint32_t part_bytes;    // most data of a step of packets
    uint32_t spread_bytes;  // shorter parts of a message are not worth a lane
    uint32_t reserved;
    uint32_t first[2 * RANKS_MAX + 2];  // messages for rank r begin at first[r], those from it at first[RANKS_MAX + r]
    uint32_t blocks[RANKS_MAX];         // of each peer; this rank's own copy what it sends to itself
};
static_assert(sizeof(P2pHead) == 248 && offsetof(P2pHead, first) == 144, "as in p2p.rs");

template <uint32_t COUNT>
struct P2pArgs {
    P2pHead head;
    Message messages[COUNT];
};

// A lane's state that both ends know. The second line is written by the peer.
struct alignas(128) LaneWords {
    uint64_t sent_packets, sent_chunks, taken_packets, taken_chunks, spare[4];
    uint64_t chunks, ll_acknowledged, chunks_acknowledged;
};

constexpr uint64_t P2P_ENDED_OFFSET = 8;   // groups that have ended are the upper half, as of operations
constexpr uint64_t P2P_FAULT_OFFSET = 16;  // not 0: a contradiction has been told
constexpr uint64_t P2P_SENT_OFFSET = 32;   // two words: messages that were sent, and their bytes
constexpr uint64_t HEADER_BYTES = 16;         // before the packets of a slot
constexpr uint32_t LANES_MAX = 64;
constexpr uint32_t P2P_CHUNK_BYTES_MIN = 16384;
constexpr uint32_t P2P_CHUNKS_WANTED = 4;
constexpr uint32_t SEND_MEETS = 5, TAKE_MEETS = 6;  // barriers; play() has those below

__device__ inline uint64_t divide_up(uint64_t value, uint64_t by) { return (value + by - 1) / by; }
__device__ inline uint64_t round_up(uint64_t value, uint64_t to) { return divide_up(value, to) * to; }
__device__ inline uint64_t message_bytes(uint64_t header) { return header << 8 >> 8; }

// A lane of one pair, as one of its ends sees it.
struct P2pLane {
    const P2pHead& a;
    uint32_t peer, lane;
    __device__ uint64_t words(uint32_t in, uint32_t other) const {
        return a.symmetric[in] + a.lanes_offset + (other * LANES_MAX + lane) * sizeof(LaneWords);
    }
    __device__ uint64_t own(size_t field) const { return words(a.rank, peer) + field; }
    __device__ uint64_t theirs(size_t field) const { return words(peer, a.rank) + field; }
    __device__ uint64_t slot(uint32_t in, uint32_t from, uint64_t step) const {
        return (uint64_t(peer_index(from, in)) * a.lanes + lane) * a.slots + (step & (a.slots - 1));
    }
    __device__ uint64_t packets(uint32_t in, uint32_t from, uint64_t step) const {
        return a.symmetric[in] + a.ll_offset + slot(in, from, step) * (HEADER_BYTES + 2 * a.part_bytes);
    }
    __device__ uint64_t chunk(uint32_t in, uint32_t from, uint64_t step) const {
        return a.symmetric[in] + a.simple_offset + slot(in, from, step) * a.slot_bytes;
    }
};

__device__ inline uint64_t load_word(uint64_t from) { return *reinterpret_cast<const volatile uint64_t*>(from); }
__device__ inline void store_word(uint64_t to, uint64_t v) { *reinterpret_cast<volatile uint64_t*>(to) = v; }

// The part of a message that goes through a lane, and how. The mirror of `Share` in p2p.rs.
struct Share {
    uint64_t begin, bytes;
    uint32_t chunk;  // 0: it goes as packets
    __device__ Share(const P2pHead& a, uint64_t length, uint32_t lane) {
        bool packets = length <= uint64_t(a.lanes) * a.part_bytes;
        uint64_t lanes = packets ? max(uint64_t(1), min(uint64_t(a.lanes), divide_up(length, a.spread_bytes))) : a.lanes;
        uint64_t part = packets ? round_up(divide_up(length, lanes), 16) : round_up(divide_up(length, lanes), 128);
        begin = min(length, part * lane);
        bytes = min(part, length - begin);
        uint64_t wanted = max(round_up(part / P2P_CHUNKS_WANTED, 128), uint64_t(P2P_CHUNK_BYTES_MIN));
        chunk = packets ? 0 : uint32_t(min(wanted, uint64_t(a.slot_bytes)));
    }
    __device__ bool has_ll(uint32_t lane) const { return lane == 0 || (chunk == 0 && bytes != 0); }
    __device__ uint32_t steps() const { return chunk == 0 ? 0 : uint32_t(divide_up(bytes, chunk)); }
    __device__ uint32_t step_bytes(uint32_t step) const {
        return uint32_t(min(uint64_t(chunk), bytes - uint64_t(step) * chunk));
    }
};

// Some of a block's warps.
struct Team {
    uint32_t warp, warps;
    __device__ uint32_t thread() const { return warp * 32 + threadIdx.x % 32; }
    __device__ uint32_t threads() const { return warps * 32; }
};

struct ToSlot {
    uint64_t to;
    __device__ bool aligned() const { return true; }
    __device__ void store_part(uint32_t at, uint4 data, uint32_t) const { store_aligned(to + at, data); }
};
struct ToBuffer {
    uint64_t to;
    __device__ bool aligned() const { return (to & 15) == 0; }
    __device__ void store_part(uint32_t at, uint4 data, uint32_t bytes) const { store_plain(to + at, data, bytes); }
};

// As copy_vectors, but few vectors a thread go together as well. FRESH: the source is a slot.
template <bool FRESH, class TO>
__device__ void copy_chunk(const TO& to, uint64_t from, uint32_t bytes, uint32_t thread, uint32_t threads) {
    constexpr uint32_t UNROLL = 4;
    if ((from & 15) != 0 || !to.aligned()) return copy_vectors<FRESH>(to, from, bytes, thread, threads);
    uint32_t whole = bytes / 16;
    for (uint32_t v = thread; v < whole; v += UNROLL * threads) {
        uint4 data[UNROLL];
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            if (v + u * threads < whole) data[u] = load_vector<FRESH>(from + uint64_t(v + u * threads) * 16);
        }
#pragma unroll
        for (uint32_t u = 0; u < UNROLL; u++) {
            if (v + u * threads < whole) to.store_part((v + u * threads) * 16, data[u], 16);
        }
    }
    uint32_t at = whole * 16;
    if (at < bytes && thread == 0) to.store_part(at, FRESH ? load_fresh(from + at) : load_part(from + at, bytes - at), bytes - at);
}

constexpr uint32_t PACKETS_AT_A_TIME = 4;

__device__ inline void send_ll(uint64_t slot, uint64_t from, uint32_t bytes, uint32_t flag, Team team) {
    uint32_t stride = team.threads() * 8;
    for (uint32_t base = team.thread() * 8; base < bytes; base += PACKETS_AT_A_TIME * stride) {
        uint64_t data[PACKETS_AT_A_TIME];
#pragma unroll
        for (uint32_t i = 0; i < PACKETS_AT_A_TIME; i++) {
            uint32_t at = base + i * stride;
            if (at < bytes) data[i] = load8(from + at, min(8u, bytes - at));
        }
#pragma unroll
        for (uint32_t i = 0; i < PACKETS_AT_A_TIME; i++) {
            uint32_t at = base + i * stride;
            if (at < bytes) store_packet(slot + at * 2, data[i], flag);
        }
    }
}

// False: aborted.
__device__ inline bool take_ll(const P2pHead& a, uint64_t slot, uint64_t to, uint32_t bytes, uint32_t flag, Team team) {
    Patience patience(a.abort_word);
    uint32_t stride = team.threads() * 8;
    for (uint32_t base = team.thread() * 8; base < bytes; base += PACKETS_AT_A_TIME * stride) {
        uint4 packets[PACKETS_AT_A_TIME];
        for (;;) {
            bool complete = true;
#pragma unroll
            for (uint32_t i = 0; i < PACKETS_AT_A_TIME; i++) {
                uint32_t at = base + i * stride;
                if (at < bytes) packets[i] = load_packet(slot + at * 2);
            }
#pragma unroll
            for (uint32_t i = 0; i < PACKETS_AT_A_TIME; i++) {
                complete &= base + i * stride >= bytes || packet_complete(packets[i], flag);
            }
            if (complete) break;
            if (patience.exhausted()) return false;
        }
#pragma unroll
        for (uint32_t i = 0; i < PACKETS_AT_A_TIME; i++) {
            uint32_t at = base + i * stride;
            if (at < bytes) store8(to + at, packet_data(packets[i]), min(8u, bytes - at));
        }
    }
    return true;
}

// Ends the communicator, and tells what was expected and what has come.
__device__ __noinline__ void tell_contradiction(const P2pHead& a, uint32_t peer, uint64_t expected, uint64_t came) {
    auto told = reinterpret_cast<unsigned long long*>(a.symmetric[a.rank] + P2P_FAULT_OFFSET);
    if (atomicExch(told, 1ull) == 0) {
        store_relaxed(a.fault + 8, expected);
        store_relaxed(a.fault + 16, came);
        fence_system();
        store_relaxed(a.fault, peer + 1);
    }
    fence_system();
    store_relaxed(a.abort_word, 1);
}

// Waits for a message's header; false: aborted, if need be here.
__device__ inline bool take_header(const P2pHead& a, uint64_t slot, uint32_t flag, uint32_t peer, uint64_t expected) {
    uint4 packet = load_packet(slot);
    if (!wait_packet(slot, flag, a.abort_word, packet)) return false;
    if (packet_data(packet) == expected) return true;
    tell_contradiction(a, peer, expected, packet_data(packet));
    return false;
}

// Sends the messages of a list. True: aborted.
__device__ inline bool p2p_send(P2pLane at, const Message* messages, uint32_t count, uint64_t packets, uint64_t chunks,
                                   Team team) {
    const P2pHead& a = at.a;
    auto await_slot = [&](size_t acknowledged, uint64_t step) {
        return step < a.slots || wait_word(at.own(acknowledged), step + 1 - a.slots, a.abort_word);
    };
    for (uint32_t m = 0; m < count; m++) {
        uint64_t header = messages[m].header;
        Share share(a, message_bytes(header), at.lane);
        uint64_t from = messages[m].buffer + share.begin;
        if (share.has_ll(at.lane)) {
            bool stop = !await_slot(offsetof(LaneWords, ll_acknowledged), packets);
            if (!stop) {
                uint64_t slot = at.packets(at.peer, a.rank, packets);
                uint32_t flag = uint32_t(packets) + 1;
                if (at.lane == 0 && team.thread() == 0) store_packet(slot, header, flag);
                if (share.chunk == 0) send_ll(slot + HEADER_BYTES, from, uint32_t(share.bytes), flag, team);
            }
            if (meet(SEND_MEETS, team.threads(), stop)) return true;
            packets++;
        }
        bool aborted = play(
            0, team.warps - 2, team.warp, Counted{share.steps()},
            [&](uint32_t step, uint32_t, uint32_t lane) {
                return lane != 0 || await_slot(offsetof(LaneWords, chunks_acknowledged), chunks + step);
            },
            [&](uint32_t step, uint32_t, Worker w) {
                copy_chunk<false>(ToSlot{at.chunk(at.peer, a.rank, chunks + step)}, from + uint64_t(step) * share.chunk,
                                    share.step_bytes(step), w.thread, w.threads);
            },
            [&](uint32_t step, uint32_t, uint32_t lane) {
                if (lane == 0) store_relaxed(at.theirs(offsetof(LaneWords, chunks)), chunks + step + 1);
            });
        if (aborted) return true;
        chunks += share.steps();
    }
    if (team.thread() == 0) {
        store_word(at.own(offsetof(LaneWords, sent_packets)), packets);
        store_word(at.own(offsetof(LaneWords, sent_chunks)), chunks);
    }
    return false;
}

// Receives the messages of a list. True: aborted.
__device__ inline bool p2p_take(P2pLane at, const Message* messages, uint32_t count, uint64_t packets, uint64_t chunks,
                                   Team team) {
    const P2pHead& a = at.a;
    for (uint32_t m = 0; m < count; m++) {
        uint64_t header = messages[m].header;
        Share share(a, message_bytes(header), at.lane);
        uint64_t to = messages[m].buffer + share.begin;
        if (share.has_ll(at.lane)) {
            uint64_t slot = at.packets(a.rank, at.peer, packets);
            uint32_t flag = uint32_t(packets) + 1;
            bool ok = at.lane != 0 || team.thread() != 0 || take_header(a, slot, flag, at.peer, header);
            if (ok && share.chunk == 0) ok = take_ll(a, slot + HEADER_BYTES, to, uint32_t(share.bytes), flag, team);
            if (meet(TAKE_MEETS, team.threads(), !ok)) return true;
            packets++;
            if (team.thread() == 0) store_relaxed(at.theirs(offsetof(LaneWords, ll_acknowledged)), packets);
        }
        bool aborted = play(
            1, team.warps - 2, team.warp, Counted{share.steps()},
            [&](uint32_t step, uint32_t, uint32_t lane) {
                return lane != 0 || wait_word(at.own(offsetof(LaneWords, chunks)), chunks + step + 1, a.abort_word);
            },
            [&](uint32_t step, uint32_t, Worker w) {
                copy_chunk<true>(ToBuffer{to + uint64_t(step) * share.chunk}, at.chunk(a.rank, at.peer, chunks + step),
                                   share.step_bytes(step), w.thread, w.threads);
            },
            [&](uint32_t step, uint32_t, uint32_t lane) {
                if (lane == 0) store_relaxed(at.theirs(offsetof(LaneWords, chunks_acknowledged)), chunks + step + 1);
            });
        if (aborted) return true;
        chunks += share.steps();
    }
    if (team.thread() == 0) {
        store_word(at.own(offsetof(LaneWords, taken_packets)), packets);
        store_word(at.own(offsetof(LaneWords, taken_chunks)), chunks);
    }
    return false;
}

// Copies this rank's messages to itself.
__device__ inline void p2p_own(const Message* sends, const Message* recvs, uint32_t count, uint32_t lane, uint32_t lanes) {
    constexpr uint64_t PIECE_BYTES = 1 << 30;
    for (uint32_t m = 0; m < count; m++) {
        uint64_t bytes = message_bytes(sends[m].header), from = sends[m].buffer, to = recvs[m].buffer;
        if (from == to) continue;
        uint64_t part = round_up(divide_up(bytes, lanes), 128), end = min(bytes, part * (lane + 1));
        for (uint64_t at = min(bytes, part * lane); at < end; at += PIECE_BYTES) {
            copy_chunk<false>(ToBuffer{to + at}, from + at, uint32_t(min(PIECE_BYTES, end - at)), threadIdx.x, blockDim.x);
        }
    }
}

__device__ inline bool p2p_with(const P2pHead& a, const Message* messages, uint32_t peer, uint32_t lane) {
    const Message *sends = messages + a.first[peer], *recvs = messages + a.first[RANKS_MAX + peer];
    uint32_t send_count = a.first[peer + 1] - a.first[peer];
    uint32_t recv_count = a.first[RANKS_MAX + peer + 1] - a.first[RANKS_MAX + peer];
    if (peer == a.rank) {
        p2p_own(sends, recvs, send_count, lane, a.blocks[peer]);
        return false;
    }
    P2pLane at{a, peer, lane};
    uint64_t sent_packets = load_word(at.own(offsetof(LaneWords, sent_packets)));
    uint64_t sent_chunks = load_word(at.own(offsetof(LaneWords, sent_chunks)));
    uint64_t taken_packets = load_word(at.own(offsetof(LaneWords, taken_packets)));
    uint64_t taken_chunks = load_word(at.own(offsetof(LaneWords, taken_chunks)));
    __syncthreads();  // whoever has ended first stores them
    uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, alone = min(warps, WARPS_ALONE);
    uint32_t senders = send_count == 0 ? 0 : recv_count == 0 ? alone : warps / 2;
    uint32_t takers = recv_count == 0 ? 0 : send_count == 0 ? alone : warps / 2;
    if (warp < senders) return p2p_send(at, sends, send_count, sent_packets, sent_chunks, Team{warp, senders});
    if (warp - senders >= takers) return false;
    return p2p_take(at, recvs, recv_count, taken_packets, taken_chunks, Team{warp - senders, takers});
}

__device__ inline void p2p(const P2pHead& a, const Message* messages) {
    uint32_t peer = 0, lane = blockIdx.x;
    while (lane >= a.blocks[peer]) lane -= a.blocks[peer++];
    bool aborted = __syncthreads_or(p2p_with(a, messages, peer, lane));
    if (threadIdx.x != 0) return;
    constexpr uint64_t GROUP = uint64_t(1) << 32;
    uint64_t own = a.symmetric[a.rank];
    add_release(own + P2P_ENDED_OFFSET, blockIdx.x == 0 ? GROUP - (gridDim.x - 1) : 1);
    if (blockIdx.x != 0 || a.first[RANKS_MAX] == 0 || aborted) return;
    add_relaxed(own + P2P_SENT_OFFSET, a.first[RANKS_MAX]);
    add_relaxed(own + P2P_SENT_OFFSET + 8, a.sent_bytes);
}

}  // namespace mccs
