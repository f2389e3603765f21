/// @file
/// The options of `kv_bins`.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/paging/kv_layout.hpp>

#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace offload {

/// How many codes an element has in one layer, odd; and whether tokens code their difference to the first of
/// their group.
struct layer_bins {
  std::uint32_t keys = 33;
  std::uint32_t values = 33;
  bool key_differences = false;
  bool value_differences = false;

  friend constexpr bool operator==(const layer_bins&, const layer_bins&) noexcept = default;
};

/// The blocks of one group of layers, and their codes.
struct kv_bins_options {
  kv_layout layout{};                ///< elements of f32, bf16 or f16; in any order: slots are packed
  std::vector<layer_bins> layers{};  ///< from the first layer on; the last also counts for all after it
  std::uint32_t group_tokens = 8;    ///< that differences refer to the first of
  std::uint32_t anchor_bins = 255;   ///< of these first tokens
};

}  // namespace offload

}  // namespace v0
}  // namespace llmmem
