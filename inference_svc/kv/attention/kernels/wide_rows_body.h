// A block makes 16 * HEIGHT outputs, of one of COUNT matrices, or half of them of a gate and half of what it opens for. Four
// warps multiply 64 of them; what lies behind the last ones' rows is multiplied, too, and is no result. SPLITS blocks share a
// depth: the last of them to come adds their sums, in the depth's order.
constexpr int OUTPUTS = 16 * HEIGHT, PART = IS_GATED ? OUTPUTS / 2 : OUTPUTS, THREADS = (HEIGHT + 3) / 4 * 128, ROWS = 64;
constexpr int STAGE = (OUTPUTS + ROWS) * KV_CHUNK, PIECES = (OUTPUTS + ROWS) * 8, EACH = (PIECES + THREADS - 1) / THREADS;
const int depth = x_shape[2], rows = x_shape[0] * x_shape[1], thread = kv_warp * 32 + kv_lane;
kv_u16* const unaligned = (kv_u16*)kv_shared;
kv_u16* const ring = unaligned + (1024 - kv_shared_address(unaligned) % 1024) % 1024 / 2;
int first = kv_block_x / SPLITS * PART, width = widths[0];
const kv_u16* parts[2] = {matrices[0], matrices[COUNT - 1]};
T* y = results[0];
KV_UNROLL for (int i = 1; i < COUNT && !IS_GATED; ++i) {
  if (first < width) break;
  first -= (width + PART - 1) / PART * PART;
  width = widths[i];
  parts[0] = matrices[i];
  y = results[i];
}
const kv_u16* from[EACH];
bool is_read[EACH];
KV_UNROLL for (int i = 0; i < EACH; ++i) {
  const int row = i * (THREADS / 8) + thread / 8, output = first + (IS_GATED ? row / 16 * 8 + row % 8 : row);
  if (row < OUTPUTS) {
    is_read[i] = output < width;
    from[i] = (IS_GATED && row / 8 % 2 ? parts[1] : parts[0]) + (is_read[i] ? long(output) * depth : 0) + thread % 8 * 8;
  } else {
    is_read[i] = row - OUTPUTS < rows;
    from[i] = (const kv_u16*)x + (is_read[i] ? long(row - OUTPUTS) * depth : 0) + thread % 8 * 8;
  }
}
const int place = kv_piece_of(thread / 8, thread % 8), split = kv_block_x % SPLITS;
const int before = depth / KV_CHUNK * split / SPLITS, chunks = depth / KV_CHUNK * (split + 1) / SPLITS - before;
KV_UNROLL for (int i = 0; i < EACH; ++i) from[i] += before * KV_CHUNK;
int begun = 0;
auto begin = [&](int number) {
  if (number < chunks) {
    KV_UNROLL for (int i = 0; i < EACH; ++i)
      if (i * THREADS + thread < PIECES) kv_copy16(ring + begun * STAGE + place + i * THREADS * 8, from[i] + number * KV_CHUNK, is_read[i]);
    if (++begun == STAGES) begun = 0;
  }
  kv_copies_begun();
};
float sum[32];
KV_UNROLL for (int i = 0; i < 32; ++i) sum[i] = 0;
KV_UNROLL for (int number = 0; number < STAGES - 1; ++number) begin(number);
int used = 0;
KV_ROLLED for (int number = 0; number < chunks; ++number) {
  kv_copies_done<STAGES - 2>();
  kv_written_for_products();
  kv_products_done<0>();
  kv_group_barrier();
  begin(number + STAGES - 1);
  kv_products_own(sum);
  kv_products_fence();
  const kv_u64 w = kv_matrix(ring + used * STAGE + kv_warp / 4 * 64 * KV_CHUNK, 8192), own_x = kv_matrix(ring + used * STAGE + OUTPUTS * KV_CHUNK, 8192);
  KV_UNROLL for (int k = 0; k < 4; ++k) kv_scores_begin<IS_BFLOAT, true>(sum, kv_matrix_from(w, k * 32), kv_matrix_from(own_x, k * 32));
  kv_products_begun();
  if (++used == STAGES) used = 0;
}
kv_products_done<0>();
kv_products_own(sum);
if constexpr (SPLITS > 1) {
  kv_floats4* const partial = (kv_floats4*)scratch + long(kv_block_x - split) * 8 * THREADS + thread;
  KV_UNROLL for (int i = 0; i < 8; ++i)
    partial[(split * 8 + i) * THREADS] = kv_floats4{sum[i * 4], sum[i * 4 + 1], sum[i * 4 + 2], sum[i * 4 + 3]};
  kv_group_barrier();
  int* const is_last = (int*)kv_shared;
  if (thread == 0) *is_last = kv_is_last(counters + kv_block_x / SPLITS, SPLITS);
  kv_group_barrier();
  if (!*is_last) return;
  KV_UNROLL for (int i = 0; i < 32; ++i) sum[i] = 0;
  KV_UNROLL for (int s = 0; s < SPLITS; ++s) KV_UNROLL for (int i = 0; i < 8; ++i) {
    const kv_floats4 four = partial[(s * 8 + i) * THREADS];
    sum[i * 4] += four.x;
    sum[i * 4 + 1] += four.y;
    sum[i * 4 + 2] += four.z;
    sum[i * 4 + 3] += four.w;
  }
}
kv_write_wide<IS_GATED, ADDS>(sum, rows, kv_warp * 16, OUTPUTS, first, width, y, added, kv_lane);
