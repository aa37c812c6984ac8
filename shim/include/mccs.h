/* C API of mccs: communicators, collectives, memory, streams, port channels.
 * Licence: Apache-2.0.
 *
 * Names, result codes, data types and operators are NCCL's where NCCL has them.
 *
 * Handles and pointers. A handle that is null, destroyed, or of another kind is mccsInvalidArgument. So is a null
 * pointer, except where said otherwise.
 *
 * Threads. Any thread may make any call, also while others use the same handle. All ranks of a communicator make the
 * same calls in the same order, however: a program whose threads share a communicator sees to that itself.
 *
 * Waiting. Collectives, sends and receives return at once and complete in the order of their stream. They wait only
 * while the session has as many operations in flight as its ring holds. Calls that wait for other ranks or for
 * operations say so.
 *
 * Errors. A call that returns mccsInvalidArgument has enqueued nothing, and its communicator is as good as before. A
 * failure that mccsStreamSynchronize, mccsStreamQuery or mccsCommGetAsyncError tells has ended its communicator, on
 * all ranks. mccsGetLastError has the text.
 */
#ifndef MCCS_H
#define MCCS_H

#include <stddef.h>
#include <stdint.h>

/* 10000 times the major version, 100 times the minor one, and the patch. Library and service are of one version. */
#define MCCS_VERSION 100

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mccsClient *mccsClient_t;
typedef struct mccsComm *mccsComm_t;
typedef struct mccsBootstrap *mccsBootstrap_t;
typedef struct mccsChannelMemory *mccsChannelMemory_t;
typedef struct mccsPortChannel *mccsPortChannel_t;
typedef struct mccsMemoryChannels *mccsMemoryChannels_t;
/* Communicators of the host's memory, and functions whose names begin with mccsStream, take streams of
 * mccsStreamCreate. Communicators of GPUs take a cudaStream_t or CUstream of their context, or null for its default
 * stream. The one in the place of the other is mccsInvalidArgument. */
typedef void *mccsStream_t;

/* Place of a communicator's buffers. */
typedef enum {
    mccsMemoryHost = 0, /* memory of mccsMemAlloc or mccsMemRegister */
    mccsMemoryCuda = 1  /* the GPU of the calling thread's current CUDA context, as after cudaSetDevice */
} mccsMemory_t;

/* Place of the scalar of a pre-multiplied sum; numbers as in NCCL. */
typedef enum {
    mccsScalarDevice = 0,       /* in the GPU's memory: read when a collective runs */
    mccsScalarHostImmediate = 1 /* in the host's memory: read by the call that makes the operator */
} mccsScalarResidence_t;

/* Names a communicator across its ranks: one rank makes it and tells the others. */
typedef struct { unsigned char internal[16]; } mccsUniqueId;

typedef enum {
    mccsSuccess = 0,
    mccsUnhandledCudaError = 1,
    mccsSystemError = 2,     /* the operating system, or no service */
    mccsInternalError = 3,   /* a bug in mccs */
    mccsInvalidArgument = 4, /* the caller; nothing was enqueued */
    mccsInvalidUsage = 5,    /* ranks contradict each other, or a quota */
    mccsRemoteError = 6,     /* another rank, or the service, has gone */
    mccsInProgress = 7,
    mccsTimeout = 8
} mccsResult_t;

typedef enum {
    mccsInt8 = 0, mccsUint8 = 1, mccsInt32 = 2, mccsUint32 = 3, mccsInt64 = 4, mccsUint64 = 5,
    mccsFloat16 = 6, mccsFloat32 = 7, mccsFloat64 = 8, mccsBfloat16 = 9, mccsFloat8e4m3 = 10, mccsFloat8e5m2 = 11
} mccsDataType_t;

/* Numbers from 100 on are operators made with mccsRedOpCreatePreMulSum. */
typedef int mccsRedOp_t;
enum { mccsSum = 0, mccsProd = 1, mccsMax = 2, mccsMin = 3, mccsAvg = 4 };

/* MCCS_VERSION of the library that runs. */
mccsResult_t mccsGetVersion(int *version);

/* Connects to the service at `socket`; null for the one that the variable MCCS_SOCKET names. */
mccsResult_t mccsConnect(const char *socket, mccsClient_t *client);
/* Ends the session, and gives its memory back, once the session's communicators and streams are destroyed. */
mccsResult_t mccsDisconnect(mccsClient_t client);

mccsResult_t mccsGetUniqueId(mccsUniqueId *id);
/* Root address that ranks at other services name for communicators whose rank 0 is in this session: its process tells them, as it
 * tells them the id. Null where the service knows no others; valid until mccsDisconnect. */
