/* News in NCCL between 2.28 and 2.32, for nccl_calls.c: properties, parameters, collectives with a configuration, growth. */

static void check_properties(const struct member *m) {
    ncclCommProperties_t all = COMM_PROPERTIES;
    int device;
    OK(ncclCommQueryProperties(m->comm, &all));
    OK(ncclCommCuDevice(m->comm, &device));
    TRUE(all.rank == m->rank && all.nRanks == m->n && all.cudaDev == device);
    TRUE(!all.deviceApiSupport && !all.multimemSupport && all.ginType == 0);
    TRUE(all.nLsaTeams == (all.hostRmaSupport ? 1 : m->n) && all.commHash != 0);
    /* As short as in 2.29: nothing is written behind it. */
    ncclCommProperties_t old = COMM_PROPERTIES;
    old.size = offsetof(ncclCommProperties_t, commHash), old.commHash = 77;
    OK(ncclCommQueryProperties(m->comm, &old));
    TRUE(old.nRanks == m->n && old.commHash == 77 && old.size == offsetof(ncclCommProperties_t, commHash));
    old.magic = 0;
    EXPECT(invalidUsage, ncclCommQueryProperties(m->comm, &old));
    EXPECT(invalidArgument, ncclCommQueryProperties(m->comm, NULL));
}

/* A collective with a configuration is the same collective. */
static void check_configured_collectives(const struct member *m) {
    ncclCollConfig_t config = COLL_CONFIG, wrong = COLL_CONFIG;
    void *send = (void *)in, *recv = (void *)out;
    ncclComm_t c = m->comm;
    config.userProfilerTag = 4711 + m->rank, config.minCTAs = 1, config.maxCTAs = 8, config.CTAPolicy = 2;
    configuration = &config;
    for (enum kind kind = 0; kind < KINDS; kind++) run((struct call){kind, 257, float32, sum, m->n - 1, kind == BCAST, NULL}, m);
    OK(ncclGroupStart());
    OK(ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &config));
    OK(ncclAllGatherConfig(send, recv, 5, float32, c, stream, NULL));
    OK(ncclGroupEnd());
    wrong.magic = 1;
    EXPECT(invalidArgument, ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &wrong));
    wrong = config, wrong.size = 8;
    EXPECT(invalidArgument, ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &wrong));
    wrong = config, wrong.minCTAs = 9;
    EXPECT(invalidArgument, ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &wrong));
    wrong = config, wrong.CTAPolicy = 9;
    EXPECT(invalidArgument, ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &wrong));
    /* An algorithm is the operator's choice: who insists is refused, who does not is not. */
    wrong = config, wrong.algSelection = "ring";
    EXPECT(invalidUsage, ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &wrong));
    wrong.forceAlgSelection = 0;
    configuration = &wrong;
    run((struct call){ALL_REDUCE, 1025, float32, sum, 0, 0, NULL}, m);
    configuration = NULL;
    /* The event has happened once the stream has ended. */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *event = NULL;
    CUresult (*create)(void **, unsigned), (*query)(void *), (*destroy)(void *);
    *(void **)&create = dlsym(driver, "cuEventCreate");
    *(void **)&query = dlsym(driver, "cuEventQuery");
    *(void **)&destroy = dlsym(driver, "cuEventDestroy_v2");
    CUDA(create(&event, 2));
    config.launchCompletionEvent = event;
    OK(ncclAllReduceConfig(send, recv, 5, float32, sum, c, stream, &config));
    CUDA(cuStreamSynchronize(stream));
    CUDA(query(event));
    CUDA(destroy(event));
}

