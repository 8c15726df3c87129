// kernels/cuda_instructions.h in C++: copies arrive as late as they may, or at once; fragments go the way that PTX says.
#include <deque>
struct KvCopy {
  void* to;
  const void* from;
};
inline std::vector<std::deque<std::vector<KvCopy>>> kv_begun;  // of each lane, its groups of copies
inline std::vector<std::vector<KvCopy>> kv_next;

KV_FN void kv_grow() {
  kv_begun.resize(fibers::lanes.size());
  kv_next.resize(fibers::lanes.size());
}
inline void kv_finish(KvCopy copy) {
  if (copy.from)
    std::memcpy(copy.to, copy.from, 16);
  else
    std::memset(copy.to, 0, 16);
}
KV_FN void kv_copy16(void* to, const void* from, bool is_read) {
  fibers::expect_aligned(to);
  fibers::expect_aligned(from);
  kv_grow();
  const KvCopy copy = {to, is_read ? from : nullptr};
  if (fibers::are_copies_early)
    kv_finish(copy);
  else
    kv_next[fibers::current].push_back(copy);
}
KV_FN void kv_copy8(void* to, const void* from) {
  if (uintptr_t(to) % 8 || uintptr_t(from) % 8) std::abort();
  std::memcpy(to, from, 8);
}
KV_FN void kv_copies_begun() {
  kv_grow();
  kv_begun[fibers::current].push_back(std::move(kv_next[fibers::current]));
  kv_next[fibers::current].clear();
}
template <int PENDING>
KV_FN void kv_copies_done() {
  auto& groups = kv_begun[fibers::current];
  while (groups.size() > PENDING) {
    for (KvCopy copy : groups.front()) kv_finish(copy);
    groups.pop_front();
  }
  __syncwarp();
}

KV_FN void kv_load(const void* row, kv_u32* x, bool is_transposed) {
  fibers::expect_aligned(row);
  fibers::Slot mine;
  mine.place = row;
  const fibers::Slot* rows = fibers::shown(mine);
  const int g = fibers::current % 32 / 4, t = fibers::current % 4;
  for (int i = 0; i < 4; ++i) {
    auto unit = [&](int r, int c) { return kv_u32(((const kv_u16*)rows[i * 8 + r].place)[c]); };
    x[i] = is_transposed ? unit(2 * t, g) | unit(2 * t + 1, g) << 16 : unit(g, 2 * t) | unit(g, 2 * t + 1) << 16;
  }
  fibers::meet_warp();  // the rows may be written anew only after all have read them
}
KV_FN void kv_load_matrices(const void* row, kv_u32* x) { kv_load(row, x, false); }
KV_FN void kv_load_transposed(const void* row, kv_u32* x) { kv_load(row, x, true); }
KV_FN kv_u32 kv_transposed(kv_u32 x) {
  fibers::Slot mine;
  mine.words[0] = x;
  const fibers::Slot* theirs = fibers::shown(mine);
  const int g = fibers::current % 32 / 4, t = fibers::current % 4;
  auto unit = [&](int r, int c) { return theirs[r * 4 + c / 2].words[0] >> (c % 2 * 16) & 0xffff; };
  return unit(2 * t, g) | unit(2 * t + 1, g) << 16;
}
KV_FN kv_u32 kv_pair(float low, float high) { return kv_u32(kv_to_half(low)) | kv_u32(kv_to_half(high)) << 16; }
KV_FN kv_u32 kv_pair_of_bfloats(float low, float high) {
  return kv_u32(kv_to_bfloat(low)) | kv_u32(kv_to_bfloat(high)) << 16;
}
KV_FN kv_u32 kv_masked_or(kv_u32 x, kv_u32 mask, kv_u32 others) { return (x & mask) | others; }
KV_FN bool kv_any(bool is_so) {
  fibers::Slot mine;
  mine.words[0] = is_so;
  const fibers::Slot* theirs = fibers::shown(mine);
  bool found = false;
  for (int i = 0; i < 32; ++i) found |= theirs[i].words[0] != 0;
  return found;
}
template <bool IS_BFLOAT>
KV_FN kv_u32 kv_fma_two(kv_u32 a, kv_u32 b, kv_u32 c) {
  auto value = [](kv_u32 word, int side) {
    kv_u16 bits = kv_u16(word >> side * 16);
    return IS_BFLOAT ? fibers::bits_to_float(kv_u32(bits) << 16) : fibers::half_to_float(bits);
  };
  auto made = [&](int side) { return std::fma(value(a, side), value(b, side), value(c, side)); };
  return IS_BFLOAT ? kv_pair_of_bfloats(made(0), made(1)) : kv_pair(made(0), made(1));
}
KV_FN float kv_exp2_near(float x) { return exp2f(x); }
template <bool IS_BFLOAT>
KV_FN void kv_mma(float* c, const kv_u32* a, const kv_u32* b) {
  fibers::Slot mine;
  for (int i = 0; i < 4; ++i) mine.words[i] = a[i];
  for (int i = 0; i < 2; ++i) mine.words[4 + i] = b[i];
  const fibers::Slot* theirs = fibers::shown(mine);
  const int g = fibers::current % 32 / 4, t = fibers::current % 4;
  auto value = [](kv_u32 word, int k) {
    kv_u16 bits = kv_u16(word >> (k % 2 * 16));
    return IS_BFLOAT ? fibers::bits_to_float(kv_u32(bits) << 16) : fibers::half_to_float(bits);
  };
  for (int r = 0; r < 2; ++r)
    for (int j = 0; j < 2; ++j)
      for (int k = 0; k < 16; ++k)
        c[2 * r + j] += value(theirs[g * 4 + k % 8 / 2].words[r + k / 8 * 2], k) *
                        value(theirs[(2 * t + j) * 4 + k % 8 / 2].words[4 + k / 8], k);
}
KV_FN float kv_fma(float a, float b, float c) { return std::fma(a, b, c); }
KV_FN float kv_cosine(float x) { return cosf(x); }
KV_FN float kv_sine(float x) { return sinf(x); }
struct KvTurn {
  float cosine, sine;
};
KV_FN KvTurn kv_turn(float angle) { return KvTurn{cosf(angle), sinf(angle)}; }
KV_FN float kv_inverse_root(float x) { return 1 / sqrtf(x); }
template <int WARPS>
KV_FN void kv_part_barrier() {
  fibers::meet_named(1 + int(fibers::thread.x) / (WARPS * 32), WARPS * 32);
}
KV_FN void kv_written() {}
KV_FN bool kv_is_last(const kv_u32* word, int count) {
  const kv_u32 before = *word;
  *(kv_u32*)word = before >= kv_u32(count - 1) ? 0 : before + 1;
  return before == kv_u32(count - 1);
}
KV_FN void kv_grid_barrier(const kv_u32* word) { fibers::meet_grid(); }
