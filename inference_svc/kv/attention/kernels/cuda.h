// CUDA's words for what the kernels say. Instructions that C++ lacks are in cuda_instructions.h.
#define KV_FN __device__ __forceinline__
#define KV_GLOBAL
#define KV_SHARED
#define KV_THREAD
#define KV_CONST static constexpr
#define KV_UNROLL _Pragma("unroll")
#define KV_ROLLED _Pragma("unroll 1")
#define KV_SOME_UNROLL _Pragma("unroll 4")
#define KV_MAX_STARTS_AT 0.0f  // the greatest value of a group, in mx.quantize on a GPU

typedef unsigned short kv_u16;
typedef unsigned int kv_u32;
typedef uint4 kv_u32x4;
typedef float4 kv_floats4;

KV_FN void kv_group_barrier() { __syncthreads(); }
KV_FN void kv_warp_barrier() { __syncwarp(); }
KV_FN float kv_shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
KV_FN float kv_shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
KV_FN float kv_exp2(float x) { return exp2f(x); }
KV_FN float kv_max(float a, float b) { return fmaxf(a, b); }
KV_FN float kv_abs(float x) { return fabsf(x); }
KV_FN float kv_round(float x) { return roundf(x); }
KV_FN float kv_from_bits(kv_u32 bits) { return __uint_as_float(bits); }
KV_FN kv_u32 kv_to_bits(float x) { return __float_as_uint(x); }
KV_FN float kv_from_half(kv_u16 bits) { return __half2float(__ushort_as_half(bits)); }
KV_FN kv_u16 kv_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
KV_FN kv_u16 kv_to_bfloat(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
