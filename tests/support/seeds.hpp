/// @file
/// Seeds for randomised tests, which `scripts/soak` multiplies.
#pragma once

#include <time.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace llmmem_tests {

/// The number in environment variable `name`, or `otherwise` when it is not set or empty.
inline std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  errno = 0;
  const std::uint64_t number = std::strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end != '\0' || errno != 0) {
    throw std::invalid_argument(std::string(name) + ": '" + text + "' is not a number");
  }
  return number;
}

/// Whether a sanitizer watches this program: every run takes many times longer, and says more.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool is_watched = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool is_watched = true;
#else
inline constexpr bool is_watched = false;
#endif
#else
inline constexpr bool is_watched = false;
#endif

/// `count` seeds, times LLMMEM_SEED_FACTOR (1), counting up from LLMMEM_SEED (1).
///
///     for (const auto seed : seeds(200)) {
///       CAPTURE(seed);  // a failure prints it; LLMMEM_SEED=<it> starts there
inline std::vector<std::uint64_t> seeds(std::uint64_t count) {
  std::vector<std::uint64_t> all(count * number_from_environment("LLMMEM_SEED_FACTOR", 1));
  auto seed = number_from_environment("LLMMEM_SEED", 1);
  for (auto& each : all)
    each = seed++;
  return all;
}

/// The same, or `watched` seeds where a sanitizer watches: of tests that hold to an oracle what another build
/// holds to it with all of them, and from which a sanitizer learns no more after the first.
inline std::vector<std::uint64_t> seeds(std::uint64_t count, std::uint64_t watched) {
  return seeds(is_watched ? watched : count);
}

/// Seeds for a loop that is dear: see `seeds_within`.
class timed_seeds {
 public:
  timed_seeds(std::vector<std::uint64_t> all, std::size_t least) : all_(std::move(all)), least_(least) {
    const bool is_soak = std::getenv("LLMMEM_SEED_FACTOR") != nullptr;
    if (!is_soak) ends_ns_ = cpu_ns() + number_from_environment("LLMMEM_SEED_SECONDS", 1) * 1'000'000'000;
  }

  class iterator {
   public:
    iterator(const timed_seeds& seeds, std::size_t at) : seeds_(&seeds), at_(at) {}
    [[nodiscard]] std::uint64_t operator*() const { return seeds_->all_[at_]; }
    iterator& operator++() {
      ++at_;
      return *this;
    }
    /// @pre `end` is the end.
    [[nodiscard]] bool operator!=(const iterator& end) const {
      return at_ != end.at_ && (at_ < seeds_->least_ || cpu_ns() < seeds_->ends_ns_);
    }

   private:
    const timed_seeds* seeds_;
    std::size_t at_;
  };
  [[nodiscard]] iterator begin() const { return {*this, 0}; }
  [[nodiscard]] iterator end() const { return {*this, all_.size()}; }

 private:
  /// Of all threads of this program: other programs of a busy machine do not count.
  [[nodiscard]] static std::uint64_t cpu_ns() {
    timespec now{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  }

  std::vector<std::uint64_t> all_;
  std::size_t least_;
  std::uint64_t ends_ns_ = ~std::uint64_t{0};
};

/// The first of `seeds(count)`: `least` of them, and more until the loop has taken LLMMEM_SEED_SECONDS (1) of
/// CPU time. `scripts/soak`, which sets LLMMEM_SEED_FACTOR, goes through all.
///
///     for (const auto seed : seeds_within(600, 50)) {
inline timed_seeds seeds_within(std::uint64_t count, std::size_t least) {
  return timed_seeds(seeds(count), least);
}

}  // namespace llmmem_tests
