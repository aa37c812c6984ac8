/* Example in C: one rank of a ring of puts in host memory: each rank puts into the next one's
 * memory, signals, and waits for the one before. Start one process a rank. */
#include "example.h"

int main(void) {
    int rank, nranks;
    mccsUniqueId id;
    find_place(&rank, &nranks, &id);
    const char *root = root_address();
    mccsClient_t client;
    mccsComm_t comm;
    mccsBootstrap_t bootstrap;
    CHECK(mccsConnect(NULL, &client));
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, mccsMemoryHost, root));
    CHECK(mccsBootstrapInit(&bootstrap, client, nranks, &id, rank, root));

    /* Elements that a rank puts, and that its neighbour puts into it. */
    size_t count = 1000003, bytes = count * sizeof(int);
    int *data;
    CHECK(mccsMemAlloc(client, (void **)&data, 2 * bytes));
    mccsChannelMemory_t memory;
    mccsRemoteMemory_t own, *all = malloc((size_t)nranks * sizeof own);
    CHECK(mccsChannelMemoryRegister(&memory, comm, data, 2 * bytes));
    CHECK(mccsChannelMemoryRemote(memory, &own));
    CHECK(mccsBootstrapAllGather(bootstrap, &own, all, sizeof own));

    int next = (rank + 1) % nranks, before = (rank + nranks - 1) % nranks;
    mccsPortChannel_t to_next, from_before;
    CHECK(mccsPortChannelCreate(&to_next, comm, next, 0, memory, &all[next]));
    CHECK(mccsPortChannelCreate(&from_before, comm, before, 0, NULL, NULL));
    size_t wrong = 0;
    for (int round = 0; round < 10; round++) {
        for (size_t i = 0; i < count; i++) data[i] = (int)i * (round + 3) + rank;
        CHECK(mccsPortChannelPutWithSignal(to_next, 0, bytes, bytes));
        CHECK(mccsPortChannelWait(from_before));
        for (size_t i = 0; i < count; i++) wrong += data[count + i] != (int)i * (round + 3) + before;
        CHECK(mccsPortChannelFlush(to_next));
        /* The rank before may put again. */
        CHECK(mccsBootstrapBarrier(bootstrap));
    }
    printf("rank %d of %d: %zu elements, %zu wrong\n", rank, nranks, count, wrong);
    free(all);
    CHECK(mccsPortChannelDestroy(to_next));
    CHECK(mccsPortChannelDestroy(from_before));
    CHECK(mccsChannelMemoryFree(memory));
    CHECK(mccsMemFree(client, data));
    CHECK(mccsBootstrapDestroy(bootstrap));
    CHECK(mccsCommDestroy(comm));
    CHECK(mccsDisconnect(client));
    return wrong != 0;
}
