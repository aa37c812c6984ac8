// The LL and LL128 protocols: how a warp moves a unit of a message through slots, and to and from
// tenants' buffers. Data and flag go together, in one trip over the link: in packets of sixteen
// bytes, half of them flags (LL), or in lines of 128 bytes, eight of them a flag (LL128).
//
// A slot is written again two operations later (symmetric buffers' halves alternate by the parity of the operation's number). That is
// safe: every operation is a full exchange, by data or by heads. A writer of operation n + 2 has ended n + 1, so it has received from
// every peer what that peer sent in n + 1, in stream order after all of n had ended there, whose slots are the ones now written. No
// flag is ever mistaken: a slot holds packets of operations that are at least two older. Pipelines of lines use places in a slot
// again within an operation (ll_pass in ll.cuh): their flags have a second word for that.
#pragma once
#include "symmetric_buffer.cuh"
#include "vectors.cuh"

namespace mccs {

constexpr uint32_t LL_THREADS_MAX = 512;
constexpr uint32_t UNITS_A_LAP = 4;  // of a warp, where it uses its places in slots again
constexpr uint32_t CREDIT_LANE = 7;  // the first whose part of a line is the flag

__device__ inline bool in(uint32_t mask, uint32_t rank) { return mask >> rank & 1; }

// No part: behind every message's end.
constexpr uint32_t NOWHERE = 1u << 31;

// A form says how a warp moves a unit of data: each lane has sixteen bytes of it, in two parts of eight, so that enough loads are in flight
// and every store of the warp is one contiguous range.

// The parts of a lane are two packets, half a unit apart.
struct Ll {
    static constexpr bool BATCHED = false;
    static constexpr uint32_t UNIT_BYTES = 512, WIRE_BYTES = 1024, BETWEEN_PARTS = 256, LOADS = 2;
    static constexpr bool LOADS_AGAIN = false;
    static __device__ uint64_t slots_offset(const DirectArgs& a) { return a.ll_offset; }
    static __device__ uint32_t slot_bytes(const DirectArgs& a) { return uint32_t(a.ll_slot_bytes); }
    static __device__ uint32_t first() { return threadIdx.x % 32 * 8; }
    static __device__ uint32_t second() { return first() + BETWEEN_PARTS; }
    static __device__ uint32_t on_wire() { return threadIdx.x % 32 * 16; }
    // The value that is waited for in the place of a part that does not come.
    static __device__ uint4 empty(uint32_t flag, uint32_t) { return make_uint4(0, flag, 0, flag); }
    // 0: it is there.
    static __device__ uint32_t missing(uint4 packet, uint32_t flag, uint32_t) { return (packet.y ^ flag) | (packet.w ^ flag); }
    static __device__ uint4 data(const uint4 (&packets)[LOADS]) {
        return make_uint4(packets[0].x, packets[0].z, packets[1].x, packets[1].z);
    }
    static __device__ bool all(bool complete) { return complete; }
    static __device__ bool any(bool exhausted) { return exhausted; }
};

// Eight lanes have a line, whose last part is the flag. One instruction of a warp stores it, which links and caches carry
// out as a whole where GPUs are joined by NVLink: nobody promises that, but NCCL's LL128 has relied on it from Volta on. It takes lanes that are
// together; where a compiler has left them apart, as behind a call from which some return sooner, flags are stored behind the data (docs/decisions/043).
template <bool IN_BATCHES>
struct Lines {
    static constexpr bool BATCHED = IN_BATCHES;
    static constexpr uint32_t UNIT_BYTES = 480, WIRE_BYTES = 512, BETWEEN_PARTS = 8, LOADS = 1;
    // A load may see a flag and not yet what was stored with it; one that begins when the flag was seen does not.
    static constexpr bool LOADS_AGAIN = true;
    static __device__ uint64_t slots_offset(const DirectArgs& a) { return a.ll128_offset; }
    static __device__ uint32_t slot_bytes(const DirectArgs& a) { return uint32_t(a.ll128_slot_bytes); }
    static __device__ uint32_t lane() { return threadIdx.x % 32; }
    static __device__ bool has_flag() { return lane() % 8 == 7; }
    static __device__ uint32_t first() { return lane() / 8 * (UNIT_BYTES / 4) + lane() % 8 * 16; }
    static __device__ uint32_t second() { return has_flag() ? NOWHERE : first() + BETWEEN_PARTS; }
    static __device__ uint32_t on_wire() { return lane() * 16; }
    static __device__ uint4 empty(uint32_t flag, uint32_t lap) { return has_flag() ? make_uint4(0, 0, flag, lap) : make_uint4(0, 0, 0, 0); }
    static __device__ uint32_t missing(uint4 part, uint32_t flag, uint32_t lap) { return has_flag() ? (part.z ^ flag) | (part.w ^ lap) : 0; }
    static __device__ uint4 data(const uint4 (&parts)[LOADS]) { return parts[0]; }
    // A line is loaded anew by all its lanes.
    static __device__ bool all(bool complete) { return __all_sync(~0u, complete); }
    static __device__ bool any(bool exhausted) { return __any_sync(~0u, exhausted); }
};
using Ll128 = Lines<false>;
using Ll128Batch = Lines<true>;

// A unit of every message, where this lane's parts of it begin, and how often its place in slots has been used before in this operation.
template <class FORM>
struct Unit {
    uint32_t at, first, second, wire, lap;
    __device__ Unit(uint32_t unit, uint32_t place, uint32_t laps)
        : at(unit * FORM::UNIT_BYTES), first(at + FORM::first()), second(at + FORM::second()),
          wire(place * FORM::WIRE_BYTES + FORM::on_wire()), lap(laps) {}
};

__device__ inline void store_unit(uint64_t to, Unit<Ll> unit, uint32_t bytes, uint4 data, uint32_t flag) {
    store_volatile_if(unit.first < bytes, to, make_uint4(data.x, flag, data.y, flag));
    store_volatile_if(unit.second < bytes, to + Ll::WIRE_BYTES / 2, make_uint4(data.z, flag, data.w, flag));
}
template <bool IN_BATCHES>
__device__ inline void store_unit(uint64_t to, Unit<Lines<IN_BATCHES>> unit, uint32_t bytes, uint4 data, uint32_t flag) {
    uint32_t z = Ll128::has_flag() ? flag : data.z, w = Ll128::has_flag() ? unit.lap : data.w;
    bool there = unit.at < bytes;
    uint4 part = make_uint4(data.x, data.y, z, w);
    if (store_together_if(there, to, part)) return;
    store_volatile_if(there && !Ll128::has_flag(), to, part);
    store8_if(there && Ll128::has_flag(), to, part.x, part.y);
    fence_system();
    __syncwarp();
    fence_system();
    store8_if(there && Ll128::has_flag(), to + 8, part.z, part.w);
}
__device__ inline void load_unit(uint64_t from, Unit<Ll> unit, uint32_t bytes, uint4 (&packets)[Ll::LOADS]) {
    load_volatile_if(unit.first < bytes, from, packets[0]);
    load_volatile_if(unit.second < bytes, from + Ll::WIRE_BYTES / 2, packets[1]);
}
template <bool IN_BATCHES>
__device__ inline void load_unit(uint64_t from, Unit<Lines<IN_BATCHES>> unit, uint32_t bytes, uint4 (&parts)[Ll128::LOADS]) {
    load_together_if(unit.at < bytes, from, parts[0]);
}

// Work of an operation's warps, and its slots, computed once: the smallest operations take as long as their instructions do.
template <class FORM>
struct Exchange {
    const DirectArgs& a;
    uint32_t number;
    uint32_t longest;      // bytes of the longest message
    uint32_t warp, warps;  // a warp has units `warp`, `warp` + `warps`, ... of messages
    uint32_t slot_bytes;
    uint64_t slots;        // from where a symmetric buffer begins to them
    uint64_t first_sent, first_received;  // of a batch: where what this warp's messages are of begins, and what they are for

