// One split for many queries: the rows of a tile become 16-bit values once, for all warps of a block, each of which has
// one fragment of queries or two. Scores = Q K^T, then mix = P V, by fragments whose rows are queries: a lane (g, t) has
// columns 2t and 2t + 1 of row g, and of row g + 8 where a fragment has 16 rows. What a warp reads of keys and values
// serves all its queries: shared memory is slower than the products.

// The values of a tile, as kv_write_values says.
template <typename Rows, int TILE, int THREADS, bool IS_BFLOAT, bool TO_BFLOAT>
KV_FN void kv_decode_tile(KV_SHARED kv_u16* values, KV_SHARED const kv_u16* store, KV_GLOBAL const kv_u16* page, int first,
                          float unit, int token, KvSeen any, int worker) {
  constexpr int CHUNKS = TILE * Rows::ROW_CHUNKS;
  KV_UNROLL for (int n = 0; n < (CHUNKS + THREADS - 1) / THREADS; ++n) {
    const int number = worker + n * THREADS;
    if (CHUNKS % THREADS && number >= CHUNKS) break;
    const KvStored read = kv_read_tile<Rows, TILE>(store, page, first, number);
    kv_write_values<KvInRows<Rows::DIM>, Rows, IS_BFLOAT, TO_BFLOAT>(values, read, unit, token, any);
  }
}

