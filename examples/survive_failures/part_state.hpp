/// @file
/// A part of the training state, and one step of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train_gpt/adam.hpp"

namespace survive_failures {

/// Weights, means and variances of one part in one range, in which it is kept and moved.
class part_state {
 public:
  explicit part_state(std::size_t count) : count_(count), values_(3 * count), gradient_(count) {}

  [[nodiscard]] std::span<float> weights() noexcept { return std::span(values_).first(count_); }
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return std::as_writable_bytes(std::span(values_)); }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return std::as_bytes(std::span(values_));
  }

  /// The state before the first step.
  void begin(std::span<const float> weights) {
    std::fill(values_.begin(), values_.end(), 0.0F);
    std::copy(weights.begin(), weights.end(), values_.begin());
  }

  /// @name One step The gradients of all shards, in order, regardless of the ranks that computed them, so
  /// that the bits of the sum do not depend on the number of ranks.
  /// @{
  void clear_gradient() noexcept { std::fill(gradient_.begin(), gradient_.end(), 0.0F); }
  void add_gradient(const float* of_shard) noexcept {
    for (std::size_t i = 0; i < count_; ++i)
      gradient_[i] += of_shard[i];
  }
  void update(const train_gpt::adam_step<float>& by, std::uint32_t shards) noexcept {
    for (float& each : gradient_)
      each /= static_cast<float>(shards);
    by.apply(values_.data(), values_.data() + count_, values_.data() + 2 * count_, gradient_.data(), count_);
  }
  /// @}

 private:
  std::size_t count_;
  std::vector<float> values_;
  std::vector<float> gradient_;
};

}  // namespace survive_failures
