// Element arithmetic, eight bytes at a time: as kernels/src/element.rs, bit for bit, but for
// payloads of NaN.
//
// Halves, bfloat16 and fp8 are accumulated in float and rounded once; integers wrap; fp8 saturates. Compiled without
// contraction of multiply and add (-fmad=false), with IEEE division, denormals kept.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace mccs {

// Each type turns eight bytes into values to accumulate, and back. The small floating types do so in pairs, for which the
// processor has instructions.
template <class ELEMENT>
struct OneByOne {
    template <class ACC>
    static __device__ void unpack(uint64_t pack, ACC* values) {
        using Raw = typename ELEMENT::Raw;
#pragma unroll
        for (int i = 0; i < int(8 / sizeof(Raw)); i++) {
            values[i] = ELEMENT::widen(Raw(pack >> (i * 8 * int(sizeof(Raw)))));
        }
    }
    template <class ACC>
    static __device__ uint64_t pack(const ACC* values) {
        using Raw = typename ELEMENT::Raw;
        uint64_t pack = 0;
#pragma unroll
        for (int i = 0; i < int(8 / sizeof(Raw)); i++) {
            pack |= uint64_t(ELEMENT::narrow(values[i])) << (i * 8 * int(sizeof(Raw)));
        }
        return pack;
    }
};

template <class ELEMENT>
struct InPairs {
    static constexpr int BITS = 16 * int(sizeof(typename ELEMENT::Raw));
    static __device__ void unpack(uint64_t pack, float* values) {
#pragma unroll
        for (int i = 0; i < 64 / BITS; i++) {
            float2 pair = ELEMENT::widen(typename ELEMENT::Pair(pack >> (i * BITS)));
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
    static __device__ uint64_t pack(const float* values) {
        uint64_t pack = 0;
#pragma unroll
        for (int i = 0; i < 64 / BITS; i++) {
            pack |= uint64_t(ELEMENT::narrow(make_float2(values[2 * i], values[2 * i + 1]))) << (i * BITS);
        }
        return pack;
    }
};

struct F16 : InPairs<F16> {
    using Acc = float;
    using Raw = uint16_t;
    using Pair = uint32_t;
    static __device__ float2 widen(Pair pair) {
        return make_float2(__half2float(__ushort_as_half(Raw(pair))), __half2float(__ushort_as_half(Raw(pair >> 16))));
    }
    static __device__ Pair narrow(float2 values) {
        __half2 pair = __floats2half2_rn(values.x, values.y);
        return __half_as_ushort(__low2half(pair)) | Pair(__half_as_ushort(__high2half(pair))) << 16;
    }
};

struct Bf16 : InPairs<Bf16> {
    using Acc = float;
    using Raw = uint16_t;
    using Pair = uint32_t;
    static __device__ float2 widen(Pair pair) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
    }
    static __device__ Pair narrow(float2 values) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(values.x, values.y);
        return __bfloat16_as_ushort(__low2bfloat16(pair)) | Pair(__bfloat16_as_ushort(__high2bfloat16(pair))) << 16;
    }
};

template <__nv_fp8_interpretation_t KIND>
struct Fp8 : InPairs<Fp8<KIND>> {
    using Acc = float;
    using Raw = uint8_t;
    using Pair = uint16_t;
    static __device__ float2 widen(Pair pair) {
        __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, KIND);
        return make_float2(__half2float(__ushort_as_half(halves.x)), __half2float(__ushort_as_half(halves.y)));
    }
    static __device__ Pair narrow(float2 values) { return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, KIND); }
};
using F8E4M3 = Fp8<__NV_E4M3>;
using F8E5M2 = Fp8<__NV_E5M2>;

struct F32 : OneByOne<F32> {
    using Acc = float;
    using Raw = uint32_t;
    static __device__ float widen(Raw raw) { return __uint_as_float(raw); }
    static __device__ Raw narrow(float value) { return __float_as_uint(value); }
};

struct F64 : OneByOne<F64> {
    using Acc = double;
    using Raw = uint64_t;
    static __device__ double widen(Raw raw) { return __longlong_as_double(raw); }
    static __device__ Raw narrow(double value) { return __double_as_longlong(value); }
};

// Sums and products of integers need only their low bits; comparisons and divisions see the value of the type.
template <class T, class WIDE, class RAW>
struct Integer : OneByOne<Integer<T, WIDE, RAW>> {
    using Acc = WIDE;
    using Raw = RAW;
    static __device__ Acc widen(Raw raw) { return Acc(T(raw)); }
    static __device__ Raw narrow(Acc value) { return Raw(value); }
};
using I8 = Integer<int8_t, int32_t, uint8_t>;
using U8 = Integer<uint8_t, uint32_t, uint8_t>;
using I32 = Integer<int32_t, int32_t, uint32_t>;
using U32 = Integer<uint32_t, uint32_t, uint32_t>;
using I64 = Integer<int64_t, int64_t, uint64_t>;
using U64 = Integer<uint64_t, uint64_t, uint64_t>;

