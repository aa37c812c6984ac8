// NCCL's verbs calls on two emulated NICs, in its order and with its attributes. Symbols by their
// versions, an announcement of each receive written into the sender's memory, the data by a write
// and a write with immediate, a flush by a read on a queue pair that is connected to itself. Data
// are random, and checked; with memory of GPUs where asked for.
//
// usage: nccl_sequence LIBRARY host|dma-buf|peer check|rate|cost
//
// LIBRARY is the emulated devices as tests/nics/versioned links them; MCCS_NICS names their folder, which has hosts h0 and h1:
// the first device of each is used. Real devices have no hosts: both sides use the first one, or the one that MCCS_TEST_NIC names, by its
// GID with the index MCCS_TEST_GID (0). MCCS_TEST_ORDERED registers memory without relaxed ordering. `rate` prints what the devices carry, one way and both ways at once; with memory of GPUs also
// what their copy engines carry without a NIC. `cost` prints what that costs the processor: time of 8 B there and back, and processor time, switches and threads of both processes. Needs no headers but libc's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition, ...) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, " (errno %d)\n", errno); \
            _exit(1); \
        } \
    } while (0)

// Parts of verbs.h that are used here, as programs see them.
struct device { void *ops[2]; int node_type, transport_type; char name[64], dev_name[64], dev_path[256], ibdev_path[256]; };
struct cq;
struct qp { void *context, *qp_context, *pd, *send_cq, *recv_cq, *srq; uint32_t handle, qp_num; };
struct sge { uint64_t addr; uint32_t length, lkey; };
struct send_wr {
    uint64_t wr_id; struct send_wr *next; struct sge *sg_list; int num_sge; uint32_t opcode; unsigned send_flags; uint32_t imm_data;
    uint64_t remote_addr; uint32_t rkey; char rest[76];
};
struct recv_wr { uint64_t wr_id; struct recv_wr *next; struct sge *sg_list; int num_sge; };
struct wc {
    uint64_t wr_id; uint32_t status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp; unsigned wc_flags;
    uint16_t pkey_index, slid; uint8_t sl, dlid_path_bits;
};
struct context {
    struct device *device; void *before_poll[11]; int (*poll_cq)(struct cq *, int, struct wc *); void *between[13];
    int (*post_send)(struct qp *, struct send_wr *, struct send_wr **); int (*post_recv)(struct qp *, struct recv_wr *, struct recv_wr **);
};
struct mr { void *context, *pd, *addr; size_t length; uint32_t handle, lkey, rkey; };
struct device_attr { char fw[64]; uint64_t node_guid, sys_image_guid, max_mr_size; char rest[139]; uint8_t ports; char tail[8]; };
struct port_attr { uint32_t state, max_mtu, active_mtu; int gid_tbl_len; uint32_t others[4]; uint16_t pkeys, lid, sm_lid; uint8_t more[5], width, speed, phys, link_layer; char rest[32]; };
union gid { uint8_t raw[16]; uint64_t words[2]; };
struct qp_cap { uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data; };
struct qp_init { void *qp_context; struct cq *send_cq, *recv_cq; void *srq; struct qp_cap cap; uint32_t type; int sq_sig_all; };
struct ah { union gid dgid; uint32_t flow_label; uint8_t sgid_index, hop_limit, traffic_class; uint16_t dlid; uint8_t sl, bits, rate, is_global, port; };
struct qp_attr {
    uint32_t state, current, mtu, migration, qkey, rq_psn, sq_psn, dest_qp; unsigned access; struct qp_cap cap; struct ah ah, other;
    uint16_t pkey_index, other_pkey; uint8_t notify, draining, rd_atomic, dest_rd_atomic, min_rnr, port, timeout, retry, rnr_retry, a, b; uint32_t limit;
};
struct event { void *element; int type; };
enum { RESET, INIT, RTR, RTS };
enum { STATE = 1, ACCESS = 1 << 3, PKEY = 1 << 4, PORT = 1 << 5, AV = 1 << 7, MTU = 1 << 8, TIMEOUT = 1 << 9, RETRY = 1 << 10, RNR_RETRY = 1 << 11,
       RQ_PSN = 1 << 12, RD_ATOMIC = 1 << 13, MIN_RNR = 1 << 15, SQ_PSN = 1 << 16, DEST_RD = 1 << 17, DEST_QP = 1 << 20 };
