// Products of 33 to 64 rows with a matrix, y = x w^T, by Hopper's own products. A block makes so many outputs
// that each multiprocessor has one block, so x is read as seldom as can be. A sum goes through the depth in order, or
// through its halves, which are added.

// Where 16-byte piece `piece` of a row of a chunk lies, as kv_matrix says.
KV_FN int kv_piece_of(int row, int piece) { return row * KV_CHUNK + (piece ^ row % 8) * 8; }

// Results of a warp's sums: 16 outputs of a block's OUTPUTS, from `unit` on, for 64 rows. What is added is read before any
// result is written: reads behind writes would come one by one.
template <bool IS_GATED, bool ADDS, typename T>
KV_FN void kv_write_wide(const float (&sum)[32], int rows, int unit, int outputs, int first, int width, T* y, const T* added, int lane) {
  const int g = lane / 4, t = lane % 4;
  auto place = [&](int n, int j) {  // below zero: no result
    const int row = n * 8 + 2 * t + j % 2, output = first + (IS_GATED ? unit / 2 : unit + j / 2 * 8) + g;
    return row >= rows || unit >= outputs || output >= width ? -1 : row * width + output;
  };
  T more[32];
  KV_UNROLL for (int i = 0; ADDS && i < 32; ++i) {
    const int at = place(i / 4, i % 4);
    more[i] = added[at < 0 ? 0 : at];
  }
  KV_UNROLL for (int n = 0; n < 8; ++n) KV_UNROLL for (int j = 0; j < (IS_GATED ? 2 : 4); ++j) {
    const int at = place(n, j);
    if (at < 0) continue;
    float one = float(T(sum[n * 4 + j]));
    if (IS_GATED) one = one / (1 + kv_exp2(one * -KV_LOG2_E)) * float(T(sum[n * 4 + 2 + j]));
    y[at] = T(ADDS ? one + float(more[n * 4 + j]) : one);
  }
}
