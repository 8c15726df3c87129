// One split by products of matrix fragments: scores^T = K Q^T, then mix^T = V^T P^T, 16 x 16 times 16 x 8.
//
// Codes are never turned into numbers: the bits of a code, as a half, are the code times 2^-24 (and one shifted by four
// bits is 2^-20: its other factor, 16, is taken from the query or from the result). Scales and biases join per group:
// q (s c + b) = s (q c) + b sum(q), and sum(p (s c + b)) = sum((p s) c) + sum(p b).
//
// A fragment's lane is (g, t) = (lane / 4, lane % 4). In c[16, 8], it holds rows g and g + 8 of columns 2t and 2t + 1;
// in a[16, 16], those rows of columns 2t, 2t + 1, 2t + 8, 2t + 9; in b[16, 8], column g of those rows. Rows are tokens
// (then dimensions), columns are queries. Which dimension is which k is free, as long as both sides agree.
// Of four queries or fewer, the other four columns are the same queries again, and keep what the second 16 of 32 tokens
// give: a lane has half as many scores, all of them of use.

KV_CONST float KV_CODE = 16777216.0f;   // 2^24: what a code's bits are worth less as a half
KV_CONST float KV_WEIGHT = 16384.0f;    // 2^14: what weights are multiplied by, so that small ones stay normal halves

// Begin to copy a tile's rows from row `first` of the page's part on. Of a tile at a border (IS_WHOLE is false), rows of
// tokens not in [low, high] become zeros; their scales, which kv_clear_scales removes, may come along.
template <typename Rows, int TILE, bool IS_WHOLE>
KV_FN void kv_begin_tile(kv_u16* to, const kv_u16* page, int first, int token, KvSeen any, int lane) {
  const kv_u16* const from = page + Rows::BASE + first * Rows::ROW_UNITS + lane * 8;
  constexpr int CHUNKS_OF_ROW = Rows::ROW_CHUNKS;
  constexpr bool REPEATS = 32 % (8 * CHUNKS_OF_ROW) == 0;  // places of whole eights of rows
  const int first_place = kv_place<CHUNKS_OF_ROW>(lane / CHUNKS_OF_ROW, lane % CHUNKS_OF_ROW);
  KV_UNROLL for (int i = 0; i < TILE * CHUNKS_OF_ROW / 32; ++i) {
    const int row = (i * 32 + lane) / CHUNKS_OF_ROW, chunk = (i * 32 + lane) % CHUNKS_OF_ROW;
    const bool is_stored = IS_WHOLE || (token + row >= any.low && token + row <= any.high);
    kv_copy16(to + (REPEATS ? first_place + i * 256 : kv_place<CHUNKS_OF_ROW>(row, chunk)), from + i * 256, is_stored);
  }
  if (Rows::IS_QUANTIZED) {
    constexpr int CHUNKS = TILE * Rows::GROUPS / 8;
    KV_UNROLL for (int i = lane; i < 2 * CHUNKS; i += 32) {
      const kv_u16* part = page + (i < CHUNKS ? Rows::SCALES : Rows::BIASES) + first * Rows::GROUPS;
      kv_copy16(to + KvTile<Rows, TILE>::SCALES + i * 8, part + i % CHUNKS * 8, true);
    }
  }
}

// As one group of copies, which is empty where the tile is not live.
template <typename Rows, int TILE>
KV_FN void kv_begin_live(kv_u16* to, const kv_u16* page, int head, int token, KvSeen any, bool is_live, int lane) {
  const int first = head * KV_PAGE_TOKENS + token % KV_PAGE_TOKENS;
  const bool is_whole = token >= any.low && token + TILE - 1 <= any.high;
  if (is_live && is_whole) kv_begin_tile<Rows, TILE, true>(to, page, first, token, any, lane);
  if (is_live && !is_whole) kv_begin_tile<Rows, TILE, false>(to, page, first, token, any, lane);
  kv_copies_begun();
}

// Pages that a split of more than one goes through: where page 0 lies, units of a page, and the split's numbers of pages.
struct KvPages {
  const kv_u16* first;
  long units;
  const int* numbers;
  int count;
};

