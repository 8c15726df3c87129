// One new token of each of some sequences. A block scores and mixes the tokens of PAGES pages for the queries of one kv head
// of one sequence: the newest first, and last the blocks that have no tokens. Where this IS_WHOLE, those whose page gets new
// rows write these before, and the last of a head's blocks makes its results; else queries are rotated already, and a block
// makes results where it ENDS a head's only split.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int SPAN = KV_PAGE_TOKENS / WARPS, SHARE = HEADS / KV_HEADS, STRIDE = VALUE_DIM + 4;
const int row = kv_block_y, head = kv_block_x, blocks = block_table_shape[1];
const int rows = places_shape[0], place = places[row], last = place / KV_PAGE_TOKENS;
const int split = last / PAGES - kv_block_z, block = split * PAGES;
const int its_place = IS_WHOLE && kv_lane < rows ? places[kv_lane] : -1;  // of each of up to 32 rows, by lane
const long first_query = long(row) * HEADS + head * SHARE;
if (place < 0 || split < 0) {
  for (int i = kv_warp * 32 + kv_lane; i < SHARE * VALUE_DIM && ENDS && place < 0 && kv_block_z == 0; i += WARPS * 32)
    out[first_query * VALUE_DIM + i] = T(0.0f);
  return;
}
const int* const its_pages = block_table + long(row) * blocks + block;
const long page = its_pages[0];
float* const mine = partial + first_query * blocks * STRIDE;
// Of tokens that are tried ahead, several rows' are in one page, and each is seen by those behind it.
const int its_page = its_place / KV_PAGE_TOKENS - block;
const bool is_in = its_place >= 0 && its_page >= 0 && its_page < PAGES && block_table[kv_lane * blocks + block + its_page] == its_pages[its_page];
auto append = [&]() {
  if (!IS_WHOLE || !kv_any(is_in)) return;
  KV_ROLLED for (int other = 0; other < rows; ++other) {
    if (!kv_any(is_in && kv_lane == other)) continue;
    const long source = long(other) * KV_HEADS + head, at = places[other];
    const int line = head * KV_PAGE_TOKENS + at % KV_PAGE_TOKENS;
    kv_u16* const units = (kv_u16*)pages + its_pages[at / KV_PAGE_TOKENS - block] * long(pages_shape[1]);
    KV_ROLLED for (int group = kv_warp; group < K::GROUPS + V::GROUPS; group += WARPS)
      kv_append_group<T, K, V, IS_BFLOAT>(group, KvTurned<T>{keys + source * KEY_DIM, turns + at * KEY_DIM},
                                          values + source * VALUE_DIM, units, line, (T*)kv_shared + kv_warp * KEY_DIM, kv_lane);
  }
  kv_written();
  kv_group_barrier();
};

kv_split_by_matrices<T, K, V, IS_BFLOAT, QUERIES, WARPS, SPAN, TILE, (PAGES > 1)>(
    KvTurned<T>{queries + first_query * KEY_DIM, IS_WHOLE ? turns + place * KEY_DIM : nullptr}, (const kv_u16*)pages + page * pages_shape[1], head,
    block * KV_PAGE_TOKENS + kv_warp * SPAN, place + 1, 1, 0, SHARE, settings[0], 0, mine + split * STRIDE, blocks * STRIDE, kv_warp, kv_lane, kv_shared,
    KvPages{(const kv_u16*)pages, pages_shape[1], its_pages, last - block < PAGES ? last - block + 1 : PAGES}, append,
    IS_WHOLE && kv_any(is_in && its_page == 0));
if (ENDS) {
  kv_group_barrier();
  int* const is_last = (int*)kv_shared;
  if (kv_warp == 0 && kv_lane == 0) *is_last = !IS_WHOLE || kv_is_last(counters + row * KV_HEADS + head, last / PAGES + 1);
  kv_group_barrier();
  for (int query = kv_warp; query < SHARE && *is_last; query += WARPS)
    kv_reduce_by_warp<T, VALUE_DIM, false>(mine + long(query) * blocks * STRIDE, last / PAGES + 1,
                                           out + (first_query + query) * VALUE_DIM, kv_lane);
}
