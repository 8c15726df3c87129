// One split for many queries: the rows of a tile become 16-bit values once, for all warps of a block, each of which has
// 16 queries or 32. Scores = Q K^T, then mix = P V, by fragments as in matrices.h, whose rows are queries here. What a
// warp reads of keys and values serves all its queries: shared memory is slower than the products.
//
// Keys become sixteenths, as halves: bfloats would lose bits, and halves alone could overflow. Values are of the scales'
// type. Eight values of a row lie in the order in which their codes come out of words; queries are read, and mixes are
// written, in that order. A lane t of a fragment has two of the eight.
KV_CONST float KV_KEY_UNIT = 0.0625f;

template <int BITS>
struct KvEight {
  KV_CONST int STEP = 16 / BITS;  // from the first of the two to the second
  KV_FN static int first(int t) { return BITS == 4 ? t : BITS == 8 ? t / 2 * 4 + t % 2 : 2 * t; }
};

template <bool IS_BFLOAT>
KV_FN kv_u32 kv_two(float low, float high) {
  return IS_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high);
}

// Two codes of a word, from bit j * BITS and 16 bits further on, as numbers.
template <int BITS, bool IS_BFLOAT>
KV_FN kv_u32 kv_codes(kv_u32 word, int j) {
  if (BITS == 8) return kv_two<IS_BFLOAT>(float(word >> 8 * j & 0xff), float(word >> (8 * j + 16) & 0xff));
  // The lowest bits of 128 as a bfloat, or of 1024 as a half, count ones.
  const kv_u32 one = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u, large = IS_BFLOAT ? 0x43004300u : 0x64006400u;
  return kv_fma_two<IS_BFLOAT>(kv_masked_or(word >> 4 * j, 0x000f000fu, large), one, large | 0x80008000u);
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

template <bool IS_BFLOAT>
KV_FN kv_u32 kv_twice(float x) {
  return kv_u32(IS_BFLOAT ? kv_to_bfloat(x) : kv_to_half(x)) * 0x10001u;
}

// The values of a tile, times `unit`, as bfloats or halves; zeros for tokens not in [any.low, any.high], whose scales
// may be no numbers.
template <typename Rows, int TILE, int THREADS, bool IS_BFLOAT, bool TO_BFLOAT>
KV_FN void kv_decode_tile(kv_u16* values, const kv_u16* stored, float unit, int token, KvSeen any, int worker) {
  constexpr int CHUNKS = TILE * Rows::ROW_CHUNKS;
  KV_UNROLL for (int n = 0; n < (CHUNKS + THREADS - 1) / THREADS; ++n) {
    const int i = worker + n * THREADS;
    if (CHUNKS % THREADS && i >= CHUNKS) break;
    const int row = i / (8 * Rows::ROW_CHUNKS) * 8 + i % 8, chunk = i / 8 % Rows::ROW_CHUNKS;
    const bool is_stored = token + row >= any.low && token + row <= any.high;
    const kv_u32x4 four = *(const kv_u32x4*)(stored + kv_place<Rows::ROW_CHUNKS>(row, chunk));
    const kv_u32 words[4] = {four.x, four.y, four.z, four.w};
    if (Rows::BITS == 16) {
      const kv_u32x4 made = {is_stored ? four.x : 0, is_stored ? four.y : 0, is_stored ? four.z : 0, is_stored ? four.w : 0};
      *(kv_u32x4*)(values + kv_place<Rows::DIM / 8>(row, chunk)) = made;
      continue;
    }
    const int group = row * Rows::GROUPS + chunk / Rows::GROUP_CHUNKS;
    const kv_u16* scales = stored + KvTile<Rows, TILE>::SCALES + group;
    const kv_u16* biases = stored + KvTile<Rows, TILE>::BIASES + group;
    const kv_u32 kept = is_stored ? 0xffffffffu : 0;  // without a branch, which would keep this from what is around it
    const kv_u32 scale = kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(*scales) * unit) & kept;
    const kv_u32 bias = kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(*biases) * unit) & kept;
    constexpr int PER_WORD = 16 / Rows::BITS;  // pairs of a word, and eights of a chunk
    KV_UNROLL for (int e = 0; e < PER_WORD; ++e) {
      kv_u32 two[4];
      KV_UNROLL for (int j = 0; j < 4; ++j)
        two[j] = kv_fma_two<TO_BFLOAT>(kv_codes<Rows::BITS, TO_BFLOAT>(words[(e * 4 + j) / PER_WORD], j % PER_WORD), scale, bias);
      const kv_u32x4 made = {two[0], two[1], two[2], two[3]};
      *(kv_u32x4*)(values + kv_place<Rows::DIM / 8>(row, chunk * PER_WORD + e)) = made;
    }
  }
}

// Where chunk `even` + `odd` of a row lies that is `row` rows behind a multiple of eight: as kv_place says, with what
// depends on the lane apart from what the compiler knows.
template <int ROW_CHUNKS>
KV_FN int kv_place_by_lane(int row, int even, int odd) {
  if (ROW_CHUNKS % 8) return kv_place<ROW_CHUNKS>(row, even + odd);
  return row * ROW_CHUNKS * 8 + ((even & 7) ^ (odd ^ (row & 7))) * 8 + even / 8 * 64;
}

// Eight values of a query, which are read at once.
template <typename Query>
struct alignas(16) KvEightQueries {
  Query value[8];
};

// A query as the products take it, each row as halves of its greatest power of two, which is returned; or bfloats as they
// are. Four lanes have a row. A row that is next to nothing stays so: what is not seen must stay far below its scores.
template <typename Query, int DIM, int BITS, bool TO_BFLOAT>
KV_FN float kv_put_query(kv_u16* rows, const Query* query, bool is_there, int row, int t) {
  constexpr int MINE = (DIM / 8 + 3) / 4;
  float values[MINE][8], greatest = 0;
  KV_UNROLL for (int n = 0; n < MINE; ++n) {
    const int chunk = n * 4 + t;
    KvEightQueries<Query> eight = {};
    if (is_there && chunk < DIM / 8) eight = *(const KvEightQueries<Query>*)(query + chunk * 8);
    KV_UNROLL for (int i = 0; i < 8; ++i) {
      values[n][i] = float(eight.value[i]);
      greatest = fmaxf(greatest, fabsf(values[n][i]));
    }
  }
  greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 1));
  greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 2));
  kv_u32 power = kv_to_bits(greatest) & 0x7f800000u;
  power = TO_BFLOAT || power < 0x20000000u || power > 0x7e000000u ? 0x3f800000u : power;
  const float shrink = kv_from_bits(0x7f000000u - power);
  KV_UNROLL for (int n = 0; n < MINE; ++n) {
    const int chunk = n * 4 + t;
    kv_u32 two[4];
    KV_UNROLL for (int j = 0; j < 4; ++j) {
      const int first = KvEight<BITS>::first(j);
      two[j] = kv_two<TO_BFLOAT>(values[n][first] * shrink, values[n][first + KvEight<BITS>::STEP] * shrink);
    }
    const kv_u32x4 made = {two[0], two[1], two[2], two[3]};
    if (chunk < DIM / 8) *(kv_u32x4*)(rows + kv_place<DIM / 8>(row, chunk)) = made;
  }
  return kv_from_bits(power);
}

// A row's top is raised only by so much: until then weights are up to 2 to this power. Sums seldom shrink then.
KV_CONST float KV_LEAST_RISE = 6;

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
      const float power = kv_put_query<Query, K::DIM, K::BITS, K_BFLOAT>(q_values, queries + row * K::DIM, row < row_count, row, t);
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
