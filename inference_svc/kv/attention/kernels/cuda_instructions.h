// Instructions of CUDA that C++ has no word for: copies past the registers, and products of matrix fragments.
KV_FN unsigned kv_shared_address(const void* place) { return (unsigned)__cvta_generic_to_shared(place); }

// 16 bytes from global to shared memory, or 16 zeros. Complete after kv_copies_done.
KV_FN void kv_copy16(void* to, const void* from, bool is_read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(kv_shared_address(to)), "l"(from),
               "r"(is_read ? 16 : 0)
               : "memory");
}
// The same of 8 bytes, all of them read.
KV_FN void kv_copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(kv_shared_address(to)), "l"(from) : "memory");
}
KV_FN void kv_copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
KV_FN void kv_copies_done() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
}

// Four matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8.
KV_FN void kv_load_matrices(const void* row, kv_u32* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(kv_shared_address(row)));
}
KV_FN void kv_load_transposed(const void* row, kv_u32* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(kv_shared_address(row)));
}
KV_FN kv_u32 kv_transposed(kv_u32 x) {
  kv_u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}


// Two values in a word, the first in the lower half.
KV_FN kv_u32 kv_pair(float low, float high) {
  kv_u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
KV_FN kv_u32 kv_pair_of_bfloats(float low, float high) {
  kv_u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// Bits of x under a mask, beside others. As one instruction: the compiler makes two of two constants.
KV_FN kv_u32 kv_masked_or(kv_u32 x, kv_u32 mask, kv_u32 others) {
  kv_u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(others));
  return y;
}

// Whether it is so in some lane of the warp.
KV_FN bool kv_any(bool is_so) { return __any_sync(0xffffffffu, is_so); }

// a b + c of two bfloats or halves in a word, rounded once.
template <bool IS_BFLOAT>
KV_FN kv_u32 kv_fma_two(kv_u32 a, kv_u32 b, kv_u32 c) {
  kv_u32 x;
  if (IS_BFLOAT)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}

// 2^x to 22 bits.
KV_FN float kv_exp2_near(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c[16, 8] += a[16, 16] b[16, 8], halves or bfloats into floats.
template <bool IS_BFLOAT>
KV_FN void kv_mma(float* c, const kv_u32* a, const kv_u32* b) {
  if (IS_BFLOAT)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

KV_FN float kv_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KV_FN float kv_cosine(float x) { return cosf(x); }
KV_FN float kv_sine(float x) { return sinf(x); }
KV_FN float kv_inverse_root(float x) { return rsqrtf(x); }
struct KvTurn {
  float cosine, sine;
};
// No part of the code around it, which most blocks go through once.
__device__ __noinline__ KvTurn kv_turn(float angle) {
  KvTurn turn;
  sincosf(angle, &turn.sine, &turn.cosine);
  return turn;
}

// For so many warps of a block.
template <int WARPS>
KV_FN void kv_part_barrier() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / (WARPS * 32)), "n"(WARPS * 32) : "memory");
}
// Writes of this thread are there for copies that begin behind a barrier.
KV_FN void kv_written() { __threadfence(); }
// Whether this thread is the last of `count` that come to a word, which is as at the beginning then: writes of the others
// before they came are there for the last.
KV_FN bool kv_is_last(const kv_u32* word, int count) {
  kv_u32 before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(count - 1) : "memory");
  return before == kv_u32(count - 1);
}
// For all blocks of a launch, which must be there at once: their writes before it are there for all behind it. The first
// block's part turns the word's highest bit when all others have come, so it needs no beginning.
KV_FN void kv_grid_barrier(const kv_u32* word) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const kv_u32 part = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    kv_u32 before, now;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(part) : "memory");
    now = before + part;  // the last to come needs no other look
    for (int left = 1 << 22; !((before ^ now) & 0x80000000u); --left) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
      if (left == 0) __trap();
    }
  }
  __syncthreads();
}
