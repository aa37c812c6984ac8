/* Windows and one-sided operations, for nccl_calls.c: between ranks that reach each other, and where they do not. */

enum { SIGNALS = 8, CONTEXTS = 4, LARGEST = 40009 };

typedef struct {
    int opCnt, peer, sigIdx, ctx;
} ncclWaitSignalDesc_t;

static int reach_each_other(const struct member *m) {
    ncclCommProperties_t all = COMM_PROPERTIES;
    OK(ncclCommQueryProperties(m->comm, &all));
    return all.hostRmaSupport;
}

/* Whoever reaches others is in one team with them. */
static void check_teams(const struct member *m) {
    ncclTeam_t world = ncclTeamWorld(m->comm), lsa = ncclTeamLsa(m->comm), rail = ncclTeamRail(m->comm);
    int together = reach_each_other(m);
    TRUE(world.nRanks == m->n && world.rank == m->rank && world.stride == 1);
    TRUE(lsa.nRanks == (together ? m->n : 1) && lsa.rank == (together ? m->rank : 0) && lsa.stride == 1);
    TRUE(rail.nRanks == (together ? 1 : m->n) && rail.rank == (together ? 0 : m->rank));
    EXPECT(m->n - 1, ncclTeamRankToWorld(m->comm, world, m->n - 1));
    EXPECT(m->rank, ncclTeamRankToWorld(m->comm, lsa, lsa.rank));
    EXPECT(lsa.rank, ncclTeamRankToLsa(m->comm, world, m->rank));
    EXPECT(lsa.rank, ncclTeamRankToLsa(m->comm, rail, rail.rank));
    EXPECT(200, ncclLLA2ACalcSlots(100, 16));
    EXPECT(300, ncclLLA2ACalcSlots(100, 17));
    EXPECT(1, ncclTeamCft(m->comm, 0).nRanks);
    EXPECT(1, ncclTeamCftMultimem(m->comm).nRanks);
    EXPECT(invalidUsage, ncclLsaBarrierCreateRequirement(lsa, 1, NULL, NULL));
    EXPECT(invalidUsage, ncclGinBarrierCreateRequirement(m->comm, rail, 1, NULL, NULL));
    EXPECT(invalidUsage, ncclLLA2ACreateRequirement(1, 1, NULL, NULL));
    EXPECT(invalidUsage, ncclGinOutboxCreateRequirement(1, 1, NULL, NULL));
    EXPECT(invalidUsage, ncclGinInboxA2ACreateRequirement(rail, 1, 1, NULL, NULL));
    EXPECT(0, ncclTeamWorld(NULL).nRanks);
}

static void wait_for(const struct member *m, int peer, int times, int signal, int context, CUstream in_stream) {
    ncclWaitSignalDesc_t wait = {times, peer, signal, context};
    OK(ncclWaitSignal(1, &wait, m->comm, in_stream));
}

/* Elements that `from` puts to `to`: others for each pair and round. */
static void fill(int from, int to, size_t count) {
    for (size_t at = 0; at < count; at++) store(given, int32, at, value(from * RANKS_MAX + to, at, -99, 199));
}

static void has_come(CUdeviceptr at, int from, int to, size_t count) {
    fill(from, to, count);
    CUDA(cuMemcpyDtoH_v2(got, at, count * 4));
    TRUE(memcmp(given, got, count * 4) == 0);
}

/* Every rank puts a block to every rank, itself too, and waits for everybody's. */
static void put_to_all(const struct member *m, void *window, size_t count, int signal, int context, int grouped) {
    ncclWaitSignalDesc_t waits[RANKS_MAX];
    size_t block = (count + 63) / 64 * 64 * 4;
    TRUE(2 * block * m->n <= ROOM);
    round_number++;
    memset(got, UNTOUCHED, block * m->n);
    to_gpu(out, got, block * m->n);
    for (int peer = 0; peer < m->n; peer++) {
        fill(m->rank, peer, count);
        to_gpu(in + peer * block, given, count * 4);
        waits[peer] = (ncclWaitSignalDesc_t){1, peer, signal, context};
    }
    /* Nobody writes before all have emptied what is written. */
    OK(ncclAllReduce((void *)(in + ROOM / 2), (void *)(in + ROOM / 2), 1, int32, sum, m->comm, stream));
    if (grouped) OK(ncclGroupStart());
    /* In a group who waits first does not keep itself from sending. */
    if (grouped) OK(ncclWaitSignal(m->n, waits, m->comm, stream));
    for (int peer = 0; peer < m->n; peer++)
        OK(ncclPutSignal((void *)(in + peer * block), count, int32, peer, window, m->rank * block, signal, context, 0, m->comm, stream));
    if (grouped) OK(ncclGroupEnd());
    else OK(ncclWaitSignal(m->n, waits, m->comm, stream));
    CUDA(cuStreamSynchronize(stream));
    for (int peer = 0; peer < m->n; peer++) has_come(out + peer * block, peer, m->rank, count);
}

