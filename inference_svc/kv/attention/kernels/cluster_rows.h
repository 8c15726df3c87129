// Products of 33 to 64 rows with a matrix of 16 bits, y = x w^T, by Hopper's own products. Each of the four blocks of a
// cluster has a part of the depth, every fourth chunk of 64 inputs, and keeps its part of x where it has room: so it reads
// x once for all its outputs. The parts' sums are few_rows.h's, and become one in its order: they have its bits.
//
// Of a block four warps copy chunks, four multiply them, and four make results of the sums of all four blocks, each of
// another 16 rows: copies go on from one tile of outputs to the next.
KV_CONST int KV_RANKS = 4, KV_CHUNK_UNITS = 64 * 64;  // of 64 rows

// A block's shared memory, in units. SUMS: tiles whose sums are on their way.
template <int HEIGHT, int STAGES, int X_CHUNKS, int SUMS>
struct KvRing {
  KV_CONST int W_STAGE = HEIGHT * KV_CHUNK_UNITS, SUM = 2 * HEIGHT * KV_CHUNK_UNITS;
  KV_CONST int W = (X_CHUNKS ? X_CHUNKS : STAGES) * KV_CHUNK_UNITS;
  KV_CONST int SUMMED = W + STAGES * W_STAGE;
  KV_CONST int BARRIERS = SUMMED + SUMS * SUM;
};

// Where 16-byte piece `piece` of a row of a chunk lies, as kv_matrix says.
KV_FN kv_u16* kv_piece_of(kv_u16* chunk, int row, int piece) { return chunk + row * 64 + (piece ^ row % 8) * 8; }

// Outputs of a tile from `first` on, of a matrix, or of two of which one opens for the other.
template <typename T>
struct KvTileOutputs {
  const kv_u16* parts[2];
  T* y;
  int width, first;
};
