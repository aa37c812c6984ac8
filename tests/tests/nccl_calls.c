/* NCCL's library on communicators that live: every call, by a process for each rank, with data that differ by rank, element and run, and every
 * element compared with what it must be.
 *   usage: nccl_calls NRANKS [SOCKET ...]     the sockets of several services get as many ranks each; none: MCCS_SOCKET */
#define _GNU_SOURCE
#include "driver.h"
#include "nccl_functions.h"
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS_MAX = 8, ROOM = 1 << 22, UNTOUCHED = 0xa5, ABORT = 1, NO_COLOR = -1, DEVICE = 0, HOST = 1 };

/* State that the ranks' processes share beside the library. */
static struct shared {
    pthread_barrier_t barrier;
    ncclUniqueId ids[2];
    unsigned seed;
} *shared;
static int world_rank, world_size;
static CUstream stream;
static CUdeviceptr in, out;
static unsigned char *given, *got;
/* Operations so far: every one has other data. */
static unsigned round_number;

static void fail(const char *call, int line, int result) {
    fprintf(stderr, "rank %d, line %d: %s gave %d: %s\n", world_rank, line, call, result, ncclGetLastError(NULL));
    exit(1);
}
#define EXPECT(wanted, call)                                                                                           \
    do {                                                                                                               \
        int is = (call);                                                                                               \
        if (is != (wanted)) fail(#call, __LINE__, is);                                                                 \
    } while (0)
#define OK(call) EXPECT(success, call)
#define TRUE(condition) EXPECT(1, !!(condition))

/* All ranks' processes have come here, also those that had less to do. */
static void meet(void) {
    pthread_barrier_wait(&shared->barrier);
    round_number = (round_number / 10000 + 1) * 10000;
}

#include "nccl_reference.h"

/* As a profiler does: in the place of the library's, which it calls by its other name. */
static int broadcasts;
int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    broadcasts++;
    return pncclBroadcast(send, recv, count, type, root, comm, stream);
}

/* Configuration of collectives to come; null for the functions without. */
static const ncclCollConfig_t *configuration;

static int make_configured(const struct call *c, const struct member *m, void *send, void *recv) {
    switch (c->kind) {
    case ALL_REDUCE: return ncclAllReduceConfig(send, recv, c->count, c->type, c->op, m->comm, stream, configuration);
    case REDUCE: return ncclReduceConfig(send, recv, c->count, c->type, c->op, c->root, m->comm, stream, configuration);
    case REDUCE_SCATTER: return ncclReduceScatterConfig(send, recv, c->count, c->type, c->op, m->comm, stream, configuration);
    case ALL_GATHER: return ncclAllGatherConfig(send, recv, c->count, c->type, m->comm, stream, configuration);
    case BROADCAST: return ncclBroadcastConfig(send, recv, c->count, c->type, c->root, m->comm, stream, configuration);
    case BCAST: return ncclBcast(recv, c->count, c->type, c->root, m->comm, stream);
    case ALL_TO_ALL: return ncclAlltoAllConfig(send, recv, c->count, c->type, m->comm, stream, configuration);
    case GATHER: return ncclGatherConfig(send, recv, c->count, c->type, c->root, m->comm, stream, configuration);
    default: return ncclScatterConfig(send, recv, c->count, c->type, c->root, m->comm, stream, configuration);
    }
}

static int make(const struct call *c, const struct member *m, void *send, void *recv) {
    if (configuration != NULL) return make_configured(c, m, send, recv);
    switch (c->kind) {
    case ALL_REDUCE: return ncclAllReduce(send, recv, c->count, c->type, c->op, m->comm, stream);
    case REDUCE: return ncclReduce(send, recv, c->count, c->type, c->op, c->root, m->comm, stream);
    case REDUCE_SCATTER: return ncclReduceScatter(send, recv, c->count, c->type, c->op, m->comm, stream);
    case ALL_GATHER: return ncclAllGather(send, recv, c->count, c->type, m->comm, stream);
    case BROADCAST: return ncclBroadcast(send, recv, c->count, c->type, c->root, m->comm, stream);
    case BCAST: return ncclBcast(recv, c->count, c->type, c->root, m->comm, stream);
    case ALL_TO_ALL: return ncclAlltoAll(send, recv, c->count, c->type, m->comm, stream);
    case GATHER: return ncclGather(send, recv, c->count, c->type, c->root, m->comm, stream);
    default: return ncclScatter(send, recv, c->count, c->type, c->root, m->comm, stream);
    }
}

/* The driver's copy from memory that is not pinned may return before it has ended, and orders no stream that does not wait for the default one. */
static void to_gpu(CUdeviceptr to, const void *from, size_t bytes) {
    CUDA(cuMemcpyHtoD_v2(to, from, bytes));
    CUDA(cuStreamSynchronize(NULL));
}

