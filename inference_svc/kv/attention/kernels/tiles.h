// One split for many queries: the rows of a tile become 16-bit values once, for all warps of a block, each of which has
// 16 queries. Scores = Q K^T, then mix = P V, by fragments as in matrices.h, whose rows are queries here.
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
  return kv_fma_two<IS_BFLOAT>((word >> 4 * j & 0x000f000fu) | large, one, large | 0x80008000u);
}

// Begin to copy a tile as it is stored, from row `first` of the page's part on.
template <typename Rows, int TILE, int THREADS>
KV_FN void kv_begin_stored(kv_u16* to, const kv_u16* page, int first, int worker) {
  constexpr int CODES = TILE * Rows::ROW_CHUNKS, SCALES = Rows::IS_QUANTIZED ? TILE * Rows::GROUPS / 8 : 0;
  KV_UNROLL for (int i = worker; i < CODES + 2 * SCALES; i += THREADS) {
    const kv_u16* from = page + Rows::BASE + first * Rows::ROW_UNITS + i * 8;
    if (i >= CODES) from = page + Rows::SCALES + first * Rows::GROUPS + (i - CODES) * 8;
    if (i >= CODES + SCALES) from = page + Rows::BIASES + first * Rows::GROUPS + (i - CODES - SCALES) * 8;
    kv_copy16(to + i * 8, from, true);
  }
}

template <bool IS_BFLOAT>
KV_FN kv_u32 kv_twice(float x) {
  return kv_u32(IS_BFLOAT ? kv_to_bfloat(x) : kv_to_half(x)) * 0x10001u;
}

// The values of a tile, times `unit`, as bfloats or halves; zeros for tokens not in [any.low, any.high], whose scales may be no numbers.
template <typename Rows, int TILE, int THREADS, bool IS_BFLOAT, bool TO_BFLOAT>
KV_FN void kv_decode_tile(kv_u16* values, const kv_u16* stored, float unit, int token, KvSeen any, int worker) {
  KV_UNROLL for (int i = worker; i < TILE * Rows::ROW_CHUNKS; i += THREADS) {
    const int row = i / Rows::ROW_CHUNKS, chunk = i % Rows::ROW_CHUNKS;
    const bool is_stored = token + row >= any.low && token + row <= any.high;
    const kv_u32x4 four = ((const kv_u32x4*)stored)[i];
    const kv_u32 words[4] = {four.x, four.y, four.z, four.w};
    if (Rows::BITS == 16) {
      const kv_u32x4 made = {is_stored ? four.x : 0, is_stored ? four.y : 0, is_stored ? four.z : 0, is_stored ? four.w : 0};
      *(kv_u32x4*)(values + kv_place<Rows::DIM / 8>(row, chunk)) = made;
      continue;
    }
    const int group = row * Rows::GROUPS + chunk / Rows::GROUP_CHUNKS;
    const kv_u16* scales = stored + KvTile<Rows, TILE>::SCALES + group;
    const kv_u16* biases = stored + KvTile<Rows, TILE>::BIASES + group;
    const kv_u32 scale = is_stored ? kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(*scales) * unit) : 0;
    const kv_u32 bias = is_stored ? kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(*biases) * unit) : 0;
    constexpr int EIGHTS = 16 / Rows::BITS, PAIRS = 16 / Rows::BITS;  // of a chunk, of a word
    KV_UNROLL for (int e = 0; e < EIGHTS; ++e) {
      kv_u32 two[4];
      KV_UNROLL for (int j = 0; j < 4; ++j)
        two[j] = kv_fma_two<TO_BFLOAT>(kv_codes<Rows::BITS, TO_BFLOAT>(words[(e * 4 + j) / PAIRS], j % PAIRS), scale, bias);
      const kv_u32x4 made = {two[0], two[1], two[2], two[3]};
      *(kv_u32x4*)(values + kv_place<Rows::DIM / 8>(row, chunk * EIGHTS + e)) = made;
    }
  }
}

