/// @file
/// `step_guard`: clipping and the loss scale of a run, decided on all ranks alike before any state changes.
#pragma once

#include <llmmem/error.hpp>
#include <llmmem/training/loss_scale.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "train_gpt/rank_voice.hpp"

namespace train_gpt {

/// The limits of a run's gradients. The default guards nothing.
struct guard_options {
  std::optional<double> clip_norm{};  ///< the largest norm of all gradients
  std::optional<double> loss_scale{};
  std::uint32_t growth_interval = llmmem::loss_scale_options{}.growth_interval;

  [[nodiscard]] bool guards() const noexcept { return clip_norm || loss_scale; }
};

/// Decides each step by the norm of all ranks' gradients, which is exact: so it does not depend on how the
/// state is split. A step with a gradient that is not finite, on any rank, is skipped on all.
///
/// @par Thread safety   one thread; all ranks make the same calls.
class step_guard {
 public:
  /// `ranks` outlives it.
  step_guard(const guard_options& asked, rank_voice& ranks)
      : ranks_(&ranks),
        max_norm_(asked.clip_norm.value_or(std::numeric_limits<double>::infinity())),
        scale_(rules_of(asked)) {}

  /// Returns the factor of the next step's loss, and begins to add up its gradients.
  [[nodiscard]] float begin() noexcept {
    norm_ = {};
    return static_cast<float>(scale_.scale());
  }
  /// Returns the sum, to which each gradient is added once, by the rank that owns it.
  [[nodiscard]] llmmem::gradient_norm& norm() noexcept { return norm_; }
  /// @throws comm_error  if a rank has failed.
  [[nodiscard]] llmmem::step_decision decide() {
    ranks_->merge(norm_);
    const llmmem::step_decision decision = llmmem::decide_step(norm_, scale_, max_norm_);
    if (!decision.is_taken) ++skipped_;
    return decision;
  }
  /// Returns how many steps were skipped, also before a resume: the optimizer does not count them.
  [[nodiscard]] std::uint64_t skipped() const noexcept { return skipped_; }
  [[nodiscard]] double scale() const noexcept { return scale_.scale(); }

  /// @name For checkpoints
  /// @{
  [[nodiscard]] std::vector<std::byte> saved() const {
    const record now{scale_.saved().scale, skipped_, scale_.saved().clean_steps,
                     scale_.saved().overflows_left};
    std::vector<std::byte> bytes(sizeof(now));
    std::memcpy(bytes.data(), &now, sizeof(now));
    return bytes;
  }
  /// @throws llmmem::format_error  for bytes that `saved` did not return.
  void restore(std::span<const std::byte> bytes) {
    record was;
    if (bytes.size() != sizeof(was))
      throw llmmem::format_error("the checkpoint's loss scale is damaged: take an older checkpoint");
    std::memcpy(&was, bytes.data(), sizeof(was));
    scale_.restore({was.scale, was.clean_steps, was.overflows_left});
    skipped_ = was.skipped;
  }
  /// @}

 private:
  struct record {
    double scale = 1;
    std::uint64_t skipped = 0;
    std::uint32_t clean_steps = 0;
    std::uint32_t overflows_left = 1;
  };

  [[nodiscard]] static llmmem::loss_scale_options rules_of(const guard_options& asked) {
    llmmem::loss_scale_options rules;
    rules.growth_interval = asked.growth_interval;
    rules.start = asked.loss_scale.value_or(1);
    if (!asked.loss_scale) rules.least = rules.most = 1;  // stays 1
    return rules;
  }

  rank_voice* ranks_;
  double max_norm_;
  llmmem::loss_scale scale_;
  llmmem::gradient_norm norm_{};
  std::uint64_t skipped_ = 0;
};

}  // namespace train_gpt
