// Weights of 4 bits on their way: a stage is 32 outputs' inputs of a step, brought by all threads.
constexpr bool IS_PAIRED = true;
constexpr int UNROLLED = 2;  // halves of the layer that have instructions of their own
constexpr int TURNED = 16, OPENED = 16, ADDED = 16;  // outputs of each of a pass's two parts
constexpr int SCALES = STEP / W_GROUP;  // of an output in a stage
constexpr int STAGE = kv_stage_units<W_GROUP, WARPS>();
kv_u16* const ring = (kv_u16*)kv_shared;
float* const sums = (float*)(ring + STAGES * STAGE);
float* const squares = sums + WARPS * ROWS * KV_SUM_STRIDE;
int* const own_places = (int*)(squares + 16 * ROWS);  // small arrays are the host's memory, which is far
float* const room = squares + 16 * ROWS + 16;  // rows of x, or room for attention
kv_u16* const own_x = (kv_u16*)room;

int left_steps = 0, turn_steps = 0, made_phase = 0, made_pass = kv_block_x, made_depth = 0;
const kv_u16 *from_first = nullptr, *from_second = nullptr, *from_scales = nullptr;
kv_u16* made = ring;
constexpr int PIECES = STEP / 32;  // of an output in a stage
constexpr int SCALE_PIECES = SCALES < 8 ? 1 : SCALES / 8;
const int copied_row = thread / PIECES, copied_piece = thread % PIECES;
const int scale_row = thread / SCALE_PIECES % 32, scale_piece = thread % SCALE_PIECES;
const bool has_scales = thread < 2 * 32 * SCALE_PIECES, takes_biases = thread >= 32 * SCALE_PIECES;
const int place_of_weights = copied_piece / 2 * KV_SLICE + kv_piece<2>(copied_row, copied_piece % 2);
const int place_of_scales = WARPS * KV_SLICE + (takes_biases * 32 + scale_row) * SCALES + scale_piece * 8;

auto passes_of = [&](int phase) {
  return phase == 0 ? (HEADS + 2 * KV_HEADS) * (DIM / 32) : phase == 2 ? INNER / 16 : HIDDEN / 32;
};
// Each thread's places of the pass at hand: of 16 outputs, and of 16 others.
auto aim = [&]() {
  while (made_phase < 4 && made_pass >= passes_of(made_phase)) {
    ++made_phase;
    made_pass = kv_block_x;
  }
  if (made_phase == 4) return;
  int first = made_pass * 32, second = first + 16, depth = HIDDEN;
  const kv_u16 *w = (const kv_u16*)w_o, *s = (const kv_u16*)s_o, *b = (const kv_u16*)b_o, *w2, *s2, *b2;
  if (made_phase == 0) {
    int head = made_pass / (DIM / 32);
    w = (const kv_u16*)w_q, s = (const kv_u16*)s_q, b = (const kv_u16*)b_q;
    if (head >= HEADS + KV_HEADS) {
      head -= HEADS + KV_HEADS;
      w = (const kv_u16*)w_v, s = (const kv_u16*)s_v, b = (const kv_u16*)b_v;
    } else if (head >= HEADS) {
      head -= HEADS;
      w = (const kv_u16*)w_k, s = (const kv_u16*)s_k, b = (const kv_u16*)b_k;
    }
    first = head * DIM + made_pass % (DIM / 32) * 16;
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
  left_steps = depth / STEP;
  const int begun = kv_first_step(made_pass, left_steps);
  turn_steps = left_steps - begun;
  from_first = w + long(first + copied_row) * (depth / 4) + copied_piece * 8 + begun * (STEP / 4);
  from_second = w2 + long(second + copied_row) * (depth / 4) + copied_piece * 8 + begun * (STEP / 4);
  const int output = scale_row < 16 ? first + scale_row : second + scale_row - 16;
  const kv_u16* part = takes_biases ? (scale_row < 16 ? b : b2) : (scale_row < 16 ? s : s2);
  from_scales = part + long(output) * (depth / W_GROUP) + scale_piece * 8 + begun * SCALES;
};
// Begin to copy the next stage, if there is one.
auto begin = [&]() {
  if (made_phase < 4) {
    kv_copy16(made + place_of_weights, from_first, true);
    kv_copy16(made + place_of_weights + 16 * 16, from_second, true);
    from_first += STEP / 4;
    from_second += STEP / 4;
    if (has_scales) {
      if constexpr (SCALES < 8)
        kv_copy8(made + place_of_scales, from_scales);
      else
        kv_copy16(made + place_of_scales, from_scales, true);
    }
    from_scales += SCALES;
    made = made == ring + (STAGES - 1) * STAGE ? ring : made + STAGE;
    if (--turn_steps == 0) {
      from_first -= made_depth / 4;
      from_second -= made_depth / 4;
      from_scales -= made_depth / W_GROUP;
    }
    if (--left_steps == 0) {
      made_pass += blocks;
      aim();
    }
  }
  kv_copies_begun();
};
const kv_u16* used = ring;
aim();
KV_ROLLED for (int i = 0; i < STAGES - 1; ++i) begin();
auto brought = [&](const T* weights) { return weights; };
auto bring = [&](const T*) {};
