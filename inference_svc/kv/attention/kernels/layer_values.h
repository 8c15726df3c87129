// Weights of 16 bits on their way: each warp brings and multiplies its own inputs, in stages of 16 outputs' 64 inputs.
constexpr bool IS_PAIRED = false;
constexpr int UNROLLED = 1;  // both halves of the layer have the same instructions: less are fetched
constexpr int FIRST_STAGES = STAGES / 2, AHEAD = STAGES;  // copies that are on their way when a pass begins
constexpr int TURNED = 8, OPENED = 16, ADDED = 16;  // outputs of each of a pass's two parts
kv_u16* const ring = (kv_u16*)kv_shared + kv_warp * STAGES * KV_VALUES_STAGE;
kv_u32x4* const near_norm = (kv_u32x4*)((kv_u16*)kv_shared + WARPS * STAGES * KV_VALUES_STAGE);
float* const squares = (float*)near_norm + HIDDEN / 2;
int* const own_places = (int*)(squares + 16 * ROWS);  // small arrays are the host's memory, which is far
KvTurn* const turns = (KvTurn*)(squares + 16 * ROWS + 16);
float* const room = (float*)(turns + ROWS * DIM / 2);  // for attention, or for sums and rows of x
float* const sums = room;
kv_u16* const own_x = (kv_u16*)(sums + WARPS * ROWS * KV_SUM_STRIDE);

// Where copies are: the next one's phase, pass, and tile of 16 outputs of a step; and where its first lane reads.
struct Way {
  int phase, pass, tile, tiles, depth, left_steps, turn_steps;
  const kv_u16 *first, *second;
};
Way way = {0, kv_block_x, 0, 0, 0, 0, 0, nullptr, nullptr};
int made = 0;

auto passes_of = [&](int phase) {
  return phase == 0 ? (Q_WIDTH + 2 * KV_WIDTH) / (2 * TURNED) : phase == 2 ? INNER / OPENED : HIDDEN / (2 * ADDED);
};
auto aim = [&](Way& at) {
  while (at.phase < 4 && at.pass >= passes_of(at.phase)) {
    ++at.phase;
    at.pass = kv_block_x;
  }
  if (at.phase == 4) return;
  int first = at.pass * 2 * ADDED, second = first + ADDED, half = ADDED;
  const kv_u16* w = (const kv_u16*)w_o;
  at.depth = HIDDEN;
  if (at.phase == 0) {
    constexpr int PAIRS = DIM / 2 / TURNED;
    int head = at.pass / PAIRS;
    w = (const kv_u16*)w_q;
    if (head >= HEADS + KV_HEADS) {
      head -= HEADS + KV_HEADS;
      w = (const kv_u16*)w_v;
    } else if (head >= HEADS) {
      head -= HEADS;
      w = (const kv_u16*)w_k;
    }
    half = TURNED;
    first = head * DIM + at.pass % PAIRS * TURNED;
    second = first + DIM / 2;
  } else if (at.phase == 1) {
    at.depth = Q_WIDTH;
  } else if (at.phase == 2) {
    w = (const kv_u16*)w_gate;
    half = OPENED;
    first = second = at.pass * OPENED;
  } else {
    w = (const kv_u16*)w_down;
    at.depth = INNER;
  }
  at.tiles = half / 8;
  at.left_steps = steps_of(at.phase);
  const int begun = first_step(at.phase, at.pass), own = begun * STEP + kv_warp * 64;
  at.turn_steps = at.left_steps - begun;
  at.first = w + long(first) * at.depth + own;
  at.second = (at.phase == 2 ? (const kv_u16*)w_up : w) + long(second) * at.depth + own;
};
auto go_on = [&](Way& at) {
  if (++at.tile < at.tiles) return;
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
  if (way.phase < 4) {
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
int used = 0;
aim(way);
