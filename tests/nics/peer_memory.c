// A process sees the peer-memory module, by which NICs reach memory of GPUs by address: for NCCL, which looks for its file before it
// registers such memory, on machines where emulated NICs need no module. To be preloaded:
//
//   cc -shared -fPIC -O2 tests/nics/peer_memory.c -o peer_memory.so -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

int access(const char *path, int mode) {
    static int (*next)(const char *, int);
    if (path && strcmp(path, "/sys/module/nvidia_peermem/version") == 0) return 0;
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "access");
    return next(path, mode);
}