enum { LOCAL_WRITE = 1, REMOTE_WRITE = 2, REMOTE_READ = 4, REMOTE_ATOMIC = 8, RELAXED = 1 << 20 };
enum { WRITE = 0, WRITE_IMM = 1, READ = 4, SIGNALED = 2, INLINE = 8, RC = 2 };

#define SYMBOLS(X) \
    X(struct device **, get_device_list, (int *), "1.1") X(void, free_device_list, (struct device **), "1.1") \
    X(const char *, get_device_name, (struct device *), "1.1") X(struct context *, open_device, (struct device *), "1.1") \
    X(int, close_device, (struct context *), "1.1") X(int, get_async_event, (struct context *, struct event *), "1.1") \
    X(void, ack_async_event, (struct event *), "1.1") X(int, query_device, (struct context *, struct device_attr *), "1.1") \
    X(int, query_port, (struct context *, uint8_t, struct port_attr *), "1.1") X(int, query_gid, (struct context *, uint8_t, int, union gid *), "1.1") \
    X(int, query_qp, (struct qp *, struct qp_attr *, int, struct qp_init *), "1.1") X(void *, alloc_pd, (struct context *), "1.1") \
    X(int, dealloc_pd, (void *), "1.1") X(struct mr *, reg_mr, (void *, void *, size_t, int), "1.1") \
    X(struct mr *, reg_mr_iova2, (void *, void *, size_t, uint64_t, unsigned), "1.8") \
    X(struct mr *, reg_dmabuf_mr, (void *, uint64_t, size_t, uint64_t, int, int), "1.12") X(int, dereg_mr, (struct mr *), "1.1") \
    X(struct cq *, create_cq, (struct context *, int, void *, void *, int), "1.1") X(int, destroy_cq, (struct cq *), "1.1") \
    X(struct qp *, create_qp, (void *, struct qp_init *), "1.1") X(int, modify_qp, (struct qp *, struct qp_attr *, int), "1.1") \
    X(int, destroy_qp, (struct qp *), "1.1") X(int, fork_init, (void), "1.1") X(const char *, event_type_str, (int), "1.1") \
    X(int, query_ece, (struct qp *, void *), "1.10") X(int, set_ece, (struct qp *, void *), "1.10") \
    X(int, query_port_speed, (struct context *, uint8_t, uint64_t *), "1.16")
#define DECLARE(returns, name, arguments, version) static returns (*name) arguments;
SYMBOLS(DECLARE)

#define CUDA(X) \
    X(cuInit, (unsigned)) X(cuDeviceGetCount, (int *)) X(cuDeviceGet, (int *, int)) X(cuDevicePrimaryCtxRetain, (void **, int)) \
    X(cuCtxPushCurrent_v2, (void *)) X(cuMemAlloc_v2, (uint64_t *, size_t)) X(cuMemFree_v2, (uint64_t)) \
    X(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t)) X(cuMemcpyDtoH_v2, (void *, uint64_t, size_t)) \
    X(cuMemsetD8_v2, (uint64_t, uint8_t, size_t)) X(cuCtxSynchronize, (void)) X(cuMemGetHandleForAddressRange, (void *, uint64_t, size_t, int, uint64_t)) \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned)) X(cuMemHostUnregister, (void *)) X(cuStreamCreate, (void **, unsigned)) X(cuStreamDestroy_v2, (void *)) \
    X(cuMemcpyAsync, (uint64_t, uint64_t, size_t, void *)) X(cuIpcGetMemHandle, (struct ipc_handle *, uint64_t)) \
    X(cuIpcOpenMemHandle_v2, (uint64_t *, struct ipc_handle, unsigned)) X(cuIpcCloseMemHandle, (uint64_t))
struct ipc_handle { char bytes[64]; };
#define DECLARE_CUDA(name, arguments) static int (*name) arguments;
CUDA(DECLARE_CUDA)
#define OK(call) do { int code = (call); CHECK(code == 0, "code %d", code); } while (0)

// A connection has this many slots for receives; `REQUESTS` is also how many writes are under way.
enum { SLOTS = 32, REQUESTS = 16, BUFFER = 16 << 20, ROUNDS = 60 };
// A receiver's message to its sender: where a message may go.
struct announcement { uint64_t addr, bytes, number; uint32_t rkey, pad[9]; };
struct hello { uint32_t qpn; union gid gid; uint64_t announcements; uint32_t rkey; uint16_t lid; };

