// What Metal declares and clang does not, with address spaces: to be read, not to be run.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half float16_t;  // of MLX
struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x);
  explicit bfloat16_t(int x);
  operator float() const;
  operator float() const __global;
  operator float() const __constant;
  operator float() const __local;
};
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags) __attribute__((convergent));
void simdgroup_barrier(mem_flags) __attribute__((convergent));
float simd_shuffle_xor(float value, ushort mask);
float simd_shuffle(float value, ushort lane);
template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}
namespace metal {
float exp2(float x);
float round(float x);
float fmax(float a, float b);
float fabs(float x);
float fma(float a, float b, float c);
bool any(bool);
bool simd_any(bool) __attribute__((convergent));
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  typedef T Elements __attribute__((ext_vector_type(2)));
  thread Elements& thread_elements() thread;
};
template <typename T>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<T, 8, 8>& d, thread simdgroup_matrix<T, 8, 8>& a, thread simdgroup_matrix<T, 8, 8>& b,
    thread simdgroup_matrix<T, 8, 8>& c) __attribute__((convergent));
namespace fast { float exp2(float x); }
namespace precise { float tanh(float x); }
}
