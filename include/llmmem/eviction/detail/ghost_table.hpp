/// @file
/// Recently evicted contents: the ghost entries of ARC and S3-FIFO.
#pragma once

#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/tag_chunk.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/detail/mix.hpp>
#include <llmmem/eviction/detail/slot_lists.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// `lists` queues of contents over one hash table of fixed capacity. Contents are in at most one queue.
///
/// The table is one of cache lines, as the prefix index: each holds twelve ghosts with a byte of each
/// content's hash, compared all at once, and counts the ghosts that overflowed to a later line. At half load
/// a search nearly always reads one line of the table, by branches that the processor predicts. A forgotten
/// ghost leaves an empty place: there are no tombstones and no rebuilds. 17 bytes a ghost, and 11 of the
/// table.
template <std::size_t lists>
class ghost_table {
 public:
  /// @param capacity  ghosts in all queues together.
  ghost_table(std::uint64_t capacity, const metadata_source& source, const char* who)
      : contents_(checked_capacity(slot_count{capacity}, who), source, who),
        queue_of_(capacity, source, who),
        order_(slot_count{capacity}, source, who),
        lines_(capacity / (line_type::places / 2) + 1, line_type{}, source, who) {
    for (std::uint64_t i = 0; i < capacity; ++i)
      order_.push_back(unused, slot_id{static_cast<std::uint32_t>(i)});
  }

  /// What the table knows contents by. A bijection of `access_hint::content`, so equal names are equal
  /// contents; 0 for unnamed contents.
  enum class name : std::uint64_t {};
  [[nodiscard]] static name name_of(std::uint64_t content) noexcept { return name{mix(content)}; }
  static_assert(mix(0) == 0);

  /// Returns the queue that holds `content`.
  [[nodiscard]] std::optional<std::size_t> find(name content) const noexcept {
    const slot_id ghost = ghost_of(content);
    if (ghost == no_slot) return std::nullopt;
    return queue_of_[to_index(ghost)];
  }

  /// Forgets `content`, if it is remembered; returns the queue that held it.
  std::optional<std::size_t> take(name content) noexcept {
    const slot_id ghost = ghost_of(content);
    if (ghost == no_slot) return std::nullopt;
    const std::size_t queue = queue_of_[to_index(ghost)];
    forget(ghost);
    return queue;
  }

  /// Appends `content` to the end of `queue`; if all ghosts are in use, first forgets the oldest of that
  /// queue, or of another. Ignores unnamed contents. @pre `content` is not remembered.
  void push(std::size_t queue, name content) noexcept {
    if (content == name{}) return;
    for (std::size_t i = 0; i < lists && order_.size(unused) == 0; ++i)
      pop((queue + i) % lists);
    const slot_id ghost = order_.first(unused);
    order_.remove(unused, ghost);
    order_.push_back(queue, ghost);
    contents_[to_index(ghost)] = content;
    queue_of_[to_index(ghost)] = static_cast<std::uint8_t>(queue);
    std::size_t i = home(content);
    for (; lines_[i].is_full(); i = after(i))
      lines_[i].pass_by();
    lines_[i].add(tag_of(content), ghost);
  }

  /// Forgets the oldest ghost of `queue`, if any.
  void pop(std::size_t queue) noexcept {
    if (const slot_id oldest = order_.first(queue); oldest != no_slot) forget(oldest);
  }

  [[nodiscard]] std::uint64_t size(std::size_t queue) const noexcept { return order_.size(queue); }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return contents_.bytes() + queue_of_.bytes() + order_.bytes() + lines_.bytes();
  }

 private:
  using line_type = tag_chunk<slot_id>;
  static constexpr std::size_t unused = lists;  // the list of free ghosts

  /// A byte of the name, never 0: 0 marks an empty place.
  [[nodiscard]] static std::uint8_t tag_of(name content) noexcept {
    const auto byte = static_cast<std::uint8_t>(content);
    return byte == 0 ? std::uint8_t{1} : byte;
  }
  // Maps 32 bits evenly to any number of lines without a division (Lemire 2019).
  [[nodiscard]] std::size_t home(name content) const noexcept {
    return static_cast<std::size_t>(((static_cast<std::uint64_t>(content) >> 32) * lines_.size()) >> 32);
  }
  [[nodiscard]] std::size_t after(std::size_t line) const noexcept {
    return line + 1 == lines_.size() ? 0 : line + 1;
  }

  [[nodiscard]] slot_id ghost_of(name content) const noexcept {
    if (content == name{}) return no_slot;
    const std::uint8_t tag = tag_of(content);
    std::size_t i = home(content);
    // Ghosts may have overflowed from every line of a small table: then the search ends where it began.
    for (std::size_t left = lines_.size(); left > 0; --left, i = after(i)) {
      for (auto places = lines_[i].places_of(tag); places.any(); places.pop()) {
        const slot_id ghost = lines_[i].number(places.first());
        if (contents_[to_index(ghost)] == content) return ghost;
      }
      if (lines_[i].passed_by() == 0) break;
    }
    return no_slot;
  }

  void forget(slot_id ghost) noexcept {
    order_.remove(queue_of_[to_index(ghost)], ghost);
    order_.push_back(unused, ghost);
    const name content = contents_[to_index(ghost)];
    for (std::size_t i = home(content); !lines_[i].remove(tag_of(content), ghost); i = after(i))
      lines_[i].undo_pass_by();
  }

  fixed_array<name> contents_;          // by ghost
  fixed_array<std::uint8_t> queue_of_;  // by ghost
  slot_lists<lists + 1> order_;         // ghosts, oldest first
  fixed_array<line_type> lines_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