__device__ inline float multiply(float a, float b) { return a * b; }
__device__ inline double multiply(double a, double b) { return a * b; }
__device__ inline int32_t multiply(int32_t a, int32_t b) { return int32_t(uint32_t(a) * uint32_t(b)); }
__device__ inline uint32_t multiply(uint32_t a, uint32_t b) { return a * b; }
__device__ inline int64_t multiply(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }
__device__ inline uint64_t multiply(uint64_t a, uint64_t b) { return a * b; }

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline double add(double a, double b) { return a + b; }
__device__ inline int32_t add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
__device__ inline uint32_t add(uint32_t a, uint32_t b) { return a + b; }
__device__ inline int64_t add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
__device__ inline uint64_t add(uint64_t a, uint64_t b) { return a + b; }

template <class ACC>
__device__ inline bool is_nan(ACC value) {
    return value != value;  // never for integers
}

// The scale of a sum; an integer's is wrapped to its type first.
template <class T>
__device__ inline typename T::Acc divide(typename T::Acc sum, uint32_t divisor) {
    using Acc = typename T::Acc;
    if constexpr (Acc(0.5) == Acc(0)) sum = T::widen(T::narrow(sum));
    return sum / Acc(divisor);
}

// Operators that combine: RedOp's, where a mean is a sum that is divided, and a pre-multiplied sum one of scaled
// contributions.
enum class Op : uint32_t { SUM = 0, PROD = 1, MAX = 2, MIN = 3 };

// A NaN on either side stays; of equal values the first does.
template <Op OP, class ACC>
__device__ inline ACC combine(ACC a, ACC b) {
    if constexpr (OP == Op::SUM) return add(a, b);
    if constexpr (OP == Op::PROD) return multiply(a, b);
    if constexpr (OP == Op::MAX) return b > a || is_nan(b) ? b : a;
    if constexpr (OP == Op::MIN) return b < a || is_nan(b) ? b : a;
}

__device__ inline float to_scalar(uint64_t bits, float) { return float(__longlong_as_double(bits)); }
__device__ inline double to_scalar(uint64_t bits, double) { return __longlong_as_double(bits); }
__device__ inline int32_t to_scalar(uint64_t bits, int32_t) { return int32_t(bits); }
__device__ inline uint32_t to_scalar(uint64_t bits, uint32_t) { return uint32_t(bits); }
__device__ inline int64_t to_scalar(uint64_t bits, int64_t) { return int64_t(bits); }
__device__ inline uint64_t to_scalar(uint64_t bits, uint64_t) { return bits; }

// The reduction of eight bytes of elements over several sources.
template <class T>
struct Fold {
    using Acc = typename T::Acc;
    using Raw = typename T::Raw;
    static constexpr int COUNT = 8 / sizeof(Raw);
    Acc acc[COUNT];

    // `scalar`: the factor of a contribution, or null.
    static __device__ void unpack(uint64_t pack, const uint64_t* scalar, Acc (&values)[COUNT]) {
        T::unpack(pack, values);
        if (scalar == nullptr) return;
        Acc factor = to_scalar(*scalar, Acc());
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] = multiply(values[i], factor);
    }
    __device__ void first(uint64_t pack, const uint64_t* scalar) { unpack(pack, scalar, acc); }
    // The operator is a run-time value, the same for all threads: a fourth of the kernels to compile and to load.
    __device__ void next(Op op, uint64_t pack, const uint64_t* scalar) {
        switch (op) {
            case Op::SUM: return next<Op::SUM>(pack, scalar);
            case Op::PROD: return next<Op::PROD>(pack, nullptr);
            case Op::MAX: return next<Op::MAX>(pack, nullptr);
            case Op::MIN: return next<Op::MIN>(pack, nullptr);
        }
    }
    template <Op OP>
    __device__ void next(uint64_t pack, const uint64_t* scalar) {
        Acc more[COUNT];
        unpack(pack, scalar, more);
#pragma unroll
        for (int i = 0; i < COUNT; i++) acc[i] = combine<OP>(acc[i], more[i]);
    }
    __device__ uint64_t result(uint32_t divisor) {
        if (divisor != 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) acc[i] = divide<T>(acc[i], divisor);
        }
        return T::pack(acc);
    }
};

}  // namespace mccs
