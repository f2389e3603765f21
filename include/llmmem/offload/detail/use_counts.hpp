/// @file
/// Counts the uses of keys that no tier has yet.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Counts of uses, in a table where one key may displace another, so that rare keys among many are forgotten.
/// 16 bytes per place. O(1).
class use_counts {
 public:
  use_counts(std::uint64_t places, const metadata_source& source)
      : places_(std::bit_ceil(places < 64 ? 64 : places), place{}, source, "kv_tiers: uses of keys") {}

  /// Counts one more use, and returns the number of uses so far.
  std::uint32_t count(const block_key& key) noexcept {
    place& at = places_[static_cast<std::size_t>(key.high) & (places_.size() - 1)];
    if (at.key != key.low || at.uses == 0) at = {key.low, 0};
    return ++at.uses;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return places_.bytes(); }

 private:
  struct place {
    std::uint64_t key = 0;
    std::uint32_t uses = 0;
  };
  fixed_array<place> places_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
