// Weights of 4 bits on their way: a stage is 32 outputs' inputs of a step, brought by all threads.
constexpr bool IS_PAIRED = true;
constexpr int UNROLLED = 2;  // halves of the layer that have instructions of their own
constexpr int FIRST_STAGES = STAGES / 2, AHEAD = STAGES - 1;  // copies that are on their way when a pass begins
constexpr int TURNED = 16 / TURNED_STEPS, OPENED = 16, ADDED = 16;  // outputs of each of a pass's two parts
constexpr int SCALES = STEP / W_GROUP;  // of an output in a stage
constexpr int STAGE = kv_stage_units<W_GROUP, WARPS>();
kv_u16* const ring = (kv_u16*)kv_shared;
kv_u32x4* const near_norm = (kv_u32x4*)(ring + STAGES * STAGE);
float* const sums = (float*)near_norm + HIDDEN / 2;
float* const squares = sums + WARPS * ROWS * KV_SUM_STRIDE;
int* const own_places = (int*)(squares + 16 * ROWS);  // small arrays are the host's memory, which is far
KvTurn* const turns = (KvTurn*)(squares + 16 * ROWS + 16);
float* const room = (float*)(turns + ROWS * DIM / 2);  // rows of x, or room for attention
kv_u16* const own_x = (kv_u16*)room;

int left_steps = 0, turn_steps = 0, stage_steps = TURNED_STEPS, made_phase = 0, made_pass = kv_block_x, made_depth = 0;
const kv_u16 *from_first = nullptr, *from_second = nullptr, *from_scales = nullptr;
int made = 0;
constexpr int PIECES = STEP / 32;  // of an output in a stage
constexpr int SCALE_PIECES = SCALES < 8 ? 1 : SCALES / 8;
const int copied_row = thread / PIECES, copied_piece = thread % PIECES;
const int scale_row = thread / SCALE_PIECES % 32, scale_piece = thread % SCALE_PIECES;
const bool has_scales = thread < 2 * 32 * SCALE_PIECES, takes_biases = thread >= 32 * SCALE_PIECES;
const int place_of_weights = copied_piece / 2 * KV_SLICE + kv_piece<2>(copied_row, copied_piece % 2);
const int place_of_scales = WARPS * KV_SLICE + (takes_biases * 32 + scale_row) * SCALES + scale_piece * 8;

auto passes_of = [&](int phase) {
  return phase == 0 ? (Q_WIDTH + 2 * KV_WIDTH) / (2 * TURNED) : phase == 2 ? INNER / 16 : HIDDEN / 32;
};
// Each thread's places of the pass at hand: of 16 outputs, and of 16 others.
auto aim = [&]() {
  while (made_phase < 4 && made_pass >= passes_of(made_phase)) {
    ++made_phase;
    made_pass = kv_block_x;
  }
  if (made_phase == 4) return;
  int first = made_pass * 32, second = first + 16, depth = HIDDEN, half = 16;
  stage_steps = 1;
  const kv_u16 *w = (const kv_u16*)w_o, *s = (const kv_u16*)s_o, *b = (const kv_u16*)b_o, *w2, *s2, *b2;
  if (made_phase == 0) {
    constexpr int PAIRS = DIM / 2 / TURNED;
    int head = made_pass / PAIRS;
    w = (const kv_u16*)w_q, s = (const kv_u16*)s_q, b = (const kv_u16*)b_q;
    if (head >= HEADS + KV_HEADS) {
      head -= HEADS + KV_HEADS;
      w = (const kv_u16*)w_v, s = (const kv_u16*)s_v, b = (const kv_u16*)b_v;
    } else if (head >= HEADS) {
      head -= HEADS;
      w = (const kv_u16*)w_k, s = (const kv_u16*)s_k, b = (const kv_u16*)b_k;
    }
    stage_steps = TURNED_STEPS;
    half = TURNED;
    first = head * DIM + made_pass % PAIRS * TURNED;
    second = first + DIM / 2;
  } else if (made_phase == 1) {
    depth = Q_WIDTH;
  } else if (made_phase == 2) {
    w = (const kv_u16*)w_gate, s = (const kv_u16*)s_gate, b = (const kv_u16*)b_gate;
    first = second = made_pass * 16;
  } else {
    w = (const kv_u16*)w_down, s = (const kv_u16*)s_down, b = (const kv_u16*)b_down;
    depth = INNER;
  }
  w2 = w, s2 = s, b2 = b;
  if (made_phase == 2) w2 = (const kv_u16*)w_up, s2 = (const kv_u16*)s_up, b2 = (const kv_u16*)b_up;
  made_depth = depth;
  left_steps = steps_of(made_phase);
  const int begun = first_step(made_phase, made_pass);
  turn_steps = left_steps - begun;
  // Of few outputs both parts' are in 16 rows of a stage, and their next inputs in 16 others.
  auto output = [&](int row) { return row < half ? first + row : second + row - half; };
  const int row = half == 16 ? copied_row + 16 : copied_row;
  from_first = w + long(output(copied_row)) * (depth / 4) + copied_piece * 8 + begun * stage_steps * (STEP / 4);
  from_second = w2 + long(output(row)) * (depth / 4) + copied_piece * 8 + ((begun + 1) * stage_steps - 1) * (STEP / 4);
  const bool is_first = scale_row < 16;
  const kv_u16* part = takes_biases ? (is_first ? b : b2) : (is_first ? s : s2);
  from_scales = part + long(output(half == 16 ? scale_row : scale_row % 16)) * (depth / W_GROUP) + scale_piece * 8 +
                (is_first ? begun * stage_steps : (begun + 1) * stage_steps - 1) * SCALES;
};
// The same for the next pass of the same two matrices: places are as they were when the last one began.
auto go_on = [&]() {
  const int begun = first_step(made_phase, made_pass), moved = begun + turn_steps, outputs = blocks * (made_phase == 2 ? 16 : 32);
  left_steps = steps_of(made_phase);
  turn_steps = left_steps - begun;
  const long units = long(outputs) * (made_depth / 4) + moved * (STEP / 4);
  from_first += units;
  from_second += units;
  from_scales += long(outputs) * (made_depth / W_GROUP) + moved * SCALES;
};
// Begin to copy the next stage, if there is one.
auto begin = [&]() {
  if (made_phase < 4) {
    kv_copy16(ring + made + place_of_weights, from_first, true);
    kv_copy16(ring + made + place_of_weights + 16 * 16, from_second, true);
    from_first += STEP / 4 * stage_steps;
    from_second += STEP / 4 * stage_steps;
    if (has_scales) {
      if constexpr (SCALES < 8)
        kv_copy8(ring + made + place_of_scales, from_scales);
      else
        kv_copy16(ring + made + place_of_scales, from_scales, true);
    }
    from_scales += SCALES * stage_steps;
    made = made == (STAGES - 1) * STAGE ? 0 : made + STAGE;
    if (--turn_steps == 0) {
      from_first -= made_depth / 4;
      from_second -= made_depth / 4;
      from_scales -= made_depth / W_GROUP;
    }
    if (--left_steps == 0) {
      made_pass += blocks;
      if (made_phase > 0 && made_pass < passes_of(made_phase))
        go_on();
      else
        aim();
    }
  }
  kv_copies_begun();
};
int used = 0;
aim();
