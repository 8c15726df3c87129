// What a layer computes behind its attention: its product and x give h; h, normed, opens and is opened for; the last product
// and h are the result.
constexpr int STEP = 64 * WARPS, ROWS = 8 * TILES, THREADS = WARPS * 32, PHASES = 3;
const int rows = x_shape[0], thread = kv_warp * 32 + kv_lane, blocks = kv_blocks_x;
kv_u16* const ring = (kv_u16*)kv_shared + kv_warp * STAGES * KV_VALUES_STAGE;
float* const sums = (float*)((kv_u16*)kv_shared + WARPS * STAGES * KV_VALUES_STAGE);


// Where copies are: the next one's phase, pass, and tile of 16 outputs of a step; and where its first lane reads.
struct Way {
  int phase, pass, tile, depth, left_steps, turn_steps;
  const kv_u16 *first, *second;
};
Way way = {0, kv_block_x, 0, 0, 0, 0, nullptr, nullptr};
int made = 0;
auto aim = [&](Way& at) {
  while (at.phase < PHASES && at.pass >= (at.phase == 1 ? INNER / 16 : HIDDEN / 32)) {
    ++at.phase;
    at.pass = kv_block_x;
  }
  if (at.phase == PHASES) return;
  const bool opens = at.phase == 1;
  const kv_u16* const w = (const kv_u16*)(opens ? w_gate : at.phase ? w_down : w_o);
  at.depth = opens ? HIDDEN : at.phase ? INNER : WIDTH;
  at.left_steps = at.depth / STEP;
  const int begun = at.pass % at.left_steps;
  const long own = long(at.pass) * (opens ? 16 : 32) * at.depth + begun * STEP + kv_warp * 64;
  at.turn_steps = at.left_steps - begun;
  at.first = w + own;
  at.second = opens ? (const kv_u16*)w_up + own : at.first + 16 * at.depth;
};
auto go_on = [&](Way& at) {
  if (++at.tile < 2) return;
  at.tile = 0;
  const int by = --at.turn_steps == 0 ? STEP - at.depth : STEP;
  at.first += by;
  at.second += by;
  if (--at.left_steps == 0) {
    at.pass += blocks;
    aim(at);
  }
};
// Begin to copy the next stage, if there is one.
auto begin = [&]() {
  if (way.phase < PHASES) {
    const int from = (way.tile * 8 + kv_lane / 8) * way.depth + kv_lane % 8 * 8, half = 4 * way.depth;
    kv_u16* const to = ring + made + kv_values_place(kv_lane / 8, kv_lane % 8);
    kv_copy16(to, way.first + from, true);
    kv_copy16(to + 4 * 64, way.first + from + half, true);
    kv_copy16(to + 8 * 64, way.second + from, true);
    kv_copy16(to + 12 * 64, way.second + from + half, true);
    made = made == (STAGES - 1) * KV_VALUES_STAGE ? 0 : made + KV_VALUES_STAGE;
    go_on(way);
  }
  kv_copies_begun();
};
auto total = [&](int row, int output) {
  float found = 0;
  KV_UNROLL for (int warp = 0; warp < WARPS; ++warp) found += sums[(warp * ROWS + row) * KV_SUM_STRIDE + output];
  return kv_rounded<T>(found);
};
auto add = [&](const T* added, T* to) {
  return [=](int pass) {
    KV_ROLLED for (int i = thread; i < rows * 32; i += THREADS) {
      const int at = i / 32 * HIDDEN + pass * 32 + i % 32;
      to[at] = T(total(i / 32, i % 32) + float(added[at]));
    }
  };
};
auto open = [&](int pass) {
  KV_ROLLED for (int i = thread; i < rows * 16; i += THREADS) {
    const float gate = total(i / 16, i % 16), up = total(i / 16, 16 + i % 16);
    opened[i / 16 * INNER + pass * 16 + i % 16] = T(gate / (1 + kv_exp2(gate * -KV_LOG2_E)) * up);
  }
};
int used = 0;
aim(way);
KV_ROLLED for (int i = 0; i < STAGES; ++i) begin();
kv_multiply_all<IS_BFLOAT, WARPS, TILES, STAGES>(
    attended, rows, WIDTH, HIDDEN / 32, kv_block_x, blocks, begin, ring, used, sums, add(x, h), kv_warp, kv_lane);
kv_grid_barrier(counters);
KV_ROLLED for (int row = kv_block_x; row < rows; row += blocks) {
  kv_norm_row<IS_BFLOAT, HIDDEN>(h + row * HIDDEN, norm, normed + row * HIDDEN, settings[2], sums, kv_warp, kv_lane);
  kv_group_barrier();
}
kv_grid_barrier(counters);
kv_multiply_all<IS_BFLOAT, WARPS, TILES, STAGES>(
    normed, rows, HIDDEN, INNER / 16, kv_block_x, blocks, begin, ring, used, sums, open, kv_warp, kv_lane);
kv_grid_barrier(counters);
kv_multiply_all<IS_BFLOAT, WARPS, TILES, STAGES>(
    opened, rows, INNER, HIDDEN / 32, kv_block_x, blocks, begin, ring, used, sums, add(h, out), kv_warp, kv_lane);
kv_copies_done<0>();
