/// @file
/// Finds the depth and block size at which a device is fastest, while it works. Only arithmetic: no clock, no
/// thread.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace llmmem {
inline namespace v0 {

/// How a device is used: requests in flight at once, and most bytes of each.
struct io_setting {
  std::uint32_t depth = 32;
  std::uint64_t block_bytes = std::uint64_t{1} << 20;

  friend constexpr bool operator==(const io_setting&, const io_setting&) noexcept = default;
};

/// The settings that a tuner searches, and its required confidence. Depths and blocks are powers of two.
struct io_tuner_options {
  io_setting first{};  ///< the starting point
  io_setting least{1, std::uint64_t{1} << 16};
  io_setting most{64, std::uint64_t{1} << 22};
  double gain = 0.03;                    ///< the tuner moves to a neighbour that is faster by this share
  std::uint32_t windows = 3;             ///< measured at a setting before it is judged; their median counts
  std::uint32_t rest_windows = 8;        ///< windows of rest before the neighbours are measured again
  std::uint64_t window_ns = 20'000'000;  ///< a queue's windows last at least this long: short ones are noise
  std::uint32_t max_rest = 1024;         ///< each search without a change doubles the rest, up to this
};

/// Hill climbing. The tuner measures the present setting and its neighbours (twice and half the depth, twice
/// and half the block) in turn, so that a change in the device's speed affects all of them. It moves to the
/// best neighbour if that is faster by `gain`, and continues from there. If none is, it rests. It measures
/// again after `rest_windows`, because noise may have hidden a better one, then after twice as long, and so
/// on. On a device that does not change, the share of time spent elsewhere approaches `4 * windows /
/// max_rest`. While it rests, a window slower or faster than expected by a half, `windows` consecutive times,
/// makes it measure at once.
///
/// Settings are powers of two, so a climb from anywhere to a single peak takes at most `max_windows()`. On a
/// landscape with several peaks it finds one that no neighbour beats by `gain`.
///
/// @par Complexity      O(1) for each window; less than a kilobyte, no allocation.
/// @par Thread safety   none.
/// @par Errors          the constructor throws `argument_error`; empty windows are ignored.
class io_tuner {
 public:
  explicit io_tuner(const io_tuner_options& options = {});

  /// The setting to use for the next window.
  [[nodiscard]] io_setting setting() const noexcept { return trying_ == home ? at_ : neighbour(trying_); }

  /// Reports the bytes moved since the last window, and the nanoseconds during which there was enough to do;
  /// returns the next setting. A window in which the device was not kept busy carries no information and must
  /// not be reported.
  io_setting window(std::uint64_t bytes, std::uint64_t ns) noexcept;

  /// The best setting found so far: the same as `setting()`, except while neighbours are measured.
  [[nodiscard]] io_setting best() const noexcept { return at_; }
  /// Whether it rests at a setting without a better neighbour.
  [[nodiscard]] bool is_at_rest() const noexcept { return rest_left_ != 0; }
  /// Moves made so far.
  [[nodiscard]] std::uint32_t moves() const noexcept { return moves_; }

  /// The number of windows within which a device with a single peak, and noise below half of `gain`, is
  /// climbed from `first`.
  [[nodiscard]] std::uint32_t max_windows() const noexcept {
    const auto span = [](std::uint64_t least, std::uint64_t most) {
      return static_cast<std::uint32_t>(std::bit_width(most) - std::bit_width(least));
    };
    const std::uint32_t steps = span(options_.least.depth, options_.most.depth) +
                                span(options_.least.block_bytes, options_.most.block_bytes);
    return (steps + 1) * neighbours * options_.windows;
  }
  [[nodiscard, deprecated("call max_windows()")]] std::uint32_t most_windows() const noexcept {
    return max_windows();
  }

 private:
  static constexpr std::uint32_t home = 0;
  static constexpr std::uint32_t neighbours = 5;  // including itself
  static constexpr std::uint32_t max_samples = 15;

  [[nodiscard]] io_setting neighbour(std::uint32_t which) const noexcept;
  [[nodiscard]] bool is_allowed(const io_setting& s) const noexcept {
    return s.depth >= options_.least.depth && s.depth <= options_.most.depth &&
           s.block_bytes >= options_.least.block_bytes && s.block_bytes <= options_.most.block_bytes;
  }
  [[nodiscard]] double median(std::uint32_t which) noexcept;
  void look() noexcept;
  void next_try() noexcept;
  void judge() noexcept;
  void rest(double speed) noexcept;

  io_tuner_options options_;
  io_setting at_;
  std::uint32_t trying_ = home;
  std::array<double, neighbours> speeds_{};
  std::array<std::array<double, max_samples>, neighbours> samples_{};
  std::uint32_t round_ = 0;      // in a search: windows measured at each setting
  std::uint32_t differing_ = 0;  // consecutive, at rest
  std::uint32_t rest_left_ = 0;
  std::uint32_t rest_length_;
  std::uint32_t moves_ = 0;
};

inline io_tuner::io_tuner(const io_tuner_options& options)
    : options_(options), at_(options.first), rest_length_(options.rest_windows) {
  const auto refuse = [](const char* what) { throw argument_error(std::string("io_tuner: ") + what); };
  for (const io_setting& each : {options.first, options.least, options.most}) {
    if (!std::has_single_bit(each.depth) || !std::has_single_bit(each.block_bytes)) {
      refuse("depths and block sizes must be powers of two");
    }
  }
  if (!is_allowed(options.first)) refuse("the first setting must be between the least and the most");
  if (options.windows == 0 || options.windows > max_samples) refuse("windows must be 1 to 15");
  if (options.rest_windows == 0 || options.max_rest < options.rest_windows) {
    refuse("rest_windows must be at least 1, and at most max_rest");
  }
  if (!(options.gain > 0 && options.gain < 1)) refuse("gain must be between 0 and 1");
}

inline io_setting io_tuner::neighbour(std::uint32_t which) const noexcept {
  io_setting s = at_;
  if (which == 1) s.depth *= 2;
  if (which == 2) s.depth /= 2;
  if (which == 3) s.block_bytes *= 2;
  if (which == 4) s.block_bytes /= 2;
  return s;
}

inline double io_tuner::median(std::uint32_t which) noexcept {
  auto& had = samples_[which];
  // Insertion sort: a handful of numbers.
  for (std::uint32_t i = 1; i < round_; ++i) {
    for (std::uint32_t j = i; j != 0 && had[j] < had[j - 1]; --j) {
      const double other = had[j];
      had[j] = had[j - 1];
      had[j - 1] = other;
    }
  }
  return had[round_ / 2];
}

inline io_setting io_tuner::window(std::uint64_t bytes, std::uint64_t ns) noexcept {
  if (bytes == 0 || ns == 0) return setting();
  const double speed = static_cast<double>(bytes) / static_cast<double>(ns);
  if (is_at_rest()) {
    rest(speed);
    return setting();
  }
  samples_[trying_][round_] = speed;
  next_try();
  return setting();
}

inline void io_tuner::look() noexcept {
  rest_left_ = 0;
  trying_ = home;
  round_ = 0;
  differing_ = 0;
}

inline void io_tuner::next_try() noexcept {
  do {
    ++trying_;
  } while (trying_ != neighbours && !is_allowed(neighbour(trying_)));
  if (trying_ != neighbours) return;
  trying_ = home;
  if (++round_ == options_.windows) judge();
}

inline void io_tuner::judge() noexcept {
  std::uint32_t best = home;
  speeds_[home] = median(home);
  for (std::uint32_t i = 1; i < neighbours; ++i) {
    if (!is_allowed(neighbour(i))) continue;
    speeds_[i] = median(i);
    if (speeds_[i] > speeds_[best]) best = i;
  }
  if (best != home && speeds_[best] > speeds_[home] * (1 + options_.gain)) {
    at_ = neighbour(best);
    ++moves_;
    rest_length_ = options_.rest_windows;
    return look();
  }
  rest_left_ = rest_length_;
  rest_length_ = rest_length_ < options_.max_rest / 2 ? rest_length_ * 2 : options_.max_rest;
}

inline void io_tuner::rest(double speed) noexcept {
  const bool differs = speed < speeds_[home] / 2 || speed > speeds_[home] * 1.5;
  differing_ = differs ? differing_ + 1 : 0;
  if (differing_ == options_.windows) {
    rest_length_ = options_.rest_windows;
    return look();
  }
  if (--rest_left_ == 0) look();
}

}  // namespace v0
}  // namespace llmmem
