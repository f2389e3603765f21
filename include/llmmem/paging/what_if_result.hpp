/// @file
/// What a journal's requests find in a cache of another configuration.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// The result for one configuration.
struct what_if_result {
  std::string policy;
  std::uint64_t requested_tokens = 0;  ///< of the matched prompts
  std::uint64_t requested_blocks = 0;  ///< see `paged_stats`; 0 for a `hybrid_allocator`
  std::uint64_t hit_tokens = 0;
  std::uint64_t hit_blocks = 0;
  std::uint64_t evictions = 0;
  std::uint64_t sequences = 0;  ///< created or forked
  std::uint64_t skipped = 0;    ///< of those, sequences dropped because this cache had no space for them

  /// The share of the prompts' tokens that need not be computed; 0 when there were none.
  [[nodiscard]] double hit_ratio() const noexcept {
    return requested_tokens == 0 ? 0.0
                                 : static_cast<double>(hit_tokens) / static_cast<double>(requested_tokens);
  }

  friend bool operator==(const what_if_result&, const what_if_result&) noexcept = default;
};

}  // namespace v0
}  // namespace llmmem
