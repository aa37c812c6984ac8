/* A collective that one rank never calls, ended as PyTorch's watchdog ends it: the main thread waits for its stream; another thread
 * asks for errors and, after a while, aborts all communicators, each in a thread of its own, and ends the process.
 *   usage: nccl_hung COUNT exit|signal|crash     with a service of two GPUs; COUNT floats. The process ends by exit(), by abort(), or by
 *          abort() without having aborted its communicators, which is what PyTorch does by default
 *   Prints how long aborting took, and how long the process took to end. */
#define _GNU_SOURCE
#include "driver.h"
#include "nccl_functions.h"
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COMMS = 2, PATIENCE_MS = 300, WATCHDOG_S = 120 };
static ncclComm_t comms[COMMS];
static size_t count;
static bool ends_by_signal, crashes;
static int told[2];

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int is = (call);                                                                                               \
        if (is != success) {                                                                                           \
            fprintf(stderr, "line %d: %s gave %d: %s\n", __LINE__, #call, is, ncclGetLastError(NULL));                 \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void pause_ms(int ms) { usleep(ms * 1000); }

static void tell(double time) {
    if (write(told[1], &time, sizeof time) != sizeof time) _exit(1);
}

static void *abort_one(void *comm) {
    OK(ncclCommAbort(comm));
    return NULL;
}

/* As PyTorch's watchdog, for the rank that hangs. */
static void *watch(void *unused) {
    int error = success;
    for (int waited = 0; waited < PATIENCE_MS; waited += 10) {
        for (int i = 0; i < COMMS; i++) OK(ncclCommGetAsyncError(comms[i], &error));
        if (error != success) fprintf(stderr, "there is an error before anybody has aborted: %d\n", error), _exit(1);
        pause_ms(10);
    }
    tell(now_ms());
    pthread_t threads[COMMS];
    for (int i = 0; i < COMMS && !crashes; i++) pthread_create(&threads[i], NULL, abort_one, comms[i]);
    for (int i = 0; i < COMMS && !crashes; i++) pthread_join(threads[i], NULL);
    tell(now_ms());
    if (ends_by_signal) abort();
    exit(0);
    return unused;
}

static void join(int rank, int *ids) {
    ncclUniqueId all[COMMS];
    if (rank == 0)
        for (int i = 0; i < COMMS; i++) OK(ncclGetUniqueId(&all[i]));
    if (rank == 0 ? write(ids[1], all, sizeof all) != sizeof all : read(ids[0], all, sizeof all) != sizeof all) _exit(1);
    for (int i = 0; i < COMMS; i++) OK(ncclCommInitRank(&comms[i], 2, all[i], rank));
}

static void run(int rank, int *ids) {
    alarm(WATCHDOG_S);
    load();
    CUstream stream = stream_on_gpu(rank);
    CUdeviceptr buffer;
    CUDA(cuMemAlloc_v2(&buffer, count * 4));
    join(rank, ids);
    for (int i = 0; i < COMMS; i++) {
        OK(ncclAllReduce((void *)buffer, (void *)buffer, count, float32, sum, comms[i], stream));
        CUDA(cuStreamSynchronize(stream));
    }
    if (rank == 1) {
        /* It computes, and its watchdog hears of the failure. */
        int error = success;
        while (error == success) {
            OK(ncclCommGetAsyncError(comms[0], &error));
            pause_ms(10);
        }
        if (error != remoteError) fprintf(stderr, "the other rank hears of %d\n", error), _exit(1);
        for (int i = 0; i < COMMS; i++) OK(ncclCommAbort(comms[i]));
        exit(0);
    }
    /* Several behind each other, so that the stream waits for more than one kernel. */
    for (int i = 0; i < 3; i++)
        OK(ncclAllReduce((void *)buffer, (void *)buffer, count, float32, sum, comms[0], stream));
    pthread_t watchdog;
    pthread_create(&watchdog, NULL, watch, NULL);
    cuStreamSynchronize(stream);
    /* Until the watchdog ends the process. */
    for (;;) pause();
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    count = strtoul(argv[1], NULL, 10);
    crashes = strcmp(argv[2], "crash") == 0;
    ends_by_signal = crashes || strcmp(argv[2], "signal") == 0;
    int ids[2], status[2];
    if (pipe(ids) || pipe(told)) return 1;
    pid_t ranks[2];
    for (int rank = 0; rank < 2; rank++)
        if ((ranks[rank] = fork()) == 0) run(rank, ids);
    double begun = 0, aborted = 0;
    close(told[1]);
    if (read(told[0], &begun, sizeof begun) != sizeof begun || read(told[0], &aborted, sizeof aborted) != sizeof aborted)
        fprintf(stderr, "rank 0 has not aborted\n");
    waitpid(ranks[0], &status[0], 0);
    double ended = now_ms();
    waitpid(ranks[1], &status[1], 0);
    printf("aborted in %.0f ms, the process ended %.0f ms later, the other rank's %.0f ms later\n", aborted - begun,
           ended - aborted, now_ms() - ended);
    int expected = ends_by_signal ? WIFSIGNALED(status[0]) && WTERMSIG(status[0]) == SIGABRT : status[0] == 0;
    return begun > 0 && aborted > 0 && expected && status[1] == 0 ? 0 : 1;
}
