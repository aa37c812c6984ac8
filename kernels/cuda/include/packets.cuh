// Small operations: data and flag go together, so that one trip over the link does all. In two forms: packets of sixteen bytes, half of
// them flags, and lines of 128 bytes, eight of them a flag.
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

// How many of the eight bytes at a place are there in a message of `bytes`.
__device__ inline uint32_t bytes_at(uint64_t bytes, uint64_t at) {
    return at < bytes ? uint32_t(min(uint64_t(8), bytes - at)) : 0;
}

// A form says how a warp moves a unit of data: each lane has sixteen bytes of it, in two parts of eight, so that enough loads are in flight
// and every store of the warp is one contiguous range.

// The parts of a lane are two packets, half a unit apart.
struct Packets {
    static constexpr uint32_t UNIT_BYTES = 512, WIRE_BYTES = 1024, LOADS = 2;
    static constexpr bool LOADS_AGAIN = false;
    static __device__ uint32_t first() { return threadIdx.x % 32 * 8; }
    static __device__ uint32_t second() { return first() + UNIT_BYTES / 2; }
    static __device__ uint64_t slot(const DirectArgs& a, uint32_t in, uint32_t from, bool relayed) {
        return packets_at(a, in, from) + (relayed ? a.packet_slot_bytes / 2 : 0);
    }
    static __device__ void store(uint64_t to, uint64_t left, uint4 data, uint32_t flag) {
        if (first() < left) store_packet(to + first() * 2, low(data), flag);
        if (second() < left) store_packet(to + second() * 2, high(data), flag);
    }
    static __device__ uint32_t part(uint32_t load) { return load == 0 ? first() : second(); }
    static __device__ bool expects(uint32_t load, uint64_t left) { return part(load) < left; }
    static __device__ uint4 load(uint64_t from, uint32_t load) { return load_packet(from + part(load) * 2); }
    static __device__ bool complete(uint4 packet, uint32_t flag) { return packet_complete(packet, flag); }
    static __device__ uint4 data(const uint4 (&packets)[LOADS]) {
        return make_uint4(packets[0].x, packets[0].z, packets[1].x, packets[1].z);
    }
    static __device__ bool all(bool complete) { return complete; }
    static __device__ bool any(bool exhausted) { return exhausted; }
};

// Eight lanes have a line, whose last part is the flag. One instruction of a warp stores it, which links and caches carry
// out as a whole where GPUs are joined by NVLink: nobody promises that, but NCCL's LL128 has relied on it from Volta on. So all of a warp store
// and load, also behind a message's end, and meet where they do: a compiler that sent flags and data different ways would tear lines.
struct Lines {
    static constexpr uint32_t UNIT_BYTES = 480, WIRE_BYTES = 512, LOADS = 1;
    // A load may see a flag and not yet what was stored with it; one that begins when the flag was seen does not.
    static constexpr bool LOADS_AGAIN = true;
    static __device__ uint32_t lane() { return threadIdx.x % 32; }
    static __device__ bool has_flag() { return lane() % 8 == 7; }
    static __device__ uint32_t first() { return lane() / 8 * (UNIT_BYTES / 4) + lane() % 8 * 16; }
    static __device__ uint32_t second() { return has_flag() ? ~0u : first() + 8; }
    static __device__ uint64_t slot(const DirectArgs& a, uint32_t in, uint32_t from, bool relayed) {
        return lines_at(a, in, from) + (relayed ? a.line_slot_bytes / 2 : 0);
    }
    static __device__ void store(uint64_t to, uint64_t left, uint4 data, uint32_t flag) {
        uint32_t z = has_flag() ? flag : data.z, w = has_flag() ? flag : data.w;
        if (left != 0) store_together(to + lane() * 16, make_uint4(data.x, data.y, z, w));
    }
    static __device__ bool expects(uint32_t, uint64_t left) { return left != 0; }
    static __device__ uint4 load(uint64_t from, uint32_t) { return load_together(from + lane() * 16); }
    static __device__ bool complete(uint4 part, uint32_t flag) { return !has_flag() || (part.z == flag && part.w == flag); }
    static __device__ uint4 data(const uint4 (&parts)[LOADS]) { return parts[0]; }
    // A line is loaded anew by all its lanes.
    static __device__ bool all(bool complete) { return __all_sync(~0u, complete); }
    static __device__ bool any(bool exhausted) { return __any_sync(~0u, exhausted); }
};

// Which units of a message a warp has.
template <class FORM>
struct Units {
    uint64_t first, stride;  // in bytes of data
    __device__ Units() {
        uint32_t warps = blockDim.x / 32, warp = blockIdx.x * warps + threadIdx.x / 32;
        first = uint64_t(warp) * FORM::UNIT_BYTES;
        stride = uint64_t(gridDim.x * warps) * FORM::UNIT_BYTES;
    }
};

