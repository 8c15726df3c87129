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
inline float fmax(float a, float b) { return fmaxf(a, b); }
inline float fabs(float x) { return fabsf(x); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline bool simd_any(bool is_so) {
  fibers::Slot mine;
  mine.words[0] = is_so;
  const fibers::Slot* theirs = fibers::shown(mine);
  bool found = false;
  for (int i = 0; i < 32; ++i) found |= theirs[i].words[0] != 0;
  return found;
}
// A lane has two elements: its row's number is bits 4, 2 and 1 of its own, its pair of columns' bits 3 and 0.
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(sizeof(T) == 4 && ROWS == 8 && COLUMNS == 8, "the kernels need no other");
  T elements[2];
  T* thread_elements() { return elements; }
};
template <typename T>
void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<T, 8, 8>& a,
                                   simdgroup_matrix<T, 8, 8>& b, simdgroup_matrix<T, 8, 8>& c) {
  fibers::Slot mine;
  for (int i = 0; i < 2; ++i) mine.values[i] = a.elements[i], mine.values[2 + i] = b.elements[i];
  const fibers::Slot* theirs = fibers::shown(mine);
  auto at = [&](int matrix, int row, int column) {
    const int lane = (row & 4) << 2 | (row & 3) << 1 | (column & 4) << 1 | column >> 1 & 1;
    return theirs[lane].values[matrix * 2 + column % 2];
  };
  ++fibers::products;
  const int lane = fibers::current % 32, row = lane >> 2 & 4 | lane >> 1 & 3, column = lane >> 1 & 4 | (lane & 1) << 1;
  for (int j = 0; j < 2; ++j) {
    T sum = c.elements[j];
    for (int k = 0; k < 8; ++k) sum += at(0, row, k) * at(1, k, column + j);
    d.elements[j] = sum;
  }
}
namespace fast {
inline float exp2(float x) { return exp2f(x); }
}
namespace precise {
inline float tanh(float x) { return tanhf(x); }
}
}  // namespace metal
#define simdgroup_index_in_threadgroup (fibers::current / 32)
#define thread_index_in_simdgroup (fibers::current % 32)
#define threadgroup_position_in_grid fibers::block
#define threadgroups_per_grid fibers::blocks
