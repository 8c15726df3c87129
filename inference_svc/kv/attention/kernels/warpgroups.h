// One split for many queries by Hopper's own products: a warpgroup brings tiles and makes 16-bit values of them, and each
// of the others has 64 queries. Scores = Q K^T, then mix = P V. Tiles of values lie in a ring of STAGES, so that products,
// weights and the making of values go on at the same time: while one warpgroup computes weights, another one multiplies.

// Where chunks lie in panels of 64 columns of ROWS rows, as kv_matrix says.
template <int ROWS>
struct KvInPanels {
  KV_FN static int at(int row, int chunk) { return chunk / 8 * ROWS * 64 + row * 64 + (chunk % 8 ^ row % 8) * 8; }
};

// A block's shared memory, in units.
template <typename K, typename V, int QUERIES, int TILE, int STORES, int STAGES>
struct KvStages {
  KV_CONST int PANEL = TILE * 64;
  KV_CONST int K_VALUES = (K::DIM + 63) / 64 * PANEL, V_VALUES = (V::DIM + 63) / 64 * PANEL;
  KV_CONST int VALUES = K_VALUES + V_VALUES;
  KV_CONST int Q_VALUES = STAGES * VALUES;
  KV_CONST int STORED = Q_VALUES + (K::DIM + 63) / 64 * QUERIES * 64;
  KV_CONST int STORE = KvTile<K, TILE>::UNITS + KvTile<V, TILE>::UNITS;
  KV_CONST int ONES = STORED + STORES * STORE;
  KV_CONST int BARRIERS = ONES + 16 * 8;
};

// Tiles of one block's split, and where they go.
struct KvWork {
  const kv_u16* pages;
  long page_units;
  const int* block_table;
  int head, begin, count;  // the first tile's first token, and how many tiles
  KvSeen any;
  kv_u16* shared;
  kv_u64 *full, *empty;  // barriers of each stage
};

