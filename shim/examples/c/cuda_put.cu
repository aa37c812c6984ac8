// The kernel of the example cuda_put: both ranks put into each other's memory, by the header for
// kernels. `nvcc -ptx -arch=compute_80 -I shim/include shim/examples/c/cuda_put.cu -o cuda_put.ptx`
#include <mccs/device.cuh>

struct Exchange {
    mccs::PortChannel channel;
    // `count` elements to put, and as many from the peer behind them.
    int *data;
    unsigned count;
    // Element i is round * i + rank.
    unsigned round;
    int rank;
};

// By one block.
extern "C" __global__ void exchange(const Exchange args) {
    const unsigned long long bytes = args.count * sizeof(int);
    for (unsigned i = threadIdx.x; i < args.count; i += blockDim.x) args.data[i] = int(args.round * i) + args.rank;
    // All threads' elements come before the put.
    __syncthreads();
    if (threadIdx.x == 0) {
        args.channel.put_with_signal(0, bytes, bytes);
        args.channel.wait();   // the peer's elements are here
        args.channel.flush();  // this rank's may be written again
    }
    __syncthreads();
}
