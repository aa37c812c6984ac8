/* One rank of an all-reduce: start one process a rank, with mccs-launch or by hand.
 *   cc -I shim/include shim/examples/c/all_reduce.c -L target/release -lmccs -o all_reduce */
#include <mccs.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        mccsResult_t result = (call);                                                                                  \
        if (result != mccsSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, mccsGetErrorString(result), mccsGetLastError());                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static const char *need(const char *name) {
    const char *value = getenv(name);
    if (value == NULL) {
        fprintf(stderr, "%s is not set\n", name);
        exit(2);
    }
    return value;
}

int main(void) {
    int rank = atoi(need("MCCS_RANK")), nranks = atoi(need("MCCS_NRANKS"));
    const char *hex = need("MCCS_UNIQUE_ID");
    mccsUniqueId id;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1) return 2;
        id.internal[i] = (unsigned char)byte;
    }
    mccsClient_t client;
    mccsComm_t comm;
    mccsStream_t stream;
    CHECK(mccsConnect(NULL, &client));
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, 0, NULL));
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
