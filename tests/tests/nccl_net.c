/* NCCL's use of a network plugin, by two processes: loads a version's table, listens, connects, accepts, sends, receives, tests,
 * closes.
 *
 * usage: nccl_net LIBRARY VERSION CASE SEED SOCKET SOCKET */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONNECTIONS 4
#define MESSAGES 24
#define DEPTH 8
#define REQUESTS 32
#define LONGEST (8 << 20)

/* A version's table: functions with arguments of all versions are typed where they are called. */
struct table {
    const char *name;
    void *init;
    int (*devices)(int *);
    int (*properties)(int, void *);
    void *listen, *connect, *accept, *reg, *reg_dma_buf;
    int (*dereg)(void *, void *);
    void *send, *receive;
    int (*flush)(void *, int, void **, int *, void **, void **);
    int (*test)(void *, int *, int *);
    int (*close_send)(void *), (*close_receive)(void *), (*close_listen)(void *);
    void *device_registration, *consumed, *virtual_device;
    int (*finalize)(void *);
    void *attributes;
};

static const struct table *net;
static int version, rank, peer_socket;
static void *context;
static uint64_t seed;
static int logged, overruled;
static char last[1024];

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "rank %d, line %d: %s: ", rank, __LINE__, #condition);                                     \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, " (%s)\n", last);                                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int result = (call);                                                                                           \
        CHECK(result == 0, "%s gave %d", #call, result);                                                               \
    } while (0)

static void logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    (void)flags, (void)file, (void)line;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (level == 3 && strstr(text, "NCCL_IB_HCA has no effect") && strstr(text, "[rdma] devices")) overruled++;
    if (level != 2) return;
    memcpy(last, text, sizeof last);
    logged++;
}

static int init(void) {
    int traffic_class = -1;
    if (version >= 11) {
        int (*call)(void **, uint64_t, int *, void *, void *) = net->init;
        return call(&context, 0x5eed, &traffic_class, logger, NULL);
    }
    if (version == 10) return ((int (*)(void *, void *))net->init)(logger, NULL);
    return ((int (*)(void *))net->init)(logger);
}

static int listen_to(void *handle, void **listener) {
    if (version >= 11) return ((int (*)(void *, int, void *, void **))net->listen)(context, 0, handle, listener);
    return ((int (*)(int, void *, void **))net->listen)(0, handle, listener);
}

static int connect_to(void *handle, void **sender) {
    void *none = NULL;
    int traffic_class = -1;
    switch (version) {
    case 6: return ((int (*)(int, void *, void **))net->connect)(0, handle, sender);
    case 10: return ((int (*)(int, int *, void *, void **, void **))net->connect)(0, &traffic_class, handle, sender, &none);
    case 11:
    case 12: return ((int (*)(void *, int, void *, void **, void **))net->connect)(context, 0, handle, sender, &none);
    default: return ((int (*)(int, void *, void **, void **))net->connect)(0, handle, sender, &none);
    }
}

static int accept_one(void *listener, void **receiver) {
    void *none = NULL;
    if (version == 6) return ((int (*)(void *, void **))net->accept)(listener, receiver);
    return ((int (*)(void *, void **, void **))net->accept)(listener, receiver, &none);
}

static int reg(void *connection, void *data, size_t bytes, int kind, void **registered) {
    if (version < 8) return ((int (*)(void *, void *, int, int, void **))net->reg)(connection, data, bytes, kind, registered);
    return ((int (*)(void *, void *, size_t, int, void **))net->reg)(connection, data, bytes, kind, registered);
}

static int send_one(void *sender, void *data, size_t bytes, int tag, void *registered, void **request) {
    void *none = NULL;
    if (version < 9) return ((int (*)(void *, void *, int, int, void *, void **))net->send)(sender, data, bytes, tag, registered, request);
    if (version == 9) return ((int (*)(void *, void *, size_t, int, void *, void **))net->send)(sender, data, bytes, tag, registered, request);
    return ((int (*)(void *, void *, size_t, int, void *, void *, void **))net->send)(sender, data, bytes, tag, registered, &none, request);
}

static int receive_some(int count, void *receiver, void *data, size_t bytes, int tag, void *registered, void **request) {
    int bytes_before_9 = bytes;
    void *none = NULL;
    if (version < 9)
        return ((int (*)(void *, int, void **, int *, int *, void **, void **))net->receive)(receiver, count, &data, &bytes_before_9, &tag, &registered, request);
    if (version == 9)
        return ((int (*)(void *, int, void **, size_t *, int *, void **, void **))net->receive)(receiver, count, &data, &bytes, &tag, &registered, request);
    return ((int (*)(void *, int, void **, size_t *, int *, void **, void **, void **))net->receive)(receiver, count, &data, &bytes, &tag, &registered, &none, request);
}

