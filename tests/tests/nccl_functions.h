/* NCCL's functions, as nccl.h declares them, for programs that are compiled where there is none. */
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
enum { success, cudaError, systemError, internalError, invalidArgument, invalidUsage, remoteError, inProgress };
enum { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, float8e4m3, float8e5m2, TYPES };
enum { sum, prod, max, min, avg };
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
    int graphUsageMode, numRmaCtx, maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit;
    int hostCftMode, nvlsHostMode;
} ncclConfig_t;
#define UNDEFINED INT_MIN
#define CONFIG                                                                                                         \
    {                                                                                                                  \
        sizeof(ncclConfig_t), 0xcafebeef, 23203, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, NULL, UNDEFINED,          \
            UNDEFINED, NULL, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED,   \
            UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED                                \
    }
typedef struct {
    size_t size;
    unsigned magic, version;
    float estimatedTime;
} ncclSimInfo_t;
#define SIM_INFO {sizeof(ncclSimInfo_t), 0x74685283, 22809, 1}

typedef struct {
    size_t size;
    unsigned magic, version;
    const void *ext;
    int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
    const char *algSelection;
    int forceAlgSelection, CTAPolicy;
    unsigned long long userProfilerTag;
    void *launchCompletionEvent;
} ncclCollConfig_t;
#define COLL_CONFIG                                                                                                    \
    {                                                                                                                  \
        sizeof(ncclCollConfig_t), 0xcafebeef, 23203, NULL, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, NULL, 1,        \
            UNDEFINED, 0, NULL                                                                                         \
    }
typedef struct {
    size_t size;
    unsigned magic, version;
    int rank, nRanks, cudaDev, nvmlDev;
    bool deviceApiSupport, multimemSupport;
    int ginType, nLsaTeams;
    bool hostRmaSupport;
    int railedGinType;
    unsigned long long commHash;
    int ginMinStride, ginConnectionType;
    bool ginSupport[64];
    size_t devCommRuntimeVersionSize;
    bool cftSupport, cftMulticastSupport, cftCountedSupport;
} ncclCommProperties_t;
#define COMM_PROPERTIES {.size = sizeof(ncclCommProperties_t), .magic = 0xcafebeef, .version = 23203}
typedef struct {
    size_t size;
    unsigned magic, version;
    int mode;
    const char *psk;
} ncclEncryptionConfig_t;
#define ENCRYPTION_CONFIG {sizeof(ncclEncryptionConfig_t), 0xcafebeef, 23203, 0, NULL}

