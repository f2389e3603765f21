/// @file
/// The chunks that a schedule knows, and their numbers in its trace. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Maps the handles of a buffer's chunks to dense numbers, in the order in which the chunks were added, and
/// back. A chunk keeps its number until `close_gaps` after a `remove`.
///
/// @par Complexity      `find`, `remove` and `operator[]` O(1), `add` O(1) amortised, `close_gaps` O(chunks)
///                      after a `remove` and O(1) otherwise.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors          `add` throws `std::bad_alloc` and then changes nothing.
class scheduled_chunks {
 public:
  [[nodiscard]] std::optional<chunk_id> find(chunk_handle chunk) const noexcept {
    if (chunk.slot >= number_of_slot_.size() || number_of_slot_[chunk.slot] == none) return {};
    const std::uint32_t number = number_of_slot_[chunk.slot];
    if (chunks_[number] != chunk) return {};
    return chunk_id{number};
  }
  /// Returns the number of `chunk`, and gives a new chunk a new number. Closes gaps first.
  chunk_id add(chunk_handle chunk);
  /// Forgets `chunk`. Its number stays unused until `close_gaps`. Returns false for an unknown chunk.
  bool remove(chunk_handle chunk) noexcept;
  /// Numbers the remaining chunks from 0 again, in their order.
  void close_gaps() noexcept;

  /// @pre `chunk` is below `size()`; after a `remove`, its gap has the handle `{}`.
  [[nodiscard]] chunk_handle operator[](chunk_id chunk) const noexcept { return chunks_[to_index(chunk)]; }
  [[nodiscard]] std::size_t size() const noexcept { return chunks_.size(); }
  /// By number.
  [[nodiscard]] std::span<const chunk_handle> all() const noexcept LLMMEM_LIFETIMEBOUND { return chunks_; }

 private:
  static constexpr std::uint32_t none = ~0U;

  std::vector<chunk_handle> chunks_;           // by number
  std::vector<std::uint32_t> number_of_slot_;  // `none` for the slot of an unknown chunk
  bool has_gaps_ = false;
};

inline chunk_id scheduled_chunks::add(chunk_handle chunk) {
  if (const std::optional<chunk_id> known = find(chunk)) return *known;
  close_gaps();
  if (chunk.slot >= number_of_slot_.size()) number_of_slot_.resize(chunk.slot + std::size_t{1}, none);
  chunks_.push_back(chunk);
  number_of_slot_[chunk.slot] = static_cast<std::uint32_t>(chunks_.size() - 1);
  return chunk_id{number_of_slot_[chunk.slot]};
}

inline bool scheduled_chunks::remove(chunk_handle chunk) noexcept {
  if (!find(chunk)) return false;
  chunks_[std::exchange(number_of_slot_[chunk.slot], none)] = {};
  has_gaps_ = true;
  return true;
}

inline void scheduled_chunks::close_gaps() noexcept {
  if (!std::exchange(has_gaps_, false)) return;
  std::uint32_t kept = 0;
  for (const chunk_handle each : chunks_) {
    if (each == chunk_handle{}) continue;
    number_of_slot_[each.slot] = kept;
    chunks_[kept++] = each;
  }
  chunks_.resize(kept);
}

/// A buffer whose chunks are named by their numbers, on which a plan's steps are executed.
template <class Buffer>
class numbered_buffer {
 public:
  numbered_buffer(Buffer& buffer, const scheduled_chunks& chunks) noexcept
      : buffer_(&buffer), chunks_(&chunks) {}

  void progress() const { buffer_->progress(); }
  [[nodiscard]] tiering::step_outcome execute(chunk_id chunk, plan_operation operation,
                                              std::size_t tier) const {
    return buffer_->execute((*chunks_)[chunk], operation, tier);
  }
  [[nodiscard]] tiering::step_blocker blocker() const noexcept { return buffer_->step_blocker(); }
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return buffer_->now_ns(); }
  [[nodiscard]] bool is_above(chunk_id chunk) const noexcept {
    const result<std::size_t> tier = buffer_->tier_of((*chunks_)[chunk]);
    return tier && *tier == 0;
  }
  /// Ignores a refusal, because the chunk's next lease reports it.
  void prefetch(chunk_id chunk) const { static_cast<void>(buffer_->prefetch((*chunks_)[chunk])); }
  void expect(chunk_id chunk, std::uint64_t next_use) const noexcept {
    static_cast<void>(buffer_->expect((*chunks_)[chunk], next_use));
  }

 private:
  Buffer* buffer_;
  const scheduled_chunks* chunks_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
