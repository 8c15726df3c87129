// One split by plain arithmetic in fp32: a lane scores a token, then a lane mixes four dimensions of all tokens.

// Values of 16 bytes of codes or 16-bit values, the first in the lowest bits.
template <int BITS, bool IS_BFLOAT>
KV_FN void kv_unpacked(kv_u32 word, KV_THREAD float* values) {
  KV_UNROLL for (int i = 0; i < 32 / BITS; ++i) {
    kv_u32 code = (word >> (i * BITS)) & ((1u << BITS) - 1);
    values[i] = BITS == 16 ? kv_scale<IS_BFLOAT>(kv_u16(code)) : float(code);
  }
}

// Products of one stored row with the block's queries [QUERIES, DIM] in shared memory.
template <typename Rows, bool IS_BFLOAT, int QUERIES>
KV_FN void kv_products(KV_GLOBAL const kv_u16* page, int row, KV_SHARED const float* queries,
                       KV_SHARED const float* query_sums, KV_THREAD float* products) {
  KV_GLOBAL const kv_u32x4* chunks = (KV_GLOBAL const kv_u32x4*)(page + Rows::BASE + row * Rows::ROW_UNITS);
  constexpr int VALUES = 32 / Rows::BITS;  // of a word
  KV_UNROLL for (int q = 0; q < QUERIES; ++q) products[q] = 0;
  KV_ROLLED for (int group = 0; group < Rows::GROUPS; ++group) {
    float sums[QUERIES];
    KV_UNROLL for (int q = 0; q < QUERIES; ++q) sums[q] = 0;
    KV_ROLLED for (int chunk = 0; chunk < Rows::GROUP_CHUNKS; ++chunk) {
      kv_u32x4 loaded = chunks[group * Rows::GROUP_CHUNKS + chunk];
      kv_u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      int dim = (group * Rows::GROUP_CHUNKS + chunk) * Rows::CHUNK_DIMS;
      float values[4 * VALUES];
      KV_UNROLL for (int w = 0; w < 4; ++w) kv_unpacked<Rows::BITS, IS_BFLOAT>(words[w], values + w * VALUES);
      KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
        KV_SHARED const kv_floats4* mine = (KV_SHARED const kv_floats4*)(queries + q * Rows::DIM + dim);
        KV_UNROLL for (int i = 0; i < VALUES; ++i) {
          kv_floats4 four = mine[i];
          sums[q] += four.x * values[4 * i] + four.y * values[4 * i + 1] + four.z * values[4 * i + 2] +
                     four.w * values[4 * i + 3];
        }
      }
    }
    if (Rows::IS_QUANTIZED) {
      float scale = kv_scale<IS_BFLOAT>(page[Rows::SCALES + row * Rows::GROUPS + group]);
      float bias = kv_scale<IS_BFLOAT>(page[Rows::BIASES + row * Rows::GROUPS + group]);
      KV_UNROLL for (int q = 0; q < QUERIES; ++q)
        products[q] += scale * sums[q] + bias * query_sums[q * Rows::GROUPS + group];
    } else {
      KV_UNROLL for (int q = 0; q < QUERIES; ++q) products[q] += sums[q];
    }
  }
}

// Four neighbouring values of a stored row.
template <typename Rows, bool IS_BFLOAT>
KV_FN void kv_four_values(KV_GLOBAL const kv_u16* page, int row, int four, KV_THREAD float* values) {
  KV_GLOBAL const kv_u16* units = page + Rows::BASE + row * Rows::ROW_UNITS + four * (Rows::BITS / 4);
  float scale = 1, bias = 0;
  if (Rows::IS_QUANTIZED) {
    int group = row * Rows::GROUPS + four * 4 / Rows::GROUP;
    scale = kv_scale<IS_BFLOAT>(page[Rows::SCALES + group]);
    bias = kv_scale<IS_BFLOAT>(page[Rows::BIASES + group]);
  }
  KV_UNROLL for (int i = 0; i < 4; ++i) {
    if (Rows::BITS == 16) values[i] = kv_scale<IS_BFLOAT>(units[i]);
    if (Rows::BITS == 8) values[i] = scale * float((units[i / 2] >> (i % 2 * 8)) & 0xff) + bias;
    if (Rows::BITS == 4) values[i] = scale * float((units[0] >> (i * 4)) & 0xf) + bias;
  }
}

// Floats of shared memory that a block needs.
template <typename K, typename V, int QUERIES, int WARPS>
KV_FN constexpr int kv_lanes_floats() {
  return WARPS * QUERIES * 2 + (QUERIES * (K::DIM + K::GROUPS + WARPS * 32) > QUERIES * V::DIM
                                    ? QUERIES * (K::DIM + K::GROUPS + WARPS * 32)
                                    : QUERIES * V::DIM);
}

