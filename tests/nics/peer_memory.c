// Preloaded library that shows a process the peer-memory module (GPUDirect), for NCCL on emulated
// NICs. NICs reach memory of GPUs by address through that module. NCCL looks for its file before
// it registers such memory; emulated NICs need no module.
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
