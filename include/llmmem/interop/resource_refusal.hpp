/// @file
/// `resource_refusal`: the exception that allocators for other libraries throw.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/failure.hpp>

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <string_view>

namespace llmmem {
inline namespace v0 {

/// A space's refusal as the exception that allocators throw: a `std::bad_alloc` that says why. CUB reports
/// any exception of a resource as `cudaErrorMemoryAllocation`.
class resource_refusal : public std::bad_alloc {
 public:
  explicit resource_refusal(const failure& why) noexcept : why_(why) {
    std::string_view text = "llmmem: memory is exhausted";
    std::string message;
    try {
      message = why.message();
      text = message;
    } catch (const std::bad_alloc&) {
    }
    text = text.substr(0, text_.size() - 1);
    std::ranges::copy(text, text_.begin());
  }
  [[nodiscard]] const failure& why() const noexcept { return why_; }
  /// Returns the first 255 bytes of the failure's message.
  [[nodiscard]] const char* what() const noexcept override { return text_.data(); }

 private:
  failure why_;
  std::array<char, 256> text_{};
};

}  // namespace v0
}  // namespace llmmem