mccsResult_t mccsRootAddress(mccsClient_t client, const char **address);
/* How long ranks of this session wait for the others when they join, from here on. 0, as at first: as long as the operator says
 * (limits.init_timeout), which holds in any case. A rank that gives up is no part of the communicator. */
mccsResult_t mccsSetInitTimeout(mccsClient_t client, unsigned long long timeout_ms);
/* Returns when all ranks have joined. With memory of the host, inside a group: at once, and *comm is set by the outermost mccsGroupEnd.
 * With GPUs a process with several ranks calls it from as many threads. root_address is null where all ranks are at one service,
 * else what mccsRootAddress says where rank 0 is: mccs-launch sets MCCS_ROOT_ADDRESS. If a join in a group fails, its *comm
 * becomes null; the others are members. */
mccsResult_t mccsCommInitRank(mccsComm_t *comm, mccsClient_t client, int nranks, const mccsUniqueId *id, int rank,
                              mccsMemory_t memory, const char *root_address);
/* Leaves, when this rank's operations have ended, and waits for that. The handle stays, for mccsCommDestroy, and for mccsCommAbort, by
 * which another thread ends the wait. */
mccsResult_t mccsCommFinalize(mccsComm_t comm);
/* As mccsCommFinalize, unless that was called. The handle ends at once, also where the call fails. */
mccsResult_t mccsCommDestroy(mccsComm_t comm);
/* Outstanding operations fail on all ranks; other threads' calls on the communicator return. The handle ends. */
mccsResult_t mccsCommAbort(mccsComm_t comm);
/* 1 where the service carries collectives out: always with memory of the host; with GPUs if ranks are at several services, or the
 * operator wants it so. Else 0. */
mccsResult_t mccsCommIsServiceExecuted(mccsComm_t comm, int *is_service_executed);
/* The failure that ended the communicator, on any rank. After one, calls on GPUs fail with it; those on the host's memory are enqueued,
 * and mccsStreamSynchronize fails. */
mccsResult_t mccsCommGetAsyncError(mccsComm_t comm, mccsResult_t *error);
mccsResult_t mccsCommCount(mccsComm_t comm, int *count);
mccsResult_t mccsCommUserRank(mccsComm_t comm, int *rank);

mccsResult_t mccsStreamCreate(mccsClient_t client, mccsStream_t *stream);
/* Refused while work is in flight, while an open group has operations on the stream, and while another thread's call
 * uses it. The handle ends in any case; a stream that was refused goes when its work has ended. */
mccsResult_t mccsStreamDestroy(mccsStream_t stream);
/* Waits until all that was enqueued before has ended. Returns the first failure since the stream was last asked. */
mccsResult_t mccsStreamSynchronize(mccsStream_t stream);
/* As mccsStreamSynchronize, for timeout_ms at most: mccsInProgress where work is still in flight. */
mccsResult_t mccsStreamSynchronizeFor(mccsStream_t stream, uint64_t timeout_ms);
/* As mccsStreamSynchronize, without waiting: mccsInProgress while work is in flight. */
mccsResult_t mccsStreamQuery(mccsStream_t stream);

/* Memory that ranks of this host share with the service, from the start of a page, of zeros. */
mccsResult_t mccsMemAlloc(mccsClient_t client, void **ptr, size_t bytes);
/* Operations that were enqueued before may go on with the memory; the program no longer touches it. */
mccsResult_t mccsMemFree(mccsClient_t client, void *ptr);
/* Whole pages of private, anonymous memory; they become shared memory at the same address, and stay so. Nobody may
 * access them during the call, nor while an operation on them is in flight, also after mccsMemFree, which gives them back. */
mccsResult_t mccsMemRegister(mccsClient_t client, void *ptr, size_t bytes);

/* A sum of every rank's contribution times its scalar. `scalar` leads to one element of dtype. */
mccsResult_t mccsRedOpCreatePreMulSum(mccsRedOp_t *op, const void *scalar, mccsDataType_t dtype,
                                      mccsScalarResidence_t residence, mccsComm_t comm);
mccsResult_t mccsRedOpDestroy(mccsRedOp_t op, mccsComm_t comm);

