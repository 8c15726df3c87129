// Fragments of tiles as CUDA has them: a product's 16 rows, of which a lane (g, t) has g and g + 8; stored tiles come
// through shared memory, by copies.
KV_CONST int KV_EIGHTS = 2;  // of rows in a fragment

KV_FN int kv_row_of(int lane) { return lane / 4; }
KV_FN int kv_pair_of(int lane) { return lane % 4; }

// Of the four lanes of a row.
KV_FN float kv_row_max(float x) {
  x = kv_max(x, kv_shuffle_xor(x, 1));
  return kv_max(x, kv_shuffle_xor(x, 2));
}

// Where chunk `even` + `odd` of a row lies that is `row` rows behind a multiple of eight: as kv_place says, with what
// depends on the lane apart from what the compiler knows.
template <int ROW_CHUNKS>
KV_FN int kv_place_by_lane(int row, int even, int odd) {
  if (ROW_CHUNKS % 8) return kv_place<ROW_CHUNKS>(row, even + odd);
  return row * ROW_CHUNKS * 8 + ((even & 7) ^ (odd ^ (row & 7))) * 8 + even / 8 * 64;
}

// Sixteen queries' values of step k; sixteen tokens' keys of step k, as columns; sixteen tokens' values of chunks `out`
// and the next.
template <int ROW_CHUNKS>
KV_FN void kv_load_queries(const kv_u16* rows, int k, int lane, kv_u32* x) {
  kv_load_matrices(rows + kv_place_by_lane<ROW_CHUNKS>(lane % 16, 2 * k, lane / 16), x);
}
template <int ROW_CHUNKS>
KV_FN void kv_load_keys(const kv_u16* rows, int k, int lane, kv_u32* x) {
  kv_load_matrices(rows + kv_place_by_lane<ROW_CHUNKS>(lane / 16 * 8 + lane % 8, 2 * k, lane / 8 % 2), x);
}
template <int ROW_CHUNKS>
KV_FN void kv_load_values(const kv_u16* rows, int out, int lane, kv_u32* x) {
  kv_load_transposed(rows + kv_place_by_lane<ROW_CHUNKS>(lane % 16, out, lane / 16), x);
}

// Begin to copy a tile as it is stored, from row `first` of the page's part on; eight rows of a chunk lie in different
// banks.
template <typename Rows, int TILE, int THREADS>
KV_FN void kv_begin_stored(kv_u16* to, const kv_u16* page, int first, int worker) {
  constexpr int CODES = TILE * Rows::ROW_CHUNKS, SCALES = Rows::IS_QUANTIZED ? TILE * Rows::GROUPS / 8 : 0;
  const kv_u16* codes = page + Rows::BASE + first * Rows::ROW_UNITS;
  KV_UNROLL for (int n = 0; n < (CODES + THREADS - 1) / THREADS; ++n) {
    const int i = worker + n * THREADS;
    if (CODES % THREADS && i >= CODES) break;
    kv_copy16(to + kv_place<Rows::ROW_CHUNKS>(i / Rows::ROW_CHUNKS, i % Rows::ROW_CHUNKS), codes + i * 8, true);
  }
  KV_UNROLL for (int n = 0; n < (2 * SCALES + THREADS - 1) / THREADS; ++n) {
    const int i = worker + n * THREADS;
    const int part = i < SCALES ? Rows::SCALES + i * 8 : Rows::BIASES + (i - SCALES) * 8;
    if (i < 2 * SCALES) kv_copy16(to + KvTile<Rows, TILE>::SCALES + i * 8, page + part + first * Rows::GROUPS, true);
  }
}

// Chunk `number` of a tile: eight rows of a chunk follow each other.
template <typename Rows, int TILE>
KV_FN KvStored kv_read_stored(const kv_u16* stored, int number) {
  KvStored read;
  read.row = number / (8 * Rows::ROW_CHUNKS) * 8 + number % 8;
  read.chunk = number / 8 % Rows::ROW_CHUNKS;
  read.words = *(const kv_u32x4*)(stored + kv_place<Rows::ROW_CHUNKS>(read.row, read.chunk));
  if (Rows::IS_QUANTIZED) {
    const int group = read.row * Rows::GROUPS + read.chunk / Rows::GROUP_CHUNKS;
    read.scale = stored[KvTile<Rows, TILE>::SCALES + group];
    read.bias = stored[KvTile<Rows, TILE>::BIASES + group];
  }
  return read;
}

// What kv_split_by_tiles has of stored tiles: a place in shared memory, copies into it, and reads.
template <typename Rows, int TILE>
struct KvStore {
  KV_CONST int UNITS = KvTile<Rows, TILE>::UNITS;
};
template <typename K, typename V, int TILE, int THREADS>
KV_FN void kv_begin_tile(kv_u16* store, const kv_u16* page, int first, int worker) {
  kv_begin_stored<K, TILE, THREADS>(store, page, first, worker);
  kv_begin_stored<V, TILE, THREADS>(store + KvTile<K, TILE>::UNITS, page, first, worker);
  kv_copies_begun();
}
KV_FN void kv_tile_is_here() { kv_copies_done<0>(); }
template <typename Rows, int TILE>
KV_FN KvStored kv_read_tile(const kv_u16* store, const kv_u16*, int, int number) {
  return kv_read_stored<Rows, TILE>(store, number);
}
