/* Example in C: one rank of an all-reduce between GPUs, and of a ring of sends and receives. Start
 * one process a rank, with mccs-launch or by hand. Needs no CUDA installation to compile
 * (driver.h). */
#include "driver.h"
#include "example.h"

/* Element i becomes (i + rank) % 7. */
struct arguments {
    CUdeviceptr data;
    unsigned count;
    int rank;
};
static const char FILL[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fill(.param .align 8 .b8 arguments[16])\n{\n"
    "    .reg .pred %p;\n    .reg .b32 %r<8>;\n    .reg .b64 %d<4>;\n    .reg .f32 %f;\n"
    "    ld.param.u64 %d1, [arguments];\n    ld.param.u32 %r1, [arguments+8];\n    ld.param.u32 %r2, [arguments+12];\n"
    "    mov.u32 %r3, %ctaid.x;\n    mov.u32 %r4, %ntid.x;\n    mov.u32 %r5, %tid.x;\n"
    "    mad.lo.u32 %r6, %r3, %r4, %r5;\n    setp.ge.u32 %p, %r6, %r1;\n    @%p bra done;\n"
    "    add.u32 %r7, %r6, %r2;\n    rem.u32 %r7, %r7, 7;\n    cvt.rn.f32.u32 %f, %r7;\n"
    "    cvta.to.global.u64 %d1, %d1;\n    mul.wide.u32 %d2, %r6, 4;\n    add.u64 %d3, %d1, %d2;\n"
    "    st.global.f32 [%d3], %f;\ndone:\n    ret;\n}\n";

static float filled(int rank, size_t at) { return (float)((at + (size_t)rank) % 7); }

int main(void) {
    int rank, nranks;
    mccsUniqueId id;
    find_place(&rank, &nranks, &id);
    load();
    CUmodule module;
    CUfunction fill;
    CUdeviceptr data, passed_on;
    unsigned count = 1000003;
    size_t bytes = count * sizeof(float);
    CUstream stream = stream_on_gpu(rank);
    CUDA(cuMemAlloc_v2(&data, bytes));
    CUDA(cuMemAlloc_v2(&passed_on, bytes));
    CUDA(cuModuleLoadData(&module, FILL));
    CUDA(cuModuleGetFunction(&fill, module, "fill"));

    mccsClient_t client;
    mccsComm_t comm;
    CHECK(mccsConnect(NULL, &client));
    /* Ranks at several services know where rank 0 is. */
    CHECK(mccsCommInitRank(&comm, client, nranks, &id, rank, mccsMemoryCuda, root_address()));
    int next = (rank + 1) % nranks, last = (rank + nranks - 1) % nranks;
    struct arguments arguments = {data, count, rank};
    CUDA(cuLaunchKernel(fill, (count + 255) / 256, 1, 1, 256, 1, 1, 0, stream, (void *[]){&arguments}, NULL));
    CHECK(mccsGroupStart());
    CHECK(mccsSend((void *)data, count, mccsFloat32, next, comm, stream));
    CHECK(mccsRecv((void *)passed_on, count, mccsFloat32, last, comm, stream));
    CHECK(mccsGroupEnd());
    CHECK(mccsAllReduce((void *)data, (void *)data, count, mccsFloat32, mccsSum, comm, stream));
    CUDA(cuStreamSynchronize(stream));
    mccsResult_t failure;
    CHECK(mccsCommGetAsyncError(comm, &failure));
    CHECK(failure);

    float *sums = malloc(bytes), *received = malloc(bytes);
    if (sums == NULL || received == NULL) return 1;
    CUDA(cuMemcpyDtoH_v2(sums, data, bytes));
    CUDA(cuMemcpyDtoH_v2(received, passed_on, bytes));
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        float right = 0;
        for (int r = 0; r < nranks; r++) right += filled(r, i);
        wrong += sums[i] != right || received[i] != filled(last, i);
    }
    printf("rank %d of %d: %u elements, %zu wrong\n", rank, nranks, count, wrong);
    free(sums);
    free(received);
    CHECK(mccsCommDestroy(comm));
    CUDA(cuMemFree_v2(data));
    CUDA(cuMemFree_v2(passed_on));
    CHECK(mccsDisconnect(client));
    return wrong != 0;
}
