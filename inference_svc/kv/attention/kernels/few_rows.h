// Products of a few rows with a matrix, y = x w^T: w is read once, in chunks of 64 inputs that are on their way while
// those before them are multiplied. What a sum adds in which order is fixed by the matrix alone, so a row's neighbours
// change no bit of it. Fragments are those of matrices.h: outputs are their rows, rows of x their columns.
//
// Codes of 4 bits are multiplied as they are, above a large number, and a group's scale and bias join its sum:
// x (s c + b) = s (x (L + c)) + (b - s L) sum(x), where sum(x) is a product with ones.
KV_CONST int KV_CHUNK = 64;
KV_CONST float KV_LOG2_E = 1.4426950408889634f;

// Where 16-byte piece `piece` of PIECES of row `row` of a chunk lies: so that eight rows of a piece lie in different banks.
template <int PIECES>
KV_FN int kv_piece(int row, int piece) { return (row * PIECES + (piece ^ (row / (8 / PIECES) & (PIECES - 1)))) * 8; }

// Begin to copy ROWS rows of a chunk, PIECES of 16 bytes each, from rows of `width` pieces. What lies beyond the rows or
// the width becomes zeros.
template <int ROWS, int PIECES>
KV_FN void kv_begin_rows(kv_u16* to, const kv_u16* from, int row_count, int width, int first, int lane) {
  KV_UNROLL for (int i = lane; i < ROWS * PIECES; i += 32) {
    const int row = i / PIECES, piece = first + i % PIECES;
    const bool is_read = row < row_count && piece < width;
    kv_copy16(to + kv_piece<PIECES>(row, i % PIECES), from + (is_read ? (long(row) * width + piece) * 8 : 0), is_read);
  }
}

// sum += a chunk of w [16 * HEIGHT, 64] times a chunk of x [8 * TILES, 64].
template <bool IS_BFLOAT, int HEIGHT, int TILES>
KV_FN void kv_multiply_chunk(const kv_u16* w, const kv_u16* x, float (*sum)[TILES][4], int lane) {
  KV_UNROLL for (int half = 0; half < 2; ++half) {
    kv_u32 b[TILES][4];
    KV_UNROLL for (int n = 0; n < TILES; ++n)
      kv_load_matrices(x + kv_piece<8>(lane % 8, half * 4 + lane / 8) + n * 512, b[n]);
    KV_UNROLL for (int step = 0; step < 2; ++step) KV_UNROLL for (int h = 0; h < HEIGHT; ++h) {
      kv_u32 a[4];
      kv_load_matrices(w + kv_piece<8>(lane % 16, half * 4 + step * 2 + lane / 16) + h * 1024, a);
      KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<IS_BFLOAT>(sum[h][n], a, b[n] + step * 2);
    }
  }
}

// Scales or biases of a block's outputs, a row of `groups` for each, `stride` apart so that eight lie in different banks.
KV_FN void kv_begin_scales(kv_u16* to, const kv_u16* from, int output_count, int groups, int stride, int worker, int workers) {
  if (groups % 8) {
    for (int i = worker; i < output_count * groups; i += workers) to[i / groups * stride + i % groups] = from[i];
    return;
  }
  for (int i = worker; i < output_count * groups / 8; i += workers)
    kv_copy16(to + i / (groups / 8) * stride + i % (groups / 8) * 8, from + i * 8, true);
}

template <bool IS_BFLOAT>
KV_FN float kv_value(kv_u16 bits) { return IS_BFLOAT ? kv_from_bits(kv_u32(bits) << 16) : kv_from_half(bits); }

// As kv_multiply_chunk, of codes of 4 bits in groups of GROUP inputs. `scales` and `biases` are those of the chunk's
// first group and of the block's first output. A word has eight codes; the k-th and the one 16 bits further are a pair.
template <bool IS_BFLOAT, int GROUP, int HEIGHT, int TILES>
KV_FN void kv_multiply_codes(const kv_u16* w, const kv_u16* x, const kv_u16* scales, const kv_u16* biases, int stride,
                             float (*sum)[TILES][4], int lane) {
  constexpr int HALVES = GROUP == 32 ? 1 : 2;  // that a scale is for
  constexpr float LARGE = IS_BFLOAT ? 128 : 1024;
  const kv_u32 large = IS_BFLOAT ? 0x43004300u : 0x64006400u, one = IS_BFLOAT ? 0x3f803f80u : 0x3c003c00u;
  const kv_u32 ones[4] = {one, one, one, one};
  const int g = lane / 4, t = lane % 4;
  kv_u32 words[HEIGHT][4];
  KV_UNROLL for (int h = 0; h < HEIGHT; ++h)
    kv_load_matrices(w + kv_piece<2>(lane % 16, lane / 16) + h * 256, words[h]);
  KV_UNROLL for (int first = 0; first < 2; first += HALVES) {
    kv_u32 b[HALVES][TILES][4];
    float x_sum[TILES][4];
    KV_UNROLL for (int n = 0; n < TILES; ++n) {
      KV_UNROLL for (int j = 0; j < 4; ++j) x_sum[n][j] = 0;
      KV_UNROLL for (int half = 0; half < HALVES; ++half) {
        const kv_u32x4 v = *(const kv_u32x4*)(x + kv_piece<8>(g, (first + half) * 4 + t) + n * 512);
        b[half][n][0] = (v.x & 0xffffu) | v.z << 16;
        b[half][n][1] = v.x >> 16 | (v.z & 0xffff0000u);
        b[half][n][2] = (v.y & 0xffffu) | v.w << 16;
        b[half][n][3] = v.y >> 16 | (v.w & 0xffff0000u);
        kv_mma<IS_BFLOAT>(x_sum[n], ones, b[half][n]);
        kv_mma<IS_BFLOAT>(x_sum[n], ones, b[half][n] + 2);
      }
    }
    KV_UNROLL for (int h = 0; h < HEIGHT; ++h) {
      float part[TILES][4];
      KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = 0; j < 4; ++j) part[n][j] = 0;
      KV_UNROLL for (int half = 0; half < HALVES; ++half) KV_UNROLL for (int step = 0; step < 2; ++step) {
        kv_u32 a[4];
        KV_UNROLL for (int j = 0; j < 4; ++j)
          a[j] = kv_masked_or(words[h][(first + half) * 2 + j % 2] >> 4 * (step * 2 + j / 2), 0x000f000fu, large);
        KV_UNROLL for (int n = 0; n < TILES; ++n) kv_mma<IS_BFLOAT>(part[n], a, b[half][n] + step * 2);
      }
      KV_UNROLL for (int side = 0; side < 2; ++side) {
        const int at = (h * 16 + side * 8 + g) * stride + first;
        const float scale = kv_value<IS_BFLOAT>(scales[at]);
        const float bias = kv_value<IS_BFLOAT>(biases[at]) - scale * LARGE;
        KV_UNROLL for (int n = 0; n < TILES; ++n) KV_UNROLL for (int j = side * 2; j < side * 2 + 2; ++j)
          sum[h][n][j] += scale * part[n][j] + bias * x_sum[n][j];
      }
    }
  }
}
