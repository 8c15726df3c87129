// A decoding layer in one launch: its steps wait for each other at barriers of the whole grid, of which each
// multiprocessor has one block. Weights are constant, so copies of them go on while a step waits for the one before.
KV_CONST int KV_SUM_STRIDE = 36;

// Two values in a word, each times a factor, rounded, times a weight, rounded: the norm of two inputs.
template <bool IS_BFLOAT>
KV_FN kv_u32 kv_normed_pair(kv_u32 x, kv_u32 weight, float factor) {
  const float low = kv_value<IS_BFLOAT>(kv_u16(x)) * factor, high = kv_value<IS_BFLOAT>(kv_u16(x >> 16)) * factor;
  const kv_u32 both = IS_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high);
  return kv_fma_two<IS_BFLOAT>(both, weight, 0x80008000u);  // and nothing more: -0 changes no sum
}
// Eight values, paired or in order.
template <bool IS_PAIRED>
KV_FN kv_u32x4 kv_eight(kv_u32 a, kv_u32 b, kv_u32 c, kv_u32 d) {
  if (!IS_PAIRED) return kv_u32x4{a, b, c, d};
  return kv_u32x4{(a & 0xffffu) | c << 16, a >> 16 | (c & 0xffff0000u), (b & 0xffffu) | d << 16, b >> 16 | (d & 0xffff0000u)};
}
