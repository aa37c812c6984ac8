/* Example in C: one of two ranks on GPUs whose kernels put into each other's memory. Start one process a
 * rank, with the compiled kernel: cuda_put.cu says how. */
#include "driver.h"
#include "example.h"

/* As the kernel has it. */
struct exchange {
    mccsDevicePortChannel_t channel;
    CUdeviceptr data;
    unsigned count, round;
    int rank;
};

int main(int argc, char **argv) {
    int rank, nranks;
    mccsUniqueId id;
    find_place(&rank, &nranks, &id);
    if (argc != 2 || nranks != 2) {
        fprintf(stderr, "usage: cuda_put KERNEL, by two ranks\n");
        return 2;
    }
    load();
    CUstream stream = stream_on_gpu(rank);
    CUmodule module;
    CUfunction kernel;
    char *image = read_file(argv[1]);
    CUDA(cuModuleLoadData(&module, image));
    CUDA(cuModuleGetFunction(&kernel, module, "exchange"));

    mccsClient_t client;
    mccsComm_t comm;
    mccsBootstrap_t bootstrap;
    CHECK(mccsConnect(NULL, &client));
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, mccsMemoryCuda, NULL));
    CHECK(mccsBootstrapInit(&bootstrap, client, nranks, &id, rank, NULL));

    /* Elements that a rank puts, and that its peer puts into it. */
    unsigned count = 100003;
    size_t bytes = count * sizeof(int);
    CUdeviceptr data;
    CUDA(cuMemAlloc_v2(&data, 2 * bytes));
    mccsChannelMemory_t memory;
    mccsRemoteMemory_t own, all[2];
    CHECK(mccsChannelMemoryRegister(&memory, comm, (void *)data, 2 * bytes));
    CHECK(mccsChannelMemoryRemote(memory, &own));
    CHECK(mccsBootstrapAllGather(bootstrap, &own, all, sizeof own));
    int peer = 1 - rank;
    mccsPortChannel_t channel;
    struct exchange arguments = {.data = data, .count = count, .rank = rank};
    CHECK(mccsPortChannelCreate(&channel, comm, peer, 0, memory, &all[peer]));
    CHECK(mccsPortChannelDevice(channel, &arguments.channel));

    int *came = malloc(bytes);
    if (came == NULL) return 1;
    size_t wrong = 0;
    for (arguments.round = 3; arguments.round < 8; arguments.round++) {
        CHECK(mccsPortChannelsWake(comm));
        CUDA(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, (void *[]){&arguments}, NULL));
        CUDA(cuStreamSynchronize(stream));
        mccsResult_t failure;
        CHECK(mccsCommGetAsyncError(comm, &failure));
        CHECK(failure);
        CUDA(cuMemcpyDtoH_v2(came, data + bytes, bytes));
        for (size_t i = 0; i < count; i++) wrong += came[i] != (int)(arguments.round * i) + peer;
        /* The peer may put again. */
        CHECK(mccsBootstrapBarrier(bootstrap));
    }
    printf("rank %d of %d: %u elements, %zu wrong\n", rank, nranks, count, wrong);
    free(came);
    free(image);
    CHECK(mccsPortChannelDestroy(channel));
    CHECK(mccsChannelMemoryFree(memory));
    CHECK(mccsBootstrapDestroy(bootstrap));
    CHECK(mccsCommDestroy(comm));
    CUDA(cuMemFree_v2(data));
    CHECK(mccsDisconnect(client));
    return wrong != 0;
}
