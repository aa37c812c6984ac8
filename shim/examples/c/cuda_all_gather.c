/* Example in C: an all-gather by a kernel of the program's own, whose threads copy into the peers' memory. Start one
 * process a rank, with the compiled kernel: cuda_all_gather.cu says how. */
#include "driver.h"
#include "example.h"

enum { RANKS_MAX = 8 };

/* As the kernel has it. */
struct gather {
    CUdeviceptr channels, data;
    unsigned count, rank;
};

static int element(int rank, unsigned round, unsigned i) { return (int)(round * i) + 1000003 * rank; }

int main(int argc, char **argv) {
    int rank, nranks;
    mccsUniqueId id;
    find_place(&rank, &nranks, &id);
    if (argc != 2 || nranks < 2 || nranks > RANKS_MAX) {
        fprintf(stderr, "usage: cuda_all_gather KERNEL, by 2 to %d ranks\n", RANKS_MAX);
        return 2;
    }
    load();
    CUstream stream = stream_on_gpu(rank);
    CUmodule module;
    CUfunction kernel;
    char *image = read_file(argv[1]);
    CUDA(cuModuleLoadData(&module, image));
    CUDA(cuModuleGetFunction(&kernel, module, "all_gather"));

    mccsClient_t client;
    mccsComm_t comm;
    mccsBootstrap_t bootstrap;
    CHECK(mccsConnect(NULL, &client));
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, mccsMemoryCuda, NULL));
    CHECK(mccsBootstrapInit(&bootstrap, client, nranks, &id, rank, NULL));

    /* Shares of all ranks, which kernels of the peers write. */
    unsigned count = 50021;
    size_t share = count * sizeof(int), bytes = nranks * share;
    CUdeviceptr data;
    CUDA(cuMemAlloc_v2(&data, bytes));
    mccsMemoryChannels_t channels;
    mccsMemoryChannelsPart_t own, all[RANKS_MAX];
    CHECK(mccsMemoryChannelsCreate(&channels, comm, (void *)data, bytes, 1, &own));
    CHECK(mccsBootstrapAllGather(bootstrap, &own, all, sizeof own));
    CHECK(mccsMemoryChannelsOpen(channels, comm, all));
    mccsDeviceMemoryChannel_t table[RANKS_MAX];
    for (int block = 0; block < nranks - 1; block++) {
        CHECK(mccsMemoryChannelDevice(channels, (rank + 1 + block) % nranks, 0, &table[block]));
    }
    struct gather arguments = {.data = data, .count = count, .rank = (unsigned)rank};
    CUDA(cuMemAlloc_v2(&arguments.channels, sizeof table));
    CUDA(cuMemcpyHtoD_v2(arguments.channels, table, sizeof table));

    int *came = malloc(bytes);
    if (came == NULL) return 1;
    size_t wrong = 0;
    for (unsigned round = 3; round < 8; round++) {
        for (unsigned i = 0; i < count; i++) came[i] = element(rank, round, i);
        CUDA(cuMemcpyHtoD_v2(data + rank * share, came, share));
        CUDA(cuLaunchKernel(kernel, nranks - 1, 1, 1, 32, 1, 1, 0, stream, (void *[]){&arguments}, NULL));
        CUDA(cuStreamSynchronize(stream));
        mccsResult_t failure;
        CHECK(mccsCommGetAsyncError(comm, &failure));
        CHECK(failure);
        CUDA(cuMemcpyDtoH_v2(came, data, bytes));
        for (int from = 0; from < nranks; from++) {
            for (unsigned i = 0; i < count; i++) wrong += came[from * count + i] != element(from, round, i);
        }
        /* All have taken what came. */
        CHECK(mccsBootstrapBarrier(bootstrap));
    }
    printf("rank %d of %d: %u elements of each, %zu wrong\n", rank, nranks, count, wrong);
    free(came);
    free(image);
    CHECK(mccsMemoryChannelsDestroy(channels));
    CHECK(mccsBootstrapDestroy(bootstrap));
    CHECK(mccsCommDestroy(comm));
    CUDA(cuMemFree_v2(arguments.channels));
    CUDA(cuMemFree_v2(data));
    CHECK(mccsDisconnect(client));
    return wrong != 0;
}
