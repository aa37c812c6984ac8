// The kernels that test and measure port channels, for the emulated driver.
#include "kernel.h"

#include "../../kernels/cuda/puts.cu"

KERNEL(mccs_puts_exchange, PutsArgs)
KERNEL(mccs_puts_by_all, PutsArgs)
KERNEL(mccs_puts_ping_pong, PutsArgs)
KERNEL(mccs_puts_triggers, PutsArgs)
KERNEL(mccs_puts_waits, PutsArgs)
