// A cluster makes 64 * HEIGHT outputs of up to 64 rows at a time, of one of COUNT matrices, or half of them of a gate and
// half of what it opens for, and goes on to its next tile. X_CHUNKS: chunks of x that a block keeps; 0: they come again.
using At = KvRing<HEIGHT, STAGES, X_CHUNKS, SUMS>;
constexpr int OUTPUTS = 64 * HEIGHT, PART = IS_GATED ? OUTPUTS / 2 : OUTPUTS;
const int depth = x_shape[2], rows = x_shape[0] * x_shape[1];
const int rank = kv_cluster_rank(), clusters = kv_blocks_x / KV_RANKS, thread = kv_warp % 4 * 32 + kv_lane;
const int all_chunks = (depth + KV_CHUNK - 1) / KV_CHUNK, chunks = (all_chunks - rank + KV_RANKS - 1) / KV_RANKS;
kv_u16* const unaligned = (kv_u16*)kv_shared;
kv_u16* const shared = unaligned + (1024 - kv_shared_address(unaligned) % 1024) % 1024 / 2;
kv_u64 *const full = (kv_u64*)(shared + At::BARRIERS), *const empty = full + STAGES;
kv_u64 *const summed = empty + STAGES, *const taken = summed + SUMS;
int tiles = 0;
KV_UNROLL for (int i = 0; i < (IS_GATED ? 1 : COUNT); ++i) tiles += (widths[i] + PART - 1) / PART;
auto outputs_of = [&](int tile) {
  KvTileOutputs<T> found = {{matrices[0], matrices[COUNT - 1]}, results[0], widths[0], tile * PART};
  KV_UNROLL for (int i = 1; i < COUNT && !IS_GATED; ++i) {
    if (found.first < found.width) break;
    found.first -= (found.width + PART - 1) / PART * PART;
    found.width = widths[i];
    found.parts[0] = matrices[i];
    found.y = results[i];
  }
  return found;
};
if (threadIdx.x == 0) {
  KV_UNROLL for (int i = 0; i < STAGES; ++i) {
    kv_barrier_init(full + i, 128);
    kv_barrier_init(empty + i, 4);
  }
  KV_UNROLL for (int i = 0; i < SUMS; ++i) {
    kv_barrier_init(summed + i, 1);
    kv_barrier_init(taken + i, KV_RANKS);
    kv_barrier_expect(summed + i, At::SUM * 2);
  }
}
kv_cluster_barrier();
if (kv_warp < 4) {  // multiplies
  int stage = 0, parity = 0, slot = 0, sent = 1;
  KV_ROLLED for (int tile = kv_block_x / KV_RANKS; tile < tiles; tile += clusters) {
    float sum[HEIGHT][32];
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int i = 0; i < 32; ++i) sum[h][i] = 0;
    auto release = [&](int used) {
      kv_warp_barrier();
      if (kv_lane == 0) kv_barrier_arrive(empty + used);
    };
    int used = 0;
    KV_ROLLED for (int number = 0; number < chunks; ++number) {
      kv_barrier_wait(full + stage, parity);
      kv_written_for_products();
      KV_UNROLL for (int h = 0; h < HEIGHT; ++h) kv_products_own(sum[h]);
      kv_products_fence();
      const kv_u64 w = kv_matrix(shared + At::W + stage * At::W_STAGE, 8192);
      const kv_u64 x_chunk = kv_matrix(shared + (X_CHUNKS ? number : stage) * KV_CHUNK_UNITS, 8192);
      KV_UNROLL for (int k = 0; k < 4; ++k) KV_UNROLL for (int h = 0; h < HEIGHT; ++h)
        kv_scores_begin<IS_BFLOAT, true>(sum[h], kv_matrix_from(w, h * KV_CHUNK_UNITS * 2 + k * 32), kv_matrix_from(x_chunk, k * 32));
      kv_products_begun();
      if (number) {
        kv_products_done<1>();
        release(used);
      }
      used = stage;
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    kv_products_done<0>();
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) kv_products_own(sum[h]);
    if (chunks) release(used);
    kv_cluster_wait(taken + slot, sent);
    float* to = (float*)(shared + At::SUMMED + slot * At::SUM) + rank * HEIGHT * 1024 + thread * 4;
    KV_UNROLL for (int other = 0; other < KV_RANKS; ++other) KV_UNROLL for (int h = 0; h < HEIGHT; ++h)
      KV_UNROLL for (int n = 0; n < 2; ++n) kv_send(to + (h * 2 + n) * 512, sum[h] + (other * 2 + n) * 4, summed + slot, other);
    if (++slot == SUMS) {
      slot = 0;
      sent ^= 1;
    }
  }
} else if (kv_warp < 8) {  // copies
  const int piece = thread % 8;
  int stage = 0, parity = 1;
  KV_ROLLED for (int tile = kv_block_x / KV_RANKS; tile < tiles; tile += clusters) {
    const KvTileOutputs<T> mine = outputs_of(tile);
    const bool needs_x = !X_CHUNKS || tile < clusters;
    const kv_u16* from[4 * HEIGHT];
    bool is_row[4 * HEIGHT];
    KV_UNROLL for (int j = 0; j < 4 * HEIGHT; ++j) {
      const int row = j * 16 + thread / 8, part = IS_GATED ? row / 8 % 2 : 0;
      const int output = mine.first + (IS_GATED ? j * 8 + row % 8 : row);
      is_row[j] = output < mine.width;
      from[j] = (part ? mine.parts[1] : mine.parts[0]) + (is_row[j] ? long(output) * depth : 0);
    }
    KV_ROLLED for (int number = 0; number < chunks; ++number) {
      const int input = (number * KV_RANKS + rank) * KV_CHUNK + piece * 8;
      const bool is_input = input < depth;
      kv_barrier_wait(empty + stage, parity);
      kv_u16* to = shared + At::W + stage * At::W_STAGE;
      KV_UNROLL for (int j = 0; j < 4 * HEIGHT; ++j)
        kv_copy16(kv_piece_of(to, j * 16 + thread / 8, piece), from[j] + (is_input ? input : 0), is_row[j] && is_input);
      if (needs_x) {
        to = shared + (X_CHUNKS ? number : stage) * KV_CHUNK_UNITS;
        KV_UNROLL for (int j = 0; j < 4; ++j) {
          const int row = j * 16 + thread / 8;
          const bool is_read = row < rows && is_input;
          kv_copy16(kv_piece_of(to, row, piece), (const kv_u16*)x + (is_read ? long(row) * depth + input : 0), is_read);
        }
      }
      kv_copies_arrive(full + stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
} else {  // makes results of 16 rows
  int slot = 0, parity = 0;
  const int warp = kv_warp % 4, g = kv_lane / 4, t = kv_lane % 4;
  KV_ROLLED for (int tile = kv_block_x / KV_RANKS; tile < tiles; tile += clusters) {
    const KvTileOutputs<T> mine = outputs_of(tile);
    kv_cluster_wait(summed + slot, parity);
    const kv_floats4* sums = (const kv_floats4*)(shared + At::SUMMED + slot * At::SUM) + thread;
    float total[HEIGHT][2][4];
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < 2; ++n) {
      KV_UNROLL for (int j = 0; j < 4; ++j) total[h][n][j] = 0;
      KV_UNROLL for (int from = 0; from < KV_RANKS; ++from) {
        const kv_floats4 part = sums[((from * HEIGHT + h) * 2 + n) * 128];
        const float four[4] = {part.x, part.y, part.z, part.w};
        KV_UNROLL for (int j = 0; j < 4; ++j) total[h][n][j] += four[j];
      }
    }
    kv_threads_barrier(1, 128);
    if (thread == 0) kv_barrier_expect(summed + slot, At::SUM * 2);
    if (thread < KV_RANKS) kv_barrier_arrive_at(taken + slot, thread);
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < 2; ++n) KV_UNROLL for (int j = 0; j < (IS_GATED ? 2 : 4); ++j) {
      const int row = rank * 16 + n * 8 + 2 * t + j % 2;
      const int output = mine.first + (IS_GATED ? (h * 4 + warp) * 8 + g : h * 64 + warp * 16 + j / 2 * 8 + g);
      if (row >= rows || output >= mine.width) continue;
      float one = float(T(total[h][n][j]));
      const long place = long(row) * mine.width + output;
      if (IS_GATED) one = one / (1 + kv_exp2(one * -KV_LOG2_E)) * float(T(total[h][n][2 + j % 2]));
      mine.y[place] = T(ADDS ? one + float(added[place]) : one);
    }
    if (++slot == SUMS) {
      slot = 0;
      parity ^= 1;
    }
  }
}
kv_cluster_barrier();
