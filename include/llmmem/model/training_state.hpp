/// @file
/// Bytes of weights, gradients and optimizer state on one rank, with and without ZeRO.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// Bytes that training keeps for each parameter.
struct bytes_per_parameter {
  std::uint64_t weights = 2;
  std::uint64_t gradients = 2;
  std::uint64_t optimizer = 12;
};

/// Mixed precision with Adam: 16-bit weights and gradients; 32-bit weights, mean and variance. 16 in all
/// (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1).
inline constexpr bytes_per_parameter mixed_precision_adam{.weights = 2, .gradients = 2, .optimizer = 12};

/// The state that is split over the data-parallel ranks; each stage includes the previous one.
enum class zero_stage : std::uint8_t {
  none,       ///< every rank keeps all
  optimizer,  ///< ZeRO 1: optimizer state
  gradients,  ///< ZeRO 2: and gradients
  weights,    ///< ZeRO 3: and weights
};

/// Bytes that one rank keeps.
struct training_bytes {
  std::uint64_t weights = 0;
  std::uint64_t gradients = 0;
  std::uint64_t optimizer = 0;

  /// @throws length_error  when the sum passes 2^63 - 1.
  [[nodiscard]] constexpr std::uint64_t total() const {
    return checked_add(checked_add(weights, gradients, "training state"), optimizer, "training state");
  }
  friend constexpr bool operator==(const training_bytes&, const training_bytes&) noexcept = default;
};

/// Returns the bytes that the largest of `ranks` ranks keeps of `parameters` parameters: ZeRO's Table 1,
/// which is 4P + 12P/N, 2P + 14P/N and 16P/N. A parameter is never cut: a share is rounded up to whole
/// parameters.
///
/// @throws argument_error  when `ranks` is 0.
/// @throws length_error    when a product passes 2^63 - 1.
[[nodiscard]] constexpr training_bytes training_state(
    std::uint64_t parameters, zero_stage stage = zero_stage::none, std::uint64_t ranks = 1,
    const bytes_per_parameter& each = mixed_precision_adam) {
  if (ranks == 0) throw argument_error("training_state: 0 ranks; 1 means no split");
  const std::uint64_t share = parameters / ranks + (parameters % ranks != 0 ? 1 : 0);
  const auto bytes = [&](zero_stage from, std::uint64_t per_parameter) {
    return checked_multiply(stage >= from ? share : parameters, per_parameter,
                            "training_state: parameters x bytes per parameter");
  };
  return {.weights = bytes(zero_stage::weights, each.weights),
          .gradients = bytes(zero_stage::gradients, each.gradients),
          .optimizer = bytes(zero_stage::optimizer, each.optimizer)};
}

}  // namespace v0
}  // namespace llmmem