/* Makes a call between buffers that are given, and checks every element that came, and that nothing else was written. */
static void run_between(struct call c, const struct member *m, CUdeviceptr input, CUdeviceptr output) {
    size_t size = SIZES[c.type], sent = send_count(&c, m), received = receive_count(&c, m), shift = 0;
    size_t looked_at = (sent > received ? sent : received) * size + 512;
    TRUE(looked_at <= ROOM);
    round_number++;
    for (size_t i = 0; i < sent; i++) store(given, c.type, i, own(&c, m->rank, i, m->n));
    CUdeviceptr send = input, recv = output;
    memset(got, UNTOUCHED, looked_at);
    if (c.in_place) {
        /* The smaller of both lies in the larger. */
        send = recv = output;
        int part = c.kind == REDUCE_SCATTER || c.kind == ALL_GATHER || (m->rank == c.root && (c.kind == GATHER || c.kind == SCATTER));
        size_t offset = part ? m->rank * c.count * size : 0;
        if (sent > received) recv += offset, shift = offset;
        else send += offset;
        memcpy(got + (send - output), given, sent * size);
    } else if (sent > 0) {
        to_gpu(input, given, sent * size);
    }
    to_gpu(output, got, looked_at);
    /* A rank that sends or receives nothing need not say where. */
    int result = make(&c, m, sent ? (void *)send : NULL, received ? (void *)recv : NULL);
    if (result != success) fail(NAMES[c.kind], __LINE__, result);
    CUDA(cuStreamSynchronize(stream));
    for (size_t i = 0; i < received; i++) store(got + shift, c.type, i, expected(&c, m, i));
    unsigned char *came = given;
    CUDA(cuMemcpyDtoH_v2(came, output, looked_at));
    for (size_t i = 0; i < looked_at; i++) {
        /* In place, what was sent beside the result may be written over. */
        int is_sent = c.in_place && i < sent * size && (i < shift || i >= shift + received * size);
        if (came[i] == got[i] || is_sent) continue;
        fprintf(stderr, "rank %d of %d: %s of %zu of type %d, op %d, root %d, in place %d: byte %zu is %d, not %d\n",
                m->rank, m->n, NAMES[c.kind], c.count, c.type, c.op, c.root, c.in_place, i, came[i], got[i]);
        exit(1);
    }
}

static void run(struct call c, const struct member *m) { run_between(c, m, in, out); }

static void check_collectives(const struct member *m) {
    static const size_t COUNTS[] = {0, 1, 37, 1021, 40009};
    int before = broadcasts;
    run((struct call){BCAST, 9, float32, sum, 0, 1, NULL}, m);
    EXPECT(before, broadcasts);
    for (enum kind kind = 0; kind < KINDS; kind++) {
        int has_root = kind == REDUCE || kind == BROADCAST || kind == BCAST || kind == GATHER || kind == SCATTER;
        int reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
        for (int in_place = kind == BCAST; in_place < 1 + (kind != ALL_TO_ALL); in_place++)
            for (int root = 0; root < (has_root ? m->n : 1); root++) {
                for (size_t i = 0; i < sizeof COUNTS / sizeof *COUNTS; i++)
                    run((struct call){kind, COUNTS[i], float32, sum, root, in_place, NULL}, m);
                for (int op = sum; reduces && op <= avg; op++)
                    for (int type = int32; type <= float64; type += float64 - int32)
                        run((struct call){kind, 501, type, op, root, in_place, NULL}, m);
            }
        for (int type = 0; type < TYPES; type++)
            for (int op = sum; op <= (reduces ? min : sum); op++)
                run((struct call){kind, 333, type, op, m->n - 1, kind == BCAST, NULL}, m);
    }
}

static void check_factors(const struct member *m) {
    static const int FACTORS[RANKS_MAX] = {3, -2, 5, 1, -4, 2, 7, -1};
    CUdeviceptr there;
    int first, op;
    double number = FACTORS[m->rank];
    CUDA(cuMemAlloc_v2(&there, sizeof number));
    to_gpu(there, &number, sizeof number);
    OK(ncclRedOpCreatePreMulSum(&first, &number, float64, HOST, m->comm));
    OK(ncclRedOpCreatePreMulSum(&op, (void *)there, float64, DEVICE, m->comm));
    TRUE(first != op && first > avg && op > avg);
    for (enum kind kind = ALL_REDUCE; kind <= REDUCE_SCATTER; kind++) {
        run((struct call){kind, 777, float64, first, m->n - 1, 0, FACTORS}, m);
        run((struct call){kind, 778, float64, op, m->n - 1, 1, FACTORS}, m);
    }
    OK(ncclRedOpDestroy(first, m->comm));
    EXPECT(invalidArgument, ncclRedOpDestroy(first, m->comm));
    EXPECT(invalidArgument, ncclAllReduce((void *)in, (void *)out, 1, float64, first, m->comm, stream));
    run((struct call){ALL_REDUCE, 779, float64, op, 0, 0, FACTORS}, m);
    OK(ncclRedOpDestroy(op, m->comm));
    int whole = FACTORS[m->rank];
    OK(ncclRedOpCreatePreMulSum(&op, &whole, int32, HOST, m->comm));
    run((struct call){ALL_REDUCE, 780, int32, op, 0, 0, FACTORS}, m);
    OK(ncclRedOpDestroy(op, m->comm));
    CUDA(cuMemFree_v2(there));
}

/* Elements of the message from one rank to another. */
static size_t length(int from, int to) { return (size_t)(from * 1013 + to * 307) % 2000 * 3 + 1; }

