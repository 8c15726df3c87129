// A block makes 16 * HEIGHT outputs of up to 8 * TILES rows, of one of COUNT matrices of 16 or 4 bits, or half of them of
// a gate and half of what it opens for. Its warps share the chunks; their sums become one in order.
constexpr int OUTPUTS = 16 * HEIGHT, PARTS = IS_GATED ? 2 : 1, PART = OUTPUTS / PARTS, ROWS = 8 * TILES;
constexpr int PIECES = BITS / 2, W_STAGE = OUTPUTS * PIECES * 8, STAGE = W_STAGE + ROWS * KV_CHUNK;
const int depth = x_shape[2], rows = x_shape[0] * x_shape[1];
int first_output = kv_block_x * PART, width = widths[0];
const kv_u16 *my_w = matrices[0], *my_scales = scales[0], *my_biases = biases[0];
T* y = results[0];
KV_UNROLL for (int i = 1; i < COUNT && !IS_GATED; ++i) {
  if (first_output < width) break;
  first_output -= (width + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
  width = widths[i];
  my_w = matrices[i];
  my_scales = scales[i];
  my_biases = biases[i];
  y = results[i];
}
const int width_in_pieces = depth / KV_CHUNK * PIECES + depth % KV_CHUNK / 8;
const int output_count = width - first_output < PART ? width - first_output : PART;
const long first_unit = long(first_output) * width_in_pieces * 8, first_scale = long(first_output) * GROUPS;
const kv_u16* const my_parts[] = {my_w, matrices[COUNT - 1]};
const kv_u16* all_x = (const kv_u16*)x;
kv_u16* ring = (kv_u16*)kv_shared + kv_warp * STAGES * STAGE;
float sum[HEIGHT][TILES][4];
KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
  KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
// Chunk `number` of this warp, whose stage was multiplied STAGES chunks ago. Beyond the depth it is nothing.
auto begin = [&](int number) {
  const int chunk = number * WARPS + kv_warp;
  kv_u16* stage = ring + number % STAGES * STAGE;
  if (chunk * KV_CHUNK < depth) {
    KV_UNROLL for (int part = 0; part < PARTS; ++part)
      kv_begin_rows<PART, PIECES>(stage + part * PART * PIECES * 8, my_parts[part] + first_unit, output_count, width_in_pieces, chunk * PIECES, kv_lane);
    kv_begin_rows<ROWS, 8>(stage + W_STAGE, all_x, rows, depth / 8, chunk * 8, kv_lane);
  }
  kv_copies_begun();
};
constexpr int STRIDE = GROUPS + 8;
kv_u16 *const my_own_scales = (kv_u16*)kv_shared + WARPS * STAGES * STAGE, *const my_own_biases = my_own_scales + OUTPUTS * STRIDE;
if (BITS == 4) {
  const kv_u16 *const part_scales[] = {my_scales, scales[COUNT - 1]}, *const part_biases[] = {my_biases, biases[COUNT - 1]};
  KV_UNROLL for (int part = 0; part < PARTS; ++part) {
    const int first = part * PART * STRIDE, worker = kv_warp * 32 + kv_lane;
    kv_begin_scales(my_own_scales + first, part_scales[part] + first_scale, output_count, GROUPS, STRIDE, worker, WARPS * 32);
    kv_begin_scales(my_own_biases + first, part_biases[part] + first_scale, output_count, GROUPS, STRIDE, worker, WARPS * 32);
  }
  kv_copies_begun();
}
KV_UNROLL for (int number = 0; number < STAGES - 1; ++number) begin(number);
if (BITS == 4) {
  kv_copies_done<STAGES - 1>();
  kv_group_barrier();
}
KV_ROLLED for (int number = 0; (number * WARPS + kv_warp) * KV_CHUNK < depth; ++number) {
  kv_copies_done<STAGES - 2>();
  begin(number + STAGES - 1);
  const kv_u16* stage = ring + number % STAGES * STAGE;
  const int group = (number * WARPS + kv_warp) * KV_CHUNK / GROUP;
  if constexpr (BITS == 4)
    kv_multiply_codes<IS_BFLOAT, GROUP, HEIGHT, TILES>(stage, stage + W_STAGE, my_own_scales + group, my_own_biases + group, STRIDE, sum, kv_lane);
  else
    kv_multiply_chunk<IS_BFLOAT, HEIGHT, TILES>(stage, stage + W_STAGE, sum, kv_lane);
}
kv_copies_done<0>();
kv_group_barrier();
const int g = kv_lane / 4, t = kv_lane % 4;
KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j)
  kv_shared[(kv_warp * ROWS + n * 8 + 2 * t + j % 2) * OUTPUTS + h * 16 + j / 2 * 8 + g] = sum[h][n][j];
kv_group_barrier();
for (int i = kv_warp * 32 + kv_lane; i < rows * PART; i += WARPS * 32) {
  if (i % PART >= output_count) continue;
  float total[PARTS];
  KV_UNROLL for (int part = 0; part < PARTS; ++part) {
    total[part] = 0;
    KV_UNROLL for (int warp = 0; warp < WARPS; ++warp)
      total[part] += kv_shared[(warp * ROWS + i / PART) * OUTPUTS + part * PART + i % PART];
    total[part] = float(T(total[part]));
  }
  const long place = long(i / PART) * width + first_output + i % PART;
  if (IS_GATED) total[0] = total[0] / (1 + kv_exp2(total[0] * -KV_LOG2_E)) * total[PARTS - 1];
  y[place] = T(ADDS ? total[0] + float(added[place]) : total[0]);
}
