// A processor as kernels see a GPU: every thread of a kernel is a fiber, and one of them runs at a time. Which, a seed decides, and it may be another one at every
// instruction by which GPUs see each other's memory. Included in the place of kernels/cuda/include/instructions.cuh.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

// Keywords of the compiler of kernels. After all headers, which have these names for it as well.
#undef __device__
#undef __global__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace simulated {

// The calling fiber's place: what threadIdx and the like give.
struct Index {
    uint32_t x;
};
Index thread_index();
Index block_index();
Index block_threads();
Index grid_blocks();

// Words of threads that have met.
struct Met {
    bool any, all;
};
// Waits for as many threads at that barrier of the block.
Met meet(uint32_t barrier, uint32_t threads, bool says);
// Waits for all of the warp.
Met meet_warp(bool says);
// The same; the last to come does `once` for everybody, by the places where the others have put theirs, by lane.
void together(void* own, void (*once)(void* const (&of)[32], uint32_t lanes));

// May run another thread; `pass_turn` does.
void step();
void pass_turn();
uint64_t steps();
uint32_t random_below(uint32_t bound);

constexpr uint32_t LINE_BYTES = 128;

// Memory of the calling thread's block.
void* shared_memory(const void* key, size_t bytes);
template <class T>
T& in_shared_memory() {
    static const char key = 0;
    return *static_cast<T*>(shared_memory(&key, sizeof(T)));
}

// Memory as other GPUs see it: what a block stores comes there in any order, and late, but before what one of its threads stores behind a fence. The block itself sees it at
// once. Memory that is loaded or stored at once is aligned to its length: elsewhere a GPU fails.
void get(uint64_t from, void* value, uint32_t bytes);
void put(uint64_t to, const void* value, uint32_t bytes);
// All of the block's is there.
void settle();
void check_aligned(uint64_t at, uint32_t bytes);
template <class T>
T load(uint64_t from) {
    T value;
    get(from, &value, sizeof(T));
    return value;
}
template <class T>
void store(uint64_t to, T value) {
    put(to, &value, sizeof(T));
}
template <class TO, class FROM>
TO bits(FROM from) {
    static_assert(sizeof(TO) == sizeof(FROM));
    TO to;
    std::memcpy(&to, &from, sizeof(TO));
    return to;
}

}  // namespace simulated

#define threadIdx (simulated::thread_index())
#define blockIdx (simulated::block_index())
#define blockDim (simulated::block_threads())
#define gridDim (simulated::grid_blocks())
#define IN_SHARED_MEMORY(type, name) type& name = simulated::in_shared_memory<type>()

using std::max;
using std::min;

constexpr uint32_t ALL_THREADS = 0;  // the number of a block's own barrier
inline void __syncthreads() { simulated::meet(ALL_THREADS, blockDim.x, false); }
inline bool __syncthreads_or(bool says) { return simulated::meet(ALL_THREADS, blockDim.x, says).any; }
inline void __threadfence_system() {
    simulated::step();
    simulated::settle();
}
inline void __syncwarp() { simulated::meet_warp(false); }
inline bool __any_sync(uint32_t, bool says) { return simulated::meet_warp(says).any; }
inline bool __all_sync(uint32_t, bool says) { return simulated::meet_warp(says).all; }
inline uint32_t __shfl_sync(uint32_t, uint32_t value, uint32_t) {
    // From lane 0, the only one that kernels ask for.
    simulated::together(&value, [](void* const(&of)[32], uint32_t lanes) {
        for (uint32_t lane = 1; lane < lanes; lane++) *static_cast<uint32_t*>(of[lane]) = *static_cast<uint32_t*>(of[0]);
    });
    return value;
}
inline uint32_t __ffs(uint32_t value) { return uint32_t(__builtin_ffs(int(value))); }
inline uint32_t __popc(uint32_t value) { return uint32_t(__builtin_popcount(value)); }
template <class T>
T __ldg(const T* from) {
    simulated::step();
    return *from;  // what is there for as long as the kernel runs
}
template <class T, class V>
T atomicAdd(T* to, V value) {
    simulated::step();
    T before = *to;
    *to = T(before + value);
    return before;
}
template <class T, class V>
T atomicMax(T* to, V value) {
    simulated::step();
    T before = *to;
    *to = max(before, T(value));
    return before;
}
template <class T>
T atomicExch(T* to, T value) {
    simulated::step();
    return std::exchange(*to, value);
}
inline float __uint_as_float(uint32_t v) { return simulated::bits<float>(v); }
inline uint32_t __float_as_uint(float v) { return simulated::bits<uint32_t>(v); }
inline double __longlong_as_double(int64_t v) { return simulated::bits<double>(v); }
inline int64_t __double_as_longlong(double v) { return simulated::bits<int64_t>(v); }