/* Messages of all ranks to all, also to themselves, in one group; then one outside of any. */
static void check_points(const struct member *m) {
    enum { APART = 8000 };
    round_number++;
    memset(got, UNTOUCHED, ROOM);
    to_gpu(out, got, ROOM);
    for (int peer = 0; peer < m->n; peer++) {
        for (size_t i = 0; i < length(m->rank, peer); i++) store(given + peer * APART * 4, float32, i, value(m->rank * RANKS_MAX + peer, i, -9, 19));
        for (size_t i = 0; i < length(peer, m->rank); i++) store(got + peer * APART * 4, float32, i, value(peer * RANKS_MAX + m->rank, i, -9, 19));
    }
    to_gpu(in, given, RANKS_MAX * APART * 4);
    OK(ncclGroupStart());
    for (int peer = 0; peer < m->n; peer++) {
        OK(ncclSend((void *)(in + peer * APART * 4), length(m->rank, peer), float32, peer, m->comm, stream));
        OK(ncclRecv((void *)(out + peer * APART * 4), length(peer, m->rank), float32, peer, m->comm, stream));
    }
    OK(ncclGroupEnd());
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuMemcpyDtoH_v2(given, out, ROOM));
    TRUE(memcmp(given, got, ROOM) == 0);
    if (m->n == 1) return;
    round_number++;
    if (m->rank == 0) {
        for (size_t i = 0; i < 4321; i++) store(given, int64, i, value(0, i, -99, 199));
        to_gpu(in, given, 4321 * 8);
        OK(ncclSend((void *)in, 4321, int64, m->n - 1, m->comm, stream));
    } else if (m->rank == m->n - 1) {
        OK(ncclRecv((void *)out, 4321, int64, 0, m->comm, stream));
    }
    CUDA(cuStreamSynchronize(stream));
    if (m->rank < m->n - 1) return;
    for (size_t i = 0; i < 4321; i++) store(given, int64, i, value(0, i, -99, 199));
    CUDA(cuMemcpyDtoH_v2(got, out, 4321 * 8));
    TRUE(memcmp(given, got, 4321 * 8) == 0);
}

/* Nothing of a group is done before its end, and nothing at all if a call in it fails, or if it is only simulated: so that rank 0 alone may do
 * all this. Then operations of all kinds in groups in one another. */
static void check_groups(const struct member *m) {
    enum { COUNT = 900 };
    ncclSimInfo_t info = SIM_INFO;
    size_t bytes = COUNT * 4;
    EXPECT(invalidUsage, ncclGroupEnd());
    EXPECT(invalidUsage, ncclGroupSimulateEnd(&info));
    memset(got, UNTOUCHED, bytes);
    to_gpu(out, got, bytes);
    for (int is_simulated = 0; m->rank == 0 && is_simulated < 2; is_simulated++) {
        ncclComm_t never = NULL;
        OK(ncclGroupStart());
        OK(ncclAllReduce((void *)in, (void *)out, COUNT, float32, sum, m->comm, stream));
        OK(ncclGroupStart());
        OK(ncclSend((void *)in, COUNT, float32, m->n - 1, m->comm, stream));
        OK(ncclCommInitRank(&never, world_size + 1, shared->ids[1], 0));
        if (!is_simulated) EXPECT(invalidArgument, ncclAllReduce((void *)in, (void *)out, COUNT, TYPES, sum, m->comm, stream));
        if (!is_simulated) EXPECT(invalidArgument, ncclRecv((void *)out, COUNT, float32, m->n, m->comm, stream));
        OK(is_simulated ? ncclGroupSimulateEnd(&info) : ncclGroupEnd());
        EXPECT(is_simulated ? success : invalidArgument, is_simulated ? ncclGroupSimulateEnd(&info) : ncclGroupEnd());
        TRUE(never != NULL);
        OK(ncclCommDestroy(never));
        EXPECT(invalidUsage, ncclGroupEnd());
        CUDA(cuStreamSynchronize(stream));
        CUDA(cuMemcpyDtoH_v2(given, out, bytes));
        TRUE(memcmp(given, got, bytes) == 0);
    }
    /* Nothing is known of what the service would carry out. A rank's message to itself takes a kernel all the same. */
    TRUE(m->rank > 0 || info.estimatedTime == -1 || info.estimatedTime > 0);
    info.magic = 0;
    OK(ncclGroupStart());
    EXPECT(invalidArgument, ncclGroupSimulateEnd(&info));
    OK(ncclGroupStart());
    EXPECT(invalidArgument, ncclGroupSimulateEnd(NULL));
    EXPECT(invalidUsage, ncclGroupEnd());
    /* The sum goes on from rank to rank. */
    round_number++;
    struct call call = {ALL_REDUCE, COUNT, int32, sum, 0, 0, NULL};
    for (size_t i = 0; i < COUNT; i++) store(given, int32, i, own(&call, m->rank, i, m->n));
    to_gpu(in, given, bytes);
    OK(ncclGroupStart());
    OK(ncclGroupStart());
    OK(ncclAllReduce((void *)in, (void *)out, COUNT, int32, sum, m->comm, stream));
    OK(ncclSend((void *)in, COUNT, int32, (m->rank + 1) % m->n, m->comm, stream));
    OK(ncclGroupEnd());
    OK(ncclBroadcast((void *)(out + bytes), (void *)(out + bytes), 0, int32, 0, m->comm, stream));
    OK(ncclRecv((void *)(out + bytes), COUNT, int32, (m->rank + m->n - 1) % m->n, m->comm, stream));
    OK(ncclReduceScatter((void *)in, (void *)(out + 2 * bytes), COUNT / m->n, int32, sum, m->comm, stream));
    OK(ncclGroupEnd());
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuMemcpyDtoH_v2(given, out, 3 * bytes));
    for (size_t i = 0; i < COUNT; i++) store(got, int32, i, combined(&call, i, m->n));
    TRUE(memcmp(given, got, bytes) == 0);
    size_t part = COUNT / m->n;
    TRUE(memcmp(given + 2 * bytes, got + m->rank * part * 4, part * 4) == 0);
    for (size_t i = 0; i < COUNT; i++) store(got, int32, i, own(&call, (m->rank + m->n - 1) % m->n, i, m->n));
    TRUE(memcmp(given + bytes, got, bytes) == 0);
}