    __device__ explicit Exchange(const DirectArgs& args) : a(args) {
        number = number_of(a);
        longest = uint32_t(is_sharded() ? a.shard_bytes : a.bytes);
        warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        warps = gridDim.x * (blockDim.x / 32);
        slot_bytes = FORM::slot_bytes(a);
        slots = FORM::slots_offset(a) + (number & 1) * (a.nranks - 1) * slot_bytes;
        if constexpr (FORM::BATCHED) share_batch();
    }
    // Each warp has one of the batch's messages for each peer, or none. They lie behind each other in slots.
    __device__ void share_batch() {
        uint32_t message = warp / a.batch_share, units = (longest + FORM::UNIT_BYTES - 1) / FORM::UNIT_BYTES;
        uint64_t place = batch_place(a, message);
        warp -= message * a.batch_share;
        warps = a.batch_share;
        if (message >= a.batch) longest = 0;
        slots += message * units * FORM::WIRE_BYTES;
        first_sent = a.send + place * a.send_batch_stride;
        first_received = a.recv + place * a.recv_batch_stride;
    }
    __device__ uint64_t send() const {
        if constexpr (FORM::BATCHED) return first_sent;
        return a.send;
    }
    __device__ uint64_t recv() const {
        if constexpr (FORM::BATCHED) return first_received;
        return a.recv;
    }
    __device__ bool is_sharded() const { return a.shard_bytes != 0; }
    // End of a message whose length may be anything.
    __device__ uint32_t end() const {
        bool is_whole = !is_sharded() || (a.bytes & 3) == 0;
        return is_whole ? uint32_t(a.bytes) : uint32_t(a.bytes) % uint32_t(a.shard_bytes);
    }
    // This lane's part of what one rank sends another: in the second half of the slot, what it has combined or passes on.
    __device__ uint64_t slot(uint32_t in, uint32_t from, bool relayed, const Unit<FORM>& unit) const {
        return a.symmetric[in] + (slots + (peer_index(from, in) * slot_bytes + (relayed ? slot_bytes / 2 : 0) + unit.wire));
    }
    // Calls for each unit that this warp has; false: the call has said so.
    template <class CALL>
    __device__ bool each_unit(uint32_t bytes, CALL call) const {
        for (uint32_t unit = warp; unit * FORM::UNIT_BYTES < bytes; unit += warps) {
            if (!call(Unit<FORM>(unit, unit, 0))) return false;
        }
        return true;
    }
};

// How tenants' buffers are loaded and stored: so many bytes at a time.
enum class Width : uint32_t { ONE = 1, TWO = 2, FOUR = 4, EIGHT = 8 };

// `address` has the bits of the addresses of all messages, of which one may end at `end`; the others' lengths are multiples of 4.
template <class FORM>
__device__ inline Width width(uint64_t address, const Unit<FORM>& unit, uint32_t end) {
    bool has_end = unit.at <= end && end - unit.at < FORM::UNIT_BYTES;
    uint32_t bits = uint32_t(address) | (has_end ? end & 3 : 0);
    if ((bits & 1) != 0) return Width::ONE;
    if ((bits & 3) != 0) return Width::TWO;
    return (bits & 7) == 0 ? Width::EIGHT : Width::FOUR;
}

// A lane's part of a message in a tenant's buffer, as far as it is there, in few instructions, without a branch: loads of several messages are in
// flight together, and the lanes of a warp stay together, as those that store lines have to. `address` is the first part's.
template <Width WIDTH, class FORM>
__device__ inline void load_part_of(uint64_t address, const Unit<FORM>& unit, uint32_t bytes, uint4& data) {
    auto load = [&](uint64_t from, uint32_t at, uint32_t& low, uint32_t& high) {
        if constexpr (WIDTH == Width::EIGHT) {
            bool half = at + 4 <= bytes, whole = at + 8 <= bytes;
            load8_if(whole, from, low, high);
            load4_if(half && !whole, from, low);
        } else {
            constexpr uint32_t PIECE = uint32_t(WIDTH);
#pragma unroll
            for (uint32_t i = 0; i < 8; i += PIECE) {
                uint32_t piece = 0;
                load_piece_if<PIECE>(at + i + PIECE <= bytes, from + i, piece);
                (i < 4 ? low : high) |= piece << i % 4 * 8;
            }
        }
    };
    load(address, unit.first, data.x, data.y);
    load(address + FORM::BETWEEN_PARTS, unit.second, data.z, data.w);
}
template <Width WIDTH, class FORM>
__device__ inline void store_part_of(uint64_t address, const Unit<FORM>& unit, uint32_t bytes, uint4 data) {
    auto store = [&](uint64_t to, uint32_t at, uint32_t low, uint32_t high) {
        if constexpr (WIDTH == Width::EIGHT) {
            bool half = at + 4 <= bytes, whole = at + 8 <= bytes;
            store8_if(whole, to, low, high);
            store4_if(half && !whole, to, low);
        } else {
            constexpr uint32_t PIECE = uint32_t(WIDTH);
#pragma unroll
            for (uint32_t i = 0; i < 8; i += PIECE) {
                store_piece_if<PIECE>(at + i + PIECE <= bytes, to + i, (i < 4 ? low : high) >> i % 4 * 8);
            }
        }
    };
    store(address, unit.first, data.x, data.y);
    store(address + FORM::BETWEEN_PARTS, unit.second, data.z, data.w);
}

template <class FORM>
__device__ inline uint4 load_part_of(Width width, uint64_t address, const Unit<FORM>& unit, uint32_t bytes) {
    uint4 data = {};
    if (width == Width::EIGHT) {
        load_part_of<Width::EIGHT>(address, unit, bytes, data);
    } else if (width == Width::FOUR) {
        load_part_of<Width::FOUR>(address, unit, bytes, data);
    } else if (width == Width::TWO) {
        load_part_of<Width::TWO>(address, unit, bytes, data);
    } else {
        load_part_of<Width::ONE>(address, unit, bytes, data);
    }
    return data;
}
template <class FORM>
__device__ inline void store_part_of(Width width, uint64_t address, const Unit<FORM>& unit, uint32_t bytes, uint4 data) {
    if (width == Width::EIGHT) {
        store_part_of<Width::EIGHT>(address, unit, bytes, data);
    } else if (width == Width::FOUR) {
        store_part_of<Width::FOUR>(address, unit, bytes, data);
    } else if (width == Width::TWO) {
        store_part_of<Width::TWO>(address, unit, bytes, data);
    } else {
        store_part_of<Width::ONE>(address, unit, bytes, data);
    }
}

}  // namespace mccs
