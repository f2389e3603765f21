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

  /// A factor of gradients, clip_norm / (norm x loss_scale), then is a normal float for norms up to 2^38: a
  /// smaller one has fewer bits, so that the loss scale would change the figures of a clipped run.
  static constexpr double least_clip_norm = 0x1p-24;
  static constexpr double most_loss_scale = 0x1p+64;

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
        has_scale_(asked.loss_scale.has_value()),
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
    record now{.skipped = skipped_};
    if (has_scale_) {
      const llmmem::loss_scale::state& of = scale_.saved();
      now = {of.scale, skipped_, of.clean_steps, of.overflows_left};
    }
    std::vector<std::byte> bytes(sizeof(now));
    std::memcpy(bytes.data(), &now, sizeof(now));
    return bytes;
  }
  /// Continues a run. A scale that the run had and this one has not, or the other way round, begins as asked:
  /// the skipped steps remain.
  /// @param done  steps of the run.
  /// @throws llmmem::format_error  for bytes that `saved` did not return.
  void restore(std::span<const std::byte> bytes, std::uint64_t done) {
    const record was = read(bytes, done);
    if (has_scale_ && was.scale != 0) {
      try {
        scale_.restore({was.scale, was.clean_steps, was.overflows_left});
      } catch (const llmmem::argument_error&) {
        throw damaged();
      }
    }
    skipped_ = was.skipped;
  }
  /// Returns how many of a run's `done` steps were skipped. Throws as `restore`.
  [[nodiscard]] static std::uint64_t skipped_in(std::span<const std::byte> bytes, std::uint64_t done) {
    return read(bytes, done).skipped;
  }
  /// @}

 private:
  struct record {
    double scale = 0;  // 0: the run has none
    std::uint64_t skipped = 0;
    std::uint32_t clean_steps = 0;
    std::uint32_t overflows_left = 1;
  };

  [[nodiscard]] static llmmem::format_error damaged() {
    return llmmem::format_error("the checkpoint's loss scale is damaged: take an older checkpoint");
  }
  [[nodiscard]] static record read(std::span<const std::byte> bytes, std::uint64_t done) {
    record was;
    if (bytes.size() != sizeof(was)) throw damaged();
    std::memcpy(&was, bytes.data(), sizeof(was));
    if (was.skipped > done) throw damaged();
    return was;
  }
  [[nodiscard]] static llmmem::loss_scale_options rules_of(const guard_options& asked) {
    llmmem::loss_scale_options rules;
    rules.growth_interval = asked.growth_interval;
    rules.start = asked.loss_scale.value_or(1);
    rules.most = guard_options::most_loss_scale;
    if (!asked.loss_scale) rules.least = rules.most = 1;  // stays 1
    return rules;
  }

  rank_voice* ranks_;
  double max_norm_;
  bool has_scale_;
  llmmem::loss_scale scale_;
  llmmem::gradient_norm norm_{};
  std::uint64_t skipped_ = 0;
};

}  // namespace train_gpt
