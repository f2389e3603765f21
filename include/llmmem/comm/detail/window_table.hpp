/// @file
/// The windows of an NCCL communicator: memory registered with it. Private to comm/.
#pragma once

#include <llmmem/config.hpp>

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Keeps the memory and the handle of each window. No byte is in two windows.
///
/// @par Complexity      O(windows).
/// @par Thread safety   one writer at a time; NCCL's threads may write a handle concurrently.
/// @par Errors          `add` throws `std::bad_alloc` and then changes nothing.
class window_table {
 public:
  /// Returns the bytes that `memory` shares with the first window it overlaps.
  [[nodiscard]] std::optional<std::uint64_t> shared_bytes(std::span<const std::byte> memory) const noexcept {
    const std::uint64_t first = address(memory);
    for (const window& each : windows_) {
      const std::uint64_t other = address(each.memory);
      const std::uint64_t begin = std::max(first, other);
      const std::uint64_t end = std::min(first + memory.size(), other + each.memory.size());
      if (begin < end) return end - begin;
    }
    return {};
  }
  /// Adds a window over `memory`. NCCL writes its handle, null so far, which keeps its address until the
  /// window is erased. @pre `memory` shares no bytes with a window.
  [[nodiscard]] ncclWindow_t* add(std::span<const std::byte> memory) {
    windows_.push_back({memory, std::make_unique<ncclWindow_t>(nullptr)});
    return windows_.back().handle.get();
  }
  /// Returns the handle of the window that begins where `memory` does; null for none.
  [[nodiscard]] const ncclWindow_t* find(std::span<const std::byte> memory) const noexcept {
    const auto at =
        std::ranges::find(windows_, memory.data(), [](const window& each) { return each.memory.data(); });
    return at == windows_.end() ? nullptr : at->handle.get();
  }
  /// Removes the window that begins where `memory` does.
  void erase(std::span<const std::byte> memory) noexcept {
    std::erase_if(windows_, [&](const window& each) { return each.memory.data() == memory.data(); });
  }
  void clear() noexcept { windows_.clear(); }
  [[nodiscard]] std::size_t size() const noexcept { return windows_.size(); }
  /// Calls `with` for the handle of each window.
  template <class With>
  void for_each(With with) const {
    for (const window& each : windows_)
      with(*each.handle);
  }

 private:
  struct window {
    std::span<const std::byte> memory{};
    std::unique_ptr<ncclWindow_t> handle{};
  };
  [[nodiscard]] static std::uint64_t address(std::span<const std::byte> memory) noexcept {
    return reinterpret_cast<std::uintptr_t>(memory.data());
  }

  std::vector<window> windows_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