// The warpgroup that makes values: while tiles are copied as they are stored, those before them become values.
template <typename K, typename V, bool IS_BFLOAT, int QUERIES, int TILE, int STORES, int STAGES>
KV_FN void kv_make_values(const KvWork& work, int worker) {
  using At = KvStages<K, V, QUERIES, TILE, STORES, STAGES>;
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT;
  constexpr int K_CHUNKS = TILE * K::ROW_CHUNKS, V_CHUNKS = TILE * V::ROW_CHUNKS;
  constexpr int MOST = ((K_CHUNKS > V_CHUNKS ? K_CHUNKS : V_CHUNKS) + 127) / 128;  // of a thread
  KvStored key, value;  // read before other chunks are written: each write would wait for a read just before it
  auto begin_tile = [&](int number, int store) {
    if (number < work.count) {
      const int token = work.begin + number * TILE, first = work.head * KV_PAGE_TOKENS + token % KV_PAGE_TOKENS;
      const kv_u16* page = work.pages + work.block_table[token / KV_PAGE_TOKENS] * work.page_units;
      kv_u16* to = work.shared + At::STORED + store * At::STORE;
      kv_begin_stored<K, TILE, 128>(to, page, first, worker);
      kv_begin_stored<V, TILE, 128>(to + KvTile<K, TILE>::UNITS, page, first, worker);
    }
    kv_copies_begun();
  };
  auto has = [&](int n, int chunks) { return (n + 1) * 128 <= chunks || worker + n * 128 < chunks; };
  auto read = [&](int n, int store) {
    const kv_u16* stored = work.shared + At::STORED + store * At::STORE;
    if (has(n, K_CHUNKS)) key = kv_read_stored<K, TILE>(stored, worker + n * 128);
    if (has(n, V_CHUNKS)) value = kv_read_stored<V, TILE>(stored + KvTile<K, TILE>::UNITS, worker + n * 128);
  };
  auto write = [&](int n, kv_u16* values, int token) {
    if (has(n, K_CHUNKS))
      kv_write_values<KvInPanels<TILE>, K, IS_BFLOAT, K_BFLOAT>(values, key, KV_KEY_UNIT, token, work.any);
    if (has(n, V_CHUNKS))
      kv_write_values<KvInPanels<TILE>, V, IS_BFLOAT, IS_BFLOAT>(values + At::K_VALUES, value, 1, token, work.any);
  };

  KV_UNROLL for (int number = 0; number < STORES; ++number) begin_tile(number, number);
  kv_copies_done<STORES - 1>();
  kv_threads_barrier(1, 128);
  read(0, 0);
  int store = 0, stage = 0, parity = 1;  // the first wait for a stage ends at once
  KV_ROLLED for (int number = 0; number < work.count; ++number) {
    kv_u16* values = work.shared + stage * At::VALUES;
    const int token = work.begin + number * TILE, used = store;
    kv_barrier_wait(work.empty + stage, parity);
    write(0, values, token);
    KV_UNROLL for (int n = 1; n < MOST; ++n) {
      read(n, used);
      write(n, values, token);
    }
    store = store == STORES - 1 ? 0 : store + 1;
    if (number + 1 < work.count) {  // read before this tile is handed over, which waits for what was written
      kv_copies_done<STORES - 2>();
      kv_threads_barrier(1, 128);  // the next tile is here, and nobody reads this one any more
      read(0, store);
    }
    kv_written_for_products();
    kv_barrier_arrive(work.full + stage);
    begin_tile(number + STORES, used);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A warpgroup's 64 queries from `group_row` on go over the tiles. `warp` is its warp's number in the warpgroup.
template <typename Query, typename K, typename V, bool IS_BFLOAT, int QUERIES, int TILE, int STORES, int STAGES>
KV_FN void kv_mix_values(const KvWork& work, const Query* queries, int length, int query_count, int first_row,
                         int row_count, int group_row, float scale, int window, float* partial,
                         int row_stride, int warp, int lane) {
  using At = KvStages<K, V, QUERIES, TILE, STORES, STAGES>;
  constexpr int COLUMNS = TILE / 8, K_STEPS = K::DIM / 16, OUT = V::DIM / 8;
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT;
  static_assert(TILE == 64, "scores of a tile are products of 64 columns");
  const int g = lane / 4, t = lane % 4;

  float factor[2], top[2], total[4] = {0, 0, 0, 0}, mix[V::DIM / 2], score[32];
  int query[2];
  KV_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = group_row + warp * 16 + r * 8 + g;
    const float power = kv_put_query<KvInPanels<QUERIES>, Query, K::DIM, K::BITS, K_BFLOAT>(
        work.shared + At::Q_VALUES, queries + row * K::DIM, row < row_count, row, t);
    factor[r] = scale * KV_LOG2E * power * (K::IS_QUANTIZED ? 1 / KV_KEY_UNIT : 1.0f);
    query[r] = (first_row + row) % query_count;
    top[r] = KV_NONE;
  }
  KV_UNROLL for (int i = 0; i < V::DIM / 2; ++i) mix[i] = 0;
  kv_written_for_products();
  kv_threads_barrier(2 + group_row / 64, 128);

  const kv_u64 asked = kv_matrix(work.shared + At::Q_VALUES + group_row * 64, QUERIES * 128);
  const kv_u64 keys = kv_matrix(work.shared, TILE * 128), ones = kv_small_matrix(work.shared + At::ONES);
  auto begin_scores = [&](int stage) {
    const kv_u64 mine = kv_matrix_from(keys, stage * At::VALUES * 2);
    KV_UNROLL for (int k = 0; k < K_STEPS; ++k) {
      const kv_u64 a = kv_matrix_from(asked, k / 4 * QUERIES * 128 + k % 4 * 32);
      const kv_u64 b = kv_matrix_from(mine, k / 4 * TILE * 128 + k % 4 * 32);
      if (k)
        kv_scores_begin<K_BFLOAT, true>(score, a, b);
      else
        kv_scores_begin<K_BFLOAT, false>(score, a, b);
    }
    kv_products_begun();
  };
  // Tiles in [clear_low, clear_high] are seen by every query.
  const int clear_low = kv_seen(length, query_count, query_count - 1, window).low, clear_high = length - query_count;
  int stage = 0, parity = 0;
  kv_barrier_wait(work.full, 0);
  kv_products_fence();
  begin_scores(0);
  kv_products_done<0>();
  kv_products_own(score);

  int left = work.count, token = work.begin;
  KV_ROLLED do {
    if (token < clear_low || token + TILE - 1 > clear_high) {
      KV_UNROLL for (int r = 0; r < 2; ++r) {
        const KvSeen seen = kv_seen(length, query_count, query[r], window);
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
          const int at = token + n * 8 + 2 * t + c;
          if (at < seen.low || at > seen.high) score[n * 4 + 2 * r + c] = KV_NONE;
        }
      }
    }
    // Weights of this tile, and what is kept of what was before it.
    float kept[2];
    bool is_less = false;
    KV_UNROLL for (int r = 0; r < 2; ++r) {
      float highest = KV_NONE;
      KV_UNROLL for (int n = 0; n < COLUMNS; ++n)
        highest = kv_max(highest, kv_max(score[n * 4 + 2 * r], score[n * 4 + 2 * r + 1]));
      highest = kv_row_max(highest);
      highest = highest > KV_NONE ? highest * factor[r] : KV_NONE;
      highest = highest > top[r] + KV_LEAST_RISE ? highest : top[r];
      const float base = highest > KV_NONE ? highest : 0;  // where nothing is seen, weights are nothing
      KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
        float& mine = score[n * 4 + 2 * r + c];
        mine = kv_exp2_near(mine * factor[r] - base);
      }
      kept[r] = kv_exp2_near(top[r] - highest);
      is_less = is_less || kept[r] != 1;
      top[r] = highest;
    }
    if (kv_any(is_less)) {
      KV_UNROLL for (int i = 0; i < V::DIM / 2; ++i) mix[i] *= kept[i % 4 / 2];
      KV_UNROLL for (int i = 0; i < 4; ++i) total[i] *= kept[i / 2];
    }
    kv_u32 weight[TILE / 16][4];
    KV_UNROLL for (int k = 0; k < TILE / 16; ++k) KV_UNROLL for (int j = 0; j < 4; ++j) {
      const float* two = score + (2 * k + j / 2) * 4 + j % 2 * 2;
      weight[k][j] = kv_two<IS_BFLOAT>(two[0], two[1]);
    }

    kv_products_own(mix);
    kv_products_own(total);
    KV_UNROLL for (int k = 0; k < TILE / 16; ++k) kv_products_own(weight[k]);
    kv_products_fence();
    const kv_u64 values = kv_matrix_from(keys, (stage * At::VALUES + At::K_VALUES) * 2);
    KV_UNROLL for (int k = 0; k < TILE / 16; ++k) {
      kv_mix_begin<IS_BFLOAT, V::DIM>(mix, weight[k], kv_matrix_from(values, k * 16 * 128));
      kv_mix_begin<IS_BFLOAT, 8>(total, weight[k], ones);  // weights times ones are their sums
    }
    kv_products_begun();
    const int used = stage;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
    auto release = [&] {
      kv_warp_barrier();
      if (lane == 0) kv_barrier_arrive(work.empty + used);
    };
    token += TILE;
    if (--left) {  // the next tile's scores follow at once
      kv_barrier_wait(work.full + stage, parity);
      kv_products_fence();
      begin_scores(stage);
      kv_products_done<1>();
      kv_products_own(mix);
      kv_products_own(total);
      release();
      kv_products_done<0>();
      kv_products_own(score);
    } else {
      kv_products_done<0>();
      kv_products_own(mix);
      kv_products_own(total);
      release();
    }
  } while (left);

  // The mixes go out through the place of values, which nobody reads any more: whole rows at once.
  kv_threads_barrier(2 + QUERIES / 64, (row_count + 63) / 64 * 128);
  constexpr int STRIDE = V::DIM + 4;  // eight rows lie in different banks
  float* rows = (float*)work.shared + (group_row + warp * 16) * STRIDE;
  static_assert(QUERIES * STRIDE * 2 <= At::ONES, "mixes have room");
  KV_UNROLL for (int r = 0; r < 2; ++r) {
    KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int c = 0; c < 2; ++c)
      rows[(r * 8 + g) * STRIDE + o * 8 + KvEight<V::BITS>::first(t) + c * KvEight<V::BITS>::STEP] = mix[o * 4 + 2 * r + c];
    const int row = group_row + warp * 16 + r * 8 + g;
    if (row < row_count && t == 0) partial[row * row_stride + V::DIM] = top[r];
    if (row < row_count && t == 1) partial[row * row_stride + V::DIM + 1] = total[2 * r];
  }
  kv_warp_barrier();
  const int first = group_row + warp * 16, count = row_count - first < 16 ? row_count - first : 16;
  KV_SOME_UNROLL for (int i = lane; i < count * (V::DIM / 4); i += 32) {
    const int row = i / (V::DIM / 4), four = i % (V::DIM / 4);
    *(kv_floats4*)(partial + (first + row) * row_stride + four * 4) = *(const kv_floats4*)(rows + row * STRIDE + four * 4);
  }
}

