// One layer for one new token of each of up to 16 sequences: x, normed, gives queries, keys and values, rotated; new keys
// and values join their pages; attention, its product and x give h; h, normed, opens and is opened for; the last product
// and h are the result. Weights are packed in 4 bits.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int STEP = 64 * WARPS;  // inputs of a stage: 64 for each warp
constexpr int DIM = KEY_DIM, ROWS = 8 * TILES, THREADS = WARPS * 32, SHARE = HEADS / KV_HEADS;
constexpr int Q_WIDTH = HEADS * DIM, KV_WIDTH = KV_HEADS * DIM, PAIRS = DIM / 32;
constexpr int SCALES = STEP / W_GROUP;  // of an output in a stage
constexpr int STAGE = kv_stage_units<W_GROUP, WARPS>();
constexpr int X_STRIDE = HIDDEN + 32;  // of rows in shared memory: so that banks of neighbours differ
constexpr int SPLIT_TOKENS = KV_PAGE_TOKENS, PART_WARPS = 4, FEW_SPLITS = 32;
const int rows = x_shape[0], thread = kv_warp * 32 + kv_lane, blocks = kv_blocks_x;

kv_u16* const ring = (kv_u16*)kv_shared;
float* const sums = (float*)(ring + STAGES * STAGE);
float* const squares = sums + WARPS * ROWS * KV_SUM_STRIDE;
int* const own_places = (int*)(squares + 16 * ROWS);  // small arrays are the host's memory, which is far
float* const room = squares + 16 * ROWS + 16;  // rows of x, or room for attention
kv_u16* const own_x = (kv_u16*)room;

// Results that steps give to each other.
const int splits = block_table_shape[1];
float* const partial = scratch;
T* const queries = (T*)(partial + long(rows) * HEADS * splits * (DIM + 4));
T* const keys = queries + rows * Q_WIDTH;
T* const values = keys + rows * KV_WIDTH;
T* const attended = values + rows * KV_WIDTH;
T* const h = attended + rows * Q_WIDTH;
T* const opened = h + rows * HIDDEN;

// --- weights on their way ---
int left_steps = 0, turn_steps = 0, made_phase = 0, made_pass = kv_block_x, made_depth = 0;
const kv_u16 *from_first = nullptr, *from_second = nullptr, *from_scales = nullptr;
kv_u16* made = ring;
constexpr int PIECES = STEP / 32;  // of an output in a stage
constexpr int SCALE_PIECES = SCALES < 8 ? 1 : SCALES / 8;
const int copied_row = thread / PIECES, copied_piece = thread % PIECES;
const int scale_row = thread / SCALE_PIECES % 32, scale_piece = thread % SCALE_PIECES;
const bool has_scales = thread < 2 * 32 * SCALE_PIECES, takes_biases = thread >= 32 * SCALE_PIECES;
const int place_of_weights = copied_piece / 2 * KV_SLICE + kv_piece<2>(copied_row, copied_piece % 2);
const int place_of_scales = WARPS * KV_SLICE + (takes_biases * 32 + scale_row) * SCALES + scale_piece * 8;