// One block's split: queries are `row_count` rows of K::DIM values; `partial` is theirs, [rows, splits, V::DIM + 4]:
// the mix, its greatest score and the sum of its weights.
template <typename Query, typename K, typename V, bool IS_BFLOAT, int QUERIES, int WARPS, int SPAN>
KV_FN void kv_split_by_lanes(KV_GLOBAL const Query* queries, KV_GLOBAL const kv_u16* page, int head, int first_token,
                             int length, int query_count, int first_row, int row_count, float scale,
                             int window, KV_GLOBAL float* partial, int row_stride, int warp, int lane,
                             KV_SHARED float* shared) {
  constexpr int FOURS = (V::DIM / 4 + 31) / 32;  // that a lane mixes
  constexpr int MIXES = QUERIES * V::DIM;
  KV_SHARED float* query_values = shared;
  KV_SHARED float* query_sums = query_values + QUERIES * K::DIM;
  KV_SHARED float* weights = query_sums + QUERIES * K::GROUPS + warp * QUERIES * 32;
  KV_SHARED float* tops = shared + kv_lanes_floats<K, V, QUERIES, WARPS>() - WARPS * QUERIES * 2;
  KV_SHARED float* mixes = shared;  // after the queries' last use

  int worker = warp * 32 + lane;
  for (int i = worker; i < QUERIES * K::DIM; i += WARPS * 32)
    query_values[i] = i < row_count * K::DIM ? float(queries[i]) : 0.0f;
  kv_group_barrier();
  for (int i = worker; i < QUERIES * K::GROUPS; i += WARPS * 32) {
    float sum = 0;
    for (int d = 0; d < K::GROUP; ++d) sum += query_values[i * K::GROUP + d];
    query_sums[i] = sum;
  }
  kv_group_barrier();

  const float factor = scale * KV_LOG2E;
  KvSeen any = kv_seen_by_any(length, query_count, window);
  float top[QUERIES], total[QUERIES], mix[QUERIES][FOURS * 4];
  KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
    top[q] = KV_NONE;
    total[q] = 0;
    KV_UNROLL for (int i = 0; i < FOURS * 4; ++i) mix[q][i] = 0;
  }
  KV_ROLLED for (int begin = first_token; begin < first_token + SPAN; begin += 32) {
    if (begin > any.high || begin + 31 < any.low) continue;
    int token = begin + lane, row = head * KV_PAGE_TOKENS + token % KV_PAGE_TOKENS;
    float products[QUERIES];
    KV_UNROLL for (int q = 0; q < QUERIES; ++q) products[q] = 0;
    if (token >= any.low && token <= any.high)
      kv_products<K, IS_BFLOAT, QUERIES>(page, row, query_values, query_sums, products);
    KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
      KvSeen seen = kv_seen(length, query_count, (first_row + q) % query_count, window);
      bool is_seen = token >= seen.low && token <= seen.high;
      float score = is_seen ? products[q] * factor : KV_NONE;
      float highest = kv_warp_max(score);
      highest = highest > top[q] ? highest : top[q];
      float kept = kv_exp2(top[q] - highest), weight = is_seen ? kv_exp2(score - highest) : 0.0f;
      top[q] = highest;
      total[q] = total[q] * kept + weight;
      KV_UNROLL for (int i = 0; i < FOURS * 4; ++i) mix[q][i] *= kept;
      weights[q * 32 + lane] = weight;
    }
    kv_warp_barrier();
    int from = begin < any.low ? any.low - begin : 0, to = any.high - begin < 31 ? any.high - begin : 31;
    KV_ROLLED for (int i = from; i <= to; ++i) {
      KV_UNROLL for (int f = 0; f < FOURS; ++f) {
        int four = lane + 32 * f;
        if (four >= V::DIM / 4) continue;
        float values[4];
        kv_four_values<V, IS_BFLOAT>(page, head * KV_PAGE_TOKENS + (begin + i) % KV_PAGE_TOKENS, four, values);
        KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
          float weight = weights[q * 32 + i];
          KV_UNROLL for (int j = 0; j < 4; ++j) mix[q][f * 4 + j] += weight * values[j];
        }
      }
    }
    kv_warp_barrier();
  }

  // The warps' results become one, warp by warp: the order is fixed.
  KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
    total[q] = kv_warp_sum(total[q]);
    if (lane == 0) {
      tops[(warp * QUERIES + q) * 2] = top[q];
      tops[(warp * QUERIES + q) * 2 + 1] = total[q];
    }
  }
  kv_group_barrier();
  KV_ROLLED for (int turn = 0; turn < WARPS; ++turn) {
    if (turn == warp) {
      KV_UNROLL for (int q = 0; q < QUERIES; ++q) {
        float highest = KV_NONE;
        for (int w = 0; w < WARPS; ++w) {
          float other = tops[(w * QUERIES + q) * 2];
          highest = other > highest ? other : highest;
        }
        float kept = kv_exp2(top[q] - highest);
        KV_UNROLL for (int f = 0; f < FOURS; ++f) {
          int four = lane + 32 * f;
          if (four >= V::DIM / 4) continue;
          KV_UNROLL for (int j = 0; j < 4; ++j) {
            int place = q * V::DIM + four * 4 + j;
            mixes[place] = (turn ? mixes[place] : 0.0f) + mix[q][f * 4 + j] * kept;
          }
        }
      }
    }
    kv_group_barrier();
  }
  for (int i = worker; i < row_count * V::DIM && i < MIXES; i += WARPS * 32)
    partial[(i / V::DIM) * row_stride + i % V::DIM] = mixes[i];
  if (worker < row_count) {
    float highest = KV_NONE, sum = 0;
    for (int w = 0; w < WARPS; ++w) {
      float other = tops[(w * QUERIES + worker) * 2];
      highest = other > highest ? other : highest;
    }
    for (int w = 0; w < WARPS; ++w)
      sum += tops[(w * QUERIES + worker) * 2 + 1] * kv_exp2(tops[(w * QUERIES + worker) * 2] - highest);
    partial[worker * row_stride + V::DIM] = highest;
    partial[worker * row_stride + V::DIM + 1] = sum;
  }
}
