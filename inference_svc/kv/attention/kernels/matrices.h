// One split by products of matrix fragments: scores^T = K Q^T, then mix^T = V^T P^T, 16 x 16 times 16 x 8.
//
// Codes are never turned into numbers: the bits of a code, as a half, are the code times 2^-24 (and one shifted by four
// bits is 2^-20: its other factor, 16, is taken from the query or from the result). Scales and biases join per group:
// q (s c + b) = s (q c) + b sum(q), and sum(p (s c + b)) = sum((p s) c) + sum(p b).
//
// A fragment's lane is (g, t) = (lane / 4, lane % 4). In c[16, 8], it holds rows g and g + 8 of columns 2t and 2t + 1;
// in a[16, 16], those rows of columns 2t, 2t + 1, 2t + 8, 2t + 9; in b[16, 8], column g of those rows. Rows are tokens
// (then dimensions), columns are queries. Which dimension is which k is free, as long as both sides agree.

KV_CONST float KV_CODE = 16777216.0f;   // 2^24: what a code's bits are worth less as a half
KV_CONST float KV_WEIGHT = 16384.0f;    // 2^14: what weights are multiplied by, so that small ones stay normal halves

// Where 16-byte chunk `chunk` of row `row` lies: so that eight rows of a chunk lie in different banks.
template <int ROW_CHUNKS>
KV_FN int kv_place(int row, int chunk) {
  int mixed = chunk;
  if (ROW_CHUNKS % 8 == 0) mixed = chunk ^ (row & 7);
  if (ROW_CHUNKS == 4) mixed = chunk ^ ((row >> 1) & 3);
  if (ROW_CHUNKS == 2) mixed = chunk ^ ((row >> 2) & 1);
  return (row * ROW_CHUNKS + mixed) * 8;
}

KV_FN kv_u32 kv_pair(float low, float high) { return kv_u32(kv_to_half(low)) | kv_u32(kv_to_half(high)) << 16; }
KV_FN kv_u32 kv_pair_of_bfloats(float low, float high) {
  return kv_u32(kv_to_bfloat(low)) | kv_u32(kv_to_bfloat(high)) << 16;
}

// A warp's rows of a tile in shared memory, in units: codes or values, scales, biases.
template <typename Rows, int TILE>
struct KvTile {
  KV_CONST int SCALES = TILE * Rows::ROW_UNITS;
  KV_CONST int BIASES = SCALES + (Rows::IS_QUANTIZED ? TILE * Rows::GROUPS : 0);
  KV_CONST int UNITS = BIASES + (Rows::IS_QUANTIZED ? TILE * Rows::GROUPS : 0);
};

// Begin to copy a tile's rows from row `first` of the page's part on; tokens not in [low, high] become zeros, or keep
// scales that kv_scales_of leaves out.
template <typename Rows, int TILE>
KV_FN void kv_begin_tile(kv_u16* to, const kv_u16* page, int first, int token, KvSeen any, int lane) {
  const kv_u16* from = page + Rows::BASE + first * Rows::ROW_UNITS;
  KV_UNROLL for (int i = lane; i < TILE * Rows::ROW_CHUNKS; i += 32) {
    int row = i / Rows::ROW_CHUNKS, chunk = i % Rows::ROW_CHUNKS;
    kv_copy16(to + kv_place<Rows::ROW_CHUNKS>(row, chunk), from + i * 8, token + row >= any.low && token + row <= any.high);
  }
  if (Rows::IS_QUANTIZED) {
    constexpr int CHUNKS = TILE * Rows::GROUPS / 8;
    KV_UNROLL for (int i = lane; i < 2 * CHUNKS; i += 32) {
      int chunk = i % CHUNKS;
      const kv_u16* part = page + (i < CHUNKS ? Rows::SCALES : Rows::BIASES) + first * Rows::GROUPS;
      kv_copy16(to + KvTile<Rows, TILE>::SCALES + i * 8, part + chunk * 8, true);
    }
  }
}