/* Collectives. n is the number of ranks, r the caller's rank. Buffers hold elements of dtype, at an address that is a
 * multiple of an element's size. Those of the host lie in memory of mccsMemAlloc or mccsMemRegister; those of GPUs
 * need no registration. A buffer that a rank has no use for, as the receive buffer of a rank that is not root, may be
 * any pointer. Send and receive buffers are apart, or in place as the last column says.
 *
 * | function      | send elements | receive elements | what rank r receives                    | in place         |
 * | AllReduce     | count         | count            | all contributions combined              | send == recv     |
 * | ReduceScatter | n * recvcount | recvcount        | part r of what is combined              | send + r * recvcount == recv |
 * | Reduce        | count         | count, at root   | at root: all contributions combined     | send == recv     |
 * | AllGather     | sendcount     | n * sendcount    | all ranks' elements, by rank            | send == recv + r * sendcount |
 * | AllToAll      | n * count     | n * count        | part r of each rank's elements, by rank | never            |
 * | Broadcast     | count, at root | count           | root's elements                         | send == recv     |
 * | Gather        | sendcount     | n * sendcount, at root | at root: all ranks' elements, by rank | send == recv + root * sendcount |
 * | Scatter       | n * recvcount, at root | recvcount | part r of root's elements              | send + root * recvcount == recv |
 */
