// The kernel of the example cuda_all_gather: an all-gather of the program's own, by memory channels.
// `nvcc -ptx -arch=compute_80 -I shim/include shim/examples/c/cuda_all_gather.cu -o cuda_all_gather.ptx`
#include <mccs/device.cuh>

struct Gather {
    // To the peer of each block, in memory of the GPU.
    const mccs::MemoryChannel *channels;
    // Shares of all ranks, in their order; this rank's is there.
    int *data;
    unsigned count;  // elements of a share
    unsigned rank;
};

// By as many blocks as there are peers. Call it again when all ranks have taken what came.
extern "C" __global__ void all_gather(const Gather args) {
    const mccs::MemoryChannel channel = args.channels[blockIdx.x];
    const unsigned long long bytes = args.count * sizeof(int), own = args.rank * bytes;
    channel.put(own, own, bytes, threadIdx.x, blockDim.x);
    // All threads have put before one signals.
    __syncthreads();
    if (threadIdx.x == 0) {
        channel.signal();
        channel.wait();  // the peer's share is here
    }
    __syncthreads();
}
