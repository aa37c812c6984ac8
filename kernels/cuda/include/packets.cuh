// Small operations: packets that carry data and flag together, so that one trip over the link does all.
//
// A slot is written again two operations later (areas' halves alternate by the parity of the operation's number). That is
// safe: every operation is a full exchange, by data or by heads. Who writes operation n + 2 has ended n + 1, so it has
// received from every peer what that peer sent in n + 1, in stream order after all of n had ended there, whose slots are
// the ones now written. No flag is ever mistaken: a slot holds packets of operations that are at least two older.
#pragma once
#include "area.cuh"
#include "vectors.cuh"

namespace mccs {

constexpr uint32_t PACKETS_THREADS_MAX = 512;

__device__ inline bool in(uint32_t mask, uint32_t rank) { return mask >> rank & 1; }

// A warp moves a unit, 64 packets, at a time, and a lane two of them: enough loads are in flight, and every store of
// the warp is one contiguous range.
constexpr uint32_t UNIT_BYTES = 512;
constexpr uint32_t SECOND = UNIT_BYTES / 2;  // bytes of data from a lane's first packet to its second

// What a lane has of the units of a message.
struct Lane {
    uint64_t first, stride;  // in bytes of data
    __device__ Lane() {
        uint32_t warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32;
        first = uint64_t(warp) * UNIT_BYTES + threadIdx.x % 32 * 8;
        stride = uint64_t(gridDim.x * warps) * UNIT_BYTES;
    }
};

// A lane's sixteen bytes of a message of `bytes`, as far as they are there.
__device__ inline uint32_t bytes_at(uint64_t bytes, uint64_t at) {
    return at < bytes ? uint32_t(min(uint64_t(8), bytes - at)) : 0;
}
__device__ inline uint4 load_lane(uint64_t from, uint64_t bytes, uint64_t at) {
    uint32_t first = bytes_at(bytes, at), second = bytes_at(bytes, at + SECOND);
    uint64_t low = first != 0 ? load8(from + at, first) : 0;
    return vector(low, second != 0 ? load8(from + at + SECOND, second) : 0);
}
__device__ inline void store_lane(uint64_t to, uint64_t bytes, uint64_t at, uint4 data) {
    uint32_t first = bytes_at(bytes, at), second = bytes_at(bytes, at + SECOND);
    if (first != 0) store8(to + at, low(data), first);
    if (second != 0) store8(to + at + SECOND, high(data), second);
}

// The packets for the data at `at` lie at twice the offset.
__device__ inline void send_lane(const DirectArgs& a, uint64_t slot, uint64_t bytes, uint64_t at, uint4 data) {
    if (at < bytes) store_packet(slot + at * 2, low(data), number_of(a));
    if (at + SECOND < bytes) store_packet(slot + (at + SECOND) * 2, high(data), number_of(a));
}

// Sends each peer its message. All of a rank's sends come before its first wait.
__device__ inline void packets_send(const DirectArgs& a, Lane lane) {
    if (a.send_mask == 0) return;
    bool shared = a.shard_bytes == 0 && a.send_stride == 0;
    uint64_t longest = a.shard_bytes != 0 ? a.shard_bytes : a.bytes;
    for (uint64_t at = lane.first; at < longest; at += lane.stride) {
        uint4 data[RANKS_MAX];
        if (shared) {
            data[0] = load_lane(a.send, a.bytes, at);
        } else {
#pragma unroll
            for (uint32_t peer = 0; peer < RANKS_MAX; peer++) {
                if (in(a.send_mask, peer)) data[peer] = load_lane(send_part(a, peer), part_bytes(a, peer), at);
            }
        }
#pragma unroll 1
        for (uint32_t left = a.send_mask; left != 0; left &= left - 1) {
            uint32_t peer = __ffs(left) - 1;
            send_lane(a, packets_at(a, peer, a.rank), part_bytes(a, peer), at, data[shared ? 0 : peer]);
        }
    }
}

// What this rank has for itself.
__device__ inline void packets_own(const DirectArgs& a, Lane lane) {
    bool sharded = a.shard_bytes != 0;
    uint64_t from = sharded ? a.send : send_part(a, a.rank), to = sharded ? a.recv : recv_part(a, a.rank);
    if ((a.flags & OWN) == 0 || from == to) return;
    for (uint64_t at = lane.first; at < a.bytes; at += lane.stride) {
        store_lane(to, a.bytes, at, load_lane(from, a.bytes, at));
    }
}

// Gives this rank's result to whom it is for: in the second halves of slots.
__device__ inline void packets_relay(const DirectArgs& a, uint64_t at, uint4 data) {
#pragma unroll 1
    for (uint32_t left = a.relay_mask; left != 0; left &= left - 1) {
        uint64_t slot = packets_at(a, __ffs(left) - 1, a.rank) + a.packet_slot_bytes / 2;
        send_lane(a, slot, part_bytes(a, a.rank), at, data);
    }
}

// Waits for a lane's packets of the messages of all ranks in `mask`: their loads are in flight together. False: aborted.
template <class BYTES>
__device__ bool await_lane(const DirectArgs& a, uint32_t mask, uint64_t offset, uint64_t at, BYTES bytes,
                           uint4 (&data)[RANKS_MAX]) {
    Patience patience(a.abort_word);
    uint4 packets[RANKS_MAX][2];
    uint32_t first = 0, second = 0;
    for (uint32_t s = 0; s < a.nranks; s++) {
        first |= uint32_t(in(mask, s) && at < bytes(s)) << s;
        second |= uint32_t(in(mask, s) && at + SECOND < bytes(s)) << s;
    }
    offset += at * 2;
    for (;;) {
        bool complete = true;
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
            uint64_t slot = packets_at(a, a.rank, s) + offset;
            if (in(first, s)) packets[s][0] = load_packet(slot);
            if (in(second, s)) packets[s][1] = load_packet(slot + SECOND * 2);
        }
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
            complete &= !in(first, s) || packet_complete(packets[s][0], number_of(a));
            complete &= !in(second, s) || packet_complete(packets[s][1], number_of(a));
        }
        if (complete) break;
        if (patience.exhausted()) return false;
    }