static void check_parameters(void) {
    ncclParamHandle_t socket = NULL, all = NULL;
    const char *text = NULL, **keys = NULL;
    char room[4096];
    int length = 0, count = 0, number = 0;
    OK(ncclParamBind(&socket, "MCCS_SOCKET"));
    EXPECT(invalidArgument, ncclParamBind(&all, "NCCL_ALGO"));
    EXPECT(invalidArgument, ncclParamBind(&all, NULL));
    TRUE(all == NULL);
    OK(ncclParamGetStr(socket, &text));
    TRUE(strcmp(text, getenv("MCCS_SOCKET")) == 0);
    EXPECT(invalidArgument, ncclParamGetI32(socket, &number));
    EXPECT(invalidArgument, ncclParamGetI32((ncclParamHandle_t)&number, &number));
    EXPECT(invalidArgument, ncclParamGetStr(NULL, &text));
    OK(ncclParamGet(socket, room, sizeof room, &length));
    TRUE(strcmp(room, getenv("MCCS_SOCKET")) == 0 && length == (int)strlen(room) + 1);
    EXPECT(invalidArgument, ncclParamGet(socket, room, 3, &number));
    EXPECT(length, number);
    OK(ncclParamGetParameter("MCCS_SOCKET", &text, &length));
    TRUE(length == (int)strlen(getenv("MCCS_SOCKET")));
    EXPECT(invalidArgument, ncclParamGetParameter("NCCL_ALGO", &text, &length));
    TRUE(text == NULL && length == 0);
    unsetenv("NCCL_PARAM_DUMP_ALL");
    OK(ncclParamGetAllParameterKeys(&keys, &count));
    for (int i = 0; i < count; i++) TRUE(strncmp(keys[i], "NCCL_PARAM", 10) != 0);
    setenv("NCCL_PARAM_DUMP_ALL", "1", 1);
    OK(ncclParamGetAllParameterKeys(&keys, &number));
    TRUE(count > 0 && number > count);
    OK(ncclParamBind(&all, "NCCL_PARAM_DUMP_ALL"));
    OK(ncclParamGetI32(all, &number));
    EXPECT(1, number);
    unsetenv("NCCL_PARAM_DUMP_ALL");
}

static void check_encryption(void) {
    ncclEncryptionConfig_t config = ENCRYPTION_CONFIG;
    OK(ncclSetEncryption(&config));
    config.mode = 1, config.psk = "a secret";
    EXPECT(invalidUsage, ncclSetEncryption(&config));
    config.mode = 2;
    EXPECT(invalidArgument, ncclSetEncryption(&config));
    config.magic = 3;
    EXPECT(invalidArgument, ncclSetEncryption(&config));
    EXPECT(invalidArgument, ncclSetEncryption(NULL));
}

/* All ranks but the last are there; it joins them, from another process. */
static void check_growth(void) {
    struct member old = {NULL, world_rank, world_size - 1}, all = {NULL, world_rank, world_size};
    int is_new = world_rank == world_size - 1, error;
    ncclUniqueId id;
    meet();
    if (world_rank == 0) OK(ncclGetUniqueId(&shared->ids[0]));
    meet();
    if (!is_new) {
        OK(ncclCommInitRank(&old.comm, old.n, shared->ids[0], old.rank));
        check_quickly(&old);
        if (world_rank == 0) {
            OK(ncclCommGetUniqueId(old.comm, &shared->ids[1]));
            EXPECT(invalidUsage, ncclCommGetUniqueId(old.comm, &id));
            EXPECT(invalidArgument, ncclCommGrow(old.comm, world_size, &shared->ids[0], -1, &all.comm, NULL));
        }
        EXPECT(invalidArgument, ncclCommGrow(old.comm, old.n, NULL, -1, &all.comm, NULL));
        EXPECT(invalidArgument, ncclCommGrow(old.comm, world_size, NULL, old.rank, &all.comm, NULL));
        EXPECT(invalidArgument, ncclCommGrow(old.comm, world_size, NULL, -1, NULL, NULL));
    }
    meet();
    if (is_new) {
        EXPECT(invalidArgument, ncclCommGrow(NULL, world_size, NULL, world_rank, &all.comm, NULL));
        EXPECT(invalidArgument, ncclCommGrow(NULL, world_size, &shared->ids[1], world_size, &all.comm, NULL));
        EXPECT(invalidArgument, ncclCommGrow(NULL, world_size, &shared->ids[1], -1, &all.comm, NULL));
        OK(ncclCommGrow(NULL, world_size, &shared->ids[1], world_rank, &all.comm, NULL));
    } else {
        OK(ncclCommGrow(old.comm, world_size, world_rank == 0 ? &shared->ids[1] : NULL, -1, &all.comm, NULL));
    }
    check_place(&all);
    check_quickly(&all);
    if (!is_new) {
        /* The old one goes on. */
        check_quickly(&old);
        OK(ncclCommDestroy(old.comm));
    }
    /* The new rank has made fewer calls: data follow from their number. */
    meet();
    check_quickly(&all);
    OK(ncclCommGetAsyncError(all.comm, &error));
    EXPECT(success, error);
    OK(ncclCommDestroy(all.comm));
    meet();
}

