// Instructions of Hopper alone: barriers in shared memory, registers that warps hand on, and products of 64 rows, which
// four warps (a warpgroup) compute together from shared memory while they do other things.
typedef unsigned long long kv_u64;

KV_FN void kv_barrier_init(kv_u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(kv_shared_address(barrier)), "r"(count) : "memory");
}
KV_FN void kv_barrier_arrive(kv_u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(kv_shared_address(barrier)) : "memory");
}
// Wait until so many have arrived that the barrier's phase of this parity is over.
KV_FN void kv_barrier_wait(kv_u64* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(
          kv_shared_address(barrier)),
      "r"(parity)
      : "memory");
  __syncwarp();
}
// `count` threads meet. `id`: 1 to 15, of those who meet at the same time.
KV_FN void kv_threads_barrier(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// A number that all lanes have, where the compiler does not know that they do.
KV_FN int kv_same_in_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// What this thread wrote to shared memory is there for products of matrices, once a barrier follows.
KV_FN void kv_written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
KV_FN void kv_take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
KV_FN void kv_leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A matrix in shared memory, for products: panels of 64 columns, `panel_bytes` apart, each with rows of 128 bytes that lie
// one behind the other from a multiple of 1024 bytes on. Chunk c of 16 bytes of row r lies at c ^ (r % 8).
KV_FN kv_u64 kv_matrix(const void* place, int panel_bytes) {
  return kv_u64((kv_shared_address(place) & 0x3ffff) >> 4) | kv_u64(panel_bytes >> 4) << 16 | kv_u64(1024 >> 4) << 32 | kv_u64(1) << 62;
}
// Sixteen rows of eight columns, one behind the other.
KV_FN kv_u64 kv_small_matrix(const void* place) {
  return kv_u64((kv_shared_address(place) & 0x3ffff) >> 4) | kv_u64(128 >> 4) << 16 | kv_u64(128 >> 4) << 32;
}
// The same matrix from so many bytes further on.
KV_FN kv_u64 kv_matrix_from(kv_u64 matrix, int bytes) { return matrix + kv_u64(bytes >> 4); }

// Before products, and where registers that they read or write were used otherwise.
KV_FN void kv_products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KV_FN void kv_products_begun() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
KV_FN void kv_products_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler moves no use of these registers across this: products use them when it does not know of it.
template <int COUNT>
KV_FN void kv_products_own(float (&c)[COUNT]) {
  KV_UNROLL for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
template <int COUNT>
KV_FN void kv_products_own(kv_u32 (&a)[COUNT]) {
  KV_UNROLL for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#define KV_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KV_NAMES_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define KV_NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define KV_NAMES_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define KV_NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define KV_NAMES_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define KV_NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define KV_NAMES_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define KV_EIGHT_FLOATS(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

// c[64, 64] = a[64, 16] b[64, 16]^T, or += where `is_added`; both in shared memory, 16 columns of rows of 128 bytes.
#define KV_SCORES(TYPE, c, a, b, is_added)                                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                     \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                      \
               " {" KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 "}, %32, %33, p, 1, 1, 0, 0;\n}" \
               : KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24)   \
               : "l"(a), "l"(b), "n"(is_added))
template <bool IS_BFLOAT, bool IS_ADDED>
KV_FN void kv_scores_begin(float (&c)[32], kv_u64 a, kv_u64 b) {
  if (IS_BFLOAT)
    KV_SCORES("bf16", c, a, b, IS_ADDED);
  else
    KV_SCORES("f16", c, a, b, IS_ADDED);
}

// The same, a in registers, laid out as for kv_mma.
#define KV_CODES(TYPE, c, a, b, is_added)                                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                            \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                             \
               " {" KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}" \
               : KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24)          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(is_added))
