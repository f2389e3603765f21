/// @file
/// What the worlds of sequences have in common: the rules' check, what a sequence must read, a hash that
/// collides.
#pragma once

#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/paged_types.hpp>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

/// What the world found broken; the text has the line of the rule.
struct broken_promise : std::logic_error {
  using std::logic_error::logic_error;
};

inline void must(bool holds, const std::source_location& rule = std::source_location::current()) {
  if (holds) return;
  const std::string file = rule.file_name();
  throw broken_promise(file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(rule.line()) +
                       " does not hold");
}

/// Every block gets one of two keys: collisions all the time.
struct weak_hash {
  explicit weak_hash(llmmem::hash_seed) noexcept {}
  [[nodiscard]] llmmem::block_key root(const llmmem::prefix_context&) const noexcept { return {}; }
  [[nodiscard]] llmmem::block_key chain(const llmmem::block_key&,
                                        std::span<const llmmem::token_id> tokens) const noexcept {
    return {.low = static_cast<std::uint64_t>(tokens[0] & 1), .high = 0};
  }
};

/// The value of a token that follows one whose value is `before`: of all tokens so far, and the context.
[[nodiscard]] inline std::uint64_t next_value(std::uint64_t before, llmmem::token_id token) {
  return random_numbers(before * 31 + static_cast<std::uint64_t>(token) + 1).next();
}

/// A prompt of less than `length` tokens from a small tree, so that prefixes are shared often.
template <class Choices>
[[nodiscard]] std::vector<llmmem::token_id> choose_prompt(Choices& choices, std::uint64_t length) {
  std::vector<llmmem::token_id> tokens(static_cast<std::size_t>(choices.below(length)));
  for (llmmem::token_id& each : tokens)
    each = choices.once_in(12) ? 2 : 1;
  return tokens;
}

}  // namespace llmmem_tests
