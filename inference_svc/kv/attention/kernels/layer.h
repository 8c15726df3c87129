// A decoding layer in one launch: its steps wait for each other at barriers of the whole grid, of which each
// multiprocessor has one block. Weights are constant, so copies of them go on while a step waits for the one before.
KV_CONST int KV_SUM_STRIDE = 36;

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

// Where a pass begins: passes that run side by side are at different inputs, so that they read all channels of memory.
KV_FN int kv_first_step(int pass, int steps) { return pass % steps; }
