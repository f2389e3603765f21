/// @file
/// Scores to choose the highest from, and the order in which they are listed.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Scores of candidates, in memory that `run` can access.
struct top_scores {
  const float* scores = nullptr;  ///< [rows][stride]
  std::uint64_t rows = 0;
  std::uint64_t stride = 0;              ///< floats from one row to the next
  std::uint32_t candidates = 0;          ///< candidates of a row, up to 2^20; at most `stride`
  const std::int32_t* counts = nullptr;  ///< [rows], how many of a row's are read; null: all
  /// [rows][stride], each candidate's own number, if it is not its place: for tokens that other ranks chose,
  /// for example. No two counted candidates of a row have the same number; a negative one does not count.
  const std::int32_t* numbers = nullptr;
};

/// The order of the chosen candidates.
enum class top_order : std::uint8_t {
  by_number,  ///< ascending: the order of tokens, for `token_lists` whose attention equals that of the
              ///< sequence
  by_score,   ///< the highest first; among equals the lowest number
};

}  // namespace v0
}  // namespace llmmem
