// One layer for one new token of each of up to 16 sequences: x, normed, gives queries, keys and values, rotated; new keys
// and values join their pages; attention, its product and x give h; h, normed, opens and is opened for; the last product
// and h are the result.

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
    to[n][half] = *(const kv_u32x4*)(own_x + row * X_STRIDE + step * STEP + kv_warp * 64 + half * 32 + kv_lane % 4 * 8);
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
// A norm's weights come near before it begins, and behind their reads some stages of matrices.
constexpr int NORM_PIECES = HIDDEN / 8, NORM_EACH = (NORM_PIECES + THREADS - 1) / THREADS;
auto bring = [&](const T* weights, int stages) {
  kv_u32x4 mine[NORM_EACH];
  KV_UNROLL for (int i = 0; i < NORM_EACH; ++i)
    if (i * THREADS + thread < NORM_PIECES) mine[i] = ((const kv_u32x4*)weights)[i * THREADS + thread];
  KV_ROLLED for (int i = 0; i < stages; ++i) begin();
  KV_UNROLL for (int i = 0; i < NORM_EACH; ++i)
    if (i * THREADS + thread < NORM_PIECES) near_norm[i * THREADS + thread] = mine[i];
};
// Rows of HIDDEN values, normed, into shared memory, by each block for itself. A row's squares are summed in sixteen
// shares, so that the order is one for any number of warps that share a row.
auto norm = [&](const T* from, float epsilon) {
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
        const kv_u32x4 weights = near_norm[piece];
        kv_u32x4* place = (kv_u32x4*)(own_x + row * X_STRIDE + piece * 8);
        const kv_u32x4 four = *place;
        *place = kv_eight<IS_PAIRED>(kv_normed_pair<IS_BFLOAT>(four.x, weights.x, factor), kv_normed_pair<IS_BFLOAT>(four.y, weights.y, factor),
                                     kv_normed_pair<IS_BFLOAT>(four.z, weights.z, factor), kv_normed_pair<IS_BFLOAT>(four.w, weights.w, factor));
      }
  }
  KV_ROLLED for (int i = rows * PIECES + thread; i < ROWS * PIECES; i += THREADS)
    *(kv_u32x4*)(own_x + i / PIECES * X_STRIDE + i % PIECES * 8) = kv_u32x4{0, 0, 0, 0};
  kv_group_barrier();
};

// --- queries, keys and values: a pass has some dimensions of a head and those that they are rotated with ---
auto turn_heads = [&](int pass) {
  kv_multiply_pass<IS_BFLOAT, W_GROUP, TURNED, WARPS, TILES, STAGES, false>(first_step(0, pass), steps_of(0), of_shared, begin, ring, used, sums, kv_warp, kv_lane);
  constexpr int PAIRS = DIM / 2 / TURNED;
  const int head = pass / PAIRS, first = pass % PAIRS * TURNED;
  KV_ROLLED for (int i = thread; i < rows * TURNED; i += THREADS) {
    const int row = i / TURNED, dim = first + i % TURNED;
    float left = total(row, i % TURNED), right = total(row, TURNED + i % TURNED);
    T* to = values + row * KV_WIDTH + (head - HEADS - KV_HEADS) * DIM;
    if (head < HEADS + KV_HEADS) {
      to = head < HEADS ? queries + row * Q_WIDTH + head * DIM : keys + row * KV_WIDTH + (head - HEADS) * DIM;
      const KvTurn turn = turns[row * (DIM / 2) + dim];
      const float turned = left * turn.cosine - right * turn.sine;
      right = left * turn.sine + right * turn.cosine;
      left = turned;
    }
    to[dim] = T(left);
    to[dim + DIM / 2] = T(right);
  }
};

