// Stub of NCCL, on which eval/nics.py is tried where there is no NCCL. Its calls do nothing, and a
// rank that was not told its host by the variables that NCCL and the NICs take it from fails to
// join.
#include <stdlib.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }

NOTHING(ncclCommDestroy)
NOTHING(ncclAllReduce)
NOTHING(ncclAllGather)
NOTHING(ncclReduceScatter)
NOTHING(ncclReduce)
NOTHING(ncclBroadcast)
NOTHING(ncclSend)
NOTHING(ncclRecv)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)

int ncclGetVersion(int *version) {
    *version = 22809;
    return 0;
}

int ncclGetUniqueId(char id[128]) {
    memset(id, 7, 128);
    return 0;
}

const char *ncclGetErrorString(int code) {
    return code ? "the rank's host is not what its variables say" : "no error";
}

struct id { char bytes[128]; };

int ncclCommInitRank(void **comm, int nranks, struct id id, int rank) {
    const char *host = getenv("NCCL_HOSTID"), *nics = getenv("MCCS_NICS_HOST"), *expected = rank < nranks / 2 ? "h0" : "h1";
    static int joined;
    *comm = &joined;
    return !(id.bytes[0] == 7 && host && nics && getenv("NCCL_NET") && strcmp(host, expected) == 0 && strcmp(nics, expected) == 0);
}