static struct context *context;
static void *pd;
static struct cq *cq;
static struct mr *buffer_mr;
static uint64_t buffer;
static int is_gpu, gid_index;
static uint16_t own_lid;
static volatile struct announcement announcements[SLOTS];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static uint64_t next_random(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static void *events(void *unused) {
    struct event event;
    while (get_async_event(context, &event) == 0) {
        fprintf(stderr, "event: %s\n", event_type_str(event.type));
        ack_async_event(&event);
    }
    return unused;
}

static void load(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    CHECK(handle, "%s", dlerror());
#define LOAD(returns, name, arguments, version) *(void **)&name = dlvsym(handle, "ibv_" #name, "IBVERBS_" version);
    SYMBOLS(LOAD)
    // Older libraries have no speed but in the port's attributes.
#define IS_THERE(returns, name, arguments, version) CHECK(name || strcmp(version, "1.16") == 0, "%s", #name);
    SYMBOLS(IS_THERE)
}

static void open_device_of(int host) {
    int count = 0;
    CHECK(fork_init() == 0, "fork");
    struct device **list = get_device_list(&count);
    CHECK(list && count >= 1, "%d devices", count);
    const char *wanted = getenv("MCCS_TEST_NIC"), *index = getenv("MCCS_TEST_GID");
    gid_index = index ? atoi(index) : 0;
    int at = 0;
    while (wanted && at < count && strcmp(get_device_name(list[at]), wanted) != 0) at++;
    CHECK(at < count, "there is no device %s", wanted);
    CHECK(context = open_device(list[at]), "opens");
    CHECK(strcmp(get_device_name(list[at]), list[at]->name) == 0, "name");
    free_device_list(list);
    struct device_attr device = {0};
    struct port_attr port = {0};
    uint64_t speed = 0;
    CHECK(query_device(context, &device) == 0 && device.ports >= 1 && device.sys_image_guid, "%d ports", device.ports);
    CHECK(query_port(context, 1, &port) == 0 && port.state == 4 && port.gid_tbl_len > gid_index, "state %u, %d GIDs", port.state, port.gid_tbl_len);
    own_lid = port.lid;
    CHECK(!query_port_speed || (query_port_speed(context, 1, &speed) == 0 && speed > 0), "speed");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, events, NULL) == 0 && pthread_detach(thread) == 0, "thread of host %d", host);
    // Asks whether dma-bufs are taken at all.
    CHECK(pd = alloc_pd(context), "domain");
    errno = 0;
    CHECK(!reg_dmabuf_mr(pd, 0, 0, 0, -1, 0), "a descriptor that is none");
    int has_none = errno == EOPNOTSUPP || errno == EPROTONOSUPPORT;
    CHECK(errno == EBADF || !getenv("MCCS_NICS"), "a descriptor that is none");
    if (has_none) fprintf(stderr, "the NIC's driver takes no dma-bufs (errno %d)\n", errno);
    CHECK(dealloc_pd(pd) == 0 && (pd = alloc_pd(context)), "domain");
}

static void open_gpu(int host) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *primary;
    CHECK(driver, "%s", dlerror());
#define LOAD_CUDA(name, arguments) CHECK(*(void **)&name = dlsym(driver, #name), "%s", #name);
    CUDA(LOAD_CUDA)
    int count = 0, gpu = 0;
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    OK(cuDeviceGet(&gpu, host % count));
    OK(cuDevicePrimaryCtxRetain(&primary, gpu));
    OK(cuCtxPushCurrent_v2(primary));
}

static void register_buffer(const char *kind) {
    const int access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | (getenv("MCCS_TEST_ORDERED") ? 0 : RELAXED);
    if (!is_gpu) {
        buffer = (uint64_t)(uintptr_t)aligned_alloc(4096, BUFFER);
        buffer_mr = reg_mr_iova2(pd, (void *)(uintptr_t)buffer, BUFFER, buffer, (unsigned)access);
    } else {
        OK(cuMemAlloc_v2(&buffer, BUFFER));
        if (strcmp(kind, "dma-buf") == 0) {
            int fd = -1;
            OK(cuMemGetHandleForAddressRange(&fd, buffer, BUFFER, 1, 0));
            buffer_mr = reg_dmabuf_mr(pd, 0, BUFFER, buffer, fd, access);
            close(fd);
        } else {
            buffer_mr = reg_mr_iova2(pd, (void *)(uintptr_t)buffer, BUFFER, buffer, (unsigned)access);
        }
    }
    CHECK(buffer_mr, "registers %s", kind);
}

