/* MSCCL++'s C API of version 0.1 on mccs, for programs in C++: names, numbers and signatures are that version's.
 * Link with -lmscclpp; MCCS_SOCKET names the socket of the host's service.
 *
 * Memory is the host's: that of mscclppHostAlloc, or whole pages as from mmap. Connections are used by threads of the processor, by
 * the same methods that kernels call. The service's proxy carries them, between processes and hosts.
 *
 * A call that fails tells the log handler why. Handles that are made up or destroyed are invalid arguments. */
#ifndef MSCCLPP_H_
#define MSCCLPP_H_

#ifndef __cplusplus
#error "mscclpp.h is for C++, as MSCCL++'s is: programs in C have mccs.h"
#endif

#define MSCCLPP_MAJOR 0
#define MSCCLPP_MINOR 1
#define MSCCLPP_PATCH 0
#define MSCCLPP_VERSION (MSCCLPP_MAJOR * 10000 + MSCCLPP_MINOR * 100 + MSCCLPP_PATCH)

#include <stddef.h>
#include <stdint.h>

extern "C" {

/* Results. */
typedef enum {
    mscclppSuccess = 0,
    mscclppUnhandledCudaError = 1,
    mscclppSystemError = 2,
    mscclppInternalError = 3,
    mscclppInvalidArgument = 4,
    mscclppInvalidUsage = 5,
    mscclppRemoteError = 6,
    mscclppInProgress = 7,
    mscclppNumResults = 8
} mscclppResult_t;

/* Name of a result, a constant. */
const char *mscclppGetErrorString(mscclppResult_t result);

/* Told why a call has failed, by the thread that has called. It calls nothing of this library. */
typedef void (*mscclppLogHandler_t)(const char *msg);
/* Writes a line to the standard error. */
void mscclppDefaultLogHandler(const char *msg);
/* Replaces the default log handler; null brings it back. */
mscclppResult_t mscclppSetLogHandler(mscclppLogHandler_t handler);

/* ---- Communicators ---- */

typedef struct mscclppComm *mscclppComm_t;

#define MSCCLPP_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[MSCCLPP_UNIQUE_ID_BYTES];
} mscclppUniqueId;

/* A name for one communicator. Called by rank 0, which tells it the others. */
mscclppResult_t mscclppGetUniqueId(mscclppUniqueId *uniqueId);
/* Joins a communicator as one of its ranks. Returns when all have joined. */
mscclppResult_t mscclppCommInitRankFromId(mscclppComm_t *comm, int nranks, mscclppUniqueId id, int rank);
/* The same, by an address "ip:port" of rank 0's host: rank 0 listens there until all others have asked it for the id. */
mscclppResult_t mscclppCommInitRank(mscclppComm_t *comm, int nranks, const char *ipPortPair, int rank);
/* Seconds that later mscclppCommInitRank and mscclppCommInitRankFromId wait for other ranks: at least 1. Default: 30. */
mscclppResult_t mscclppSetBootstrapConnTimeout(int timeout);
/* Leaves the communicator. Its device connections are of no use any more. */
mscclppResult_t mscclppCommDestroy(mscclppComm_t comm);
mscclppResult_t mscclppCommRank(mscclppComm_t comm, int *rank);
mscclppResult_t mscclppCommSize(mscclppComm_t comm, int *size);

/* Gathers `size` bytes of each rank: rank r's are at r * size, where it has put them before. */
mscclppResult_t mscclppBootstrapAllGather(mscclppComm_t comm, void *data, int size);
/* Returns when all ranks have called it. */
mscclppResult_t mscclppBootstrapBarrier(mscclppComm_t comm);

/* ---- Memory ---- */

/* mccs's own: zeroed host memory that the service maps too, and its end. It is to outlive the communicators that use it. */
mscclppResult_t mscclppHostAlloc(void **ptr, size_t bytes);
mscclppResult_t mscclppHostFree(void *ptr);

/* ---- Connections ---- */

/* Carrier of a connection. The operator's service chooses: both of the first and the last mean any. */
typedef enum { mscclppTransportP2P = 0, mscclppTransportSHM = 1, mscclppTransportIB = 2 } mscclppTransport_t;

/* Declares a connection, of which there is one for each pair of peer and tag. The peer declares its end. An NIC's name is for
 * mscclppTransportIB; the service chooses among its own. */
mscclppResult_t mscclppConnect(mscclppComm_t comm, int remoteRank, int tag, void *localBuff, uint64_t buffSize,
                               mscclppTransport_t transportType, const char *ibDev = 0);
/* Connects all that has been declared: once, by all ranks, also those that have declared nothing. */
mscclppResult_t mscclppConnectionSetup(mscclppComm_t comm);

