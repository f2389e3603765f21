/// @file
/// Error texts about other ranks that save a checkpoint together.
#pragma once

#include <llmmem/checkpoint/detail/rank_message.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Returns "ranks 1 and 2 have died, or are unreachable".
[[nodiscard]] inline std::string death_text(const std::vector<std::uint32_t>& ranks) {
  return to_text(std::span(ranks)) +
         (ranks.size() == 1 ? " has died, or is unreachable" : " have died, or are unreachable");
}

[[nodiscard]] inline std::string within_text(std::uint64_t ns) {
  return " within " + std::to_string(ns / 1'000'000) + " ms";
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
