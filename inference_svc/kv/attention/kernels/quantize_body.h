// A warp takes one group of one row of one head: those of K, then those of V.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, 0>;
constexpr int GROUPS = K::GROUPS + V::GROUPS;
constexpr int K_UNITS = K::END / KV_PAGE_TOKENS, UNITS = K_UNITS + V::END / KV_PAGE_TOKENS;  // of a token
const int rows = keys_shape[2];
const int item = kv_block_x * WARPS + kv_warp;
const int group = item % GROUPS, head = item / GROUPS % KV_HEADS, token = item / GROUPS / KV_HEADS;
if (token >= keys_shape[0] * rows) return;
const long sequence = token / rows, row = token % rows;
KV_GLOBAL kv_u16* units = out + long(token) * UNITS;
if (group < K::GROUPS)
  kv_quantize_group<Key, K, IS_BFLOAT>(
      keys + sequence * keys_strides[0] + head * keys_strides[1] + row * keys_strides[2], keys_strides[3], group,
      units + head * K::ROW_UNITS, units + K::SCALES / KV_PAGE_TOKENS + head * K::GROUPS,
      units + K::BIASES / KV_PAGE_TOKENS + head * K::GROUPS, kv_lane);
else
  kv_quantize_group<Value, V, IS_BFLOAT>(
      values + sequence * values_strides[0] + head * values_strides[1] + row * values_strides[2], values_strides[3],
      group - K::GROUPS, units + K_UNITS + head * V::ROW_UNITS,
      units + K_UNITS + V::SCALES / KV_PAGE_TOKENS + head * V::GROUPS,
      units + K_UNITS + V::BIASES / KV_PAGE_TOKENS + head * V::GROUPS, kv_lane);
