/// @file
/// A descriptor that closes itself, and the system's text for an error.
#pragma once

#include <llmmem/config.hpp>

#include <unistd.h>

#include <string>
#include <system_error>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// A descriptor, closed by the destructor.
class descriptor {
 public:
  descriptor() noexcept = default;
  explicit descriptor(int number) noexcept : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  descriptor& operator=(descriptor&& other) noexcept {
    if (this != &other) {
      close();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  ~descriptor() { close(); }

  void close() noexcept {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }
  /// Returns the descriptor, which the caller closes.
  [[nodiscard]] int release() noexcept { return std::exchange(number_, -1); }
  [[nodiscard]] int get() const noexcept { return number_; }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }

 private:
  int number_ = -1;
};

/// Returns "(...): No such file or directory (errno 2)"
[[nodiscard]] inline std::string because(int number) {
  return ": " + std::generic_category().message(number) + " (errno " + std::to_string(number) + ")";
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