template <typename Query, typename K, typename V, bool IS_BFLOAT, int WARPS, int FRAGMENTS, int TILE, typename Table>
KV_FN void kv_split_by_tiles(KV_GLOBAL const Query* queries, KV_GLOBAL const kv_u16* pages, long page_units, Table block_table,
                             int head, int first_token, int split, int length, int query_count, int first_row, int row_count,
                             float scale, int window, KV_GLOBAL float* partial, int row_stride, int warp,
                             int lane, KV_SHARED kv_u16* shared) {
  constexpr int THREADS = WARPS * 32, MOST = FRAGMENTS > 1 ? 64 : 32, PART = TILE < MOST ? TILE : MOST;
  constexpr int COLUMNS = PART / 8, K_STEPS = K::DIM / 16, OUT = V::DIM / 8, MINE = 2 * KV_EIGHTS;  // values of a lane
  constexpr int K_ROW = K::DIM / 8, V_ROW = V::DIM / 8;  // chunks
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT;
  const int g = kv_row_of(lane), t = kv_pair_of(lane), worker = warp * 32 + lane, warp_row = warp * 8 * KV_EIGHTS * FRAGMENTS;
  KV_SHARED kv_u16* k_store = shared;
  KV_SHARED kv_u16* v_store = k_store + KvStore<K, TILE>::UNITS;
  KV_SHARED kv_u16* k_values = v_store + KvStore<V, TILE>::UNITS;
  KV_SHARED kv_u16* v_values = k_values + TILE * K::DIM;
  KV_SHARED kv_u16* q_values = v_values + TILE * V::DIM;
  const KvSeen any = kv_seen_by_any(length, query_count, window);
  const int stop = any.high < first_token + split ? any.high + 1 : first_token + split;
  int begin = any.low > first_token ? any.low / TILE * TILE : first_token;
  const int first_of_head = head * KV_PAGE_TOKENS;
  KV_GLOBAL const kv_u16* page = pages + block_table[begin / KV_PAGE_TOKENS] * page_units;
  kv_begin_tile<K, V, TILE, THREADS>(k_store, page, first_of_head + begin % KV_PAGE_TOKENS, worker);

  float factor[FRAGMENTS][KV_EIGHTS], top[FRAGMENTS][KV_EIGHTS], total[FRAGMENTS][MINE], mix[FRAGMENTS][OUT][MINE];
  int query[FRAGMENTS][KV_EIGHTS];
  KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
    KV_UNROLL for (int r = 0; r < KV_EIGHTS; ++r) {
      const int row = warp_row + (m * KV_EIGHTS + r) * 8 + g;
      const float power = kv_put_query<KvInRows<K::DIM>, Query, K::DIM, K::BITS, K_BFLOAT>(q_values, queries + row * K::DIM, row < row_count, row, t);
      factor[m][r] = scale * KV_LOG2E * power * (K::IS_QUANTIZED ? 1 / KV_KEY_UNIT : 1.0f);
      query[m][r] = (first_row + row) % query_count;
      top[m][r] = KV_NONE;
    }
    KV_UNROLL for (int j = 0; j < MINE; ++j) {
      total[m][j] = 0;
      KV_UNROLL for (int o = 0; o < OUT; ++o) mix[m][o][j] = 0;
    }
  }
  const kv_u32 one = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u, ones[2] = {one, one};  // weights times ones are their sums
  // Parts in [clear_low, clear_high] are seen by every query.
  const int clear_low = kv_seen(length, query_count, query_count - 1, window).low, clear_high = length - query_count;

  KV_ROLLED for (; begin < stop; begin += TILE) {
    const int next = begin + TILE, first = first_of_head + begin % KV_PAGE_TOKENS;
    KV_GLOBAL const kv_u16* next_page = next < stop ? pages + block_table[next / KV_PAGE_TOKENS] * page_units : page;
    kv_tile_is_here();
    kv_group_barrier();  // the tile is here, and nobody reads the values of the one before it
    kv_decode_tile<K, TILE, THREADS, IS_BFLOAT, K_BFLOAT>(k_values, k_store, page, first, KV_KEY_UNIT, begin, any, worker);
    kv_decode_tile<V, TILE, THREADS, IS_BFLOAT, IS_BFLOAT>(v_values, v_store, page, first, 1, begin, any, worker);
    kv_group_barrier();
    page = next_page;
    if (next < stop) kv_begin_tile<K, V, TILE, THREADS>(k_store, page, first_of_head + next % KV_PAGE_TOKENS, worker);
    if (warp_row >= row_count) continue;

    KV_ROLLED for (int part = 0; part < TILE; part += PART) {
      float score[FRAGMENTS][COLUMNS][MINE];
      KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m)
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int j = 0; j < MINE; ++j) score[m][n][j] = 0;
      KV_UNROLL for (int k = 0; k < K_STEPS; ++k) {
        kv_u32 asked[FRAGMENTS][MINE];
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m)
          kv_load_queries<K_ROW>(q_values + (warp_row + m * 8 * KV_EIGHTS) * K::DIM, k, lane, asked[m]);
        KV_UNROLL for (int n = 0; n < COLUMNS; n += 2) {
          kv_u32 x[4];
          kv_load_keys<K_ROW>(k_values + (part + n * 8) * K::DIM, k, lane, x);
          KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
            kv_mma<K_BFLOAT>(score[m][n], asked[m], x);
            kv_mma<K_BFLOAT>(score[m][n + 1], asked[m], x + 2);
          }
        }
      }

      const bool is_clear = begin + part >= clear_low && begin + part + PART - 1 <= clear_high;
      if (!is_clear) {
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < MINE; ++j) {
          const KvSeen seen = kv_seen(length, query_count, query[m][j / 2], window);
          KV_UNROLL for (int n = 0; n < COLUMNS; ++n) {
            const int token = begin + part + n * 8 + 2 * t + j % 2;
            if (token < seen.low || token > seen.high) score[m][n][j] = KV_NONE;
          }
        }
      }
      // Weights of this part, and what is kept of what was before it.
      float kept[FRAGMENTS][KV_EIGHTS];
      bool is_less = false;
      KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int r = 0; r < KV_EIGHTS; ++r) {
        float highest = KV_NONE;
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n)
          highest = kv_max(highest, kv_max(score[m][n][2 * r], score[m][n][2 * r + 1]));
        highest = kv_row_max(highest);
        highest = highest > KV_NONE ? highest * factor[m][r] : KV_NONE;
        highest = highest > top[m][r] + KV_LEAST_RISE ? highest : top[m][r];
        const float base = highest > KV_NONE ? highest : 0;  // where nothing is seen, weights are nothing
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
          KV_THREAD float& mine = score[m][n][2 * r + c];
          mine = kv_exp2_near(mine * factor[m][r] - base);
        }
        kept[m][r] = kv_exp2_near(top[m][r] - highest);
        is_less = is_less || kept[m][r] != 1;
        top[m][r] = highest;
      }
      if (kv_any(is_less)) {
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < MINE; ++j) {
          total[m][j] *= kept[m][j / 2];
          KV_UNROLL for (int o = 0; o < OUT; ++o) mix[m][o][j] *= kept[m][j / 2];
        }
      }

      KV_UNROLL for (int k = 0; k < PART / 16; ++k) {
        kv_u32 weight[FRAGMENTS][MINE];
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < MINE; ++j) {
          KV_THREAD const float* two = score[m][2 * k + j / KV_EIGHTS] + j % KV_EIGHTS * 2;
          weight[m][j] = kv_two<IS_BFLOAT>(two[0], two[1]);
        }
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) kv_mma<IS_BFLOAT>(total[m], weight[m], ones);
        KV_UNROLL for (int o = 0; o < OUT; o += 2) {
          kv_u32 x[4];
          kv_load_values<V_ROW>(v_values + (part + k * 16) * V::DIM, o, lane, x);
          KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
            kv_mma<IS_BFLOAT>(mix[m][o], weight[m], x);
            kv_mma<IS_BFLOAT>(mix[m][o + 1], weight[m], x + 2);
          }
        }
      }
    }
  }

  KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int r = 0; r < KV_EIGHTS; ++r) {
    const int row = warp_row + (m * KV_EIGHTS + r) * 8 + g;
    if (row >= row_count) continue;
    KV_GLOBAL float* mine = partial + row * row_stride;
    KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int c = 0; c < 2; ++c)
      mine[o * 8 + KvEight<V::BITS>::first(t) + c * KvEight<V::BITS>::STEP] = mix[m][o][2 * r + c];
    if (t == 0) mine[V::DIM] = top[m][r];
    if (t == 1) mine[V::DIM + 1] = total[m][2 * r];
  }
}