// --- attention: some warps take a split of a head; those whose split the new token is in write it before ---
auto attend = [&]() {
  const int part = kv_warp / PART_WARPS, warp = kv_warp % PART_WARPS;
  float* mine = room + part * (SPLIT_BYTES / 4);
  // Last splits come first: their rows are written, which takes as long as they, while other parts compute.
  auto splits_of = [&](int row, bool are_whole) { return are_whole ? own_places[row] / SPLIT_TOKENS : int(own_places[row] >= 0); };
  int wholes = 0, lasts = 0;
  for (int row = 0; row < rows; ++row) wholes += splits_of(row, true), lasts += splits_of(row, false);
  const int items = (wholes + lasts) * KV_HEADS;
  KV_ROLLED for (int item = kv_block_x + part * blocks; item < items && part < PARTS; item += PARTS * blocks) {
    const bool is_whole = item >= lasts * KV_HEADS;
    int row = 0, split = item / KV_HEADS - (is_whole ? lasts : 0);
    while (split >= splits_of(row, is_whole)) split -= splits_of(row++, is_whole);
    const int head = item % KV_HEADS, place = own_places[row];
    if (!is_whole) split = place / SPLIT_TOKENS;
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
      kv_part_barrier<PART_WARPS>();
    }
    const long first_query = long(row) * HEADS + head * SHARE;
    const int stride = splits * (DIM + 4);
    kv_split_by_matrices<T, K, V, IS_BFLOAT, QUERIES, PART_WARPS, SPLIT_TOKENS / PART_WARPS, TILE>(
        queries + first_query * DIM, pages + page * pages_shape[1], head, split * SPLIT_TOKENS + warp * (SPLIT_TOKENS / PART_WARPS),
        place + 1, 1, 0, SHARE, settings[0], 0, partial + first_query * stride + split * (DIM + 4), stride, warp, kv_lane, mine);
    kv_part_barrier<PART_WARPS>();
  }
  // Each eight warps make a query's results, all at once: the last of a head's splits would take longer alone.
  kv_grid_barrier(counters);
  KV_ROLLED for (int query = kv_block_x + kv_warp / 8 * blocks; query < rows * HEADS; query += WARPS / 8 * blocks) {
    kv_reduce<T, DIM, 8, IS_PAIRED>(partial + long(query) * splits * (DIM + 4), SPLIT_TOKENS, 0, KvSeen{0, own_places[query / HEADS]},
                                    KV_NONE, attended + query * DIM, kv_warp % 8, kv_lane, room + kv_warp / 8 * 8 * (DIM + 4));
    kv_part_barrier<8>();
  }
};

// --- the gate, and the products that it opens for ---
auto open = [&](int pass) {
  kv_multiply_pass<IS_BFLOAT, W_GROUP, OPENED, WARPS, TILES, STAGES, false>(first_step(2, pass), steps_of(2), of_shared, begin, ring, used, sums, kv_warp, kv_lane);
  KV_ROLLED for (int i = thread; i < rows * OPENED; i += THREADS) {
    const float gate = total(i / OPENED, i % OPENED), up = total(i / OPENED, OPENED + i % OPENED);
    const int input = pass * OPENED + (IS_PAIRED ? kv_paired(i % OPENED) : i % OPENED);
    opened[i / OPENED * INNER + input] = T(gate / (1 + kv_exp2(gate * -KV_LOG2_E)) * up);
  }
};

// --- the products of attention, and of what was opened, and the rows before it ---
auto add_product = [&](int phase, int pass, const T* from, int depth, const T* added, T* to) {
  constexpr int EACH = 2 * ADDED;
  kv_multiply_pass<IS_BFLOAT, W_GROUP, ADDED, WARPS, TILES, STAGES, true>(first_step(phase, pass), steps_of(phase), of_global(from, depth), begin, ring, used, sums, kv_warp, kv_lane);
  KV_ROLLED for (int i = thread; i < rows * EACH; i += THREADS) {
    const int at = i / EACH * HIDDEN + pass * EACH + i % EACH;
    to[at] = T(total(i / EACH, i % EACH) + float(added[at]));
  }
};

if (thread < rows) own_places[thread] = places[thread];
// Cosines and sines of all rows, which many passes take.
constexpr int TURNS_EACH = (ROWS * DIM / 2 + THREADS - 1) / THREADS;
float angles[TURNS_EACH];
KV_UNROLL for (int e = 0; e < TURNS_EACH; ++e) {
  const int i = e * THREADS + thread;
  angles[e] = i < rows * (DIM / 2) ? float(places[i / (DIM / 2)]) * frequencies[i % (DIM / 2)] : 0.0f;
}
bring(norm_in, FIRST_STAGES);  // copies of all would keep the norm from the rows that it reads
KV_UNROLL for (int e = 0; e < TURNS_EACH; ++e)
  if (e * THREADS + thread < rows * (DIM / 2)) turns[e * THREADS + thread] = KvTurn{kv_cosine(angles[e]), kv_sine(angles[e])};
_Pragma("unroll (UNROLLED)") for (int half = 0; half < 2; ++half) {
  norm(half ? h : x, settings[1 + half]);
  if (half == 0) {
    KV_ROLLED for (int i = FIRST_STAGES; i < AHEAD; ++i) begin();
    bring(norm_after, 0);
  }
  KV_ROLLED for (int pass = kv_block_x; pass < passes_of(2 * half); pass += blocks) {
    if (half == 0)
      turn_heads(pass);
    else
      open(pass);
  }
  kv_grid_barrier(counters);
  if (half == 0) {
    attend();
    kv_grid_barrier(counters);
  }
  KV_ROLLED for (int pass = kv_block_x; pass < passes_of(2 * half + 1); pass += blocks)
    add_product(2 * half + 1, pass, half ? opened : attended, half ? INNER : Q_WIDTH, half ? h : x, half ? out : h);
  if (half == 0) kv_grid_barrier(counters);
}
kv_copies_done<0>();