// Scales and biases of rows that are not stored become zeros: they may be no numbers.
template <typename Rows, int TILE>
KV_FN void kv_clear_scales(kv_u16* tile, int token, KvSeen any, int lane) {
  if (!Rows::IS_QUANTIZED || (token >= any.low && token + TILE - 1 <= any.high)) return;
  for (int row = lane; row < TILE; row += 32) {
    if (token + row >= any.low && token + row <= any.high) continue;
    KV_UNROLL for (int i = 0; i < Rows::GROUPS; ++i) {
      tile[KvTile<Rows, TILE>::SCALES + row * Rows::GROUPS + i] = 0;
      tile[KvTile<Rows, TILE>::BIASES + row * Rows::GROUPS + i] = 0;
    }
  }
  kv_warp_barrier();
}

// The scales or biases of all groups of a row.
template <typename Rows, bool IS_BFLOAT>
KV_FN void kv_row_scales(const kv_u16* part, int row, float* found) {
  if (Rows::GROUPS % 2) {
    KV_UNROLL for (int i = 0; i < Rows::GROUPS; ++i) found[i] = kv_scale<IS_BFLOAT>(part[row * Rows::GROUPS + i]);
  } else {
    KV_UNROLL for (int i = 0; i < Rows::GROUPS / 2; ++i) {
      const kv_u32 two = ((const kv_u32*)part)[row * (Rows::GROUPS / 2) + i];
      found[2 * i] = kv_scale<IS_BFLOAT>(kv_u16(two));
      found[2 * i + 1] = IS_BFLOAT ? kv_from_bits(two & 0xffff0000u) : kv_scale<IS_BFLOAT>(kv_u16(two >> 16));
    }
  }
}

// A block's queries in shared memory: of each lane the words of its fragments, then a factor and sums per query.
template <typename K, int TILES>
struct KvQueries {
  // Words of a lane: whole 16 bytes, and some more, so that lanes read from different banks.
  KV_CONST int STRIDE = (K::DIM / 8 + 3) / 4 * 4 + 4;
  KV_CONST int FACTORS = TILES * 32 * STRIDE;
  KV_CONST int SUMS = FACTORS + TILES * 8;
  KV_CONST int WORDS = (SUMS + TILES * 8 * K::GROUPS + 3) / 4 * 4;
};

// A lane's values of a query.
template <int DIM, typename Query>
KV_FN void kv_query_values(const Query* query, float* values, int lane) {
  KV_UNROLL for (int i = 0; i < (DIM + 31) / 32; ++i)
    values[i] = i * 32 + lane < DIM ? float(query[i * 32 + lane]) : 0.0f;
}

// Write one query: halves of its greatest power of two, which is given back in its factor; or bfloats as they are.
template <typename K, int TILES, bool TO_BFLOAT, typename Query>
KV_FN void kv_write_query(Query query, int row, float scale, kv_u32* words, int lane) {
  using Q = KvQueries<K, TILES>;
  constexpr int EACH = (K::DIM + 31) / 32;
  float values[EACH], greatest = 0;
  kv_query_values<K::DIM>(query, values, lane);
  KV_UNROLL for (int i = 0; i < EACH; ++i) greatest = fmaxf(greatest, fabsf(values[i]));
  kv_u32 power = kv_to_bits(kv_warp_max(greatest)) & 0x7f800000u;
  power = TO_BFLOAT || power < 0x01000000u || power > 0x7e000000u ? 0x3f800000u : power;
  const float shrink = kv_from_bits(0x7f000000u - power);
  KV_UNROLL for (int i = 0; i < EACH; ++i) {
    const int dim = i * 32 + lane;
    if (!TO_BFLOAT) values[i] = kv_from_half(kv_to_half(values[i] * shrink));
    constexpr int RUN = K::BITS == 16 ? 2 : 32 / K::BITS;  // neighbours that a lane has of a chunk
    const int chunk = dim / (4 * RUN), t = dim / RUN % 4, j = dim % RUN;
    int word, side;
    float value = values[i];
    if (K::BITS == 4) {
      word = chunk * 4 + j % 4;
      side = j / 4;
      value *= j % 2 ? 0.0625f : 1.0f;
    } else if (K::BITS == 8) {
      word = chunk * 2 + j % 2;
      side = j / 2;
    } else {
      word = chunk;
      side = j;
    }
    if (dim < K::DIM)
      ((kv_u16*)words)[((row / 8 * 32 + row % 8 * 4 + t) * Q::STRIDE + word) * 2 + side] =
          TO_BFLOAT ? kv_to_bfloat(value) : kv_to_half(value);
  }
  float* floats = (float*)words;
  if (lane == 0) floats[Q::FACTORS + row] = scale * kv_from_bits(power) * (K::IS_QUANTIZED ? KV_CODE : 1.0f);
  if (!K::IS_QUANTIZED) return;
  KV_UNROLL for (int i = 0; i < K::GROUPS; ++i) {
    float sum = 0;
    KV_UNROLL for (int j = 0; j < K::GROUP / 32; ++j) sum += values[i * (K::GROUP / 32) + j];
    sum = kv_warp_sum(sum);
    if (lane == 0) floats[Q::SUMS + row * K::GROUPS + i] = sum * (1 / KV_CODE);
  }
}

