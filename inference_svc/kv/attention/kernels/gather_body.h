// Rows [start, start + count) of one head of one sequence, K and V, as values [kv_heads, count, dim].
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int K_EIGHTS = KEY_DIM / 8, EIGHTS = K_EIGHTS + VALUE_DIM / 8;
const int start = span[0], count = span[1], head = kv_block_y;
const int item = (kv_block_x * WARPS + kv_warp) * 32 + kv_lane, eight = item % EIGHTS, row = item / EIGHTS;
// `stored` is what the pass that wrote the rows gave back: reading it puts this behind that.
if (row >= count || stored[0] == -2147483647) return;
const int position = start + row;
KV_GLOBAL const kv_u16* page = pages + long(block_table[position / KV_PAGE_TOKENS]) * pages_shape[1];
const int line = head * KV_PAGE_TOKENS + position % KV_PAGE_TOKENS;
const long made = long(head) * count + row;
if (eight < K_EIGHTS)
  kv_eight_values<K, IS_BFLOAT, Out>(page, line, eight, keys + made * KEY_DIM + eight * 8);
else
  kv_eight_values<V, IS_BFLOAT, Out>(page, line, eight - K_EIGHTS, values + made * VALUE_DIM + (eight - K_EIGHTS) * 8);
