// One split for many queries: the rows of a tile become 16-bit values once, for all warps of a block, each of which has
// 16 queries or 32. Scores = Q K^T, then mix = P V, by fragments as in matrices.h, whose rows are queries here. What a
// warp reads of keys and values serves all its queries: shared memory is slower than the products.

// Where chunk `even` + `odd` of a row lies that is `row` rows behind a multiple of eight: as kv_place says, with what
// depends on the lane apart from what the compiler knows.
template <int ROW_CHUNKS>
KV_FN int kv_place_by_lane(int row, int even, int odd) {
  if (ROW_CHUNKS % 8) return kv_place<ROW_CHUNKS>(row, even + odd);
  return row * ROW_CHUNKS * 8 + ((even & 7) ^ (odd ^ (row & 7))) * 8 + even / 8 * 64;
}

// The values of a tile, as kv_write_values says.
template <typename Rows, int TILE, int THREADS, bool IS_BFLOAT, bool TO_BFLOAT>
KV_FN void kv_decode_tile(kv_u16* values, const kv_u16* stored, float unit, int token, KvSeen any, int worker) {
  constexpr int CHUNKS = TILE * Rows::ROW_CHUNKS;
  KV_UNROLL for (int n = 0; n < (CHUNKS + THREADS - 1) / THREADS; ++n) {
    const int number = worker + n * THREADS;
    if (CHUNKS % THREADS && number >= CHUNKS) break;
    const KvStored read = kv_read_stored<Rows, TILE>(stored, number);
    kv_write_values<KvInRows<Rows::DIM>, Rows, IS_BFLOAT, TO_BFLOAT>(values, read, unit, token, any);
  }
}

