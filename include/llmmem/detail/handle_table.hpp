/// @file
/// Records of a fixed capacity, named by handles that detect when they are stale.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/ordered_slots.hpp>
#include <llmmem/detail/owner_tag.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Slots with a `Record` each. A slot's generation is odd while it is live, so a handle from an earlier
/// generation, or one that was never handed out, differs from the slot's present owner.
///
/// `Handle` is an aggregate of `slot`, `generation` and `owner`.
///
/// @par Complexity   every operation O(1).
/// @par Errors   those of the constructor; nothing else fails or allocates.
template <class Handle, class Record>
class handle_table {
 public:
  handle_table(std::uint64_t capacity, const metadata_source& source, const char* what)
      : entries_(capacity, source, what), owner_(owner_tag(entries_.data())) {}

  /// Returns a slot with a fresh record, or `no_index` when all are live.
  [[nodiscard]] std::uint32_t acquire(const Record& record) noexcept {
    std::uint32_t slot = free_;
    if (slot != no_index) {
      free_ = entries_[slot].next_free;
    } else if (touched_ < entries_.size()) {
      slot = static_cast<std::uint32_t>(touched_++);
      entries_[slot].generation = 0;
    } else {
      return no_index;
    }
    entry& e = entries_[slot];
    e.record = record;
    ++e.generation;
    ++live_;
    return slot;
  }

  /// @pre `slot` is live.
  void release(std::uint32_t slot) noexcept {
    ++entries_[slot].generation;
    entries_[slot].next_free = free_;
    free_ = slot;
    --live_;
  }

  /// Makes every handle to `slot` stale, without releasing it. @pre `slot` is live.
  void renew(std::uint32_t slot) noexcept { entries_[slot].generation += 2; }

  [[nodiscard]] Handle handle(std::uint32_t slot) const noexcept {
    return {.slot = slot, .generation = entries_[slot].generation, .owner = owner_};
  }

  /// Returns what is wrong with `handle`; the code is `errc::ok` if nothing is.
  [[nodiscard]] failure check(const Handle& handle, const char* where) const noexcept {
    if (handle.owner == owner_ && handle.slot < touched_ &&
        entries_[handle.slot].generation == handle.generation) {
      return {};
    }
    return refusal(handle, where);
  }

  [[nodiscard]] Record& operator[](std::uint32_t slot) noexcept { return entries_[slot].record; }
  [[nodiscard]] const Record& operator[](std::uint32_t slot) const noexcept { return entries_[slot].record; }

  /// Slots below this have been live at some time; `is_live` says which are now.
  [[nodiscard]] std::uint32_t touched() const noexcept { return static_cast<std::uint32_t>(touched_); }
  [[nodiscard]] bool is_live(std::uint32_t slot) const noexcept {
    return (entries_[slot].generation & 1U) != 0;
  }
  [[nodiscard]] std::uint64_t live() const noexcept { return live_; }
  [[nodiscard]] std::uint64_t left() const noexcept { return entries_.size() - live_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return entries_.bytes(); }

 private:
  struct entry {
    Record record;
    std::uint32_t generation;
    std::uint32_t next_free;
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(const Handle& handle, const char* where) const noexcept {
    failure wrong{.index = handle.slot, .wanted = handle.generation, .where = where};
    if (handle.owner == 0) {
      wrong.code = errc::null_handle;
    } else if (handle.owner != owner_ || handle.slot >= touched_) {
      wrong.code = errc::foreign_handle;
    } else {
      wrong.code = errc::stale_handle;
      wrong.found = entries_[handle.slot].generation;
    }
    return wrong;
  }

  fixed_array<entry> entries_;
  std::uint64_t touched_ = 0;  // slots from here on were never live, and their memory never written
  std::uint64_t live_ = 0;
  std::uint32_t free_ = no_index;
  std::uint32_t owner_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
