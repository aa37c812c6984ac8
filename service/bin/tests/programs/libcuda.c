/* A CUDA driver without GPUs behind it, for tests of what a service says of drivers that are no good. Built with DRIVER_VERSION, INIT (what cuInit
   returns), GPUS, and if need be MUTE (a GPU that does not answer), BROKEN (one without a context), OLD (one of compute capability 7.5), UNLOADABLE (one
   for which images have no code), or LACKS_ONE (an entry point is missing). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MUTE
#define MUTE -1
#endif
#ifndef BROKEN
#define BROKEN -1
#endif
#ifndef OLD
#define OLD -1
#endif
#ifndef UNLOADABLE
#define UNLOADABLE -1
#endif

enum { OK = 0, OUT_OF_MEMORY = 2, NO_BINARY_FOR_GPU = 209, UNCORRECTABLE = 214, UNKNOWN = 999 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

/* A context is its device's number, and one. */
static _Thread_local size_t current;

int cuInit(unsigned flags) {
    const char *said = getenv("MCCS_TEST_SAID"), *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    FILE *file = said ? fopen(said, "w") : NULL;
    (void)flags;
    if (file) {
        fprintf(file, "%s", folder ? folder : "");
        fclose(file);
    }
    return INIT;
}
int cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return OK;
}
int cuGetErrorName(unsigned error, const char **name) {
    switch (error) {
    case 802: *name = "CUDA_ERROR_SYSTEM_NOT_READY"; break;
    case UNCORRECTABLE: *name = "CUDA_ERROR_ECC_UNCORRECTABLE"; break;
    case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    default: *name = "CUDA_ERROR_OTHER";
    }
    return OK;
}
int cuDeviceGetCount(int *count) {
    *count = GPUS;
    return OK;
}
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return OK;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0x10 + device, 16);
    return device == MUTE ? UNCORRECTABLE : OK;
}
int cuDeviceGetName(char *name, int len, int device) {
    snprintf(name, len, "Stub %d", device);
    return OK;
}
int cuDeviceGetPCIBusId(char *id, int len, int device) {
    snprintf(id, len, "0000:%x7:00.0", device);
    return OK;
}
int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    switch (attribute) {
    case CAPABILITY_MAJOR: *value = device == OLD ? 7 : 9; break;
    case CAPABILITY_MINOR: *value = device == OLD ? 5 : 0; break;
    default: *value = 1;
    }
    return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)1 << 30;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(size_t)(device + 1);
    return device == BROKEN ? UNCORRECTABLE : OK;
}
int cuCtxPushCurrent_v2(void *context) {
    current = (size_t)context;
    return OK;
}
int cuCtxGetCurrent(void **context) {
    *context = (void *)current;
    return OK;
}
int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = (void *)1;
    return current == UNLOADABLE + 1 ? NO_BINARY_FOR_GPU : OK;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module, (void)name;
    *function = (void *)1;
    return OK;
}
int cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    *stream = (void *)1;
    return OK;
}
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    (void)address, (void)bytes;
    return OUT_OF_MEMORY;
}

#define WORKS(name) int name() { return OK; }
#define FAILS(name) int name() { return UNKNOWN; }
WORKS(cuDevicePrimaryCtxRelease_v2) WORKS(cuCtxPopCurrent_v2) WORKS(cuStreamDestroy_v2) WORKS(cuModuleUnload)
FAILS(cuDevicePrimaryCtxGetState) FAILS(cuDeviceCanAccessPeer) FAILS(cuDeviceGetP2PAttribute) FAILS(cuCtxSynchronize) FAILS(cuCtxGetDevice)
FAILS(cuCtxEnablePeerAccess) FAILS(cuMemGetInfo_v2) FAILS(cuMemFree_v2) FAILS(cuMemsetD8_v2) FAILS(cuMemsetD8Async) FAILS(cuMemcpyAsync) FAILS(cuMemcpyHtoD_v2)
FAILS(cuMemcpyDtoH_v2) FAILS(cuMemGetAddressRange_v2) FAILS(cuMemGetHandleForAddressRange) FAILS(cuPointerGetAttribute) FAILS(cuIpcGetMemHandle) FAILS(cuIpcOpenMemHandle_v2)
FAILS(cuIpcCloseMemHandle) FAILS(cuIpcGetEventHandle) FAILS(cuIpcOpenEventHandle) FAILS(cuMemHostRegister_v2) FAILS(cuMemHostUnregister)
FAILS(cuMemHostGetDevicePointer_v2) FAILS(cuStreamSynchronize) FAILS(cuStreamQuery) FAILS(cuStreamWaitEvent) FAILS(cuStreamWriteValue64_v2)
FAILS(cuStreamWaitValue64_v2) FAILS(cuStreamBatchMemOp_v2) FAILS(cuLaunchHostFunc) FAILS(cuThreadExchangeStreamCaptureMode)
FAILS(cuStreamGetCaptureInfo_v2) FAILS(cuStreamIsCapturing) FAILS(cuStreamBeginCapture_v2) FAILS(cuStreamEndCapture)
FAILS(cuGraphAddDependencies) FAILS(cuGraphRemoveDependencies) FAILS(cuGraphAddEventRecordNode) FAILS(cuStreamUpdateCaptureDependencies)
FAILS(cuStreamCreateWithPriority) FAILS(cuStreamGetPriority) FAILS(cuGraphCreate) FAILS(cuGraphAddKernelNode_v2) FAILS(cuGraphExecKernelNodeSetParams_v2)
FAILS(cuGraphInstantiateWithFlags) FAILS(cuGraphLaunch) FAILS(cuGraphExecDestroy) FAILS(cuGraphDestroy) FAILS(cuEventCreate)
FAILS(cuEventRecord) FAILS(cuEventQuery) FAILS(cuEventElapsedTime) FAILS(cuEventDestroy_v2) FAILS(cuLaunchKernel) FAILS(cuStreamGetId) FAILS(cuUserObjectCreate) FAILS(cuUserObjectRelease)
FAILS(cuGraphRetainUserObject) FAILS(cuMemAddressReserve) FAILS(cuMemAddressFree) FAILS(cuMemCreate) FAILS(cuMemRelease) FAILS(cuMemMap)
FAILS(cuMemUnmap) FAILS(cuMemSetAccess) FAILS(cuMemExportToShareableHandle) FAILS(cuMemImportFromShareableHandle)
FAILS(cuMemRetainAllocationHandle) FAILS(cuMemGetAllocationPropertiesFromHandle) FAILS(cuMemGetAllocationGranularity) FAILS(cuMemAllocAsync) FAILS(cuMemFreeAsync)
#ifndef LACKS_ONE
WORKS(cuFuncLoad)
#endif
