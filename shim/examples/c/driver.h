/* CUDA driver declarations for the examples, looked up in libcuda, where no CUDA installation is.
 * */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* Declarations of cuda.h, as far as these programs need them. */
typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;
static CUresult (*cuInit)(unsigned);
static CUresult (*cuDeviceGetCount)(int *);
static CUresult (*cuDeviceGet)(CUdevice *, int);
static CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *, CUdevice);
static CUresult (*cuCtxSetCurrent)(CUcontext);
static CUresult (*cuStreamCreate)(CUstream *, unsigned);
static CUresult (*cuStreamSynchronize)(CUstream);
static CUresult (*cuMemAlloc_v2)(CUdeviceptr *, size_t);
static CUresult (*cuMemFree_v2)(CUdeviceptr);
static CUresult (*cuMemcpyHtoD_v2)(CUdeviceptr, const void *, size_t);
static CUresult (*cuMemcpyDtoH_v2)(void *, CUdeviceptr, size_t);
static CUresult (*cuModuleLoadData)(CUmodule *, const void *);
static CUresult (*cuModuleGetFunction)(CUfunction *, CUmodule, const char *);
static CUresult (*cuLaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  CUstream, void **, void **);

static void load(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) {
        fprintf(stderr, "there is no CUDA driver here\n");
        exit(3);
    }
    struct { const char *name; void *function; } all[] = {
        {"cuInit", &cuInit}, {"cuDeviceGetCount", &cuDeviceGetCount}, {"cuDeviceGet", &cuDeviceGet},
        {"cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain}, {"cuCtxSetCurrent", &cuCtxSetCurrent},
        {"cuStreamCreate", &cuStreamCreate}, {"cuStreamSynchronize", &cuStreamSynchronize},
        {"cuMemAlloc_v2", &cuMemAlloc_v2}, {"cuMemFree_v2", &cuMemFree_v2},
        {"cuMemcpyHtoD_v2", &cuMemcpyHtoD_v2}, {"cuMemcpyDtoH_v2", &cuMemcpyDtoH_v2},
        {"cuModuleLoadData", &cuModuleLoadData}, {"cuModuleGetFunction", &cuModuleGetFunction},
        {"cuLaunchKernel", &cuLaunchKernel},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        void *found = dlsym(driver, all[i].name);
        if (found == NULL) {
            fprintf(stderr, "the CUDA driver lacks %s\n", all[i].name);
            exit(3);
        }
        *(void **)all[i].function = found;
    }
}

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        CUresult result = (call);                                                                                      \
        if (result != 0) {                                                                                             \
            fprintf(stderr, "%s: error %d\n", #call, result);                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A stream on a rank's GPU, which is the thread's from here on: ranks go round those that are there. */
static CUstream stream_on_gpu(int rank) {
    int gpus;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUDA(cuInit(0));
    CUDA(cuDeviceGetCount(&gpus));
    CUDA(cuDeviceGet(&device, rank % gpus));
    CUDA(cuDevicePrimaryCtxRetain(&context, device));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&stream, 1));
    return stream;
}

/* A kernel's image. */
static inline char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    long length = ftell(file);
    char *text = calloc((size_t)length + 1, 1);
    rewind(file);
    if (text == NULL || fread(text, 1, (size_t)length, file) != (size_t)length) exit(2);
    fclose(file);
    return text;
}
