/* Expected results of collectives, for nccl_calls.c: data, and the plainest possible collectives on them. */

/* A communicator, with this process' place in it. */
struct member {
    ncclComm_t comm;
    int rank, n;
};

static const int SIZES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* A small number of a rank's: the least of `choices` or one after it. Small enough that sums of eight are exact in every type. */
static int value(int rank, size_t at, int least, int choices) {
    unsigned x = shared->seed + round_number * 2654435761u + (unsigned)rank * 40503u + (unsigned)at * 69069u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    return least + (int)((x ^ x >> 16) % (unsigned)choices);
}

/* A small number in the representation of a type. */
static unsigned long long encode(int type, long number) {
    static const int MANTISSA[TYPES] = {[float16] = 10, [float32] = 23, [float64] = 52, [bfloat16] = 7, [float8e4m3] = 3, [float8e5m2] = 2};
    static const int EXPONENT[TYPES] = {[float16] = 5, [float32] = 8, [float64] = 11, [bfloat16] = 8, [float8e4m3] = 4, [float8e5m2] = 5};
    if (MANTISSA[type] == 0) return (unsigned long long)number;
    unsigned long long size = number < 0 ? -number : number, sign = number < 0;
    int power = 0;
    if (size == 0) return 0;
    while (size >> (power + 1)) power++;
    unsigned long long biased = (unsigned long long)(power + (1 << (EXPONENT[type] - 1)) - 1);
    unsigned long long fraction = (size << MANTISSA[type] >> power) & ((1ull << MANTISSA[type]) - 1);
    TRUE((size << MANTISSA[type]) % (1ull << power) == 0);
    return ((sign << EXPONENT[type] | biased) << MANTISSA[type]) | fraction;
}

static void store(unsigned char *to, int type, size_t at, long number) {
    unsigned long long bits = encode(type, number);
    memcpy(to + at * SIZES[type], &bits, SIZES[type]);
}

enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BCAST, ALL_TO_ALL, GATHER, SCATTER, KINDS };
static const char *NAMES[KINDS] = {"all-reduce", "reduce", "reduce-scatter", "all-gather", "broadcast",
                                   "bcast",      "all-to-all", "gather",     "scatter"};

struct call {
    enum kind kind;
    size_t count;
    int type, op, root, in_place;
    /* Factors of a pre-multiplied sum, by rank; null for others. */
    const int *factors;
};

/* A rank's contribution at a place. */
static int own(const struct call *c, int rank, size_t at, int n) {
    switch (c->op) {
    case prod: return value(rank, at, 1, 2);
    case avg: return n * value(rank, at, c->type == uint8 ? 0 : -3, 7);
    default: return value(rank, at, c->type == uint8 || c->type == uint32 || c->type == uint64 ? 0 : -1, 2);
    }
}

/* Combination of all ranks' contributions at a place. */
static long combined(const struct call *c, size_t at, int n) {
    long result = c->op == prod ? 1 : c->op == max ? LONG_MIN : c->op == min ? LONG_MAX : 0;
    for (int rank = 0; rank < n; rank++) {
        long next = own(c, rank, at, n);
        if (c->op == prod) result *= next;
        else if (c->op == max) result = next > result ? next : result;
        else if (c->op == min) result = next < result ? next : result;
        else result += c->factors ? c->factors[rank] * next : next;
    }
    return c->op == avg ? result / n : result;
}

static size_t send_count(const struct call *c, const struct member *m) {
    switch (c->kind) {
    case REDUCE_SCATTER: case ALL_TO_ALL: return c->count * m->n;
    case SCATTER: return m->rank == c->root ? c->count * m->n : 0;
    case BROADCAST: case BCAST: return m->rank == c->root ? c->count : 0;
    default: return c->count;
    }
}

static size_t receive_count(const struct call *c, const struct member *m) {
    switch (c->kind) {
    case ALL_GATHER: case ALL_TO_ALL: return c->count * m->n;
    case GATHER: return m->rank == c->root ? c->count * m->n : 0;
    case REDUCE: return m->rank == c->root ? c->count : 0;
    default: return c->count;
    }
}

static long expected(const struct call *c, const struct member *m, size_t at) {
    switch (c->kind) {
    case REDUCE_SCATTER: return combined(c, m->rank * c->count + at, m->n);
    case ALL_GATHER: case GATHER: return own(c, (int)(at / c->count), at % c->count, m->n);
    case BROADCAST: case BCAST: return own(c, c->root, at, m->n);
    case ALL_TO_ALL: return own(c, (int)(at / c->count), m->rank * c->count + at % c->count, m->n);
    case SCATTER: return own(c, c->root, m->rank * c->count + at, m->n);
    default: return combined(c, at, m->n);
    }
}