template <typename Query, typename K, typename V, bool IS_BFLOAT, bool IS_CAPPED, int TILES, int WARPS, int SPAN, int TILE>
KV_FN void kv_split_by_matrices(const Query* queries, const kv_u16* page, int head, int first_token, int length,
                                int query_count, int first_row, int row_count, float scale, float soft_cap, int window,
                                float* partial, int row_stride, int warp, int lane, float* shared) {
  constexpr int HALVES = TILE / 16, COLUMNS = 8 * TILES;
  constexpr int K_STEPS = K::DIM / 16, OUT = V::DIM / 16;
  constexpr bool K_BFLOAT = !K::IS_QUANTIZED && IS_BFLOAT, V_BFLOAT = !V::IS_QUANTIZED && IS_BFLOAT;
  constexpr int WARP_UNITS = KvTile<K, TILE>::UNITS + KvTile<V, TILE>::UNITS;
  const int g = lane / 4, t = lane % 4;
  kv_u16* k_tile = (kv_u16*)shared + warp * WARP_UNITS;
  kv_u16* v_tile = k_tile + KvTile<K, TILE>::UNITS;
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

  int begin = first_token;
  bool is_live = begin <= any.high && begin + TILE > any.low;
  if (is_live) {
    kv_begin_tile<K, TILE>(k_tile, page, head * KV_PAGE_TOKENS + begin % KV_PAGE_TOKENS, begin, any, lane);
    kv_copies_begun();
    kv_begin_tile<V, TILE>(v_tile, page, head * KV_PAGE_TOKENS + begin % KV_PAGE_TOKENS, begin, any, lane);
  } else {
    kv_copies_begun();
  }
  kv_copies_begun();

  // The queries as fragments, while the first tile comes: each row as halves of its greatest power of two.
  KV_UNROLL for (int n = 0; n < TILES; ++n) {
    const bool is_row = n * 8 + g < row_count;
    const Query* mine = queries + (is_row ? n * 8 + g : 0) * K::DIM;
    constexpr int EACH = K::DIM / 4;  // values of a lane
    float values[EACH];
    float greatest = 0;
    KV_UNROLL for (int i = 0; i < EACH; ++i) {
      constexpr int RUN = K::BITS == 16 ? 2 : 32 / K::BITS;  // neighbours of a lane in a chunk
      float value = is_row ? float(mine[i / RUN * RUN * 4 + t * RUN + i % RUN]) : 0.0f;
      values[i] = value;
      value = value < 0 ? -value : value;
      greatest = value > greatest ? value : greatest;
    }
    greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 1));
    greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 2));
    kv_u32 power = kv_to_bits(greatest) & 0x7f800000u;
    power = K_BFLOAT || power < 0x01000000u || power > 0x7e000000u ? 0x3f800000u : power;
    const float shrink = kv_from_bits(0x7f000000u - power);
    KV_UNROLL for (int i = 0; i < EACH; ++i)
      if (!K_BFLOAT) values[i] = kv_from_half(kv_to_half(values[i] * shrink));
    KV_UNROLL for (int c = 0; c < 2; ++c)
      factor[n][c] = kv_factor<IS_CAPPED>(scale) * kv_shuffle(kv_from_bits(power), 8 * t + 4 * c) * (K::IS_QUANTIZED ? KV_CODE : 1.0f);
    KV_UNROLL for (int i = 0; i < K::GROUPS; ++i) {
      float sum = 0;
      KV_UNROLL for (int j = 0; j < K::GROUP / 4; ++j) sum += values[i * (K::GROUP / 4) + j];
      sum += kv_shuffle_xor(sum, 1);
      sum += kv_shuffle_xor(sum, 2);
      KV_UNROLL for (int c = 0; c < 2; ++c) query_sum[i][n][c] = kv_shuffle(sum, 8 * t + 4 * c) * (1 / KV_CODE);
    }
    KV_UNROLL for (int i = 0; i < K_STEPS; ++i) {
      const float* four = values + i * 4;
      if (K::BITS == 16) {
        query[i][n][0] = K_BFLOAT ? kv_pair_of_bfloats(four[0], four[1]) : kv_pair(four[0], four[1]);
        query[i][n][1] = K_BFLOAT ? kv_pair_of_bfloats(four[2], four[3]) : kv_pair(four[2], four[3]);
      } else if (K::BITS == 8) {
        query[i][n][0] = kv_pair(four[0], four[2]);
        query[i][n][1] = kv_pair(four[1], four[3]);
      } else {
        const float* low = values + i / 2 * 8 + i % 2 * 2;
        query[i][n][0] = kv_pair(low[0], low[4]);
        query[i][n][1] = kv_pair(low[1] * 0.0625f, low[5] * 0.0625f);
      }
    }
    KV_UNROLL for (int c = 0; c < 2; ++c) {
      seen[n][c] = kv_seen(length, query_count, (first_row + n * 8 + 2 * t + c) % query_count, window);
      if (seen[n][c].high < seen[n][c].low) seen[n][c].low = seen[n][c].high = -1;
    }
  }

  KV_ROLLED for (int step = 0; step < SPAN / TILE; ++step) {
    if (is_live) {
      kv_copies_done<1>();
      float score[HALVES][TILES][4];
      KV_UNROLL for (int pair = 0; pair < TILE / 32; ++pair) {
        float row_scale[4][K::GROUPS], row_bias[4][K::GROUPS];
        KV_UNROLL for (int r = 0; r < 4; ++r) KV_UNROLL for (int i = 0; i < K::GROUPS; ++i) {
          const int row = pair * 32 + r * 8 + g;
          const bool is_stored = begin + row >= any.low && begin + row <= any.high;
          if (K::IS_QUANTIZED) {
            row_scale[r][i] = is_stored ? kv_scale<IS_BFLOAT>(k_tile[KvTile<K, TILE>::SCALES + row * K::GROUPS + i]) : 0.0f;
            row_bias[r][i] = is_stored ? kv_scale<IS_BFLOAT>(k_tile[KvTile<K, TILE>::BIASES + row * K::GROUPS + i]) : 0.0f;
          }
        }
        KV_UNROLL for (int h = 0; h < 2; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
          KV_UNROLL for (int j = 0; j < 4; ++j) score[pair * 2 + h][n][j] = 0;
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
          KV_UNROLL for (int h = 0; h < 2; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
            KV_UNROLL for (int j = 0; j < 4; ++j) {
              float& mine = score[pair * 2 + h][n][j];
              mine = K::IS_QUANTIZED ? mine + (row_scale[2 * h + j / 2][i] * sum[h][n][j] +
                                               row_bias[2 * h + j / 2][i] * query_sum[i][n][j % 2])
                                     : sum[h][n][j];
            }
        }
      }

      // Weights of this tile, and what is kept of the tiles before it.
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int c = 0; c < 2; ++c) {
        float highest = KV_NONE;
        const int low = seen[n][c].low, width = seen[n][c].high - low;
        KV_UNROLL for (int m = 0; m < HALVES; ++m) KV_UNROLL for (int r = 0; r < 2; ++r) {
          const int token = begin + m * 16 + r * 8 + g;
          float& mine = score[m][n][2 * r + c];
          mine = (unsigned)(token - low) <= (unsigned)width ? kv_capped<IS_CAPPED>(mine * factor[n][c], soft_cap) : KV_NONE;
          highest = fmaxf(highest, mine);
        }
        highest = fmaxf(highest, kv_shuffle_xor(highest, 4));
        highest = fmaxf(highest, kv_shuffle_xor(highest, 8));
        highest = fmaxf(highest, kv_shuffle_xor(highest, 16));
        highest = fmaxf(highest, top[n][c]);
        float sum = 0;
        KV_UNROLL for (int m = 0; m < HALVES; ++m) KV_UNROLL for (int r = 0; r < 2; ++r) {
          float& mine = score[m][n][2 * r + c];
          mine = mine == KV_NONE ? 0.0f : kv_exp2(mine - highest);
          sum += mine;
        }
        if (SPAN > TILE) {
          const float kept = kv_exp2(top[n][c] - highest);
          total[n][c] *= kept;
          KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) bias_mix[i][n][c] *= kept;
          KV_UNROLL for (int i = 0; i < OUT; ++i) {
            mix[i][n][c] *= kept;
            mix[i][n][c + 2] *= kept;
          }
        }
        total[n][c] += sum;
        top[n][c] = highest;
      }

      kv_copies_done<0>();
      KV_UNROLL for (int i = 0; i < V::GROUPS; ++i) {
        float row_scale[2 * HALVES];
        float shrink = V_BFLOAT ? 1.0f : KV_WEIGHT;
        if (V::IS_QUANTIZED) {
          float greatest = 0;
          KV_UNROLL for (int r = 0; r < 2 * HALVES; ++r) {
            const int row = r * 8 + g;
            const bool is_stored = begin + row >= any.low && begin + row <= any.high;
            row_scale[r] = is_stored ? kv_scale<IS_BFLOAT>(v_tile[KvTile<V, TILE>::SCALES + row * V::GROUPS + i]) : 0.0f;
            float bias = is_stored ? kv_scale<IS_BFLOAT>(v_tile[KvTile<V, TILE>::BIASES + row * V::GROUPS + i]) : 0.0f;
            KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int c = 0; c < 2; ++c)
              bias_mix[i][n][c] += score[r / 2][n][2 * (r % 2) + c] * bias;
            greatest = fmaxf(greatest, fabsf(row_scale[r]));
          }
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 4));
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 8));
          greatest = fmaxf(greatest, kv_shuffle_xor(greatest, 16));
          // Weights times scales are halves of the greatest scale so far: they cannot overflow.
          greatest = fmaxf(greatest, largest[i]);
          const float inverse = greatest > 0 ? 1 / greatest : 0.0f;
          if (SPAN > TILE) {
            const float kept = largest[i] * inverse;
            KV_UNROLL for (int o = i * (OUT / V::GROUPS); o < (i + 1) * (OUT / V::GROUPS); ++o)
              KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) mix[o][n][j] *= kept;
          }
          largest[i] = greatest;
          shrink = inverse * KV_WEIGHT;
        }
        kv_u32 weight[HALVES][TILES][2];
        KV_UNROLL for (int m = 0; m < HALVES; ++m) KV_UNROLL for (int n = 0; n < TILES; ++n)
          KV_UNROLL for (int r = 0; r < 2; ++r) {
            const float by = V::IS_QUANTIZED ? row_scale[2 * m + r] * shrink : shrink;
            const float low = score[m][n][2 * r] * by, high = score[m][n][2 * r + 1] * by;
            weight[m][n][r] = kv_transposed(V_BFLOAT ? kv_pair_of_bfloats(low, high) : kv_pair(low, high));
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
    if (SPAN > TILE) {
      begin += TILE;
      is_live = step + 1 < SPAN / TILE && begin <= any.high && begin + TILE > any.low;
      kv_warp_barrier();
      if (is_live) kv_begin_tile<K, TILE>(k_tile, page, head * KV_PAGE_TOKENS + begin % KV_PAGE_TOKENS, begin, any, lane);
      kv_copies_begun();
      if (is_live) kv_begin_tile<V, TILE>(v_tile, page, head * KV_PAGE_TOKENS + begin % KV_PAGE_TOKENS, begin, any, lane);
      kv_copies_begun();
    }
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
      const int column = n * 8 + 2 * t + c;
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
    if (column < row_count) {
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
    KV_UNROLL for (int w = 0; w < WARPS; ++w) sum += mixes[(w * COLUMNS + column) * (V::DIM + 4) + dim];
    partial[column * row_stride + dim] = sum;
  }
  if (worker < row_count) {
    float highest = KV_NONE, sum = 0;
    KV_UNROLL for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[(w * COLUMNS + worker) * 2]);
    KV_UNROLL for (int w = 0; w < WARPS; ++w)
      sum += tops[(w * COLUMNS + worker) * 2 + 1] * kv_exp2(tops[(w * COLUMNS + worker) * 2] - highest);
    partial[worker * row_stride + V::DIM] = highest;
    partial[worker * row_stride + V::DIM + 1] = sum;
  }
}
