// Instructions of mccs/device.cuh on a GPU, as the simulation has them: included there, in their place.
inline u64 load(const u64* from) {
    simulated::step();
    return simulated::load<u64>(reinterpret_cast<uint64_t>(from));
}
inline u64 load_own(const u64* from) { return load(from); }
inline void store(u64* to, u64 value) {
    simulated::step();
    simulated::store(reinterpret_cast<uint64_t>(to), value);
}
// Seen in parts of eight bytes, in any order.
inline void store_pair(u64* to, u64 first, u64 second) {
    simulated::check_aligned(reinterpret_cast<uint64_t>(to), 16);
    store(to, first);
    simulated::store(reinterpret_cast<uint64_t>(to + 1), second);
}
inline void fence() {
    simulated::step();
    simulated::settle();
}
inline u64 add_own(u64* to, u64 value) { return atomicAdd(to, value); }
inline void max_own(u64* to, u64 value) { atomicMax(to, value); }
inline u64 exchange_own(u64* at, u64 expected, u64 value) {
    simulated::step();
    u64 seen = *at;
    if (seen == expected) *at = value;
    return seen;
}
// Loaded in parts of eight bytes, in any order.
inline void load_pair(const u64* from, u64& first, u64& second) {
    simulated::check_aligned(reinterpret_cast<uint64_t>(from), 16);
    if (simulated::random_below(2) == 0) {
        first = load(from);
        second = load(from + 1);
    } else {
        second = load(from + 1);
        first = load(from);
    }
}
inline unsigned load_byte(const unsigned char* from) {
    simulated::step();
    return simulated::load<unsigned char>(reinterpret_cast<uint64_t>(from));
}
inline void store_byte(unsigned char* to, unsigned value) {
    simulated::step();
    simulated::store(reinterpret_cast<uint64_t>(to), static_cast<unsigned char>(value));
}
inline void pass() { simulated::pass_turn(); }
