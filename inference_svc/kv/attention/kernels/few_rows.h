// Products of a few rows with a matrix, y = x w^T: w is read once, in chunks of 64 inputs that are on their way while
// those before them are multiplied. What a sum adds in which order is fixed by the matrix alone, so a row's neighbours
// change no bit of it. Fragments are those of matrices.h: outputs are their rows, rows of x their columns.
KV_CONST int KV_CHUNK = 64;

// Where 16-byte piece `piece` of row `row` of a chunk lies: so that eight rows of a piece lie in different banks.
KV_FN int kv_piece(int row, int piece) { return (row * 8 + (piece ^ (row & 7))) * 8; }

// Begin to copy ROWS rows of a chunk. What lies beyond the rows or the depth becomes zeros.
template <int ROWS>
KV_FN void kv_begin_rows(kv_u16* to, const kv_u16* from, int row_count, int depth, int first, int lane) {
  KV_UNROLL for (int i = lane; i < ROWS * 8; i += 32) {
    const int row = i / 8, input = first + i % 8 * 8;
    const bool is_read = row < row_count && input < depth;
    kv_copy16(to + kv_piece(row, i % 8), from + (is_read ? long(row) * depth + input : 0), is_read);
  }
}

// sum += a chunk of w [16 * HEIGHT, 64] times a chunk of x [8 * TILES, 64].
template <bool IS_BFLOAT, int HEIGHT, int TILES>
KV_FN void kv_multiply_chunk(const kv_u16* w, const kv_u16* x, float (*sum)[TILES][4], int lane) {
  KV_UNROLL for (int half = 0; half < 2; ++half) {
    kv_u32 b[TILES][4];
    KV_UNROLL for (int n = 0; n < TILES; ++n) kv_load_matrices(x + kv_piece(n * 8 + lane % 8, half * 4 + lane / 8), b[n]);
    KV_UNROLL for (int step = 0; step < 2; ++step) KV_UNROLL for (int h = 0; h < HEIGHT; ++h) {
      kv_u32 a[4];
      kv_load_matrices(w + kv_piece(h * 16 + lane % 16, half * 4 + step * 2 + lane / 16), a);
      KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<IS_BFLOAT>(sum[h][n], a, b[n] + step * 2);
    }
  }
}
