// Runs kernels on a processor, all of several GPUs' at once, in an order that a seed decides: see machine.h.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <utility>

#include <sys/mman.h>

#include "machine.h"

#include "../../../kernels/cuda/mccs.cu"
#include "../../../kernels/cuda/stage.cu"
#include "puts.cpp"

namespace simulated {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t BARRIERS = 16, WARPS_MAX = 32;

struct Block;

struct Thread {
    Block* block = nullptr;
    uint32_t index = 0;
    bool has_begun = false, has_ended = false;
    Met met{};
    void* tells = nullptr;
    char* stack = nullptr;
    ucontext_t begin;
    jmp_buf at;
};

// Those who have come, until all have.
struct Barrier {
    std::vector<Thread*> waiting;
    bool any = false, all = true;
};

struct Grid;

// Stored, and not seen by others yet.
struct Stored {
    uint64_t at;
    uint32_t bytes;
    unsigned char value[LINE_BYTES];
};

struct Block {
    Grid* grid;
    uint32_t index, left;
    std::vector<Thread> threads;
    std::vector<Thread*> ready;
    Barrier barriers[BARRIERS], warps[WARPS_MAX];
    std::map<const void*, std::unique_ptr<uint64_t[]>> shared;
    std::vector<Stored> stored;
};

}  // namespace

// Work that the test hands over: a launch on a stream, whose launches run one behind the other, and which may wait for a word
// first.
struct Launch {
    void (*function)();
    const void* args;
    uint32_t args_bytes, grid, threads, stream;
    const uint64_t* word;  // null: it does not wait
    uint64_t value;        // the word is at least this
};

// Work beside the GPUs, by a processor or a copy engine, as a launch of one thread: after some turns it copies, and then writes a word. All
// see that at once.
struct Deed {
    uint64_t turns, from, to, bytes;
    uint64_t word, value;  // word 0: none
};

namespace {

struct Grid {
    const Launch* launch;
    std::vector<std::unique_ptr<Block>> blocks;
    uint32_t left;
};

struct Machine {
    uint64_t state, taken = 0;
    std::vector<Block*> blocks;
    std::vector<char*> stacks;
    jmp_buf scheduler;
    Thread* current = nullptr;

    uint64_t random() {
        state += 0x9e3779b97f4a7c15;
        uint64_t v = state;
        v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9;
        v = (v ^ v >> 27) * 0x94d049bb133111eb;
        return v ^ v >> 31;
    }
    uint32_t below(uint32_t bound) { return uint32_t(random() >> 32) % bound; }
    char* stack() {
        if (!stacks.empty()) {
            char* found = stacks.back();
            stacks.pop_back();
            return found;
        }
        void* made = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) std::abort();
        return static_cast<char*>(made);
    }
};
// Machine of the calling thread: tests run side by side.
thread_local Machine* machine;

template <class ARGS>
void call(const Launch& launch) {
    reinterpret_cast<void (*)(ARGS)>(launch.function)(*static_cast<const ARGS*>(launch.args));
}

void carry_out(const Deed& deed) {
    for (uint64_t turn = 0; turn < deed.turns; turn++) pass_turn();
    if (deed.bytes > 0) std::memcpy(reinterpret_cast<void*>(deed.to), reinterpret_cast<const void*>(deed.from), deed.bytes);
    if (deed.word != 0) *reinterpret_cast<uint64_t*>(deed.word) = deed.value;
}

void run_current() {
    const Launch& launch = *machine->current->block->grid->launch;
    switch (launch.args_bytes) {
        case sizeof(DirectArgs): call<DirectArgs>(launch); break;
        case sizeof(P2pArgs<MESSAGES_FEW>): call<P2pArgs<MESSAGES_FEW>>(launch); break;
        case sizeof(P2pArgs<MESSAGES_MANY>): call<P2pArgs<MESSAGES_MANY>>(launch); break;
        case sizeof(ReduceArgs): call<ReduceArgs>(launch); break;
        case sizeof(CombineArgs): call<CombineArgs>(launch); break;
        case sizeof(PutsArgs): call<PutsArgs>(launch); break;
        case sizeof(MemoryChannelsArgs): call<MemoryChannelsArgs>(launch); break;
        case sizeof(PutService): serve(*static_cast<const PutService*>(launch.args)); break;
        case sizeof(StageArgs): call<StageArgs>(launch); break;
        case sizeof(Deed): carry_out(*static_cast<const Deed*>(launch.args)); break;
        default: std::abort();
    }
    machine->current->has_ended = true;
    if (machine->current->block->left == 1) settle();
    _longjmp(machine->scheduler, 1);
}

