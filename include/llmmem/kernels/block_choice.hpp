/// @file
/// The blocks of a cache that changed, and the blocks chosen for each row.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Blocks whose keys changed, in memory that `run` sees.
struct changed_blocks {
  const std::int32_t* blocks = nullptr;  ///< [count], each once; a negative one is skipped
  /// [count], tokens of the block that its summary covers already; null: none, the summary begins with the
  /// first.
  const std::int32_t* begins = nullptr;
  const std::int32_t* ends = nullptr;  ///< [count], tokens that it has now
  std::uint64_t count = 0;
};

/// The blocks chosen for each row, by number (`select_top`).
struct chosen_blocks {
  const std::int32_t* blocks = nullptr;   ///< [rows][k], -1 after the chosen ones
  const std::int32_t* lengths = nullptr;  ///< [rows], tokens of each row's sequence
  std::uint64_t rows = 0;
  std::uint32_t k = 0;
  std::uint32_t block_tokens = 0;
};

}  // namespace v0
}  // namespace llmmem