template <bool IS_BFLOAT, bool IS_ADDED>
KV_FN void kv_codes_begin(float (&c)[32], const kv_u32* a, kv_u64 b) {
  if (IS_BFLOAT)
    KV_CODES("bf16", c, a, b, IS_ADDED);
  else
    KV_CODES("f16", c, a, b, IS_ADDED);
}

// c[64, N] += a[64, 16] b[16, N]: a in registers, laid out as for kv_mma, b in shared memory, 16 rows.
#define KV_MIX(TYPE, N, NAMES, A, B, ...)                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                   \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B   \
               ", p, 1, 1, 1;\n}"                                                                           \
               : __VA_ARGS__                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define KV_MIX_8(TYPE) \
  KV_MIX(TYPE, "8", "%0, %1, %2, %3", "%4, %5, %6, %7", "%8", \
         "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]))
#define KV_MIX_64(TYPE) \
  KV_MIX(TYPE, "64", KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24, "%32, %33, %34, %35", "%36", \
         KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24))
#define KV_MIX_80(TYPE) \
  KV_MIX(TYPE, "80", KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 ", " KV_NAMES_32, "%40, %41, %42, %43", "%44", \
         KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24), KV_EIGHT_FLOATS(c, 32))
#define KV_MIX_96(TYPE) \
  KV_MIX(TYPE, "96", KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 ", " KV_NAMES_32 ", " KV_NAMES_40, "%48, %49, %50, %51", "%52", \
         KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24), KV_EIGHT_FLOATS(c, 32), KV_EIGHT_FLOATS(c, 40))
#define KV_MIX_112(TYPE) \
  KV_MIX(TYPE, "112", KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 ", " KV_NAMES_32 ", " KV_NAMES_40 ", " KV_NAMES_48, "%56, %57, %58, %59", "%60", \
         KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24), KV_EIGHT_FLOATS(c, 32), KV_EIGHT_FLOATS(c, 40), KV_EIGHT_FLOATS(c, 48))
#define KV_MIX_128(TYPE) \
  KV_MIX(TYPE, "128", KV_NAMES_0 ", " KV_NAMES_8 ", " KV_NAMES_16 ", " KV_NAMES_24 ", " KV_NAMES_32 ", " KV_NAMES_40 ", " KV_NAMES_48 ", " KV_NAMES_56, "%64, %65, %66, %67", "%68", \
         KV_EIGHT_FLOATS(c, 0), KV_EIGHT_FLOATS(c, 8), KV_EIGHT_FLOATS(c, 16), KV_EIGHT_FLOATS(c, 24), KV_EIGHT_FLOATS(c, 32), KV_EIGHT_FLOATS(c, 40), KV_EIGHT_FLOATS(c, 48), KV_EIGHT_FLOATS(c, 56))
template <bool IS_BFLOAT, int N>
KV_FN void kv_mix_begin(float (&c)[N / 2], const kv_u32* a, kv_u64 b) {
  if constexpr (N == 8 && IS_BFLOAT) KV_MIX_8("bf16");
  if constexpr (N == 8 && !IS_BFLOAT) KV_MIX_8("f16");
  if constexpr (N == 64 && IS_BFLOAT) KV_MIX_64("bf16");
  if constexpr (N == 64 && !IS_BFLOAT) KV_MIX_64("f16");
  if constexpr (N == 80 && IS_BFLOAT) KV_MIX_80("bf16");
  if constexpr (N == 80 && !IS_BFLOAT) KV_MIX_80("f16");
  if constexpr (N == 96 && IS_BFLOAT) KV_MIX_96("bf16");
  if constexpr (N == 96 && !IS_BFLOAT) KV_MIX_96("f16");
  if constexpr (N == 112 && IS_BFLOAT) KV_MIX_112("bf16");
  if constexpr (N == 112 && !IS_BFLOAT) KV_MIX_112("f16");
  if constexpr (N == 128 && IS_BFLOAT) KV_MIX_128("bf16");
  if constexpr (N == 128 && !IS_BFLOAT) KV_MIX_128("f16");
}
