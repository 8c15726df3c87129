// A decoding layer in one launch: its steps wait for each other at barriers of the whole grid, of which each
// multiprocessor has one block. Weights are constant, so copies of them go on while a step waits for the one before.
KV_CONST int KV_SUM_STRIDE = 36;

// Where a value lies among eight that fragments are made of: each word has one and the fourth behind it.
KV_FN int kv_paired(int at) { return (at & ~7) | (at & 3) << 1 | (at >> 2 & 1); }

// Two values of T in a word, each times a factor, rounded, times a weight, rounded: the norm of two inputs.
template <typename T, bool IS_BFLOAT>
KV_FN kv_u32 kv_normed_pair(kv_u32 x, kv_u32 weight, float factor) {
  const float low = kv_rounded<T>(kv_value<IS_BFLOAT>(kv_u16(x)) * factor) * kv_value<IS_BFLOAT>(kv_u16(weight));
  const float high = kv_rounded<T>(kv_value<IS_BFLOAT>(kv_u16(x >> 16)) * factor) * kv_value<IS_BFLOAT>(kv_u16(weight >> 16));
  return IS_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high);
}
// Eight values, paired or in order.
template <bool IS_PAIRED>
KV_FN kv_u32x4 kv_eight(kv_u32 a, kv_u32 b, kv_u32 c, kv_u32 d) {
  if (!IS_PAIRED) return kv_u32x4{a, b, c, d};
  return kv_u32x4{(a & 0xffffu) | c << 16, a >> 16 | (c & 0xffff0000u), (b & 0xffffu) | d << 16, b >> 16 | (d & 0xffff0000u)};
}

// As kv_reduce by eight warps, to the bit, by one.
template <typename Out, int DIM, bool IS_PAIRED>
KV_FN void kv_reduce_by_warp(const float* partial, int split_count, Out* out, int lane) {
  constexpr int EACH = (DIM + 31) / 32, STRIDE = DIM + 4;
  float highest = KV_NONE;
  for (int split = lane; split < split_count; split += 32) {
    const float other = partial[split * STRIDE + DIM];
    highest = other > highest ? other : highest;
  }
  highest = kv_warp_max(highest);
  float total[8], mix[8][EACH];
  KV_UNROLL for (int w = 0; w < 8; ++w) {
    total[w] = 0;
    KV_UNROLL for (int i = 0; i < EACH; ++i) mix[w][i] = 0;
  }
  KV_ROLLED for (int first = 0; first < split_count; first += 8) {
    KV_UNROLL for (int w = 0; w < 8; ++w) {
      if (first + w >= split_count) continue;
      const float* mine = partial + (first + w) * STRIDE;
      const float kept = kv_exp2(mine[DIM] - highest);
      total[w] += mine[DIM + 1] * kept;
      KV_UNROLL for (int i = 0; i < EACH; ++i)
        if (i * 32 + lane < DIM) mix[w][i] += mine[i * 32 + lane] * kept;
    }
  }
  float all = 0;
  KV_UNROLL for (int w = 0; w < 8; ++w) all += total[w];
  KV_UNROLL for (int i = 0; i < EACH; ++i) {
    float sum = 0;
    KV_UNROLL for (int w = 0; w < 8; ++w) sum += mix[w][i];
    if (i * 32 + lane < DIM) out[IS_PAIRED ? kv_paired(i * 32 + lane) : i * 32 + lane] = Out(all > 0 ? sum / all : 0.0f);
  }
}

// Where a pass begins: passes that run side by side are at different inputs, so that they read all channels of memory.
KV_FN int kv_first_step(int pass, int steps) { return pass % steps; }