struct mscclppBaseConn {
    int remoteRank;
    int tag;
    void *localBuff;
    /* Null: the peer's buffer is not mapped here. */
    void *remoteBuff;
    /* The library's name for it. */
    uint64_t connection;
};

struct mscclppDevConn;
/* Functions that its methods call. */
mscclppResult_t mscclppDevConnPut(const struct mscclppDevConn *conn, uint64_t dstOffset, uint64_t srcOffset, uint64_t size);
mscclppResult_t mscclppDevConnSignal(const struct mscclppDevConn *conn);
mscclppResult_t mscclppDevConnPutWithSignal(const struct mscclppDevConn *conn, uint64_t dstOffset, uint64_t srcOffset, uint64_t size);
mscclppResult_t mscclppDevConnPutWithSignalAndFlush(const struct mscclppDevConn *conn, uint64_t dstOffset, uint64_t srcOffset,
                                                    uint64_t size);
mscclppResult_t mscclppDevConnFlush(const struct mscclppDevConn *conn);
mscclppResult_t mscclppDevConnWait(const struct mscclppDevConn *conn);

} /* extern "C" */

/* One end of a connection. It may be copied. Any number of threads may call its methods at once. Methods return a result, where those of
 * MSCCL++ return nothing. */
struct mscclppDevConn : mscclppBaseConn {
    /* Begins to copy from the local buffer into the peer's. The source stays as it is until a flush has returned. */
    mscclppResult_t put(uint64_t dstDataOffset, uint64_t srcDataOffset, uint64_t dataSize) const {
        return mscclppDevConnPut(this, dstDataOffset, srcDataOffset, dataSize);
    }
    mscclppResult_t put(uint64_t dataOffset, uint64_t dataSize) const { return put(dataOffset, dataOffset, dataSize); }

    /* One wait of the peer ends, behind all earlier puts of this connection. */
    mscclppResult_t signal() const { return mscclppDevConnSignal(this); }

    mscclppResult_t putWithSignal(uint64_t dstDataOffset, uint64_t srcDataOffset, uint64_t dataSize) const {
        return mscclppDevConnPutWithSignal(this, dstDataOffset, srcDataOffset, dataSize);
    }
    mscclppResult_t putWithSignal(uint64_t dataOffset, uint64_t dataSize) const {
        return putWithSignal(dataOffset, dataOffset, dataSize);
    }

    mscclppResult_t putWithSignalAndFlush(uint64_t dstDataOffset, uint64_t srcDataOffset, uint64_t dataSize) const {
        return mscclppDevConnPutWithSignalAndFlush(this, dstDataOffset, srcDataOffset, dataSize);
    }
    mscclppResult_t putWithSignalAndFlush(uint64_t dataOffset, uint64_t dataSize) const {
        return putWithSignalAndFlush(dataOffset, dataOffset, dataSize);
    }

    /* Returns when all earlier puts of this connection have been copied. */
    mscclppResult_t flush() const { return mscclppDevConnFlush(this); }

    /* Waits for a signal of the peer: the puts before it are there. */
    mscclppResult_t wait() const { return mscclppDevConnWait(this); }
};

extern "C" {

typedef struct mscclppDevConn mscclppDevConn_t;

/* All connections, in the order of mscclppConnect. They live until the communicator is destroyed. */
mscclppResult_t mscclppGetAllDeviceConnections(mscclppComm_t comm, mscclppDevConn_t **devConns, int *nConns);
/* The one to a rank with a tag. */
mscclppResult_t mscclppGetDeviceConnection(mscclppComm_t comm, int remoteRank, int tag, mscclppDevConn_t **devConn);

/* The service's proxy carries connections from mscclppConnectionSetup on, also before the one and behind the other. */
mscclppResult_t mscclppProxyLaunch(mscclppComm_t comm);
mscclppResult_t mscclppProxyStop(mscclppComm_t comm);

/* ---- Registered buffers ---- */

struct mscclppRegisteredMemory {
    /* The library's name for it. */
    uint64_t memory;
};

/* Registers a buffer that connected peers may write, and learns theirs: all ranks call it, in one order. It lives as long as its
 * communicator. */
mscclppResult_t mscclppRegisterBuffer(mscclppComm_t comm, void *local_memory, size_t size, struct mscclppRegisteredMemory *regMem);
/* Writes to the buffers of all connected peers, behind earlier puts of the first connection to each. Returns when the source may be
 * written again. `stream` is 0: the host has no streams of CUDA. */
mscclppResult_t mscclppRegisteredBufferWrite(mscclppComm_t comm, struct mscclppRegisteredMemory *regMem, void *srcBuff, size_t size,
                                             uint32_t srcOffset, uint32_t dstOffset, int64_t stream);

} /* extern "C" */

#endif