static unsigned long long memory_of(ncclComm_t comm, int what) {
    enum { SUSPENDABLE, IS_SUSPENDED, PERSISTENT, TOTAL };
    unsigned long long value = 77, part[2];
    OK(ncclCommMemStats(comm, what, &value));
    if (what == TOTAL) {
        OK(ncclCommMemStats(comm, SUSPENDABLE, &part[0]));
        OK(ncclCommMemStats(comm, PERSISTENT, &part[1]));
        TRUE(value == part[0] + part[1]);
    }
    return value;
}

/* Memory is given back, and taken again, by all ranks; the communicator is the same. */
static void check_suspension(const struct member *m) {
    enum { MEMORY = 1, IS_SUSPENDED = 1, TOTAL = 3 };
    struct member part = {NULL, 0, 1};
    ncclComm_t c = m->comm;
    float factor = 2;
    unsigned long long before = memory_of(c, TOTAL), value;
    int op, number;
    EXPECT(invalidArgument, ncclCommMemStats(c, 4, &value));
    EXPECT(invalidArgument, ncclCommMemStats(c, TOTAL, NULL));
    EXPECT(invalidArgument, ncclCommSuspend(c, 2));
    OK(ncclCommResume(c));
    OK(ncclRedOpCreatePreMulSum(&op, &factor, float32, HOST, c));
    for (int round = 0; round < 2; round++) {
        EXPECT(0, (int)memory_of(c, IS_SUSPENDED));
        meet();
        OK(ncclCommSuspend(c, MEMORY));
        OK(ncclCommSuspend(c, MEMORY));
        EXPECT(1, (int)memory_of(c, IS_SUSPENDED));
        TRUE(memory_of(c, TOTAL) == 0);
        EXPECT(invalidUsage, ncclAllReduce((void *)in, (void *)out, 5, float32, sum, c, stream));
        TRUE(strstr(ncclGetLastError(c), "ncclCommResume") != NULL);
        EXPECT(invalidUsage, ncclSend((void *)in, 5, float32, m->rank, c, stream));
        EXPECT(invalidUsage, ncclCommSplit(c, 0, 0, &part.comm, NULL));
        OK(ncclCommCount(c, &number));
        EXPECT(m->n, number);
        OK(ncclCommGetAsyncError(c, &number));
        EXPECT(success, number);
        if (round == 0) {
            OK(ncclCommResume(c));
        } else {
            OK(ncclGroupStart());
            OK(ncclCommResume(c));
            OK(ncclGroupEnd());
        }
        for (enum kind kind = 0; kind < KINDS; kind++) run((struct call){kind, 513, float32, sum, 0, kind == BCAST, NULL}, m);
        run((struct call){ALL_REDUCE, 100000, float32, op, 0, 0, (int[]){2, 2, 2, 2, 2, 2, 2, 2}}, m);
        check_points(m);
        OK(ncclCommSplit(c, m->rank, 0, &part.comm, NULL));
        check_quickly(&part);
        OK(ncclCommDestroy(part.comm));
    }
    /* Memory that was used before and is not yet again comes at its next use. */
    TRUE((memory_of(c, TOTAL) > 0) == (before > 0));
    OK(ncclRedOpDestroy(op, c));
}

/* Errors say what the program calls its communicator, and so do those of what is made of it. */
static void check_names(void) {
    ncclConfig_t config = CONFIG;
    ncclComm_t comm = NULL, part = NULL;
    int error;
    config.commName = "experts\nof\ta name that is far too long for a table of communicators, so that it is cut";
    config.trafficClass = 104;
    meet();
    if (world_rank == 0) OK(ncclGetUniqueId(&shared->ids[0]));
    meet();
    OK(ncclCommInitRankConfig(&comm, world_size, shared->ids[0], world_rank, &config));
    OK(ncclCommSplit(comm, 0, 0, &part, NULL));
    meet();
    if (world_rank == 1) OK(ncclCommRevoke(part, 0));
    do OK(ncclCommGetAsyncError(part, &error));
    while (error == success);
    if (world_rank != 1) TRUE(strstr(ncclGetLastError(NULL), "(communicator experts of a name that is far") != NULL);
    meet();
    OK(ncclCommDestroy(part));
    OK(ncclCommDestroy(comm));
}
