/* Shared parts of the C examples: the process' rank, as mccs-launch says it, and the end when a call
 * fails. */
#include <mccs.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        mccsResult_t result = (call);                                                                                  \
        if (result != mccsSuccess) {                                                                                   \
            fprintf(stderr, "%s: %s: %s\n", #call, mccsGetErrorString(result), mccsGetLastError());                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static const char *need(const char *name) {
    const char *value = getenv(name);
    if (value == NULL) {
        fprintf(stderr, "%s is not set\n", name);
        exit(2);
    }
    return value;
}

static void find_place(int *rank, int *nranks, mccsUniqueId *id) {
    *rank = atoi(need("MCCS_RANK"));
    *nranks = atoi(need("MCCS_NRANKS"));
    const char *hex = need("MCCS_UNIQUE_ID");
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1) {
            fprintf(stderr, "MCCS_UNIQUE_ID has 32 hexadecimal digits\n");
            exit(2);
        }
        id->internal[i] = (unsigned char)byte;
    }
}

/* The address of rank 0, or null: mccs-launch sets the variable to nothing where all ranks are at one service. */
static inline const char *root_address(void) {
    const char *root = getenv("MCCS_ROOT_ADDRESS");
    return root != NULL && root[0] != '\0' ? root : NULL;
}