static int receive_one(void *receiver, void *data, size_t bytes, int tag, void *registered, void **request) {
    return receive_some(1, receiver, data, bytes, tag, registered, request);
}

static uint64_t next(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    uint64_t mixed = (*state ^ *state >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
}

static uint64_t message_seed(int from, int connection, int message) {
    return seed ^ (uint64_t)from << 48 ^ (uint64_t)connection << 32 ^ (uint64_t)message << 8;
}

static size_t size_of(int from, int connection, int message) {
    static const size_t sizes[] = {0, 1, 4036, 4037, 65536, LONGEST, 0, (1 << 20) + 3, 262144, 5 << 20};
    uint64_t state = message_seed(from, connection, message) ^ 1;
    if (message < (int)(sizeof sizes / sizeof *sizes)) return sizes[message];
    uint64_t random = next(&state);
    return random >> 8 & ((1u << (random & 0xff) % 20) - 1);
}

static void fill(unsigned char *data, size_t bytes, uint64_t state) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; i += 8) {
        word = next(&state);
        memcpy(data + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

static void check(const unsigned char *data, size_t bytes, uint64_t state) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; i += 8) {
        word = next(&state);
        CHECK(memcmp(data + i, &word, bytes - i < 8 ? bytes - i : 8) == 0, "byte %zu of %zu", i, bytes);
    }
}

static void tell(const void *data, size_t bytes) { CHECK(write(peer_socket, data, bytes) == (ssize_t)bytes, "write"); }

static void hear(void *data, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t read_now = read(peer_socket, (char *)data + at, bytes - at);
        CHECK(read_now > 0, "the peer has gone");
        at += read_now;
    }
}

/* Both have come here. */
static void meet(void) {
    char byte = 0;
    tell(&byte, 1);
    hear(&byte, 1);
}

struct connection {
    void *listener, *sender, *receiver;
    unsigned char handle[128], theirs[128];
};

/* As NCCL's proxy thread: connects and accepts in turn, and waits in none. */
static void set_up(struct connection *all, int count) {
    for (int i = 0; i < count; i++) {
        OK(listen_to(all[i].handle, &all[i].listener));
        tell(all[i].handle, 128);
        hear(all[i].theirs, 128);
    }
    for (int open = 0; open < 2 * count;) {
        open = 0;
        for (int i = 0; i < count; i++) {
            if (!all[i].sender) OK(connect_to(all[i].theirs, &all[i].sender));
            if (!all[i].receiver) OK(accept_one(all[i].listener, &all[i].receiver));
            open += !!all[i].sender + !!all[i].receiver;
        }
        usleep(100);
    }
    for (int i = 0; i < count; i++) OK(net->close_listen(all[i].listener));
}

static void close_all(struct connection *all, int count) {
    for (int i = 0; i < count; i++) {
        if (all[i].sender) OK(net->close_send(all[i].sender));
        if (all[i].receiver) OK(net->close_receive(all[i].receiver));
    }
}

/* Waits for a request, and returns what test gave. */
static int finish(void *request, int *size) {
    for (int done = 0, result;;) {
        if ((result = net->test(request, &done, size)) != 0 || done) return result;
    }
}

struct flow {
    unsigned char *data[DEPTH];
    void *requests[DEPTH], *registered[DEPTH];
    int begun, ended;
};

