// All kernels of mccs in one module, under the names that kernels/src/cuda looks up.
#include "include/chain.cuh"
#include "include/simple.cuh"
#include "include/ll.cuh"
#include "include/p2p.cuh"
#include "include/reduce.cuh"

using namespace mccs;

#define DIRECT(name, threads, body) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ DirectArgs a) { body(a); }
#define LOCAL(name, threads, body) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ ReduceArgs a) { body(a); }
#define COMBINE(name, threads, body) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ CombineArgs a) { body(a); }
#define P2P(name, count)                                             \
    extern "C" __global__ void __launch_bounds__(P2P_THREADS_MAX, 1) \
        name(const __grid_constant__ P2pArgs<count> a) { p2p(a.head, a.messages); }
#define DATA_TYPE(name, TYPE)                                                  \
    DIRECT(mccs_ll_##name, LL_THREADS_MAX, (ll_reduce<Ll, TYPE>)) \
    DIRECT(mccs_ll128_##name, LL_THREADS_MAX, (ll_reduce<Ll128, TYPE>)) \
    DIRECT(mccs_pipeline_##name, LL_THREADS_MAX, (ll_pipeline<Ll128, TYPE>)) \
    DIRECT(mccs_ll128_batch_##name, LL_THREADS_MAX, ll_batch_reduce<TYPE>) \
    DIRECT(mccs_simple_##name, SIMPLE_THREADS_MAX, (simple_reduce<Slice, TYPE>))              \
    DIRECT(mccs_simple_batch_##name, SIMPLE_THREADS_MAX, (simple_reduce<BatchSlice, TYPE>))              \
    DIRECT(mccs_chain_##name, CHAIN_THREADS_MAX, chain_reduce<TYPE>)              \
    LOCAL(mccs_reduce_##name, REDUCE_THREADS_MAX, reduce_pieces<TYPE>) \
    COMBINE(mccs_combine_##name, REDUCE_THREADS_MAX, combine_parts<TYPE>)

DIRECT(mccs_ll_copy, LL_THREADS_MAX, ll_copy<Ll>)
DIRECT(mccs_ll128_copy, LL_THREADS_MAX, ll_copy<Ll128>)
DIRECT(mccs_ll128_batch_copy, LL_THREADS_MAX, ll_batch_copy)
DIRECT(mccs_simple_copy, SIMPLE_THREADS_MAX, simple_copy<Slice>)
DIRECT(mccs_simple_batch_copy, SIMPLE_THREADS_MAX, simple_copy<BatchSlice>)
P2P(mccs_p2p_few, MESSAGES_FEW)
P2P(mccs_p2p_many, MESSAGES_MANY)

DATA_TYPE(int8, I8)
DATA_TYPE(uint8, U8)
DATA_TYPE(int32, I32)
DATA_TYPE(uint32, U32)
DATA_TYPE(int64, I64)
DATA_TYPE(uint64, U64)
DATA_TYPE(half, F16)
DATA_TYPE(float, F32)
DATA_TYPE(double, F64)
DATA_TYPE(bfloat16, Bf16)
DATA_TYPE(f8e4m3, F8E4M3)
DATA_TYPE(f8e5m2, F8E5M2)