// A lane's part of the unit at `unit` of a message of `bytes`, as far as it is there.
template <class FORM>
__device__ inline uint4 load_part_of(uint64_t from, uint64_t bytes, uint64_t unit) {
    uint64_t one = unit + FORM::first(), two = unit + FORM::second();
    uint32_t first = bytes_at(bytes, one), second = FORM::second() == ~0u ? 0 : bytes_at(bytes, two);
    uint64_t low = first != 0 ? load8(from + one, first) : 0;
    return vector(low, second != 0 ? load8(from + two, second) : 0);
}
template <class FORM>
__device__ inline void store_part_of(uint64_t to, uint64_t bytes, uint64_t unit, uint4 data) {
    uint64_t one = unit + FORM::first(), two = unit + FORM::second();
    uint32_t first = bytes_at(bytes, one), second = FORM::second() == ~0u ? 0 : bytes_at(bytes, two);
    if (first != 0) store8(to + one, low(data), first);
    if (second != 0) store8(to + two, high(data), second);
}

// What is left of a message at a unit.
__device__ inline uint64_t left_at(uint64_t bytes, uint64_t unit) { return unit < bytes ? bytes - unit : 0; }

template <class FORM>
__device__ inline uint64_t on_wire(uint64_t unit) {
    return unit / FORM::UNIT_BYTES * FORM::WIRE_BYTES;
}

// Sends each peer its message. All of a rank's sends come before its first wait.
template <class FORM>
__device__ void packets_send(const DirectArgs& a, Units<FORM> units) {
    if (a.send_mask == 0) return;
    bool shared = a.shard_bytes == 0 && a.send_stride == 0;
    uint64_t longest = a.shard_bytes != 0 ? a.shard_bytes : a.bytes;
    for (uint64_t unit = units.first; unit < longest; unit += units.stride) {
        uint4 data[RANKS_MAX];
        if (shared) {
            data[0] = load_part_of<FORM>(a.send, a.bytes, unit);
        } else {
#pragma unroll
            for (uint32_t peer = 0; peer < RANKS_MAX; peer++) {
                if (in(a.send_mask, peer)) data[peer] = load_part_of<FORM>(send_part(a, peer), part_bytes(a, peer), unit);
            }
        }
#pragma unroll 1
        for (uint32_t left = a.send_mask; left != 0; left &= left - 1) {
            uint32_t peer = __ffs(left) - 1;
            uint64_t to = FORM::slot(a, peer, a.rank, false) + on_wire<FORM>(unit);
            FORM::store(to, left_at(part_bytes(a, peer), unit), data[shared ? 0 : peer], number_of(a));
        }
    }
}

// What this rank has for itself.
template <class FORM>
__device__ void packets_own(const DirectArgs& a, Units<FORM> units) {
    bool sharded = a.shard_bytes != 0;
    uint64_t from = sharded ? a.send : send_part(a, a.rank), to = sharded ? a.recv : recv_part(a, a.rank);
    if ((a.flags & OWN) == 0 || from == to) return;
    for (uint64_t unit = units.first; unit < a.bytes; unit += units.stride) {
        store_part_of<FORM>(to, a.bytes, unit, load_part_of<FORM>(from, a.bytes, unit));
    }
}

// Gives this rank's result to whom it is for: in the second halves of slots.
template <class FORM>
__device__ inline void packets_relay(const DirectArgs& a, uint64_t unit, uint4 data) {
#pragma unroll 1
    for (uint32_t left = a.relay_mask; left != 0; left &= left - 1) {
        uint64_t to = FORM::slot(a, __ffs(left) - 1, a.rank, true) + on_wire<FORM>(unit);
        FORM::store(to, left_at(part_bytes(a, a.rank), unit), data, number_of(a));
    }
}

// Waits for a lane's part of the messages of all ranks in `mask`: their loads are in flight together. False: aborted.
template <class FORM, class BYTES>
__device__ bool packets_await(const DirectArgs& a, uint32_t mask, bool relayed, uint64_t unit, BYTES bytes,
                              uint4 (&data)[RANKS_MAX]) {
    Patience patience(a.abort_word);
    uint4 arrivals[RANKS_MAX][FORM::LOADS];
    uint32_t expected[FORM::LOADS] = {};
    for (uint32_t s = 0; s < a.nranks; s++) {
#pragma unroll
        for (uint32_t l = 0; l < FORM::LOADS; l++) {
            expected[l] |= uint32_t(in(mask, s) && FORM::expects(l, left_at(bytes(s), unit))) << s;
        }
    }
    for (;;) {
        bool complete = true;
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
            uint64_t from = FORM::slot(a, a.rank, s, relayed) + on_wire<FORM>(unit);
#pragma unroll
            for (uint32_t l = 0; l < FORM::LOADS; l++) {
                if (in(expected[l], s)) arrivals[s][l] = FORM::load(from, l);
            }
        }
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
#pragma unroll
            for (uint32_t l = 0; l < FORM::LOADS; l++) {
                complete &= !in(expected[l], s) || FORM::complete(arrivals[s][l], number_of(a));
            }
        }
        if (FORM::all(complete)) break;
        if (FORM::any(patience.exhausted())) return false;
    }
    if (FORM::LOADS_AGAIN) {
#pragma unroll
        for (uint32_t s = 0; s < RANKS_MAX; s++) {
            uint64_t from = FORM::slot(a, a.rank, s, relayed) + on_wire<FORM>(unit);
            if (in(expected[0], s)) arrivals[s][0] = FORM::load(from, 0);
        }
    }
