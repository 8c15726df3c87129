// Sizes of a layer, and where its steps give results to each other: before layer_codes.h or layer_values.h, and
// layer_body.h.
using K = KvRows<KV_HEADS, KEY_DIM, KEY_BITS, GROUP, 0>;
using V = KvRows<KV_HEADS, VALUE_DIM, VALUE_BITS, GROUP, K::END>;
constexpr int STEP = 64 * WARPS;  // inputs of a step of a product: 64 for each warp
constexpr int DIM = KEY_DIM, ROWS = 8 * TILES, THREADS = WARPS * 32, SHARE = HEADS / KV_HEADS;
constexpr int Q_WIDTH = HEADS * DIM, KV_WIDTH = KV_HEADS * DIM;
constexpr int X_STRIDE = HIDDEN + 32;  // of rows in shared memory: so that banks of neighbours differ
constexpr int SPLIT_TOKENS = KV_PAGE_TOKENS;
constexpr int TURNED_STEPS = W_GROUP && HIDDEN / STEP % 2 == 0 ? 2 : 1;  // of queries, keys and values in a stage
const int rows = x_shape[0], thread = kv_warp * 32 + kv_lane, blocks = kv_blocks_x;

// Of the four products' passes: their steps, and the first of them. Passes that run side by side are at different inputs,
// so that they read all channels of memory.
auto steps_of = [&](int phase) {
  return phase == 0 ? HIDDEN / STEP / TURNED_STEPS : phase == 1 ? Q_WIDTH / STEP : phase == 2 ? HIDDEN / STEP : INNER / STEP;
};
auto first_step = [&](int phase, int pass) {  // each by a constant: a division takes long
  return phase == 0 ? pass % (HIDDEN / STEP / TURNED_STEPS) : phase == 1 ? pass % (Q_WIDTH / STEP) : phase == 2 ? pass % (HIDDEN / STEP) : pass % (INNER / STEP);
};

// Results that steps give to each other.
const int splits = block_table_shape[1];
float* const partial = scratch;
T* const queries = (T*)(partial + long(rows) * HEADS * splits * (DIM + 4));
T* const keys = queries + rows * Q_WIDTH;
T* const values = keys + rows * KV_WIDTH;
T* const attended = values + rows * KV_WIDTH;
T* const h = attended + rows * Q_WIDTH;
T* const opened = h + rows * HIDDEN;