auto passes_of = [&](int phase) {
  return phase == 0 ? (HEADS + 2 * KV_HEADS) * PAIRS : phase == 2 ? INNER / 16 : HIDDEN / 32;
};
// Each thread's places of the pass at hand: of 16 outputs, and of 16 others.
auto aim = [&]() {
  while (made_phase < 4 && made_pass >= passes_of(made_phase)) {
    ++made_phase;
    made_pass = kv_block_x;
  }
  if (made_phase == 4) return;
  int first = made_pass * 32, second = first + 16, depth = HIDDEN;
  const kv_u16 *w = (const kv_u16*)w_o, *s = (const kv_u16*)s_o, *b = (const kv_u16*)b_o, *w2, *s2, *b2;
  if (made_phase == 0) {
    int head = made_pass / PAIRS;
    w = (const kv_u16*)w_q, s = (const kv_u16*)s_q, b = (const kv_u16*)b_q;
    if (head >= HEADS + KV_HEADS) {
      head -= HEADS + KV_HEADS;
      w = (const kv_u16*)w_v, s = (const kv_u16*)s_v, b = (const kv_u16*)b_v;
    } else if (head >= HEADS) {
      head -= HEADS;
      w = (const kv_u16*)w_k, s = (const kv_u16*)s_k, b = (const kv_u16*)b_k;
    }
    first = head * DIM + made_pass % PAIRS * 16;
    second = first + DIM / 2;
  } else if (made_phase == 1) {
    depth = Q_WIDTH;
  } else if (made_phase == 2) {
    w = (const kv_u16*)w_gate, s = (const kv_u16*)s_gate, b = (const kv_u16*)b_gate;
    first = second = made_pass * 16;
  } else {
    w = (const kv_u16*)w_down, s = (const kv_u16*)s_down, b = (const kv_u16*)b_down;
    depth = INNER;
  }
  w2 = w, s2 = s, b2 = b;
  if (made_phase == 2) w2 = (const kv_u16*)w_up, s2 = (const kv_u16*)s_up, b2 = (const kv_u16*)b_up;
  made_depth = depth;
  left_steps = depth / STEP;
  const int begun = kv_first_step(made_pass, left_steps);
  turn_steps = left_steps - begun;
  from_first = w + long(first + copied_row) * (depth / 4) + copied_piece * 8 + begun * (STEP / 4);
  from_second = w2 + long(second + copied_row) * (depth / 4) + copied_piece * 8 + begun * (STEP / 4);
  const int output = scale_row < 16 ? first + scale_row : second + scale_row - 16;
  const kv_u16* part = takes_biases ? (scale_row < 16 ? b : b2) : (scale_row < 16 ? s : s2);
  from_scales = part + long(output) * (depth / W_GROUP) + scale_piece * 8 + begun * SCALES;
};
// Begin to copy the next stage, if there is one.
auto begin = [&]() {
  if (made_phase < 4) {
    kv_copy16(made + place_of_weights, from_first, true);
    kv_copy16(made + place_of_weights + 16 * 16, from_second, true);
    from_first += STEP / 4;
    from_second += STEP / 4;
    if (has_scales) {
      if constexpr (SCALES < 8)
        kv_copy8(made + place_of_scales, from_scales);
      else
        kv_copy16(made + place_of_scales, from_scales, true);
    }
    from_scales += SCALES;
    made = made == ring + (STAGES - 1) * STAGE ? ring : made + STAGE;
    if (--turn_steps == 0) {
      from_first -= made_depth / 4;
      from_second -= made_depth / 4;
      from_scales -= made_depth / W_GROUP;
    }
    if (--left_steps == 0) {
      made_pass += blocks;
      aim();
    }
  }
  kv_copies_begun();
};
const kv_u16* used = ring;
aim();
KV_ROLLED for (int i = 0; i < STAGES - 1; ++i) begin();

// --- products ---
auto total = [&](int row, int output) {
  float found = 0;
  KV_UNROLL for (int warp = 0; warp < WARPS; ++warp)
    found += sums[(warp * ROWS + row) * KV_SUM_STRIDE + output];
  return kv_rounded<T>(found);
};
auto of_shared = [&](int step, kv_u32x4 (*to)[2]) {
  KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) {
    const int row = n * 8 + kv_lane / 4;
    to[n][half] = kv_u32x4{0, 0, 0, 0};
    if (row < rows) to[n][half] = *(const kv_u32x4*)(own_x + row * X_STRIDE + step * STEP + kv_warp * 64 + half * 32 + kv_lane % 4 * 8);
  }
};
auto of_global = [&](const T* from, int width) {
  const kv_u16* mine = (const kv_u16*)from + kv_lane / 4 * width + kv_warp * 64 + kv_lane % 4 * 8;
  return [=](int step, kv_u32x4 (*to)[2]) {
    KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) {
      to[n][half] = kv_u32x4{0, 0, 0, 0};
      if (n * 8 + kv_lane / 4 < rows) to[n][half] = *(const kv_u32x4*)(mine + n * 8 * width + step * STEP + half * 32);
    }
  };
};
// Rows of HIDDEN values, normed, into shared memory, by each block for itself. A row's squares are summed in sixteen
// shares, so that the order is one for any number of warps that share a row.
auto norm = [&](const T* from, const T* weight, float epsilon) {
  constexpr int PIECES = HIDDEN / 8, SHARES = 16;
  int sharing = WARPS;  // warps of a row
  while (sharing > 1 && sharing * rows > WARPS) sharing /= 2;
  const int own = kv_warp % sharing;
  for (int row = kv_warp / sharing; row < rows; row += WARPS / sharing) {
    const kv_u32x4* source = (const kv_u32x4*)from + row * PIECES;
    KV_ROLLED for (int first = own; first < SHARES; first += 8 * sharing) {
      float square[8];
      KV_UNROLL for (int i = 0; i < 8; ++i) square[i] = 0;
      KV_ROLLED for (int begun = kv_lane; begun < PIECES; begun += SHARES * 32) {
        kv_u32x4 eight[8];
        KV_UNROLL for (int i = 0; i < 8; ++i) {
          const int share = first + i * sharing, piece = begun + share * 32;
          eight[i] = kv_u32x4{0, 0, 0, 0};
          if (share < SHARES && piece < PIECES) eight[i] = source[piece];
        }
        KV_UNROLL for (int i = 0; i < 8; ++i) {
          const int share = first + i * sharing, piece = begun + share * 32;
          if (share < SHARES && piece < PIECES) *(kv_u32x4*)(own_x + row * X_STRIDE + piece * 8) = eight[i];
          const kv_u32 words[4] = {eight[i].x, eight[i].y, eight[i].z, eight[i].w};
          KV_UNROLL for (int j = 0; j < 4; ++j) {
            const float low = kv_value<IS_BFLOAT>(kv_u16(words[j])), high = kv_value<IS_BFLOAT>(kv_u16(words[j] >> 16));
            square[i] += low * low + high * high;
          }
        }
      }
      KV_UNROLL for (int i = 0; i < 8; ++i) {
        const float sum = kv_warp_sum(square[i]);
        if (kv_lane == 0 && first + i * sharing < SHARES) squares[row * SHARES + first + i * sharing] = sum;
      }
    }
  }
  kv_group_barrier();
  for (int row = kv_warp / sharing; row < rows; row += WARPS / sharing) {
    float square = 0;
    KV_UNROLL for (int share = 0; share < SHARES; ++share) square += squares[row * SHARES + share];
    const float factor = kv_inverse_root(square / HIDDEN + epsilon);
    for (int share = own; share < SHARES; share += sharing)
      for (int piece = share * 32 + kv_lane; piece < PIECES; piece += SHARES * 32) {
        const kv_u32x4 weights = ((const kv_u32x4*)weight)[piece];
        kv_u32x4* place = (kv_u32x4*)(own_x + row * X_STRIDE + piece * 8);
        const kv_u32x4 four = *place;
        *place = kv_paired_words(kv_normed_pair<T, IS_BFLOAT>(four.x, weights.x, factor), kv_normed_pair<T, IS_BFLOAT>(four.y, weights.y, factor),
                                 kv_normed_pair<T, IS_BFLOAT>(four.z, weights.z, factor), kv_normed_pair<T, IS_BFLOAT>(four.w, weights.w, factor));
      }
  }
  kv_group_barrier();
};

