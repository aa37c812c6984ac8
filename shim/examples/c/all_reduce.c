/* Example in C: one rank of an all-reduce in host memory. Start one process a rank, with
 * mccs-launch or by hand. */
#include "example.h"

int main(void) {
    int rank, nranks;
    mccsUniqueId id;
    find_place(&rank, &nranks, &id);
    mccsClient_t client;
    mccsComm_t comm;
    mccsStream_t stream;
    CHECK(mccsConnect(NULL, &client));
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, mccsMemoryHost, root_address()));
    CHECK(mccsStreamCreate(client, &stream));

    size_t count = 1000003;
    float *data;
    CHECK(mccsMemAlloc(client, (void **)&data, count * sizeof *data));
    for (size_t i = 0; i < count; i++) data[i] = (float)((i + (size_t)rank) % 7);
    CHECK(mccsAllReduce(data, data, count, mccsFloat32, mccsSum, comm, stream));
    CHECK(mccsStreamSynchronize(stream));

    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        float right = 0;
        for (int r = 0; r < nranks; r++) right += (float)((i + (size_t)r) % 7);
        wrong += data[i] != right;
    }
    printf("rank %d of %d: %zu elements, %zu wrong\n", rank, nranks, count, wrong);
    CHECK(mccsMemFree(client, data));
    CHECK(mccsStreamDestroy(stream));
    CHECK(mccsCommDestroy(comm));
    CHECK(mccsDisconnect(client));
    return wrong != 0;
}