/* Checks this process' rank in the communicator, and that it is well. */
static void check_place(const struct member *m) {
    int number = -1, gpus;
    OK(ncclCommCount(m->comm, &number));
    EXPECT(m->n, number);
    OK(ncclCommUserRank(m->comm, &number));
    EXPECT(m->rank, number);
    OK(ncclCommCuDevice(m->comm, &number));
    CUDA(cuDeviceGetCount(&gpus));
    EXPECT(world_rank % gpus, number);
    OK(ncclCommGetAsyncError(m->comm, &number));
    EXPECT(success, number);
}

static void check_quickly(const struct member *m) {
    check_place(m);
    run((struct call){ALL_REDUCE, 2049, float32, sum, 0, 0, NULL}, m);
    run((struct call){SCATTER, 55, int64, sum, m->n - 1, 0, NULL}, m);
    check_points(m);
}

#include "nccl_windows.h"

static void call_wrongly(const struct member *m) {
    void *send = (void *)in, *recv = (void *)out, *odd = (void *)(in + 1);
    ncclComm_t c = m->comm;
    int op, error;
    float factor = 2;
    EXPECT(invalidArgument, ncclAllReduce(NULL, recv, 5, float32, sum, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, odd, 5, float32, sum, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, recv, 5, TYPES, sum, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, recv, 5, -1, sum, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, recv, 5, float32, 5, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, recv, 5, float32, -1, c, stream));
    EXPECT(invalidArgument, ncclAllReduce(send, recv, 5, float32, INT_MAX, c, stream));
    EXPECT(invalidArgument, ncclReduceScatter(send, recv, (size_t)-1, float32, sum, c, stream));
    EXPECT(invalidArgument, ncclReduce(send, recv, 5, float32, sum, m->n, c, stream));
    EXPECT(invalidArgument, ncclBroadcast(send, recv, 5, float32, -1, c, stream));
    EXPECT(invalidArgument, ncclBcast(recv, 5, float32, m->n, c, stream));
    EXPECT(invalidArgument, ncclGather(send, recv, 5, float32, m->n, c, stream));
    EXPECT(invalidArgument, ncclScatter(send, recv, 5, float32, INT_MIN, c, stream));
    EXPECT(invalidArgument, ncclAlltoAll(send, (void *)(in + 4), 5, float32, c, stream));
    EXPECT(invalidArgument, ncclAllGather(send, NULL, 5, float32, c, stream));
    EXPECT(invalidArgument, ncclSend(send, 5, float32, m->n, c, stream));
    EXPECT(invalidArgument, ncclRecv(NULL, 5, float32, (m->rank + 1) % m->n, c, stream));
    EXPECT(invalidArgument, ncclRedOpCreatePreMulSum(&op, NULL, float32, HOST, c));
    EXPECT(invalidArgument, ncclRedOpCreatePreMulSum(NULL, &factor, float32, HOST, c));
    EXPECT(invalidArgument, ncclRedOpCreatePreMulSum(&op, &factor, float32, 2, c));
    EXPECT(invalidArgument, ncclRedOpCreatePreMulSum(&op, &factor, 77, HOST, c));
    EXPECT(invalidArgument, ncclRedOpDestroy(sum, c));
    EXPECT(invalidArgument, ncclRedOpDestroy(INT_MIN, c));
    EXPECT(invalidArgument, ncclCommCount(c, NULL));
    EXPECT(invalidArgument, ncclCommGetAsyncError(c, NULL));
    EXPECT(invalidArgument, ncclCommSplit(c, 0, 0, NULL, NULL));
    EXPECT(invalidArgument, ncclCommRegister(c, send, 5, NULL));
    EXPECT(invalidUsage, ncclDevCommCreate(c, NULL, NULL));
    EXPECT(invalidUsage, ncclDevCommDestroy(c, NULL));
    /* The result is not defined, but no error: nccl-tests do it. */
    OK(ncclAlltoAll(recv, recv, 5, float32, c, stream));
    OK(ncclAlltoAll(recv, recv, ROOM / RANKS_MAX, int8, c, stream));
    CUDA(cuStreamSynchronize(stream));
    OK(ncclCommGetAsyncError(c, &error));
    EXPECT(success, error);
}

static void check_memory(const struct member *m) {
    void *send = NULL, *recv = NULL, *handle = NULL, *window = NULL;
    OK(ncclMemAlloc(&send, ROOM));
    OK(ncclMemAlloc(&recv, ROOM));
    OK(ncclCommRegister(m->comm, send, ROOM, &handle));
    TRUE(handle != NULL);
    OK(ncclCommWindowRegister(m->comm, recv, ROOM, &window, 0));
    TRUE(window != NULL);
    run_between((struct call){ALL_REDUCE, 4096, float32, sum, 0, 0, NULL}, m, (CUdeviceptr)send, (CUdeviceptr)recv);
    run_between((struct call){ALL_GATHER, 300, float64, sum, 0, 1, NULL}, m, (CUdeviceptr)send, (CUdeviceptr)recv);
    OK(ncclCommWindowDeregister(m->comm, window));
    OK(ncclCommDeregister(m->comm, handle));
    OK(ncclMemFree(send));
    OK(ncclMemFree(recv));
    EXPECT(invalidArgument, ncclMemFree(recv));
    /* Allocators call it while they capture: the capture goes on. */
    enum { GLOBAL = 0 };
    void *graph, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*begin_capture)(CUstream, int), (*end_capture)(CUstream, void **), (*destroy_graph)(void *);
    *(void **)&begin_capture = dlsym(driver, "cuStreamBeginCapture_v2");
    *(void **)&end_capture = dlsym(driver, "cuStreamEndCapture");
    *(void **)&destroy_graph = dlsym(driver, "cuGraphDestroy");
    CUDA(begin_capture(stream, GLOBAL));
    OK(ncclMemAlloc(&send, ROOM));
    OK(ncclMemFree(send));
    CUDA(end_capture(stream, &graph));
    CUDA(destroy_graph(graph));
}