mccsResult_t mccsAllReduce(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, mccsRedOp_t op,
                           mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, mccsDataType_t dtype,
                               mccsRedOp_t op, mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsReduce(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, mccsRedOp_t op,
                        int root, mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, mccsDataType_t dtype,
                           mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsAllToAll(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, mccsComm_t comm,
                          mccsStream_t stream);
mccsResult_t mccsBroadcast(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, int root,
                           mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsGather(const void *sendbuff, void *recvbuff, size_t sendcount, mccsDataType_t dtype, int root,
                        mccsComm_t comm, mccsStream_t stream);
mccsResult_t mccsScatter(const void *sendbuff, void *recvbuff, size_t recvcount, mccsDataType_t dtype, int root,
                         mccsComm_t comm, mccsStream_t stream);
/* A send ends when the peer has received. Both ends say the same count and type. Sends and receives that depend on
 * each other belong in one group. With GPUs a rank sends to itself only inside a group. */
mccsResult_t mccsSend(const void *sendbuff, size_t count, mccsDataType_t dtype, int peer, mccsComm_t comm,
                      mccsStream_t stream);
mccsResult_t mccsRecv(void *recvbuff, size_t count, mccsDataType_t dtype, int peer, mccsComm_t comm,
                      mccsStream_t stream);
/* Ends on its stream when all ranks have called it. */
mccsResult_t mccsBarrier(mccsComm_t comm, mccsStream_t stream);

/* Operations of this thread between start and end, also those that other libraries call, are enqueued together at the
 * end; sends and receives start together. Groups nest: the outermost end enqueues. If a call inside fails, that end
 * returns the same result and enqueues nothing. If the end itself fails as it enqueues, abort the communicators: some
 * operations may be under way. */
mccsResult_t mccsGroupStart(void);
mccsResult_t mccsGroupEnd(void);

/* Ranks that tell each other bytes on the host, before they have a communicator or beside it. The id may be one that a communicator has,
 * too. Calls wait for all ranks, which make them in the same order; all name as many bytes, and `all` has room for those of every rank. */
mccsResult_t mccsBootstrapInit(mccsBootstrap_t *bootstrap, mccsClient_t client, int nranks, const mccsUniqueId *id, int rank,
                               const char *root_address);
mccsResult_t mccsBootstrapAllGather(mccsBootstrap_t bootstrap, const void *own, void *all, size_t bytes);
mccsResult_t mccsBootstrapBarrier(mccsBootstrap_t bootstrap);
mccsResult_t mccsBootstrapDestroy(mccsBootstrap_t bootstrap);

/* Port channels, of communicators of the host's memory: ranks put into each other's memory and signal, from any number of threads at once. */

/* Stands for a rank's memory at its peers: a plain value, which ranks tell each other, for example by mccsBootstrapAllGather. */
typedef struct {
    char internal[24];
} mccsRemoteMemory_t;

/* Lets peers put into `bytes` bytes from `ptr` on, which lie in memory of mccsMemAlloc or mccsMemRegister, and this rank from there. It ends
 * with mccsChannelMemoryFree, behind all that was called before, or with the memory: a put that comes later fails the communicator. For a
 * communicator of GPUs it is memory of cudaMalloc, or of cuMemCreate with descriptors, which stays allocated until it is freed here. */
mccsResult_t mccsChannelMemoryRegister(mccsChannelMemory_t *memory, mccsComm_t comm, void *ptr, size_t bytes);
mccsResult_t mccsChannelMemoryRemote(mccsChannelMemory_t memory, mccsRemoteMemory_t *remote);
mccsResult_t mccsChannelMemoryFree(mccsChannelMemory_t memory);

/* A channel to rank `peer` under a tag, whose puts are from one memory into another of that rank; with null for both, for signals alone. The peer
 * makes its own, with this rank and the same tag; neither waits for the other. Channels of one peer and tag share their signals, and what they
 * are given is done in that order. Channels and memory are freed before their communicator. */
mccsResult_t mccsPortChannelCreate(mccsPortChannel_t *channel, mccsComm_t comm, int peer, uint32_t tag, mccsChannelMemory_t from,
                                   const mccsRemoteMemory_t *into);
mccsResult_t mccsPortChannelDestroy(mccsPortChannel_t channel);
/* Return at once, unless 512 calls wait for the service. A flush returns when all calls before have ended: memory that was put from may be
 * written again. */
mccsResult_t mccsPortChannelPut(mccsPortChannel_t channel, uint64_t from_offset, uint64_t into_offset, uint64_t bytes);
mccsResult_t mccsPortChannelSignal(mccsPortChannel_t channel);
mccsResult_t mccsPortChannelPutWithSignal(mccsPortChannel_t channel, uint64_t from_offset, uint64_t into_offset, uint64_t bytes);
mccsResult_t mccsPortChannelPutWithSignalAndFlush(mccsPortChannel_t channel, uint64_t from_offset, uint64_t into_offset,
                                                  uint64_t bytes);
mccsResult_t mccsPortChannelFlush(mccsPortChannel_t channel);
/* Takes a signal of the peer under this tag: puts before it are there. WaitFor returns mccsInProgress where none comes in that time, and leaves it
 * to a later wait. Poll says whether there was one. */
mccsResult_t mccsPortChannelWait(mccsPortChannel_t channel);
mccsResult_t mccsPortChannelWaitFor(mccsPortChannel_t channel, uint64_t timeout_ms);
mccsResult_t mccsPortChannelPoll(mccsPortChannel_t channel, int *has_come);

/* A channel of a communicator of GPUs as kernels use it: mccs::PortChannel of mccs/device.cuh, to be passed to kernels by value. These end before
 * the channel is destroyed. Kernels and threads each take signals by a count of their own: of one peer and tag let only the ones wait. */
typedef struct {
    uint64_t internal[9];
} mccsDevicePortChannel_t;
mccsResult_t mccsPortChannelDevice(mccsPortChannel_t channel, mccsDevicePortChannel_t *device);
/* Tells the service that kernels are about to use the communicator's channels: it looks for their calls without pause for a while. Without it the
 * first one after a pause may wait: for a millisecond, and after ten seconds for ten. */
mccsResult_t mccsPortChannelsWake(mccsComm_t comm);

/* Memory channels: kernels of ranks whose GPUs reach each other copy by themselves (mccs::MemoryChannel of mccs/device.cuh).
 *
 * 1. Each rank gives `bytes` bytes of its GPU's memory from `ptr` on (cudaMalloc, or of this process), for channels of as many tags to each peer,
 *    1 to 1024. It tells the others its part, for example by mccsBootstrapAllGather.
 * 2. It opens the channels with the parts of all ranks, in their order.
 * 3. It asks for the channel to a peer under a tag, and passes it to kernels by value. The peer asks for its own, with this rank and the same tag.
 *
 * Kernels of all ranks have ended before any rank destroys its channels or frees the memory. They are let go when the communicator fails. */
typedef struct {
    char internal[248];
} mccsMemoryChannelsPart_t;
typedef struct {
    uint64_t internal[8];
} mccsDeviceMemoryChannel_t;
mccsResult_t mccsMemoryChannelsCreate(mccsMemoryChannels_t *channels, mccsComm_t comm, void *ptr, size_t bytes, uint32_t tags,
                                      mccsMemoryChannelsPart_t *part);
mccsResult_t mccsMemoryChannelsOpen(mccsMemoryChannels_t channels, mccsComm_t comm, const mccsMemoryChannelsPart_t *parts);
mccsResult_t mccsMemoryChannelDevice(mccsMemoryChannels_t channels, int peer, uint32_t tag, mccsDeviceMemoryChannel_t *device);
mccsResult_t mccsMemoryChannelsDestroy(mccsMemoryChannels_t channels);

/* 1: something is of no use any more; 2: a call was refused; 3: a session or a communicator begins or ends. */
typedef void (*mccsLogHandler_t)(int level, const char *message, void *user);
/* Has the library tell a function what happens, from any thread, within calls. The function calls nothing of this
 * library: it would wait for itself. After a call with null no thread is in the function. The library prints nothing. */
mccsResult_t mccsSetLogHandler(mccsLogHandler_t handler, void *user);

const char *mccsGetErrorString(mccsResult_t result);
/* Reason of the last call of this thread that failed. The text is valid until the next such call. */
const char *mccsGetLastError(void);

#ifdef __cplusplus
}
#endif
#endif
