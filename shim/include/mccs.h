/* C API of mccs: the host's collective-communication service. Licence: Apache-2.0.
 *
 * Names, result codes, data types and operators are NCCL's where NCCL has them. All collectives return at once and
 * complete in the order of their stream; mccsStreamSynchronize waits. Buffers lie in memory that was allocated with
 * mccsMemAlloc or registered with mccsMemRegister. In place and count rules are NCCL's: count is elements per rank for
 * gathers, scatters and all-to-all. All functions may be called from any thread; handles must not be used after they
 * are destroyed. Null handles and pointers are mccsInvalidArgument, except where said otherwise.
 */
#ifndef MCCS_H
#define MCCS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mccsClient *mccsClient_t;
typedef struct mccsComm *mccsComm_t;
typedef struct mccsStream *mccsStream_t;
typedef struct mccsCudaComm *mccsCudaComm_t;

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

/* Connects to the service at `socket`; null for the one that the variable MCCS_SOCKET names. */
mccsResult_t mccsConnect(const char *socket, mccsClient_t *client);
/* Ends the session, and gives its memory back. Destroy communicators and streams first. */
mccsResult_t mccsDisconnect(mccsClient_t client);

mccsResult_t mccsGetUniqueId(mccsUniqueId *id);
/* What ranks at other services name as root address of communicators whose rank 0 is in this session: its process tells them, as it
 * tells them the id. Empty where the service knows no others; valid until mccsDisconnect. */
mccsResult_t mccsRootAddress(mccsClient_t client, const char **address);
/* Returns when all ranks have joined; inside a group at once, and *comm is set by the outermost mccsGroupEnd. device 0
 * is host memory; root_address is null or empty where all ranks are on this host, else as mccsRootAddress says. */
mccsResult_t mccsCommInitRank(mccsComm_t *comm, mccsClient_t client, int nranks, const mccsUniqueId *id, int rank,
                              int device, const char *root_address);
mccsResult_t mccsCommDestroy(mccsComm_t comm); /* waits for this rank's operations */
mccsResult_t mccsCommAbort(mccsComm_t comm);   /* outstanding operations fail on all ranks */
mccsResult_t mccsCommGetAsyncError(mccsComm_t comm, mccsResult_t *error);
mccsResult_t mccsCommCount(mccsComm_t comm, int *count);
mccsResult_t mccsCommUserRank(mccsComm_t comm, int *rank);

mccsResult_t mccsStreamCreate(mccsClient_t client, mccsStream_t *stream);
mccsResult_t mccsStreamDestroy(mccsStream_t stream); /* refused while work is in flight; the handle is gone either way */
mccsResult_t mccsStreamSynchronize(mccsStream_t stream);
mccsResult_t mccsStreamQuery(mccsStream_t stream); /* mccsInProgress while work is in flight */

mccsResult_t mccsMemAlloc(mccsClient_t client, void **ptr, size_t bytes);
mccsResult_t mccsMemFree(mccsClient_t client, void *ptr);
/* Whole pages of private, anonymous memory; they become shared memory at the same address, and stay so. Nobody may
 * access them during the call. */
mccsResult_t mccsMemRegister(mccsClient_t client, void *ptr, size_t bytes);
mccsResult_t mccsMemDeregister(mccsClient_t client, void *ptr);

/* A sum of every rank's contribution times its scalar. `scalar` leads to one element of dtype: an integer, float or
 * double. */
mccsResult_t mccsRedOpCreatePreMulSum(mccsRedOp_t *op, const void *scalar, mccsDataType_t dtype, mccsComm_t comm);
mccsResult_t mccsRedOpDestroy(mccsRedOp_t op, mccsComm_t comm);

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
mccsResult_t mccsSend(const void *sendbuff, size_t count, mccsDataType_t dtype, int peer, mccsComm_t comm,
                      mccsStream_t stream);
mccsResult_t mccsRecv(void *recvbuff, size_t count, mccsDataType_t dtype, int peer, mccsComm_t comm,
                      mccsStream_t stream);
mccsResult_t mccsBarrier(mccsComm_t comm, mccsStream_t stream);