struct KvNothing {
  KV_FN void operator()() const {}
};

// `queries`: where they lie, or what gives them (attend.h). Where it GOES_ON, a warp mixes the same places of more pages.
// `meanwhile` is done while the first tiles come, or before them where they come late.
template <typename Query, typename K, typename V, bool IS_BFLOAT, int QUERIES, int WARPS, int SPAN, int TILE, bool GOES_ON = false, typename Queries, typename Meanwhile = KvNothing>
KV_FN void kv_split_by_matrices(Queries queries, const kv_u16* page, int head, int first_token, int length,
                                int query_count, int first_row, int row_count, float scale, int window,
                                float* partial, int row_stride, int warp, int lane, float* shared, KvPages more = {}, Meanwhile meanwhile = {}, bool is_late = false) {
  constexpr int IN_PAGE = SPAN / TILE;
  constexpr bool IS_LONG = GOES_ON || IN_PAGE > 1;
  constexpr bool IS_FEW = QUERIES <= 4;
  constexpr int TILES = (QUERIES + 7) / 8, COLUMNS = 8 * TILES, EACH = IS_FEW ? 1 : 2, SCORES = TILE / 32 * EACH;
  constexpr int K_STEPS = K::DIM / 16, OUT = V::DIM / 16;
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT, V_BFLOAT = !V::IS_QUANTIZED && IS_BFLOAT;
  constexpr int K_UNITS = KvTile<K, TILE>::UNITS, WARP_UNITS = K_UNITS + KvTile<V, TILE>::UNITS;
  const int g = lane / 4, t = lane % 4;
  auto column_of = [&](int n, int c) { return IS_FEW ? (2 * t + c) % 4 : n * 8 + 2 * t + c; };
  auto line_of = [&](int i) { return IS_FEW ? i / 2 * 32 + t / 2 * 16 + i % 2 * 8 + g : i * 8 + g; };  // of a tile, score i's
  using Q = KvQueries<K, TILES>;
  kv_u32* query_words = (kv_u32*)shared;
  kv_u16* const tiles = (kv_u16*)(shared + Q::WORDS) + warp * WARP_UNITS;
  const KvSeen any = kv_seen_by_any(length, query_count, window);

  float top[TILES][2], total[TILES][2], factor[TILES][2], mix[OUT][TILES][4], bias_mix[V::GROUPS][TILES][2];
  float largest[V::GROUPS], query_sum[K::GROUPS][TILES][2];
  KvSeen seen[TILES][2];
  kv_u32 query[K_STEPS][TILES][2];
  KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
    top[n][c] = KV_NONE;
    total[n][c] = 0;
    KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) bias_mix[i][n][c] = 0;
    KV_UNROLL for (int i = 0; i < OUT; ++i) mix[i][n][c] = mix[i][n][c + 2] = 0;
  }
  KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) largest[i] = 0;

  const int steps = GOES_ON ? more.count * IN_PAGE : IN_PAGE;
  const kv_u32 number = GOES_ON && lane < more.count ? more.numbers[lane] : 0;
  auto token_of = [&](int step) { return first_token + step / IN_PAGE * KV_PAGE_TOKENS + step % IN_PAGE * TILE; };
  auto is_live = [&](int step) { return step < steps && token_of(step) <= any.high && token_of(step) + TILE > any.low; };
  auto begin = [&](int part) {  // a step's keys, and then its values
    const int step = part / 2, token = token_of(step);
    const kv_u16* from = page;
    if (GOES_ON) from = more.first + long(kv_to_bits(kv_shuffle(kv_from_bits(number), step / IN_PAGE % 32))) * more.units;
    kv_u16* const to = tiles + part % 2 * K_UNITS;
    if (part % 2)
      kv_begin_live<V, TILE>(to, from, head, token, any, is_live(step), lane);
    else
      kv_begin_live<K, TILE>(to, from, head, token, any, is_live(step), lane);
  };
  KV_ROLLED for (int turn = 0; turn < 2; ++turn) {
    if (turn == int(is_late)) {
      KV_UNROLL for (int part = 0; part < 2; ++part) begin(part);
    } else {
      meanwhile();
    }
  }

  // The queries become fragments while the first tile comes.
  KV_ROLLED for (int row = warp; row < row_count; row += WARPS)
    kv_write_query<K, TILES, K_BFLOAT>(queries + row * K::DIM, row, scale * KV_LOG2E, query_words, lane);
  kv_group_barrier();
  KV_UNROLL for (int n = 0; n < TILES; ++n) {
    const kv_u32* words = query_words + (n * 32 + (IS_FEW ? lane % 16 : lane)) * Q::STRIDE;
    const kv_u32x4* mine = (const kv_u32x4*)words;
    KV_UNROLL for (int i = 0; i < K_STEPS / 2; ++i) {
      const kv_u32x4 four = mine[i];
      query[2 * i][n][0] = four.x;
      query[2 * i][n][1] = four.y;
      query[2 * i + 1][n][0] = four.z;
      query[2 * i + 1][n][1] = four.w;
    }
    if (K_STEPS % 2) {
      query[K_STEPS - 1][n][0] = words[2 * K_STEPS - 2];
      query[K_STEPS - 1][n][1] = words[2 * K_STEPS - 1];
    }
    KV_UNROLL for (int c = 0; c < 2; ++c) {
      const int column = column_of(n, c);
      factor[n][c] = shared[Q::FACTORS + column];
      KV_UNROLL for (int i = 0; i < K::GROUPS; ++i) query_sum[i][n][c] = shared[Q::SUMS + column * K::GROUPS + i];
      seen[n][c] = kv_seen(length, query_count, (first_row + column) % query_count, window);
      if (seen[n][c].high < seen[n][c].low) seen[n][c].low = seen[n][c].high = -1;
    }
  }
  // Tiles in [clear_low, clear_high] are seen by every query.
  const int clear_low = kv_seen(length, query_count, query_count - 1, window).low, clear_high = length - query_count;

  KV_ROLLED for (int step = 0; step < steps; ++step) {
    const int now = token_of(step);
    kv_u16 *const k_tile = tiles, *const v_tile = tiles + K_UNITS;
    auto begin_next = [&](int part) {
      if (!IS_LONG) return;
      kv_warp_barrier();
      begin(part + 2);
    };
    if (!is_live(step)) {
      begin_next(2 * step);
    } else {
      kv_copies_done<1>();
      kv_clear_scales<K, TILE>(k_tile, now, any, lane);
      float score[SCORES][TILES][4];
      KV_UNROLL for (int pair = 0; pair < TILE / 32; ++pair) {
        float row_scale[2 * EACH][K::GROUPS], row_bias[2 * EACH][K::GROUPS];
        if (K::IS_QUANTIZED) {
          KV_UNROLL for (int r = 0; r < 2 * EACH; ++r) {
            kv_row_scales<K, IS_BFLOAT>(k_tile + KvTile<K, TILE>::SCALES, line_of(pair * 2 * EACH + r), row_scale[r]);
            kv_row_scales<K, IS_BFLOAT>(k_tile + KvTile<K, TILE>::BIASES, line_of(pair * 2 * EACH + r), row_bias[r]);
          }
        }
        KV_UNROLL for (int h = 0; h < EACH; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
          KV_UNROLL for (int j = 0; j < 4; ++j) score[pair * EACH + h][n][j] = 0;
        KV_UNROLL for (int i = 0; i < K::GROUPS; ++i) {
          float sum[2][TILES][4];
          KV_UNROLL for (int h = 0; h < 2; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
            KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
          KV_UNROLL for (int c = 0; c < K::GROUP_CHUNKS; ++c) {
            const int chunk = i * K::GROUP_CHUNKS + c;
            kv_u32 x[4], more[4];
            if (K::BITS == 16 && c % 2) continue;
            kv_load_matrices(k_tile + kv_place<K::ROW_CHUNKS>(pair * 32 + lane, chunk), x);
            if (K::BITS == 16) kv_load_matrices(k_tile + kv_place<K::ROW_CHUNKS>(pair * 32 + lane, chunk + 1), more);
            KV_UNROLL for (int h = 0; h < 2; ++h) {
              const kv_u32 low = x[2 * h], high = x[2 * h + 1];
              if (K::BITS == 4) {
                const kv_u32 first[4] = {low & 0x000f000f, high & 0x000f000f, low & 0x00f000f0, high & 0x00f000f0};
                const kv_u32 second[4] = {low >> 8 & 0x000f000f, high >> 8 & 0x000f000f, low >> 8 & 0x00f000f0,
                                          high >> 8 & 0x00f000f0};
                KV_UNROLL for (int n = 0; n < TILES; ++n) {
                  kv_mma<false>(sum[h][n], first, query[chunk * 2][n]);
                  kv_mma<false>(sum[h][n], second, query[chunk * 2 + 1][n]);
                }
              } else if (K::BITS == 8) {
                const kv_u32 a[4] = {low & 0x00ff00ff, high & 0x00ff00ff, low >> 8 & 0x00ff00ff, high >> 8 & 0x00ff00ff};
                KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<false>(sum[h][n], a, query[chunk][n]);
              } else {
                const kv_u32 a[4] = {low, high, more[2 * h], more[2 * h + 1]};
                KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<K_BFLOAT>(sum[h][n], a, query[chunk / 2][n]);
              }
            }
          }
          KV_UNROLL for (int h = 0; h < EACH; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
            KV_UNROLL for (int j = 0; j < 4; ++j) {
              float& mine = score[pair * EACH + h][n][j];
              const float found = IS_FEW && t >= 2 ? sum[1][n][j] : sum[h][n][j];
              mine = K::IS_QUANTIZED ? mine + (row_scale[2 * h + j / 2][i] * found +
                                               row_bias[2 * h + j / 2][i] * query_sum[i][n][j % 2])
                                     : found;
            }
        }
      }

      begin_next(2 * step);  // the next ones come while this tile's values are mixed

      // Weights of this tile, and what is kept of the tiles before it.
      const bool is_clear = now >= clear_low && now + TILE - 1 <= clear_high;
      KV_UNROLL for (int n = 0; n < TILES; ++n) {
        float sums[2], kept[2];
        KV_UNROLL for (int c = 0; c < 2; ++c) {
          const int low = seen[n][c].low, width = seen[n][c].high - low;
          float highest = KV_NONE, sum = 0;
          if (!is_clear) {
            KV_UNROLL for (int m = 0; m < SCORES; ++m) KV_UNROLL for (int r = 0; r < 2; ++r)
              if ((unsigned)(now + line_of(2 * m + r) - low) > (unsigned)width) score[m][n][2 * r + c] = KV_NONE;
          }
          KV_UNROLL for (int m = 0; m < SCORES; ++m)
            highest = fmaxf(highest, fmaxf(score[m][n][c], score[m][n][2 + c]));
          if (IS_FEW) highest = fmaxf(highest, kv_shuffle_xor(highest, 2));
          highest = fmaxf(highest, kv_shuffle_xor(highest, 4));
          highest = fmaxf(highest, kv_shuffle_xor(highest, 8));
          highest = fmaxf(highest, kv_shuffle_xor(highest, 16));
          highest = highest > KV_NONE ? fmaxf(highest * factor[n][c], top[n][c]) : top[n][c];
          KV_UNROLL for (int m = 0; m < SCORES; ++m) KV_UNROLL for (int r = 0; r < 2; ++r) {
            float& mine = score[m][n][2 * r + c];
            const float weight = kv_exp2_near(mine * factor[n][c] - highest);
            mine = is_clear || mine > KV_NONE ? weight : 0.0f;
            sum += mine;
          }
          sums[c] = sum;
          kept[c] = IS_LONG ? kv_exp2(top[n][c] - highest) : 1.0f;
          top[n][c] = highest;
        }
        const int column = column_of(n, 0);  // most tiles have no higher score
        const bool is_less = (column < row_count && kept[0] != 1) || (column + 1 < row_count && kept[1] != 1);
        if (IS_LONG && kv_any(is_less)) {
          KV_UNROLL for (int c = 0; c < 2; ++c) {
            total[n][c] *= kept[c];
            KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) bias_mix[i][n][c] *= kept[c];
            KV_UNROLL for (int i = 0; i < OUT; ++i) {
              mix[i][n][c] *= kept[c];
              mix[i][n][c + 2] *= kept[c];
            }
          }
        }
        KV_UNROLL for (int c = 0; c < 2; ++c) total[n][c] += sums[c];
      }

      kv_copies_done<IS_LONG ? 1 : 0>();
      kv_clear_scales<V, TILE>(v_tile, now, any, lane);
      float value_scale[2 * SCORES][V::GROUPS];
      if (V::IS_QUANTIZED) {
        KV_UNROLL for (int r = 0; r < 2 * SCORES; ++r) {
          float bias[V::GROUPS];
          kv_row_scales<V, IS_BFLOAT>(v_tile + KvTile<V, TILE>::SCALES, line_of(r), value_scale[r]);
          kv_row_scales<V, IS_BFLOAT>(v_tile + KvTile<V, TILE>::BIASES, line_of(r), bias);
          KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) KV_UNROLL for (int n = 0; n < TILES; ++n)
            KV_UNROLL for (int c = 0; c < 2; ++c) bias_mix[i][n][c] += score[r / 2][n][2 * (r % 2) + c] * bias[i];
        }
      }
      KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) {
        float shrink = V_BFLOAT ? 1.0f : KV_WEIGHT;
        if (V::IS_QUANTIZED) {
          float greatest = 0;
          KV_UNROLL for (int r = 0; r < 2 * SCORES; ++r) greatest = fmaxf(greatest, fabsf(value_scale[r][i]));
          if (IS_FEW) greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 2));
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 4));
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 8));
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 16));
          // Weights times scales are halves of the greatest scale so far: they cannot overflow.
          greatest = fmaxf(greatest, largest[i]);
          const float inverse = greatest > 0 ? 1 / greatest : 0.0f;
          if (IS_LONG && greatest > largest[i]) {
            const float kept = largest[i] * inverse;
            KV_UNROLL for (int o = i * (OUT / V::GROUPS); o < (i + 1) * (OUT / V::GROUPS); ++o)
              KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) mix[o][n][j] *= kept;
          }
          largest[i] = greatest;
          shrink = inverse * KV_WEIGHT;
        }
        kv_u32 weight[TILE / 16][TILES][2];
        KV_UNROLL for (int m = 0; m < SCORES; ++m) KV_UNROLL for (int n = 0; n < TILES; ++n)
          KV_UNROLL for (int r = 0; r < 2; ++r) {
            const float by = V::IS_QUANTIZED ? value_scale[2 * m + r][i] * shrink : shrink;
            const float low = score[m][n][2 * r] * by, high = score[m][n][2 * r + 1] * by;
            const kv_u32 made = kv_transposed(V_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high));
            weight[m * 2 / EACH][n][r] = IS_FEW && g >= 4 ? 0 : made;
            if (IS_FEW) weight[m * 2 + 1][n][r] = g >= 4 ? made : 0;
          }
        KV_UNROLL for (int c = 0; c < V::GROUP_CHUNKS; ++c) KV_UNROLL for (int pair = 0; pair < TILE / 32; ++pair) {
          const int chunk = i * V::GROUP_CHUNKS + c;
          kv_u32 x[4], more[4];
          if (V::BITS == 16 && c % 2) continue;
          kv_load_transposed(v_tile + kv_place<V::ROW_CHUNKS>(pair * 32 + lane, chunk), x);
          if (V::BITS == 16) kv_load_transposed(v_tile + kv_place<V::ROW_CHUNKS>(pair * 32 + lane, chunk + 1), more);
          KV_UNROLL for (int h = 0; h < 2; ++h) {
            const kv_u32 low = x[2 * h], high = x[2 * h + 1];
            if (V::BITS == 4) {
              const kv_u32 first[4] = {low & 0x000f000f, low & 0x00f000f0, high & 0x000f000f, high & 0x00f000f0};
              const kv_u32 second[4] = {low >> 8 & 0x000f000f, low >> 8 & 0x00f000f0, high >> 8 & 0x000f000f,
                                        high >> 8 & 0x00f000f0};
              KV_UNROLL for (int n = 0; n < TILES; ++n) {
                kv_mma<false>(mix[chunk * 2][n], first, weight[pair * 2 + h][n]);
                kv_mma<false>(mix[chunk * 2 + 1][n], second, weight[pair * 2 + h][n]);
              }
            } else if (V::BITS == 8) {
              const kv_u32 a[4] = {low & 0x00ff00ff, low >> 8 & 0x00ff00ff, high & 0x00ff00ff, high >> 8 & 0x00ff00ff};
              KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<false>(mix[chunk][n], a, weight[pair * 2 + h][n]);
            } else {
              const kv_u32 a[4] = {low, more[2 * h], high, more[2 * h + 1]};
              KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<V_BFLOAT>(mix[chunk / 2][n], a, weight[pair * 2 + h][n]);
            }
          }
        }
      }
    }
    begin_next(2 * step + 1);
  }

  // Sums over the lanes; then the warps' results become one in shared memory, in a fixed order.
  float* tops = shared;
  float* mixes = tops + 2 * WARPS * COLUMNS;
  kv_group_barrier();
  KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
    KV_UNROLL for (int mask = 4; mask < 32; mask <<= 1) total[n][c] += kv_shuffle_xor(total[n][c], mask);
    KV_UNROLL for (int i = 0; i < V::GROUPS; ++i)
      KV_UNROLL for (int mask = 4; mask < 32; mask <<= 1) bias_mix[i][n][c] += kv_shuffle_xor(bias_mix[i][n][c], mask);
    if (g == 0) {
      const int column = n * 8 + 2 * t + c;  // a few queries' other columns, too
      tops[(warp * COLUMNS + column) * 2] = top[n][c];
      tops[(warp * COLUMNS + column) * 2 + 1] = total[n][c];
    }
  }
  kv_group_barrier();
  KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
    const int column = n * 8 + 2 * t + c;
    float highest = KV_NONE;
    KV_UNROLL for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[(w * COLUMNS + column) * 2]);
    const float kept = kv_exp2(top[n][c] - highest);
    if ((IS_FEW ? column % 4 : column) < row_count) {
      KV_UNROLL for (int o = 0; o < OUT; ++o) KV_UNROLL for (int r = 0; r < 2; ++r) {
        const int group = o / (OUT / V::GROUPS);
        int dim;
        float worth = 1;
        if (V::BITS == 4) {
          dim = o / 2 * 32 + g * 4 + o % 2 * 2 + r;
          worth = r ? 0.0625f : 1.0f;
        } else if (V::BITS == 8) {
          dim = o * 16 + g * 2 + r;
        } else {
          dim = o * 16 + r * 8 + g;
        }
        float value = mix[o][n][2 * r + c];
        if (V::IS_QUANTIZED)
          value = value * (worth * (KV_CODE / KV_WEIGHT)) * largest[group] + bias_mix[group][n][c];
        else if (!V_BFLOAT)
          value *= 1 / KV_WEIGHT;
        mixes[(warp * COLUMNS + column) * (V::DIM + 4) + dim] = value * kept;
      }
    }
  }
  kv_group_barrier();
  const int worker = warp * 32 + lane;
  for (int i = worker; i < row_count * V::DIM; i += WARPS * 32) {
    const int column = i / V::DIM, dim = i % V::DIM;
    float sum = 0;
    KV_UNROLL for (int w = 0; w < WARPS; ++w) KV_UNROLL for (int h = 0; h < 3 - EACH; ++h)
      sum += mixes[(w * COLUMNS + column + 4 * h) * (V::DIM + 4) + dim];
    partial[column * row_stride + dim] = sum;
  }
  if (worker < row_count) {
    float highest = KV_NONE, sum = 0;
    KV_UNROLL for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[(w * COLUMNS + worker) * 2]);
    KV_UNROLL for (int w = 0; w < WARPS; ++w) KV_UNROLL for (int h = 0; h < 3 - EACH; ++h)
      sum += tops[(w * COLUMNS + worker + 4 * h) * 2 + 1] * kv_exp2(tops[(w * COLUMNS + worker) * 2] - highest);
    partial[worker * row_stride + V::DIM] = highest;
    partial[worker * row_stride + V::DIM + 1] = sum;
  }
}
