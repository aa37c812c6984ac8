/* NCCL's library without a service and without a GPU: what it answers then. Declarations as in nccl.h. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ncclComm *ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetVersion(int *);
int ncclGetUniqueId(ncclUniqueId *);
int ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);
int ncclCommInitAll(ncclComm_t *, int, const int *);
int ncclCommDestroy(ncclComm_t);
int ncclCommAbort(ncclComm_t);
int ncclCommFinalize(ncclComm_t);
int ncclCommRevoke(ncclComm_t, int);
int ncclCommSplit(ncclComm_t, int, int, ncclComm_t *, void *);
int ncclCommShrink(ncclComm_t, int *, int, ncclComm_t *, void *, int);
int ncclCommCount(ncclComm_t, int *);
int ncclCommGetAsyncError(ncclComm_t, int *);
int ncclSend(const void *, size_t, int, int, ncclComm_t, void *);
int ncclRecv(void *, size_t, int, int, ncclComm_t, void *);
int ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, void *);
int ncclRedOpCreatePreMulSum(int *, void *, int, int, ncclComm_t);
int ncclMemFree(void *);
int ncclCommGrow(ncclComm_t, int, const ncclUniqueId *, int, ncclComm_t *, void *);
int ncclCommGetUniqueId(ncclComm_t, ncclUniqueId *);
int ncclCommSuspend(ncclComm_t, int);
int ncclCommResume(ncclComm_t);
int ncclCommMemStats(ncclComm_t, int, unsigned long long *);
int ncclAllReduceConfig(const void *, void *, size_t, int, int, ncclComm_t, void *, const void *);
int ncclSignal(int, int, int, unsigned, ncclComm_t, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclGroupSimulateEnd(void *);
const char *ncclGetErrorString(int);
const char *ncclGetLastError(ncclComm_t);

static int failures;
static void expect(const char *call, int got, int wanted) {
    if (got == wanted) return;
    fprintf(stderr, "%s: %d, not %d: %s\n", call, got, wanted, ncclGetLastError(NULL));
    failures++;
}
#define EXPECT(wanted, call) expect(#call, call, wanted)
#define TOLD(text) expect("tells of " text, strstr(ncclGetLastError(NULL), text) != NULL, 1)

/* For a thread without errors it is the process' last one. */
static void *told_elsewhere(void *text) {
    return strcmp(ncclGetLastError(NULL), text) == 0 ? text : NULL;
}

int main(void) {
    enum { success, cudaError, systemError, internalError, invalidArgument, invalidUsage };
    int version = 0, number = 0;
    float value = 2;
    ncclComm_t comm = NULL;
    ncclUniqueId id, foreign;
    EXPECT(success, ncclGetVersion(&version));
    EXPECT(23203, version);
    EXPECT(invalidArgument, ncclGetVersion(NULL));
    for (int code = 0; code < 9; code++) EXPECT(1, strlen(ncclGetErrorString(code)) > 5);

    /* Making an id takes a service: its address goes into it. */
    setenv("MCCS_SOCKET", "/nonexistent/mccs.sock", 1);
    EXPECT(systemError, ncclGetUniqueId(&id));
    TOLD("/nonexistent/mccs.sock");
    EXPECT(invalidArgument, ncclGetUniqueId(NULL));
    memset(&id, 0, sizeof id);
    memcpy(&id, "mccs-id", 8);
    memset(&foreign, 7, sizeof foreign);
    EXPECT(invalidArgument, ncclCommInitRank(&comm, 1, foreign, 0));
    TOLD("was not made by this library");
    EXPECT(invalidArgument, ncclCommInitRank(NULL, 1, id, 0));
    EXPECT(invalidArgument, ncclCommInitRank(&comm, -1, id, 0));
    EXPECT(systemError, ncclCommInitRank(&comm, 1, id, 0));
    TOLD("/nonexistent/mccs.sock");
    EXPECT(invalidArgument, ncclCommInitAll(NULL, 1, NULL));
    EXPECT(invalidArgument, ncclCommInitAll(&comm, 0, NULL));
    EXPECT(1, ncclCommInitAll(&comm, 1, NULL) != success);
    EXPECT(1, comm == NULL);

    /* Groups nest; what is closed was opened. */
    EXPECT(invalidUsage, ncclGroupEnd());
    TOLD("ncclGroupEnd without ncclGroupStart");
    EXPECT(success, ncclGroupStart());
    EXPECT(success, ncclGroupStart());
    EXPECT(invalidArgument, ncclSend(&value, 1, 7, 0, NULL, NULL));
    EXPECT(success, ncclGroupEnd());
    EXPECT(invalidArgument, ncclGroupEnd());
    EXPECT(invalidUsage, ncclGroupEnd());
    EXPECT(invalidUsage, ncclGroupSimulateEnd(NULL));
    /* A group whose call has failed is over, and so is one that is simulated. */
    EXPECT(success, ncclGroupStart());
    EXPECT(success, ncclGroupEnd());
    EXPECT(success, ncclGroupStart());
    EXPECT(invalidArgument, ncclGroupSimulateEnd(NULL));
    EXPECT(invalidUsage, ncclGroupEnd());

    EXPECT(invalidArgument, ncclRecv(&value, 1, 7, 0, NULL, NULL));
    EXPECT(invalidArgument, ncclAllReduce(&value, &value, 1, 7, 0, NULL, NULL));
    EXPECT(invalidArgument, ncclRedOpCreatePreMulSum(&number, &value, 7, 1, NULL));
    EXPECT(invalidArgument, ncclCommSplit(NULL, 0, 0, &comm, NULL));
    EXPECT(invalidArgument, ncclCommShrink(NULL, &number, 1, &comm, NULL, 0));
    EXPECT(success, ncclCommFinalize(NULL));
    EXPECT(invalidArgument, ncclCommRevoke(NULL, 0));
    EXPECT(invalidArgument, ncclCommCount(NULL, &number));
    EXPECT(invalidArgument, ncclCommGetAsyncError(NULL, &number));
    EXPECT(success, ncclCommDestroy(NULL));
    unsigned long long bytes;
    EXPECT(invalidArgument, ncclCommGetUniqueId(NULL, &id));
    EXPECT(invalidArgument, ncclCommGrow(NULL, 2, NULL, 1, &comm, NULL));
    EXPECT(invalidArgument, ncclCommGrow(NULL, 2, &foreign, 1, &comm, NULL));
    EXPECT(invalidArgument, ncclCommSuspend(NULL, 1));
    EXPECT(invalidArgument, ncclCommResume(NULL));
    EXPECT(invalidArgument, ncclCommMemStats(NULL, 0, &bytes));
    EXPECT(invalidArgument, ncclAllReduceConfig(&value, &value, 1, 7, 0, NULL, NULL, NULL));
    EXPECT(invalidArgument, ncclSignal(0, 0, 0, 0, NULL, NULL));
    EXPECT(success, ncclCommAbort(NULL));
    EXPECT(success, ncclMemFree(NULL));
    EXPECT(invalidArgument, ncclMemFree(&value));
    pthread_t thread;
    char text[1000];
    void *told;
    strncpy(text, ncclGetLastError(NULL), sizeof text - 1)[sizeof text - 1] = 0;
    EXPECT(0, pthread_create(&thread, NULL, told_elsewhere, text));
    EXPECT(0, pthread_join(thread, &told));
    EXPECT(1, told == text);
    return failures != 0;
}
