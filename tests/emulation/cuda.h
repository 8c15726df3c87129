// What CUDA has and C++ has not, for kernels/cuda.h.
#define __device__
#define __forceinline__ inline
#define threadIdx fibers::thread
#define blockIdx fibers::block
#define gridDim fibers::blocks
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
typedef fibers::Short<false> __half;
typedef fibers::Short<true> __nv_bfloat16;
inline void __syncthreads() { fibers::meet_block(); }
inline void __syncwarp() { fibers::meet_warp(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return fibers::shuffled(value, (fibers::current ^ mask) % 32); }
inline float __shfl_sync(unsigned, float value, int lane) { return fibers::shuffled(value, lane); }
inline float __uint_as_float(unsigned bits) { return fibers::bits_to_float(bits); }
inline unsigned __float_as_uint(float x) { return fibers::float_to_bits(x); }
inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  x.bits = bits;
  return x;
}
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
