/* Handles that programs misuse: every function refuses a communicator that is null, made up, destroyed, or destroyed by another thread
 * meanwhile, and touches no freed memory.
 *   usage: nccl_handles          without a service: null and made-up handles
 *          nccl_handles living   with a service and a GPU: destroyed ones, too */
#define _GNU_SOURCE
#include "driver.h"
#include "nccl_functions.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static CUdeviceptr memory;
static CUstream stream;

static void fail(const char *call, int line, int result, ncclComm_t comm) {
    fprintf(stderr, "line %d: %s gave %d with handle %p: %s\n", line, call, result, (void *)comm, ncclGetLastError(NULL));
    exit(1);
}
#define EXPECT(wanted, call)                                                                                           \
    do {                                                                                                               \
        int is = (call);                                                                                               \
        if (is != (wanted)) fail(#call, __LINE__, is, c);                                                              \
    } while (0)
#define REFUSED(call) EXPECT(invalidArgument, call)

/* Every function that takes a communicator refuses this one, and writes no answer. */
static void is_refused(ncclComm_t c) {
    void *at = (void *)memory, *handle = &handle;
    ncclComm_t made = NULL;
    int number = 77, list[] = {0};
    float factor = 2;
    REFUSED(ncclAllReduce(at, at, 1, float32, sum, c, stream));
    REFUSED(ncclReduce(at, at, 1, float32, sum, 0, c, stream));
    REFUSED(ncclReduceScatter(at, at, 1, float32, sum, c, stream));
    REFUSED(ncclAllGather(at, at, 1, float32, c, stream));
    REFUSED(ncclBroadcast(at, at, 1, float32, 0, c, stream));
    REFUSED(ncclBcast(at, 1, float32, 0, c, stream));
    REFUSED(ncclAlltoAll(at, at, 1, float32, c, stream));
    REFUSED(ncclGather(at, at, 1, float32, 0, c, stream));
    REFUSED(ncclScatter(at, at, 1, float32, 0, c, stream));
    REFUSED(ncclSend(at, 1, float32, 0, c, stream));
    REFUSED(ncclRecv(at, 1, float32, 0, c, stream));
    REFUSED(ncclCommCount(c, &number));
    REFUSED(ncclCommUserRank(c, &number));
    REFUSED(ncclCommCuDevice(c, &number));
    REFUSED(ncclCommGetAsyncError(c, &number));
    REFUSED(ncclRedOpCreatePreMulSum(&number, &factor, float32, 1, c));
    REFUSED(ncclRedOpDestroy(100, c));
    REFUSED(ncclCommSplit(c, 0, 0, &made, NULL));
    REFUSED(ncclCommShrink(c, list, 1, &made, NULL, 0));
    REFUSED(ncclCommRevoke(c, 0));
    REFUSED(ncclCommRegister(c, at, 64, &handle));
    REFUSED(ncclCommDeregister(c, handle));
    REFUSED(ncclAllReduceConfig(at, at, 1, float32, sum, c, stream, NULL));
    REFUSED(ncclBroadcastConfig(at, at, 1, float32, 0, c, stream, NULL));
    REFUSED(ncclPutSignal(at, 1, float32, 0, NULL, 0, 0, 0, 0, c, stream));
    REFUSED(ncclSignal(0, 0, 0, 0, c, stream));
    REFUSED(ncclWaitSignal(0, NULL, c, stream));
    REFUSED(ncclCommWindowRegister(c, handle, 64, &handle, 0));
    REFUSED(ncclCommWindowDeregister(c, handle));
    REFUSED(ncclWinGetUserPtr(c, handle, &handle));
    ncclUniqueId id;
    ncclCommProperties_t properties = {0};
    unsigned long long bytes = 77;
    REFUSED(ncclCommGetUniqueId(c, &id));
    REFUSED(ncclCommQueryProperties(c, &properties));
    REFUSED(ncclCommSuspend(c, 0));
    REFUSED(ncclCommResume(c));
    REFUSED(ncclCommMemStats(c, 0, &bytes));
    if (c != NULL) REFUSED(ncclCommGrow(c, 2, &id, -1, &made, NULL));
    EXPECT(0, ncclTeamWorld(c).nRanks);
    /* To give up nothing is no mistake, as in NCCL. */
    int ended = c == NULL ? success : invalidArgument;
    EXPECT(ended, ncclCommFinalize(c));
    EXPECT(ended, ncclCommAbort(c));
    EXPECT(ended, ncclCommDestroy(c));
    if (number != 77 || made != NULL || handle != &handle) fail("an answer was written", __LINE__, number, c);
    ncclGetLastError(c);
    /* A group in which it was used fails, and does nothing. */
    EXPECT(success, ncclGroupStart());
    REFUSED(ncclAllReduce(at, at, 1, float32, sum, c, stream));
    REFUSED(ncclGroupEnd());
}

static void made_up_handles_are_refused(void) {
    static char static_bytes[4096];
    char on_stack[4096] = {0}, *on_heap = calloc(1, 4096);
    is_refused(NULL);
    is_refused((ncclComm_t)static_bytes);
    is_refused((ncclComm_t)on_stack);
    is_refused((ncclComm_t)on_heap);
    is_refused((ncclComm_t)1);
    is_refused((ncclComm_t)UINTPTR_MAX);
    volatile uintptr_t freed = (uintptr_t)on_heap;
    free(on_heap);
    is_refused((ncclComm_t)freed);
    unsigned seed = (unsigned)time(NULL);
    for (int i = 0; i < 200; i++) {
        uintptr_t bits = 0;
        for (int part = 0; part < 5; part++) bits = bits << 15 ^ (uintptr_t)rand_r(&seed);
        is_refused((ncclComm_t)bits);
    }
}

static ncclComm_t alone(void) {
    ncclUniqueId id;
    ncclComm_t c = NULL;
    EXPECT(success, ncclGetUniqueId(&id));
    EXPECT(success, ncclCommInitRank(&c, 1, id, 0));
    return c;
}

/* A call's results while the handle may be destroyed: it was done, or the handle is refused. */
static int is_gone(int result, int line, ncclComm_t c) {
    if (result != success && result != invalidArgument) fail("a call beside ncclCommDestroy", line, result, c);
    return result == invalidArgument;
}

struct shared {
    ncclComm_t comm;
    CUcontext context;
    atomic_int calls, destroyed;
};

static void *calls_until_it_is_gone(void *argument) {
    struct shared *shared = argument;
    ncclComm_t c = shared->comm;
    int number;
    for (;; atomic_fetch_add(&shared->calls, 1)) {
        if (is_gone(ncclCommCount(c, &number), __LINE__, c)) break;
        if (is_gone(ncclCommGetAsyncError(c, &number), __LINE__, c)) break;
        if (is_gone(ncclAllReduce((void *)memory, (void *)memory, 1, float32, sum, c, stream), __LINE__, c)) break;
    }
    return NULL;
}

static void *destroys(void *argument) {
    struct shared *shared = argument;
    while (atomic_load(&shared->calls) < 20) {
    }
    if (ncclCommDestroy(shared->comm) == success) atomic_fetch_add(&shared->destroyed, 1);
    return NULL;
}

/* Two threads call, two destroy: one of them does. */
static void threads_meet_at_one_handle(void) {
    for (int round = 0; round < 20; round++) {
        struct shared shared = {.comm = alone()};
        ncclComm_t c = shared.comm;
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            EXPECT(0, pthread_create(&threads[i], NULL, i < 2 ? calls_until_it_is_gone : destroys, &shared));
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
        EXPECT(1, shared.destroyed);
        is_refused(c);
        CUDA(cuStreamSynchronize(stream));
    }
}

static void destroyed_handles_are_refused(void) {
    ncclComm_t seen[30];
    for (int i = 0; i < 30; i++) {
        ncclComm_t c = alone(), other = alone();
        int number = -1;
        /* No handle comes twice. */
        for (int before = 0; before < i; before++) EXPECT(1, seen[before] != c && seen[before] != other);
        seen[i] = c;
        EXPECT(success, i % 2 ? ncclCommDestroy(c) : ncclCommAbort(c));
        is_refused(c);
        EXPECT(success, ncclCommCount(other, &number));
        EXPECT(1, number);
        EXPECT(success, ncclAllReduce((void *)memory, (void *)memory, 1, float32, sum, other, stream));
        CUDA(cuStreamSynchronize(stream));
        EXPECT(success, ncclCommDestroy(other));
        if (i % 10 == 0) made_up_handles_are_refused();
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "living") == 0) {
        load();
        stream = stream_on_gpu(0);
        CUDA(cuMemAlloc_v2(&memory, 4096));
        destroyed_handles_are_refused();
        threads_meet_at_one_handle();
    } else {
        made_up_handles_are_refused();
    }
    printf("no handle was misused\n");
    return 0;
}
