/* Misuse of the C API: every call must return the right code, and none may crash. */
#define _DEFAULT_SOURCE
#include "expect.h"
#include <sys/mman.h>

static void count_lines(int level, const char *message, void *user) {
    if (level == 3 && message != NULL) ++*(int *)user;
}

int main(void) {
    mccsClient_t client;
    mccsComm_t comm, comms[2];
    mccsStream_t stream, other;
    mccsUniqueId id;
    mccsRedOp_t op;
    int number, local;
    const char *root;
    float scalar = 3, *data;
    EXPECT(mccsInvalidArgument, mccsGetVersion(NULL));
    EXPECT(mccsSuccess, mccsGetVersion(&number));
    if (number != MCCS_VERSION) return 1;
    EXPECT(mccsSystemError, mccsConnect("/nowhere", &client));
    EXPECT(mccsInvalidArgument, mccsConnect(NULL, NULL));
    EXPECT(mccsSuccess, mccsConnect(NULL, &client));
    EXPECT(mccsInvalidArgument, mccsRootAddress(NULL, &root));
    EXPECT(mccsInvalidArgument, mccsRootAddress(client, NULL));
    EXPECT(mccsSuccess, mccsRootAddress(client, &root));
    if (root != NULL) return 1; /* a service on its own */
    EXPECT(mccsInvalidArgument, mccsGetUniqueId(NULL));
    EXPECT(mccsSuccess, mccsGetUniqueId(&id));
    EXPECT(mccsInvalidArgument, mccsCommInitRank(NULL, client, 1, &id, 0, mccsMemoryHost, NULL));
    EXPECT(mccsInvalidArgument, mccsCommInitRank(&comm, NULL, 1, &id, 0, mccsMemoryHost, NULL));
    EXPECT(mccsInvalidArgument, mccsCommInitRank(&comm, client, 1, &id, -1, mccsMemoryHost, NULL));
    EXPECT(mccsInvalidArgument, mccsCommInitRank(&comm, client, 1, &id, 1, mccsMemoryHost, NULL));
    EXPECT(mccsInvalidArgument, mccsCommInitRank(&comm, client, 1, &id, 0, (mccsMemory_t)7, NULL));
    EXPECT(mccsInvalidArgument, mccsSetInitTimeout(NULL, 1));
    mccsBootstrap_t bootstrap;
    int own = 7, all = 0, lines = 0;
    EXPECT(mccsSuccess, mccsSetLogHandler(count_lines, &lines));
    EXPECT(mccsInvalidArgument, mccsBootstrapInit(NULL, client, 1, &id, 0, NULL));
    EXPECT(mccsInvalidArgument, mccsBootstrapInit(&bootstrap, NULL, 1, &id, 0, NULL));
    EXPECT(mccsInvalidArgument, mccsBootstrapInit(&bootstrap, client, 1, &id, 1, NULL));
    EXPECT(mccsSuccess, mccsBootstrapInit(&bootstrap, client, 1, &id, 0, NULL));
    if (lines != 1) return 1; /* it has joined */
    EXPECT(mccsSuccess, mccsSetLogHandler(NULL, NULL));
    EXPECT(mccsInvalidArgument, mccsBootstrapAllGather(NULL, &own, &all, sizeof own));
    EXPECT(mccsInvalidArgument, mccsBootstrapAllGather(bootstrap, NULL, &all, sizeof own));
    EXPECT(mccsInvalidArgument, mccsBootstrapAllGather(bootstrap, &own, NULL, sizeof own));
    EXPECT(mccsSuccess, mccsBootstrapAllGather(bootstrap, NULL, NULL, 0));
    EXPECT(mccsSuccess, mccsBootstrapAllGather(bootstrap, &own, &all, sizeof own));
    if (all != 7) return 1;
    EXPECT(mccsInvalidArgument, mccsBootstrapBarrier(NULL));
    EXPECT(mccsSuccess, mccsBootstrapBarrier(bootstrap));
    EXPECT(mccsInvalidArgument, mccsBootstrapDestroy(NULL));
    EXPECT(mccsSuccess, mccsBootstrapDestroy(bootstrap));
    if (lines != 1) return 1; /* nobody was told */
    /* The other rank never comes. */
    EXPECT(mccsSuccess, mccsSetInitTimeout(client, 50));
    EXPECT(mccsTimeout, mccsCommInitRank(&comm, client, 2, &id, 0, mccsMemoryHost, NULL));
    EXPECT(mccsSuccess, mccsSetInitTimeout(client, 0));
    EXPECT(mccsSuccess, mccsGetUniqueId(&id));
    EXPECT(mccsSuccess, mccsCommInitRank(&comm, client, 1, &id, 0, mccsMemoryHost, NULL));
    EXPECT(mccsSuccess, mccsCommCount(comm, &number));
    if (number != 1) return 1;
    EXPECT(mccsInvalidArgument, mccsStreamCreate(client, NULL));
    EXPECT(mccsSuccess, mccsStreamCreate(client, &stream));
    EXPECT(mccsInvalidArgument, mccsMemAlloc(client, (void **)&data, 0));
    EXPECT(mccsSuccess, mccsMemAlloc(client, (void **)&data, 64));
    mccsChannelMemory_t memory;
    mccsRemoteMemory_t remote;
    mccsPortChannel_t channel, signals;
    EXPECT(mccsInvalidArgument, mccsChannelMemoryRegister(NULL, comm, data, 64));
    EXPECT(mccsInvalidArgument, mccsChannelMemoryRegister(&memory, NULL, data, 64));
    EXPECT(mccsInvalidArgument, mccsChannelMemoryRegister(&memory, comm, &local, 4));
    EXPECT(mccsInvalidArgument, mccsChannelMemoryRegister(&memory, comm, data, 65));
    EXPECT(mccsSuccess, mccsChannelMemoryRegister(&memory, comm, data, 64));
    EXPECT(mccsInvalidArgument, mccsChannelMemoryRemote(memory, NULL));
    EXPECT(mccsSuccess, mccsChannelMemoryRemote(memory, &remote));
    EXPECT(mccsInvalidArgument, mccsPortChannelCreate(NULL, comm, 0, 1, memory, &remote));
    EXPECT(mccsInvalidArgument, mccsPortChannelCreate(&channel, comm, 0, 1, memory, NULL));
    EXPECT(mccsInvalidArgument, mccsPortChannelCreate(&channel, comm, -1, 1, memory, &remote));
    EXPECT(mccsInvalidArgument, mccsPortChannelCreate(&channel, comm, 1, 1, memory, &remote));
    EXPECT(mccsSuccess, mccsPortChannelCreate(&channel, comm, 0, 1, memory, &remote));
    EXPECT(mccsSuccess, mccsPortChannelCreate(&signals, comm, 0, 1, NULL, NULL));
    EXPECT(mccsInvalidArgument, mccsPortChannelPut(signals, 0, 0, 1));
    EXPECT(mccsInvalidArgument, mccsPortChannelPut(channel, 0, 33, 32));
    EXPECT(mccsInvalidArgument, mccsPortChannelPut(channel, 0, (uint64_t)-1, 2));
    EXPECT(mccsInvalidArgument, mccsPortChannelSignal(NULL));
    EXPECT(mccsInProgress, mccsPortChannelWaitFor(channel, 10));
    data[0] = 5;
    EXPECT(mccsSuccess, mccsPortChannelPutWithSignalAndFlush(channel, 0, 32, 32));
    EXPECT(mccsSuccess, mccsPortChannelWait(signals));
    if (data[8] != 5) return 1;
    EXPECT(mccsSuccess, mccsPortChannelPoll(channel, &number));
    if (number != 0) return 1;
    EXPECT(mccsSuccess, mccsPortChannelDestroy(signals));
    EXPECT(mccsSuccess, mccsPortChannelDestroy(channel));
    EXPECT(mccsSuccess, mccsChannelMemoryFree(memory));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 17, mccsFloat32, mccsSum, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, (size_t)-1, mccsFloat32, mccsSum, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(&local, &local, 1, mccsInt32, mccsSum, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(NULL, data, 1, mccsFloat32, mccsSum, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 1, (mccsDataType_t)12, mccsSum, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 1, mccsFloat32, 5, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 1, mccsFloat32, 100, comm, stream));
    EXPECT(mccsInvalidArgument, mccsBroadcast(data, data, 1, mccsFloat32, 1, comm, stream));
    EXPECT(mccsInvalidArgument, mccsSend(data, 1, mccsFloat32, -1, comm, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 1, mccsFloat32, mccsSum, NULL, stream));
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data, 1, mccsFloat32, mccsSum, comm, NULL));
    EXPECT(mccsInvalidArgument, mccsGroupEnd());
    data[0] = 2;
    EXPECT(mccsSuccess, mccsRedOpCreatePreMulSum(&op, &scalar, mccsFloat32, mccsScalarHostImmediate, comm));
    EXPECT(mccsSuccess, mccsAllReduce(data, data, 1, mccsFloat32, op, comm, stream));
    EXPECT(mccsSuccess, mccsStreamSynchronize(stream));
    EXPECT(mccsSuccess, mccsStreamQuery(stream));
    EXPECT(mccsSuccess, mccsStreamSynchronizeFor(stream, 0));
    if (data[0] != 6) return 1;
    /* A call that fails in a group takes the others with it. */
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsAllReduce(data, data, 1, mccsFloat32, op, comm, stream));
    EXPECT(mccsInvalidArgument, mccsSend(data, 1, mccsFloat32, -1, comm, stream));
    EXPECT(mccsInvalidArgument, mccsGroupEnd());
    EXPECT(mccsSuccess, mccsStreamSynchronize(stream));
    if (data[0] != 6) return 1;
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsGroupEnd());
    /* Buffers that overlap cost the call alone. */
    EXPECT(mccsInvalidArgument, mccsAllReduce(data, data + 1, 2, mccsFloat32, mccsSum, comm, stream));
    /* A stream that an open group uses is not destroyed under it. */
    EXPECT(mccsSuccess, mccsStreamCreate(client, &other));
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsBarrier(comm, other));
    EXPECT(mccsInvalidArgument, mccsStreamDestroy(other));
    EXPECT(mccsSuccess, mccsGroupEnd());
    /* Handles that are made up, of another kind, or of something destroyed. */
    EXPECT(mccsInvalidArgument, mccsStreamSynchronize(other));
    EXPECT(mccsInvalidArgument, mccsStreamSynchronize(&local));
    EXPECT(mccsInvalidArgument, mccsStreamSynchronize(comm));
    EXPECT(mccsInvalidArgument, mccsCommDestroy(stream));
    EXPECT(mccsInvalidArgument, mccsBarrier(comm, &local));
    EXPECT(mccsInvalidArgument, mccsChannelMemoryFree(memory));
    EXPECT(mccsInvalidArgument, mccsPortChannelSignal(channel));
    EXPECT(mccsInvalidArgument, mccsBootstrapDestroy(bootstrap));
    EXPECT(mccsSuccess, mccsRedOpDestroy(op, comm));
    EXPECT(mccsInvalidArgument, mccsRedOpDestroy(op, comm));
    EXPECT(mccsInvalidArgument, mccsRedOpDestroy(-2147483647 - 1, comm));
    EXPECT(mccsInvalidArgument, mccsRedOpCreatePreMulSum(NULL, &scalar, mccsFloat32, mccsScalarHostImmediate, comm));
    EXPECT(mccsInvalidArgument, mccsRedOpCreatePreMulSum(&op, &scalar, mccsFloat32, mccsScalarDevice, comm));
    mccsRedOp_t again;
    EXPECT(mccsSuccess, mccsRedOpCreatePreMulSum(&again, &scalar, mccsFloat32, mccsScalarHostImmediate, comm));
    if (again != op) return 1; /* numbers are used again */
    EXPECT(mccsInvalidArgument, mccsMemFree(client, &local));
    EXPECT(mccsInvalidArgument, mccsMemRegister(client, &local, sizeof local));
    EXPECT(mccsSuccess, mccsMemFree(client, data));
    /* Registered twice, and still what it was. */
    data = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return 1;
    EXPECT(mccsSuccess, mccsMemRegister(client, data, 4096));
    EXPECT(mccsSuccess, mccsMemRegister(client, data, 4096));
    EXPECT(mccsSuccess, mccsAllReduce(data, data, 1, mccsFloat32, mccsSum, comm, stream));
    EXPECT(mccsSuccess, mccsStreamSynchronize(stream));
    /* Two ranks in one thread: neither may wait for the other before both are announced. */
    EXPECT(mccsSuccess, mccsGetUniqueId(&id));
    EXPECT(mccsSuccess, mccsGroupStart());
    EXPECT(mccsSuccess, mccsCommInitRank(&comms[0], client, 2, &id, 0, mccsMemoryHost, NULL));
    EXPECT(mccsSuccess, mccsCommInitRank(&comms[1], client, 2, &id, 1, mccsMemoryHost, NULL));
    EXPECT(mccsSuccess, mccsGroupEnd());
    EXPECT(mccsSuccess, mccsCommUserRank(comms[1], &number));
    if (number != 1) return 1;
    /* As in NCCL any address will do where a rank has no use for a buffer, or there is nothing in it. */
    EXPECT(mccsSuccess, mccsStreamCreate(client, &other));
    EXPECT(mccsSuccess, mccsReduce(data, data, 1, mccsInt32, mccsSum, 0, comms[0], stream));
    EXPECT(mccsSuccess, mccsReduce(data + 8, &local, 1, mccsInt32, mccsSum, 0, comms[1], other));
    EXPECT(mccsSuccess, mccsAllReduce(&local, &local, 0, mccsInt32, mccsSum, comms[0], stream));
    EXPECT(mccsSuccess, mccsAllReduce(&local, &local, 0, mccsInt32, mccsSum, comms[1], other));
    EXPECT(mccsInvalidArgument, mccsAllReduce(&local, &local, 1, mccsInt32, mccsSum, comms[1], other));
    EXPECT(mccsSuccess, mccsStreamSynchronize(stream));
    EXPECT(mccsSuccess, mccsStreamSynchronize(other));
    EXPECT(mccsSuccess, mccsStreamDestroy(other));
    EXPECT(mccsSuccess, mccsMemFree(client, data));
    EXPECT(mccsSuccess, mccsCommAbort(comms[0]));
    EXPECT(mccsSuccess, mccsBarrier(comms[1], stream));
    EXPECT(mccsRemoteError, mccsStreamSynchronize(stream));
    mccsResult_t error;
    EXPECT(mccsSuccess, mccsCommGetAsyncError(comms[1], &error));
    if (error != mccsRemoteError) return 1;
    EXPECT(mccsSuccess, mccsCommDestroy(comms[1]));
    EXPECT(mccsSuccess, mccsCommDestroy(comm));
    EXPECT(mccsSuccess, mccsStreamDestroy(stream));
    EXPECT(mccsSuccess, mccsDisconnect(client));
    EXPECT(mccsInvalidArgument, mccsCommDestroy(comm));
    EXPECT(mccsInvalidArgument, mccsCommAbort(comm));
    EXPECT(mccsInvalidArgument, mccsStreamQuery(stream));
    EXPECT(mccsInvalidArgument, mccsMemAlloc(client, (void **)&data, 64));
    EXPECT(mccsInvalidArgument, mccsDisconnect(client));
    EXPECT(mccsInvalidArgument, mccsDisconnect(NULL));
    return 0;
}
