// MLX arrays over the mapped pages of a file, by MLX's own C++ headers. Plain functions, which Python calls by ctypes:
// neither Python's headers nor nanobind's are needed.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "mlx/allocator.h"
#include "mlx/array.h"

namespace {

namespace mx = mlx::core;
using mx::allocator::Buffer;

// Where the bytes of mapped files begin and end; any thread may drop the last array over one.
class Files {
 public:
  static Files& of_all() {
    static auto* files = new Files;  // an array may outlive every static
    return *files;
  }

  void add(const char* start, const char* end) {
    std::lock_guard guard(lock_);
    ends_[start] = end;
  }

  void remove(const char* start) {
    std::lock_guard guard(lock_);
    ends_.erase(start);
  }

  // Take the whole pages of these bytes out of this process's memory, if they are a file's.
  void let_go(const char* start, size_t bytes) {
    std::lock_guard guard(lock_);
    auto after = ends_.upper_bound(start);
    if (after == ends_.begin() || std::prev(after)->second < start + bytes) return;
    uintptr_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<uintptr_t>(start);
    uintptr_t first = (at + page - 1) / page * page, end = (at + bytes) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
  }

 private:
  std::mutex lock_;
  std::map<const char*, const char*> ends_;
};

// A file's pages behind a page of our own, and MLX's buffer over them. It refers to no array, and every array over it
// holds it: the pages go with the last one.
class Mapping {
 public:
  // Null if the system maps no such file, or MLX's device takes no such pages.
  static std::shared_ptr<Mapping> of(int file, size_t bytes, bool is_read_ahead) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t room = page + (bytes + page - 1) / page * page;
    // Read only and shared: macOS makes an own copy, which it cannot drop, of each page of a private mapping that may
    // be written, as soon as it is read. MLX writes over no buffer that it has not allocated itself.
    void* whole = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return nullptr;
    auto made = std::shared_ptr<Mapping>(new Mapping(whole, room));
    auto* start = static_cast<char*>(whole) + page;
    if (mmap(start, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return nullptr;
    if (is_read_ahead) madvise(start, bytes, MADV_WILLNEED);
    if (!made->take(start, bytes, room - page)) return nullptr;
    Files::of_all().add(start, start + bytes);
    return made;
  }

  ~Mapping() {
    Files::of_all().remove(static_cast<char*>(whole_) + sysconf(_SC_PAGESIZE));
    if (is_devices_) mx::allocator::release(buffer_);
    munmap(whole_, room_);
  }

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Buffer buffer() const { return buffer_; }

 private:
  Mapping(void* whole, size_t room) : whole_(whole), room_(room), buffer_(nullptr) {}

  bool take(char* start, size_t bytes, size_t whole_pages) {
    // Metal: newBufferWithBytesNoCopy, over whole pages. The CPU's allocator has no such call and gives null.
    buffer_ = mx::allocator::make_buffer(start, whole_pages);
    is_devices_ = buffer_.ptr() != nullptr;
    if (is_devices_) return buffer_.raw_ptr() == start;
    if (!has_size_in_front()) return false;
    std::memcpy(start - sizeof(size_t), &bytes, sizeof(size_t));
    buffer_ = Buffer(start - sizeof(size_t));
    return buffer_.raw_ptr() == start && mx::allocator::allocator().size(buffer_) == bytes;
  }

  // Whether MLX's buffers are plain memory with their size in front, as they are where it has no GPU.
  static bool has_size_in_front() {
    mx::allocator::Data tried = mx::allocator::malloc(64);
    Buffer buffer = tried.buffer();
    return buffer.raw_ptr() == static_cast<char*>(buffer.ptr()) + sizeof(size_t);
  }

  void* whole_;
  size_t room_;
  Buffer buffer_;
  bool is_devices_ = false;
};

}  // namespace

extern "C" {

// Map a file; null if that cannot be done. The caller frees it, arrays over it stay valid.
void* kvasir_map(int file, size_t bytes, bool is_read_ahead) {
  try {
    auto mapping = Mapping::of(file, bytes, is_read_ahead);
    if (!mapping) return nullptr;
    mx::allocator::Data data(mapping->buffer(), [mapping](Buffer) {});
    if (data.is_owned()) return nullptr;  // MLX would write results over it
    return new mx::array(std::move(data), mx::Shape{1}, mx::uint8);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Make an array one over mapped bytes from `offset` on, a multiple of its items' size. It keeps its shape and type;
// what would have computed it is forgotten.
void kvasir_place(mx::array* target, const mx::array* mapped, size_t offset) {
  const auto& shape = target->shape();
  auto longest = std::max_element(shape.begin(), shape.end());
  bool is_line = longest == shape.end() || static_cast<size_t>(*longest) == target->size();
  mx::array placed(shape, target->dtype(), nullptr, {});
  auto items = static_cast<int64_t>(offset / target->itemsize());
  placed.copy_shared_buffer(*mapped, placed.strides(), {true, true, is_line}, target->size(), items);
  placed.set_status(mx::array::Status::available);
  target->overwrite_descriptor(placed);
}

// The bytes under an array are not used again soon; if they are, the system reads them again.
void kvasir_let_go(const mx::array* array) {
  if (array->is_available()) Files::of_all().let_go(array->data<char>(), array->nbytes());
}

void kvasir_free(mx::array* mapped) { delete mapped; }

}  // extern "C"
