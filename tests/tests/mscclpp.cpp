/* A program of MSCCL++'s C API of version 0.1, one process a rank: connections by address and by id, puts of several threads,
 * registered buffers, and misuse, of which each call must return the right code and tell the log handler why. */
#include <mscclpp.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

static thread_local std::string told;
static void keep(const char *msg) { told = msg; }

#define EXPECT(code, call)                                                                                             \
    do {                                                                                                               \
        told.clear();                                                                                                  \
        mscclppResult_t result = (call);                                                                               \
        if (result != (code) || told.empty() != (result == mscclppSuccess)) {                                          \
            fprintf(stderr, "line %d: %s gave %d (%s)\n", __LINE__, #call, result, told.c_str());                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define CHECK(call) EXPECT(mscclppSuccess, call)
/* A call that is refused, and what the log handler is told. */
#define REFUSED(code, text, call)                                                                                      \
    do {                                                                                                               \
        EXPECT(code, call);                                                                                            \
        if (told.find(text) == std::string::npos) {                                                                    \
            fprintf(stderr, "line %d: %s told: %s\n", __LINE__, #call, told.c_str());                                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t seed;

/* A rank's value at a place in a round. */
static uint32_t value(int rank, int lane, int round, size_t i) {
    uint64_t x = seed ^ (uint64_t)rank << 48 ^ (uint64_t)lane << 40 ^ (uint64_t)round << 32 ^ i;
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(x >> 29);
}

static bool holds(const uint32_t *data, size_t count, int rank, int lane, int round) {
    for (size_t i = 0; i < count; i++)
        if (data[i] != value(rank, lane, round, i)) return false;
    return true;
}

/* Both ends put at once, for some rounds: the first half of a buffer into the second of the peer's. */
static bool exchange(const mscclppDevConn_t conn, int rank, int lane, size_t count) {
    uint32_t *data = (uint32_t *)conn.localBuff;
    size_t bytes = count * sizeof *data;
    bool right = true;
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < count; i++) data[i] = value(rank, lane, round, i);
        if (round % 2) {
            CHECK(conn.putWithSignalAndFlush(bytes, 0, bytes));
        } else {
            CHECK(conn.put(bytes, 0, bytes / 2));
            CHECK(conn.putWithSignal(bytes + bytes / 2, bytes / 2, bytes - bytes / 2));
            CHECK(conn.flush());
        }
        CHECK(conn.wait());
        right &= holds(data + count, count, conn.remoteRank, lane, round);
        /* The peer may put again. */
        CHECK(conn.signal());
        CHECK(conn.wait());
    }
    return right;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int rank = atoi(argv[1]), nranks = atoi(argv[2]);
    const char *address = argv[3];
    seed = strtoull(argv[4], nullptr, 10);
    CHECK(mscclppSetLogHandler(keep));
    CHECK(mscclppSetBootstrapConnTimeout(600));
    REFUSED(mscclppInvalidArgument, "at least 1", mscclppSetBootstrapConnTimeout(0));

    mscclppComm_t comm, first;
    REFUSED(mscclppInvalidArgument, "ip:port", mscclppCommInitRank(&first, 1, "nowhere", 0));
    REFUSED(mscclppInvalidArgument, "is null", mscclppCommInitRank(&first, 1, nullptr, 0));
    REFUSED(mscclppInvalidArgument, "no rank", mscclppCommInitRank(&first, 2, address, 2));
    REFUSED(mscclppInvalidArgument, "no rank", mscclppCommInitRank(&first, 0, address, 0));
    REFUSED(mscclppInvalidArgument, "is null", mscclppCommInitRank(nullptr, 1, address, 0));
    CHECK(mscclppCommInitRank(&first, nranks, address, rank));

    /* The first tells the id of another. */
    std::vector<mscclppUniqueId> ids(nranks);
    if (rank == 0) CHECK(mscclppGetUniqueId(&ids[0]));
    CHECK(mscclppBootstrapAllGather(first, ids.data(), sizeof ids[0]));
    mscclppUniqueId foreign = {};
    REFUSED(mscclppInvalidArgument, "not made by this library", mscclppCommInitRankFromId(&comm, nranks, foreign, rank));
    CHECK(mscclppCommInitRankFromId(&comm, nranks, ids[0], rank));
    CHECK(mscclppCommDestroy(first));
    REFUSED(mscclppInvalidArgument, "no communicator", mscclppBootstrapBarrier(first));
    REFUSED(mscclppInvalidArgument, "no communicator", mscclppCommDestroy(nullptr));
    int number;
    CHECK(mscclppCommRank(comm, &number));
    if (number != rank) return 1;
    CHECK(mscclppCommSize(comm, &number));
    if (number != nranks) return 1;

    /* Two connections to each other rank: memory of the library, and pages of the program's. */
    const size_t count = 50000, half = count * sizeof(uint32_t), pages = (2 * half + 4095) / 4096 * 4096;
    std::vector<void *> buffers;
    mscclppDevConn_t *conns = nullptr;
    REFUSED(mscclppInvalidUsage, "mscclppConnectionSetup comes first", mscclppGetAllDeviceConnections(comm, &conns, &number));
    for (int peer = 0; peer < nranks; peer++) {
        if (peer == rank) continue;
        void *allocated;
        CHECK(mscclppHostAlloc(&allocated, 2 * half));
        void *mapped = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) return 1;
        CHECK(mscclppConnect(comm, peer, 0, allocated, 2 * half, mscclppTransportP2P));
        CHECK(mscclppConnect(comm, peer, -7, mapped, pages, mscclppTransportIB, "mlx5_0"));
        buffers.push_back(allocated);
        REFUSED(mscclppInvalidUsage, "there is a connection", mscclppConnect(comm, peer, 0, allocated, 8, mscclppTransportP2P));
        REFUSED(mscclppInvalidArgument, "mscclppHostAlloc", mscclppConnect(comm, peer, 1, &number, 4, mscclppTransportP2P));
        REFUSED(mscclppInvalidArgument, "mscclppHostAlloc",
                mscclppConnect(comm, peer, 1, allocated, SIZE_MAX, mscclppTransportP2P));
        REFUSED(mscclppInvalidUsage, "P2P", mscclppConnect(comm, peer, 1, allocated, 8, mscclppTransportSHM));
        REFUSED(mscclppInvalidArgument, "ibDev", mscclppConnect(comm, peer, 1, allocated, 8, mscclppTransportP2P, "mlx5_0"));
    }
    REFUSED(mscclppInvalidArgument, "of a communicator of", mscclppConnect(comm, nranks, 0, buffers[0], 8, mscclppTransportP2P));
    REFUSED(mscclppInvalidArgument, "of a communicator of", mscclppConnect(comm, -1, 0, buffers[0], 8, mscclppTransportP2P));
    CHECK(mscclppConnectionSetup(comm));
    REFUSED(mscclppInvalidUsage, "once", mscclppConnectionSetup(comm));
    CHECK(mscclppProxyLaunch(comm));
    CHECK(mscclppGetAllDeviceConnections(comm, &conns, &number));
    if (number != 2 * (nranks - 1) || conns[1].tag != -7 || conns[0].localBuff != buffers[0]) return 1;
    mscclppDevConn_t *found;
    CHECK(mscclppGetDeviceConnection(comm, conns[1].remoteRank, -7, &found));
    if (found != &conns[1]) return 1;
    REFUSED(mscclppInvalidArgument, "no connection", mscclppGetDeviceConnection(comm, conns[0].remoteRank, 5, &found));
    REFUSED(mscclppInvalidArgument, "leave the memory", conns[0].put(2 * half, 0, 1));
    REFUSED(mscclppInvalidArgument, "leave the memory", conns[0].put(1, UINT64_MAX));

    /* A thread for each connection. */
    std::vector<std::thread> threads;
    std::vector<char> right(number);
    for (int at = 0; at < number; at++)
        threads.emplace_back([&, at] { right[at] = exchange(conns[at], rank, conns[at].tag + 10, count); });
    for (std::thread &thread : threads) thread.join();
    for (char is : right)
        if (!is) return 1;

    /* Each rank writes into its part of all other ranks' buffers. */
    void *shared, *source;
    const size_t part = 10000, part_bytes = part * sizeof(uint32_t);
    CHECK(mscclppHostAlloc(&shared, nranks * part_bytes));
    CHECK(mscclppHostAlloc(&source, 16 + part_bytes));
    mscclppRegisteredMemory registered, made_up = {77};
    CHECK(mscclppRegisterBuffer(comm, shared, nranks * part_bytes, &registered));
    for (size_t i = 0; i < part; i++) ((uint32_t *)source)[4 + i] = value(rank, 0, 99, i);
    CHECK(mscclppRegisteredBufferWrite(comm, &registered, source, part_bytes, 16, rank * part_bytes, 0));
    REFUSED(mscclppInvalidUsage, "stream is 0", mscclppRegisteredBufferWrite(comm, &registered, source, 4, 0, 0, 1));
    REFUSED(mscclppInvalidArgument, "mscclppRegisterBuffer", mscclppRegisteredBufferWrite(comm, &made_up, source, 4, 0, 0, 0));
    for (int at = 0; at < number; at += 2) CHECK(conns[at].signal());
    for (int at = 0; at < number; at += 2) CHECK(conns[at].wait());
    for (int peer = 0; peer < nranks; peer++)
        if (peer != rank && !holds((uint32_t *)shared + peer * part, part, peer, 0, 99)) return 1;

    CHECK(mscclppBootstrapBarrier(comm));
    CHECK(mscclppProxyStop(comm));
    mscclppDevConn_t stale = conns[0];
    CHECK(mscclppCommDestroy(comm));
    REFUSED(mscclppInvalidArgument, "destroyed", stale.signal());
    REFUSED(mscclppInvalidArgument, "is null", mscclppDevConnWait(nullptr));
    for (void *buffer : buffers) CHECK(mscclppHostFree(buffer));
    REFUSED(mscclppInvalidArgument, "not from mscclppHostAlloc", mscclppHostFree(buffers[0]));
    CHECK(mscclppHostFree(shared));
    CHECK(mscclppHostFree(source));

    /* A peer that has declared nothing: all hear who. */
    CHECK(mscclppCommInitRank(&comm, nranks, address, rank));
    CHECK(mscclppHostAlloc(&source, 64));
    if (rank == 0) CHECK(mscclppConnect(comm, 1, 3, source, 64, mscclppTransportP2P));
    REFUSED(rank == 0 ? mscclppInvalidUsage : mscclppRemoteError, "rank 1 has not called mscclppConnect for rank 0 with tag 3",
            mscclppConnectionSetup(comm));
    CHECK(mscclppCommDestroy(comm));
    CHECK(mscclppHostFree(source));

    /* A root that never comes. */
    CHECK(mscclppSetBootstrapConnTimeout(1));
    if (rank == 1) REFUSED(mscclppRemoteError, "rank 0 has not answered", mscclppCommInitRank(&comm, nranks, address, rank));
    if (strcmp(mscclppGetErrorString(mscclppSuccess), "no error") != 0 || MSCCLPP_VERSION != 100) return 1;
    CHECK(mscclppSetLogHandler(nullptr));
    if (mscclppCommDestroy(nullptr) != mscclppInvalidArgument) return 1;
    return 0;
}