// Back to the scheduler, until it comes back.
void leave() {
    Thread* own = machine->current;
    if (_setjmp(own->at) == 0) _longjmp(machine->scheduler, 1);
}

void yield() {
    machine->current->block->ready.push_back(machine->current);
    leave();
}

void wait_at(Barrier& barrier, uint32_t count, bool says, void (*once)(void* const (&)[32], uint32_t)) {
    Thread* own = machine->current;
    barrier.any |= says;
    barrier.all &= says;
    barrier.waiting.push_back(own);
    if (barrier.waiting.size() < count) return leave();
    // Nobody of these comes to it again before all have gone on.
    std::vector<Thread*> all = std::exchange(barrier.waiting, {});
    Met met{std::exchange(barrier.any, false), std::exchange(barrier.all, true)};
    if (once != nullptr) {
        void* of[32] = {};
        for (Thread* thread : all) of[thread->index % 32] = thread->tells;
        once(of, count);
    }
    for (Thread* thread : all) {
        thread->met = met;
        if (thread != own) own->block->ready.push_back(thread);
    }
}

void show(const Stored& stored) { std::memcpy(reinterpret_cast<void*>(stored.at), stored.value, stored.bytes); }

// The first store to what one of them stores to, so that these keep their order.
void show_any(Block& block) {
    if (block.stored.empty()) return;
    const Stored any = block.stored[machine->below(uint32_t(block.stored.size()))];
    auto overlaps = [&](const Stored& other) { return other.at < any.at + any.bytes && any.at < other.at + other.bytes; };
    auto first = std::find_if(block.stored.begin(), block.stored.end(), overlaps);
    show(*first);
    block.stored.erase(first);
}

Barrier& own_warp() { return machine->current->block->warps[machine->current->index / 32]; }
uint32_t warp_lanes() {
    const Thread& own = *machine->current;
    return min(32u, uint32_t(own.block->threads.size()) - own.index / 32 * 32);
}

}  // namespace

Index thread_index() { return {machine->current->index}; }
Index block_index() { return {machine->current->block->index}; }
Index block_threads() { return {uint32_t(machine->current->block->threads.size())}; }
Index grid_blocks() { return {machine->current->block->grid->launch->grid}; }

Met meet(uint32_t barrier, uint32_t threads, bool says) {
    wait_at(machine->current->block->barriers[barrier], threads, says, nullptr);
    return machine->current->met;
}
Met meet_warp(bool says) {
    wait_at(own_warp(), warp_lanes(), says, nullptr);
    return machine->current->met;
}
void together(void* own, void (*once)(void* const (&of)[32], uint32_t lanes)) {
    machine->current->tells = own;
    wait_at(own_warp(), warp_lanes(), false, once);
}
void pass_turn() {
    show_any(*machine->current->block);
    yield();
}
void step() {
    if (machine->below(8) == 0) yield();
}
uint64_t steps() { return machine->taken; }
uint32_t random_below(uint32_t bound) { return machine->below(bound); }
void* shared_memory(const void* key, size_t bytes) {
    auto& memory = machine->current->block->shared[key];
    if (memory == nullptr) {
        memory = std::make_unique<uint64_t[]>((bytes + 7) / 8);
        // As on a GPU, where others' is left there.
        std::memset(memory.get(), 0xa5, (bytes + 7) / 8 * 8);
    }
    return memory.get();
}
void get(uint64_t from, void* value, uint32_t bytes) {
    check_aligned(from, bytes);
    // The block's own stores are seen by everybody from then on.
    auto& stored = machine->current->block->stored;
    auto is_there = [&](const Stored& other) {
        bool is = other.at < from + bytes && from < other.at + other.bytes;
        if (is) show(other);
        return is;
    };
    stored.erase(std::remove_if(stored.begin(), stored.end(), is_there), stored.end());
    std::memcpy(value, reinterpret_cast<const void*>(from), bytes);
}
void put(uint64_t to, const void* value, uint32_t bytes) {
    check_aligned(to, bytes);
    Block& block = *machine->current->block;
    Stored stored{to, bytes, {}};
    std::memcpy(stored.value, value, bytes);
    block.stored.push_back(stored);
    while (machine->below(2) == 0) show_any(block);
}
void settle() {
    auto& stored = machine->current->block->stored;
    for (const Stored& one : stored) show(one);
    stored.clear();
}
void check_aligned(uint64_t at, uint32_t bytes) {
    if (at % bytes == 0) return;
    std::fprintf(stderr, "%u bytes at %#llx, which are not aligned\n", bytes, static_cast<unsigned long long>(at));
    std::abort();
}