// --- queries, keys and values: a pass has 16 dimensions of a head and the 16 that they are rotated with ---
if (thread < rows) own_places[thread] = places[thread];
norm(x, norm_in, settings[1]);
KV_ROLLED for (int pass = kv_block_x; pass < passes_of(0); pass += blocks) {
  kv_multiply_pass<IS_BFLOAT, W_GROUP, WARPS, TILES, STAGES, false>(pass, HIDDEN / STEP, of_shared, begin, ring, used, sums, kv_warp, kv_lane);
  const int head = pass / PAIRS, first = pass % PAIRS * 16;
  for (int i = thread; i < rows * 16; i += THREADS) {
    const int row = i / 16, dim = first + i % 16;
    float left = total(row, i % 16), right = total(row, 16 + i % 16);
    T* to = values + row * KV_WIDTH + (head - HEADS - KV_HEADS) * DIM;
    if (head < HEADS + KV_HEADS) {
      to = head < HEADS ? queries + row * Q_WIDTH + head * DIM : keys + row * KV_WIDTH + (head - HEADS) * DIM;
      const float angle = float(own_places[row]) * frequencies[dim], cosine = kv_cosine(angle), sine = kv_sine(angle);
      const float turned = left * cosine - right * sine;
      right = left * sine + right * cosine;
      left = turned;
    }
    to[dim] = T(left);
    to[dim + DIM / 2] = T(right);
  }
}
kv_grid_barrier(counters);