/* A word goes round, once for each step: who has it adds one, in memory that peers have written. */
static void go_round(const struct member *m, void *window) {
    enum { ROUNDS = 20 };
    int next = (m->rank + 1) % m->n, before = (m->rank + m->n - 1) % m->n;
    for (int round = 0; round < ROUNDS; round++) {
        int number = -1, expected = (round * m->n + m->rank) * 3;
        if (round > 0 || m->rank > 0) wait_for(m, before, 1, 1, 0, stream);
        CUDA(cuStreamSynchronize(stream));
        CUDA(cuMemcpyDtoH_v2(&number, out, 4));
        if (round == 0 && m->rank == 0) number = 0;
        EXPECT(expected, number);
        number += 3;
        to_gpu(in, &number, 4);
        if (round < ROUNDS - 1 || m->rank < m->n - 1)
            OK(ncclPutSignal((void *)in, 1, int32, next, window, 0, 1, 0, 0, m->comm, stream));
    }
    CUDA(cuStreamSynchronize(stream));
    meet();
}

/* Signals of several streams all count; those of another kind do not. */
static void signal_from_streams(const struct member *m) {
    enum { TIMES = 12 };
    CUstream other;
    int next = (m->rank + 1) % m->n, before = (m->rank + m->n - 1) % m->n;
    CUDA(cuStreamCreate(&other, 1));
    for (int i = 0; i < TIMES; i++) OK(ncclSignal(next, SIGNALS - 1, CONTEXTS - 1, 0, m->comm, i % 3 ? other : stream));
    OK(ncclSignal(next, SIGNALS - 1, 0, 0, m->comm, other));
    wait_for(m, before, TIMES, SIGNALS - 1, CONTEXTS - 1, stream);
    wait_for(m, before, 1, SIGNALS - 1, 0, other);
    wait_for(m, before, 0, SIGNALS - 1, 0, other);
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuStreamSynchronize(other));
    meet();
}

static void check_reached_windows(const struct member *m, void *window, void *other) {
    void *address = NULL, *theirs = NULL, *stranger = (void *)0x1234560, *source = (void *)in;
    ncclWaitSignalDesc_t wait = {1, m->n, 0, 0};
    ncclComm_t c = m->comm;
    meet();
    fill(m->rank, m->rank, 1000);
    to_gpu(out, given, 4000);
    pthread_barrier_wait(&shared->barrier);
    for (int peer = 0; peer < m->n; peer++) {
        OK(ncclGetPeerDevicePointer(window, 0, peer, &address));
        OK(ncclGetLsaDevicePointer(window, 400, peer, &theirs));
        TRUE((char *)theirs - (char *)address == 400 && (peer != m->rank || address == (void *)out));
        has_come((CUdeviceptr)address, peer, peer, 1000);
        OK(ncclGetPeerDevicePointer(other, ROOM, peer, &theirs));
    }
    meet();
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, 0, m->n, &address));
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, 0, -1, &address));
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, ROOM + 1, 0, &address));
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, (size_t)-1, 0, &address));
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, 0, 0, NULL));
    EXPECT(invalidArgument, ncclGetLsaDevicePointer(stranger, 0, 0, &address));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, 0, stranger, 0, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, m->n, window, 0, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, 0, window, ROOM - 15, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, (size_t)-1, float32, 0, window, 0, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(NULL, 4, float32, 0, window, 0, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, TYPES, 0, window, 0, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, 0, window, 0, SIGNALS, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, 0, window, 0, 0, CONTEXTS, 0, c, stream));
    EXPECT(invalidArgument, ncclPutSignal(source, 4, float32, 0, window, 0, 0, 0, 1, c, stream));
    EXPECT(invalidArgument, ncclSignal(-1, 0, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclSignal(0, -1, 0, 0, c, stream));
    EXPECT(invalidArgument, ncclWaitSignal(1, NULL, c, stream));
    EXPECT(invalidArgument, ncclWaitSignal(-1, &wait, c, stream));
    EXPECT(invalidArgument, ncclWaitSignal(1, &wait, c, stream));
    wait.peer = 0, wait.opCnt = -1;
    EXPECT(invalidArgument, ncclWaitSignal(1, &wait, c, stream));
    OK(ncclWaitSignal(0, NULL, c, stream));
    /* A group with a call that is wrong does nothing. */
    OK(ncclGroupStart());
    OK(ncclSignal(0, 2, 2, 0, c, stream));
    EXPECT(invalidArgument, ncclSignal(m->n, 2, 2, 0, c, stream));
    EXPECT(invalidArgument, ncclGroupEnd());
    for (int round = 0; round < 6; round++) {
        static const size_t COUNTS[] = {1, 37, 4096, LARGEST};
        put_to_all(m, window, COUNTS[round % 4], round % 3, round % CONTEXTS, round % 2);
    }
    /* No element is a signal all the same. */
    OK(ncclPutSignal(NULL, 0, float32, (m->rank + 1) % m->n, window, ROOM, 5, 0, 0, c, stream));
    wait_for(m, (m->rank + m->n - 1) % m->n, 1, 5, 0, stream);
    CUDA(cuStreamSynchronize(stream));
    meet();
    if (m->n > 1) go_round(m, window);
    signal_from_streams(m);
}

