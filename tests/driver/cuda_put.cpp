// The kernel of the example cuda_put, for the emulated driver.
#include "kernel.h"

#include "../../shim/examples/c/cuda_put.cu"

KERNEL(exchange, Exchange)
