/* A profiler plugin for tests: checks that events come as NCCL's interface says, and writes one line for each into the file that
 * MCCS_PROFILER_LOG names. MCCS_PROFILER_MASK, if it is set, is what it wants to hear of. Compiled once for each version of the interface, with -DVERSION=1 to 7. Declarations as in NCCL's headers. */
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUP = 1 << 0, COLL = 1 << 1, P2P = 1 << 2, KERNEL_CH = 1 << 6, GROUP_API = 1 << 8, COLL_API = 1 << 9, P2P_API = 1 << 10,
    KERNEL_LAUNCH = 1 << 11, CE_COLL = 1 << 12
};
enum { KERNEL_CH_STOP = 22, GROUP_START_API_STOP = 23, GROUP_END_API_START = 24 };

typedef struct {
#if VERSION >= 5
    uint64_t type;
#else
    uint8_t type;
#endif
    void *parent;
    int rank;
    union {
        struct { bool captured; int depth; } group_api;
        struct {
            const char *function; size_t count; const char *type; int root; void *stream; bool captured;
#if VERSION >= 7
            uint64_t tag;
#endif
        } coll_api;
        struct {
            const char *function; size_t count; const char *type; void *stream; bool captured;
#if VERSION >= 7
            uint64_t tag;
#endif
        } p2p_api;
        struct { void *stream; } kernel_launch;
#if VERSION >= 4
        struct {
            uint64_t sequence; const char *function; const void *send; void *recv; size_t count; int root; const char *type;
            uint8_t channels, warps; const char *algorithm, *protocol;
#if VERSION >= 5
            void *group;
#endif
#if VERSION >= 7
            const char *variant; bool symmetric; uint64_t tag;
#endif
        } coll;
        struct {
            const char *function; void *buffer; const char *type; size_t count; int peer; uint8_t channels;
#if VERSION >= 5
            void *group;
#endif
#if VERSION >= 7
            uint64_t tag;
#endif
        } p2p;
        struct { uint8_t channel; uint64_t timer; } kernel_ch;
#elif VERSION >= 2
        struct {
            const char *name; uint64_t hash, sequence; const char *function; const void *send; void *recv; size_t count; int root;
            const char *type;
#if VERSION == 2
            size_t traffic;
#endif
            uint8_t channels, warps; const char *algorithm, *protocol;
        } coll;
        struct { const char *name; uint64_t hash; const char *function; void *buffer; const char *type; size_t count; int peer; } p2p;
        struct { uint8_t channel; } kernel_ch;
#else
        struct {
            const char *name; uint64_t hash, sequence; uint8_t function; const void *send; void *recv; size_t count; int root;
            uint8_t type; uint32_t op; size_t traffic; uint8_t channels, warps, algorithm, protocol; int collnet, nvls;
        } coll;
        struct { const char *name; uint64_t hash; uint8_t function; void *buffer; uint8_t type; size_t count; int peer; } p2p;
#endif
        struct {
            uint64_t sequence; const char *function; const void *send; void *recv; size_t count; int root; const char *type, *sync;
            bool in_batch; uint32_t batch, batches, number; void *stream;
        } ce_coll;
    };
} descriptor;

typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

/* An event, as long as it is used; never freed, so that use after its end is seen. */
struct event { uint64_t type; int number, parent, is_over; uint64_t timer; };
struct context { int rank, finalized; };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static int events;

static void line(const char *format, ...) {
    va_list arguments;
    if (out == NULL) {
        const char *name = getenv("MCCS_PROFILER_LOG");
        out = fopen(name != NULL ? name : "/dev/null", "a");
        setlinebuf(out);
    }
    va_start(arguments, format);
    vfprintf(out, format, arguments);
    va_end(arguments);
}

static void wrong(const char *what) { line("WRONG: %s\n", what); }

static int add_context(void **context, int *mask, int rank) {
    struct context *made = calloc(1, sizeof *made);
    made->rank = rank;
    *context = made;
    const char *wanted = getenv("MCCS_PROFILER_MASK");
    *mask = wanted != NULL ? atoi(wanted) : GROUP | COLL | P2P | KERNEL_CH | GROUP_API | COLL_API | P2P_API | KERNEL_LAUNCH | CE_COLL;
    return 0;
}

