// kernels/hopper_instructions.h in C++: products read shared memory as late as they may, when they are waited for. It does
// not see whether fences are missing: neither those for writes that products read, nor those for registers.
typedef unsigned long long kv_u64;

// A barrier's word: how many it waits for, how many are missing, and its phase.
struct KvBarrier {
  uint16_t count, missing;
  uint32_t phase;
};
KV_FN void kv_barrier_init(kv_u64* barrier, int count) {
  KvBarrier made = {uint16_t(count), uint16_t(count), 0};
  std::memcpy((void*)barrier, &made, 8);
}
KV_FN void kv_barrier_arrive(kv_u64* barrier) {
  KvBarrier* mine = (KvBarrier*)barrier;
  ++fibers::moves;
  if (!--mine->missing) {
    mine->missing = mine->count;
    ++mine->phase;
  }
  fibers::delay(fibers::current < 128);  // what is written after this is late
}
KV_FN void kv_barrier_wait(kv_u64* barrier, int parity) {
  const KvBarrier* mine = (const KvBarrier*)barrier;
  while (int(mine->phase % 2) == parity) fibers::leave();
  fibers::delay(fibers::current < 128);  // whoever writes next, or multiplies next
  __syncwarp();
}
KV_FN void kv_threads_barrier(int id, int count) { fibers::meet_named(id, count); }
KV_FN int kv_same_in_warp(int x) { return x; }
template <int COUNT>
KV_FN void kv_take_registers() {}
template <int COUNT>
KV_FN void kv_leave_registers() {}

// A descriptor has PTX's fields: address, bytes to the next panel, bytes to the next eight rows, and how chunks lie.
KV_FN unsigned kv_shared_address(const void* place) { return unsigned((const char*)place - fibers::shared); }
KV_FN kv_u64 kv_descriptor(const void* place, int panel, int eight_rows, int layout) {
  return kv_u64(kv_shared_address(place) >> 4) | kv_u64(panel >> 4) << 16 | kv_u64(eight_rows >> 4) << 32 | kv_u64(layout) << 62;
}
KV_FN kv_u64 kv_matrix(const void* place, int panel_bytes) { return kv_descriptor(place, panel_bytes, 1024, 1); }
KV_FN kv_u64 kv_small_matrix(const void* place) { return kv_descriptor(place, 128, 128, 0); }
KV_FN kv_u64 kv_matrix_from(kv_u64 matrix, int bytes) { return matrix + kv_u64(bytes >> 4); }

// The value in a row and column: the address before bits 4 to 6 are mixed with bits 7 to 9.
template <bool IS_BFLOAT>
KV_FN float kv_element(kv_u64 matrix, int row, int column) {
  const int address = int(matrix & 0x3fff) << 4, panel = int(matrix >> 16 & 0x3fff) << 4, eight_rows = int(matrix >> 32 & 0x3fff) << 4;
  int at = address + row / 8 * eight_rows + row % 8 * (matrix >> 62 ? 128 : 16) + column % 64 * 2;
  if (matrix >> 62) at += column / 64 * panel;
  if (matrix >> 62) at ^= at >> 3 & 0x70;
  const kv_u16 bits = *(const kv_u16*)(fibers::shared + at);
  return IS_BFLOAT ? fibers::bits_to_float(kv_u32(bits) << 16) : fibers::half_to_float(bits);
}

// Products that a lane has begun, by group; and what it writes into.
inline std::vector<std::deque<std::vector<std::function<void()>>>> kv_groups_begun;
inline std::vector<std::vector<std::function<void()>>> kv_products_next;
KV_FN std::vector<std::function<void()>>& kv_next_products() {
  kv_groups_begun.resize(fibers::lanes.size());
  kv_products_next.resize(fibers::lanes.size());
  return kv_products_next[fibers::current];
}
KV_FN void kv_written_for_products() { fibers::delay(true); }
KV_FN void kv_products_fence() {}
KV_FN void kv_products_begun() {
  auto& next = kv_next_products();
  kv_groups_begun[fibers::current].push_back(std::move(next));
  next.clear();
}
template <int PENDING>
KV_FN void kv_products_done() {
  fibers::delay(false);
  kv_next_products();  // none may have begun
  auto& groups = kv_groups_begun[fibers::current];
  while (groups.size() > PENDING) {
    for (auto& product : groups.front()) product();
    groups.pop_front();
  }
  __syncwarp();
}