/* Colours by parity, with the order turned round; all but the last rank; two at once, in a group. */
static void check_splits(const struct member *m) {
    struct member made = {NULL, 0, 0}, other = {NULL, 0, 0};
    OK(ncclCommSplit(m->comm, m->rank % 2, -m->rank, &made.comm, NULL));
    for (int rank = m->rank % 2; rank < m->n; rank += 2) {
        made.n++;
        made.rank += rank > m->rank;
    }
    check_quickly(&made);
    OK(ncclCommDestroy(made.comm));
    meet();

    int is_out = m->n > 1 && m->rank == m->n - 1;
    made.comm = m->comm;
    OK(ncclCommSplit(m->comm, is_out ? NO_COLOR : 7, 0, &made.comm, NULL));
    TRUE((made.comm == NULL) == is_out);
    made.rank = m->rank, made.n = m->n > 1 ? m->n - 1 : 1;
    if (!is_out) {
        check_quickly(&made);
        OK(ncclCommDestroy(made.comm));
    }
    meet();

    OK(ncclGroupStart());
    OK(ncclCommSplit(m->comm, 1, m->rank, &made.comm, NULL));
    OK(ncclCommSplit(m->comm, 2, -m->rank, &other.comm, NULL));
    OK(ncclGroupEnd());
    made = (struct member){made.comm, m->rank, m->n};
    other = (struct member){other.comm, m->n - 1 - m->rank, m->n};
    check_quickly(&other);
    check_quickly(&made);
    OK(ncclCommDestroy(other.comm));
    OK(ncclCommDestroy(made.comm));
    check_quickly(m);
}

/* Waits in the stream for ranks that do not come. */
static void call_in_vain(const struct member *m) {
    OK(ncclAllReduce((void *)in, (void *)out, 99, float32, sum, m->comm, stream));
}

/* A rank has ended the communicator. The others' calls succeed until the asynchronous error has told them, as in NCCL, and streams go on; but
 * who never asks hears of it from a call in the end. The rank that has revoked it knows at once. */
static void check_surfacing(const struct member *m, int never_asks) {
    int next = (m->rank + 1) % m->n, result;
    if (m->rank == 1) {
        EXPECT(remoteError, ncclAllReduce((void *)in, (void *)out, 99, float32, sum, m->comm, stream));
        return;
    }
    for (int i = 0; i < 3; i++) {
        OK(ncclAllReduce((void *)in, (void *)out, 99, float32, sum, m->comm, stream));
        OK(ncclGroupStart());
        OK(ncclBroadcast((void *)in, (void *)out, 99, float32, 0, m->comm, stream));
        OK(ncclSend((void *)in, 99, float32, next, m->comm, stream));
        OK(ncclGroupEnd());
        CUDA(cuStreamSynchronize(stream));
    }
    if (!never_asks) return;
    do {
        result = ncclAllReduce((void *)in, (void *)out, 99, float32, sum, m->comm, stream);
        CUDA(cuStreamSynchronize(stream));
    } while (result == success);
    EXPECT(remoteError, result);
}

/* Leaves out a rank, the others go on without it; then once more, while they wait for it. */
static void check_shrinking(const struct member *m, int without) {
    struct member small = {NULL, m->rank - (m->rank > without), m->n - 1};
    int list[] = {without}, error;
    if (m->rank != without) {
        OK(ncclCommShrink(m->comm, list, 1, &small.comm, NULL, 0));
        check_quickly(&small);
        OK(ncclCommDestroy(small.comm));
    }
    meet();
    check_quickly(m);
    if (m->rank != without) call_in_vain(m);
    meet();
    if (m->rank != without) {
        OK(ncclCommShrink(m->comm, list, 1, &small.comm, NULL, ABORT));
        CUDA(cuStreamSynchronize(stream));
        OK(ncclCommGetAsyncError(m->comm, &error));
        EXPECT(remoteError, error);
        check_quickly(&small);
        OK(ncclCommFinalize(small.comm));
        OK(ncclCommDestroy(small.comm));
    }
    meet();
}

#include "nccl_2_32.h"

static ncclComm_t joined(int which) {
    ncclComm_t comm = NULL;
    meet();
    if (world_rank == 0) OK(ncclGetUniqueId(&shared->ids[0]));
    if (world_rank == 0) OK(ncclGetUniqueId(&shared->ids[1]));
    meet();
    ncclConfig_t config = CONFIG;
    ncclUniqueId *ids = shared->ids;
    switch (which) {
    case 0: OK(ncclCommInitRank(&comm, world_size, ids[0], world_rank)); break;
    case 1: OK(ncclCommInitRankConfig(&comm, world_size, ids[0], world_rank, &config)); break;
    case 2: OK(ncclCommInitRankConfig(&comm, world_size, ids[1], world_rank, NULL)); break;
    case 3:
        EXPECT(invalidArgument, ncclCommInitRankScalable(&comm, world_size, world_rank, 0, ids, &config));
        EXPECT(invalidArgument, ncclCommInitRankScalable(&comm, world_size, world_rank, world_size + 1, ids, &config));
        OK(ncclCommInitRankScalable(&comm, world_size, world_rank, world_size > 1 ? 2 : 1, ids, &config));
        break;
    default:
        /* The handle is there at once: some keep it elsewhere before the group ends. */
        OK(ncclGroupStart());
        OK(ncclCommInitRank(&comm, world_size, ids[1], world_rank));
        ncclComm_t kept = comm;
        TRUE(kept != NULL);
        comm = NULL;
        OK(ncclGroupEnd());
        TRUE(comm == NULL);
        return kept;
    }
    return comm;
}