template <typename Query, typename K, typename V, bool IS_BFLOAT, bool IS_CAPPED, int WARPS, int FRAGMENTS, int TILE>
KV_FN void kv_split_by_tiles(const Query* queries, const kv_u16* pages, long page_units, const int* block_table, int head,
                             int first_token, int split, int length, int query_count, int first_row, int row_count, float scale,
                             float soft_cap, int window, float* partial, int row_stride, int warp, int lane,
                             kv_u16* shared) {
  constexpr int THREADS = WARPS * 32, PART = FRAGMENTS > 1 ? 64 : 32, COLUMNS = PART / 8, K_STEPS = K::DIM / 16, OUT = V::DIM / 8;
  constexpr int K_ROW = K::DIM / 8, V_ROW = V::DIM / 8;  // chunks
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT;
  const int g = lane / 4, t = lane % 4, worker = warp * 32 + lane, warp_row = warp * 16 * FRAGMENTS;
  kv_u16* k_stored = shared;
  kv_u16* v_stored = k_stored + KvTile<K, TILE>::UNITS;
  kv_u16* k_values = v_stored + KvTile<V, TILE>::UNITS;
  kv_u16* v_values = k_values + TILE * K::DIM;
  kv_u16* q_values = v_values + TILE * V::DIM;
  const KvSeen any = kv_seen_by_any(length, query_count, window);
  const int stop = any.high < first_token + split ? any.high + 1 : first_token + split;
  int begin = any.low > first_token ? any.low / TILE * TILE : first_token;
  int page = block_table[begin / KV_PAGE_TOKENS];
  auto begin_tile = [&](int token) {
    const int first = head * KV_PAGE_TOKENS + token % KV_PAGE_TOKENS;
    kv_begin_stored<K, TILE, THREADS>(k_stored, pages + page * page_units, first, worker);
    kv_begin_stored<V, TILE, THREADS>(v_stored, pages + page * page_units, first, worker);
    kv_copies_begun();
  };
  begin_tile(begin);

  float factor[FRAGMENTS][2], top[FRAGMENTS][2], total[FRAGMENTS][4], mix[FRAGMENTS][OUT][4];
  int query[FRAGMENTS][2];
  KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
    KV_UNROLL for (int r = 0; r < 2; ++r) {
      const int row = warp_row + m * 16 + r * 8 + g;
      const float power = kv_put_query<KvInRows<K::DIM>, Query, K::DIM, K::BITS, K_BFLOAT>(q_values, queries + row * K::DIM, row < row_count, row, t);
      factor[m][r] = kv_factor<IS_CAPPED>(scale) * power * (K::IS_QUANTIZED ? 1 / KV_KEY_UNIT : 1.0f);
      query[m][r] = (first_row + row) % query_count;
      top[m][r] = KV_NONE;
    }
    KV_UNROLL for (int j = 0; j < 4; ++j) {
      total[m][j] = 0;
      KV_UNROLL for (int o = 0; o < OUT; ++o) mix[m][o][j] = 0;
    }
  }
  const kv_u32 one = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u, ones[2] = {one, one};  // weights times ones are their sums
  // Parts in [clear_low, clear_high] are seen by every query.
  const int clear_low = kv_seen(length, query_count, query_count - 1, window).low, clear_high = length - query_count;

  KV_ROLLED for (; begin < stop; begin += TILE) {
    if (begin + TILE < stop) page = block_table[(begin + TILE) / KV_PAGE_TOKENS];
    kv_copies_done<0>();
    kv_group_barrier();  // the tile is here, and nobody reads the values of the one before it
    kv_decode_tile<K, TILE, THREADS, IS_BFLOAT, K_BFLOAT>(k_values, k_stored, KV_KEY_UNIT, begin, any, worker);
    kv_decode_tile<V, TILE, THREADS, IS_BFLOAT, IS_BFLOAT>(v_values, v_stored, 1, begin, any, worker);
    kv_group_barrier();
    if (begin + TILE < stop) begin_tile(begin + TILE);
    if (warp_row >= row_count) continue;

    KV_ROLLED for (int part = 0; part < TILE; part += PART) {
      float score[FRAGMENTS][COLUMNS][4];
      KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m)
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) score[m][n][j] = 0;
      KV_UNROLL for (int k = 0; k < K_STEPS; ++k) {
        kv_u32 asked[FRAGMENTS][4];
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m)
          kv_load_matrices(q_values + (warp_row + m * 16) * K::DIM + kv_place_by_lane<K_ROW>(lane % 16, 2 * k, lane / 16), asked[m]);
        KV_UNROLL for (int n = 0; n < COLUMNS; n += 2) {
          kv_u32 x[4];
          kv_load_matrices(k_values + (part + n * 8) * K::DIM + kv_place_by_lane<K_ROW>(lane / 16 * 8 + lane % 8, 2 * k, lane / 8 % 2), x);
          KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
            kv_mma<K_BFLOAT>(score[m][n], asked[m], x);
            kv_mma<K_BFLOAT>(score[m][n + 1], asked[m], x + 2);
          }
        }
      }

      if (IS_CAPPED) {
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int n = 0; n < COLUMNS; ++n)
          KV_UNROLL for (int j = 0; j < 4; ++j) score[m][n][j] = kv_capped<true>(score[m][n][j] * factor[m][j / 2], soft_cap);
      }
      const bool is_clear = begin + part >= clear_low && begin + part + PART - 1 <= clear_high;
      if (!is_clear) {
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < 4; ++j) {
          const KvSeen seen = kv_seen(length, query_count, query[m][j / 2], window);
          KV_UNROLL for (int n = 0; n < COLUMNS; ++n) {
            const int token = begin + part + n * 8 + 2 * t + j % 2;
            if (token < seen.low || token > seen.high) score[m][n][j] = KV_NONE;
          }
        }
      }
      // Weights of this part, and what is kept of what was before it.
      float kept[FRAGMENTS][2];
      bool is_less = false;
      KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int r = 0; r < 2; ++r) {
        const float by = IS_CAPPED ? 1.0f : factor[m][r];
        float highest = KV_NONE;
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n)
          highest = fmaxf(highest, fmaxf(score[m][n][2 * r], score[m][n][2 * r + 1]));
        highest = fmaxf(highest, kv_shuffle_xor(highest, 1));
        highest = fmaxf(highest, kv_shuffle_xor(highest, 2));
        highest = highest > KV_NONE ? highest * by : KV_NONE;
        highest = highest > top[m][r] + KV_LEAST_RISE ? highest : top[m][r];
        const float base = highest > KV_NONE ? highest : 0;  // where nothing is seen, weights are nothing
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
          float& mine = score[m][n][2 * r + c];
          mine = kv_exp2_near(mine * by - base);
        }
        kept[m][r] = kv_exp2_near(top[m][r] - highest);
        is_less = is_less || kept[m][r] != 1;
        top[m][r] = highest;
      }
      if (kv_any(is_less)) {
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < 4; ++j) {
          total[m][j] *= kept[m][j / 2];
          KV_UNROLL for (int o = 0; o < OUT; ++o) mix[m][o][j] *= kept[m][j / 2];
        }
      }

      KV_UNROLL for (int k = 0; k < PART / 16; ++k) {
        kv_u32 weight[FRAGMENTS][4];
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int j = 0; j < 4; ++j) {
          const float* two = score[m][2 * k + j / 2] + j % 2 * 2;
          weight[m][j] = kv_two<IS_BFLOAT>(two[0], two[1]);
        }
        KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) kv_mma<IS_BFLOAT>(total[m], weight[m], ones);
        KV_UNROLL for (int o = 0; o < OUT; o += 2) {
          kv_u32 x[4];
          kv_load_transposed(v_values + (part + k * 16) * V::DIM + kv_place_by_lane<V_ROW>(lane % 16, o, lane / 16), x);
          KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) {
            kv_mma<IS_BFLOAT>(mix[m][o], weight[m], x);
            kv_mma<IS_BFLOAT>(mix[m][o + 1], weight[m], x + 2);
          }
        }
      }
    }
  }

  KV_UNROLL for (int m = 0; m < FRAGMENTS; ++m) KV_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = warp_row + m * 16 + r * 8 + g;
    if (row >= row_count) continue;
    float* mine = partial + row * row_stride;
    KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int c = 0; c < 2; ++c)
      mine[o * 8 + KvEight<V::BITS>::first(t) + c * KvEight<V::BITS>::STEP] = mix[m][o][2 * r + c];
    if (t == 0) mine[V::DIM] = top[m][r];
    if (t == 1) mine[V::DIM + 1] = total[m][2 * r];
  }
}
