/// @file
/// A store that delays changes until a snapshot is copied.
#pragma once

#include <llmmem/version/snapshot_gate.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "train_gpt/any_stores.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// A store whose weights and moments change only with a permit of the gate: the first changing lease of a
/// step waits until an earlier snapshot is copied.
class gated_state final : public any_state<float> {
 public:
  gated_state(any_state<float>& store, llmmem::snapshot_gate& gate) noexcept : store_(&store), gate_(&gate) {}

  [[nodiscard]] std::span<float> acquire(layer_id layer, state_kind kind, lease_mode mode) override {
    if (kind != state_kind::gradients && mode != lease_mode::read && !permit_)
      permit_.emplace(gate_->mutate());
    return store_->acquire(layer, kind, mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    store_->release(layer, kind, mode);
    if (!is_in_step_) permit_.reset();
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept override { return store_->owned(layer); }
  void begin_step(std::uint64_t step) override {
    is_in_step_ = true;
    store_->begin_step(step);
  }
  void end_step(std::uint64_t step) override {
    store_->end_step(step);
    is_in_step_ = false;
    permit_.reset();
  }
  bool adds_gradients_to(llmmem::gradient_norm* norm) noexcept override {
    return store_->adds_gradients_to(norm);
  }
  void finish_sums() override { store_->finish_sums(); }
  void merge_sums(std::span<llmmem::unordered_sum> sums) override { store_->merge_sums(sums); }
  [[nodiscard]] work_share shared_by() const noexcept override { return store_->shared_by(); }
  void gather_blocks(std::span<std::byte> all, std::span<const std::uint64_t> blocks) override {
    store_->gather_blocks(all, blocks);
  }
  [[nodiscard]] bool stays() const noexcept override { return store_->stays(); }
  [[nodiscard]] element_range saved(layer_id layer, state_kind kind) const noexcept override {
    return store_->saved(layer, kind);
  }
  [[nodiscard]] element_range held(layer_id layer, state_kind kind) const noexcept override {
    return store_->held(layer, kind);
  }
  [[nodiscard]] std::span<float> acquire_held(layer_id layer, state_kind kind, lease_mode mode) override {
    return store_->acquire_held(layer, kind, mode);
  }
  void release_held(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    store_->release_held(layer, kind, mode);
  }

 private:
  any_state<float>* store_;
  llmmem::snapshot_gate* gate_;
  std::optional<llmmem::mutation_permit> permit_;
  bool is_in_step_ = false;
};

}  // namespace train_gpt