int ncclGetVersion(int *);
int ncclGetUniqueId(ncclUniqueId *);
int ncclCommInitRank(ncclComm_t *, int nranks, ncclUniqueId, int rank);
int ncclCommInitRankConfig(ncclComm_t *, int nranks, ncclUniqueId, int rank, ncclConfig_t *);
int ncclCommInitRankScalable(ncclComm_t *, int nranks, int rank, int ids, ncclUniqueId *, ncclConfig_t *);
int ncclCommInitAll(ncclComm_t *, int devices, const int *list);
int ncclCommFinalize(ncclComm_t);
int ncclCommDestroy(ncclComm_t);
int ncclCommAbort(ncclComm_t);
int ncclCommRevoke(ncclComm_t, int flags);
int ncclCommSplit(ncclComm_t, int color, int key, ncclComm_t *, ncclConfig_t *);
int ncclCommShrink(ncclComm_t, int *without, int count, ncclComm_t *, ncclConfig_t *, int flags);
int ncclCommCount(ncclComm_t, int *);
int ncclCommCuDevice(ncclComm_t, int *);
int ncclCommUserRank(ncclComm_t, int *);
int ncclCommGetAsyncError(ncclComm_t, int *);
int ncclMemAlloc(void **, size_t);
int ncclMemFree(void *);
int ncclCommRegister(ncclComm_t, void *, size_t, void **handle);
int ncclCommDeregister(ncclComm_t, void *handle);
int ncclCommWindowRegister(ncclComm_t, void *, size_t, void **window, int flags);
int ncclCommWindowDeregister(ncclComm_t, void *window);
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, ncclComm_t);
int ncclRedOpDestroy(int op, ncclComm_t);
int ncclAllReduce(const void *, void *, size_t, int type, int op, ncclComm_t, void *stream);
int ncclReduce(const void *, void *, size_t, int type, int op, int root, ncclComm_t, void *stream);
int ncclReduceScatter(const void *, void *, size_t, int type, int op, ncclComm_t, void *stream);
int ncclAllGather(const void *, void *, size_t, int type, ncclComm_t, void *stream);
int ncclBroadcast(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream);
int pncclBroadcast(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream);
int ncclBcast(void *, size_t, int type, int root, ncclComm_t, void *stream);
int ncclAlltoAll(const void *, void *, size_t, int type, ncclComm_t, void *stream);
int ncclGather(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream);
int ncclScatter(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream);
int ncclSend(const void *, size_t, int type, int peer, ncclComm_t, void *stream);
int ncclRecv(void *, size_t, int type, int peer, ncclComm_t, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclGroupSimulateEnd(ncclSimInfo_t *);
int ncclDevCommCreate(ncclComm_t, const void *, void *);
int ncclDevCommDestroy(ncclComm_t, const void *);
typedef struct {
    int nRanks, rank, stride;
} ncclTeam_t;
ncclTeam_t ncclTeamWorld(ncclComm_t);
ncclTeam_t ncclTeamLsa(ncclComm_t);
ncclTeam_t ncclTeamRail(ncclComm_t);
int ncclTeamRankToWorld(ncclComm_t, ncclTeam_t, int rank);
int ncclTeamRankToLsa(ncclComm_t, ncclTeam_t, int rank);
int ncclLsaBarrierCreateRequirement(ncclTeam_t, int barriers, void *handle, void *wanted);
int ncclGinBarrierCreateRequirement(ncclComm_t, ncclTeam_t, int barriers, void *handle, void *wanted);
int ncclLLA2ACalcSlots(int elements, int bytes);
int ncclLLA2ACreateRequirement(int blocks, int slots, void *handle, void *wanted);
int ncclGinOutboxCreateRequirement(int blocks, int size_log2, void *handle, void *wanted);
int ncclGinInboxA2ACreateRequirement(ncclTeam_t peers, int blocks, int size_log2, void *handle, void *wanted);
ncclTeam_t ncclTeamCft(ncclComm_t, int mode);
ncclTeam_t ncclTeamCftMultimem(ncclComm_t);
typedef struct {
    void *base;
} ncclMultimemHandle_t;
int ncclWinGetUserPtr(ncclComm_t, void *window, void **address);
int ncclGetPeerDevicePointer(void *window, size_t offset, int peer, void **address);
int ncclGetLsaDevicePointer(void *window, size_t offset, int rank, void **address);
int ncclGetLsaMultimemDevicePointer(void *window, size_t offset, void **address);
int ncclGetMultimemDevicePointer(void *window, size_t offset, ncclMultimemHandle_t, void **address);
int ncclGetMultimemDeviceLeInfo(void *window, size_t offset, unsigned *endpoint, size_t *in_it);
int ncclGetCftDeviceLeInfo(void *window, size_t offset, int peer, ncclTeam_t, unsigned *endpoint, size_t *in_it);
int ncclGetPeerDeviceLeInfo(void *window, size_t offset, int peer, unsigned *endpoint, size_t *in_it);
int ncclPutSignal(const void *, size_t, int type, int peer, void *window, size_t offset, int signal, int context, unsigned flags, ncclComm_t, void *stream);
int ncclSignal(int peer, int signal, int context, unsigned flags, ncclComm_t, void *stream);
int ncclWaitSignal(int descriptors, void *signals, ncclComm_t, void *stream);
int ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t *);
int ncclCommGetUniqueId(ncclComm_t, ncclUniqueId *);
int ncclCommGrow(ncclComm_t, int nranks, const ncclUniqueId *, int rank, ncclComm_t *, ncclConfig_t *);
int ncclCommSuspend(ncclComm_t, int flags);
int ncclCommResume(ncclComm_t);
int ncclCommMemStats(ncclComm_t, int what, unsigned long long *);
int ncclSetEncryption(const ncclEncryptionConfig_t *);
typedef struct ncclParamHandle *ncclParamHandle_t;
int ncclParamBind(ncclParamHandle_t *, const char *key);
int ncclParamGetI32(ncclParamHandle_t, int *);
int ncclParamGetStr(ncclParamHandle_t, const char **);
int ncclParamGet(ncclParamHandle_t, void *, int room, int *length);
int ncclParamGetParameter(const char *key, const char **, int *length);
int ncclParamGetAllParameterKeys(const char ***, int *count);
int ncclAllReduceConfig(const void *, void *, size_t, int type, int op, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclReduceConfig(const void *, void *, size_t, int type, int op, int root, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclReduceScatterConfig(const void *, void *, size_t, int type, int op, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclAllGatherConfig(const void *, void *, size_t, int type, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclBroadcastConfig(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclAlltoAllConfig(const void *, void *, size_t, int type, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclGatherConfig(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream, const ncclCollConfig_t *);
int ncclScatterConfig(const void *, void *, size_t, int type, int root, ncclComm_t, void *stream, const ncclCollConfig_t *);
void ncclResetDebugInit(void);
const char *ncclGetErrorString(int);
const char *ncclGetLastError(ncclComm_t);
