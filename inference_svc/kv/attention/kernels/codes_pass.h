// Products of a pass with weights of 4 bits, in stages of 32 outputs that all warps wait for.
KV_CONST int KV_SLICE = 528;    // units of a warp's 64 inputs of 32 outputs, and 16 more: so that neighbours' banks differ

// sum += 64 inputs of 16 HEIGHT outputs, codes of 4 bits, times x: a lane has 16 bytes of each half of rows of x, paired.
// Scales and biases: those of the outputs, STRIDE apart. As kv_multiply_codes.
template <bool IS_BFLOAT, int GROUP, int STRIDE, int TILES, int HEIGHT>
KV_FN void kv_multiply_slice(const kv_u16* w, const kv_u32x4 (*x)[2], const kv_u16* scales, const kv_u16* biases,
                             float (*sum)[TILES][4], int lane) {
  constexpr int HALVES = GROUP == 32 ? 1 : 2;  // that a scale is for
  constexpr float LARGE = IS_BFLOAT ? 128 : 1024;
  const kv_u32 large = IS_BFLOAT ? 0x43004300u : 0x64006400u, one = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;
  const kv_u32 ones[4] = {one, one, one, one};
  const int g = lane / 4;
  kv_u32 words[HEIGHT][4];
  KV_UNROLL for (int h = 0; h < HEIGHT; ++h) kv_load_matrices(w + kv_piece<2>(h * 16 + lane % 16, lane / 16), words[h]);
  KV_UNROLL for (int first = 0; first < 2; first += HALVES) {
    kv_u32 b[HALVES][TILES][4];
    float x_sum[TILES][4];
    KV_UNROLL for (int n = 0; n < TILES; ++n) {
      KV_UNROLL for (int j = 0; j < 4; ++j) x_sum[n][j] = 0;
      KV_UNROLL for (int half = 0; half < HALVES; ++half) {
        const kv_u32x4 v = x[n][first + half];
        b[half][n][0] = v.x;
        b[half][n][1] = v.y;
        b[half][n][2] = v.z;
        b[half][n][3] = v.w;
        kv_mma<IS_BFLOAT>(x_sum[n], ones, b[half][n]);
        kv_mma<IS_BFLOAT>(x_sum[n], ones, b[half][n] + 2);
      }
    }
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) {
      float part[TILES][4];
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) part[n][j] = 0;
      KV_UNROLL for (int half = 0; half < HALVES; ++half) KV_UNROLL for (int step = 0; step < 2; ++step) {
        kv_u32 a[4];
        KV_UNROLL for (int j = 0; j < 4; ++j)
          a[j] = kv_masked_or(words[h][(first + half) * 2 + j % 2] >> 4 * (step * 2 + j / 2), 0x000f000fu, large);
        KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<IS_BFLOAT>(part[n], a, b[half][n] + step * 2);
      }
      KV_UNROLL for (int side = 0; side < 2; ++side) {
        const int at = (h * 16 + side * 8 + g) * STRIDE + first;
        const float scale = kv_value<IS_BFLOAT>(scales[at]);
        const float bias = kv_value<IS_BFLOAT>(biases[at]) - scale * LARGE;
        KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = side * 2; j < side * 2 + 2; ++j)
          sum[h][n][j] = kv_fma(scale, part[n][j], kv_fma(bias, x_sum[n][j], sum[h][n][j]));
      }
    }
  }
}

// Of a stage: codes of 32 outputs, 64 inputs for each warp, then scales, then biases.
template <int GROUP, int WARPS>
KV_FN constexpr int kv_stage_units() {
  return WARPS * KV_SLICE + 2 * 32 * (WARPS * 64 / GROUP);
}

// 2 HALF outputs of all rows in `sums`, by warp: stages that are on their way come one after the other from `used` on, and
// `begin` sends another. `x_at` gives a lane its part of a step's inputs; IS_AHEAD: a step ahead, as that takes long. Of
// 16 outputs a stage has two steps, whose products are summed apart.
template <bool IS_BFLOAT, int GROUP, int HALF, int WARPS, int TILES, int STAGES, bool IS_AHEAD, typename X, typename Begin>
KV_FN void kv_multiply_pass(int at, int steps, const X& x_at, Begin& begin, const kv_u16* ring, int& used, float* sums,
                            int warp, int lane) {
  constexpr int STAGE = kv_stage_units<GROUP, WARPS>(), SCALES = WARPS * 64 / GROUP, ROWS = 8 * TILES;
  float sum[2][TILES][4];
  KV_UNROLL for (int i = 0; i < 2; ++i) KV_UNROLL for (int n = 0; n < TILES; ++n)
    KV_UNROLL for (int j = 0; j < 4; ++j) sum[i][n][j] = 0;
  kv_u32x4 now[TILES][2], next[TILES][2];
  if (IS_AHEAD) x_at(at, next);
  KV_ROLLED for (int step = 0; step < steps; ++step) {
    const int behind = at + 1 == steps ? 0 : at + 1;
    if (IS_AHEAD) {
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int half = 0; half < 2; ++half) now[n][half] = next[n][half];
      if (step + 1 < steps) x_at(behind, next);
    } else if (HALF == 16) {
      x_at(at, now);
    }
    kv_copies_done<STAGES - 2>();
    kv_group_barrier();
    begin();
    const kv_u16 *own = ring + used + warp * KV_SLICE, *scales = ring + used + WARPS * KV_SLICE + warp * 64 / GROUP;
    if (HALF == 16) {
      kv_multiply_slice<IS_BFLOAT, GROUP, SCALES, TILES, 2>(own, now, scales, scales + 32 * SCALES, sum, lane);
    } else {
      KV_UNROLL for (int i = 0; i < 2; ++i) {
        x_at(2 * at + i, now);
        kv_multiply_slice<IS_BFLOAT, GROUP, SCALES, TILES, 1>(own + i * 16 * 16, now, scales + i * 16 * SCALES, scales + (32 + i * 16) * SCALES, sum + i, lane);
      }
    }
    used = used == (STAGES - 1) * STAGE ? 0 : used + STAGE;
    at = behind;
  }
  const int g = lane / 4, t = lane % 4;
  KV_UNROLL for (int i = 0; i < HALF / 8; ++i) KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j)
    sums[(warp * ROWS + n * 8 + 2 * t + j % 2) * KV_SUM_STRIDE + i * 16 + j / 2 * 8 + g] = HALF == 16 ? sum[i][n][j] : sum[0][n][j] + sum[1][n][j];
  kv_group_barrier();
}
