// Products of a pass with weights of 16 bits, in stages of 16 outputs' 64 inputs, which are one warp's.
KV_CONST int KV_VALUES_STAGE = 16 * 64;  // units

// Where 16-byte piece `piece` of row `row` of a stage lies: lanes read two rows' halves at once, from different banks.
KV_FN int kv_values_place(int row, int piece) { return row * 64 + (piece ^ (row & 1) << 2) * 8; }

// sum += a stage times x: a lane has 16 bytes of each half of rows of x.
template <bool IS_BFLOAT, int TILES>
KV_FN void kv_multiply_stage(const kv_u16* w, const kv_u32x4 (*x)[2], float (*sum)[4], int lane) {
  KV_UNROLL for (int half = 0; half < 2; ++half) {
    const kv_u32x4 low = *(const kv_u32x4*)(w + kv_values_place(lane / 4, half * 4 + lane % 4));
    const kv_u32x4 high = *(const kv_u32x4*)(w + kv_values_place(lane / 4 + 8, half * 4 + lane % 4));
    const kv_u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
    KV_UNROLL for (int n = 0; n < TILES; ++n) {
      const kv_u32 b[4] = {x[n][half].x, x[n][half].y, x[n][half].z, x[n][half].w};
      kv_mma<IS_BFLOAT>(sum[n], first, b);
      kv_mma<IS_BFLOAT>(sum[n], second, b + 2);
    }
  }
}

// HALF outputs and HALF others of all rows in `sums`, by warp: stages that are on their way come one after the other from
// `used` on, and `begin` sends another. `x_at` gives a lane its part of a step's inputs; IS_AHEAD: a step ahead, as that
// takes long.
template <bool IS_BFLOAT, int GROUP, int HALF, int WARPS, int TILES, int STAGES, bool IS_AHEAD, typename X, typename Begin>
KV_FN void kv_multiply_pass(int at, int steps, const X& x_at, Begin& begin, const kv_u16* ring, int& used, float* sums,
                              int warp, int lane) {
  constexpr int HEIGHT = HALF / 8, ROWS = 8 * TILES;
  float sum[HEIGHT][TILES][4];
  KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
    KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
  kv_u32x4 now[TILES][2], next[TILES][2];
  if (IS_AHEAD) x_at(at, next);
  KV_ROLLED for (int step = 0; step < steps; ++step) {
    const int behind = at + 1 == steps ? 0 : at + 1;
    if (IS_AHEAD) {
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) now[n][half] = next[n][half];
      if (step + 1 < steps) x_at(behind, next);
    } else {
      x_at(at, now);
    }
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
    sums[(warp * ROWS + n * 8 + 2 * t + j % 2) * KV_SUM_STRIDE + h * 8 + j / 2 * HALF + g] = sum[h][n][j];
  kv_group_barrier();
}
