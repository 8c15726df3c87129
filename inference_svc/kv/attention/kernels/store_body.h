// Whole pages from other bytes: page `targets[i]` becomes row `sources[i]` of `content`, 16 bytes at a time.
const long chunks = sizes[0], content_chunks = sizes[1], first_chunk = sizes[2], pool_chunks = sizes[3];
const long count = targets_shape[0];
const long item = (long(kv_block_x) * WARPS + kv_warp) * 32 + kv_lane;
if (item >= count * chunks) return;
const long page = item / chunks, chunk = item % chunks;
KV_GLOBAL const kv_u32x4* from = (KV_GLOBAL const kv_u32x4*)content;
KV_GLOBAL kv_u32x4* to = (KV_GLOBAL kv_u32x4*)pages;
to[targets[page] * pool_chunks + chunk] = from[sources[page] * content_chunks + first_chunk + chunk];
if (item == 0) stored[0] = int(count);
