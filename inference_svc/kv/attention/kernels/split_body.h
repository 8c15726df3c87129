// One block scores and mixes SPLIT tokens for up to QUERIES queries of one kv head of one sequence.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int SPAN = SPLIT / WARPS;
const int sequence = kv_block_z, head = kv_block_y % KV_HEADS, first_row = kv_block_y / KV_HEADS * QUERIES;
const int query_heads = queries_shape[1], query_count = queries_shape[2], blocks = block_table_shape[1];
const int rows = query_heads / KV_HEADS * query_count;
const int row_count = rows - first_row < QUERIES ? rows - first_row : QUERIES;
const int length = lengths[sequence], window = int(settings[1]);
const KvSeen any = kv_seen_by_any(length, query_count, window);
const int split = any.low / SPLIT + kv_block_x, first_token = split * SPLIT + kv_warp * SPAN;
if (split * SPLIT > any.high) return;
const bool is_live = first_token <= any.high && first_token + SPAN > any.low;
const long page = is_live ? block_table[sequence * blocks + first_token / KV_PAGE_TOKENS] : 0;
const long first_query = (long(sequence) * query_heads + head * (query_heads / KV_HEADS)) * query_count + first_row;
const int row_stride = kv_blocks_x * (VALUE_DIM + 4);
KV_GLOBAL float* mine = partial + first_query * row_stride + kv_block_x * (VALUE_DIM + 4);
KV_SPLIT(queries + first_query * KEY_DIM, pages + page * pages_shape[1], head, first_token, length, query_count, first_row,
         row_count, settings[0], window, mine, row_stride, kv_warp, kv_lane, kv_shared);
