/// @file
/// Scores of which the highest are chosen, and the order in which they are listed.
#pragma once

#include <llmmem/config.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Scores of candidates, in memory that `run` sees.
struct top_scores {
  const float* scores = nullptr;  ///< [rows][stride]
  std::uint64_t rows = 0;
  std::uint64_t stride = 0;              ///< floats from one row to the next
  std::uint32_t candidates = 0;          ///< of a row, up to 2^20; at most `stride`
  const std::int32_t* counts = nullptr;  ///< [rows], how many of a row's are looked at; null: all
  /// [rows][stride], each candidate's own number, where it is not its place: of tokens that other ranks
  /// chose, say. Of a row no two that count are the same; a negative one does not count.
  const std::int32_t* numbers = nullptr;
};

/// How what was chosen stands in the list.
enum class top_order : std::uint8_t {
  by_number,  ///< rising: as tokens lie, for `token_lists` whose attention is to be that of the sequence
  by_score,   ///< the highest first; of equal ones the lowest number
};

}  // namespace v0
}  // namespace llmmem
