/// @file
/// The prompts that the processes serve.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <cstdint>
#include <vector>

#include "kv_pool/command_line.hpp"
#include "replay_trace/random.hpp"

namespace kv_pool_example {

inline constexpr std::uint32_t block_tokens = 16;
inline constexpr std::uint32_t layers = 4;
inline constexpr std::uint32_t answer_tokens = 32;

/// Request `number`: a system prompt that its family shares, and a question of its own.
[[nodiscard]] inline std::vector<llmmem::token_id> prompt_of(const command_line& asked,
                                                             std::uint32_t number) {
  replay_trace::splitmix64 of_request(asked.seed * 7'000'003 + number + 1);
  replay_trace::splitmix64 of_family(asked.seed * 1'000'003 + of_request.next() % asked.families);
  std::vector<llmmem::token_id> out(block_tokens * 48);
  for (llmmem::token_id& each : out)
    each = static_cast<llmmem::token_id>(of_family.next() % 50'000);
  const std::uint64_t own = block_tokens + of_request.next() % (block_tokens * 48);
  for (std::uint64_t i = 0; i < own; ++i)
    out.push_back(static_cast<llmmem::token_id>(of_request.next() % 50'000));
  return out;
}

}  // namespace kv_pool_example