#if VERSION >= 5
static int init(void **context, uint64_t id, int *mask, const char *name, int nodes, int nranks, int rank, logger log) {
#elif VERSION == 4
static int init(void **context, int *mask, const char *name, uint64_t id, int nodes, int nranks, int rank, logger log) {
#else
static int init(void **context, int *mask) {
#endif
    pthread_mutex_lock(&lock);
#if VERSION >= 4
    if (id == 0 || nodes < 1 || nranks < 1 || rank < 0 || rank >= nranks || (name != NULL && strlen(name) > 200)) wrong("init");
    log(3, 1, __FILE__, __LINE__, "plugin of version %d: rank %d of %d, %s", VERSION, rank, nranks, "by its logger");
    line("init rank %d of %d\n", rank, nranks);
#else
    int rank = -1;
    line("init\n");
#endif
    int result = add_context(context, mask, rank);
    pthread_mutex_unlock(&lock);
    return result;
}

static int known(void *parent) {
    struct event *event = parent;
    return event == NULL ? 0 : event->number;
}

static int start(void *context, void **handle, descriptor *d) {
    pthread_mutex_lock(&lock);
    struct context *own = context;
    struct event *event = calloc(1, sizeof *event);
    struct event *parent = d->parent;
    if (own->finalized) wrong("an event after finalize");
    if (own->rank >= 0 && d->rank != own->rank) wrong("the rank of an event");
    event->type = d->type, event->number = ++events, event->parent = known(parent);
    *handle = event;
    switch (d->type) {
    case GROUP: line("%d Group\n", event->number); break;
    case COLL:
#if VERSION >= 2
        line("%d Coll in %d: %s seq %lu count %zu %s root %d %s %s channels %d\n", event->number, event->parent, d->coll.function,
             d->coll.sequence, d->coll.count, d->coll.type, d->coll.root, d->coll.algorithm, d->coll.protocol, d->coll.channels);
#if VERSION >= 7
        line("%d tag %lu\n", event->number, d->coll.tag);
#endif
#else
        line("%d Coll in %d: %d seq %lu count %zu type %d root %d channels %d\n", event->number, event->parent, d->coll.function,
             d->coll.sequence, d->coll.count, d->coll.type, d->coll.root, d->coll.channels);
#endif
#if VERSION >= 5
        if (parent == NULL || parent->type != COLL_API) wrong("the parent of a Coll");
        if (d->coll.group == NULL || ((struct event *)d->coll.group)->type != GROUP) wrong("the group of a Coll");
#else
        if (parent == NULL || parent->type != GROUP) wrong("the parent of a Coll");
#endif
        break;
    case P2P:
#if VERSION >= 2
        line("%d P2p in %d: %s count %zu %s peer %d\n", event->number, event->parent, d->p2p.function, d->p2p.count, d->p2p.type, d->p2p.peer);
#else
        line("%d P2p in %d: %d count %zu type %d peer %d\n", event->number, event->parent, d->p2p.function, d->p2p.count, d->p2p.type, d->p2p.peer);
#endif
        break;
#if VERSION >= 3
    case KERNEL_CH:
        if (parent == NULL || parent->type != COLL) wrong("the parent of a KernelCh");
#if VERSION >= 4
        event->timer = d->kernel_ch.timer;
#endif
        line("%d KernelCh in %d channel %d\n", event->number, event->parent, d->kernel_ch.channel);
        break;
#endif
#if VERSION >= 5
    case GROUP_API: line("%d GroupApi depth %d captured %d\n", event->number, d->group_api.depth, d->group_api.captured); break;
    case COLL_API:
        if (parent == NULL || parent->type != GROUP_API) wrong("the parent of a CollApi");
        line("%d CollApi in %d: %s count %zu %s root %d captured %d\n", event->number, event->parent, d->coll_api.function,
             d->coll_api.count, d->coll_api.type, d->coll_api.root, d->coll_api.captured);
        break;
    case P2P_API:
        if (parent == NULL || parent->type != GROUP_API) wrong("the parent of a P2pApi");
        line("%d P2pApi in %d: %s count %zu %s captured %d\n", event->number, event->parent, d->p2p_api.function, d->p2p_api.count,
             d->p2p_api.type, d->p2p_api.captured);
        break;
    case KERNEL_LAUNCH:
        if (parent == NULL || parent->type != GROUP_API) wrong("the parent of a KernelLaunch");
        line("%d KernelLaunch in %d\n", event->number, event->parent);
        break;
#endif
#if VERSION >= 6
    case CE_COLL: line("%d CeColl in %d: %s count %zu\n", event->number, event->parent, d->ce_coll.function, d->ce_coll.count); break;
#endif
    default: wrong("an event of a kind that this version does not have");
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int stop(void *handle) {
    pthread_mutex_lock(&lock);
    struct event *event = handle;
    if (event->is_over++) wrong("an event is stopped twice");
    line("%d stop\n", event->number);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int record(void *handle, int state, void *arguments) {
    pthread_mutex_lock(&lock);
    struct event *event = handle;
    if (event->is_over) wrong("a state of an event that is over");
    switch (state) {
    case KERNEL_CH_STOP:
        if (VERSION < 4 || event->type != KERNEL_CH || arguments == NULL) wrong("a kernel's end");
        else line("%d ran %lu ns\n", event->number, *(uint64_t *)arguments - event->timer);
        break;
    case GROUP_START_API_STOP:
    case GROUP_END_API_START:
        if (VERSION < 5 || event->type != GROUP_API) wrong("a group's state");
        line("%d state %d\n", event->number, state);
        break;
    default: wrong("a state");
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int finalize(void *context) {
    pthread_mutex_lock(&lock);
    struct context *own = context;
    if (own->finalized++) wrong("finalized twice");
    line("finalize rank %d\n", own->rank);
    pthread_mutex_unlock(&lock);
    return 0;
}

#define NAME_(version) ncclProfiler_v##version
#define NAME(version) NAME_(version)
struct {
    const char *name;
    int (*init)();
    int (*start)(void *, void **, descriptor *);
    int (*stop)(void *);
    int (*record)(void *, int, void *);
    int (*finalize)(void *);
} NAME(VERSION) = {"for tests", (int (*)())init, start, stop, record, finalize};
