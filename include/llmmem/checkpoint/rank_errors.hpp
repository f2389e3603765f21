/// @file
/// What the ranks of a checkpoint throw when it cannot be.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Ranks did not do in time what others waited for.
class ranks_missing : public io_error {
 public:
  ranks_missing(const std::string& text, std::vector<std::uint32_t> ranks)
      : io_error(text), ranks_(std::move(ranks)) {}
  /// Those that were waited for, in order.
  [[nodiscard]] const std::vector<std::uint32_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::uint32_t> ranks_;
};

/// A rank said that a checkpoint will not be: all learn of it at once, and why.
class checkpoint_stopped : public io_error {
 public:
  using io_error::io_error;
};

}  // namespace v0
}  // namespace llmmem