static void check_refused_windows(const struct member *m, void *window) {
    void *address = NULL, *source = (void *)in;
    ncclComm_t c = m->comm;
    EXPECT(invalidUsage, ncclGetPeerDevicePointer(window, 0, 0, &address));
    EXPECT(invalidUsage, ncclGetLsaDevicePointer(window, ROOM, 0, &address));
    EXPECT(invalidUsage, ncclPutSignal(source, 4, float32, 0, window, 0, 0, 0, 0, c, stream));
    EXPECT(invalidUsage, ncclSignal(0, 0, 0, 0, c, stream));
    EXPECT(invalidUsage, ncclWaitSignal(0, NULL, c, stream));
    TRUE(strstr(ncclGetLastError(c), "ncclSend") != NULL);
}

static void check_windows(const struct member *m) {
    void *window = NULL, *other = NULL, *address = NULL, *buffer = (void *)out;
    ncclComm_t c = m->comm;
    unsigned endpoint;
    size_t offset;
    EXPECT(invalidArgument, ncclCommWindowRegister(c, NULL, ROOM, &window, 0));
    EXPECT(invalidArgument, ncclCommWindowRegister(c, buffer, 0, &window, 0));
    EXPECT(invalidArgument, ncclCommWindowRegister(c, buffer, ROOM, NULL, 0));
    EXPECT(invalidArgument, ncclCommWindowRegister(c, buffer, ROOM, &window, 0x100));
    if (reach_each_other(m)) EXPECT(invalidArgument, ncclCommWindowRegister(c, buffer, ROOM + 1, &window, 0));
    TRUE(window == NULL);
    OK(ncclCommWindowRegister(c, buffer, ROOM, &window, 1));
    OK(ncclGroupStart());
    OK(ncclCommWindowRegister(c, (void *)in, ROOM, &other, 0));
    OK(ncclGroupEnd());
    TRUE(window != NULL && other != NULL && window != other);
    OK(ncclWinGetUserPtr(c, window, &address));
    TRUE(address == buffer);
    EXPECT(invalidArgument, ncclWinGetUserPtr(c, NULL, &address));
    EXPECT(invalidArgument, ncclWinGetUserPtr(c, window, NULL));
    EXPECT(invalidUsage, ncclGetLsaMultimemDevicePointer(window, 0, &address));
    EXPECT(invalidUsage, ncclGetMultimemDevicePointer(window, 0, (ncclMultimemHandle_t){NULL}, &address));
    EXPECT(invalidUsage, ncclGetMultimemDeviceLeInfo(window, 0, &endpoint, &offset));
    EXPECT(invalidUsage, ncclGetCftDeviceLeInfo(window, 0, 0, ncclTeamCft(c, 0), &endpoint, &offset));
    EXPECT(invalidUsage, ncclGetPeerDeviceLeInfo(window, 0, 0, &endpoint, &offset));
    EXPECT(invalidArgument, ncclGetPeerDeviceLeInfo(window, ROOM + 1, 0, &endpoint, &offset));
    if (reach_each_other(m)) check_reached_windows(m, window, other);
    else check_refused_windows(m, window);
    run((struct call){ALL_REDUCE, 2000, float32, sum, 0, 0, NULL}, m);
    OK(ncclCommWindowDeregister(c, window));
    EXPECT(invalidArgument, ncclCommWindowDeregister(c, window));
    EXPECT(invalidArgument, ncclWinGetUserPtr(c, window, &address));
    EXPECT(invalidArgument, ncclGetPeerDevicePointer(window, 0, 0, &address));
    OK(ncclCommWindowDeregister(c, NULL));
    OK(ncclCommWindowDeregister(c, other));
}

/* Whoever waits for a rank that has ended the communicator goes on, and hears of it: also if that rank's stream still counts behind a wait of its own,
 * over what has let the others go. */
static void check_waits_in_vain(struct member *m) {
    int error = success;
    if (m->rank > 0) wait_for(m, 0, 3, 0, 0, stream);
    if (m->rank == 0) {
        wait_for(m, 1, 1, SIGNALS - 1, 0, stream);
        for (int peer = 1; peer < m->n; peer++) OK(ncclSignal(peer, 0, 0, 0, m->comm, stream));
    }
    meet();
    while (m->rank > 0 && error == success) OK(ncclCommGetAsyncError(m->comm, &error));
    EXPECT(m->rank > 0 ? remoteError : success, error);
    OK(ncclCommAbort(m->comm));
    CUDA(cuStreamSynchronize(stream));
}