#pragma unroll
    for (uint32_t s = 0; s < RANKS_MAX; s++) data[s] = FORM::data(arrivals[s]);
    return true;
}

// Takes the messages of `mask`, in the first or second halves of slots: a source's message is `bytes(source)` long, goes where `to(source)`
// says, and on to `then`. False: aborted.
template <class FORM, class TO, class BYTES, class THEN>
__device__ bool packets_take(const DirectArgs& a, Units<FORM> units, uint32_t mask, bool relayed, TO to, BYTES bytes, THEN then) {
    if (mask == 0) return true;
    uint64_t longest = a.shard_bytes != 0 ? a.shard_bytes : a.bytes;
    for (uint64_t unit = units.first; unit < longest; unit += units.stride) {
        uint4 data[RANKS_MAX];
        if (!packets_await<FORM>(a, mask, relayed, unit, bytes, data)) return false;
#pragma unroll 1
        for (uint32_t left = mask; left != 0; left &= left - 1) {
            uint32_t s = __ffs(left) - 1;
            store_part_of<FORM>(to(s), bytes(s), unit, data[s]);
            then(unit, data[s]);
        }
    }
    return true;
}

template <class FORM>
__device__ bool packets_out(const DirectArgs& a, Units<FORM> units) {
    return packets_take<FORM>(
        a, units, a.out_mask, true, [&](uint32_t s) { return recv_part(a, s); }, [&](uint32_t s) { return part_bytes(a, s); },
        [](uint64_t, uint4) {});
}

// In an operation with heads, block 0 sends and awaits them.
__device__ inline void packets_begin(const DirectArgs& a) {
    if ((a.flags & HEADS) != 0 && blockIdx.x == 0) send_head(a, threadIdx.x);
}
__device__ inline bool packets_end(const DirectArgs& a) {
    uint64_t scalar;
    return (a.flags & HEADS) == 0 || blockIdx.x != 0 || wait_head(a, threadIdx.x, scalar);
}

template <class FORM>
__device__ void packets_copy(const DirectArgs& a) {
    Units<FORM> units;
    packets_begin(a);
    packets_send(a, units);
    stamp_begin(a);
    packets_own(a, units);
    bool relays = a.shard_bytes != 0;
    bool ok = packets_take<FORM>(
        a, units, a.recv_mask, false, [&](uint32_t s) { return recv_part(a, relays ? a.rank : s); },
        [&](uint32_t) { return part_bytes(a, a.rank); },
        [&](uint64_t unit, uint4 data) { packets_relay<FORM>(a, unit, data); });
    ok = ok && packets_out(a, units) && packets_end(a);
    finish(a, !ok);
}

// Combines the messages of all ranks, in order, and passes the result on. False: aborted.
template <class FORM, class T>
__device__ bool packets_combine(const DirectArgs& a, Units<FORM> units, const uint64_t* scalars) {
    uint64_t own = send_part(a, a.rank), result = recv_part(a, a.rank), bytes = part_bytes(a, a.rank);
    for (uint64_t unit = units.first; unit < bytes; unit += units.stride) {
        uint4 data[RANKS_MAX];
        uint4 mine = load_part_of<FORM>(own, bytes, unit);
        if (!packets_await<FORM>(a, a.recv_mask, false, unit, [&](uint32_t) { return bytes; }, data)) return false;
        data[a.rank] = mine;
        VectorFold<T> fold;
        fold.first(data[0], scalars);
#pragma unroll 1
        for (uint32_t s = 1; s < a.nranks; s++) {
            fold.next(Op(a.op), data[s], scalars != nullptr ? scalars + s : nullptr);
        }
        uint4 combined = fold.result(a.divisor);
        if (a.flags & KEEP) store_part_of<FORM>(result, bytes, unit, combined);
        packets_relay<FORM>(a, unit, combined);
    }
    return true;
}

// All ranks', in shared memory.
using Scalars = uint64_t[RANKS_MAX];

// False: aborted.
__device__ inline bool gather_scalars(const DirectArgs& a, Scalars& scalars) {
    bool ok = true;
    if ((a.flags & SCALED) != 0) {
        if (threadIdx.x < RANKS_MAX) ok = wait_head(a, threadIdx.x, scalars[threadIdx.x]);
        ok = !__syncthreads_or(!ok);
    }
    return ok;
}

template <class FORM, class T>
__device__ void packets_reduce(const DirectArgs& a) {
    IN_SHARED_MEMORY(Scalars, scalars);
    Units<FORM> units;
    packets_begin(a);
    packets_send(a, units);
    stamp_begin(a);
    bool ok = gather_scalars(a, scalars);
    if (ok && a.recv_mask != 0) ok = packets_combine<FORM, T>(a, units, (a.flags & SCALED) != 0 ? scalars : nullptr);
    ok = ok && packets_out(a, units) && packets_end(a);
    finish(a, !ok);
}

}  // namespace mccs