static void carry(void) {
    struct connection all[CONNECTIONS] = {0};
    struct flow sends[CONNECTIONS] = {0}, receives[CONNECTIONS] = {0};
    set_up(all, CONNECTIONS);
    for (int i = 0; i < CONNECTIONS; i++) {
        for (int slot = 0; slot < DEPTH; slot++) {
            sends[i].data[slot] = malloc(LONGEST);
            receives[i].data[slot] = malloc(LONGEST + 64);
            OK(reg(all[i].sender, sends[i].data[slot], LONGEST, 1, &sends[i].registered[slot]));
            OK(reg(all[i].receiver, receives[i].data[slot], LONGEST + 64, 1, &receives[i].registered[slot]));
            CHECK(sends[i].registered[slot] && receives[i].registered[slot], "null");
        }
    }
    for (int left = 2 * CONNECTIONS * MESSAGES; left > 0;) {
        for (int i = 0; i < CONNECTIONS; i++) {
            struct flow *flow = &sends[i];
            int slot = flow->begun % DEPTH, done = 0, size = -1;
            if (flow->begun < MESSAGES && flow->begun < flow->ended + DEPTH) {
                size_t bytes = size_of(rank, i, flow->begun);
                fill(flow->data[slot], bytes, message_seed(rank, i, flow->begun));
                OK(send_one(all[i].sender, flow->data[slot], bytes, rank, flow->registered[slot], &flow->requests[slot]));
                flow->begun += !!flow->requests[slot];
            }
            if (flow->ended < flow->begun) {
                slot = flow->ended % DEPTH;
                OK(net->test(flow->requests[slot], &done, &size));
                if (done) {
                    CHECK(size == (int)size_of(rank, i, flow->ended), "%d bytes", size);
                    memset(flow->data[slot], 0xee, size);
                    flow->ended++, left--;
                }
            }
            flow = &receives[i];
            slot = flow->begun % DEPTH;
            /* One side is late with its receives. */
            if (flow->begun < MESSAGES && flow->begun < flow->ended + (rank ? DEPTH : 1)) {
                size_t bytes = size_of(1 - rank, i, flow->begun);
                memset(flow->data[slot], 0xdd, bytes + 64);
                flow->requests[slot] = (void *)1; /* NCCL may leave the completion to the plugin. */
                OK(receive_one(all[i].receiver, flow->data[slot], bytes + 64, 1 - rank, flow->registered[slot], &flow->requests[slot]));
                flow->begun += !!flow->requests[slot];
            }
            if (flow->ended < flow->begun) {
                slot = flow->ended % DEPTH, done = 0;
                OK(net->test(flow->requests[slot], &done, &size));
                if (done) {
                    size_t bytes = size_of(1 - rank, i, flow->ended);
                    CHECK(size == (int)bytes, "%d bytes, not %zu", size, bytes);
                    check(flow->data[slot], bytes, message_seed(1 - rank, i, flow->ended));
                    for (int k = 0; k < 64; k++) CHECK(flow->data[slot][bytes + k] == 0xdd, "written behind the message");
                    int bytes_of = size;
                    void *request = &size;
                    OK(net->flush(all[i].receiver, 1, (void **)&flow->data[slot], &bytes_of, &flow->registered[slot], &request));
                    CHECK(request == NULL, "memory of the host needs no flush");
                    flow->ended++, left--;
                }
            }
        }
    }
    for (int i = 0; i < CONNECTIONS; i++) {
        for (int slot = 0; slot < DEPTH; slot++) {
            OK(net->dereg(all[i].sender, sends[i].registered[slot]));
            OK(net->dereg(all[i].receiver, receives[i].registered[slot]));
        }
    }
    meet();
    close_all(all, CONNECTIONS);
}

/* Mistakes of a program, and calls that only the properties forbid. */
static void misuse(void) {
    struct connection one = {0}, other = {0};
    set_up(&one, 1);
    void *requests[REQUESTS + 1] = {0}, *registered = NULL;
    static char data[64];
    for (int i = 0; i < REQUESTS + 1; i++) OK(receive_one(one.receiver, data, 1, 0, NULL, &requests[i]));
    CHECK(requests[REQUESTS - 1] && !requests[REQUESTS], "32 requests, and then none for now");
    CHECK(reg(one.sender, data, 64, 2, &registered) == 4 && strstr(last, "host"), "memory of a GPU");
    CHECK(receive_some(2, one.receiver, data, 1, 0, NULL, requests) == 4 && strstr(last, "2 receives as one"), "two");
    CHECK(send_one(one.receiver, data, 1, 0, NULL, requests) == 4, "it receives");
    CHECK(send_one(one.sender, NULL, 1, 0, NULL, requests) == 4 && strstr(last, "null"), "no data");
    int done = 0, size = 0;
    CHECK(net->test(data, &done, &size) == 4 && strstr(last, "no request"), "an address");
    CHECK(net->test(NULL, &done, &size) == 4 && net->close_send(NULL) == 4 && net->close_send(data) == 4, "made up");
    void *request = NULL, *sender = NULL;
    OK(send_one(one.sender, data, 1, 0, NULL, &request));
    OK(finish(request, &size));
    CHECK(net->test(request, &done, &size) == 4 && strstr(last, "done before"), "twice");
    unsigned char wrong[128] = "of sockets";
    CHECK(connect_to(wrong, &sender) == 4 && strstr(last, "another network"), "a handle of another network");
    meet();
    /* A message that is longer than its receive ends the connection, on this side with the lengths. */
    if (rank == 0) {
        OK(finish(requests[0], &size));
        OK(send_one(one.sender, data, 9, 7, NULL, &request));
    } else {
        OK(finish(requests[0], &size));
        int result = finish(requests[1], &size);
        CHECK(result == 5 && strstr(last, "sends 9 bytes with tag 7, the receive has room for 1"), "%d", result);
    }
    meet();
    close_all(&one, 1);
    CHECK(net->close_send(one.sender) == 4 && net->test(requests[0], &done, &size) == 4, "closed");
    /* A listener that nobody has connected to. */
    OK(listen_to(other.handle, &other.listener));
    OK(net->close_listen(other.listener));
    CHECK(net->close_listen(other.listener) == 4, "closed");
}