namespace {

std::unique_ptr<Grid> begin(const Launch& launch) {
    auto grid = std::make_unique<Grid>();
    grid->launch = &launch;
    grid->left = launch.grid;
    for (uint32_t index = 0; index < launch.grid; index++) {
        auto block = std::make_unique<Block>();
        block->grid = grid.get();
        block->index = index;
        block->left = launch.threads;
        block->threads.resize(launch.threads);
        for (uint32_t thread = 0; thread < launch.threads; thread++) {
            block->threads[thread].block = block.get();
            block->threads[thread].index = thread;
            block->ready.push_back(&block->threads[thread]);
        }
        machine->blocks.push_back(block.get());
        grid->blocks.push_back(std::move(block));
    }
    return grid;
}

// Runs a thread until it leaves.
void resume(Thread* thread) {
    machine->current = thread;
    if (_setjmp(machine->scheduler) != 0) return;
    if (thread->has_begun) _longjmp(thread->at, 1);
    thread->has_begun = true;
    thread->stack = machine->stack();
    getcontext(&thread->begin);
    thread->begin.uc_stack.ss_sp = thread->stack;
    thread->begin.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread->begin, run_current, 0);
    setcontext(&thread->begin);
}

}  // namespace
}  // namespace simulated

// Runs launches to their ends. Returns how many turns that took; 0: more than `turns_max`, or nobody can go on. Sets a word after some turns.
extern "C" uint64_t mccs_simulate(const simulated::Launch* launches, uint32_t count, uint64_t seed, uint64_t turns_max, uint64_t* abort_word,
                                  uint64_t abort_after) {
    using namespace simulated;
    Machine own;
    own.state = seed;
    machine = &own;
    std::map<uint32_t, std::vector<const Launch*>> streams;
    for (uint32_t i = count; i-- > 0;) streams[launches[i].stream].push_back(&launches[i]);
    std::map<const Launch*, std::unique_ptr<Grid>> running;
    std::vector<uint32_t> waiting;
    for (auto& stream : streams) waiting.push_back(stream.first);
    auto begin_those_who_may = [&] {
        auto begins = [&](uint32_t stream) {
            auto& left = streams[stream];
            if (left.empty()) return true;
            const Launch& first = *left.back();
            if (first.word != nullptr && *first.word < first.value) return false;
            running[&first] = begin(first);
            left.pop_back();
            return true;
        };
        waiting.erase(std::remove_if(waiting.begin(), waiting.end(), begins), waiting.end());
    };
    begin_those_who_may();
    std::map<uint32_t, uint32_t> slow;
    for (auto& stream : streams) slow[stream.first] = own.below(2) * own.below(512);
    size_t at = 0;
    for (; !own.blocks.empty() && own.taken < turns_max; own.taken++) {
        begin_those_who_may();
        if (own.taken == abort_after) *abort_word = 1;
        // Some GPUs fall far behind others, for a time, and a block goes on for a while.
        if (own.below(4096) == 0) {
            for (auto& stream : slow) stream.second = own.below(2) * own.below(512);
        }
        if (own.below(16) == 0) at = own.below(uint32_t(own.blocks.size()));
        at %= own.blocks.size();
        if (own.below(512) < slow[own.blocks[at]->grid->launch->stream]) at = own.below(uint32_t(own.blocks.size()));
        size_t from = at;
        while (own.blocks[at]->ready.empty()) {
            at = (at + 1) % own.blocks.size();
            if (at == from) break;
        }
        Block* block = own.blocks[at];
        if (block->ready.empty()) break;
        std::swap(block->ready[own.below(uint32_t(block->ready.size()))], block->ready.back());
        Thread* thread = block->ready.back();
        block->ready.pop_back();
        resume(thread);
        if (!thread->has_ended) continue;
        own.stacks.push_back(thread->stack);
        if (--block->left > 0) continue;
        own.blocks.erase(own.blocks.begin() + long(at));
        const Launch* launch = block->grid->launch;
        if (--block->grid->left > 0) continue;
        running.erase(launch);
        waiting.push_back(launch->stream);
        begin_those_who_may();
    }
    bool ended = own.blocks.empty() && waiting.empty();
    for (auto& grid : running) {
        for (auto& block : grid.second->blocks) {
            for (auto& thread : block->threads) {
                if (thread.has_begun && !thread.has_ended) own.stacks.push_back(thread.stack);
            }
        }
    }
    for (char* stack : own.stacks) munmap(stack, STACK_BYTES);
    machine = nullptr;
    return ended ? max(own.taken, uint64_t(1)) : 0;
}