/* Begins a communicator of all ranks that is not waited for. */
static int begin(ncclComm_t *comm, ncclUniqueId id, int rank) {
    ncclConfig_t config = CONFIG;
    config.blocking = 0;
    return ncclCommInitRankConfig(comm, world_size, id, rank, &config);
}

/* The result of a communicator that is not waited for. */
static int became(ncclComm_t comm) {
    int error;
    do OK(ncclCommGetAsyncError(comm, &error));
    while (error == inProgress);
    return error;
}

static void check_configurations(void) {
    struct { size_t at; int value; } wrong[] = {
        {offsetof(ncclConfig_t, magic), 0}, {offsetof(ncclConfig_t, size), 8}, {offsetof(ncclConfig_t, blocking), 2},
        {offsetof(ncclConfig_t, cgaClusterSize), -1}, {offsetof(ncclConfig_t, maxCTAs), 0}, {offsetof(ncclConfig_t, minCTAs), 5},
        {offsetof(ncclConfig_t, splitShare), 2}, {offsetof(ncclConfig_t, collnetEnable), -1}, {offsetof(ncclConfig_t, CTAPolicy), 3},
        {offsetof(ncclConfig_t, shrinkShare), 2}, {offsetof(ncclConfig_t, nvlsCTAs), 0}, {offsetof(ncclConfig_t, nChannelsPerNetPeer), 65},
        {offsetof(ncclConfig_t, nvlinkCentricSched), 2}, {offsetof(ncclConfig_t, trafficClass), 256},
        {offsetof(ncclConfig_t, graphUsageMode), 3}, {offsetof(ncclConfig_t, numRmaCtx), -1}, {offsetof(ncclConfig_t, maxP2pPeers), 0},
        {offsetof(ncclConfig_t, graphStreamOrdering), 2}, {offsetof(ncclConfig_t, hostCftMode), 4},
    };
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    OK(ncclGetUniqueId(&id));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ncclConfig_t config = CONFIG;
        memcpy((char *)&config + wrong[i].at, &wrong[i].value, sizeof(int));
        EXPECT(invalidArgument, ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    }
    /* As long as it was in 2.14: what lies behind is not read. */
    ncclConfig_t config = CONFIG;
    config.size = offsetof(ncclConfig_t, cgaClusterSize), config.version = 21400, config.minCTAs = config.splitShare = -5;
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    OK(ncclCommDestroy(comm));
}

/* A communicator that is being made says who is in it. */
static void check_known(const struct member *m) {
    int number = -1, gpus;
    OK(ncclCommCount(m->comm, &number));
    EXPECT(m->n, number);
    OK(ncclCommUserRank(m->comm, &number));
    EXPECT(m->rank, number);
    OK(ncclCommCuDevice(m->comm, &number));
    CUDA(cuDeviceGetCount(&gpus));
    EXPECT(world_rank % gpus, number);
}

/* Rank 0 waits for nobody. */
static void check_unwaited(void) {
    struct member all = {NULL, world_rank, world_size}, made = {NULL, 0, 1};
    int number, last = world_size - 1;
    meet();
    if (world_rank == 0) {
        OK(ncclGetUniqueId(&shared->ids[0]));
        OK(ncclGetUniqueId(&shared->ids[1]));
        EXPECT(inProgress, begin(&all.comm, shared->ids[0], 0));
        TRUE(all.comm != NULL);
        if (last > 0) {
            OK(ncclCommGetAsyncError(all.comm, &number));
            EXPECT(inProgress, number);
            check_known(&all);
            EXPECT(invalidArgument, ncclAllReduce((void *)in, (void *)out, 5, float32, sum, all.comm, stream));
            EXPECT(invalidArgument, ncclCommSplit(all.comm, 0, 0, &made.comm, NULL));
            EXPECT(invalidArgument, ncclCommFinalize(all.comm));
        }
        /* Another, which is not wanted any more before the others come. */
        ncclComm_t unwanted;
        OK(ncclGroupStart());
        OK(begin(&unwanted, shared->ids[1], 0));
        EXPECT(inProgress, ncclGroupEnd());
        OK(ncclCommAbort(unwanted));
        /* And one that cannot be. */
        EXPECT(inProgress, begin(&unwanted, shared->ids[0], world_size));
        EXPECT(invalidArgument, became(unwanted));
        EXPECT(invalidArgument, ncclCommCount(unwanted, &number));
        OK(ncclCommDestroy(unwanted));
    }
    meet();
    if (world_rank > 0) {
        OK(ncclCommInitRank(&all.comm, world_size, shared->ids[0], world_rank));
        int result = ncclCommInitRank(&made.comm, world_size, shared->ids[1], world_rank);
        TRUE(result == success || result == remoteError);
        if (result == success) {
            do OK(ncclCommGetAsyncError(made.comm, &number));
            while (number == success);
            EXPECT(remoteError, number);
            OK(ncclCommDestroy(made.comm));
        }
    }
    /* The driver may not make what a communicator needs while a stream of its process waits for others: none does until it is gone. */
    meet();
    EXPECT(success, became(all.comm));
    check_quickly(&all);
    /* Communicators made of it are not waited for either, and are made in the order of the calls. */
    struct member first = {NULL, last - world_rank, world_size}, second = {NULL, world_rank, world_size};
    int wanted = world_rank == 0 ? inProgress : success;
    EXPECT(wanted, ncclCommSplit(all.comm, 1, -world_rank, &first.comm, NULL));
    EXPECT(wanted, ncclCommSplit(all.comm, 2, world_rank, &second.comm, NULL));
    check_known(&first);
    check_known(&second);
    EXPECT(success, became(second.comm));
    EXPECT(success, became(first.comm));
    check_quickly(&first);
    check_quickly(&second);
    OK(ncclCommDestroy(first.comm));
    ncclConfig_t config = CONFIG;
    OK(ncclCommShrink(second.comm, NULL, 0, &first.comm, &config, 0));
    first.rank = world_rank;
    check_quickly(&first);
    OK(ncclCommDestroy(first.comm));
    OK(ncclCommDestroy(second.comm));
    /* As PyTorch shrinks a group. */
    EXPECT(wanted, ncclCommShrink(all.comm, NULL, 0, &first.comm, NULL, 0));
    check_known(&first);
    EXPECT(success, became(first.comm));
    OK(ncclCommDestroy(first.comm));
    /* One of either kind in a group: nobody knows a split's ranks before the group's end. */
    OK(ncclGroupStart());
    OK(ncclCommSplit(all.comm, 1, -world_rank, &first.comm, NULL));
    OK(ncclCommSplit(all.comm, 2, world_rank, &second.comm, &config));
    EXPECT(invalidArgument, ncclCommCount(first.comm, &number));
    OK(ncclGroupEnd());
    first.rank = last - world_rank;
    check_known(&first);
    EXPECT(success, became(first.comm));
    check_quickly(&first);
    check_quickly(&second);
    OK(ncclCommDestroy(first.comm));
    OK(ncclCommDestroy(second.comm));
    OK(ncclCommDestroy(all.comm));
}

