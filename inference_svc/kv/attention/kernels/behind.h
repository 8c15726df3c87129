// What a layer computes behind its attention in one launch, whose blocks are all there at once: weights of the next product
// are on their way while a step waits for the one before.

// A row, normed by four warps, in the order of MLX's sums.
template <bool IS_BFLOAT, int WIDTH, typename T>
KV_FN void kv_norm_row(const T* from, const T* weights, T* to, float epsilon, float* shared, int warp, int lane) {
  constexpr int PIECES = WIDTH / 8, EACH = (PIECES + 127) / 128;
  kv_u32x4 eight[EACH];
  const int first = warp * 32 + lane;
  float square = 0;
  KV_UNROLL for (int i = 0; i < EACH; ++i) {
    eight[i] = kv_u32x4{0, 0, 0, 0};
    if (warp < 4 && i * 128 + first < PIECES) eight[i] = ((const kv_u32x4*)from)[i * 128 + first];
  }
  KV_UNROLL for (int i = 0; i < EACH; ++i) {
    const kv_u32 words[4] = {eight[i].x, eight[i].y, eight[i].z, eight[i].w};
    KV_UNROLL for (int j = 0; j < 4; ++j) {
      const float low = kv_value<IS_BFLOAT>(kv_u16(words[j])), high = kv_value<IS_BFLOAT>(kv_u16(words[j] >> 16));
      square = kv_fma(high, high, kv_fma(low, low, square));
    }
  }
  square = kv_warp_sum(square);
  if (lane == 0 && warp < 4) shared[warp] = square;
  kv_group_barrier();
  const float total = kv_warp_sum(lane < 4 ? shared[lane] : 0.0f);
  const float factor = kv_inverse_root(total / WIDTH + epsilon);
  KV_UNROLL for (int i = 0; i < EACH; ++i) {
    if (warp >= 4 || i * 128 + first >= PIECES) continue;
    const kv_u32x4 w = ((const kv_u32x4*)weights)[i * 128 + first];
    ((kv_u32x4*)to)[i * 128 + first] =
        kv_u32x4{kv_normed_pair<IS_BFLOAT>(eight[i].x, w.x, factor), kv_normed_pair<IS_BFLOAT>(eight[i].y, w.y, factor),
                 kv_normed_pair<IS_BFLOAT>(eight[i].z, w.z, factor), kv_normed_pair<IS_BFLOAT>(eight[i].w, w.w, factor)};
  }
}

// Of each pass 16 outputs and 16 others of all rows, in `sums` by warp, which `finish` takes. Blocks take passes in
// turn; those that run side by side begin at different inputs, so that they read all channels of memory.
template <bool IS_BFLOAT, int WARPS, int TILES, int STAGES, typename T, typename Begin, typename Finish>
KV_FN void kv_multiply_all(const T* x, int rows, int depth, int passes, int block, int blocks, Begin& begin, const kv_u16* ring,
                     int& used, float* sums, const Finish& finish, int warp, int lane) {
  constexpr int HEIGHT = 2, ROWS = 8 * TILES, STEP = 64 * WARPS;
  const int steps = depth / STEP;
  const kv_u16* const mine = (const kv_u16*)x + lane / 4 * depth + warp * 64 + lane % 4 * 8;
  auto x_at = [&](int step, kv_u32x4 (*to)[2]) {
    KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) {
      to[n][half] = kv_u32x4{0, 0, 0, 0};
      if (n * 8 + lane / 4 < rows) to[n][half] = *(const kv_u32x4*)(mine + n * 8 * depth + step * STEP + half * 32);
    }
  };
  kv_u32x4 now[TILES][2], next[TILES][2];
  int at = block % steps;
  if (block < passes) x_at(at, next);
  KV_ROLLED for (int pass = block; pass < passes; pass += blocks) {
    float sum[HEIGHT][TILES][4];
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
      KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
    const int first_behind = (pass + blocks) % steps;
    KV_ROLLED for (int step = 0; step < steps; ++step) {
      const bool is_last = step + 1 == steps;
      const int behind = is_last ? first_behind : at + 1 == steps ? 0 : at + 1;
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) now[n][half] = next[n][half];
      if (!is_last || pass + blocks < passes) x_at(behind, next);
      KV_UNROLL for (int h = 0; h < HEIGHT; ++h) {
        kv_copies_done<STAGES - 1>();
        kv_multiply_stage<IS_BFLOAT, TILES>(ring + used, now, sum[h], lane);
        kv_warp_barrier();
        begin();
        used = used == (STAGES - 1) * KV_VALUES_STAGE ? 0 : used + KV_VALUES_STAGE;
      }
      at = behind;
    }
    const int g = lane / 4, t = lane % 4;
    kv_group_barrier();  // the sums of the pass before are read
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j)
      sums[(warp * ROWS + n * 8 + 2 * t + j % 2) * KV_SUM_STRIDE + h * 8 + j / 2 * 16 + g] = sum[h][n][j];
    kv_group_barrier();
    finish(pass);
  }
}
