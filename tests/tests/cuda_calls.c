/* Every function of mccs.h for GPUs, by two ranks in a process each: with arguments that are right, and the result checked; and with wrong ones,
 * which must return the right code and crash nothing. */
#include "driver.h"
#include "example.h"
#include "expect.h"
#include <pthread.h>
#include <string.h>

#define REFUSED(call) EXPECT(mccsInvalidArgument, call)

enum { COUNT = 6, NRANKS = 2, BYTES = NRANKS * COUNT * sizeof(float) };
static int rank;
static CUstream stream;
static CUdeviceptr in, out;
static float got[NRANKS * COUNT];

/* What a rank has to send. */
static float value(int rank, int at) { return (float)(100 * rank + at); }
static float sum(int at) { return value(0, at) + value(1, at); }

/* Makes a call, and checks what came; `i` counts its elements. */
#define RUN(count, expected, call)                                                                                     \
    do {                                                                                                               \
        for (int i = 0; i < NRANKS * COUNT; i++) got[i] = value(rank, i);                                              \
        CUDA(cuMemcpyHtoD_v2(in, got, BYTES));                                                                         \
        EXPECT(mccsSuccess, call);                                                                                     \
        CUDA(cuStreamSynchronize(stream));                                                                             \
        CUDA(cuMemcpyDtoH_v2(got, out, BYTES));                                                                        \
        for (int i = 0; i < (count); i++) {                                                                            \
            if (got[i] == (expected)) continue;                                                                        \
            fprintf(stderr, "rank %d: %s: element %d is %g, not %g\n", rank, #call, i, got[i], (double)(expected));     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static mccsResult_t exchange(mccsCudaComm_t comm) {
    int other = 1 - rank;
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsCudaSend((void *)in, COUNT, mccsFloat32, other, comm, stream));
    EXPECT(mccsSuccess, mccsCudaRecv((void *)out, COUNT, mccsFloat32, other, comm, stream));
    return mccsGroupEnd();
}

static void call_wrongly(mccsCudaComm_t comm) {
    void *send = (void *)in, *recv = (void *)out, *odd = (void *)(in + 1);
    mccsRedOp_t op;
    float factor = 3;
    mccsResult_t error;
    int number;
    REFUSED(mccsCudaCommGetAsyncError(NULL, &error));
    REFUSED(mccsCudaCommGetAsyncError(comm, NULL));
    REFUSED(mccsCudaCommCount(NULL, &number));
    REFUSED(mccsCudaCommCount(comm, NULL));
    REFUSED(mccsCudaCommUserRank(NULL, &number));
    REFUSED(mccsCudaCommUserRank(comm, NULL));
    REFUSED(mccsCudaCommIsServed(NULL, &number));
    REFUSED(mccsCudaCommIsServed(comm, NULL));
    REFUSED(mccsCudaCommFinalize(NULL));
    REFUSED(mccsCudaRedOpCreatePreMulSum(NULL, &factor, mccsFloat32, 0, comm));
    REFUSED(mccsCudaRedOpCreatePreMulSum(&op, NULL, mccsFloat32, 1, comm));
    REFUSED(mccsCudaRedOpCreatePreMulSum(&op, &factor, (mccsDataType_t)99, 0, comm));
    REFUSED(mccsCudaRedOpCreatePreMulSum(&op, &factor, mccsFloat32, 0, NULL));
    REFUSED(mccsCudaRedOpDestroy(100, comm));
    REFUSED(mccsCudaRedOpDestroy(100, NULL));
    REFUSED(mccsCudaAllReduce(NULL, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, 5, comm, stream));
    REFUSED(mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, 100, comm, stream));
    REFUSED(mccsCudaAllReduce(send, recv, (size_t)-1, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, NULL, stream));
    REFUSED(mccsCudaReduceScatter(odd, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsCudaReduceScatter(send, recv, COUNT, (mccsDataType_t)99, mccsSum, comm, stream));
    REFUSED(mccsCudaReduce(send, recv, COUNT, mccsFloat32, mccsSum, NRANKS, comm, stream));
    REFUSED(mccsCudaReduce(send, recv, COUNT, mccsFloat32, mccsSum, -1, comm, stream));
    REFUSED(mccsCudaAllGather(send, NULL, COUNT, mccsFloat32, comm, stream));
    REFUSED(mccsCudaAllGather(send, recv, COUNT, mccsFloat32, NULL, stream));
    REFUSED(mccsCudaAllToAll(send, (void *)(in + 4), COUNT, mccsFloat32, comm, stream)); /* partly the same memory */
    REFUSED(mccsCudaBroadcast(send, recv, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsCudaGather(send, recv, COUNT, mccsFloat32, -1, comm, stream));
    REFUSED(mccsCudaScatter(send, recv, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsCudaBarrier(NULL, stream));
    REFUSED(mccsCudaSend(send, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsCudaSend(send, COUNT, mccsFloat32, rank, comm, stream)); /* to oneself only in a group */
    REFUSED(mccsCudaSend(send, COUNT, mccsFloat32, 1 - rank, NULL, stream));
    REFUSED(mccsCudaRecv(NULL, COUNT, mccsFloat32, 1 - rank, comm, stream));
    REFUSED(mccsCudaRecv(recv, COUNT, mccsFloat32, -1, comm, stream));
    EXPECT(mccsSuccess, mccsCudaCommGetAsyncError(comm, &error));
    EXPECT(mccsSuccess, error);
}

static void call_rightly(mccsCudaComm_t comm) {
    void *send = (void *)in, *recv = (void *)out;
    int own = rank * COUNT;
    RUN(COUNT, sum(i), mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    RUN(COUNT, sum(own + i), mccsCudaReduceScatter(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    RUN(rank == 1 ? COUNT : 0, sum(i), mccsCudaReduce(send, recv, COUNT, mccsFloat32, mccsSum, 1, comm, stream));
    RUN(NRANKS * COUNT, value(i / COUNT, i % COUNT), mccsCudaAllGather(send, recv, COUNT, mccsFloat32, comm, stream));
    RUN(NRANKS * COUNT, value(i / COUNT, own + i % COUNT),
        mccsCudaAllToAll(send, recv, COUNT, mccsFloat32, comm, stream));
    RUN(COUNT, value(1, i), mccsCudaBroadcast(send, recv, COUNT, mccsFloat32, 1, comm, stream));
    RUN(rank == 0 ? NRANKS * COUNT : 0, value(i / COUNT, i % COUNT),
        mccsCudaGather(send, recv, COUNT, mccsFloat32, 0, comm, stream));
    RUN(COUNT, value(1, own + i), mccsCudaScatter(send, recv, COUNT, mccsFloat32, 1, comm, stream));
    RUN(0, 0.0f, mccsCudaBarrier(comm, stream));
    RUN(COUNT, value(1 - rank, i), exchange(comm));

    float factor = 3;
    CUdeviceptr there;
    CUDA(cuMemAlloc_v2(&there, sizeof factor));
    CUDA(cuMemcpyHtoD_v2(there, &factor, sizeof factor));
    for (int is_there = 0; is_there < 2; is_there++) {
        mccsRedOp_t op;
        void *at = is_there ? (void *)there : (void *)&factor;
        EXPECT(mccsSuccess, mccsCudaRedOpCreatePreMulSum(&op, at, mccsFloat32, is_there, comm));
        RUN(COUNT, factor * sum(i), mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, op, comm, stream));
        EXPECT(mccsSuccess, mccsCudaRedOpDestroy(op, comm));
    }
    CUDA(cuMemFree_v2(there));
}

static void *finalize(void *comm) {
    EXPECT(mccsSuccess, mccsCudaCommFinalize(comm));
    return NULL;
}

/* Rank 0 waits for its operation, to which rank 1 does not come, in one thread, and ends the wait in another. */
static void abort_beside(mccsCudaComm_t comm) {
    mccsResult_t error = mccsSuccess;
    if (rank == 0) {
        pthread_t waits;
        void *send = (void *)in, *recv = (void *)out;
        EXPECT(mccsSuccess, mccsCudaAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
        if (pthread_create(&waits, NULL, finalize, comm) != 0) exit(1);
        /* It has begun when nothing can be called any more. */
        while (mccsCudaSend(send, COUNT, (mccsDataType_t)99, 1, comm, stream), strstr(mccsGetLastError(), "finalized") == NULL) {}
        EXPECT(mccsSuccess, mccsCudaCommAbort(comm));
        pthread_join(waits, NULL);
        CUDA(cuStreamSynchronize(stream));
        return;
    }
    while (error == mccsSuccess) EXPECT(mccsSuccess, mccsCudaCommGetAsyncError(comm, &error));
    EXPECT(mccsRemoteError, error);
    EXPECT(mccsSuccess, mccsCudaCommDestroy(comm));
}

int main(void) {
    int nranks, number;
    mccsUniqueId id;
    mccsClient_t client;
    mccsCudaComm_t comm;
    /* Ranks may be at two services: rank 0 is at the one with this name. */
    const char *root = getenv("MCCS_ROOT_ADDRESS"), *own;
    find_place(&rank, &nranks, &id);
    load();
    EXPECT(mccsSuccess, mccsConnect(NULL, &client));
    REFUSED(mccsRootAddress(NULL, &own));
    REFUSED(mccsRootAddress(client, NULL));
    EXPECT(mccsSuccess, mccsRootAddress(client, &own));
    if (rank == 0 && strcmp(own, root == NULL ? "" : root) != 0) return 1;
    /* No context is current. */
    EXPECT(mccsUnhandledCudaError, mccsCudaCommInitRank(&comm, client, NRANKS, &id, rank));
    stream = stream_on_gpu(rank);
    CUDA(cuMemAlloc_v2(&in, BYTES));
    CUDA(cuMemAlloc_v2(&out, BYTES));
    REFUSED(mccsCudaCommInitRank(NULL, client, NRANKS, &id, rank));
    REFUSED(mccsCudaCommInitRank(&comm, NULL, NRANKS, &id, rank));
    REFUSED(mccsCudaCommInitRank(&comm, client, NRANKS, NULL, rank));
    REFUSED(mccsCudaCommInitRank(&comm, client, -1, &id, rank));
    REFUSED(mccsCudaCommInitRank(&comm, client, NRANKS, &id, NRANKS));
    REFUSED(mccsCudaCommInitRankAt(&comm, client, NRANKS, &id, NRANKS, root));
    REFUSED(mccsCudaCommInitRankAt(&comm, client, NRANKS, &id, rank, "\xff"));
    EXPECT(mccsSuccess, mccsCudaCommInitRankAt(&comm, client, NRANKS, &id, rank, root));
    EXPECT(mccsSuccess, mccsCudaCommIsServed(comm, &number));
    if (number != (root != NULL)) return 1;
    EXPECT(mccsSuccess, mccsCudaCommCount(comm, &number));
    if (number != NRANKS) return 1;
    EXPECT(mccsSuccess, mccsCudaCommUserRank(comm, &number));
    if (number != rank) return 1;
    call_wrongly(comm);
    call_rightly(comm);
    REFUSED(mccsCudaCommDestroy(NULL));
    REFUSED(mccsCudaCommAbort(NULL));
    EXPECT(mccsSuccess, mccsCudaCommFinalize(comm));
    REFUSED(mccsCudaBarrier(comm, stream));
    EXPECT(mccsSuccess, mccsCudaCommDestroy(comm));
    id.internal[0] ^= 1;
    if (root == NULL)
        EXPECT(mccsSuccess, mccsCudaCommInitRank(&comm, client, NRANKS, &id, rank));
    else
        EXPECT(mccsSuccess, mccsCudaCommInitRankAt(&comm, client, NRANKS, &id, rank, root));
    abort_beside(comm);
    CUDA(cuMemFree_v2(in));
    CUDA(cuMemFree_v2(out));
    EXPECT(mccsSuccess, mccsDisconnect(client));
    printf("rank %d: every function for GPUs\n", rank);
    return 0;
}