/* Each rank of this process puts the second half of its buffer into the first half of the next one's. */
static void put_in_one_process(ncclComm_t *comms, CUstream *streams, CUcontext *contexts, CUdeviceptr *buffers, void **windows, int n, int count) {
    size_t half = count / 2 * 4;
    round_number++;
    for (int i = 0; i < n; i++) {
        fill(i, 0, count / 2);
        CUDA(cuCtxSetCurrent(contexts[i]));
        to_gpu(buffers[i] + half, given, half);
    }
    OK(ncclGroupStart());
    for (int i = 0; i < n; i++) OK(ncclCommWindowRegister(comms[i], (void *)buffers[i], count * 4, &windows[i], 0));
    OK(ncclGroupEnd());
    OK(ncclGroupStart());
    for (int i = 0; i < n; i++) {
        ncclWaitSignalDesc_t wait = {1, (i + n - 1) % n, 0, 0};
        CUDA(cuCtxSetCurrent(contexts[i]));
        OK(ncclWaitSignal(1, &wait, comms[i], streams[i]));
        OK(ncclPutSignal((void *)(buffers[i] + half), count / 2, int32, (i + 1) % n, windows[i], 0, 0, 0, 0, comms[i], streams[i]));
    }
    OK(ncclGroupEnd());
    for (int i = 0; i < n; i++) {
        CUDA(cuCtxSetCurrent(contexts[i]));
        CUDA(cuStreamSynchronize(streams[i]));
        has_come(buffers[i], (i + n - 1) % n, 0, count / 2);
        OK(ncclCommWindowDeregister(comms[i], windows[i]));
    }
}

/* All GPUs in one process, the last one first. */
static void check_init_all(void) {
    enum { COUNT = 1000 };
    int gpus, list[RANKS_MAX], number;
    ncclComm_t comms[RANKS_MAX];
    CUDA(cuDeviceGetCount(&gpus));
    gpus = gpus < RANKS_MAX ? gpus : RANKS_MAX;
    for (int i = 0; i < gpus; i++) list[i] = gpus - 1 - i;
    list[gpus - 1] = 99;
    EXPECT(invalidArgument, ncclCommInitAll(comms, gpus, list));
    list[gpus - 1] = gpus - 1;
    EXPECT(gpus > 1 ? invalidUsage : success, ncclCommInitAll(comms, gpus, list));
    if (gpus == 1) OK(ncclCommDestroy(comms[0]));
    list[gpus - 1] = 0;
    for (int has_list = 0; has_list < 2; has_list++) {
        CUcontext contexts[RANKS_MAX];
        CUstream streams[RANKS_MAX];
        CUdeviceptr buffers[RANKS_MAX];
        void *windows[RANKS_MAX];
        OK(ncclCommInitAll(comms, gpus, has_list ? list : NULL));
        round_number++;
        for (int i = 0; i < gpus; i++) {
            CUdevice device;
            CUDA(cuDeviceGet(&device, has_list ? list[i] : i));
            CUDA(cuDevicePrimaryCtxRetain(&contexts[i], device));
            CUDA(cuCtxSetCurrent(contexts[i]));
            CUDA(cuStreamCreate(&streams[i], 1));
            CUDA(cuMemAlloc_v2(&buffers[i], COUNT * 4));
            for (int at = 0; at < COUNT; at++) store(given, int32, at, value(i, at, -99, 199));
            to_gpu(buffers[i], given, COUNT * 4);
            OK(ncclCommUserRank(comms[i], &number));
            EXPECT(i, number);
            OK(ncclCommCuDevice(comms[i], &number));
            EXPECT(device, number);
        }
        OK(ncclGroupStart());
        for (int i = 0; i < gpus; i++) {
            CUDA(cuCtxSetCurrent(contexts[i]));
            OK(ncclBcast((void *)buffers[i], COUNT, int32, gpus - 1, comms[i], streams[i]));
        }
        OK(ncclGroupEnd());
        for (int i = 0; i < gpus; i++) {
            CUDA(cuCtxSetCurrent(contexts[i]));
            CUDA(cuStreamSynchronize(streams[i]));
            CUDA(cuMemcpyDtoH_v2(got, buffers[i], COUNT * 4));
            for (int at = 0; at < COUNT; at++) store(given, int32, at, value(gpus - 1, at, -99, 199));
            TRUE(memcmp(given, got, COUNT * 4) == 0);
        }
        if (reach_each_other(&(struct member){comms[0], 0, gpus})) put_in_one_process(comms, streams, contexts, buffers, windows, gpus, COUNT);
        for (int i = 0; i < gpus; i++) {
            OK(ncclCommDestroy(comms[i]));
            CUDA(cuMemFree_v2(buffers[i]));
        }
    }
}

