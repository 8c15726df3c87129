// Fragments of tiles as Metal has them: simdgroup matrices of eight rows and columns, of which a lane has row g and
// columns 2t and 2t + 1, as in MLX's own kernels; stored tiles are read where they lie. Products are of floats.
KV_CONST int KV_EIGHTS = 1;  // of rows in a fragment

KV_FN int kv_row_of(int lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
KV_FN int kv_pair_of(int lane) { return (lane >> 2 & 2) | (lane & 1); }

// Of the four lanes of a row.
KV_FN float kv_row_max(float x) {
  x = kv_max(x, kv_shuffle_xor(x, 1));
  return kv_max(x, kv_shuffle_xor(x, 8));
}
KV_FN bool kv_any(bool is_so) { return metal::simd_any(is_so); }
KV_FN float kv_exp2_near(float x) { return metal::fast::exp2(x); }

// Two values in a word, the first in the lower half.
KV_FN kv_u32 kv_pair(float low, float high) { return kv_u32(kv_to_half(low)) | kv_u32(kv_to_half(high)) << 16; }
KV_FN kv_u32 kv_pair_of_bfloats(float low, float high) {
  return kv_u32(kv_to_bfloat(low)) | kv_u32(kv_to_bfloat(high)) << 16;
}
template <bool IS_BFLOAT>
KV_FN float kv_low(kv_u32 pair) {
  return IS_BFLOAT ? kv_from_bits(pair << 16) : kv_from_half(kv_u16(pair));
}
template <bool IS_BFLOAT>
KV_FN float kv_high(kv_u32 pair) {
  return IS_BFLOAT ? kv_from_bits(pair & 0xffff0000u) : kv_from_half(kv_u16(pair >> 16));
}
KV_FN kv_u32 kv_masked_or(kv_u32 x, kv_u32 mask, kv_u32 others) { return (x & mask) | others; }
template <bool IS_BFLOAT>
KV_FN kv_u32 kv_fma_two(kv_u32 a, kv_u32 b, kv_u32 c) {
  const float low = metal::fma(kv_low<IS_BFLOAT>(a), kv_low<IS_BFLOAT>(b), kv_low<IS_BFLOAT>(c));
  const float high = metal::fma(kv_high<IS_BFLOAT>(a), kv_high<IS_BFLOAT>(b), kv_high<IS_BFLOAT>(c));
  return IS_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high);
}

// Eight queries' values of step k; sixteen tokens' keys of step k, as columns; sixteen tokens' values of chunks `out` and
// the next.
template <int ROW_CHUNKS>
KV_FN void kv_load_queries(KV_SHARED const kv_u16* rows, int k, int lane, KV_THREAD kv_u32* x) {
  KV_UNROLL for (int i = 0; i < 2; ++i)
    x[i] = *(KV_SHARED const kv_u32*)(rows + kv_place<ROW_CHUNKS>(kv_row_of(lane), 2 * k + i) + 2 * kv_pair_of(lane));
}
template <int ROW_CHUNKS>
KV_FN void kv_load_keys(KV_SHARED const kv_u16* rows, int k, int lane, KV_THREAD kv_u32* x) {
  KV_UNROLL for (int i = 0; i < 4; ++i) {
    const int token = i / 2 * 8 + 2 * kv_pair_of(lane), chunk = 2 * k + i % 2;
    const kv_u32 low = rows[kv_place<ROW_CHUNKS>(token, chunk) + kv_row_of(lane)];
    x[i] = low | kv_u32(rows[kv_place<ROW_CHUNKS>(token + 1, chunk) + kv_row_of(lane)]) << 16;
  }
}
template <int ROW_CHUNKS>
KV_FN void kv_load_values(KV_SHARED const kv_u16* rows, int out, int lane, KV_THREAD kv_u32* x) {
  KV_UNROLL for (int i = 0; i < 4; ++i) {
    const int token = i % 2 * 8 + kv_row_of(lane), chunk = out + i / 2;
    x[i] = *(KV_SHARED const kv_u32*)(rows + kv_place<ROW_CHUNKS>(token, chunk) + 2 * kv_pair_of(lane));
  }
}

// c[8, 8] += a[8, 16] b[16, 8]
template <bool IS_BFLOAT>
KV_FN void kv_mma(KV_THREAD float* c, KV_THREAD const kv_u32* a, KV_THREAD const kv_u32* b) {
  metal::simdgroup_matrix<float, 8, 8> sum, left, right;
  sum.thread_elements()[0] = c[0];
  sum.thread_elements()[1] = c[1];
  KV_UNROLL for (int k = 0; k < 2; ++k) {
    left.thread_elements()[0] = kv_low<IS_BFLOAT>(a[k]);
    left.thread_elements()[1] = kv_high<IS_BFLOAT>(a[k]);
    right.thread_elements()[0] = kv_low<IS_BFLOAT>(b[k]);
    right.thread_elements()[1] = kv_high<IS_BFLOAT>(b[k]);
    metal::simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  c[0] = sum.thread_elements()[0];
  c[1] = sum.thread_elements()[1];
}

// What kv_split_by_tiles has of stored tiles: no place in shared memory, and reads of the page.
template <typename Rows, int TILE>
struct KvStore {
  KV_CONST int UNITS = 0;
};
template <typename K, typename V, int TILE, int THREADS>
KV_FN void kv_begin_tile(KV_SHARED kv_u16*, KV_GLOBAL const kv_u16*, int, int) {}
KV_FN void kv_tile_is_here() {}
template <typename Rows, int TILE>
KV_FN KvStored kv_read_tile(KV_SHARED const kv_u16*, KV_GLOBAL const kv_u16* page, int first, int number) {
  KvStored read;
  read.row = number / (8 * Rows::ROW_CHUNKS) * 8 + number % 8;
  read.chunk = number / 8 % Rows::ROW_CHUNKS;
  const int row = first + read.row;
  read.words = *(KV_GLOBAL const kv_u32x4*)(page + Rows::BASE + row * Rows::ROW_UNITS + read.chunk * 8);
  if (Rows::IS_QUANTIZED) {
    const int group = row * Rows::GROUPS + read.chunk / Rows::GROUP_CHUNKS;
    read.scale = page[Rows::SCALES + group];
    read.bias = page[Rows::BIASES + group];
  }
  return read;
}
