/// @file
/// A store that delays changes until a snapshot is copied.
#pragma once

#include <llmmem/version/snapshot_gate.hpp>

#include <cstdint>
#include <optional>
#include <span>

#include "train_gpt/any_stores.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// A store whose weights and moments change only with a permit of the gate: the first changing lease of a
/// step waits until an earlier snapshot is copied.
class gated_state final : public forwarded_state<float> {
 public:
  gated_state(any_state<float>& store, llmmem::snapshot_gate& gate) noexcept
      : forwarded_state(store), gate_(&gate) {}

  [[nodiscard]] std::span<float> acquire(layer_id layer, state_kind kind, lease_mode mode) override {
    if (kind != state_kind::gradients && mode != lease_mode::read && !permit_)
      permit_.emplace(gate_->mutate());
    return forwarded_state::acquire(layer, kind, mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    forwarded_state::release(layer, kind, mode);
    if (!is_in_step_) permit_.reset();
  }
  void begin_step(std::uint64_t step) override {
    is_in_step_ = true;
    forwarded_state::begin_step(step);
  }
  void end_step(std::uint64_t step) override {
    forwarded_state::end_step(step);
    is_in_step_ = false;
    permit_.reset();
  }

 private:
  llmmem::snapshot_gate* gate_;
  std::optional<llmmem::mutation_permit> permit_;
  bool is_in_step_ = false;
};

}  // namespace train_gpt
