// Kernels for the emulated driver: their source, compiled for a processor between this and a KERNEL for each. Every
// thread is one of the processor's (tests/driver/src/kernels/compiled.rs).
#pragma once

// A thread's place, as the driver says. It has the same.
struct Place {
    unsigned thread, threads, block, blocks;
    void (*sync)(const void* block);
    void (*pass)();
    unsigned long long (*now_ns)();
    const void* of_block;
};

inline thread_local const Place* place_of_thread;

struct Index {
    unsigned x;
};
#define threadIdx (Index{place_of_thread->thread})
#define blockDim (Index{place_of_thread->threads})
#define blockIdx (Index{place_of_thread->block})
#define gridDim (Index{place_of_thread->blocks})
#define __syncthreads() place_of_thread->sync(place_of_thread->of_block)

inline unsigned long long now_ns() { return place_of_thread->now_ns(); }

namespace mccs {
namespace detail {
void pass() { place_of_thread->pass(); }
}  // namespace detail
}  // namespace mccs

#define __global__

// A kernel of the source before, with one argument, as the driver looks it up.
#define KERNEL(name, Args)                                            \
    extern "C" const unsigned name##_bytes;                           \
    const unsigned name##_bytes = sizeof(Args);                       \
    extern "C" void name##_run(const void* args, const Place* place) { \
        place_of_thread = place;                                      \
        name(*static_cast<const Args*>(args));                        \
    }
