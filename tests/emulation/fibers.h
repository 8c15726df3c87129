// Runs the lanes of a block as fibers, one at a time; those of a warp, and of a block, wait for each other where they meet.
#ifdef __APPLE__
#define _XOPEN_SOURCE 700  // without it Apple's <ucontext.h> refuses to be included
#define _DARWIN_C_SOURCE   // with it alone the rest of the C library is hidden
#endif
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>

namespace fibers {

constexpr int STACK = 256 << 10;
struct Index {
  unsigned x, y, z;
};
struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool is_started, is_done;
};
struct Meeting {
  int arrived, number;
};
union Slot {
  float values[8];
  uint32_t words[8];
  const void* place;
};

inline Index thread, block, blocks;
inline std::vector<Fiber> lanes;
inline std::vector<Meeting> warps;
inline std::vector<Slot> slots;  // two per lane: a lane may be one meeting ahead of another
inline std::vector<Meeting> all;                      // by block, of those that run at once
inline std::vector<std::array<Meeting, 16>> named;  // as `all`
inline Meeting grid;
inline bool are_blocks_together;  // all of a grid's row run at once, because they wait for each other; else one does
inline bool are_warps_apart;  // each goes as far as it can alone; else all of a block go on together
inline int block_lanes;
inline int current, moves;
inline bool are_copies_early;  // asynchronous copies arrive as early as they may, or as late
inline long products, block_meetings, shown_values;  // so far, of all lanes
inline jmp_buf scheduler;
inline std::function<void()> body;
inline char* shared;

inline void leave() {
  if (!_setjmp(lanes[current].here)) _longjmp(scheduler, 1);
}

// Let others run for a while, of some turns of a block's life: so that those who do not wait for each other meet in
// every order. Of two kinds of lanes now one is slow, now the other.
inline void delay(bool is_first_kind) {
  if ((moves >> 15 & 1) == is_first_kind) return;
  for (int left = 40 + moves % 60; left; --left) {
    ++moves;
    leave();
  }
}

inline void run_lane() {
  body();
  lanes[current].is_done = true;
  ++moves;
  _longjmp(scheduler, 1);
}

inline void meet(Meeting& meeting, int count) {
  int number = meeting.number;
  ++moves;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.number;
    return;
  }
  while (meeting.number == number) leave();
}

inline void meet_warp() { meet(warps[current / 32], 32); }
inline void meet_block() {
  ++block_meetings;
  meet(all[current / block_lanes], block_lanes);
}
inline void meet_named(int id, int count) { meet(named[current / block_lanes][id], count); }
inline void meet_grid() { meet(grid, int(lanes.size())); }

// Show a slot to the other lanes of the warp; returns theirs.
inline const Slot* shown(const Slot& mine) {
  int warp = current / 32, side = warps[warp].number % 2;
  Slot* theirs = &slots[(warp * 2 + side) * 32];
  theirs[current % 32] = mine;
  ++shown_values;
  meet_warp();
  return theirs;
}

// One turn of each of some lanes; how many are left.
inline size_t run_lanes(size_t first, size_t count) {
  size_t left = 0;
  for (size_t i = first; i < first + count; ++i) {
    Fiber& fiber = lanes[i];
    if (fiber.is_done) continue;
    current = int(i);
    thread = {unsigned(i % block_lanes), 0, 0};
    if (!_setjmp(scheduler)) {
      if (fiber.is_started) _longjmp(fiber.here, 1);
      fiber.is_started = true;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = STACK;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, run_lane, 0);
      setcontext(&fiber.start);
    }
    left += !lanes[current].is_done;
  }
  return left;
}

// Each of some parts goes as far as it can before the next one does: one that does not wait for the others is too early.
// Where copies are late the last part is the first, so that each part is early in one of the two.
inline size_t run_far(size_t first, size_t count, size_t each) {
  size_t left = 0;
  for (size_t at = count; at; at -= each) {
    size_t own_left = each;
    for (int own = moves - 1; own != moves && own_left;) {
      own = moves;
      own_left = run_lanes(are_copies_early ? first + count - at : first + at - each, each);
    }
    left += own_left;
  }
  return left;
}

inline void run_blocks(const std::vector<char*>& memories) {
  for (Fiber& fiber : lanes) fiber.is_started = fiber.is_done = false;
  for (Meeting& warp : warps) warp = {0, 0};
  all.assign(memories.size(), {0, 0});
  named.assign(memories.size(), {});
  grid = {0, 0};
  for (size_t left = lanes.size(); left;) {
    int before = moves;
    left = 0;
    for (size_t i = 0; i < memories.size(); ++i) {
      shared = memories[i];
      if (are_blocks_together) block.x = unsigned(i);
      size_t own_left = block_lanes;
      for (int own = moves - 1; own != moves && own_left;) {
        own = moves;
        own_left = run_far(i * block_lanes, block_lanes, are_warps_apart ? 32 : block_lanes);
      }
      left += own_left;
    }
    if (left && moves == before) {
      std::fprintf(stderr, "lanes wait for each other where not all of them come\n");
      std::abort();
    }
  }
}

// Run `kernel` for every block of a grid, with shared memory that holds noise at first.
inline void run(const int* grid, int lane_count, int shared_bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  blocks = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
  block_lanes = lane_count;
  const int at_once = are_blocks_together ? grid[0] : 1;
  lanes.resize(lane_count * at_once);
  for (Fiber& fiber : lanes)
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
  warps.assign(lanes.size() / 32, {0, 0});
  slots.assign(lanes.size() * 2, Slot{});
  const int each = (shared_bytes + 31) / 16 * 16;
  std::unique_ptr<char[]> memory(new char[each * at_once + 16]);
  std::vector<char*> memories;
  for (int i = 0; i < at_once; ++i)
    memories.push_back((char*)((uintptr_t(memory.get()) + 15) & ~uintptr_t(15)) + i * each);
  for (block.z = 0; block.z < blocks.z; ++block.z)
    for (block.y = 0; block.y < blocks.y; ++block.y)
      for (int first = 0; first < int(blocks.x); first += at_once) {
        block.x = first;
        for (char* each_memory : memories) std::memset(each_memory, 0xff, shared_bytes);
        run_blocks(memories);
      }
}

// A GPU reads 16 bytes at a time only from multiples of 16.
inline void expect_aligned(const void* place) {
  if (!(uintptr_t(place) % 16)) return;
  std::fprintf(stderr, "16 bytes at an address that is no multiple of 16\n");
  std::abort();
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float half_to_float(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return float(x);
}
inline uint16_t float_to_half(float value) {
  _Float16 x = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &x, 2);
  return bits;
}
inline uint16_t float_to_bfloat(float x) {
  uint32_t bits = float_to_bits(x);
  if (x != x) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float shuffled(float value, int lane) {
  Slot mine;
  mine.values[0] = value;
  return shown(mine)[lane].values[0];
}

// A 16-bit type of the dialects.
template <bool IS_BFLOAT>
struct Short {
  uint16_t bits;
  Short() = default;
  explicit Short(float x) : bits(IS_BFLOAT ? float_to_bfloat(x) : float_to_half(x)) {}
  operator float() const { return IS_BFLOAT ? bits_to_float(uint32_t(bits) << 16) : half_to_float(bits); }
};

// An argument copied to memory of just its size, so that an address sanitizer sees what lies beside it.
struct Copied {
  std::unique_ptr<char[]> bytes;
  Copied(const void* from, long size) : bytes(new char[size]) { std::memcpy(bytes.get(), from, size); }
};

}  // namespace fibers
