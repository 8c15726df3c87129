// Stored rows as 16-bit values that products of matrices take, and queries beside them.
//
// Keys become sixteenths, as halves: bfloats would lose bits, and halves alone could overflow. Values are of the scales'
// type. Eight values of a row lie in the order in which their codes come out of words; queries are read, and mixes are
// written, in that order. A lane t of a fragment has two of the eight.
KV_CONST float KV_KEY_UNIT = 0.0625f;

// Where chunks lie in rows that follow each other.
template <int DIM>
struct KvInRows {
  KV_FN static int at(int row, int chunk) { return kv_place<DIM / 8>(row, chunk); }
};

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

template <bool IS_BFLOAT>
KV_FN kv_u32 kv_twice(float x) {
  return kv_u32(IS_BFLOAT ? kv_to_bfloat(x) : kv_to_half(x)) * 0x10001u;
}

// The values of a stored chunk, times `unit`, as bfloats or halves; zeros for tokens not in [any.low, any.high], whose
// scales may be no numbers.
template <typename Place, typename Rows, bool IS_BFLOAT, bool TO_BFLOAT>
KV_FN void kv_write_values(KV_SHARED kv_u16* values, KV_THREAD const KvStored& read, float unit, int token, KvSeen any) {
  const bool is_stored = token + read.row >= any.low && token + read.row <= any.high;
  const kv_u32 words[4] = {read.words.x, read.words.y, read.words.z, read.words.w};
  if (Rows::BITS == 16) {
    const kv_u32x4 made = {is_stored ? words[0] : 0, is_stored ? words[1] : 0, is_stored ? words[2] : 0, is_stored ? words[3] : 0};
    *(KV_SHARED kv_u32x4*)(values + Place::at(read.row, read.chunk)) = made;
    return;
  }
  const kv_u32 kept = is_stored ? 0xffffffffu : 0;  // without a branch, which would keep this from what is around it
  const kv_u32 scale = kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(read.scale) * unit) & kept;
  const kv_u32 bias = kv_twice<TO_BFLOAT>(kv_scale<IS_BFLOAT>(read.bias) * unit) & kept;
  constexpr int PER_WORD = 16 / Rows::BITS;  // pairs of a word, and eights of a chunk
  KV_UNROLL for (int e = 0; e < PER_WORD; ++e) {
    kv_u32 two[4];
    KV_UNROLL for (int j = 0; j < 4; ++j)
      two[j] = kv_fma_two<TO_BFLOAT>(kv_codes<Rows::BITS, TO_BFLOAT>(words[(e * 4 + j) / PER_WORD], j % PER_WORD), scale, bias);
    const kv_u32x4 made = {two[0], two[1], two[2], two[3]};
    *(KV_SHARED kv_u32x4*)(values + Place::at(read.row, read.chunk * PER_WORD + e)) = made;
  }
}

// Eight values of a query, which are read at once.
template <typename Query>
struct alignas(16) KvEightQueries {
  Query value[8];
};

// A query as the products take it, each row as halves of its greatest power of two, which is returned; or bfloats as they
// are. Four lanes have a row. A row that is next to nothing stays so: what is not seen must stay far below its scores.
template <typename Place, typename Query, int DIM, int BITS, bool TO_BFLOAT>
KV_FN float kv_put_query(KV_SHARED kv_u16* rows, KV_GLOBAL const Query* query, bool is_there, int row, int t) {
  constexpr int MINE = (DIM / 8 + 3) / 4;
  float values[MINE][8], greatest = 0;
  KV_UNROLL for (int n = 0; n < MINE; ++n) {
    const int chunk = n * 4 + t;
    KvEightQueries<Query> eight = {};
    if (is_there && chunk < DIM / 8) eight = *(KV_GLOBAL const KvEightQueries<Query>*)(query + chunk * 8);
    KV_UNROLL for (int i = 0; i < 8; ++i) {
      values[n][i] = float(eight.value[i]);
      greatest = kv_max(greatest, kv_abs(values[n][i]));
    }
  }
  greatest = kv_row_max(greatest);
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
    if (chunk < DIM / 8) *(KV_SHARED kv_u32x4*)(rows + Place::at(row, chunk)) = made;
  }
  return kv_from_bits(power);
}

// A row's top is raised only by so much: until then weights are up to 2 to this power. Sums seldom shrink then.
KV_CONST float KV_LEAST_RISE = 6;
