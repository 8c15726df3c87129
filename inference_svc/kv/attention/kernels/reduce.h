// Where a value lies among eight that fragments are made of: each word has one and the fourth behind it.
KV_FN int kv_paired(int at) { return (at & ~7) | (at & 3) << 1 | (at >> 2 & 1); }

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
    out[IS_PAIRED ? kv_paired(dim) : dim] = Out(total > 0 ? sum / total : 0.0f);
  }
}

// As kv_reduce by eight warps, of no sink, to the bit, by one.
template <typename Out, int DIM, bool IS_PAIRED>
KV_FN void kv_reduce_by_warp(KV_GLOBAL const float* partial, int split_count, KV_GLOBAL Out* out, int lane) {
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
      KV_GLOBAL const float* mine = partial + (first + w) * STRIDE;
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
