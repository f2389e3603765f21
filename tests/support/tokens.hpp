/// @file
/// Tokens for tests.
#pragma once

#include <llmmem/paging/ids.hpp>

#include <cstddef>
#include <numeric>
#include <vector>

namespace llmmem_tests {

/// `count` tokens that differ: `first`, the one behind it, and so on.
[[nodiscard]] inline std::vector<llmmem::token_id> tokens(std::size_t count, llmmem::token_id first = 1) {
  std::vector<llmmem::token_id> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

}  // namespace llmmem_tests
