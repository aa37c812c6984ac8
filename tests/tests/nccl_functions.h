/* NCCL's functions, as nccl.h declares them, for programs that are compiled where there is none. */
#include <limits.h>
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
} ncclConfig_t;
#define UNDEFINED INT_MIN
#define CONFIG                                                                                                         \
    {                                                                                                                  \
        sizeof(ncclConfig_t), 0xcafebeef, 22809, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, NULL, UNDEFINED,          \
            UNDEFINED, NULL, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED                          \
    }
typedef struct {
    size_t size;
    unsigned magic, version;
    float estimatedTime;
} ncclSimInfo_t;
#define SIM_INFO {sizeof(ncclSimInfo_t), 0x74685283, 22809, 1}

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
void ncclResetDebugInit(void);
const char *ncclGetErrorString(int);
const char *ncclGetLastError(ncclComm_t);