/* Ends with requests under way: what is in the ring arrives, what is not fails, and nobody hangs. */
static void ends(void) {
    struct connection all[2] = {0};
    set_up(all, 2);
    unsigned char *data = malloc(LONGEST);
    void *requests[3] = {0};
    int size = 0, result;
    if (rank == 0) {
        fill(data, 1 << 20, seed);
        OK(send_one(all[0].sender, data, 1 << 20, 0, NULL, &requests[0]));
        OK(finish(requests[0], &size));
        /* More than the ring has room for: it cannot end. */
        OK(send_one(all[0].sender, data, LONGEST, 0, NULL, &requests[1]));
        meet();
        OK(net->close_send(all[0].sender));
        all[0].sender = NULL;
        meet();
        /* The peer has closed what this side sends to. */
        result = send_one(all[1].sender, data, LONGEST, 0, NULL, &requests[2]);
        if (result == 0) result = finish(requests[2], &size);
        CHECK(result == 6, "%d", result);
    } else {
        meet();
        OK(receive_one(all[0].receiver, data, 1 << 20, 0, NULL, &requests[0]));
        OK(finish(requests[0], &size));
        check(data, 1 << 20, seed);
        result = receive_one(all[0].receiver, data, LONGEST, 0, NULL, &requests[1]);
        if (result == 0) result = finish(requests[1], &size);
        CHECK(result == 6, "%d", result);
        OK(net->close_receive(all[1].receiver));
        all[1].receiver = NULL;
        meet();
    }
    meet();
    close_all(all, 2);
}

/* Waits for what never comes, until the service of one host has gone. */
static void killed(void) {
    struct connection one = {0};
    set_up(&one, 1);
    static char data[64];
    void *request = NULL;
    int size;
    OK(receive_one(one.receiver, data, 64, 0, NULL, &request));
    meet();
    if (rank == 0) {
        printf("waiting\n");
        fflush(stdout);
    }
    int result = finish(request, &size);
    CHECK(result == 6 || result == 2, "%d", result);
    CHECK(net->test(request, &size, &size) == result, "it stays so");
    close_all(&one, 1);
}

int main(int count, char **arguments) {
    if (count != 7) return 2;
    version = atoi(arguments[2]), seed = strtoull(arguments[4], NULL, 10);
    const char *which = arguments[3];
    int ends_of_pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_of_pair) == 0, "socketpair");
    pid_t child = fork();
    rank = child == 0;
    peer_socket = ends_of_pair[rank];
    close(ends_of_pair[1 - rank]);
    setenv("MCCS_SOCKET", arguments[5 + rank], 1);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    CHECK(library, "%s", dlerror());
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
    net = dlsym(library, symbol);
    CHECK(net && strcmp(net->name, "mccs") == 0, "%s", symbol);
    if (strcmp(which, "absent") == 0) {
        CHECK(init() == 2 && logged == 1 && strstr(last, "no mccs-service"), "%d lines", logged);
    } else {
        setenv("NCCL_IB_HCA", "mlx5_0", 1);
        OK(init());
        if (version < 11) OK(init());
        CHECK(overruled == 1, "said %d times", overruled);
        int devices = 0;
        OK(net->devices(&devices));
        CHECK(devices == 1, "%d", devices);
        char properties[128];
        OK(net->properties(0, properties));
        CHECK(net->properties(1, properties) == 4, "there is one device");
        if (strcmp(which, "carry") == 0) carry();
        else if (strcmp(which, "misuse") == 0) misuse();
        else if (strcmp(which, "ends") == 0) ends();
        else if (strcmp(which, "killed") == 0) killed();
        else return 2;
        if (version >= 11) OK(net->finalize(context));
    }
    /* As NCCL does with its last communicator. */
    CHECK(dlclose(library) == 0, "%s", dlerror());
    int status = 0;
    if (rank == 0) {
        CHECK(waitpid(child, &status, 0) == child, "waitpid");
        return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
    }
    return 0;
}
