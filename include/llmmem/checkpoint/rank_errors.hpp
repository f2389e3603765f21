/// @file
/// The exceptions of the ranks of a checkpoint that cannot be completed.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Some ranks did not respond in time.
class ranks_missing : public io_error {
 public:
  ranks_missing(const std::string& text, std::vector<std::uint32_t> ranks)
      : io_error(text), ranks_(std::move(ranks)) {}
  /// The missing ranks, in order.
  [[nodiscard]] const std::vector<std::uint32_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::uint32_t> ranks_;
};

/// A rank stopped a checkpoint; all ranks learn of it at once, with the reason.
class checkpoint_stopped : public io_error {
 public:
  using io_error::io_error;
};

}  // namespace v0
}  // namespace llmmem
