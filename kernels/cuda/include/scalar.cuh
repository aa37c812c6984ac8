// Factors of pre-multiplied sums that lie in GPU memory, read when the operation runs. A stream
// may have made them just before. They are as the host would have read them: the bits of a double,
// or two's complement.
#pragma once
#include "arithmetic.cuh"

namespace mccs {

__device__ inline uint64_t scalar_bits(double value) { return uint64_t(__double_as_longlong(value)); }
__device__ inline uint64_t scalar_bits(float value) { return scalar_bits(double(value)); }
__device__ inline uint64_t scalar_bits(float2 pair) { return scalar_bits(double(pair.x)); }
__device__ inline uint64_t scalar_bits(int32_t value) { return uint64_t(int64_t(value)); }
__device__ inline uint64_t scalar_bits(uint32_t value) { return value; }
__device__ inline uint64_t scalar_bits(int64_t value) { return uint64_t(value); }
__device__ inline uint64_t scalar_bits(uint64_t value) { return value; }

template <class T>
__device__ inline uint64_t load_scalar(uint64_t from) {
    return scalar_bits(T::widen(*reinterpret_cast<const volatile typename T::Raw*>(from)));
}

// By the element type's number.
__device__ __noinline__ uint64_t load_scalar(uint64_t from, uint32_t dtype) {
    switch (dtype) {
        case 0: return load_scalar<I8>(from);
        case 1: return load_scalar<U8>(from);
        case 2: return load_scalar<I32>(from);
        case 3: return load_scalar<U32>(from);
        case 4: return load_scalar<I64>(from);
        case 5: return load_scalar<U64>(from);
        case 6: return load_scalar<F16>(from);
        case 7: return load_scalar<F32>(from);
        case 8: return load_scalar<F64>(from);
        case 9: return load_scalar<Bf16>(from);
        case 10: return load_scalar<F8E4M3>(from);
        default: return load_scalar<F8E5M2>(from);
    }
}

}  // namespace mccs
