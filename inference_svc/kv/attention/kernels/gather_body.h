// Rows [start, start + count) of one sequence, K and V, as values [kv_heads, count, dim].
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int K_EIGHTS = KEY_DIM / 8, EIGHTS = K_EIGHTS + VALUE_DIM / 8;
const long start = span[0], count = span[1];
const long item = (long(kv_block_x) * WARPS + kv_warp) * 32 + kv_lane;
const int eight = int(item % EIGHTS);
const long row = item / EIGHTS % count, head = item / EIGHTS / count;
// `stored` is what the pass that wrote the rows gave back: reading it puts this behind that.
if (head >= KV_HEADS || stored[0] == -2147483647) return;
const long position = start + row;
KV_GLOBAL const kv_u16* page = pages + long(block_table[position / KV_PAGE_TOKENS]) * pages_shape[1];
const int line = int(head) * KV_PAGE_TOKENS + int(position % KV_PAGE_TOKENS);
if (eight < K_EIGHTS)
  kv_eight_values<K, IS_BFLOAT, Out>(page, line, eight, keys + (head * count + row) * KEY_DIM + eight * 8);
else
  kv_eight_values<V, IS_BFLOAT, Out>(page, line, eight - K_EIGHTS,
                                     values + (head * count + row) * VALUE_DIM + (eight - K_EIGHTS) * 8);
