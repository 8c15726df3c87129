// A warp makes the result of a query of a new token of its splits.
const int query = kv_block_x * WARPS + kv_warp, row = query / HEADS;
if (row >= places_shape[0]) return;
const int place = places[row];
if (place < 0) {
  for (int i = kv_lane; i < VALUE_DIM; i += 32) out[long(query) * VALUE_DIM + i] = T(0.0f);
  return;
}
kv_reduce_by_warp<T, VALUE_DIM, false>(partial + long(query) * partial_shape[1] * (VALUE_DIM + 4), place / (KV_PAGE_TOKENS * PAGES) + 1,
                                       out + long(query) * VALUE_DIM, kv_lane);