/* Communicators of GPUs. A rank's GPU is that of the calling thread's current CUDA context, as after cudaSetDevice; the call
 * waits for all ranks, so a process with several calls it from as many threads. Buffers are device pointers, which need no
 * registration; `stream` is a cudaStream_t or CUstream of that context, null for its default stream. Calls return at once;
 * failures of operations are told by mccsCudaCommGetAsyncError, after the stream was synchronized. */
mccsResult_t mccsCudaCommInitRank(mccsCudaComm_t *comm, mccsClient_t client, int nranks, const mccsUniqueId *id, int rank);
/* With ranks at several services, on one host or on several; root_address as mccsRootAddress says where rank 0 is. Null, empty, or all ranks at
 * one service after all: as above. */
mccsResult_t mccsCudaCommInitRankAt(mccsCudaComm_t *comm, mccsClient_t client, int nranks, const mccsUniqueId *id, int rank,
                                    const char *root_address);
/* Leaves, when this rank's operations have ended, and waits for that. The handle stays, for mccsCudaCommDestroy, and for
 * mccsCudaCommAbort, by which another thread ends the wait. */
mccsResult_t mccsCudaCommFinalize(mccsCudaComm_t comm);
mccsResult_t mccsCudaCommDestroy(mccsCudaComm_t comm); /* as mccsCudaCommFinalize, once; the handle is gone at once */
/* Outstanding operations end without a result on all ranks; other threads' calls on the communicator return. The handle is gone. */
mccsResult_t mccsCudaCommAbort(mccsCudaComm_t comm);
/* 1 where the service carries collectives out: ranks are at several services, or the operator wants it so. Else 0. */
mccsResult_t mccsCudaCommIsServed(mccsCudaComm_t comm, int *is_served);
mccsResult_t mccsCudaCommGetAsyncError(mccsCudaComm_t comm, mccsResult_t *error);
mccsResult_t mccsCudaCommCount(mccsCudaComm_t comm, int *count);
mccsResult_t mccsCudaCommUserRank(mccsCudaComm_t comm, int *rank);

/* As mccsRedOpCreatePreMulSum; where `is_on_device` is not 0, `scalar` is a device pointer, read when a collective runs. */
mccsResult_t mccsCudaRedOpCreatePreMulSum(mccsRedOp_t *op, const void *scalar, mccsDataType_t dtype, int is_on_device,
                                          mccsCudaComm_t comm);
mccsResult_t mccsCudaRedOpDestroy(mccsRedOp_t op, mccsCudaComm_t comm);

mccsResult_t mccsCudaAllReduce(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, mccsRedOp_t op,
                               mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, mccsDataType_t dtype,
                                   mccsRedOp_t op, mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaReduce(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, mccsRedOp_t op,
                            int root, mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, mccsDataType_t dtype,
                               mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaAllToAll(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype,
                              mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaBroadcast(const void *sendbuff, void *recvbuff, size_t count, mccsDataType_t dtype, int root,
                               mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaGather(const void *sendbuff, void *recvbuff, size_t sendcount, mccsDataType_t dtype, int root,
                            mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaScatter(const void *sendbuff, void *recvbuff, size_t recvcount, mccsDataType_t dtype, int root,
                             mccsCudaComm_t comm, void *stream);
mccsResult_t mccsCudaBarrier(mccsCudaComm_t comm, void *stream);
/* Outside of a group each is on its own; to oneself only inside. Both ends say the same count and type. */
mccsResult_t mccsCudaSend(const void *sendbuff, size_t count, mccsDataType_t dtype, int peer, mccsCudaComm_t comm,
                          void *stream);
mccsResult_t mccsCudaRecv(void *recvbuff, size_t count, mccsDataType_t dtype, int peer, mccsCudaComm_t comm,
                          void *stream);

/* Operations of this thread between start and end are enqueued together, at the end; sends and receives start together. */
mccsResult_t mccsGroupStart(void);
mccsResult_t mccsGroupEnd(void);

const char *mccsGetErrorString(mccsResult_t result);
/* Text of this thread's last error; valid until its next one. */
const char *mccsGetLastError(void);

#ifdef __cplusplus
}
#endif
#endif