static struct qp *make_qp(int sends, int receives, unsigned access) {
    struct qp_init init = {.send_cq = cq, .recv_cq = cq, .type = RC, .cap = {(uint32_t)sends, (uint32_t)receives, 1, 1, 64}};
    struct qp *qp = create_qp(pd, &init);
    CHECK(qp, "queue pair");
    struct qp_attr attr = {.state = INIT, .port = 1, .access = access};
    CHECK(modify_qp(qp, &attr, STATE | PKEY | PORT | ACCESS) == 0, "INIT");
    uint32_t ece[3] = {0};
    int code = query_ece(qp, ece);
    CHECK(code == 0 || code == EOPNOTSUPP || code == ENOTSUP, "%d", code);
    return qp;
}

static void connect_qp(struct qp *qp, uint32_t peer, union gid gid, uint16_t lid) {
    struct qp_attr attr = {.state = RTR, .mtu = 5, .dest_qp = peer, .dest_rd_atomic = 1, .min_rnr = 12};
    attr.ah = (struct ah){.dgid = gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 255, .dlid = lid, .is_global = 1, .port = 1};
    CHECK(modify_qp(qp, &attr, STATE | AV | MTU | DEST_QP | RQ_PSN | DEST_RD | MIN_RNR) == 0, "RTR");
    attr = (struct qp_attr){.state = RTS, .timeout = 20, .retry = 7, .rnr_retry = 7, .rd_atomic = 1};
    CHECK(modify_qp(qp, &attr, STATE | TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD_ATOMIC) == 0, "RTS");
}

static void post(struct qp *qp, struct send_wr *wr) {
    struct send_wr *bad = NULL;
    int code = context->post_send(qp, wr, &bad);
    CHECK(code == 0, "posting: %d", code);
}

static struct wc completion(void) {
    struct wc wc = {0};
    for (;;) {
        int count = context->poll_cq(cq, 1, &wc);
        CHECK(count >= 0, "polling");
        if (count == 1) break;
    }
    CHECK(wc.status == 0, "status %u of opcode %u", wc.status, wc.opcode);
    return wc;
}

// Bytes of a round's message, and where it begins: the same on both sides.
static size_t shape(int round, uint64_t *offset) {
    static const size_t sizes[] = {1, 8, 4095, 65536, 65537, 1 << 20, (4 << 20) + 12345, 0};
    *offset = (uint64_t)(round % SLOTS) * 8;
    return sizes[round % 8];
}

static void fill(uint8_t *data, size_t bytes, uint64_t seed) {
    for (size_t at = 0; at < bytes; at++) data[at] = (uint8_t)(next_random(&seed) >> 56);
}

static void send_all(struct qp *qp, uint64_t seed) {
    uint8_t *data = malloc(BUFFER);
    for (int round = 0; round < ROUNDS; round++) {
        volatile struct announcement *slot = &announcements[round % SLOTS];
        while (slot->number != (uint64_t)round + 1) {
        }
        __sync_synchronize();
        uint64_t offset;
        size_t bytes = shape(round, &offset);
        CHECK(slot->bytes >= bytes && slot->rkey, "round %d", round);
        fill(data, bytes, seed + (uint64_t)round);
        // Such copies may have their last bytes still to go.
        if (is_gpu && bytes) OK(cuMemcpyHtoD_v2(buffer + offset, data, bytes));
        if (is_gpu) OK(cuCtxSynchronize());
        if (!is_gpu) memcpy((void *)(uintptr_t)(buffer + offset), data, bytes);
        struct sge sge = {buffer + offset, (uint32_t)bytes, buffer_mr->lkey};
        struct send_wr last = {.wr_id = (uint64_t)round, .opcode = WRITE_IMM, .send_flags = SIGNALED, .imm_data = __builtin_bswap32((uint32_t)bytes)};
        struct send_wr first = {.wr_id = (uint64_t)round, .next = &last, .opcode = WRITE, .sg_list = &sge, .num_sge = 1, .remote_addr = slot->addr, .rkey = slot->rkey};
        if (bytes > 8192) {
            // The data first, then what tells of them.
            post(qp, &first);
        } else {
            last.sg_list = &sge;
            last.num_sge = bytes ? 1 : 0;
            last.remote_addr = slot->addr;
            last.rkey = slot->rkey;
            post(qp, &last);
        }
        struct wc wc = completion();
        CHECK(wc.wr_id == (uint64_t)round && wc.opcode == 1, "round %d", round);
    }
    free(data);
}

