/// @file
/// Adam: the constants of a step, and the update of values.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace train_gpt {

/// Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1), with bias correction, without weight decay.
struct adam_options {
  double rate = 1e-3;
  double mean_decay = 0.9;
  double variance_decay = 0.95;
  double epsilon = 1e-8;
};

/// One step. It changes each value independently, so the bits do not depend on the distribution of values.
template <std::floating_point T>
class adam_step {
 public:
  /// @param step  number of the step in the run, from 0.
  adam_step(const adam_options& options, std::uint64_t step) noexcept
      : mean_decay_(static_cast<T>(options.mean_decay)),
        mean_share_(static_cast<T>(1 - options.mean_decay)),
        variance_decay_(static_cast<T>(options.variance_decay)),
        variance_share_(static_cast<T>(1 - options.variance_decay)),
        variance_correction_(static_cast<T>(1 / (1 - power(options.variance_decay, step + 1)))),
        rate_(static_cast<T>(options.rate / (1 - power(options.mean_decay, step + 1)))),
        epsilon_(static_cast<T>(options.epsilon)) {}

  /// Changes `count` weights w and moments m, v by the gradients g.
  void apply(T* w, T* m, T* v, const T* g, std::size_t count) const noexcept {
    for (std::size_t k = 0; k < count; ++k) {
      m[k] = mean_decay_ * m[k] + mean_share_ * g[k];
      v[k] = variance_decay_ * v[k] + variance_share_ * g[k] * g[k];
      w[k] -= rate_ * m[k] / (std::sqrt(v[k] * variance_correction_) + epsilon_);
    }
  }

 private:
  /// Multiplied out, so that the bits do not depend on a library's rounding.
  [[nodiscard]] static double power(double base, std::uint64_t exponent) noexcept {
    double product = 1;
    for (; exponent != 0; exponent /= 2, base *= base) {
      if (exponent % 2 != 0) product *= base;
    }
    return product;
  }

  T mean_decay_, mean_share_, variance_decay_, variance_share_, variance_correction_, rate_, epsilon_;
};

}  // namespace train_gpt
