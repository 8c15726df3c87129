// One block makes the result of one query of one head.
const int query_heads = queries_shape[1], query_count = queries_shape[2];
const int query = kv_block_x % query_count, query_head = kv_block_x / query_count % query_heads;
const int length = lengths[kv_block_x / query_count / query_heads], window = int(settings[1]), split = int(settings[2]);
const int first_split = kv_seen_by_any(length, query_count, window).low / split;
const float sink = HAS_SINKS ? float(sinks[query_head]) * KV_LOG2E : KV_NONE;
kv_reduce<Out, VALUE_DIM, WARPS>(partial + long(kv_block_x) * partial_shape[1] * (VALUE_DIM + 4), split, first_split,
                                 kv_seen(length, query_count, query, window), sink,
                                 out + long(kv_block_x) * VALUE_DIM, kv_warp, kv_lane, kv_shared);
