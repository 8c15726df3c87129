// A block makes 16 * HEIGHT outputs of up to 8 * TILES rows, of one of COUNT matrices. Its warps share the chunks; their
// sums become one in order.
constexpr int OUTPUTS = 16 * HEIGHT, ROWS = 8 * TILES, STAGE = (OUTPUTS + ROWS) * KV_CHUNK;
const int depth = x_shape[2], rows = x_shape[0] * x_shape[1];
int first_output = kv_block_x * OUTPUTS, width = widths[0];
const kv_u16* my_w = matrices[0];
T* y = results[0];
KV_UNROLL for (int i = 1; i < COUNT; ++i) {
  if (first_output < width) break;
  first_output -= (width + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
  width = widths[i];
  my_w = matrices[i];
  y = results[i];
}
my_w += long(first_output) * depth;
const int output_count = width - first_output < OUTPUTS ? width - first_output : OUTPUTS;
const kv_u16* all_x = (const kv_u16*)x;
kv_u16* ring = (kv_u16*)kv_shared + kv_warp * STAGES * STAGE;
float sum[HEIGHT][TILES][4];
KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n)
  KV_UNROLL for (int j = 0; j < 4; ++j) sum[h][n][j] = 0;
// Chunk `number` of this warp, whose stage was multiplied STAGES chunks ago. Beyond the depth it is nothing.
auto begin = [&](int number) {
  const int first = (number * WARPS + kv_warp) * KV_CHUNK;
  kv_u16* stage = ring + number % STAGES * STAGE;
  if (first < depth) {
    kv_begin_rows<OUTPUTS>(stage, my_w, output_count, depth, first, kv_lane);
    kv_begin_rows<ROWS>(stage + OUTPUTS * KV_CHUNK, all_x, rows, depth, first, kv_lane);
  }
  kv_copies_begun();
};
KV_UNROLL for (int number = 0; number < STAGES - 1; ++number) begin(number);
KV_ROLLED for (int number = 0; (number * WARPS + kv_warp) * KV_CHUNK < depth; ++number) {
  kv_copies_done<STAGES - 2>();
  begin(number + STAGES - 1);
  const kv_u16* stage = ring + number % STAGES * STAGE;
  kv_multiply_chunk<IS_BFLOAT, HEIGHT, TILES>(stage, stage + OUTPUTS * KV_CHUNK, sum, kv_lane);
}
kv_copies_done<0>();
kv_group_barrier();
const int g = kv_lane / 4, t = kv_lane % 4;
KV_UNROLL for (int h = 0; h < HEIGHT; ++h) KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j)
  kv_shared[(kv_warp * ROWS + n * 8 + 2 * t + j % 2) * OUTPUTS + h * 16 + j / 2 * 8 + g] = sum[h][n][j];
kv_group_barrier();
for (int i = kv_warp * 32 + kv_lane; i < rows * OUTPUTS; i += WARPS * 32) {
  if (i % OUTPUTS >= output_count) continue;
  float total = 0;
  KV_UNROLL for (int part = 0; part < WARPS; ++part) total += kv_shared[part * ROWS * OUTPUTS + i];
  y[long(i / OUTPUTS) * width + first_output + i % OUTPUTS] = T(total);
}