#pragma unroll
    for (uint32_t s = 0; s < RANKS_MAX; s++) {
        data[s] = make_uint4(packets[s][0].x, packets[s][0].z, packets[s][1].x, packets[s][1].z);
    }
    return true;
}

// Takes the messages of `mask`, which lie `offset` bytes into their slots, out of packets: a source's message is
// `bytes(source)` long, goes where `to(source)` says, and on to `then`. False: aborted.
template <class TO, class BYTES, class THEN>
__device__ bool packets_take(const DirectArgs& a, Lane lane, uint32_t mask, uint64_t offset, TO to, BYTES bytes, THEN then) {
    if (mask == 0) return true;
    uint64_t longest = a.shard_bytes != 0 ? a.shard_bytes : a.bytes;
    for (uint64_t at = lane.first; at < longest; at += lane.stride) {
        uint4 data[RANKS_MAX];
        if (!await_lane(a, mask, offset, at, bytes, data)) return false;
#pragma unroll 1
        for (uint32_t left = mask; left != 0; left &= left - 1) {
            uint32_t s = __ffs(left) - 1;
            store_lane(to(s), bytes(s), at, data[s]);
            then(at, data[s]);
        }
    }
    return true;
}

__device__ inline bool packets_out(const DirectArgs& a, Lane lane) {
    return a.out_mask == 0 ||
           packets_take(
               a, lane, a.out_mask, a.packet_slot_bytes / 2, [&](uint32_t s) { return recv_part(a, s); },
               [&](uint32_t s) { return part_bytes(a, s); }, [](uint64_t, uint4) {});
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
    Lane lane;
    packets_begin(a);
    packets_send(a, lane);
    packets_own(a, lane);
    bool relays = a.shard_bytes != 0;
    bool ok = packets_take(
        a, lane, a.recv_mask, 0, [&](uint32_t s) { return recv_part(a, relays ? a.rank : s); },
        [&](uint32_t) { return part_bytes(a, a.rank); }, [&](uint64_t at, uint4 data) { packets_relay(a, at, data); });
    ok = ok && packets_out(a, lane) && packets_end(a);
    finish(a, !ok);
}

// Combines the messages of all ranks, in order, and passes the result on. False: aborted.
template <class T>
__device__ bool packets_combine(const DirectArgs& a, Lane lane, const uint64_t* scalars) {
    uint64_t own = send_part(a, a.rank), result = recv_part(a, a.rank), bytes = part_bytes(a, a.rank);
    for (uint64_t at = lane.first; at < bytes; at += lane.stride) {
        uint4 data[RANKS_MAX];
        uint4 mine = load_lane(own, bytes, at);
        if (!await_lane(a, a.recv_mask, 0, at, [&](uint32_t) { return bytes; }, data)) return false;
        data[a.rank] = mine;
        VectorFold<T> fold;
        fold.first(data[0], scalars);
#pragma unroll 1
        for (uint32_t s = 1; s < a.nranks; s++) {
            fold.next(Op(a.op), data[s], scalars != nullptr ? scalars + s : nullptr);
        }
        uint4 combined = fold.result(a.divisor);
        if (a.flags & KEEP) store_lane(result, bytes, at, combined);
        packets_relay(a, at, combined);
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
    Lane lane;
    packets_begin(a);
    packets_send(a, lane);
    bool ok = gather_scalars(a, scalars);
    if (ok && a.recv_mask != 0) ok = packets_combine<T>(a, lane, (a.flags & SCALED) != 0 ? scalars : nullptr);
    ok = ok && packets_out(a, lane) && packets_end(a);
    finish(a, !ok);
}

}  // namespace mccs
