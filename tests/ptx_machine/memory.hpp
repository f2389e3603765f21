/// @file
/// The device's memory. The machine reserves device addresses and maps none of them, so that a host that
/// follows one crashes as it would with a GPU. The bytes are kept elsewhere, and a shadow tells of each
/// byte whether it was written, and which lanes last wrote and read it since the launch began.
#pragma once

#include "ptx_machine/parse.hpp"

#include <sys/mman.h>
#include <cstring>

namespace ptx_machine {

/// Zeroed memory that takes no pages until it is touched.
class zeroed {
 public:
  zeroed() = default;
  explicit zeroed(u64 bytes) : bytes_(std::max<u64>(bytes, 1)) {
    void* const made =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    at_ = static_cast<u8*>(made);
  }
  zeroed(zeroed&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(other.bytes_) {}
  zeroed& operator=(zeroed&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~zeroed() {
    if (at_ != nullptr) munmap(at_, bytes_);
  }
  [[nodiscard]] u8* data() const { return at_; }

 private:
  u8* at_ = nullptr;
  u64 bytes_ = 0;
};

/// Bytes and their shadow. Several regions may map one backing.
struct backing {
  zeroed bytes;
  zeroed written;  // 0xFF of each byte that was written
  zeroed writer;   // of each byte a record (u32) of its last writer
  zeroed reader;   // and of its last reader
  u64 size = 0;

  explicit backing(u64 count)
      : bytes(count), written(count), writer(4 * count), reader(4 * count), size(count) {}
};

/// A range of addresses that kernels may access. `written` null: every byte counts as written. `writer` null:
/// the race check leaves it out.
struct region {
  u64 base = 0;
  u64 size = 0;
  u8* host = nullptr;
  u8* written = nullptr;
  u32* writer = nullptr;
  u32* reader = nullptr;
  std::shared_ptr<backing> keeps{};
  bool is_allowed = true;

  region() = default;
  region(u64 at, std::shared_ptr<backing> of)
      : base(at),
        size(of->size),
        host(of->bytes.data()),
        written(of->written.data()),
        writer(reinterpret_cast<u32*>(of->writer.data())),
        reader(reinterpret_cast<u32*>(of->reader.data())),
        keeps(std::move(of)) {}
};

class device_memory {
 public:
  static constexpr u64 reach = u64{1} << 44;
  static constexpr u64 capacity = u64{16} << 30;

  device_memory() {
    void* const made = mmap(nullptr, reach, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    first_ = reinterpret_cast<u64>(made);
    next_ = (first_ + (u64{1} << 21)) >> 21 << 21;
  }

  [[nodiscard]] bool is_device(u64 at) const { return at - first_ < reach; }
  [[nodiscard]] u64 used() const { return used_; }
  [[nodiscard]] u64 generation() const { return generation_; }

  /// Addresses that were never given before, and a gap behind them. 0: no addresses are left.
  u64 reserve(u64 bytes, u64 align) {
    const u64 at = (next_ + align - 1) / align * align;
    next_ = at + bytes + 65536;
    return next_ < first_ + reach ? at : 0;
  }
  /// The address of new memory; 0 when the device has fewer bytes left.
  u64 allocate(u64 bytes) {
    if (bytes > capacity - std::min(capacity, used_)) return 0;
    const u64 at = reserve(bytes, 512);
    if (at != 0) put(region(at, std::make_shared<backing>(bytes)));
    return at;
  }
  void put(region made) {
    if (made.keeps) used_ += made.size;
    regions_[made.base] = std::move(made);
    ++generation_;
  }
  bool take(u64 at) {
    const auto found = regions_.find(at);
    if (found == regions_.end()) return false;
    if (found->second.keeps) used_ -= found->second.size;
    last_freed_ = {at, found->second.size};
    regions_.erase(found);
    ++generation_;
    return true;
  }
  [[nodiscard]] region* find(u64 at) {
    auto next = regions_.upper_bound(at);
    if (next == regions_.begin()) return nullptr;
    region& found = (--next)->second;
    return at - found.base < found.size || at == found.base ? &found : nullptr;
  }
  /// Describes where `at` lies relative to the nearest allocation, for messages.
  [[nodiscard]] std::string whereabouts(u64 at) {
    if (at - last_freed_.first < last_freed_.second) return "inside memory that was freed";
    auto next = regions_.upper_bound(at);
    if (next != regions_.begin()) {
      const region& before = std::prev(next)->second;
      if (at - before.base < before.size + 65536)
        return std::to_string(at - before.base) + " bytes into an allocation of " +
               std::to_string(before.size);
    }
    if (next != regions_.end() && next->first - at <= 65536)
      return std::to_string(next->first - at) + " bytes before an allocation of " +
             std::to_string(next->second.size);
    return "near no allocation";
  }

  /// Calls `act(host bytes, their "written" or null, count)` for each piece of a range. Returns false where a
  /// part of the range is no device memory or may not be accessed. Host memory is one piece.
  template <class Act>
  bool pieces(u64 at, u64 bytes, const Act& act) {
    if (!is_device(at)) return act(reinterpret_cast<u8*>(at), static_cast<u8*>(nullptr), bytes), true;
    while (bytes != 0) {
      region* const found = find(at);
      if (found == nullptr || !found->is_allowed || at - found->base >= found->size) return false;
      const u64 off = at - found->base;
      const u64 count = std::min(bytes, found->size - off);
      act(found->host + off, found->written + off, count);
      at += count;
      bytes -= count;
    }
    return true;
  }
  bool copy(u64 to, u64 from, u64 bytes) {
    std::vector<std::pair<u8*, u8*>> at;  // of every piece of the source
    std::vector<u64> counts;
    if (!pieces(from, bytes, [&](u8* host, u8* written, u64 count) {
          at.emplace_back(host, written);
          counts.push_back(count);
        }))
      return false;
    std::size_t piece = 0;
    u64 used = 0;
    return pieces(to, bytes, [&](u8* host, u8* written, u64 count) {
      while (count != 0) {
        const u64 some = std::min(count, counts[piece] - used);
        std::memmove(host, at[piece].first + used, some);
        if (written != nullptr && at[piece].second != nullptr)
          std::memmove(written, at[piece].second + used, some);
        else if (written != nullptr)
          std::memset(written, 0xFF, some);
        host += some;
        if (written != nullptr) written += some;
        count -= some;
        if ((used += some) == counts[piece]) ++piece, used = 0;
      }
    });
  }
  bool fill(u64 to, int value, u64 bytes) {
    return pieces(to, bytes, [&](u8* host, u8* written, u64 count) {
      std::memset(host, value, count);
      if (written != nullptr) std::memset(written, 0xFF, count);
    });
  }
  /// Forgets who read and wrote what.
  void forget_accesses() {
    for (auto& [base, each] : regions_) {
      if (each.writer == nullptr) continue;
      madvise(each.writer, 4 * each.size, MADV_DONTNEED);
      madvise(each.reader, 4 * each.size, MADV_DONTNEED);
    }
  }

 private:
  std::map<u64, region> regions_{};
  u64 first_ = 0;
  u64 next_ = 0;
  u64 used_ = 0;
  u64 generation_ = 1;
  std::pair<u64, u64> last_freed_{0, 0};
};

}  // namespace ptx_machine
