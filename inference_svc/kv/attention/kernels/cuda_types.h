// Types and conversions of CUDA's headers that kernels/cuda.h needs, for programs that are compiled without those headers.
struct __half {
  unsigned short bits;
  __half() = default;
  __device__ __forceinline__ explicit __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __device__ __forceinline__ explicit __nv_bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ explicit operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
__device__ __forceinline__ __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}
__device__ __forceinline__ float __half2float(__half x) { return float(x); }
__device__ __forceinline__ __half __float2half_rn(float x) { return __half(x); }
__device__ __forceinline__ unsigned short __half_as_ushort(__half x) { return x.bits; }
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
__device__ __forceinline__ unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