namespace mccs {

inline uint4 load_aligned(uint64_t from) {
    simulated::step();
    return simulated::load<uint4>(from);
}
inline uint4 load_fresh(uint64_t from) { return load_aligned(from); }
inline void store_aligned(uint64_t to, uint4 v) {
    simulated::step();
    simulated::store(to, v);
}
inline void fence_system() {
    simulated::step();
    simulated::settle();
}
inline uint64_t load_acquire(uint64_t from) {
    simulated::step();
    return simulated::load<uint64_t>(from);
}
inline void store_relaxed(uint64_t to, uint64_t v) {
    simulated::step();
    simulated::store(to, v);
}
inline void store_release(uint64_t to, uint64_t v) {
    simulated::settle();
    store_relaxed(to, v);
}
template <class WORD>
WORD load_volatile(uint64_t from) {
    simulated::step();
    return simulated::load<WORD>(from);
}
template <class WORD>
void store_volatile(uint64_t to, WORD v) {
    simulated::step();
    simulated::store(to, v);
}
inline void add_relaxed(uint64_t to, uint64_t v) {
    simulated::step();
    atomicAdd(reinterpret_cast<uint64_t*>(to), v);
}
inline void add_release(uint64_t to, uint64_t v) {
    simulated::settle();
    add_relaxed(to, v);
}
inline uint64_t global_ns() { return simulated::steps(); }
constexpr uint32_t TURNS_BETWEEN_ABORT_POLLS = 1000;
inline void pass_turn() { simulated::pass_turn(); }

// Seen in parts of eight bytes.
inline void store_volatile(uint64_t to, uint4 v) {
    simulated::check_aligned(to, 16);
    simulated::step();
    simulated::store(to, v.x | uint64_t(v.y) << 32);
    simulated::step();
    simulated::store(to + 8, v.z | uint64_t(v.w) << 32);
}
inline uint4 load_volatile(uint64_t from) {
    simulated::check_aligned(from, 16);
    simulated::step();
    uint64_t low = simulated::load<uint64_t>(from);
    simulated::step();
    uint64_t high = simulated::load<uint64_t>(from + 8);
    return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
}

inline void load8_if(bool there, uint64_t from, uint32_t& low, uint32_t& high) {
    if (!there) return;
    simulated::check_aligned(from, 8);
    simulated::step();
    uint64_t v = simulated::load<uint64_t>(from);
    low = uint32_t(v), high = uint32_t(v >> 32);
}
inline void load4_if(bool there, uint64_t from, uint32_t& v) {
    if (!there) return;
    simulated::check_aligned(from, 4);
    simulated::step();
    v = simulated::load<uint32_t>(from);
}
template <uint32_t BYTES>
void load_piece_if(bool there, uint64_t from, uint32_t& v) {
    if (!there) return;
    simulated::step();
    v = BYTES == 4 ? simulated::load<uint32_t>(from) : BYTES == 2 ? simulated::load<uint16_t>(from) : simulated::load<uint8_t>(from);
}
inline void store8_if(bool there, uint64_t to, uint32_t low, uint32_t high) {
    if (!there) return;
    simulated::check_aligned(to, 8);
    simulated::step();
    simulated::store(to, low | uint64_t(high) << 32);
}
inline void store4_if(bool there, uint64_t to, uint32_t v) {
    if (!there) return;
    simulated::check_aligned(to, 4);
    simulated::step();
    simulated::store(to, v);
}
template <uint32_t BYTES>
void store_piece_if(bool there, uint64_t to, uint32_t v) {
    if (!there) return;
    simulated::step();
    BYTES == 4 ? simulated::store(to, v) : BYTES == 2 ? simulated::store(to, uint16_t(v)) : simulated::store(to, uint8_t(v));
}
inline void store_volatile_if(bool there, uint64_t to, uint4 v) {
    if (there) store_volatile(to, v);
}
inline void load_volatile_if(bool there, uint64_t from, uint4& v) {
    if (there) v = load_volatile(from);
}

struct Line {
    uint64_t at;
    uint4 v;
};
// Whether the lanes of a warp are together is as it happens: the same for all.
inline bool are_together() {
    bool together = true;
    simulated::together(&together, [](void* const(&of)[32], uint32_t lanes) {
        bool all = simulated::random_below(8) != 0;
        for (uint32_t lane = 0; lane < lanes; lane++) *static_cast<bool*>(of[lane]) = all;
    });
    return together;
}
// Comes to memory as a whole, and is loaded part by part.
inline bool store_together_if(bool there, uint64_t to, uint4 v) {
    if (!are_together()) return false;
    if (!there) return true;
    Line own{to, v};
    simulated::together(&own, [](void* const(&of)[32], uint32_t lanes) {
        constexpr uint32_t LANES = simulated::LINE_BYTES / sizeof(uint4);
        for (uint32_t first = 0; first < lanes; first += LANES) {
            uint4 line[LANES];
            for (uint32_t lane = 0; lane < LANES; lane++) line[lane] = static_cast<Line*>(of[first + lane])->v;
            simulated::put(static_cast<Line*>(of[first])->at, line, sizeof(line));
        }
    });
    simulated::step();
    return true;
}
// All lanes meet; those for which the condition does not hold load nothing.
inline void load_together_if(bool there, uint64_t from, uint4& v) {
    Line own{there ? from : 0, {}};
    simulated::together(&own, [](void* const(&of)[32], uint32_t lanes) {
        uint32_t first = simulated::random_below(lanes), late = simulated::random_below(lanes);
        for (uint32_t i = 0; i < lanes; i++) {
            Line& line = *static_cast<Line*>(of[(first + i) % lanes]);
            if (i == late) simulated::pass_turn();
            if (line.at != 0) line.v = simulated::load<uint4>(line.at);
        }
    });
    if (there) v = own.v;
}

inline bool meet(uint32_t barrier, uint32_t threads, bool stop) { return simulated::meet(barrier, threads, stop).any; }

}  // namespace mccs