static void announce(struct qp *qp, struct mr *own, struct announcement *slot, const struct hello *peer, int place, int is_inline) {
    struct sge sge = {(uint64_t)(uintptr_t)slot, sizeof *slot, own->lkey};
    struct send_wr wr = {.wr_id = (uint64_t)place, .opcode = WRITE, .sg_list = &sge, .num_sge = 1, .rkey = peer->rkey};
    wr.remote_addr = peer->announcements + (uint64_t)place * sizeof *slot;
    wr.send_flags = (place == 0 ? SIGNALED : 0) | (is_inline ? INLINE : 0);
    post(qp, &wr);
}

static void receive_all(struct qp *qp, struct qp *flush, const struct hello *peer, uint64_t seed) {
    static struct announcement slots[SLOTS];
    static int scratch;
    struct mr *slots_mr = reg_mr(pd, slots, sizeof slots, REMOTE_WRITE | LOCAL_WRITE | REMOTE_READ);
    struct mr *scratch_mr = reg_mr(pd, &scratch, sizeof scratch, LOCAL_WRITE);
    CHECK(slots_mr && scratch_mr, "registers");
    uint8_t *data = malloc(BUFFER), *wanted = malloc(BUFFER);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t offset;
        size_t bytes = shape(round, &offset);
        if (is_gpu) OK(cuMemsetD8_v2(buffer, 0xee, BUFFER));
        if (is_gpu) OK(cuCtxSynchronize());
        if (!is_gpu) memset((void *)(uintptr_t)buffer, 0xee, BUFFER);
        struct recv_wr wr = {.wr_id = (uint64_t)round}, *bad = NULL;
        CHECK(context->post_recv(qp, &wr, &bad) == 0, "posting");
        int place = round % SLOTS;
        slots[place] = (struct announcement){.addr = buffer + offset, .bytes = bytes, .number = (uint64_t)round + 1, .rkey = buffer_mr->rkey};
        announce(qp, slots_mr, &slots[place], peer, place, round % 2);
        struct wc wc = completion();
        if (wc.opcode == 1) wc = completion();
        CHECK(wc.opcode == 129 && wc.wr_id == (uint64_t)round && wc.imm_data == __builtin_bswap32((uint32_t)bytes), "round %d: opcode %u", round, wc.opcode);
        if (bytes) {
            struct sge sge = {(uint64_t)(uintptr_t)&scratch, 1, scratch_mr->lkey};
            struct send_wr read = {.wr_id = 1000, .opcode = READ, .sg_list = &sge, .num_sge = 1, .send_flags = SIGNALED, .remote_addr = buffer + offset, .rkey = buffer_mr->rkey};
            post(flush, &read);
            wc = completion();
            // The announcement's may come behind what it has led to.
            if (wc.opcode == 1) wc = completion();
            CHECK(wc.opcode == 2 && wc.wr_id == 1000, "flush");
        }
        if (is_gpu) OK(cuMemcpyDtoH_v2(data, buffer, BUFFER));
        if (!is_gpu) memcpy(data, (void *)(uintptr_t)buffer, BUFFER);
        fill(wanted, bytes, seed + (uint64_t)round);
        CHECK(memcmp(data + offset, wanted, bytes) == 0, "data of round %d, %zu bytes", round, bytes);
        CHECK(bytes == 0 || (uint8_t)scratch == wanted[0], "what the flush has read, round %d", round);
        for (size_t at = offset + bytes; at < BUFFER; at++) CHECK(data[at] == 0xee, "byte %zu behind round %d", at, round);
    }
    CHECK(dereg_mr(slots_mr) == 0 && dereg_mr(scratch_mr) == 0, "forgets");
    free(data);
    free(wanted);
}