template <typename Query, typename K, typename V, bool IS_BFLOAT, bool IS_CAPPED, int WARPS, int SPLIT, int TILE>
KV_FN void kv_split_by_tiles(const Query* queries, const kv_u16* pages, long page_units, const int* block_table, int head,
                             int first_token, int length, int query_count, int first_row, int row_count, float scale,
                             float soft_cap, int window, float* partial, int row_stride, int warp, int lane,
                             kv_u16* shared) {
  constexpr int THREADS = WARPS * 32, PART = 32, COLUMNS = PART / 8, K_STEPS = K::DIM / 16, OUT = V::DIM / 8;
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT;
  const int g = lane / 4, t = lane % 4, worker = warp * 32 + lane;
  kv_u16* k_stored = shared;
  kv_u16* v_stored = k_stored + KvTile<K, TILE>::UNITS;
  kv_u16* k_values = v_stored + KvTile<V, TILE>::UNITS;
  kv_u16* v_values = k_values + TILE * K::DIM;
  const KvSeen any = kv_seen_by_any(length, query_count, window);
  const int stop = any.high < first_token + SPLIT ? any.high + 1 : first_token + SPLIT;
  int begin = any.low > first_token ? any.low / TILE * TILE : first_token;
  auto begin_tile = [&](int token) {
    const kv_u16* page = pages + block_table[token / KV_PAGE_TOKENS] * page_units;
    const int first = head * KV_PAGE_TOKENS + token % KV_PAGE_TOKENS;
    kv_begin_stored<K, TILE, THREADS>(k_stored, page, first, worker);
    kv_begin_stored<V, TILE, THREADS>(v_stored, page, first, worker);
    kv_copies_begun();
  };
  begin_tile(begin);

  kv_u32 query[K_STEPS][4];
  float top[2], total[2], factor[2], mix[OUT][4];
  KvSeen seen[2];
  KV_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + g + r * 8;
    float low[2 * K_STEPS], high[2 * K_STEPS], greatest = 0;
    KV_UNROLL for (int i = 0; i < 2 * K_STEPS; ++i) {
      const Query* two = queries + row * K::DIM + i * 8 + KvEight<K::BITS>::first(t);
      low[i] = row < row_count ? float(two[0]) : 0.0f;
      high[i] = row < row_count ? float(two[KvEight<K::BITS>::STEP]) : 0.0f;
      greatest = fmaxf(greatest, fmaxf(fabsf(low[i]), fabsf(high[i])));
    }
    // Halves of the query's greatest power of two; or bfloats as they are.
    greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 1));
    greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 2));
    kv_u32 power = kv_to_bits(greatest) & 0x7f800000u;
    power = K_BFLOAT || power < 0x01000000u || power > 0x7e000000u ? 0x3f800000u : power;
    const float shrink = kv_from_bits(0x7f000000u - power);
    KV_UNROLL for (int i = 0; i < 2 * K_STEPS; ++i)
      query[i / 2][i % 2 * 2 + r] = kv_two<K_BFLOAT>(low[i] * shrink, high[i] * shrink);
    factor[r] = kv_factor<IS_CAPPED>(scale) * kv_from_bits(power) * (K::IS_QUANTIZED ? 1 / KV_KEY_UNIT : 1.0f);
    seen[r] = kv_seen(length, query_count, (first_row + row) % query_count, window);
    if (row >= row_count || seen[r].high < seen[r].low) seen[r].low = seen[r].high = -1;
    top[r] = KV_NONE;
    total[r] = 0;
  }
  KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int j = 0; j < 4; ++j) mix[o][j] = 0;
  // Parts in [clear_low, clear_high] are seen by every query.
  const int clear_low = kv_seen(length, query_count, query_count - 1, window).low, clear_high = length - query_count;

  KV_ROLLED for (; begin < stop; begin += TILE) {
    kv_copies_done<0>();
    kv_group_barrier();  // the tile is here, and nobody reads the values of the one before it
    kv_decode_tile<K, TILE, THREADS, IS_BFLOAT, K_BFLOAT>(k_values, k_stored, KV_KEY_UNIT, begin, any, worker);
    kv_decode_tile<V, TILE, THREADS, IS_BFLOAT, IS_BFLOAT>(v_values, v_stored, 1, begin, any, worker);
    kv_group_barrier();
    if (begin + TILE < stop) begin_tile(begin + TILE);
    if (warp * 16 >= row_count) continue;

    KV_ROLLED for (int part = 0; part < TILE; part += PART) {
      float score[COLUMNS][4];
      KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) score[n][j] = 0;
      KV_UNROLL for (int k = 0; k < K_STEPS; ++k) KV_UNROLL for (int n = 0; n < COLUMNS; n += 2) {
        kv_u32 x[4];
        kv_load_matrices(k_values + kv_place<K::DIM / 8>(part + n * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2), x);
        kv_mma<K_BFLOAT>(score[n], query[k], x);
        kv_mma<K_BFLOAT>(score[n + 1], query[k], x + 2);
      }

      // Weights of this part, and what is kept of what was before it.
      const bool is_clear = begin + part >= clear_low && begin + part + PART - 1 <= clear_high;
      KV_UNROLL for (int r = 0; r < 2; ++r) {
        const int low = seen[r].low, width = seen[r].high - low;
        const float by = IS_CAPPED ? 1.0f : factor[r];
        float highest = KV_NONE, sum = 0;
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
          float& mine = score[n][2 * r + c];
          if (IS_CAPPED) mine = kv_capped<true>(mine * factor[r], soft_cap);
          if (!is_clear && (unsigned)(begin + part + n * 8 + 2 * t + c - low) > (unsigned)width) mine = KV_NONE;
          highest = fmaxf(highest, mine);
        }
        highest = fmaxf(highest, kv_shuffle_xor(highest, 1));
        highest = fmaxf(highest, kv_shuffle_xor(highest, 2));
        highest = highest > KV_NONE ? fmaxf(highest * by, top[r]) : top[r];
        KV_UNROLL for (int n = 0; n < COLUMNS; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
          float& mine = score[n][2 * r + c];
          const float weight = kv_exp2_near(mine * by - highest);
          mine = is_clear || mine > KV_NONE ? weight : 0.0f;
          sum += mine;
        }
        const float kept = kv_exp2_near(top[r] - highest);
        KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int c = 0; c < 2; ++c) mix[o][2 * r + c] *= kept;
        total[r] = total[r] * kept + sum;
        top[r] = highest;
      }

      KV_UNROLL for (int k = 0; k < PART / 16; ++k) {
        const kv_u32 weight[4] = {
            kv_two<IS_BFLOAT>(score[2 * k][0], score[2 * k][1]), kv_two<IS_BFLOAT>(score[2 * k][2], score[2 * k][3]),
            kv_two<IS_BFLOAT>(score[2 * k + 1][0], score[2 * k + 1][1]),
            kv_two<IS_BFLOAT>(score[2 * k + 1][2], score[2 * k + 1][3])};
        KV_UNROLL for (int o = 0; o < OUT; o += 2) {
          kv_u32 x[4];
          kv_load_transposed(v_values + kv_place<V::DIM / 8>(part + k * 16 + lane % 16, o + lane / 16), x);
          kv_mma<IS_BFLOAT>(mix[o], weight, x);
          kv_mma<IS_BFLOAT>(mix[o + 1], weight, x + 2);
        }
      }
    }
  }

  KV_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + g + r * 8;
    total[r] += kv_shuffle_xor(total[r], 1);
    total[r] += kv_shuffle_xor(total[r], 2);
    if (row >= row_count) continue;
    float* mine = partial + row * row_stride;
    KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int c = 0; c < 2; ++c)
      mine[o * 8 + KvEight<V::BITS>::first(t) + c * KvEight<V::BITS>::STEP] = mix[o][2 * r + c];
    if (t == 0) mine[V::DIM] = top[r];
    if (t == 1) mine[V::DIM + 1] = total[r];
  }
}
