/* Events of calls for a profiler plugin: the plugin writes a line for each event, and this program counts them.
 *   usage: nccl_profiler VERSION LOG [engines]     with NCCL_PROFILER_PLUGIN a plugin of that version (nccl_profiler_plugin.c), and a
 *          service with two GPUs; engines: whose copy engines do what has 64 KiB. MCCS_PROFILER_MASK: what the plugin wants */
#define _GNU_SOURCE
#include "driver.h"
#include "nccl_functions.h"
#include <string.h>
#include <unistd.h>

enum { GPUS = 2, CALLS = 10, GLOBAL = 0, LONG = 1 << 14 };
/* Kinds of events, as the plugin has them. */
enum {
    GROUP = 1 << 0, COLL = 1 << 1, P2P = 1 << 2, KERNEL_CH = 1 << 6, COLL_API = 1 << 9, P2P_API = 1 << 10, KERNEL_LAUNCH = 1 << 11,
    CE_COLL = 1 << 12, IN_COLL_API = COLL | CE_COLL | KERNEL_CH
};
static ncclComm_t comms[GPUS];
static CUcontext contexts[GPUS];
static CUstream streams[GPUS];
static CUdeviceptr buffers[GPUS];

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int is = (call);                                                                                               \
        if (is != success) {                                                                                           \
            fprintf(stderr, "line %d: %s gave %d: %s\n", __LINE__, #call, is, ncclGetLastError(NULL));                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void on(int gpu) { CUDA(cuCtxSetCurrent(contexts[gpu])); }

static void synchronize(void) {
    for (int i = 0; i < GPUS; i++) {
        on(i);
        CUDA(cuStreamSynchronize(streams[i]));
    }
}

static void all_reduce(int gpu, size_t count) {
    OK(ncclAllReduce((void *)buffers[gpu], (void *)buffers[gpu], count, float32, sum, comms[gpu], streams[gpu]));
}

static void capture_and_replay(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *graphs[GPUS], *executables[GPUS];
    CUresult (*begin)(CUstream, int), (*end)(CUstream, void **), (*instantiate)(void **, void *, unsigned long long);
    CUresult (*launch)(void *, CUstream), (*destroy)(void *), (*destroy_executable)(void *);
    *(void **)&begin = dlsym(driver, "cuStreamBeginCapture_v2");
    *(void **)&end = dlsym(driver, "cuStreamEndCapture");
    *(void **)&instantiate = dlsym(driver, "cuGraphInstantiateWithFlags");
    *(void **)&launch = dlsym(driver, "cuGraphLaunch");
    *(void **)&destroy = dlsym(driver, "cuGraphDestroy");
    *(void **)&destroy_executable = dlsym(driver, "cuGraphExecDestroy");
    for (int i = 0; i < GPUS; i++) {
        on(i);
        CUDA(begin(streams[i], GLOBAL));
        all_reduce(i, 333);
        CUDA(end(streams[i], &graphs[i]));
        CUDA(instantiate(&executables[i], graphs[i], 0));
    }
    for (int times = 0; times < 3; times++)
        for (int i = 0; i < GPUS; i++) {
            on(i);
            CUDA(launch(executables[i], streams[i]));
        }
    synchronize();
    for (int i = 0; i < GPUS; i++) {
        on(i);
        CUDA(destroy_executable(executables[i]));
        CUDA(destroy(graphs[i]));
    }
}

static char *text;

static int count(const char *part) {
    int found = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at += strlen(part)) found++;
    return found;
}

static void expect(const char *part, int wanted) {
    int found = count(part);
    if (found == wanted) return;
    fprintf(stderr, "%d times \"%s\", not %d, in\n%s", found, part, wanted, text);
    exit(1);
}

static int is_wanted(int kinds) {
    const char *mask = getenv("MCCS_PROFILER_MASK");
    return mask == NULL || (atoi(mask) & kinds);
}

/* Events of a kind come where the plugin wants any of `kinds`, which are that kind and what lies in such. */
static void expect_of(int kinds, const char *part, int wanted) { expect(part, is_wanted(kinds) ? wanted : 0); }

static void read_log(const char *name) {
    FILE *file = fopen(name, "r");
    text = calloc(1, 1 << 20);
    if (file == NULL || fread(text, 1, (1 << 20) - 1, file) == 0) {
        fprintf(stderr, "%s: there is no plugin's log\n", name);
        exit(1);
    }
    fclose(file);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    int version = atoi(argv[1]), by_engines = argc > 3;
    alarm(300);
    setenv("MCCS_PROFILER_LOG", argv[2], 1);
    load();
    CUDA(cuInit(0));
    OK(ncclCommInitAll(comms, GPUS, NULL));
    for (int i = 0; i < GPUS; i++) {
        CUdevice device;
        CUDA(cuDeviceGet(&device, i));
        CUDA(cuDevicePrimaryCtxRetain(&contexts[i], device));
        on(i);
        CUDA(cuStreamCreate(&streams[i], 1));
        CUDA(cuMemAlloc_v2(&buffers[i], LONG * 4));
    }
    for (int call = 0; call < CALLS; call++)
        for (int i = 0; i < GPUS; i++) {
            on(i);
            all_reduce(i, 100);
        }
    synchronize();
    /* One with a tag of the program's, and one without elements. */
    ncclCollConfig_t config = COLL_CONFIG;
    config.userProfilerTag = 4242;
    for (int i = 0; i < GPUS; i++) {
        on(i);
        OK(ncclAllGatherConfig((void *)buffers[i], (void *)(buffers[i] + 4096), 9, int32, comms[i], streams[i], &config));
        OK(ncclAllGather((void *)buffers[i], (void *)(buffers[i] + 4096), 0, int32, comms[i], streams[i]));
    }
    synchronize();
    OK(ncclGroupStart());
    for (int i = 0; i < GPUS; i++) {
        on(i);
        OK(ncclBroadcast((void *)buffers[i], (void *)buffers[i], 50, int32, 1, comms[i], streams[i]));
        if (i == 0) OK(ncclSend((void *)buffers[i], 7, float64, 1, comms[i], streams[i]));
        if (i == 1) OK(ncclRecv((void *)buffers[i], 7, float64, 0, comms[i], streams[i]));
    }
    OK(ncclGroupEnd());
    synchronize();
    /* A group that fails does nothing, and ends its event. */
    OK(ncclGroupStart());
    all_reduce(0, 1);
    if (ncclSend(NULL, 1, TYPES, 1, comms[0], streams[0]) == success || ncclGroupEnd() == success) return 1;
    if (by_engines) {
        for (int i = 0; i < GPUS; i++) {
            on(i);
            all_reduce(i, LONG);
        }
        synchronize();
    }
    capture_and_replay();
    /* From here on the GPU alone knows the numbers of kernels. */
    for (int i = 0; i < GPUS; i++) {
        on(i);
        all_reduce(i, 200);
    }
    synchronize();
    for (int i = 0; i < GPUS; i++) OK(ncclCommDestroy(comms[i]));

    read_log(argv[2]);
    int alone = (CALLS + 1) * GPUS, empty = GPUS, late = GPUS, in_graphs = GPUS, long_ones = by_engines ? GPUS : 0, operations = alone + empty + GPUS + in_graphs + late;
    /* A plugin that does not want these hears of them as of others. */
    int ce = version >= 6 && is_wanted(CE_COLL) ? long_ones : 0;
    expect("WRONG", 0);
    expect("init", GPUS);
    expect("finalize", GPUS);
    expect_of(GROUP | IN_COLL_API | P2P, " Group\n", operations + long_ones);
    expect_of(COLL | KERNEL_CH, " Coll in ", operations + long_ones - ce);
    expect_of(CE_COLL, " CeColl in ", ce);
    expect_of(P2P, " P2p in ", GPUS);
    expect_of(KERNEL_CH, " KernelCh in ", version >= 3 ? alone + GPUS : 0);
    expect_of(KERNEL_CH, " ran ", version >= 4 ? alone + GPUS : 0);
    expect(" GroupApi depth 1 captured 0", version >= 5 ? alone + empty + late + long_ones : 0);
    expect(" GroupApi depth 2 captured 0", version >= 5 ? 2 : 0);
    expect(" GroupApi depth 1 captured 1", version >= 5 ? in_graphs : 0);
    expect_of(COLL_API | IN_COLL_API, " CollApi in ", version >= 5 ? operations + long_ones + 1 : 0);
    expect_of(P2P_API | P2P, " P2pApi in ", version >= 5 ? GPUS : 0);
    expect_of(KERNEL_LAUNCH, " KernelLaunch in ", version >= 5 ? operations + long_ones : 0);
    /* All events that were begun have ended, and every kernel ran for some time. */
    int begun = count(" Group\n") + count(" Coll in ") + count(" CeColl in ") + count(" P2p in ") + count(" KernelCh in ")
        + count(" GroupApi ") + count(" CollApi in ") + count(" P2pApi in ") + count(" KernelLaunch in ");
    expect(" stop\n", begun);
    expect(" ran 0 ns", 0);
    expect_of(COLL | KERNEL_CH, " tag 4242\n", version >= 7 ? GPUS : 0);
    expect_of(COLL | KERNEL_CH, version == 1 ? ": 4 seq 9 count 100 type 7 root 0 channels 1" : ": AllReduce seq 9 count 100 ncclFloat32 root 0 ", GPUS);
    expect_of(COLL | KERNEL_CH, version == 1 ? ": 0 seq 0 count 50 type 2 root 1 channels 1" : ": Broadcast seq 0 count 50 ncclInt32 root 1 ", GPUS);
    expect_of(P2P, version == 1 ? ": 6 count 7 type 8 peer 1" : ": Send count 7 ncclFloat64 peer 1", 1);
    printf("a profiler plugin of version %d: %d events\n", version, begun);
    return 0;
}
