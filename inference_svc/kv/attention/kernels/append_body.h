// A warp takes one group of one row of one head, those of K, then those of V, and writes it where it lies in its page.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int GROUPS = K::GROUPS + V::GROUPS;
// A row of keys is [n, heads], or [heads, 1].
const int rows = keys_shape[1] * keys_shape[2] / KV_HEADS, tokens = keys_shape[0] * rows;
const int item = kv_block_x * WARPS + kv_warp;
const int group = item % GROUPS, head = item / GROUPS % KV_HEADS, token = item / GROUPS / KV_HEADS;
if (token >= tokens) return;
const int place = places[token];
if (group == 0 && head == 0 && kv_lane == 0) stored[token] = place + 1;
if (place < 0) return;
const long page = block_table[long(token / rows) * block_table_shape[1] + place / KV_PAGE_TOKENS];
const long source = long(token) * KV_HEADS + head;
const int line = head * KV_PAGE_TOKENS + place % KV_PAGE_TOKENS;
// The pool is no output: MLX would copy all of it. Whoever reads it next waits for `stored`.
KV_GLOBAL kv_u16* units = (KV_GLOBAL kv_u16*)pages + page * pages_shape[1];
if (group < K::GROUPS)
  kv_quantize_group<Key, K, IS_BFLOAT>(
      keys + source * KEY_DIM, group, units + K::BASE + line * K::ROW_UNITS,
      units + K::SCALES + line * K::GROUPS, units + K::BIASES + line * K::GROUPS, kv_lane);
else
  kv_quantize_group<Value, V, IS_BFLOAT>(
      values + source * VALUE_DIM, group - K::GROUPS, units + V::BASE + line * V::ROW_UNITS,
      units + V::SCALES + line * V::GROUPS, units + V::BIASES + line * V::GROUPS, kv_lane);
