// The kernels that test port channels, and a service that carries what they ask for: included in machine.cpp.
#define MCCS_DEVICE_INSTRUCTIONS "puts.h"
inline unsigned long long now_ns() { return simulated::steps(); }

#include "../../../kernels/cuda/puts.cu"

namespace simulated {

// A rank as the service has it: its FIFO, its words, its memory.
struct PutRank {
    uint64_t slots, slots_log2, tail, arrived, flushed, source, destination;
    // Triggers that it writes in all.
    uint64_t triggers;
};

// One thread of a processor, which sees what GPUs have stored when it comes there. Two ranks that put to each other.
struct PutService {
    PutRank ranks[2];
};

inline uint64_t& word_at(uint64_t address) { return *reinterpret_cast<uint64_t*>(address); }

// Takes the next trigger of a rank if it is there, and carries it out. Returns whether it was.
inline bool carry(const PutService& service, uint32_t of, uint64_t position) {
    const PutRank &own = service.ranks[of], &peer = service.ranks[1 - of];
    const uint64_t slot = own.slots + 16 * (position & ((1ull << own.slots_log2) - 1));
    const uint64_t parity = (position >> own.slots_log2) % 2 == 0 ? 1 : 0;
    const uint64_t second = word_at(slot + 8);
    step();
    const uint64_t first = word_at(slot);
    if (first >> 63 != parity || second >> 63 != parity) return false;
    const uint64_t from = first >> 24 & ((1ull << 39) - 1), to = second >> 24 & ((1ull << 39) - 1);
    const uint64_t bytes = (first & 0xffffff) | (second >> 17 & 0x7f) << 24;
    if (second & 1) std::memcpy(reinterpret_cast<void*>(peer.destination + to), reinterpret_cast<const void*>(own.source + from), bytes);
    step();
    if (second & 2) word_at(peer.arrived)++;
    step();
    if (second & 4) word_at(own.flushed) = position + 1;
    return true;
}

inline void serve(const PutService& service) {
    uint64_t next[2] = {};
    while (next[0] < service.ranks[0].triggers || next[1] < service.ranks[1].triggers) {
        for (uint32_t of = 0; of < 2; of++) {
            if (next[of] == service.ranks[of].triggers || !carry(service, of, next[of])) continue;
            next[of]++;
            word_at(service.ranks[of].tail) = next[of];
        }
        pass_turn();
    }
}

}  // namespace simulated

// Its name, for the test.
extern "C" void mccs_puts_service() {}