static void swap(int fd, const void *own, void *peer, size_t bytes) {
    CHECK(send(fd, own, bytes, 0) == (ssize_t)bytes && recv(fd, peer, bytes, MSG_WAITALL) == (ssize_t)bytes, "the other side is gone");
}

static int rounds_of(size_t bytes) { return bytes > 65536 ? 400 : 2000; }

// Seconds that writes take, so many under way at a time.
static double write_all(struct qp *qp, const struct announcement *to, size_t bytes, int under_way) {
    int rounds = rounds_of(bytes);
    double start = now();
    for (int posted = 0, done = 0; done < rounds; done++) {
        for (; posted < rounds && posted - done < under_way; posted++) {
            struct sge sge = {buffer, (uint32_t)bytes, buffer_mr->lkey};
            // Data from the other side goes to the other half.
            struct send_wr wr = {.opcode = WRITE, .sg_list = &sge, .num_sge = 1, .send_flags = SIGNALED, .remote_addr = to->addr + BUFFER / 2, .rkey = to->rkey};
            post(qp, &wr);
        }
        completion();
    }
    return now() - start;
}

// Writes of all sizes: one at a time and several of host 0, then several of both hosts at once. Each host sends on a queue pair of its own, as NCCL does.
static void measure(struct qp *qp, const struct announcement *to, int host, int fd) {
    for (size_t bytes = 8; bytes <= BUFFER / 2; bytes *= 8) {
        double one = 0, several = 0, both = 0, theirs = 0, total = (double)bytes * rounds_of(bytes) / 1e9;
        if (host == 0) one = write_all(qp, to, bytes, 1), several = write_all(qp, to, bytes, REQUESTS);
        swap(fd, &both, &theirs, sizeof both);
        both = write_all(qp, to, bytes, REQUESTS);
        swap(fd, &both, &theirs, sizeof both);
        if (host) continue;
        printf("%zu bytes: %.2f us a write; %.3f GB/s; both ways %.3f GB/s each\n", bytes, one / rounds_of(bytes) * 1e6, total / several, total / (both > theirs ? both : theirs));
        fflush(stdout);
    }
}

// Rates of copy engines without a NIC: to host memory, from there, both at once, and both hosts' GPUs to each other at once.
static void measure_copies(int host, int fd) {
    enum { COPY = 512 << 10, COPIES = 1000 };
    const char *names[] = {"to the host", "to the GPU", "to and from the host", "between GPUs"};
    struct ipc_handle own, peer;
    void *pinned = aligned_alloc(4096, BUFFER), *streams[2];
    uint64_t other = 0;
    memset(pinned, 0, BUFFER);
    OK(cuMemHostRegister_v2(pinned, BUFFER, 1));
    for (int at = 0; at < 2; at++) OK(cuStreamCreate(&streams[at], 1));
    OK(cuIpcGetMemHandle(&own, buffer));
    swap(fd, &own, &peer, sizeof own);
    int is_peer = cuIpcOpenMemHandle_v2(&other, peer, 1) == 0, theirs_is;
    swap(fd, &is_peer, &theirs_is, sizeof is_peer);
    for (int kind = 0; kind < (is_peer && theirs_is ? 4 : 3); kind++) {
        double seconds[2], theirs[2] = {0};
        for (int warm = 1; warm >= 0; warm--) {
            swap(fd, &seconds[0], &theirs[0], sizeof *theirs);
            double start = now();
            for (int copy = 0; copy < COPIES; copy++) {
                uint64_t at = (uint64_t)copy % (BUFFER / 2 / COPY) * COPY, mapped = (uint64_t)(uintptr_t)pinned + at;
                if (kind == 0 || kind == 2) OK(cuMemcpyAsync(mapped, buffer + at, COPY, streams[0]));
                if (kind == 1 || kind == 2) OK(cuMemcpyAsync(buffer + BUFFER / 2 + at, mapped + BUFFER / 2, COPY, streams[1]));
                if (kind == 3) OK(cuMemcpyAsync(other + BUFFER / 2 + at, buffer + at, COPY, streams[0]));
            }
            OK(cuCtxSynchronize());
            seconds[0] = now() - start;
        }
        swap(fd, &seconds[0], &theirs[0], sizeof *theirs);
        if (host == 0) printf("copies %s: %.3f GB/s\n", names[kind], (double)COPY * COPIES / 1e9 / (seconds[0] > theirs[0] ? seconds[0] : theirs[0]));
    }
    fflush(stdout);
    if (is_peer) OK(cuIpcCloseMemHandle(other));
    for (int at = 0; at < 2; at++) OK(cuStreamDestroy_v2(streams[at]));
    OK(cuMemHostUnregister(pinned));
    free(pinned);
    swap(fd, &own, &peer, sizeof own);
}

