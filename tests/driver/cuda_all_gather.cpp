// The kernel of the example cuda_all_gather, for the emulated driver.
#include "kernel.h"

#include "../../shim/examples/c/cuda_all_gather.cu"

KERNEL(all_gather, Gather)
