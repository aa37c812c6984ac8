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

/* A rank's element to send. */
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

static mccsResult_t exchange(mccsComm_t comm) {
    int other = 1 - rank;
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsSend((void *)in, COUNT, mccsFloat32, other, comm, stream));
    EXPECT(mccsSuccess, mccsRecv((void *)out, COUNT, mccsFloat32, other, comm, stream));
    return mccsGroupEnd();
}

static void call_wrongly(mccsComm_t comm) {
    void *send = (void *)in, *recv = (void *)out, *odd = (void *)(in + 1);
    mccsRedOp_t op;
    float factor = 3;
    mccsResult_t error;
    int number;
    REFUSED(mccsCommGetAsyncError(NULL, &error));
    REFUSED(mccsCommGetAsyncError(comm, NULL));
    REFUSED(mccsCommCount(NULL, &number));
    REFUSED(mccsCommCount(comm, NULL));
    REFUSED(mccsCommUserRank(NULL, &number));
    REFUSED(mccsCommUserRank(comm, NULL));
    REFUSED(mccsCommIsServiceExecuted(NULL, &number));
    REFUSED(mccsCommIsServiceExecuted(comm, NULL));
    REFUSED(mccsCommFinalize(NULL));
    REFUSED(mccsRedOpCreatePreMulSum(NULL, &factor, mccsFloat32, mccsScalarHostImmediate, comm));
    REFUSED(mccsRedOpCreatePreMulSum(&op, NULL, mccsFloat32, mccsScalarDevice, comm));
    REFUSED(mccsRedOpCreatePreMulSum(&op, &factor, (mccsDataType_t)99, 0, comm));
    REFUSED(mccsRedOpCreatePreMulSum(&op, &factor, mccsFloat32, 0, NULL));
    REFUSED(mccsRedOpCreatePreMulSum(&op, &factor, mccsFloat32, (mccsScalarResidence_t)2, comm));
    REFUSED(mccsRedOpDestroy(100, comm));
    REFUSED(mccsRedOpDestroy(100, NULL));
    REFUSED(mccsAllReduce(NULL, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsAllReduce(send, recv, COUNT, mccsFloat32, 5, comm, stream));
    REFUSED(mccsAllReduce(send, recv, COUNT, mccsFloat32, 100, comm, stream));
    REFUSED(mccsAllReduce(send, recv, (size_t)-1, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, NULL, stream));
    REFUSED(mccsReduceScatter(odd, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    REFUSED(mccsReduceScatter(send, recv, COUNT, (mccsDataType_t)99, mccsSum, comm, stream));
    REFUSED(mccsReduce(send, recv, COUNT, mccsFloat32, mccsSum, NRANKS, comm, stream));
    REFUSED(mccsReduce(send, recv, COUNT, mccsFloat32, mccsSum, -1, comm, stream));
    REFUSED(mccsAllGather(send, NULL, COUNT, mccsFloat32, comm, stream));
    REFUSED(mccsAllGather(send, recv, COUNT, mccsFloat32, NULL, stream));
    REFUSED(mccsAllToAll(send, (void *)(in + 4), COUNT, mccsFloat32, comm, stream)); /* partly the same memory */
    REFUSED(mccsBroadcast(send, recv, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsGather(send, recv, COUNT, mccsFloat32, -1, comm, stream));
    REFUSED(mccsScatter(send, recv, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsBarrier(NULL, stream));
    REFUSED(mccsSend(send, COUNT, mccsFloat32, NRANKS, comm, stream));
    REFUSED(mccsSend(send, COUNT, mccsFloat32, rank, comm, stream)); /* to oneself only in a group */
    REFUSED(mccsSend(send, COUNT, mccsFloat32, 1 - rank, NULL, stream));
    REFUSED(mccsRecv(NULL, COUNT, mccsFloat32, 1 - rank, comm, stream));
    REFUSED(mccsRecv(recv, COUNT, mccsFloat32, -1, comm, stream));
    EXPECT(mccsSuccess, mccsCommGetAsyncError(comm, &error));
    EXPECT(mccsSuccess, error);
}

static void call_rightly(mccsComm_t comm) {
    void *send = (void *)in, *recv = (void *)out;
    int own = rank * COUNT;
    RUN(COUNT, sum(i), mccsAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    RUN(COUNT, sum(own + i), mccsReduceScatter(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
    RUN(rank == 1 ? COUNT : 0, sum(i), mccsReduce(send, recv, COUNT, mccsFloat32, mccsSum, 1, comm, stream));
    RUN(NRANKS * COUNT, value(i / COUNT, i % COUNT), mccsAllGather(send, recv, COUNT, mccsFloat32, comm, stream));
    RUN(NRANKS * COUNT, value(i / COUNT, own + i % COUNT),
        mccsAllToAll(send, recv, COUNT, mccsFloat32, comm, stream));
    RUN(COUNT, value(1, i), mccsBroadcast(send, recv, COUNT, mccsFloat32, 1, comm, stream));
    RUN(rank == 0 ? NRANKS * COUNT : 0, value(i / COUNT, i % COUNT),
        mccsGather(send, recv, COUNT, mccsFloat32, 0, comm, stream));
    RUN(COUNT, value(1, own + i), mccsScatter(send, recv, COUNT, mccsFloat32, 1, comm, stream));
    RUN(0, 0.0f, mccsBarrier(comm, stream));
    RUN(COUNT, value(1 - rank, i), exchange(comm));

    float factor = 3;
    CUdeviceptr there;
    CUDA(cuMemAlloc_v2(&there, sizeof factor));
    CUDA(cuMemcpyHtoD_v2(there, &factor, sizeof factor));
    for (int is_there = 0; is_there < 2; is_there++) {
        mccsRedOp_t op;
        void *at = is_there ? (void *)there : (void *)&factor;
        EXPECT(mccsSuccess, mccsRedOpCreatePreMulSum(&op, at, mccsFloat32, is_there ? mccsScalarDevice : mccsScalarHostImmediate, comm));
        RUN(COUNT, factor * sum(i), mccsAllReduce(send, recv, COUNT, mccsFloat32, op, comm, stream));
        EXPECT(mccsSuccess, mccsRedOpDestroy(op, comm));
    }
    CUDA(cuMemFree_v2(there));
}

static void *finalize(void *comm) {
    EXPECT(mccsSuccess, mccsCommFinalize(comm));
    return NULL;
}

/* Rank 0 waits for its operation, to which rank 1 does not come, in one thread, and ends the wait in another. */
static void abort_beside(mccsComm_t comm) {
    mccsResult_t error = mccsSuccess;
    if (rank == 0) {
        pthread_t waits;
        void *send = (void *)in, *recv = (void *)out;
        EXPECT(mccsSuccess, mccsAllReduce(send, recv, COUNT, mccsFloat32, mccsSum, comm, stream));
        if (pthread_create(&waits, NULL, finalize, comm) != 0) exit(1);
        /* It has begun when nothing can be called any more. */
        while (mccsSend(send, COUNT, (mccsDataType_t)99, 1, comm, stream), strstr(mccsGetLastError(), "finalized") == NULL) {}
        EXPECT(mccsSuccess, mccsCommAbort(comm));
        pthread_join(waits, NULL);
        CUDA(cuStreamSynchronize(stream));
        return;
    }
    while (error == mccsSuccess) EXPECT(mccsSuccess, mccsCommGetAsyncError(comm, &error));
    EXPECT(mccsRemoteError, error);
    EXPECT(mccsSuccess, mccsCommDestroy(comm));
}

int main(void) {
    int nranks, number;
    mccsUniqueId id;
    mccsClient_t client;
    mccsComm_t comm;
    /* Ranks may be at two services: rank 0 is at the one with this name. */
    const char *root = getenv("MCCS_ROOT_ADDRESS"), *own;
    find_place(&rank, &nranks, &id);
    load();
    EXPECT(mccsSuccess, mccsConnect(NULL, &client));
    REFUSED(mccsRootAddress(NULL, &own));
    REFUSED(mccsRootAddress(client, NULL));
    EXPECT(mccsSuccess, mccsRootAddress(client, &own));
    if (rank == 0 && (own == NULL) != (root == NULL)) return 1;
    if (rank == 0 && own != NULL && strcmp(own, root) != 0) return 1;
    /* No context is current. */
    EXPECT(mccsUnhandledCudaError, mccsCommInitRank(&comm, client, NRANKS, &id, rank, mccsMemoryCuda, NULL));
    stream = stream_on_gpu(rank);
    CUDA(cuMemAlloc_v2(&in, BYTES));
    CUDA(cuMemAlloc_v2(&out, BYTES));
    REFUSED(mccsCommInitRank(NULL, client, NRANKS, &id, rank, mccsMemoryCuda, NULL));
    REFUSED(mccsCommInitRank(&comm, NULL, NRANKS, &id, rank, mccsMemoryCuda, NULL));
    REFUSED(mccsCommInitRank(&comm, client, NRANKS, NULL, rank, mccsMemoryCuda, NULL));
    REFUSED(mccsCommInitRank(&comm, client, -1, &id, rank, mccsMemoryCuda, NULL));
    REFUSED(mccsCommInitRank(&comm, client, NRANKS, &id, NRANKS, mccsMemoryCuda, NULL));
    REFUSED(mccsCommInitRank(&comm, client, NRANKS, &id, NRANKS, mccsMemoryCuda, root));
    REFUSED(mccsCommInitRank(&comm, client, NRANKS, &id, rank, mccsMemoryCuda, "\xff"));
    EXPECT(mccsSuccess, mccsCommInitRank(&comm, client, NRANKS, &id, rank, mccsMemoryCuda, root));
    EXPECT(mccsSuccess, mccsCommIsServiceExecuted(comm, &number));
    if (number != (root != NULL)) return 1;
    EXPECT(mccsSuccess, mccsCommCount(comm, &number));
    if (number != NRANKS) return 1;
    EXPECT(mccsSuccess, mccsCommUserRank(comm, &number));
    if (number != rank) return 1;
    call_wrongly(comm);
    call_rightly(comm);
    REFUSED(mccsCommDestroy(NULL));
    REFUSED(mccsCommAbort(NULL));
    EXPECT(mccsSuccess, mccsCommFinalize(comm));
    REFUSED(mccsBarrier(comm, stream));
    EXPECT(mccsSuccess, mccsCommDestroy(comm));
    id.internal[0] ^= 1;
    if (root == NULL)
        EXPECT(mccsSuccess, mccsCommInitRank(&comm, client, NRANKS, &id, rank, mccsMemoryCuda, NULL));
    else
        EXPECT(mccsSuccess, mccsCommInitRank(&comm, client, NRANKS, &id, rank, mccsMemoryCuda, root));
    abort_beside(comm);
    CUDA(cuMemFree_v2(in));
    CUDA(cuMemFree_v2(out));
    EXPECT(mccsSuccess, mccsDisconnect(client));
    printf("rank %d: every function for GPUs\n", rank);
    return 0;
}
