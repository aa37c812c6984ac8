// Layout of symmetric buffers, and which part of a buffer belongs to which rank. The mirror of
// kernels/src/cuda/symmetric_buffer.rs.
#pragma once
#include "abi.cuh"
#include "memory.cuh"
#include "scalar.cuh"

namespace mccs {

// A symmetric buffer begins with the word that counts operations, two of p2p.cuh, one that counts bytes, and two more of p2p.cuh; then come heads,
// stamps, flags and acknowledgements.
constexpr uint64_t PAYLOAD_OFFSET = 24;                             // a word: payload of operations that have ended, as far as they have stamps
constexpr uint64_t DEALT_OFFSET = 128;                              // a word: operation number << 32 | chunks dealt out
constexpr uint64_t HEADS_OFFSET = 256;                              // [parity][rank] packets
constexpr uint64_t STAMPS_OFFSET = 1024;                            // [number % STAMPS] call, began, number, ended
constexpr uint32_t STAMPS = 512;
constexpr uint64_t STAMP_BYTES = 32;
constexpr uint64_t FLAGS_OFFSET = STAMPS_OFFSET + STAMPS * STAMP_BYTES;  // [phase][block][rank] words
constexpr uint64_t PHASES = 2;
constexpr uint32_t DEALS = 32;                                      // [parity][block][step % DEALS] words

// The operation's number. The upper half of the word that counts does not change before the kernel's last block has ended.
__device__ inline uint32_t number_of(const DirectArgs& a) {
    if (a.sequence != 0) return a.sequence;
    return __ldg(reinterpret_cast<const uint32_t*>(a.symmetric[a.rank]) + 1) + 1;
}

// A rank's place among the peers of another.
__device__ inline uint32_t peer_index(uint32_t rank, uint32_t other) { return rank < other ? rank : rank - 1; }

__device__ inline uint64_t head_at(const DirectArgs& a, uint32_t in, uint32_t from) {
    return a.symmetric[in] + HEADS_OFFSET + ((number_of(a) & 1) * RANKS_MAX + from) * 16;
}
__device__ inline uint64_t flag_at(const DirectArgs& a, uint32_t in, uint32_t from, uint32_t phase, uint32_t block) {
    return a.symmetric[in] + FLAGS_OFFSET + ((phase * a.buffer_blocks + block) * RANKS_MAX + from) * 8;
}
__device__ inline uint64_t ack_at(const DirectArgs& a, uint32_t in, uint32_t from, uint32_t phase, uint32_t block) {
    return flag_at(a, in, from, PHASES + phase, block);
}
__device__ inline uint64_t deal_at(const DirectArgs& a, uint32_t in, uint32_t block, uint32_t step) {
    uint64_t ring = (number_of(a) & 1) * a.buffer_blocks + block;
    return a.symmetric[in] + a.deals_offset + (ring * DEALS + step % DEALS) * 8;
}
// Address of the slot for a step, in the symmetric buffer of a rank for which the sender is its `index`th peer.
__device__ inline uint64_t slot_offset(const DirectArgs& a, uint32_t index, uint32_t phase, uint32_t block, uint32_t step) {
    uint64_t ring = ((number_of(a) & 1) * PHASES + phase) * a.buffer_blocks + block;
    uint64_t slot = (ring * (a.nranks - 1) + index) * a.slots + step % a.slots;
    return a.simple_offset + slot * a.slot_bytes;
}

// Two shots: a rank's place among those that own a shard.
__device__ inline uint64_t shard_offset(const DirectArgs& a, uint32_t rank) {
    return (rank - (rank > a.unsharded)) * a.shard_bytes;
}
// Bytes of the message that ends at, or starts from, the owner of a part.
__device__ inline uint64_t part_bytes(const DirectArgs& a, uint32_t owner) {
    if (a.shard_bytes == 0) return a.bytes;
    uint64_t offset = shard_offset(a, owner);
    return offset >= a.bytes ? 0 : min(a.shard_bytes, a.bytes - offset);
}
// Address of the part of the send buffer for a rank.
__device__ inline uint64_t send_part(const DirectArgs& a, uint32_t rank) {
    return a.send + (a.shard_bytes != 0 ? shard_offset(a, rank) : rank * a.send_stride);
}
// Address of the part of the receive buffer that a rank sends, or owns.
__device__ inline uint64_t recv_part(const DirectArgs& a, uint32_t rank) {
    return a.recv + (a.shard_bytes != 0 ? shard_offset(a, rank) : rank * a.recv_stride);
}

// In a batch: the place of a message, in units of `send_batch_stride` and `recv_batch_stride`.
__device__ inline uint32_t batch_place(const DirectArgs& a, uint32_t message) { return message + (message >= a.batch_skip); }

// This rank's scalar.
__device__ inline uint64_t own_scalar(const DirectArgs& a) {
    return (a.flags & SCALAR_AT) != 0 ? load_scalar(a.scalar_bits, a.scalar_dtype) : a.scalar_bits;
}

// Sends this rank's head to all peers: one thread a peer.
__device__ inline void send_head(const DirectArgs& a, uint32_t peer) {
    if (peer < a.nranks && peer != a.rank) store_packet(head_at(a, peer, a.rank), own_scalar(a), number_of(a));
}

// Waits for a peer's head, and gives its scalar; false: aborted.
__device__ inline bool wait_head(const DirectArgs& a, uint32_t peer, uint64_t& scalar_bits) {
    if (peer >= a.nranks || peer == a.rank) {
        scalar_bits = own_scalar(a);
        return true;
    }
    uint64_t from = head_at(a, a.rank, peer);
    uint4 packet = load_packet(from);
    bool arrived = wait_packet(from, number_of(a), a.abort_word, packet);
    scalar_bits = packet_data(packet);
    return arrived;
}

// Stamps tell the service when the last operations ran, by the GPU's clock. Nobody waits for them: a kernel stores when it began once it has
// sent what others wait for, and when it has ended after it has said so.
__device__ inline uint64_t stamp_at(const DirectArgs& a) {
    return a.symmetric[a.rank] + STAMPS_OFFSET + number_of(a) % STAMPS * STAMP_BYTES;
}
__device__ inline void stamp_begin(const DirectArgs& a) {
    if (a.call != 0 && blockIdx.x == 0 && threadIdx.x == 0) store_aligned(stamp_at(a), vector(a.call, global_ns()));
}

// Ends an operation: called by all threads of all blocks. Operations are the upper half of the symmetric buffer's first word: every block
// adds its share, without waiting for an answer, and all shares make one operation. Nobody polls the word on another GPU, and nothing goes
// to the host: that would take longer than a small operation does. One that was aborted counts as well, and has no stamp: the next on
// another stream waits for it. If nobody goes on by the count to the stored data, it does not wait for stores: the kernel's end is soon
// enough.
__device__ inline void finish(const DirectArgs& a, bool aborted) {
    aborted = __syncthreads_or(aborted);
    if (threadIdx.x != 0) return;
    auto count = [&](uint64_t share) {
        aborted || (a.flags & RELEASED) != 0 ? add_release(a.symmetric[a.rank], share) : add_relaxed(a.symmetric[a.rank], share);
    };
    constexpr uint64_t OPERATION = uint64_t(1) << 32;
    if (blockIdx.x != 0 || a.call == 0 || aborted) return count(blockIdx.x == 0 ? OPERATION - (gridDim.x - 1) : 1);
    // Before its number may change.
    uint64_t number = number_of(a), stamp = stamp_at(a);
    count(OPERATION - (gridDim.x - 1));
    add_relaxed(a.symmetric[a.rank] + PAYLOAD_OFFSET, a.call << 8 >> 8);
    store_aligned(stamp + 16, vector(number, global_ns()));
}

}  // namespace mccs
