/* Helpers of programs that make calls which must return a certain code. */
#include <mccs.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPECT(code, call)                                                                                             \
    do {                                                                                                               \
        mccsResult_t result = (call);                                                                                  \
        if (result != (code)) {                                                                                        \
            fprintf(stderr, "line %d: %s gave %d (%s)\n", __LINE__, #call, result, mccsGetLastError());                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
