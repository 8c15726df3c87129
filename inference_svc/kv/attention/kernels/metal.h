// Metal's words for what the kernels say.
#define KV_FN inline
#define KV_GLOBAL device
#define KV_SHARED threadgroup
#define KV_THREAD thread
#define KV_CONST static constant constexpr const
#define KV_UNROLL _Pragma("clang loop unroll(full)")
#define KV_ROLLED _Pragma("clang loop unroll(disable)")
#define KV_SOME_UNROLL _Pragma("clang loop unroll_count(4)")
#define KV_MAX_STARTS_AT 0.0f  // the greatest value of a group, in mx.quantize on a GPU

typedef ushort kv_u16;
typedef uint kv_u32;
typedef uint4 kv_u32x4;
typedef float4 kv_floats4;

KV_FN void kv_group_barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
KV_FN void kv_warp_barrier() { simdgroup_barrier(mem_flags::mem_threadgroup); }
KV_FN float kv_shuffle_xor(float value, int mask) { return simd_shuffle_xor(value, ushort(mask)); }
KV_FN float kv_shuffle(float value, int lane) { return simd_shuffle(value, ushort(lane)); }
KV_FN float kv_exp2(float x) { return metal::exp2(x); }
KV_FN float kv_max(float a, float b) { return metal::fmax(a, b); }
KV_FN float kv_abs(float x) { return metal::fabs(x); }
KV_FN float kv_round(float x) { return metal::round(x); }
KV_FN float kv_from_bits(kv_u32 bits) { return as_type<float>(bits); }
KV_FN kv_u32 kv_to_bits(float x) { return as_type<uint>(x); }
KV_FN float kv_from_half(kv_u16 bits) { return float(as_type<half>(bits)); }
KV_FN kv_u16 kv_to_half(float x) { return as_type<ushort>(half(x)); }
KV_FN kv_u16 kv_to_bfloat(float x) { return as_type<ushort>(bfloat16_t(x)); }
