// As wide_rows_body.h, of codes of 4 bits in groups of 64, which become fragments in registers. A step is SPAN chunks. x lies
// in the order of a word's codes, one step ahead of its products, and beside it its sums of groups.
constexpr int ROWS = 64, OUTPUTS = 16 * HEIGHT, PART = IS_GATED ? OUTPUTS / 2 : OUTPUTS, THREADS = (HEIGHT + 3) / 4 * 128;
constexpr int STRIDE = GROUPS + 8, X_STEP = SPAN * ROWS * KV_CHUNK, STAGE = SPAN * OUTPUTS * 16, STEPS = GROUPS / SPAN;
constexpr int X_EACH = (ROWS * 8 * SPAN + THREADS - 1) / THREADS, W_EACH = (OUTPUTS * 2 * SPAN + THREADS - 1) / THREADS;
constexpr float LARGE = IS_BFLOAT ? 128 : 1024;
const kv_u32 large = IS_BFLOAT ? 0x43004300u : 0x64006400u;
const int rows = x_shape[0] * x_shape[1], thread = kv_warp * 32 + kv_lane;
const int g = kv_lane / 4, t = kv_lane % 4;
kv_u16* const unaligned = (kv_u16*)kv_shared;
kv_u16* const own_x = unaligned + (1024 - kv_shared_address(unaligned) % 1024) % 1024 / 2;
kv_u16* const ring = own_x + 2 * X_STEP;
float* const x_sums = (float*)(ring + STAGES * STAGE);
kv_u16 *const own_scales = (kv_u16*)(x_sums + 2 * SPAN * ROWS), *const own_biases = own_scales + OUTPUTS * STRIDE;
int first = kv_block_x * PART, width = widths[0];
const kv_u16 *parts[2] = {matrices[0], matrices[COUNT - 1]}, *its_scales[2] = {scales[0], scales[COUNT - 1]}, *its_biases[2] = {biases[0], biases[COUNT - 1]};
T* y = results[0];
KV_UNROLL for (int i = 1; i < COUNT && !IS_GATED; ++i) {
  if (first < width) break;
  first -= (width + PART - 1) / PART * PART;
  width = widths[i];
  parts[0] = matrices[i];
  its_scales[0] = scales[i];
  its_biases[0] = biases[i];
  y = results[i];
}
auto output_of = [&](int row) {  // behind the last one it is that one again
  const int output = first + (IS_GATED ? row / 16 * 8 + row % 8 : row);
  return output < width ? output : width - 1;
};
KV_ROLLED for (int i = thread; i < OUTPUTS * GROUPS / 8; i += THREADS) {
  const int row = i / (GROUPS / 8), piece = i % (GROUPS / 8), part = IS_GATED && row / 8 % 2;
  const long at = long(output_of(row)) * GROUPS + piece * 8;
  kv_copy16(own_scales + row * STRIDE + piece * 8, its_scales[part] + at, true);
  kv_copy16(own_biases + row * STRIDE + piece * 8, its_biases[part] + at, true);
}
const kv_u16* from[W_EACH];
KV_UNROLL for (int i = 0; i < W_EACH; ++i) {
  const int row = (i * THREADS + thread) / (2 * SPAN);
  from[i] = parts[IS_GATED && row / 8 % 2] + long(output_of(row < OUTPUTS ? row : 0)) * (GROUPS * 16) + thread % (2 * SPAN) * 8;
}
auto begin = [&](int number) {
  if (number < STEPS) KV_UNROLL for (int i = 0; i < W_EACH; ++i) {
    const int at = i * THREADS + thread;
    if (at < OUTPUTS * 2 * SPAN)
      kv_copy16(ring + number % STAGES * STAGE + kv_piece<2 * SPAN>(at / (2 * SPAN), at % (2 * SPAN)), from[i] + number * SPAN * 16, true);
  }
  kv_copies_begun();
};
kv_u32x4 pieces[X_EACH];
auto read_x = [&](int number) {
  KV_UNROLL for (int i = 0; i < X_EACH; ++i) {
    const int row = (i * THREADS + thread) / (8 * SPAN), piece = thread % (8 * SPAN);
    pieces[i] = kv_u32x4{0, 0, 0, 0};
    if (row < rows && number < STEPS) pieces[i] = *(const kv_u32x4*)((const kv_u16*)x + (long(row) * GROUPS + number * SPAN) * KV_CHUNK + piece * 8);
  }
};
auto put_x = [&](int number) {
  KV_UNROLL for (int i = 0; i < X_EACH; ++i) {
    const int row = (i * THREADS + thread) / (8 * SPAN), p = thread % 8, slot = number % 2 * SPAN + thread % (8 * SPAN) / 8;
    if (row >= ROWS) continue;
    const kv_u32x4 v = pieces[i];
    const kv_u32 words[4] = {(v.x & 0xffffu) | v.z << 16, v.x >> 16 | (v.z & 0xffff0000u), (v.y & 0xffffu) | v.w << 16, v.y >> 16 | (v.w & 0xffff0000u)};
    float sum = 0;
    KV_UNROLL for (int k = 0; k < 4; ++k) {
      ((kv_u32*)(own_x + slot * ROWS * KV_CHUNK + kv_piece_of(row, p / 4 * 4 + k)))[p % 4] = words[k];
      sum += kv_value<IS_BFLOAT>(kv_u16(words[k])) + kv_value<IS_BFLOAT>(kv_u16(words[k] >> 16));
    }
    KV_UNROLL for (int mask = 1; mask < 8; mask *= 2) sum += kv_shuffle_xor(sum, mask);
    if (p == 0) x_sums[slot * ROWS + row % 8 / 2 * 16 + row / 8 * 2 + row % 2] = sum;
  }
};
float sum[32], part[32];
KV_UNROLL for (int i = 0; i < 32; ++i) sum[i] = 0;
KV_UNROLL for (int number = 0; number < STAGES - 1; ++number) begin(number);
read_x(0);
put_x(0);
kv_copies_done<STAGES - 2>();
kv_written_for_products();
kv_group_barrier();
const int row = kv_warp * 16 < OUTPUTS ? kv_warp * 16 : 0;  // warps without outputs make the first ones again
KV_ROLLED for (int number = 0; number < STEPS; ++number) {
  read_x(number + 1);
  begin(number + STAGES - 1);
  KV_UNROLL for (int j = 0; j < SPAN; ++j) {
    const int slot = number % 2 * SPAN + j;
    kv_u32 words[4], a[4][4];
    kv_load_matrices(ring + number % STAGES * STAGE + kv_piece<2 * SPAN>(row + kv_lane % 16, j * 2 + kv_lane / 16), words);
    KV_UNROLL for (int k = 0; k < 4; ++k) KV_UNROLL for (int i = 0; i < 4; ++i)
      a[k][i] = kv_masked_or(words[k / 2 * 2 + i % 2] >> 4 * (k % 2 * 2 + i / 2), 0x000f000fu, large);
    KV_UNROLL for (int k = 0; k < 4; ++k) kv_products_own(a[k]);
    kv_products_fence();
    const kv_u64 chunk = kv_matrix(own_x + slot * ROWS * KV_CHUNK, 8192);
    kv_codes_begin<IS_BFLOAT, false>(part, a[0], chunk);
    KV_UNROLL for (int k = 1; k < 4; ++k) kv_codes_begin<IS_BFLOAT, true>(part, a[k], kv_matrix_from(chunk, k * 32));
    kv_products_begun();
    float scale[2], bias[2];
    KV_UNROLL for (int side = 0; side < 2; ++side) {
      const int at = (row + side * 8 + g) * STRIDE + number * SPAN + j;
      scale[side] = kv_value<IS_BFLOAT>(own_scales[at]);
      bias[side] = kv_fma(scale[side], -LARGE, kv_value<IS_BFLOAT>(own_biases[at]));
    }
    kv_products_done<0>();
    kv_products_own(part);
    KV_UNROLL for (int two = 0; two < 4; ++two) {
      const kv_floats4 four = *(const kv_floats4*)(x_sums + slot * ROWS + t * 16 + two * 4);
      const float x_sum[4] = {four.x, four.y, four.z, four.w};
      KV_UNROLL for (int i = 0; i < 8; ++i)
        sum[two * 8 + i] = kv_fma(scale[i / 2 % 2], part[two * 8 + i], kv_fma(bias[i / 2 % 2], x_sum[i / 4 * 2 + i % 2], sum[two * 8 + i]));
    }
  }
  put_x(number + 1);
  kv_copies_done<STAGES - 2>();
  kv_written_for_products();
  kv_group_barrier();
}
kv_write_wide<IS_GATED, ADDS>(sum, rows, kv_warp * 16, OUTPUTS, first, width, y, added, kv_lane);