// --- attention: four warps take a split of a head; those whose split the new token is in write it before ---
{
  const int part = kv_warp / PART_WARPS, warp = kv_warp % PART_WARPS;
  float* mine = room + part * (SPLIT_BYTES / 4);
  int items = 0;
  for (int row = 0; row < rows; ++row) items += (own_places[row] + SPLIT_TOKENS) / SPLIT_TOKENS * KV_HEADS;
  KV_ROLLED for (int item = kv_block_x + part * blocks; item < items && part < PARTS; item += PARTS * blocks) {
    int row = 0, rest = item;
    while (rest >= (own_places[row] + SPLIT_TOKENS) / SPLIT_TOKENS * KV_HEADS)
      rest -= (own_places[row++] + SPLIT_TOKENS) / SPLIT_TOKENS * KV_HEADS;
    const int head = rest % KV_HEADS, split = rest / KV_HEADS, place = own_places[row];
    const long page = block_table[row * splits + split];
    // Of tokens that are tried ahead, several rows' are in one page, and each is seen by those behind it.
    const bool is_in = kv_lane < rows && own_places[kv_lane % rows] >= 0 && own_places[kv_lane % rows] / SPLIT_TOKENS == split &&
                       block_table[kv_lane % rows * splits + split] == page;
    if (kv_any(is_in)) {
      KV_ROLLED for (int other = 0; other < rows; ++other) {
        if (!kv_any(is_in && kv_lane == other)) continue;
        kv_u16* units = (kv_u16*)pages + page * pages_shape[1];
        const int line = head * KV_PAGE_TOKENS + own_places[other] % KV_PAGE_TOKENS;
        KV_ROLLED for (int group = warp; group < K::GROUPS + V::GROUPS; group += PART_WARPS) {
          const int at = group - K::GROUPS, from = other * KV_WIDTH + head * DIM;
          if (group < K::GROUPS)
            kv_quantize_group<T, K, IS_BFLOAT>(keys + from, group, units + K::BASE + line * K::ROW_UNITS,
                                               units + K::SCALES + line * K::GROUPS, units + K::BIASES + line * K::GROUPS, kv_lane);
          else
            kv_quantize_group<T, V, IS_BFLOAT>(values + from, at, units + V::BASE + line * V::ROW_UNITS,
                                               units + V::SCALES + line * V::GROUPS, units + V::BIASES + line * V::GROUPS, kv_lane);
        }
      }
      kv_written();
      kv_part_barrier();
    }
    const long first_query = long(row) * HEADS + head * SHARE;
    const int stride = splits * (DIM + 4);
    kv_split_by_matrices<T, K, V, IS_BFLOAT, QUERIES / 8, PART_WARPS, SPLIT_TOKENS / PART_WARPS, TILE>(
        queries + first_query * DIM, pages + page * pages_shape[1], head, split * SPLIT_TOKENS + warp * (SPLIT_TOKENS / PART_WARPS),
        place + 1, 1, 0, SHARE, settings[0], 0, partial + first_query * stride + split * (DIM + 4), stride, warp, kv_lane, mine);
    kv_part_barrier();
    if (splits > FEW_SPLITS) continue;
    // The last of a head's splits makes its results.
    int* const is_last = (int*)squares + part;
    if (warp == 0 && kv_lane == 0) *is_last = kv_is_last(counters + 1 + row * KV_HEADS + head, place / SPLIT_TOKENS + 1);
    kv_part_barrier();
    for (int query = warp; query < SHARE && *is_last; query += PART_WARPS)
      kv_reduce_by_warp<T, DIM>(partial + (first_query + query) * stride, place / SPLIT_TOKENS + 1, attended + (first_query + query) * DIM, kv_lane);
    kv_part_barrier();
  }
  for (int i = kv_block_x * THREADS + thread; i < rows * Q_WIDTH; i += blocks * THREADS)
    if (own_places[i / Q_WIDTH] < 0) attended[i] = T(0.0f);
  if (splits > FEW_SPLITS) {
    kv_grid_barrier(counters);
    for (int query = kv_block_x; query < rows * HEADS; query += blocks) {
      if (kv_warp < 8)
        kv_reduce<T, DIM, 8, true>(partial + long(query) * splits * (DIM + 4), SPLIT_TOKENS, 0, KvSeen{0, own_places[query / HEADS]},
                                   KV_NONE, attended + query * DIM, kv_warp, kv_lane, room);
      else
        kv_group_barrier();
      kv_group_barrier();
    }
  }
}
kv_grid_barrier(counters);

// --- the product of attention, and x ---
auto add_product = [&](const T* from, int depth, const T* added, T* to) {
  KV_ROLLED for (int pass = kv_block_x; pass < HIDDEN / 32; pass += blocks) {
    kv_multiply_pass<IS_BFLOAT, W_GROUP, WARPS, TILES, STAGES, true>(pass, depth / STEP, of_global(from, depth), begin, ring, used, sums, kv_warp, kv_lane);
    for (int i = thread; i < rows * 32; i += THREADS) {
      const int at = i / 32 * HIDDEN + pass * 32 + i % 32;
      to[at] = T(total(i / 32, i % 32) + float(added[at]));
    }
  }
};
add_product(attended, Q_WIDTH, x, h);
kv_grid_barrier(counters);

// --- the gate, and the products that it opens for ---
norm(h, norm_after, settings[2]);
KV_ROLLED for (int pass = kv_block_x; pass < INNER / 16; pass += blocks) {
  kv_multiply_pass<IS_BFLOAT, W_GROUP, WARPS, TILES, STAGES, false>(pass, HIDDEN / STEP, of_shared, begin, ring, used, sums, kv_warp, kv_lane);
  for (int i = thread; i < rows * 16; i += THREADS) {
    const float gate = total(i / 16, i % 16), up = total(i / 16, 16 + i % 16);
    opened[i / 16 * INNER + pass * 16 + kv_paired(i % 16)] = T(gate / (1 + kv_exp2(gate * -KV_LOG2_E)) * up);
  }
}
kv_grid_barrier(counters);
add_product(opened, INNER, h, out);
kv_copies_done<0>();
