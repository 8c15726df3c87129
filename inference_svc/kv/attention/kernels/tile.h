// A tile: some tokens' rows of one head of a page, in shared memory.

// Where 16-byte chunk `chunk` of row `row` lies: so that eight rows of a chunk lie in different banks.
template <int ROW_CHUNKS>
KV_FN int kv_place(int row, int chunk) {
  int mixed = chunk;
  if (ROW_CHUNKS % 8 == 0) mixed = chunk ^ (row & 7);
  if (ROW_CHUNKS == 4) mixed = chunk ^ ((row >> 1) & 3);
  if (ROW_CHUNKS == 2) mixed = chunk ^ ((row >> 2) & 1);
  return (row * ROW_CHUNKS + mixed) * 8;
}

// In units: codes or values, scales, biases.
template <typename Rows, int TILE>
struct KvTile {
  KV_CONST int SCALES = TILE * Rows::ROW_UNITS;
  KV_CONST int BIASES = SCALES + (Rows::IS_QUANTIZED ? TILE * Rows::GROUPS : 0);
  KV_CONST int UNITS = BIASES + (Rows::IS_QUANTIZED ? TILE * Rows::GROUPS : 0);
};

// A chunk of a stored tile with its scale and bias, as they are stored.
struct KvStored {
  int row, chunk;
  kv_u32x4 words;
  kv_u16 scale, bias;
};