// As kv_split_by_tiles. The first warpgroup makes values, and leaves registers to those that multiply.
template <typename Query, typename K, typename V, bool IS_BFLOAT, int QUERIES, int TILE, int STORES, int STAGES>
KV_FN void kv_split_by_warpgroups(const Query* queries, const kv_u16* pages, long page_units, const int* block_table,
                                  int head, int first_token, int split, int length, int query_count, int first_row,
                                  int row_count, float scale, int window, float* partial,
                                  int row_stride, int warp, int lane, kv_u16* unaligned) {
  using At = KvStages<K, V, QUERIES, TILE, STORES, STAGES>;
  constexpr int MIX_REGISTERS = QUERIES == 192 ? 144 : 208, MAKE_REGISTERS = QUERIES == 192 ? 80 : 88;
  const KvSeen any = kv_seen_by_any(length, query_count, window);
  const int stop = any.high < first_token + split ? any.high + 1 : first_token + split;
  kv_u16* shared = unaligned + (1024 - kv_shared_address(unaligned) % 1024) % 1024 / 2;
  kv_u64* barriers = (kv_u64*)(shared + At::BARRIERS);
  KvWork work = {pages, page_units, block_table, head, 0, 0, any, shared, barriers, barriers + STAGES};
  work.begin = any.low > first_token ? any.low / TILE * TILE : first_token;
  work.count = (stop - work.begin + TILE - 1) / TILE;

  if (warp == 0 && lane < STAGES) {
    kv_barrier_init(work.full + lane, 128);
    kv_barrier_init(work.empty + lane, (row_count + 63) / 64 * 4);  // each warp that multiplies
  }
  if (warp == 1)
    KV_UNROLL for (int i = lane; i < 64; i += 32) ((kv_u32*)(shared + At::ONES))[i] = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;
  kv_written_for_products();
  kv_group_barrier();
  if (warp < 4) {
    kv_leave_registers<MAKE_REGISTERS>();
    kv_make_values<K, V, IS_BFLOAT, QUERIES, TILE, STORES, STAGES>(work, warp * 32 + lane);
  } else {
    kv_take_registers<MIX_REGISTERS>();
    const int group_row = (kv_same_in_warp(warp / 4) - 1) * 64;
    if (group_row < row_count)
      kv_mix_values<Query, K, V, IS_BFLOAT, QUERIES, TILE, STORES, STAGES>(
          work, queries, length, query_count, first_row, row_count, group_row, scale, window, partial,
          row_stride, warp % 4, lane);
  }
}
