// LL and LL128 kernels for short collectives: what a warp sends, awaits, combines and passes on,
// unit by unit (ll_units.cuh).
#pragma once
#include "ll_units.cuh"

namespace mccs {

template <Width WIDTH, uint32_t RANKS, class FORM>
__device__ inline void load_row(const Exchange<FORM>& e, const Unit<FORM>& unit, bool shared, bool keeps, uint4 (&row)[RANKS], uint4& own) {
    const DirectArgs& a = e.a;
    uint64_t from = e.send() + unit.first;
    load_part_of<WIDTH>(from + a.own.at, unit, keeps || shared ? a.own.bytes : 0, own);
#pragma unroll
    for (uint32_t s = 0; s < RANKS; s++) {
        row[s] = make_uint4(0, 0, 0, 0);
        load_part_of<WIDTH>(from + a.sends[s].at, unit, shared ? 0 : a.sends[s].bytes, row[s]);
    }
}

// Sends each peer a unit of its message, and, where it `keeps` one, this rank its own. `shared`: all messages are one.
template <uint32_t RANKS, class FORM>
__device__ inline void ll_send_unit(const Exchange<FORM>& e, const Unit<FORM>& unit, bool shared, bool keeps) {
    const DirectArgs& a = e.a;
    uint64_t from = e.send() + unit.first;
    uint4 own = {};
    Width loads = width(e.send() | a.send_stride, unit, e.end());
    if (loads == Width::ONE || loads == Width::TWO) {
#pragma unroll 1
        for (uint32_t left = a.send_mask; left != 0; left &= left - 1) {
            uint32_t peer = __ffs(left) - 1;
            uint4 data = load_part_of(loads, from + a.sends[peer].at, unit, a.sends[peer].bytes);
            store_unit(e.slot(peer, a.rank, false, unit), unit, a.sends[peer].bytes, data, e.number);
        }
        if (keeps) own = load_part_of(loads, from + a.own.at, unit, a.own.bytes);
    } else {
        uint4 row[RANKS];
        if (loads == Width::EIGHT) {
            load_row<Width::EIGHT>(e, unit, shared, keeps, row, own);
        } else {
            load_row<Width::FOUR>(e, unit, shared, keeps, row, own);
        }
#pragma unroll
        for (uint32_t s = 0; s < RANKS; s++) {
            if (shared) row[s] = own;
            store_unit(e.slot(s, a.rank, false, unit), unit, a.sends[s].bytes, row[s], e.number);
        }
    }
    if (keeps) {
        Width stores = width(e.recv() | a.recv_stride, unit, e.end());
        store_part_of(stores, e.recv() + a.result.at + unit.first, unit, a.own.bytes, own);
    }
}

// Unit that a root that adds its own data sends in a pipeline: that its own place for a unit is free, without data, by one
// lane.
template <class FORM>
__device__ inline void ll_send_credit(const Exchange<FORM>& e, const Unit<FORM>& unit) {
    const DirectArgs& a = e.a;
    uint4 credit = make_uint4(0, 0, e.number, unit.lap);
#pragma unroll 1
    for (uint32_t left = a.send_mask; left != 0; left &= left - 1) {
        uint32_t peer = __ffs(left) - 1;
        store_volatile_if(threadIdx.x % 32 == CREDIT_LANE && unit.at < a.sends[peer].bytes, e.slot(peer, a.rank, false, unit), credit);
    }
}

// Sends all messages. All of a rank's sends come before its first wait.
template <uint32_t RANKS, class FORM>
__device__ void ll_send(const Exchange<FORM>& e) {
    const DirectArgs& a = e.a;
    bool keeps = (a.flags & OWN) != 0 && !e.is_sharded() && a.send + a.own.at != a.recv + a.result.at;
    bool shared = !e.is_sharded() && a.send_stride == 0;
    if (a.send_mask == 0 && !keeps) return;
    e.each_unit(e.longest, [&](const Unit<FORM>& unit) {
        ll_send_unit<RANKS>(e, unit, shared, keeps);
        return true;
    });
}

// The part that a root that sends shards has for itself: the whole buffer.
template <class FORM>
__device__ void ll_own(const Exchange<FORM>& e) {
    const DirectArgs& a = e.a;
    if ((a.flags & OWN) == 0 || !e.is_sharded() || a.send == a.recv) return;
    uint32_t bytes = uint32_t(a.bytes);
    e.each_unit(bytes, [&](const Unit<FORM>& unit) {
        uint4 data = load_part_of(width(a.send, unit, bytes), a.send + unit.first, unit, bytes);
        store_part_of(width(a.recv, unit, bytes), a.recv + unit.first, unit, bytes, data);
        return true;
    });
}

// Gives this rank's result to whom it is for: in the second halves of slots.
template <class FORM>
__device__ inline void ll_relay(const Exchange<FORM>& e, const Unit<FORM>& unit, uint4 data) {
#pragma unroll 1
    for (uint32_t left = e.a.relay_mask; left != 0; left &= left - 1) {
        store_unit(e.slot(__ffs(left) - 1, e.a.rank, true, unit), unit, e.a.own.bytes, data, e.number);
    }
}

// Waits for a lane's part of all messages: their loads are in flight together. Data from rank `credit` is one lane's. False: aborted.
template <uint32_t RANKS, class FORM>
__device__ bool ll_await(const Exchange<FORM>& e, const Part (&messages)[RANKS_MAX], bool relayed, const Unit<FORM>& unit,
                              uint4 (&row)[RANKS], uint32_t credit = RANKS_MAX) {
    Patience patience(e.a.abort_word);
    uint4 parts[RANKS][FORM::LOADS];
#pragma unroll
    for (uint32_t s = 0; s < RANKS; s++) {
#pragma unroll
        for (uint32_t l = 0; l < FORM::LOADS; l++) parts[s][l] = FORM::empty(e.number, unit.lap);
    }
    auto load = [&] {
#pragma unroll
        for (uint32_t s = 0; s < RANKS; s++) {
            bool is_there = s != credit || threadIdx.x % 32 == CREDIT_LANE;
            load_unit(e.slot(e.a.rank, s, relayed, unit), unit, is_there ? messages[s].bytes : 0, parts[s]);
        }
    };
    for (;;) {
        load();
        uint32_t missing = 0;
#pragma unroll
        for (uint32_t s = 0; s < RANKS; s++) {
#pragma unroll
            for (uint32_t l = 0; l < FORM::LOADS; l++) missing |= FORM::missing(parts[s][l], e.number, unit.lap);
        }
        if (FORM::all(missing == 0)) break;
        if (FORM::any(patience.exhausted())) return false;
    }
    if (FORM::LOADS_AGAIN) load();
#pragma unroll
    for (uint32_t s = 0; s < RANKS; s++) row[s] = FORM::data(parts[s]);
    return true;
}

// One of a row, where the rank is not known to the compiler: a row stays in registers.
template <uint32_t RANKS>
__device__ inline uint4 pick(const uint4 (&row)[RANKS], uint32_t rank) {
    uint4 picked = row[0];
#pragma unroll
    for (uint32_t s = 1; s < RANKS; s++) {
        bool is = s == rank;
        picked = make_uint4(is ? row[s].x : picked.x, is ? row[s].y : picked.y, is ? row[s].z : picked.z, is ? row[s].w : picked.w);
    }
    return picked;
}

// Takes a unit of messages to the receive buffer, from the first or second halves of slots, and tells `then` of it. False: aborted.
template <uint32_t RANKS, class FORM, class THEN>
__device__ inline bool ll_take_unit(const Exchange<FORM>& e, const Part (&messages)[RANKS_MAX], bool relayed, const Unit<FORM>& unit,
                                         THEN then) {
    uint64_t to = e.recv() + unit.first;
    uint4 row[RANKS];
    if (!ll_await(e, messages, relayed, unit, row)) return false;
    then(unit, row);
    Width stores = width(e.recv() | e.a.recv_stride, unit, e.end());
    auto store = [&](auto store_one) {
#pragma unroll
        for (uint32_t s = 0; s < RANKS; s++) store_one(to + messages[s].at, messages[s].bytes, row[s]);
    };
    if (stores == Width::EIGHT) {
        store([&](uint64_t at, uint32_t bytes, uint4 data) { store_part_of<Width::EIGHT>(at, unit, bytes, data); });
    } else if (stores == Width::FOUR) {
        store([&](uint64_t at, uint32_t bytes, uint4 data) { store_part_of<Width::FOUR>(at, unit, bytes, data); });
    } else {
#pragma unroll 1
        for (uint32_t s = 0; s < e.a.nranks; s++) store_part_of(stores, to + messages[s].at, unit, messages[s].bytes, pick(row, s));
    }
    return true;
}

template <uint32_t RANKS, class FORM>
__device__ inline bool ll_out_unit(const Exchange<FORM>& e, const Unit<FORM>& unit) {
    return ll_take_unit<RANKS>(e, e.a.outs, true, unit, [](const Unit<FORM>&, uint4 (&)[RANKS]) {});
}

// The root's part of the shards of others.
template <Width WIDTH, uint32_t RANKS, class FORM>
__device__ inline void load_outs(const DirectArgs& a, const Unit<FORM>& unit, uint4 (&row)[RANKS]) {
#pragma unroll
    for (uint32_t s = 0; s < RANKS; s++) {
        row[s] = make_uint4(0, 0, 0, 0);
        load_part_of<WIDTH>(a.send + a.outs[s].at + unit.first, unit, a.outs[s].bytes, row[s]);
    }
}

// The same of a root that adds its own data.
template <class T, uint32_t RANKS, class FORM>
__device__ inline bool ll_out_last_unit(const Exchange<FORM>& e, const Unit<FORM>& unit, const uint64_t* scalars) {
    const DirectArgs& a = e.a;
    const uint64_t* scalar = scalars != nullptr ? scalars + a.rank : nullptr;
    Width loads = width(a.send, unit, e.end());
    uint4 own[RANKS];
    if (loads == Width::EIGHT) {
        load_outs<Width::EIGHT>(a, unit, own);
    } else if (loads == Width::FOUR) {
        load_outs<Width::FOUR>(a, unit, own);
    } else {
        load_outs<Width::ONE>(a, unit, own);
    }
    return ll_take_unit<RANKS>(e, a.outs, true, unit, [&](const Unit<FORM>&, uint4 (&row)[RANKS]) {
#pragma unroll 1
        for (uint32_t s = 0; s < a.nranks; s++) {
            VectorFold<T> fold;
            fold.first(pick(row, s), nullptr);
            fold.next(Op(a.op), pick(own, s), scalar);
            uint4 result = fold.result(a.divisor);
#pragma unroll
            for (uint32_t t = 0; t < RANKS; t++) row[t] = t == s ? result : row[t];
        }
    });
}

template <uint32_t RANKS, class FORM>
__device__ bool ll_out(const Exchange<FORM>& e) {
    return e.a.out_mask == 0 || e.each_unit(e.longest, [&](const Unit<FORM>& unit) { return ll_out_unit<RANKS>(e, unit); });
}

// In an operation with heads, block 0 sends and awaits them.
__device__ inline void ll_begin(const DirectArgs& a) {
    if ((a.flags & HEADS) != 0 && blockIdx.x == 0) send_head(a, threadIdx.x);
}
__device__ inline bool ll_end(const DirectArgs& a) {
    uint64_t scalar;
    return (a.flags & HEADS) == 0 || blockIdx.x != 0 || wait_head(a, threadIdx.x, scalar);
}

template <uint32_t RANKS, class FORM>
__device__ void ll_copy(const Exchange<FORM>& e) {
    const DirectArgs& a = e.a;
    ll_begin(a);
    ll_send<RANKS>(e);
    stamp_begin(a);
    ll_own(e);
    auto pass_on = [&](const Unit<FORM>& unit, uint4 (&row)[RANKS]) {
        if (a.relay_mask == 0) return;
        uint4 shard = {};  // the only one that is there: from the root
#pragma unroll
        for (uint32_t s = 0; s < RANKS; s++) {
            shard = make_uint4(shard.x | row[s].x, shard.y | row[s].y, shard.z | row[s].z, shard.w | row[s].w);
        }
        ll_relay(e, unit, shard);
    };
    bool ok = a.recv_mask == 0 || e.each_unit(e.longest, [&](const Unit<FORM>& unit) {
        return ll_take_unit<RANKS>(e, a.recvs, false, unit, pass_on);
    });
    ok = ok && ll_out<RANKS>(e) && ll_end(a);
    finish(a, !ok);
}

// Combines a unit of the messages of all ranks, in order, and passes the result on. LAST: all but those of a root that adds its own data. False: aborted.
template <class T, uint32_t RANKS, bool LAST, class FORM>
__device__ inline bool ll_combine_unit(const Exchange<FORM>& e, const Unit<FORM>& unit, const uint64_t* scalars) {
    const DirectArgs& a = e.a;
    uint32_t credit = LAST && (a.flags & ROOT_LAST) != 0 ? a.unsharded : RANKS_MAX, first = LAST && credit == 0 ? 1 : 0;
    Width loads = width(e.send() | a.own.at, unit, e.end()), stores = width(e.recv() | a.result.at, unit, e.end());
    uint4 own = load_part_of(loads, e.send() + a.own.at + unit.first, unit, a.own.bytes);
    uint4 row[RANKS];
    if (!ll_await(e, a.recvs, false, unit, row, credit)) return false;
    auto contribution = [&](uint32_t rank) { return rank == a.rank ? own : pick(row, rank); };
    VectorFold<T> fold;
    fold.first(contribution(first), scalars != nullptr ? scalars + first : nullptr);
#pragma unroll 1
    for (uint32_t s = first + 1; s < a.nranks; s++) {
        if (LAST && s == credit) continue;
        fold.next(Op(a.op), contribution(s), scalars != nullptr ? scalars + s : nullptr);
    }
    uint4 combined = fold.result(LAST && credit != RANKS_MAX ? 0 : a.divisor);
    if (a.flags & KEEP) store_part_of(stores, e.recv() + a.result.at + unit.first, unit, a.own.bytes, combined);
    ll_relay(e, unit, combined);
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

template <class T, uint32_t RANKS, class FORM>
__device__ void ll_reduce(const Exchange<FORM>& e) {
    IN_SHARED_MEMORY(Scalars, scalars);
    const DirectArgs& a = e.a;
    ll_begin(a);
    ll_send<RANKS>(e);
    stamp_begin(a);
    bool ok = gather_scalars(a, scalars);
    if (ok && a.recv_mask != 0) {
        const uint64_t* factors = (a.flags & SCALED) != 0 ? scalars : nullptr;
        ok = e.each_unit(e.longest, [&](const Unit<FORM>& unit) { return ll_combine_unit<T, RANKS, false>(e, unit, factors); });
    }
    ok = ok && ll_out<RANKS>(e) && ll_end(a);
    finish(a, !ok);
}

// Two shots of more than slots have room for, or than is to be sent before anything comes back: a warp sends a unit, combines the one
// before, and takes out the one before that. A place in slots is written again UNITS_A_LAP units later, and nobody has to say that it is
// free: who sends unit u has combined u - 2 and taken out u - 3, for which all others had sent as much (u - 2 is not the last, and only in
// the last are messages of different lengths), before which they had combined u - 4 and taken out u - 5; and who passes u on has got it
// from the rank that takes it out, which had taken out u - 3 by then. A root that adds its own data sends a credit in the place of each
// unit. Loaded data is used before the next is stored, so that a late load does not see it. False: aborted.
template <class T, uint32_t RANKS, class FORM>
__device__ bool ll_pass(const Exchange<FORM>& e, const uint64_t* scalars) {
    const DirectArgs& a = e.a;
    auto nth = [&](uint32_t n) { return Unit<FORM>(e.warp + n * e.warps, e.warp + n % UNITS_A_LAP * e.warps, n / UNITS_A_LAP); };
    uint32_t units = (e.longest + FORM::UNIT_BYTES - 1) / FORM::UNIT_BYTES;
    uint32_t count = e.warp < units ? (units - e.warp + e.warps - 1) / e.warps : 0;
    bool adds_own = (a.flags & ROOT_LAST) != 0 && a.recv_mask == 0;
    for (uint32_t n = 0; n < count + 2; n++) {
        if (n < count) adds_own ? ll_send_credit(e, nth(n)) : ll_send_unit<RANKS>(e, nth(n), false, false);
        if (a.recv_mask != 0 && n - 1 < count && !ll_combine_unit<T, RANKS, true>(e, nth(n - 1), scalars)) return false;
        if (a.out_mask == 0 || n < 2) continue;
        if (!(adds_own ? ll_out_last_unit<T, RANKS>(e, nth(n - 2), scalars) : ll_out_unit<RANKS>(e, nth(n - 2)))) return false;
    }
    return true;
}

template <class T, uint32_t RANKS, class FORM>
__device__ void ll_pipeline(const Exchange<FORM>& e) {
    IN_SHARED_MEMORY(Scalars, scalars);
    const DirectArgs& a = e.a;
    ll_begin(a);
    stamp_begin(a);
    bool ok = gather_scalars(a, scalars) && ll_pass<T, RANKS>(e, (a.flags & SCALED) != 0 ? scalars : nullptr) && ll_end(a);
    finish(a, !ok);
}

// Few ranks have code of their own, with nothing for ranks that are not there.
template <class FORM>
__device__ void ll_copy(const DirectArgs& a) {
    Exchange<FORM> e(a);
    a.nranks <= 2 ? ll_copy<2>(e) : a.nranks <= 4 ? ll_copy<4>(e) : ll_copy<RANKS_MAX>(e);
}
template <class FORM, class T>
__device__ void ll_reduce(const DirectArgs& a) {
    Exchange<FORM> e(a);
    a.nranks <= 2 ? ll_reduce<T, 2>(e) : a.nranks <= 4 ? ll_reduce<T, 4>(e) : ll_reduce<T, RANKS_MAX>(e);
}

// Batches: of any number of ranks.
template <class T>
__device__ void ll_batch_reduce(const DirectArgs& a) {
    ll_reduce<T, RANKS_MAX>(Exchange<Ll128Batch>(a));
}
__device__ inline void ll_batch_copy(const DirectArgs& a) { ll_copy<RANKS_MAX>(Exchange<Ll128Batch>(a)); }

// For three or four ranks (kernels/src/cuda/launch.rs).
template <class FORM, class T>
__device__ void ll_pipeline(const DirectArgs& a) {
    ll_pipeline<T, 4>(Exchange<FORM>(a));
}

}  // namespace mccs