static void be_rank(void) {
    int error, version;
    void *early;
    load();
    CUDA(cuInit(0));
    /* No context is current: it is the first GPU's. */
    OK(ncclMemAlloc(&early, 100));
    OK(ncclMemFree(early));
    stream = stream_on_gpu(world_rank);
    CUDA(cuMemAlloc_v2(&in, ROOM));
    CUDA(cuMemAlloc_v2(&out, ROOM));
    given = malloc(ROOM), got = malloc(ROOM);
    OK(ncclGetVersion(&version));
    TRUE(version > 22800);
    ncclResetDebugInit();
    struct member all = {joined(0), world_rank, world_size};
    check_place(&all);
    call_wrongly(&all);
    check_teams(&all);
    check_collectives(&all);
    check_factors(&all);
    check_points(&all);
    check_groups(&all);
    check_memory(&all);
    check_splits(&all);
    check_windows(&all);
    check_properties(&all);
    check_configured_collectives(&all);
    check_parameters();
    check_suspension(&all);
    check_encryption();
    OK(ncclCommFinalize(all.comm));
    EXPECT(invalidArgument, ncclAllReduce((void *)in, (void *)out, 5, float32, sum, all.comm, stream));
    OK(ncclCommDestroy(all.comm));
    TRUE(broadcasts > 0);
    for (int way = 1; way < 5; way++) {
        all.comm = joined(way);
        check_quickly(&all);
        OK(ncclCommDestroy(all.comm));
    }
    for (int without = 0; world_size > 1 && without < world_size; without += world_size - 1) {
        all.comm = joined(0);
        check_shrinking(&all, without);
        OK(ncclCommAbort(all.comm));
    }
    for (int revokes = 0; world_size > 1 && revokes < 2; revokes++) {
        all.comm = joined(0);
        if (all.rank > 0) call_in_vain(&all);
        meet();
        if (all.rank == 1 && revokes) OK(ncclCommRevoke(all.comm, 0));
        if (all.rank == 1 && !revokes) OK(ncclCommAbort(all.comm));
        CUDA(cuStreamSynchronize(stream));
        if (all.rank == 1 && !revokes) continue;
        check_surfacing(&all, revokes);
        /* Rank 0 has nothing to wait for: it hears of it by and by. */
        do OK(ncclCommGetAsyncError(all.comm, &error));
        while (error == success);
        EXPECT(remoteError, error);
        EXPECT(remoteError, ncclAllReduce((void *)in, (void *)out, 99, float32, sum, all.comm, stream));
        EXPECT(remoteError, ncclSend((void *)in, 99, float32, (all.rank + 1) % all.n, all.comm, stream));
        OK(ncclCommDestroy(all.comm));
    }
    all.comm = joined(0);
    if (world_size > 1 && reach_each_other(&all)) check_waits_in_vain(&all);
    else OK(ncclCommDestroy(all.comm));
    check_unwaited();
    if (world_size > 1) check_growth();
    if (world_size > 1) check_names();
    meet();
    if (world_rank == 0) check_init_all();
    if (world_rank == 0) check_configurations();
    CUDA(cuMemFree_v2(in));
    CUDA(cuMemFree_v2(out));
}

int main(int argc, char **argv) {
    world_size = argc > 1 ? atoi(argv[1]) : 0;
    if (world_size < 1 || world_size > RANKS_MAX) {
        fprintf(stderr, "usage: nccl_calls NRANKS [SOCKET ...], 1 to %d ranks\n", RANKS_MAX);
        return 2;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 2;
    pthread_barrierattr_t between;
    pthread_barrierattr_init(&between);
    pthread_barrierattr_setpshared(&between, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &between, (unsigned)world_size);
    shared->seed = (unsigned)time(NULL);
    pid_t ranks[RANKS_MAX];
    for (world_rank = 0; world_rank < world_size; world_rank++) {
        ranks[world_rank] = fork();
        if (ranks[world_rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(1800);
            if (argc > 2) setenv("MCCS_SOCKET", argv[2 + world_rank * (argc - 2) / world_size], 1);
            be_rank();
            return 0;
        }
    }
    for (int left = world_size; left > 0; left--) {
        int status = 0;
        if (wait(&status) > 0 && status == 0) continue;
        /* The others would wait for it. */
        for (int rank = 0; rank < world_size; rank++) kill(ranks[rank], SIGKILL);
        fprintf(stderr, "nccl_calls: a rank ended with status %d; the data were those of seed %u\n", status, shared->seed);
        return 1;
    }
    printf("%d ranks: every call of NCCL's\n", world_size);
    return 0;
}
