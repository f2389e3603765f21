/// @file
/// References that belong to no sequence: blocks that a transfer reads or writes.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Counts how often each block is pinned. Two bytes per block.
class block_pins {
 public:
  block_pins(std::uint64_t block_ids, const metadata_source& source)
      : pins_(block_ids, std::uint16_t{0}, source, "block_pins") {}

  /// Whether `block` can be pinned once more.
  [[nodiscard]] bool can_add(block_id block) const noexcept { return pins_[to_index(block)] != most; }
  /// @pre `can_add(block)`
  void add(block_id block) noexcept {
    ++pins_[to_index(block)];
    ++size_;
  }
  /// @pre the block is pinned.
  void remove(block_id block) noexcept {
    --pins_[to_index(block)];
    --size_;
  }
  [[nodiscard]] std::uint16_t of(block_id block) const noexcept { return pins_[to_index(block)]; }
  /// The pins of all blocks together.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return pins_.bytes(); }

 private:
  static constexpr std::uint16_t most = 0xFFFF;
  fixed_array<std::uint16_t> pins_;
  std::uint64_t size_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
