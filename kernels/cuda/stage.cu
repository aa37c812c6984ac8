// Host-staging kernel: short collectives that the service carries out, as one kernel of the
// caller's stream. It is a module of its own, since ranks that use it need no other.
#include "include/memory.cuh"

namespace mccs {

// The mirror of StageArgs in kernels/src/cuda/stage.rs.
struct StageArgs {
    uint64_t send;
    uint64_t slot_in;
    uint64_t slot_out;
    uint64_t recv;
    uint64_t ready_word;
    uint64_t ready_value;  // 0: nothing is told
    uint64_t done_word;
    uint64_t done_value;  // 0: nothing is waited for
    uint64_t ticket_word;  // 0: the values are what they say; otherwise they count from 1, and 1 is what is there; 0 there: nothing
    uint64_t in_bytes;
    uint64_t out_bytes;
};
static_assert(sizeof(StageArgs) == 88, "as in stage.rs");

// All threads copy. Loads go past caches that know nothing of what the processor writes.
__device__ inline void copy(uint64_t to, uint64_t from, uint64_t bytes) {
    uint64_t together = to | from;
    uint64_t unit = (together & 15) == 0 ? 16 : (together & 3) == 0 ? 4 : 1;
    uint64_t whole = bytes / unit;
    for (uint64_t i = threadIdx.x; i < whole; i += blockDim.x) {
        uint64_t at = i * unit;
        if (unit == 16) {
            store_aligned(to + at, load_fresh(from + at));
        } else if (unit == 4) {
            store_volatile(to + at, load_volatile<uint32_t>(from + at));
        } else {
            store_volatile(to + at, load_volatile<uint8_t>(from + at));
        }
    }
    for (uint64_t at = whole * unit + threadIdx.x; at < bytes; at += blockDim.x) {
        store_volatile(to + at, load_volatile<uint8_t>(from + at));
    }
}

}  // namespace mccs

using namespace mccs;

extern "C" __global__ void __launch_bounds__(1024, 1) mccs_stage(const __grid_constant__ StageArgs a) {
    copy(a.slot_in, a.send, a.in_bytes);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t ready = a.ready_value, done = a.done_value;
        if (a.ticket_word != 0) {
            uint64_t first = load_acquire(a.ticket_word);
            ready = ready != 0 && first != 0 ? first + ready - 1 : 0;
            done = done != 0 && first != 0 ? first + done - 1 : 0;
        }
        if (ready != 0) {
            store_release(a.ready_word, ready);
        }
        // As the driver's own waits compare: whoever lets everything go writes the largest signed number.
        while (done != 0 && int64_t(load_acquire(a.done_word) - done) < 0) {
            pass_turn();
        }
    }
    __syncthreads();
    copy(a.recv, a.slot_out, a.out_bytes);
}
