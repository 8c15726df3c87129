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
kv_u16* ring = (kv_u16*)kv_shared + kv_warp * STAGES * STAGE;
float sum[HEIGHT][TILES][4];
KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
  KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
// Where a lane's pieces of this warp's chunks lie: of outputs, LINES further each, and of rows of x, four further. What lies
// beyond the outputs, the rows or the depth becomes zeros. Of more than 32 rows there are too few registers for all places.
constexpr int LINES = 32 / PIECES, W_EACH = OUTPUTS / LINES, X_EACH = ROWS / 4;
constexpr bool ARE_KEPT = TILES <= 4;
const kv_u16 *w_from[W_EACH], *x_from[X_EACH];
bool w_read[W_EACH], x_read[X_EACH];
KV_UNROLL for (int i = 0; i < W_EACH && ARE_KEPT; ++i) {
  const int line = i * LINES + kv_lane / PIECES, part = line / PART, output = line % PART;
  w_read[i] = output < output_count;
  w_from[i] = my_parts[part] + first_unit + (w_read[i] ? long(output) * width_in_pieces * 8 : 0) + (kv_warp * PIECES + kv_lane % PIECES) * 8;
}
KV_UNROLL for (int i = 0; i < X_EACH && ARE_KEPT; ++i) {
  const int line = i * 4 + kv_lane / 8;
  x_read[i] = line < rows;
  x_from[i] = (const kv_u16*)x + (x_read[i] ? long(line) * depth : 0) + (kv_warp * 8 + kv_lane % 8) * 8;
}
const int places[2] = {kv_piece<8>(kv_lane / 8, kv_lane % 8), kv_piece<8>(kv_lane / 8 + 4, kv_lane % 8)};  // of lines by four
const int place = kv_piece<PIECES>(kv_lane / PIECES, kv_lane % PIECES);
int begun = 0, next = kv_warp;
// This warp's next chunk, into the stage that was multiplied STAGES chunks ago.
auto begin = [&]() {
  if (next * KV_CHUNK < depth) {
    kv_u16* const stage = ring + begun * STAGE;
    const bool is_in = depth % KV_CHUNK == 0 || next * 8 + kv_lane % 8 < depth / 8;
    KV_UNROLL for (int i = 0; i < W_EACH && ARE_KEPT; ++i) {
      kv_copy16(stage + (PIECES == 8 ? places[i % 2] + i / 2 * 512 : place + i * 256), w_from[i], w_read[i] && (PIECES == 2 || is_in));
      w_from[i] += WARPS * PIECES * 8;
    }
    KV_UNROLL for (int i = 0; i < X_EACH && ARE_KEPT; ++i) {
      kv_copy16(stage + W_STAGE + places[i % 2] + i / 2 * 512, x_from[i], x_read[i] && (PIECES == 2 || is_in));
      x_from[i] += WARPS * KV_CHUNK;
    }
    KV_UNROLL for (int part = 0; part < PARTS && !ARE_KEPT; ++part)
      kv_begin_rows<PART, PIECES>(stage + part * PART * PIECES * 8, my_parts[part] + first_unit, output_count, width_in_pieces, next * PIECES, kv_lane);
    if (!ARE_KEPT) kv_begin_rows<ROWS, 8>(stage + W_STAGE, (const kv_u16*)x, rows, depth / 8, next * 8, kv_lane);
    if (++begun == STAGES) begun = 0;
  }
  next += WARPS;
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
KV_UNROLL for (int number = 0; number < STAGES - 1; ++number) begin();
if (BITS == 4) {
  kv_copies_done<STAGES - 1>();
  kv_group_barrier();
}
int used = 0;
KV_ROLLED for (int chunk = kv_warp; chunk * KV_CHUNK < depth; chunk += WARPS) {
  kv_copies_done<STAGES - 2>();
  begin();
  const kv_u16* stage = ring + used * STAGE;
  const int group = chunk * KV_CHUNK / GROUP;
  if constexpr (BITS == 4)
    kv_multiply_codes<IS_BFLOAT, GROUP, HEIGHT, TILES>(stage, stage + W_STAGE, my_own_scales + group, my_own_biases + group, STRIDE, sum, kv_lane);
  else
    kv_multiply_chunk<IS_BFLOAT, HEIGHT, TILES>(stage, stage + W_STAGE, sum, kv_lane);
  if (++used == STAGES) used = 0;
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
