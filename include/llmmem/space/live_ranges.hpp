/// @file
/// The live ranges of a space, to detect a range that it never allocated, or that was already deallocated.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// An invalid deallocation: a bug in the caller, found before any memory was touched.
struct misuse {
  /// What is wrong with the range.
  enum class kind : std::uint8_t {
    none,
    not_live,    ///< no live range is at that address: already deallocated, or of another space
    inside,      ///< the address is inside a live range, not at its start
    wrong_size,  ///< the address is right, but the length is not
    in_flight,   ///< a copy that uses it has not passed its fence
  };

  kind what = kind::none;
  const char* where = "";                ///< name of the space
  const std::byte* address = nullptr;    ///< as given
  std::uint64_t bytes = 0;               ///< as given
  const std::byte* live_from = nullptr;  ///< start of the live range that it overlaps, if any
  std::uint64_t live_bytes = 0;          ///< length of that range

  /// Returns one sentence for a person. Allocates.
  [[nodiscard]] LLMMEM_COLD std::string message() const {
    const auto at = [](const std::byte* p) {
      char text[32];
      std::snprintf(text, sizeof text, "%p", static_cast<const void*>(p));
      return std::string(text);
    };
    const auto n = [](std::uint64_t value) { return std::to_string(value); };
    std::string start = std::string(where) + ": deallocate of " + n(bytes) + " bytes at " + at(address);
    switch (what) {
      case kind::none:
        return start + ": valid";
      case kind::not_live:
        return start + ": no live range is there; it was already deallocated, or belongs to another space";
      case kind::inside:
        return start + ": that is inside the live range of " + n(live_bytes) + " bytes at " + at(live_from) +
               "; deallocate whole ranges";
      case kind::wrong_size:
        return start + ": the live range there has " + n(live_bytes) +
               " bytes; deallocate the range exactly as it was allocated";
      case kind::in_flight:
        return start + ": a copy that uses it is in flight; wait for its fence first";
    }
    return start;
  }
};

/// Receives a misuse instead of an exception, because `deallocate` may not throw. When it returns, the call
/// has no effect.
using misuse_handler = void (*)(const misuse&, void* context) noexcept;

/// The default handler: writes the message to stderr and aborts, as C libraries do on a double free.
[[noreturn]] inline void abort_on_misuse(const misuse& what, void*) noexcept {
  std::fprintf(stderr, "%s\n", what.message().c_str());
  std::abort();
}

/// The live ranges of a space, ordered by address, each with a `Payload` (how to deallocate it).
///
/// @par Complexity      look-up O(log n), insertion and removal O(n) moves of one entry: spaces allocate
///   slabs and arenas, hundreds of ranges, not millions.
/// @par Thread safety   none; the space holds its lock.
/// @par Errors          nothing throws.
template <class Payload>
class live_ranges {
 public:
  struct entry {
    const std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    Payload payload{};
  };

  /// Makes space for one more range, so that `insert` cannot fail. False when there is no memory for it.
  [[nodiscard]] bool reserve_one() noexcept {
    if (entries_.size() < entries_.capacity()) return true;
    try {
      entries_.reserve(entries_.capacity() < 16 ? 16 : entries_.capacity() * 2);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  /// @pre `reserve_one()` was true since the last `insert`; the range overlaps no live one.
  void insert(const std::byte* data, std::uint64_t bytes, const Payload& payload) noexcept {
    entries_.insert(entries_.begin() + (after(data) - entries_.data()), entry{data, bytes, payload});
  }

  /// Returns the live range that contains all of `[data, data + bytes)`, or null. O(log n).
  [[nodiscard]] const entry* holding(const std::byte* data, std::uint64_t bytes) const noexcept {
    const entry* e = below(data);
    if (e == nullptr) return nullptr;
    const auto offset = distance(e->data, data);
    return offset <= e->bytes && bytes <= e->bytes - offset ? e : nullptr;
  }

  /// Returns what is wrong with deallocating `[data, data + bytes)`.
  [[nodiscard]] misuse check(const char* where, const std::byte* data, std::uint64_t bytes) const noexcept {
    misuse found{.what = misuse::kind::none, .where = where, .address = data, .bytes = bytes};
    const entry* e = below(data);
    if (e == nullptr || distance(e->data, data) >= e->bytes) {
      found.what = misuse::kind::not_live;
      return found;
    }
    found.live_from = e->data;
    found.live_bytes = e->bytes;
    if (e->data != data) {
      found.what = misuse::kind::inside;
    } else if (e->bytes != bytes) {
      found.what = misuse::kind::wrong_size;
    }
    return found;
  }

  /// Removes the range that starts at `data` and returns it. @pre `check` found nothing wrong.
  entry remove(const std::byte* data) noexcept {
    const auto place = entries_.begin() + (below(data) - entries_.data());
    const entry removed = *place;
    entries_.erase(place);
    return removed;
  }

  /// Returns the lowest multiple of `alignment` from `begin` on where `bytes` are free, for spaces whose
  /// addresses are numbers. O(n). @pre `bytes` and `alignment` are at most 2^63, `alignment` is not 0.
  [[nodiscard]] std::uint64_t first_gap(std::uint64_t begin, std::uint64_t bytes,
                                        std::uint64_t alignment) const noexcept {
    const auto aligned = [alignment](std::uint64_t offset) {
      return (offset + alignment - 1) / alignment * alignment;
    };
    std::uint64_t offset = aligned(begin);
    for (const entry& live : entries_) {
      const std::uint64_t from = distance(nullptr, live.data);
      if (from >= offset && from - offset >= bytes) break;
      offset = aligned(from + live.bytes);
    }
    return offset;
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] auto begin() const noexcept { return entries_.begin(); }
  [[nodiscard]] auto end() const noexcept { return entries_.end(); }

  /// Bytes of this table itself.
  [[nodiscard]] std::uint64_t metadata_bytes() const noexcept { return entries_.capacity() * sizeof(entry); }

  /// Proves that the ranges are in order and do not overlap; returns one sentence for each violation. O(n);
  /// allocates.
  [[nodiscard]] std::vector<std::string> audit(const char* where) const {
    std::vector<std::string> found;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::string who = std::string(where) + ": live range " + std::to_string(i);
      if (entries_[i].bytes == 0) found.push_back(who + " is empty");
      if (i != 0 && distance(entries_[i - 1].data, entries_[i].data) < entries_[i - 1].bytes) {
        found.push_back(who + " overlaps the one before it");
      }
    }
    return found;
  }

 private:
  [[nodiscard]] static std::uint64_t distance(const std::byte* from, const std::byte* to) noexcept {
    return reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from);
  }

  /// Returns the first entry that starts after `data`.
  [[nodiscard]] const entry* after(const std::byte* data) const noexcept {
    const entry* first = entries_.data();
    for (std::size_t count = entries_.size(); count != 0;) {
      const std::size_t half = count / 2;
      if (reinterpret_cast<std::uintptr_t>(first[half].data) <= reinterpret_cast<std::uintptr_t>(data)) {
        first += half + 1;
        count -= half + 1;
      } else {
        count = half;
      }
    }
    return first;
  }

  /// Returns the last entry that starts at or before `data`, or null.
  [[nodiscard]] const entry* below(const std::byte* data) const noexcept {
    const entry* next = after(data);
    return next == entries_.data() ? nullptr : next - 1;
  }

  std::vector<entry> entries_;
};

}  // namespace v0
}  // namespace llmmem
