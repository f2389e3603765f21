/// @file
/// `gradient_norm`, `loss_scale` and `decide_step`: decide whether to take a step, and the factor of its
/// gradients, equally on all ranks, before any state changes.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace llmmem {
inline namespace v0 {

/// The exact sum of all gradients' squares: an integer in units of 2^-298, the square of the least float. So
/// the sum is independent of the order of the gradients, of pieces and of the number of ranks, and pieces may
/// be added as they arrive.
///
/// @par Complexity   O(1) for each gradient; 152 bytes.
/// @par Thread safety   one thread at a time; each thread may have its own object, and `merge` joins them.
/// @pre at most 2^31 gradients in total
/// @par Source   Kulisch, "Computer Arithmetic and Validity", 2013: the long accumulator.
class gradient_norm {
 public:
  /// Adds gradients. Counts gradients that are not finite.
  void add(std::span<const float> gradients) noexcept {
    for (const float each : gradients)
      add(each);
  }
  void add(float gradient) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(gradient);
    const std::uint32_t exponent = (bits >> 23U) & 0xFFU;
    if (exponent == 0xFFU) {
      ++digits_.back();
      return;
    }
    const std::uint64_t mantissa = (bits & 0x7F'FFFFU) | (exponent == 0 ? 0 : 0x80'0000U);
    const std::uint64_t square = mantissa * mantissa;  // below 2^48
    const std::uint32_t place = 2 * (exponent == 0 ? 0 : exponent - 1);
    const std::uint32_t shift = place % 32;
    const std::uint64_t low = (square & 0xFFFF'FFFFU) << shift;
    const std::uint64_t high = (square >> 32U) << shift;
    std::uint64_t* const at = digits_.data() + place / 32;
    at[0] += low & 0xFFFF'FFFFU;
    at[1] += (low >> 32U) + (high & 0xFFFF'FFFFU);
    at[2] += high >> 32U;
  }
  /// Adds another sum.
  void merge(const gradient_norm& other) noexcept {
    for (std::size_t i = 0; i < digits_.size(); ++i)
      digits_[i] += other.digits_[i];
  }
  /// Adds the sums of all ranks. Each gradient must be added on one rank only, its owner. All ranks must call
  /// it, and then hold the same sum. Errors: as `all_reduce`.
  template <transport Ranks>
  result<void> merge_all(Ranks& ranks, collective_call& call) {
    constexpr reduce_op sum{.combine =
                                [](std::byte* into, const std::byte* from, std::size_t bytes) noexcept {
                                  detail::combine_elements<std::uint64_t>(
                                      into, from, bytes,
                                      [](std::uint64_t a, std::uint64_t b) { return a + b; });
                                },
                            .element_bytes = 8};
    return all_reduce(ranks, std::as_writable_bytes(std::span(digits_)), sum, call);
  }

  /// Whether all gradients are finite.
  [[nodiscard]] bool is_finite() const noexcept { return digits_.back() == 0; }
  /// Returns the root of the sum, within 2^-50 of it; infinity if a gradient is not finite.
  [[nodiscard]] double value() const noexcept {
    if (!is_finite()) return std::numeric_limits<double>::infinity();
    // For sums above 2^278 the last digit has more than 32 bits.
    const std::array<std::uint64_t, digits> whole = detail::carried(std::span(digits_).first<digits>());
    double sum = 0;
    for (std::size_t i = digits; i-- > 0;)
      sum += __builtin_ldexp(static_cast<double>(whole[i]), static_cast<int>(32 * i) - 298);
    return __builtin_sqrt(sum);
  }

 private:
  static constexpr std::size_t digits = 18;  // of 32 bits, the last of up to 64: for 2^31 squares below 2^256

  std::array<std::uint64_t, digits + 1> digits_{};  // the last counts gradients that are not finite
};

/// The rules by which a loss scale changes. The defaults are those of PyTorch's `GradScaler`.
struct loss_scale_options {
  double start = 65536;
  double growth = 2;                     ///< factor of the scale
  std::uint32_t growth_interval = 2000;  ///< consecutive finite steps before it grows
  double back_off = 0.5;                 ///< factor at an overflow
  std::uint32_t hysteresis = 1;          ///< number of the first overflow, since it last grew, that backs off
  double least = 0x1p-24;                ///< at least 2^-126, so that 1 / scale is a float
  double most = 0x1p+126;                ///< at most 2^126, for the same reason
};

/// The factor of a loss that keeps fp16 gradients from vanishing. It grows while gradients are finite, and
/// backs off when they are not.
///
/// @par Complexity   O(1).
/// @par Thread safety   one thread at a time.
/// @par Source   Micikevicius et al., "Mixed Precision Training", 2018 (arXiv 1710.03740).
class loss_scale {
 public:
  /// The values that a checkpoint saves.
  struct state {
    double scale = 1;
    std::uint32_t clean_steps = 0;
    std::uint32_t overflows_left = 1;

    friend bool operator==(const state&, const state&) = default;
  };

  /// @throws argument_error  for a start outside `least` to `most`, bounds outside 2^-126 to 2^126, a growth
  ///                         below 1, a back-off that is not between 0 and 1, an interval or hysteresis of 0.
  explicit loss_scale(const loss_scale_options& options = {}) : options_(options) {
    if (!(options.least >= 0x1p-126) || !(options.most <= 0x1p+126))
      throw argument_error(
          "loss_scale: least is below 2^-126 or most above 2^126, so 1 / scale may not be a float");
    if (!(options.least <= options.start) || !(options.start <= options.most))
      throw argument_error("loss_scale: start is not between least and most");
    if (!(options.growth >= 1))
      throw argument_error("loss_scale: growth is below 1; 1 means that it never grows");
    if (!(options.back_off > 0) || !(options.back_off < 1))
      throw argument_error("loss_scale: back_off is not between 0 and 1");
    if (options.growth_interval == 0 || options.hysteresis == 0)
      throw argument_error("loss_scale: growth_interval and hysteresis must be at least 1");
    now_ = {options.start, 0, options.hysteresis};
  }

  [[nodiscard]] double scale() const noexcept { return now_.scale; }
  [[nodiscard]] const state& saved() const noexcept { return now_; }
  /// Continues from the state that `saved` returned.
  /// @throws argument_error  for a scale outside `least` to `most`; nothing has changed.
  void restore(const state& saved) {
    if (!(options_.least <= saved.scale) || !(saved.scale <= options_.most))
      throw argument_error(
          "loss_scale::restore: the scale is not between least and most; the checkpoint is damaged, or is of "
          "other options");
    now_ = saved;
  }

  /// The caller calls it after each step, taken or skipped.
  void update(bool is_finite) noexcept {
    if (!is_finite) {
      now_.clean_steps = 0;
      if (now_.overflows_left > 1) {
        --now_.overflows_left;
      } else {
        now_.scale = std::max(now_.scale * options_.back_off, options_.least);
      }
      return;
    }
    if (++now_.clean_steps < options_.growth_interval) return;
    now_.clean_steps = 0;
    now_.overflows_left = options_.hysteresis;
    now_.scale = std::min(now_.scale * options_.growth, options_.most);
  }

 private:
  loss_scale_options options_;
  state now_{};
};

/// Whether to take a step, and with which factor.
struct step_decision {
  bool is_taken = true;
  double norm = 0;              ///< of the gradients without the loss scale
  float gradient_scale = 1.0F;  ///< `optimizer_hyper::gradient_scale`
};

/// Decides from the norm of all ranks' gradients (`merge_all`), which include the loss scale. It skips a step
/// with a gradient that is not finite. Other steps get the factor 1 / scale, times max_norm / norm if the
/// norm is above `max_norm`. Updates the scale. Equal inputs on all ranks give equal decisions.
///
/// A factor below 2^-126 has fewer bits than a float has, and below 2^-150 it is 0, which clears all
/// gradients: keep max_norm above 2^-126 of the largest norm with the loss scale.
///
/// @param max_norm  infinity disables clipping.
/// @throws argument_error  for a max_norm that is not above 0, which would clear or invert all gradients.
///                         Nothing has changed then.
[[nodiscard]] inline step_decision decide_step(const gradient_norm& gradients, loss_scale& scale,
                                               double max_norm = std::numeric_limits<double>::infinity()) {
  if (!(max_norm > 0))
    throw argument_error("decide_step: max_norm is not above 0; infinity means that nothing is clipped");
  const double factor = 1 / scale.scale();
  scale.update(gradients.is_finite());
  if (!gradients.is_finite()) return {false, std::numeric_limits<double>::infinity(), 0.0F};
  const double norm = gradients.value() * factor;
  const double clip = norm > max_norm ? max_norm / norm : 1;
  return {true, norm, static_cast<float>(factor * clip)};
}

}  // namespace v0
}  // namespace llmmem
