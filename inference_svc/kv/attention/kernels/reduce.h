// The splits of a query, of so many tokens each, become its result, in the order of the tokens, whatever else is in the
// batch. `IS_PAIRED`: in the order of layer.h.

template <typename Out, int DIM, int WARPS, bool IS_PAIRED = false>
KV_FN void kv_reduce(KV_GLOBAL const float* partial, int tokens, int first_split, KvSeen seen, float sink,
                     KV_GLOBAL Out* out, int warp, int lane, KV_SHARED float* shared) {
  constexpr int EACH = (DIM + 31) / 32, STRIDE = DIM + 4;
  const int from = seen.low / tokens - first_split;
  const int to = seen.high < seen.low ? from - 1 : seen.high / tokens - first_split;
  float highest = sink;
  for (int split = from + lane; split <= to; split += 32) {
    float other = partial[split * STRIDE + DIM];
    highest = other > highest ? other : highest;
  }
  highest = kv_warp_max(highest);
  float total = 0, mix[EACH];
  KV_UNROLL for (int i = 0; i < EACH; ++i) mix[i] = 0;
  KV_SOME_UNROLL for (int split = from + warp; split <= to; split += WARPS) {
    KV_GLOBAL const float* mine = partial + split * STRIDE;
    float kept = kv_exp2(mine[DIM] - highest);
    total += mine[DIM + 1] * kept;
    KV_UNROLL for (int i = 0; i < EACH; ++i)
      if (i * 32 + lane < DIM) mix[i] += mine[i * 32 + lane] * kept;
  }
  KV_UNROLL for (int i = 0; i < EACH; ++i)
    if (i * 32 + lane < DIM) shared[warp * STRIDE + i * 32 + lane] = mix[i];
  if (lane == 0) shared[warp * STRIDE + DIM] = total;
  kv_group_barrier();
  total = sink > KV_NONE ? kv_exp2(sink - highest) : 0.0f;
  for (int w = 0; w < WARPS; ++w) total += shared[w * STRIDE + DIM];
  for (int dim = warp * 32 + lane; dim < DIM; dim += WARPS * 32) {
    float sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += shared[w * STRIDE + dim];
    out[IS_PAIRED ? (dim & ~7) | (dim & 3) << 1 | (dim >> 2 & 1) : dim] = Out(total > 0 ? sum / total : 0.0f);
  }
}