template <int COUNT>
KV_FN void kv_products_own(float (&)[COUNT]) {}
template <int COUNT>
KV_FN void kv_products_own(kv_u32 (&)[COUNT]) {}

template <bool IS_BFLOAT, bool IS_ADDED>
KV_FN void kv_scores_begin(float (&c)[32], kv_u64 a, kv_u64 b) {
  const int g = fibers::current % 128 / 32 * 16 + fibers::current % 32 / 4, t = fibers::current % 4;
  float* const to = c;
  kv_next_products().push_back([=] {
    float rows[2][16];
    for (int r = 0; r < 2; ++r)
      for (int k = 0; k < 16; ++k) rows[r][k] = kv_element<IS_BFLOAT>(a, g + r * 8, k);
    for (int n = 0; n < 8; ++n)
      for (int j = 0; j < 2; ++j) {
        float sums[2] = {0, 0};
        for (int k = 0; k < 16; ++k) {
          const float other = kv_element<IS_BFLOAT>(b, n * 8 + 2 * t + j, k);
          for (int r = 0; r < 2; ++r) sums[r] += rows[r][k] * other;
        }
        for (int r = 0; r < 2; ++r) to[n * 4 + 2 * r + j] = sums[r] + (IS_ADDED ? to[n * 4 + 2 * r + j] : 0);
      }
  });
}

// Rows g and g + 8 of a fragment of 16.
template <bool IS_BFLOAT>
KV_FN std::array<std::array<float, 16>, 2> kv_fragment_rows(const kv_u32* a) {
  fibers::Slot mine;
  for (int i = 0; i < 4; ++i) mine.words[i] = a[i];
  const fibers::Slot* theirs = fibers::shown(mine);
  const int g = fibers::current % 32 / 4;
  std::array<std::array<float, 16>, 2> rows;
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k) {
      const kv_u32 word = theirs[g * 4 + k % 8 / 2].words[r + k / 8 * 2];
      const kv_u16 bits = kv_u16(word >> k % 2 * 16);
      rows[r][k] = IS_BFLOAT ? fibers::bits_to_float(kv_u32(bits) << 16) : fibers::half_to_float(bits);
    }
  return rows;
}

template <bool IS_BFLOAT, bool IS_ADDED>
KV_FN void kv_codes_begin(float (&c)[32], const kv_u32* a, kv_u64 b) {
  const auto rows = kv_fragment_rows<IS_BFLOAT>(a);
  const int t = fibers::current % 4;
  float* const to = c;
  kv_next_products().push_back([=] {
    for (int n = 0; n < 8; ++n)
      for (int j = 0; j < 2; ++j) {
        float sums[2];
        for (int r = 0; r < 2; ++r) sums[r] = IS_ADDED ? to[n * 4 + 2 * r + j] : 0;
        for (int k = 0; k < 16; ++k) {
          const float other = kv_element<IS_BFLOAT>(b, n * 8 + 2 * t + j, k);
          for (int r = 0; r < 2; ++r) sums[r] += rows[r][k] * other;
        }
        for (int r = 0; r < 2; ++r) to[n * 4 + 2 * r + j] = sums[r];
      }
  });
}

template <bool IS_BFLOAT, int N>
KV_FN void kv_mix_begin(float (&c)[N / 2], const kv_u32* a, kv_u64 b) {
  const auto rows = kv_fragment_rows<IS_BFLOAT>(a);
  const int t = fibers::current % 4;
  float* const to = c;
  kv_next_products().push_back([=] {
    for (int n = 0; n < N / 8; ++n)
      for (int j = 0; j < 2; ++j)
        for (int k = 0; k < 16; ++k) {
          const float other = kv_element<IS_BFLOAT>(b, k, n * 8 + 2 * t + j);
          for (int r = 0; r < 2; ++r) to[n * 4 + 2 * r + j] += rows[r][k] * other;
        }
  });
}
