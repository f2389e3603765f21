/// @file
/// The stores that always keep everything in one space: the reference for every other store.
#pragma once

#include <llmmem/space/concepts.hpp>
#include <llmmem/space/host.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include "train_gpt/host_values.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Every piece of state in its own range, which never moves.
///
/// @par Errors   the constructor throws `out_of_memory`; nothing else does.
template <std::floating_point T, llmmem::memory_space Space>
class host_state {
 public:
  using value_type = T;
  static constexpr bool leases_stay = true;  ///< any thread can read the memory of a lease without one

  host_state(Space& space, const gpt_shape& shape) : kinds_(state_kinds(shape)) {
    for (std::size_t layer = 0; layer < shape.parts(); ++layer) {
      for (std::size_t kind = 0; kind < kinds_; ++kind)
        pieces_.emplace_back(space, state_layout(shape, shape.layer(layer), kind_at(shape, kind)).elements);
    }
  }

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode) noexcept {
    return pieces_[to_index(layer) * kinds_ + place_of(kind)].values();
  }
  void release(layer_id, state_kind, lease_mode) noexcept {}
  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    return {0, elements(layer, state_kind::weights)};
  }
  [[nodiscard]] std::size_t elements(layer_id layer, state_kind kind) const noexcept {
    return pieces_[to_index(layer) * kinds_ + place_of(kind)].values().size();
  }

 private:
  std::size_t kinds_;
  std::vector<host_values<T, Space>> pieces_;
};

/// Every layer's record in its own range.
///
/// @par Errors   the constructor throws `out_of_memory`; nothing else does.
template <std::floating_point T, llmmem::memory_space Space>
class host_activations {
 public:
  using value_type = T;

  host_activations(Space& space, const gpt_shape& shape) {
    for (std::size_t layer = 1; layer < shape.layers(); ++layer)
      records_.emplace_back(space, activation_layout(shape, shape.layer(layer)).elements);
  }

  [[nodiscard]] std::span<T> save(layer_id layer) noexcept { return record(layer); }
  void keep(layer_id) noexcept {}
  [[nodiscard]] std::span<const T> fetch(layer_id layer, const rebuild_activations<T>&) noexcept {
    return record(layer);
  }
  void drop(layer_id) noexcept {}

 private:
  [[nodiscard]] std::span<T> record(layer_id layer) const noexcept {
    return records_[to_index(layer) - 1].values();
  }

  std::vector<host_values<T, Space>> records_;
};

static_assert(state_store<host_state<float, llmmem::host_space>>);
static_assert(activation_store<host_activations<float, llmmem::host_space>>);

}  // namespace train_gpt
