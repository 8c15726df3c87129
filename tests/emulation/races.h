// Watches each access that a kernel makes, by the hooks of -fsanitize=thread, whose runtime this replaces: in a block's
// shared memory two lanes that no barrier orders, a read before any write, and everything beside its end; beside
// inputs and outputs; writes to inputs that a kernel only reads. It sees no races in inputs and outputs, nothing in a
// lane's own arrays or farther than GUARD from memory that it knows, and only what the launches of a test do. Of a lane
// that reads and then writes a place at once, clang shows the write alone.
namespace races {

constexpr long GUARD = 1 << 16;
constexpr int WARPS = 8;  // of a block, at most
struct Region {
  char* begin;
  long size;
  bool is_written;
  const char* name;
};
struct Access {
  int lane = -1, block_barriers = 0, warp_barriers = 0;
};
struct Word {
  Access write;
  Access reads[WARPS];  // since that write, the latest of each warp: earlier ones are ordered before it
};
constexpr int SEVERAL = 1 << 20;  // in place of a lane: several lanes of a warp, between the same barriers
inline std::vector<Region> regions;
inline std::vector<Word> words;  // of shared memory
inline std::vector<int> block_barriers, warp_barriers;  // that each lane has passed
inline char fault[256];
inline jmp_buf end;
inline char* shared_begin;
inline long shared_size;
inline bool is_running;
inline long read_bytes[2], written_bytes[2];  // of inputs and outputs, of shared memory

#define KV_UNWATCHED __attribute__((no_sanitize("thread")))

// Ends the launch: what follows may read anywhere.
KV_UNWATCHED inline void found(const char* kind, const char* where, long at) {
  std::snprintf(fault, sizeof fault, "%s: %s at byte %ld", kind, where, at);
  is_running = false;
  _longjmp(end, 1);
}

KV_UNWATCHED inline void begin_block(char* begin, long size) {
  if (fibers::lanes.size() > 32 * WARPS) std::abort();
  shared_begin = begin, shared_size = size;
  words.assign(size / 4, Word{});
  block_barriers.assign(fibers::lanes.size(), 0);
  warp_barriers.assign(fibers::lanes.size(), 0);
}

// Whether barriers order an access of a warp before the present lane's.
KV_UNWATCHED inline bool is_ordered(const Access& one, int warp, int lane) {
  if (one.lane < 0 || one.lane == lane || one.block_barriers < block_barriers[lane]) return true;
  return warp == lane / 32 && one.warp_barriers < warp_barriers[lane];
}

KV_UNWATCHED inline void accessed_shared(long at, bool is_write) {
  Word& word = words[at / 4];
  const int lane = fibers::current, warp = lane / 32;
  if (word.write.lane < 0 && !is_write) found("a read before any write", "shared memory", at);
  if (!is_ordered(word.write, word.write.lane / 32, lane)) found("a race", "shared memory", at);
  Access mine;
  mine.lane = lane, mine.block_barriers = block_barriers[lane], mine.warp_barriers = warp_barriers[lane];
  if (is_write) {
    for (int other = 0; other < WARPS; ++other) {
      if (!is_ordered(word.reads[other], other, lane)) found("a race", "shared memory", at);
      word.reads[other] = Access{};
    }
    word.write = mine;
    return;
  }
  Access& read = word.reads[warp];
  if (read.lane >= 0 && read.lane != lane && read.block_barriers == mine.block_barriers &&
      read.warp_barriers == mine.warp_barriers)
    mine.lane = SEVERAL;
  read = mine;
}

KV_UNWATCHED inline void accessed(void* place, long size, bool is_write) {
  if (!is_running) return;
  is_running = false;  // these accesses are not the kernel's
  char* first = (char*)place;
  if (shared_begin && first + size > shared_begin - GUARD && first < shared_begin + shared_size + GUARD) {
    (is_write ? written_bytes : read_bytes)[1] += size;
    for (long at = (first - shared_begin) & ~3L; at < first - shared_begin + size; at += 4)
      if (at < 0 || at >= shared_size)
        found("out of bounds", "shared memory", at);
      else
        accessed_shared(at, is_write);
  } else {
    for (const Region& region : regions) {
      if (first + size <= region.begin - GUARD || first >= region.begin + region.size + GUARD) continue;
      (is_write ? written_bytes : read_bytes)[0] += size;
      if (first < region.begin || first + size > region.begin + region.size)
        found("out of bounds", region.name, first - region.begin);
      else if (is_write && !region.is_written)
        found("a write to what is read only", region.name, first - region.begin);
      break;
    }
  }
  is_running = true;
}

KV_UNWATCHED inline void block_met() {
  fibers::meet_block();
  ++block_barriers[fibers::current];
}
KV_UNWATCHED inline void warp_met() {
  fibers::meet_warp();
  ++warp_barriers[fibers::current];
}

// Memory with a guard on both sides.
struct Guarded {
  std::unique_ptr<char[]> bytes;
  char* begin;
  KV_UNWATCHED Guarded(const void* from, long size, bool is_written, const char* name)
      : bytes(new char[size + 2 * GUARD + 16]) {
    begin = (char*)((uintptr_t(bytes.get()) + GUARD + 15) & ~uintptr_t(15));
    std::memcpy(begin, from, size);
    regions.push_back({begin, size, is_written, name});
  }
};

}  // namespace races

extern "C" {
KV_UNWATCHED void __tsan_init() {}
KV_UNWATCHED void __tsan_func_entry(void*) {}
KV_UNWATCHED void __tsan_func_exit() {}
KV_UNWATCHED void __tsan_vptr_update(void**, void*) {}
KV_UNWATCHED void __tsan_vptr_read(void**) {}
#define KV_HOOKS(SIZE)                                                                        \
  KV_UNWATCHED void __tsan_read##SIZE(void* place) { races::accessed(place, SIZE, false); }   \
  KV_UNWATCHED void __tsan_write##SIZE(void* place) { races::accessed(place, SIZE, true); }   \
  KV_UNWATCHED void __tsan_unaligned_read##SIZE(void* place) { races::accessed(place, SIZE, false); } \
  KV_UNWATCHED void __tsan_unaligned_write##SIZE(void* place) { races::accessed(place, SIZE, true); }
KV_HOOKS(1) KV_HOOKS(2) KV_HOOKS(4) KV_HOOKS(8) KV_HOOKS(16)
// Clang's, for copies that it does not make itself.
KV_UNWATCHED void* __tsan_memcpy(void* to, const void* from, size_t size) {
  races::accessed((void*)from, long(size), false), races::accessed(to, long(size), true);
  return std::memcpy(to, from, size);
}
KV_UNWATCHED void* __tsan_memmove(void* to, const void* from, size_t size) {
  races::accessed((void*)from, long(size), false), races::accessed(to, long(size), true);
  return std::memmove(to, from, size);
}
KV_UNWATCHED void* __tsan_memset(void* to, int value, size_t size) {
  races::accessed(to, long(size), true);
  return std::memset(to, value, size);
}
KV_UNWATCHED void __tsan_read_range(void* place, size_t size) { races::accessed(place, long(size), false); }
KV_UNWATCHED void __tsan_write_range(void* place, size_t size) { races::accessed(place, long(size), true); }
}
