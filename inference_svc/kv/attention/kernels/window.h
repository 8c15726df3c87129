// A window's row mixes its sequence's rows in pages, which splits have mixed, with the rows of this pass up to its own:
// those that were stored as they are stored, others as they were computed.

template <typename Rows, bool IS_BFLOAT>
KV_FN float kv_stored_value(KV_GLOBAL const kv_u16* page, int line, int dim) {
  constexpr int EACH = 16 / Rows::BITS;
  KV_GLOBAL const kv_u16* units = page + Rows::BASE + line * Rows::ROW_UNITS;
  if (!Rows::IS_QUANTIZED) return kv_scale<IS_BFLOAT>(units[dim]);
  const int group = line * Rows::GROUPS + dim / Rows::GROUP;
  const kv_u32 code = (kv_u32(units[dim / EACH]) >> (dim % EACH * Rows::BITS)) & ((1u << (Rows::BITS % 16)) - 1);
  return kv_scale<IS_BFLOAT>(page[Rows::SCALES + group]) * float(code) +
         kv_scale<IS_BFLOAT>(page[Rows::BIASES + group]);
}

// A mix of some rows, and their weight.
template <int EACH>
struct KvMixed {
  float top, total, mix[EACH];
};

template <int EACH>
KV_FN void kv_weigh(KV_THREAD KvMixed<EACH>* mixed, float top, float total, KV_THREAD const float* mix) {
  const float highest = top > mixed->top ? top : mixed->top;
  const float kept = kv_exp2(mixed->top - highest), added = kv_exp2(top - highest);
  mixed->top = highest;
  mixed->total = mixed->total * kept + total * added;
  KV_UNROLL for (int i = 0; i < EACH; ++i) mixed->mix[i] = mixed->mix[i] * kept + mix[i] * added;
}

// One query of one head. `partial` has its splits; `keys` and `values` begin with the slot's first row, `stored` has by
// row its position + 1, 0 for none. A warp takes each eighth split and row; the order is fixed.
template <typename Query, typename Key, typename Value, typename Out, typename K, typename V, bool IS_BFLOAT, int WARPS,
          typename Table, typename Places>  // pointers: Metal keeps a few numbers elsewhere than many
KV_FN void kv_window(KV_GLOBAL const Query* query, KV_GLOBAL const Key* keys, KV_GLOBAL const Value* values,
                     KV_GLOBAL const kv_u16* pages, long page_units, Table table, Places stored,
                     KV_GLOBAL const float* partial, int splits, int head, int row,
                     float scale, KV_GLOBAL Out* out, int warp, int lane, KV_SHARED float* shared) {
  constexpr int KEYS = (K::DIM + 31) / 32, EACH = (V::DIM + 31) / 32, STRIDE = V::DIM + 4;
  float asked[KEYS], mix[EACH];
  KV_UNROLL for (int i = 0; i < KEYS; ++i)
    asked[i] = i * 32 + lane < K::DIM ? float(query[i * 32 + lane]) * scale * KV_LOG2E : 0.0f;
  KvMixed<EACH> mixed;
  mixed.top = KV_NONE;
  mixed.total = 0;
  KV_UNROLL for (int i = 0; i < EACH; ++i) mixed.mix[i] = mix[i] = 0;
  KV_ROLLED for (int split = warp; split < splits; split += WARPS) {
    KV_GLOBAL const float* mine = partial + split * STRIDE;
    KV_UNROLL for (int i = 0; i < EACH; ++i)
      if (i * 32 + lane < V::DIM) mix[i] = mine[i * 32 + lane];
    kv_weigh<EACH>(&mixed, mine[V::DIM], mine[V::DIM + 1], mix);
  }
  KV_ROLLED for (int other = warp; other <= row; other += WARPS) {
    const int place = stored[other] - 1;
    KV_GLOBAL const kv_u16* page = pages + (place < 0 ? 0 : table[place / KV_PAGE_TOKENS] * page_units);
    const int line = head * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS;
    KV_GLOBAL const Key* key = keys + long(other) * K::HEADS * K::DIM;
    KV_GLOBAL const Value* value = values + long(other) * V::HEADS * V::DIM;
    float score = 0;
    KV_UNROLL for (int i = 0; i < KEYS; ++i) {
      const int dim = i * 32 + lane;
      if (dim < K::DIM) score += asked[i] * (place < 0 ? float(key[dim]) : kv_stored_value<K, IS_BFLOAT>(page, line, dim));
    }
    KV_UNROLL for (int i = 0; i < EACH; ++i) {
      const int dim = i * 32 + lane;
      if (dim < V::DIM) mix[i] = place < 0 ? float(value[dim]) : kv_stored_value<V, IS_BFLOAT>(page, line, dim);
    }
    kv_weigh<EACH>(&mixed, kv_warp_sum(score), 1.0f, mix);
  }
  KV_UNROLL for (int i = 0; i < EACH; ++i)
    if (i * 32 + lane < V::DIM) shared[warp * STRIDE + i * 32 + lane] = mixed.mix[i];
  if (lane == 0) {
    shared[warp * STRIDE + V::DIM] = mixed.top;
    shared[warp * STRIDE + V::DIM + 1] = mixed.total;
  }
  kv_group_barrier();
  float highest = KV_NONE, total = 0;
  for (int w = 0; w < WARPS; ++w) highest = kv_max(highest, shared[w * STRIDE + V::DIM]);
  for (int w = 0; w < WARPS; ++w)
    total += shared[w * STRIDE + V::DIM + 1] * kv_exp2(shared[w * STRIDE + V::DIM] - highest);
  for (int dim = warp * 32 + lane; dim < V::DIM; dim += WARPS * 32) {
    float sum = 0;
    for (int w = 0; w < WARPS; ++w) sum += shared[w * STRIDE + dim] * kv_exp2(shared[w * STRIDE + V::DIM] - highest);
    out[dim] = Out(sum / total);
  }
}
