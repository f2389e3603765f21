/// @file
/// A source of memory that refuses every n-th request, to prove that an engine survives each one.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/space/pages.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace testing {

/// Passes requests on to `Source`, but refuses calls `first`, `first + every`, `first + 2 every`... of
/// `take`, counted from 1. Run the code under test once for each `first` until nothing was refused: then
/// every request has failed once.
///
/// @par Thread safety   that of `Source`.
template <byte_source Source = page_source>
class failing_source {
 public:
  /// @param first  the call to refuse; 0 refuses none.
  /// @param every  distance to the next; 0 refuses only the first.
  /// @param source  receives the other requests.
  explicit failing_source(std::uint64_t first, std::uint64_t every = 0, Source source = Source{}) noexcept
      : source_(std::move(source)), next_(first), every_(every) {}

  [[nodiscard]] std::uint64_t footprint(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    return source_.footprint(bytes, alignment);
  }

  [[nodiscard]] std::byte* take(std::uint64_t bytes, std::uint64_t alignment) noexcept {
    if (++calls_ == next_) {
      ++refused_;
      next_ = every_ == 0 ? 0 : calls_ + every_;
      return nullptr;
    }
    return source_.take(bytes, alignment);
  }

  void give_back(std::byte* data, std::uint64_t bytes, std::uint64_t alignment) noexcept {
    source_.give_back(data, bytes, alignment);
  }

  /// Returns the calls of `take` so far, and how many were refused.
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }
  [[nodiscard]] std::uint64_t refused() const noexcept { return refused_; }

 private:
  Source source_;
  std::uint64_t next_;
  std::uint64_t every_;
  std::uint64_t calls_ = 0;
  std::uint64_t refused_ = 0;
};

static_assert(byte_source<failing_source<>>);

}  // namespace testing
}  // namespace v0
}  // namespace llmmem
