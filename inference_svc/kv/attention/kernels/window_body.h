// One block makes the result of one head of one row of a slot.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
const int count = stored_shape[1], shares = queries_shape[1] / KV_HEADS / count, heads = KV_HEADS * shares;
const int query_head = kv_block_x % heads, row = kv_block_x / heads % count, slot = kv_block_x / heads / count;
const int head = query_head / shares, split = int(settings[2]), length = lengths[slot];
const long asking = ((long(slot) * KV_HEADS + head) * count + row) * shares + query_head % shares;
const long first = long(slot) * count * KV_HEADS + head;
kv_window<Query, Key, Value, Out, K, V, IS_BFLOAT, WARPS>(
    queries + asking * KEY_DIM, keys + first * KEY_DIM, values + first * VALUE_DIM, pages, pages_shape[1],
    block_table + long(slot) * block_table_shape[1], stored + slot * count,
    partial + asking * partial_shape[1] * (VALUE_DIM + 4), length > 0 ? (length - 1) / split + 1 : 0, head, row,
    settings[0], out + long(kv_block_x) * VALUE_DIM, kv_warp, kv_lane, kv_shared);