// A process' use so far.
struct taken { double seconds; long switches, threads; };

static struct taken taken(void) {
    struct rusage usage;
    struct taken found = {0};
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0, "usage");
    found.seconds = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    found.switches = usage.ru_nvcsw + usage.ru_nivcsw;
    FILE *status = fopen("/proc/self/status", "r");
    for (char line[256]; status && fgets(line, sizeof line, status);) sscanf(line, "Threads: %ld", &found.threads);
    if (status) fclose(status);
    return found;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

// A write to the other side's last bytes of its buffer, or what has come from there: a completion tells of it, or memory does.
static void tell(struct qp *qp, const struct announcement *to, uint64_t number, int is_by_memory) {
    *(volatile uint64_t *)(uintptr_t)(buffer + BUFFER - 16) = number;
    struct sge sge = {buffer + BUFFER - 16, 8, buffer_mr->lkey};
    struct send_wr wr = {.opcode = is_by_memory ? WRITE : WRITE_IMM, .sg_list = &sge, .num_sge = 1, .remote_addr = to->addr + BUFFER - 8, .rkey = to->rkey};
    // Some are signaled, or the queue fills.
    wr.send_flags = number % 8 == 0 ? SIGNALED : 0;
    post(qp, &wr);
    if (is_by_memory && wr.send_flags) completion();
}

static void hear(struct qp *qp, uint64_t number, int is_by_memory) {
    static uint64_t unheard;
    if (is_by_memory) {
        while (*(volatile uint64_t *)(uintptr_t)(buffer + BUFFER - 8) != number) {
        }
        return;
    }
    for (; unheard == 0; unheard += completion().opcode == 129) {
    }
    unheard -= 1;
    struct recv_wr wr = {.wr_id = number}, *bad = NULL;
    CHECK(context->post_recv(qp, &wr, &bad) == 0, "posting");
}

// 8 B there and back, then 64 KiB writes one way: times, and what both processes have taken.
static void cost(struct qp *qp, const struct announcement *to, int host, int fd) {
    enum { TURNS = 4000, WRITES = 20000 };
    static double times[TURNS];
    struct recv_wr wr = {0}, *bad = NULL;
    for (int at = 0; at < SLOTS; at++) CHECK(context->post_recv(qp, &wr, &bad) == 0, "posting");
    for (int kind = 0; kind < 3; kind++) {
        uint64_t ready = 0, other;
        swap(fd, &ready, &other, sizeof ready);
        struct taken before = taken(), theirs_after;
        double start = now();
        for (uint64_t turn = 1; kind < 2 && turn <= TURNS; turn++) {
            double begin = now();
            if (host == 0) tell(qp, to, turn, kind);
            hear(qp, turn, kind);
            if (host == 1) tell(qp, to, turn, kind);
            times[turn - 1] = (now() - begin) * 1e6;
        }
        for (int done = 0, posted = 0; kind == 2 && host == 0 && done < WRITES; done++) {
            for (; posted < WRITES && posted - done < REQUESTS; posted++) {
                struct sge sge = {buffer, 65536, buffer_mr->lkey};
                struct send_wr write = {.opcode = WRITE, .sg_list = &sge, .num_sge = 1, .send_flags = SIGNALED, .remote_addr = to->addr, .rkey = to->rkey};
                post(qp, &write);
            }
            completion();
        }
        double wall = now() - start;
        struct taken after = taken();
        after.seconds -= before.seconds;
        after.switches -= before.switches;
        swap(fd, &after, &theirs_after, sizeof after);
        if (host) continue;
        const char *names[] = {"8 B by completions", "8 B by memory", "64 KiB writes"};
        qsort(times, TURNS, sizeof *times, compare);
        printf("%s: %.3f s, processor %.3f + %.3f s, %ld + %ld switches, %ld + %ld threads", names[kind], wall, after.seconds, theirs_after.seconds, after.switches,
               theirs_after.switches, after.threads, theirs_after.threads);
        if (kind < 2) printf(", there and back %.2f us at p50, %.2f at p99\n", times[TURNS / 2], times[TURNS - TURNS / 100]);
        if (kind == 2) printf(", %.2f GB/s, %.3f s of the processor a GB\n", WRITES * 65536e-9 / wall, (after.seconds + theirs_after.seconds) / (WRITES * 65536e-9));
        fflush(stdout);
    }
}

