// Small operations: packets that carry data and flag together, so that one trip over the link does all.
//
// A slot is written again two operations later (areas' halves alternate by the parity of the operation's number). That is
// safe: every operation is a full exchange, by data or by heads. Who writes operation n + 2 has ended n + 1, so it has
// received from every peer what that peer sent in n + 1, in stream order after all of n had ended there, whose slots are
// the ones now written. No flag is ever mistaken: a slot holds packets of operations that are at least two older.
#pragma once
#include "area.cuh"
#include "arithmetic.cuh"

namespace mccs {

constexpr uint32_t PACKETS_THREADS_MAX = 512;

__device__ inline bool in(uint32_t mask, uint32_t rank) { return mask >> rank & 1; }

// Packets of one message, as one thread takes part in it.
struct Packets {
    uint64_t first, stride;  // in packets
    __device__ Packets() : first(blockIdx.x * blockDim.x + threadIdx.x), stride(gridDim.x * blockDim.x) {}
};

__device__ inline uint32_t packet_bytes(uint64_t bytes, uint64_t i) {
    return uint32_t(min(uint64_t(8), bytes - i * 8));
}

// Sends each peer its message. All of a rank's sends come before its first wait.
__device__ inline void packets_send(const DirectArgs& a, Packets p) {
    bool shared = a.shard_bytes == 0 && a.send_stride == 0;
    if (shared && a.send_mask != 0) {
        uint32_t align = alignment(a.send);
        for (uint64_t i = p.first; i * 8 < a.bytes; i += p.stride) {
            uint64_t data = load8(a.send + i * 8, align, packet_bytes(a.bytes, i));
#pragma unroll 1
            for (uint32_t left = a.send_mask; left != 0; left &= left - 1) {
                store_packet(packets_at(a, __ffs(left) - 1, a.rank) + i * 16, data, a.sequence);
            }
        }
        return;
    }
    for (uint32_t step = 1; step < a.nranks; step++) {
        uint32_t peer = (a.rank + step) % a.nranks;
        if (!in(a.send_mask, peer)) continue;
        uint64_t from = send_part(a, peer), bytes = part_bytes(a, peer), to = packets_at(a, peer, a.rank);
        uint32_t align = alignment(from);
        for (uint64_t i = p.first; i * 8 < bytes; i += p.stride) {
            store_packet(to + i * 16, load8(from + i * 8, align, packet_bytes(bytes, i)), a.sequence);
        }
    }
}

// What this rank has for itself.
__device__ inline void packets_own(const DirectArgs& a, Packets p) {
    bool sharded = a.shard_bytes != 0;
    uint64_t from = sharded ? a.send : send_part(a, a.rank), to = sharded ? a.recv : recv_part(a, a.rank);
    if ((a.flags & OWN) == 0 || from == to) return;
    uint32_t align_from = alignment(from), align_to = alignment(to);
    for (uint64_t i = p.first; i * 8 < a.bytes; i += p.stride) {
        uint32_t bytes = packet_bytes(a.bytes, i);
        store8(to + i * 8, load8(from + i * 8, align_from, bytes), align_to, bytes);
    }
}

// Gives this rank's result to whom it is for.
__device__ inline void packets_relay(const DirectArgs& a, uint64_t i, uint64_t data) {
#pragma unroll 1
    for (uint32_t left = a.relay_mask; left != 0; left &= left - 1) {
        uint64_t slot = packets_at(a, __ffs(left) - 1, a.rank) + a.packet_slot_bytes / 2;
        store_packet(slot + i * 16, data, a.sequence);
    }
}

// Waits for packets of all ranks in `mask`: their loads are in flight together. False: aborted.
__device__ inline bool await_packets(const DirectArgs& a, uint32_t mask, uint64_t offset, uint64_t (&data)[RANKS_MAX]) {
    Patience patience(a.abort_word);
    uint4 packets[RANKS_MAX];
    for (;;) {
        bool complete = true;
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
            if (in(mask, s)) packets[s] = load_packet(packets_at(a, a.rank, s) + offset);
        }
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) complete &= !in(mask, s) || packet_complete(packets[s], a.sequence);
        if (complete) break;
        if (patience.exhausted()) return false;
    }
#pragma unroll
    for (uint32_t s = 0; s < RANKS_MAX; s++) data[s] = packet_data(packets[s]);
    return true;
}

