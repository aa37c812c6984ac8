// Kernel arguments, passed by value: the mirror of kernels/src/cuda/abi.rs. Every field is plain
// data.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mccs {

constexpr uint32_t RANKS_MAX = 8;

// Flags of DirectArgs.
constexpr uint32_t HEADS = 1;   // exchange heads: they carry scalars, and make a full exchange of any operation
constexpr uint32_t OWN = 2;     // what this rank sends to itself goes straight from send to receive buffer
constexpr uint32_t KEEP = 4;    // the receiver's result goes to the receive buffer (and not only to other ranks)
constexpr uint32_t SCALED = 8;  // contributions are multiplied by their rank's scalar first
constexpr uint32_t SCALAR_AT = 16;  // scalar_bits is where the scalar lies, as an element of scalar_dtype
constexpr uint32_t RELEASED = 32;  // what is stored is there for whoever sees that the operation has ended
constexpr uint32_t ROOT_LAST = 64;  // a pipeline that reduces: the root sends no data, and adds its own to what the others have combined

// A small operation's message: it begins so many bytes behind the buffer's begin. None: 0 bytes.
struct Part {
    uint32_t at;
    uint32_t bytes;
};

struct DirectArgs {
    uint64_t send;
    uint64_t recv;
    uint64_t symmetric[RANKS_MAX];
    uint64_t abort_word;
    uint64_t scalar_bits;
    uint64_t bytes;        // one shot: of a message between two ranks; two shots: of the whole buffer
    uint64_t shard_bytes;  // two shots: of a shard, a multiple of 16; one shot: 0
    uint64_t send_stride;  // one shot: from the part for one rank to the next rank's
    uint64_t recv_stride;  // one shot: from the part of one rank to the next rank's
    uint64_t send_batch_stride;  // from one message of a batch to the next, where they are sent from
    uint64_t recv_batch_stride;  // and where they are received
    uint64_t ll_offset;
    uint64_t ll_slot_bytes;
    uint64_t simple_offset;
    uint64_t deals_offset;
    uint64_t ll128_offset;
    uint64_t ll128_slot_bytes;
    uint64_t call;        // kind << 56 | payload bytes, for its stamp; 0: nobody asks when it runs
    uint32_t sequence;    // 0: one more than have ended on this symmetric buffer
    uint32_t rank;
    uint32_t nranks;
    uint32_t flags;
    uint32_t unsharded;   // the rank that owns no shard, or RANKS_MAX
    uint32_t divisor;     // sums are divided by it; 0: they are not
    uint32_t send_mask;   // ranks that get a message
    uint32_t recv_mask;   // ranks that send one
    uint32_t relay_mask;  // two shots: ranks that get this rank's shard
    uint32_t out_mask;    // two shots: ranks whose shard this rank gets
    uint32_t buffer_blocks;
    uint32_t slots;
    uint32_t slot_bytes;
    uint32_t chunk_bytes;
    uint32_t slice_bytes;  // a block's part of the longest message
    uint32_t push_warps;
    uint32_t middle_warps;
    uint32_t out_warps;
    uint32_t op;  // sum, prod, max, min: 0 to 3
    uint32_t scalar_dtype;
    uint32_t dealer;  // the rank that deals out chunks, or RANKS_MAX: every block has a slice
    uint32_t chunks;  // where they are dealt out: of the longest message, or of a whole batch
    uint32_t batch;        // messages that each rank sends each other one, of `bytes` each
    uint32_t batch_skip;   // from this one on, messages lie one place further
    uint32_t batch_share;  // of a message in a batch: chunks, or the warps that it has
    uint32_t reserved;
    // Parts of small operations, by rank.
    Part sends[RANKS_MAX];
    Part recvs[RANKS_MAX];  // what is combined goes nowhere
    Part outs[RANKS_MAX];   // two shots: shards of others
    Part own;               // what this rank sends itself, or contributes
    Part result;            // where that, or what it combines, goes
};
static_assert(sizeof(DirectArgs) == 512 && offsetof(DirectArgs, sequence) == 200, "as in abi.rs");

struct ReduceArgs {
    uint64_t sources[RANKS_MAX];       // in the order they are combined in
    uint64_t destinations[RANKS_MAX];
    uint64_t scalars[RANKS_MAX];
    uint64_t flags[RANKS_MAX];         // a word that tells of each source's arrival; 0: it is there
    uint64_t flag_value;               // piece 0 is there when its flag is at least this
    uint64_t flag_step;                // added to flag_value for each further piece
    uint64_t flag_stride;              // bytes from a piece's flag to the next piece's
    uint64_t done_word;                // 0: nobody is told
    uint64_t done_value;
    uint64_t done_step;
    uint64_t done_stride;
    uint64_t counters;                 // u32 a piece, zero before and after; needed where done_word is set
    uint64_t abort_word;
    uint64_t bytes;                    // of a source
    uint64_t piece_bytes;              // a multiple of 16
    uint32_t pieces;
    uint32_t source_count;
    uint32_t destination_count;
    uint32_t divisor;
    uint32_t scaled;  // 2: scalars[0] is where the only source's scalar lies
    uint32_t op;
};
static_assert(sizeof(ReduceArgs) == 368 && offsetof(ReduceArgs, flag_value) == 256, "as in abi.rs");

// Parts that lie equally far apart, but perhaps for one.
struct CombineArgs {
    uint64_t first;
    uint64_t stride;  // bytes from a part to the next
    uint64_t own;     // where part `own_place` lies
    uint64_t to;      // may be a part
    uint64_t bytes;   // of a part
    uint32_t parts;   // in the order they are combined in
    uint32_t own_place;
    uint32_t divisor;
    uint32_t op;
};
static_assert(sizeof(CombineArgs) == 56 && offsetof(CombineArgs, parts) == 40, "as in abi.rs");

}  // namespace mccs