static void run(int host, int fd, const char *kind, const char *what, uint64_t seed) {
    int is_check = strcmp(what, "check") == 0, is_cost = strcmp(what, "cost") == 0;
    open_device_of(host);
    if (is_gpu) open_gpu(host);
    register_buffer(kind);
    CHECK(cq = create_cq(context, 2 * SLOTS, NULL, NULL, 0), "queue");
    struct qp *qp = make_qp(2 * SLOTS, host || is_cost ? SLOTS : 0, REMOTE_WRITE), *flush = NULL;
    struct mr *fifo = reg_mr(pd, (void *)(uintptr_t)announcements, sizeof announcements, REMOTE_WRITE | LOCAL_WRITE | REMOTE_READ);
    CHECK(fifo, "registers");
    struct hello own = {.qpn = qp->qp_num, .announcements = (uint64_t)(uintptr_t)announcements, .rkey = fifo->rkey, .lid = own_lid}, peer;
    CHECK(query_gid(context, 1, gid_index, &own.gid) == 0, "GID");
    swap(fd, &own, &peer, sizeof own);
    if (host == 1) {
        flush = make_qp(SLOTS, 0, REMOTE_WRITE | REMOTE_READ | LOCAL_WRITE);
        connect_qp(flush, flush->qp_num, own.gid, own_lid);
    }
    connect_qp(qp, peer.qpn, peer.gid, peer.lid);
    struct announcement mine = {.addr = buffer, .rkey = buffer_mr->rkey}, theirs;
    swap(fd, &mine, &theirs, sizeof mine);
    if (is_cost) {
        CHECK(!is_gpu, "memory of the host");
        cost(qp, &theirs, host, fd);
    } else if (!is_check) {
        // A queue pair carries one host's data.
        struct qp *back = make_qp(2 * SLOTS, 0, REMOTE_WRITE);
        own.qpn = back->qp_num;
        swap(fd, &own, &peer, sizeof own);
        connect_qp(back, peer.qpn, peer.gid, peer.lid);
        measure(host ? back : qp, &theirs, host, fd);
        swap(fd, &own, &peer, sizeof own);
        CHECK(destroy_qp(back) == 0, "queue pair");
        if (is_gpu) measure_copies(host, fd);
    } else if (host == 0) {
        send_all(qp, seed);
    } else {
        receive_all(qp, flush, &peer, seed);
    }
    // Nobody goes while the other still needs an answer.
    swap(fd, &own, &peer, sizeof own);
    CHECK(destroy_qp(qp) == 0 && (!flush || destroy_qp(flush) == 0), "queue pairs");
    CHECK(dereg_mr(fifo) == 0 && dereg_mr(buffer_mr) == 0, "regions");
    CHECK(destroy_cq(cq) == 0 && dealloc_pd(pd) == 0, "queue");
    if (is_gpu) OK(cuMemFree_v2(buffer));
    // A thread waits for events until the process ends, as in NCCL.
    printf("host %d: right\n", host);
    fflush(stdout);
}

int main(int count, char **arguments) {
    CHECK(count == 4, "usage: nccl_sequence LIBRARY host|dma-buf|peer check|rate|cost");
    is_gpu = strcmp(arguments[2], "host") != 0;
    int ends[2];
    uint64_t seed = (uint64_t)time(NULL) * 1000003 + (uint64_t)getpid();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "sockets");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    int host = child == 0;
    close(ends[!host]);
    setenv("MCCS_NICS_HOST", host ? "h1" : "h0", 1);
    alarm(300);
    load(arguments[1]);
    run(host, ends[host], arguments[2], arguments[3], seed);
    if (child == 0) _exit(0);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "host 1 ends with %d", status);
    return 0;
}
