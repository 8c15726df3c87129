// What Metal has and C++ has not, for kernels/metal.h.
#define device
#define threadgroup
#define thread
#define constant
#define half fibers::Short<false>
#define bfloat16_t fibers::Short<true>
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { fibers::meet_block(); }
inline void simdgroup_barrier(mem_flags) { fibers::meet_warp(); }
inline float simd_shuffle_xor(float value, ushort mask) { return fibers::shuffled(value, (fibers::current ^ mask) % 32); }
inline float simd_shuffle(float value, ushort lane) { return fibers::shuffled(value, lane); }
template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  std::memcpy((void*)&to, (const void*)&from, sizeof(To));
  return to;
}
namespace metal {
inline float exp2(float x) { return exp2f(x); }
inline float round(float x) { return roundf(x); }
namespace precise {
inline float tanh(float x) { return tanhf(x); }
}
}  // namespace metal
#define simdgroup_index_in_threadgroup (fibers::current / 32)
#define thread_index_in_simdgroup (fibers::current % 32)
#define threadgroup_position_in_grid fibers::block
#define threadgroups_per_grid fibers::blocks
