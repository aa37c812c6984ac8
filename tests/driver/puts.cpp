// The kernels that test and measure channels, for the emulated driver.
#include "kernel.h"

#include "../../kernels/cuda/puts.cu"

KERNEL(mccs_puts_exchange, PutsArgs)
KERNEL(mccs_puts_by_all, PutsArgs)
KERNEL(mccs_puts_ping_pong, PutsArgs)
KERNEL(mccs_puts_triggers, PutsArgs)
KERNEL(mccs_puts_waits, PutsArgs)
KERNEL(mccs_memory_exchange, MemoryChannelsArgs)
KERNEL(mccs_memory_by_all, MemoryChannelsArgs)
KERNEL(mccs_memory_ping_pong, MemoryChannelsArgs)
KERNEL(mccs_memory_puts, MemoryChannelsArgs)
KERNEL(mccs_memory_waits, MemoryChannelsArgs)
