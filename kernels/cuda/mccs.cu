// All kernels of mccs, under the names that kernels/src/cuda looks up: one module.
#include "include/bulk.cuh"
#include "include/packets.cuh"
#include "include/points.cuh"
#include "include/reduce.cuh"

using namespace mccs;

#define DIRECT(name, threads, body) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ DirectArgs a) { body(a); }
#define LOCAL(name, threads, body) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ ReduceArgs a) { body(a); }
#define POINTS(name, count)                                             \
    extern "C" __global__ void __launch_bounds__(POINTS_THREADS_MAX, 1) \
        name(const __grid_constant__ PointsArgs<count> a) { points(a.head, a.messages); }
#define DATA_TYPE(name, TYPE)                                                  \
    DIRECT(mccs_packets_##name, PACKETS_THREADS_MAX, (packets_reduce<Packets, TYPE>)) \
    DIRECT(mccs_lines_##name, PACKETS_THREADS_MAX, (packets_reduce<Lines, TYPE>)) \
    DIRECT(mccs_pipeline_##name, PACKETS_THREADS_MAX, (packets_pipeline<Lines, TYPE>)) \
    DIRECT(mccs_bulk_##name, BULK_THREADS_MAX, bulk_reduce<TYPE>)              \
    LOCAL(mccs_reduce_##name, REDUCE_THREADS_MAX, reduce_pieces<TYPE>)

DIRECT(mccs_packets_copy, PACKETS_THREADS_MAX, packets_copy<Packets>)
DIRECT(mccs_lines_copy, PACKETS_THREADS_MAX, packets_copy<Lines>)
DIRECT(mccs_bulk_copy, BULK_THREADS_MAX, bulk_copy)
POINTS(mccs_points_few, MESSAGES_FEW)
POINTS(mccs_points_many, MESSAGES_MANY)

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
