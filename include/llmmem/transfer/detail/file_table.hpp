/// @file
/// The files that a queue has registered with its engine, or will register.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/transfer/io_engine.hpp>

#include <array>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Descriptors being added to an engine's table and removed from it. Any thread names them; the thread that
/// calls the engine passes them on before its next request, because some engines accept calls from no other.
///
/// @par Complexity   O(entries).
/// @par Thread safety   none: the queue's lock.
class file_table {
 public:
  static constexpr std::uint32_t max_files = 64;

  /// A negative descriptor has no effect. If there is no space, it is only counted.
  void add(int descriptor) noexcept {
    if (descriptor < 0 || find(descriptor, state::told) != max_files ||
        find(descriptor, state::adding) != max_files)
      return;
    const std::uint32_t at = find(no_file, state::none);
    if (at == max_files) {
      ++plain_;
      return;
    }
    entries_[at] = {descriptor, state::adding};
    has_changes_ = true;
  }

  void drop(int descriptor) noexcept {
    if (descriptor < 0) return;
    if (const std::uint32_t at = find(descriptor, state::adding); at != max_files) entries_[at] = {};
    if (const std::uint32_t at = find(descriptor, state::told); at != max_files) {
      entries_[at].at = state::dropping;
      --told_;
      has_changes_ = true;
    }
  }

  [[nodiscard]] bool has_changes() const noexcept { return has_changes_; }
  /// The number of descriptors in the table; and of those that did not fit.
  [[nodiscard]] std::uint32_t told() const noexcept { return told_; }
  [[nodiscard]] std::uint64_t plain() const noexcept { return plain_; }

  /// Updates the engine: removals first, because a number may already belong to another file.
  template <registers_files Engine>
  void apply(Engine& engine) noexcept {
    if (!has_changes_) return;
    has_changes_ = false;
    for (entry& each : entries_) {
      if (each.at != state::dropping) continue;
      engine.forget_file(each.descriptor);
      each = {};
    }
    for (entry& each : entries_) {
      if (each.at != state::adding) continue;
      if (engine.register_file(each.descriptor)) {
        each.at = state::told;
        ++told_;
      } else {
        each = {};
        ++plain_;
      }
    }
  }

 private:
  static constexpr int no_file = -1;
  enum class state : std::uint8_t { none, adding, told, dropping };
  struct entry {
    int descriptor = no_file;
    state at = state::none;
  };

  [[nodiscard]] std::uint32_t find(int descriptor, state at) const noexcept {
    std::uint32_t i = 0;
    while (i != max_files && (entries_[i].descriptor != descriptor || entries_[i].at != at))
      ++i;
    return i;
  }

  std::array<entry, max_files> entries_{};
  std::uint32_t told_ = 0;
  std::uint64_t plain_ = 0;
  bool has_changes_ = false;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
