/// @file
/// A type-erased interface for each kind of store, so that the training loop is compiled once for all stores.
#pragma once

#include <llmmem/kernels/unordered_sum.hpp>
#include <llmmem/training/loss_scale.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// A `state_store` of any type, at the cost of one more jump per layer.
///
/// It also has the functions for checkpoints: a process *holds* a range of each layer for every kind of
/// state, and *saves* a part of it. In a store that is not sharded both are the whole layer.
template <std::floating_point T>
class any_state {
 public:
  using value_type = T;

  virtual ~any_state() = default;
  [[nodiscard]] virtual std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) = 0;
  virtual void release(layer_id layer, state_kind kind, lease_mode mode) noexcept = 0;
  [[nodiscard]] virtual element_range owned(layer_id layer) const noexcept = 0;
  virtual void begin_step(std::uint64_t step) = 0;
  virtual void end_step(std::uint64_t step) = 0;
  /// Whether the store sums gradients over ranks and adds the sums of those that it owns to `norm`, from now
  /// on; null: no longer.
  virtual bool adds_gradients_to(llmmem::gradient_norm* norm) noexcept = 0;
  /// Adds the sums that all ranks have made of the elements that they own.
  virtual void finish_sums() = 0;
  virtual void merge_sums(std::span<llmmem::unordered_sum> sums) = 0;
  [[nodiscard]] virtual work_share shared_by() const noexcept = 0;
  /// Gathers each rank's block of `all`, of those that share out the work.
  virtual void gather_blocks(std::span<std::byte> all, std::span<const std::uint64_t> blocks) = 0;

  /// Whether any thread can read the held state without a lease.
  [[nodiscard]] virtual bool stays() const noexcept = 0;
  [[nodiscard]] virtual element_range saved(layer_id layer, state_kind kind) const noexcept = 0;
  [[nodiscard]] virtual element_range held(layer_id layer, state_kind kind) const noexcept = 0;
  /// Returns all that is held of a piece, without gathering or sending.
  [[nodiscard]] virtual std::span<T> acquire_held(layer_id layer, state_kind kind, lease_mode mode) = 0;
  virtual void release_held(layer_id layer, state_kind kind, lease_mode mode) noexcept = 0;
};

/// The interface to a store, which outlives it.
template <state_store Store>
class erased_state final : public any_state<typename Store::value_type> {
 public:
  using value_type = typename Store::value_type;

  explicit erased_state(Store& store) noexcept : store_(&store) {}

  [[nodiscard]] std::span<value_type> acquire(layer_id layer, state_kind kind, lease_mode mode) override {
    return store_->acquire(layer, kind, mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    store_->release(layer, kind, mode);
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept override { return store_->owned(layer); }
  void begin_step(std::uint64_t step) override {
    if constexpr (follows_steps<Store>) store_->begin_step(step);
  }
  void end_step(std::uint64_t step) override {
    if constexpr (follows_steps<Store>) store_->end_step(step);
  }
  bool adds_gradients_to(llmmem::gradient_norm* norm) noexcept override {
    if constexpr (requires { store_->adds_gradients_to(norm); }) return store_->adds_gradients_to(norm);
    return false;
  }

  void finish_sums() override {
    if constexpr (requires { store_->finish_sums(); }) store_->finish_sums();
  }
  void merge_sums(std::span<llmmem::unordered_sum> sums) override {
    if constexpr (requires { store_->merge_sums(sums); }) store_->merge_sums(sums);
  }
  [[nodiscard]] work_share shared_by() const noexcept override {
    if constexpr (requires { store_->shared_by(); }) return store_->shared_by();
    return {};
  }
  void gather_blocks(std::span<std::byte> all, std::span<const std::uint64_t> blocks) override {
    if constexpr (requires { store_->gather_blocks(all, blocks); }) store_->gather_blocks(all, blocks);
  }

  [[nodiscard]] bool stays() const noexcept override {
    if constexpr (requires { Store::leases_stay; }) return Store::leases_stay;
    return false;
  }
  [[nodiscard]] element_range saved(layer_id layer, state_kind kind) const noexcept override {
    if constexpr (is_sharded) {
      return store_->saved(layer, kind);
    } else {
      return {0, store_->elements(layer, kind)};
    }
  }
  [[nodiscard]] element_range held(layer_id layer, state_kind kind) const noexcept override {
    if constexpr (is_sharded) {
      return store_->held(layer, kind);
    } else {
      return {0, store_->elements(layer, kind)};
    }
  }
  [[nodiscard]] std::span<value_type> acquire_held(layer_id layer, state_kind kind,
                                                   lease_mode mode) override {
    if constexpr (is_sharded) return store_->acquire_held(layer, kind, mode);
    return store_->acquire(layer, kind, mode);
  }
  void release_held(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    if constexpr (is_sharded) {
      store_->release_held(layer, kind, mode);
    } else {
      store_->release(layer, kind, mode);
    }
  }

 private:
  static constexpr bool is_sharded = requires(Store& store, layer_id layer, state_kind kind) {
    store.saved(layer, kind);
    store.held(layer, kind);
  };

  Store* store_;
};

/// A store that passes all calls on to another, which outlives it; a derived one changes some.
template <std::floating_point T>
class forwarded_state : public any_state<T> {
 public:
  explicit forwarded_state(any_state<T>& store) noexcept : store_(&store) {}

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) override {
    return store_->acquire(layer, kind, mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    store_->release(layer, kind, mode);
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept override { return store_->owned(layer); }
  void begin_step(std::uint64_t step) override { store_->begin_step(step); }
  void end_step(std::uint64_t step) override { store_->end_step(step); }
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
  [[nodiscard]] std::span<T> acquire_held(layer_id layer, state_kind kind, lease_mode mode) override {
    return store_->acquire_held(layer, kind, mode);
  }
  void release_held(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    store_->release_held(layer, kind, mode);
  }

 private:
  any_state<T>* store_;
};

/// An `activation_store` of any type.
template <std::floating_point T>
class any_activations {
 public:
  using value_type = T;

  virtual ~any_activations() = default;
  virtual void begin_step(std::uint64_t step) = 0;
  virtual void end_step(std::uint64_t step) = 0;
  [[nodiscard]] virtual std::span<T> save(layer_id layer) = 0;
  virtual void keep(layer_id layer) noexcept = 0;
  [[nodiscard]] virtual std::span<const T> fetch(layer_id layer, const rebuild_activations<T>& rebuild) = 0;
  virtual void drop(layer_id layer) noexcept = 0;
};

/// The interface to a store, which outlives it.
template <activation_store Store>
class erased_activations final : public any_activations<typename Store::value_type> {
 public:
  using value_type = typename Store::value_type;

  explicit erased_activations(Store& store) noexcept : store_(&store) {}

  void begin_step(std::uint64_t step) override {
    if constexpr (follows_steps<Store>) store_->begin_step(step);
  }
  void end_step(std::uint64_t step) override {
    if constexpr (follows_steps<Store>) store_->end_step(step);
  }

  [[nodiscard]] std::span<value_type> save(layer_id layer) override { return store_->save(layer); }
  void keep(layer_id layer) noexcept override { store_->keep(layer); }
  [[nodiscard]] std::span<const value_type> fetch(layer_id layer,
                                                  const rebuild_activations<value_type>& rebuild) override {
    return store_->fetch(layer, rebuild);
  }
  void drop(layer_id layer) noexcept override { store_->drop(layer); }

 private:
  Store* store_;
};

static_assert(state_store<any_state<float>> && activation_store<any_activations<float>>);

}  // namespace train_gpt