// Takes the messages of `mask`, which lie `offset` bytes into their slots, out of packets: a source's message is
// `bytes(source)` long, goes where `to(source)` says, and on to `then`. False: aborted.
template <class TO, class BYTES, class THEN>
__device__ bool packets_take(const DirectArgs& a, Packets p, uint32_t mask, uint64_t offset, TO to, BYTES bytes, THEN then) {
    uint64_t longest = 0;
    for (uint32_t s = 0; s < a.nranks; s++) longest = in(mask, s) ? max(longest, bytes(s)) : longest;
    for (uint64_t i = p.first; i * 8 < longest; i += p.stride) {
        uint64_t data[RANKS_MAX];
        uint32_t there = mask;
        for (uint32_t s = 0; s < a.nranks; s++) there &= ~(uint32_t(i * 8 >= bytes(s)) << s);
        if (!await_packets(a, there, offset + i * 16, data)) return false;
#pragma unroll 1
        for (; there != 0; there &= there - 1) {
            uint32_t s = __ffs(there) - 1;
            uint64_t at = to(s);
            store8(at + i * 8, data[s], alignment(at), packet_bytes(bytes(s), i));
            then(i, data[s]);
        }
    }
    return true;
}

__device__ inline bool packets_out(const DirectArgs& a, Packets p) {
    return a.out_mask == 0 ||
           packets_take(
               a, p, a.out_mask, a.packet_slot_bytes / 2, [&](uint32_t s) { return recv_part(a, s); },
               [&](uint32_t s) { return part_bytes(a, s); }, [](uint64_t, uint64_t) {});
}

// In an operation with heads, block 0 sends and awaits them.
__device__ inline void packets_begin(const DirectArgs& a) {
    if ((a.flags & HEADS) != 0 && blockIdx.x == 0) send_head(a, threadIdx.x);
}
__device__ inline bool packets_end(const DirectArgs& a) {
    uint64_t scalar;
    return (a.flags & HEADS) == 0 || blockIdx.x != 0 || wait_head(a, threadIdx.x, scalar);
}

__device__ inline void packets_copy(const DirectArgs& a) {
    Packets p;
    packets_begin(a);
    packets_send(a, p);
    packets_own(a, p);
    bool relays = a.shard_bytes != 0;
    bool ok = packets_take(
        a, p, a.recv_mask, 0, [&](uint32_t s) { return recv_part(a, relays ? a.rank : s); },
        [&](uint32_t) { return part_bytes(a, a.rank); }, [&](uint64_t i, uint64_t data) { packets_relay(a, i, data); });
    ok = ok && packets_out(a, p) && packets_end(a);
    finish(a, !ok);
}

// Combines the messages of all ranks, in order, and passes the result on. False: aborted.
template <class T>
__device__ bool packets_combine(const DirectArgs& a, Packets p, const uint64_t* scalars) {
    uint64_t own = send_part(a, a.rank), result = recv_part(a, a.rank), bytes = part_bytes(a, a.rank);
    uint32_t align_own = alignment(own), align_result = alignment(result);
    bool scaled = a.flags & SCALED;
    for (uint64_t i = p.first; i * 8 < bytes; i += p.stride) {
        uint32_t length = packet_bytes(bytes, i);
        uint64_t data[RANKS_MAX];
        uint64_t mine = load8(own + i * 8, align_own, length);
        if (!await_packets(a, a.recv_mask, i * 16, data)) return false;
        data[a.rank] = mine;
        Fold<T> fold;
        fold.first(data[0], scaled ? scalars : nullptr);
#pragma unroll 1
        for (uint32_t s = 1; s < a.nranks; s++) fold.next(Op(a.op), data[s], scaled ? scalars + s : nullptr);
        uint64_t result_data = fold.result(a.divisor);
        if (a.flags & KEEP) store8(result + i * 8, result_data, align_result, length);
        packets_relay(a, i, result_data);
    }
    return true;
}

// All ranks' scalars, in shared memory. False: aborted.
__device__ inline bool gather_scalars(const DirectArgs& a, uint64_t* scalars) {
    bool ok = true;
    if ((a.flags & SCALED) != 0) {
        if (threadIdx.x < RANKS_MAX) ok = wait_head(a, threadIdx.x, scalars[threadIdx.x]);
        ok = !__syncthreads_or(!ok);
    }
    return ok;
}

template <class T>
__device__ void packets_reduce(const DirectArgs& a) {
    __shared__ uint64_t scalars[RANKS_MAX];
    Packets p;
    packets_begin(a);
    packets_send(a, p);
    bool ok = gather_scalars(a, scalars);
    if (ok && a.recv_mask != 0) ok = packets_combine<T>(a, p, scalars);
    ok = ok && packets_out(a, p) && packets_end(a);
    finish(a, !ok);
}

}  // namespace mccs
