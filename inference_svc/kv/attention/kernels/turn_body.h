// A warp rotates a query of a new token, or a group of its new row, which it writes where it lies in its page.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int GROUPS = K::GROUPS + V::GROUPS, ITEMS = HEADS + KV_HEADS * GROUPS;
const int item = kv_block_x * WARPS + kv_warp, row = item / ITEMS, which = item % ITEMS;
if (row >= places_shape[0]) return;
const int place = places[row];
if (place < 0) return;
if (which < HEADS) {
  const long first = (long(row) * HEADS + which) * KEY_DIM;
  float found[KEY_DIM / 32];
  kv_query_values<KEY_DIM>(KvTurnedOnce<T>{queries + first, frequencies, float(place)}, found, kv_lane);
  KV_UNROLL for (int i = 0; i < KEY_DIM / 32; ++i) turned[first + i * 32 + kv_lane] = T(found[i]);
  return;
}
const int head = (which - HEADS) / GROUPS, group = (which - HEADS) % GROUPS;
const long page = block_table[long(row) * block_table_shape[1] + place / KV_PAGE_TOKENS], source = long(row) * KV_HEADS + head;
kv_append_group<T, K, V, IS_BFLOAT>(group, KvTurnedOnce<T>{keys + source * KEY_DIM, frequencies, float(place)}, values + source * VALUE_DIM,
                                    (kv_u16*)pages + page * pages_shape[1], head * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS,
                                    (T*)kv_shared + kv_warp * KEY_DIM, kv_lane);
