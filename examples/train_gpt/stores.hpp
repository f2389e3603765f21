/// @file
/// The two interfaces of the fixture: the store of a model's state (`state_store`), and that of activations
/// until the backward pass (`activation_store`). To show a memory technique, write one of these.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "train_gpt/layer_parts.hpp"
#include "train_gpt/shape.hpp"

namespace train_gpt {

/// The kinds of state of every layer. They have the layout that `state_layout` gives: that of the parameters,
/// except for `factors`, and for Muon's variances. An optimizer with one moment has no variance; Adafactor
/// has factors and no moments. The last two are those of outer steps (`outer_steps`), of which checkpoints
/// read and write what the process's optimizer updates.
enum class state_kind : std::uint8_t { weights, gradients, mean, variance, factors, base, base_momentum };

/// The optimizer's kinds, in order.
[[nodiscard]] inline std::vector<state_kind> optimizer_kinds(const gpt_shape& shape) {
  if (shape.optimizer == llmmem::optimizer_form::adafactor) return {state_kind::factors};
  if (shape.optimizer == llmmem::optimizer_form::sgd && !shape.corrects_momentum) return {state_kind::mean};
  return {state_kind::mean, state_kind::variance};
}
/// Those of them that an update changes: none if sums have changed them before.
[[nodiscard]] inline std::vector<state_kind> updated_kinds(const gpt_shape& shape) {
  return shape.corrects_momentum ? std::vector<state_kind>{} : optimizer_kinds(shape);
}
/// The number of kinds that a run has.
[[nodiscard]] inline std::size_t state_kinds(const gpt_shape& shape) {
  return 2 + optimizer_kinds(shape).size();
}
/// A kind's place among those of its run.
[[nodiscard]] constexpr std::size_t place_of(state_kind kind) noexcept {
  return kind == state_kind::factors ? 2 : static_cast<std::size_t>(kind);
}
/// The kind in a place. @pre place < state_kinds(shape)
[[nodiscard]] inline state_kind kind_at(const gpt_shape& shape, std::size_t place) {
  return place < 2 ? static_cast<state_kind>(place) : optimizer_kinds(shape)[place - 2];
}
/// The layout of a kind of a layer's state, or, with tiles, of one of `state_parts`, as in all calls of a
/// `state_store`.
[[nodiscard]] inline layer_layout state_layout(const gpt_shape& shape, layer_id layer, state_kind kind) {
  if (shape.tiles != 0) {
    layer_layout all;
    all.add("part", 1, part_elements(shape, to_index(layer)));
    return all;
  }
  if (kind == state_kind::factors) return factor_layout(shape, layer);
  const bool is_rest = kind == state_kind::variance && shape.optimizer == llmmem::optimizer_form::muon;
  return is_rest ? rest_layout(shape, layer) : parameter_layout(shape, layer);
}

/// The ranks that all have the same whole state, and may share out work on it.
struct work_share {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

/// The purpose of a lease.
enum class lease_mode : std::uint8_t {
  read,        ///< the contents are the last released ones, and stay unchanged
  write,       ///< the contents are unspecified; every element is written before the release
  read_write,  ///< the contents are the last released ones; some or all change
};

/// Part of a layer's elements.
struct element_range {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// The store of weights, gradients and optimizer state, layer by layer.
///
/// A *piece* is one kind of state of one layer. Between `acquire` and `release` it is *leased*: a contiguous
/// span in memory that this thread and those it starts may access, at a fixed address. At all other times it
/// belongs to the store, which may keep it anywhere, in any form that restores the bits, and hand it out at
/// another address each time, because the trainer keeps no pointer. `state_lease` below ensures that every
/// acquired piece is released.
///
/// - **Layers** are, with `gpt_shape::tiles`, the parts of layers that `state_parts` lists.
/// - **Sizes** are known before the store is built: `state_layout(shape, layer, kind).elements` values of
///   `value_type`, and never change. A span's alignment is that of `value_type` at least; 64 bytes is faster.
///   A store may round up its allocations, for example for direct I/O.
/// - **Order** is also known: every step acquires and releases as `step_schedule(shape, when)` lists, so that
///   all transfers of a run can be planned before it begins. Outside steps (initialisation, digest,
///   checkpoints) the trainer may acquire any piece, one at a time.
/// - **How many** at once: the pieces of a layer, or its activations, weights and gradients;
///   `most_leased_elements(shape)` is the minimum of the tier that computes.
/// - **The mode** shows which transfers may be skipped: `write` needs none in, `read` none back. A piece has
///   one lease at a time, also for reading.
/// - **Threads**: one thread acquires and releases. The trainer's workers access the memory of a lease. The
///   store's own threads may move unleased pieces.
/// - **Errors**: `acquire` may wait, and may throw; the step then ends, other leases are released, and the
///   run is over. `release` must not throw: a later `acquire`, or the next boundary of a step
///   (`follows_steps`), throws its failure. If a writing lease is released while an exception unwinds, its
///   contents are unfinished.
///
/// **Sharded state.** `owned(layer)` is the range of a layer that this process's optimizer updates: all of it
/// in a store that is not sharded. Leases for computation, that is weights to `read` and gradients to
/// `write`, always span the whole layer: a sharded store gathers the weights and reduces the gradients.
/// Leases of factors span all of them: each rank has them whole. All other leases span the owned elements
/// only.
template <class S>
concept state_store = std::floating_point<typename S::value_type> &&
                      requires(S& store, layer_id layer, state_kind kind, lease_mode mode) {
                        {
                          store.acquire(layer, kind, mode)
                        } -> std::same_as<std::span<typename S::value_type>>;
                        { store.release(layer, kind, mode) } noexcept;
                        { store.owned(layer) } noexcept -> std::same_as<element_range>;
                      };

/// A store of either kind that learns where steps begin and end: one that plans by the schedule, or takes
/// consistent snapshots. No piece is leased at these points. Both calls may wait, and throw earlier failures.
template <class S>
concept follows_steps = requires(S& store, std::uint64_t step) {
  store.begin_step(step);
  store.end_step(step);
};

/// Recomputes a layer's activations: an activation store may call it in `fetch`. The bits are the same as
/// before. The layer's weights are already leased.
template <class T>
class rebuild_activations {
 public:
  using function = void (*)(void* context, layer_id layer, std::span<T> activations, rebuilt_part part);

  constexpr rebuild_activations(function call, void* context) noexcept : call_(call), context_(context) {}

  /// @pre the other values of `activations` are as kept; the call restores those of the part.
  void operator()(layer_id layer, std::span<T> activations,
                  rebuilt_part part = rebuilt_part::all_but_input) const {
    call_(context_, layer, activations, part);
  }

 private:
  function call_;
  void* context_;
};

/// The store of activations between a layer's forward and backward pass.
///
/// The record of a layer is `activation_layout(shape, layer).elements` values; the embedding has none, and is
/// never requested. Its life in a step:
///
///     save -> filled by the forward pass -> keep   layers 1, 2, ... to the head
///     fetch -> read by the backward pass -> drop   the head first, down to layer 1
///
/// Between `keep` and `fetch` the record belongs to the store, which may move it, encode it, or reduce it to
/// its first `input_elements(shape)` values, the layer's input: `fetch` receives the function that recomputes
/// the rest. After `drop` the contents are worthless. A forward pass alone drops each record right after
/// saving it. `saved_activations` and `fetched_activations` below ensure the second half of each pair.
///
/// Alignment, threads, errors and order (`step_schedule`) are as for `state_store`.
template <class A>
concept activation_store =
    std::floating_point<typename A::value_type> &&
    requires(A& store, layer_id layer, const rebuild_activations<typename A::value_type>& rebuild) {
      { store.save(layer) } -> std::same_as<std::span<typename A::value_type>>;
      { store.keep(layer) } noexcept;
      { store.fetch(layer, rebuild) } -> std::same_as<std::span<const typename A::value_type>>;
      { store.drop(layer) } noexcept;
    };

/// Leases a piece as long as it lives.
template <state_store Store, lease_mode Mode>
class [[nodiscard]] state_lease {
 public:
  using value_type = std::conditional_t<Mode == lease_mode::read, const typename Store::value_type,
                                        typename Store::value_type>;

  /// @throws the store's exceptions.
  state_lease(Store& store, layer_id layer, state_kind kind)
      : store_(&store), layer_(layer), kind_(kind), values_(store.acquire(layer, kind, Mode)) {}
  state_lease(const state_lease&) = delete;
  state_lease& operator=(const state_lease&) = delete;
  ~state_lease() { store_->release(layer_, kind_, Mode); }

  [[nodiscard]] std::span<value_type> values() const noexcept { return values_; }

 private:
  Store* store_;
  layer_id layer_;
  state_kind kind_;
  std::span<value_type> values_;
};

/// Memory for a layer's record, which is dropped with this object unless `keep` was called.
template <activation_store Store>
class [[nodiscard]] saved_activations {
 public:
  saved_activations(Store& store, layer_id layer)
      : store_(&store), layer_(layer), values_(store.save(layer)) {}
  saved_activations(const saved_activations&) = delete;
  saved_activations& operator=(const saved_activations&) = delete;
  ~saved_activations() {
    if (store_ != nullptr) store_->drop(layer_);
  }

  [[nodiscard]] std::span<typename Store::value_type> values() const noexcept { return values_; }

  /// Passes the filled record to the store.
  void keep() noexcept {
    values_ = {};
    std::exchange(store_, nullptr)->keep(layer_);
  }

 private:
  Store* store_;
  layer_id layer_;
  std::span<typename Store::value_type> values_;
};

/// A layer's kept record, which is dropped with this object.
template <activation_store Store>
class [[nodiscard]] fetched_activations {
 public:
  using value_type = const typename Store::value_type;

  fetched_activations(Store& store, layer_id layer,
                      const rebuild_activations<typename Store::value_type>& rebuild)
      : store_(&store), layer_(layer), values_(store.fetch(layer, rebuild)) {}
  fetched_activations(const fetched_activations&) = delete;
  fetched_activations& operator=(const fetched_activations&) = delete;
  ~fetched_activations() { store_->drop(layer_); }

  [[nodiscard]] std::span<value_type> values() const noexcept { return values_; }

 private:
  Store* store_;
  layer_id layer_;
  std::span<value_type> values_;
};

/// The calls of a step to its stores, one per event.
struct step_event {
  enum class call : std::uint8_t { acquire, release, save, keep, fetch, drop };

  call what = call::acquire;
  layer_id layer{};
  state_kind kind = state_kind::weights;  ///< of `acquire` and `release`
  lease_mode mode = lease_mode::read;     ///< of `acquire` and `release`

  friend constexpr bool operator==(const step_event&, const step_event&) noexcept = default;
};

/// When the optimizer changes a layer's weights. The bits are the same, because a layer's gradients are of
/// its weights before the step, and no layer's backward pass reads another layer's weights.
enum class update_time : std::uint8_t {
  after_backward,  ///< after all gradients, which allows reduction, clipping or accumulation over the model
  in_backward,     ///< when its own are there: gradients live for one layer's time, and what the optimizer
                   ///< needs is brought up beside the backward pass; a step that fails in that pass has
                   ///< changed the layers before (Lv et al., "Full Parameter Fine-tuning for
                   ///< Large Language Models with Limited Resources", 2023, arXiv 2306.09782)
};

/// Every call that `trainer::step` makes, in order, the same each step: forward from the embedding to the
/// head, backward from the head to the embedding, and the optimizer, after it from the embedding to the head
/// or in it after each layer. A whole layer's weights are leased when its activations are fetched, so that
/// what is computed again leases nothing more; in tiles, it leases the weights that it needs in turn, in
/// addition to these calls. `trainer::evaluate` makes the calls of the forward pass, with
/// `drop` for `keep`.
[[nodiscard]] inline std::vector<step_event> step_schedule(const gpt_shape& shape, update_time when) {
  using enum step_event::call;
  std::vector<step_event> all;
  const auto update = [&](layer_id layer) {
    std::vector<step_event> kept{{acquire, layer, state_kind::gradients, lease_mode::read},
                                 {acquire, layer, state_kind::weights, lease_mode::read_write}};
    for (const state_kind kind : updated_kinds(shape))
      kept.push_back({acquire, layer, kind, lease_mode::read_write});
    all.insert(all.end(), kept.begin(), kept.end());
    for (auto lease = kept.rbegin(); lease != kept.rend(); ++lease)
      all.push_back({release, layer, lease->kind, lease->mode});
  };
  const std::vector<layer_part> parts = state_parts(shape);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const layer_id piece = shape.layer(i);
    const bool keeps = i != 0;
    if (keeps && begins_layer(parts, i)) all.push_back({save, parts[i].layer});
    all.push_back({acquire, piece, state_kind::weights, lease_mode::read});
    all.push_back({release, piece, state_kind::weights, lease_mode::read});
    if (keeps && ends_layer(parts, i)) all.push_back({keep, parts[i].layer});
  }
  for (std::size_t i = parts.size(); i-- > 0;) {
    const layer_id piece = shape.layer(i);
    const bool kept = i != 0;
    const step_event weights{acquire, piece, state_kind::weights, lease_mode::read};
    if (kept && parts[i].is_whole()) all.push_back(weights);
    if (kept && ends_layer(parts, i)) all.push_back({fetch, parts[i].layer});
    if (kept && !parts[i].is_whole()) all.push_back(weights);
    all.push_back({acquire, piece, state_kind::gradients, lease_mode::write});
    all.push_back({release, piece, state_kind::gradients, lease_mode::write});
    if (kept && begins_layer(parts, i)) all.push_back({drop, parts[i].layer});
    if (kept) all.push_back({release, piece, state_kind::weights, lease_mode::read});
    if (when == update_time::in_backward) update(piece);
  }
  for (std::size_t i = 0; i < parts.size() && when == update_time::after_backward; ++i)
    update(shape.layer(i));
  return all;
}

/// The most values leased at once in a step, whenever it updates: a tier that computes must hold these, and
/// whatever it prefetches on top.
[[nodiscard]] inline std::size_t most_leased_elements(const gpt_shape& shape) {
  using enum step_event::call;
  std::size_t now = 0;
  std::size_t most = 0;
  for (const step_event& event : step_schedule(shape, update_time::after_backward)) {
    const bool of_state = event.what == acquire || event.what == release;
    const std::size_t elements =
        (of_state ? state_layout(shape, event.layer, event.kind) : activation_layout(shape, event.layer))
            .elements;
    const bool begins = event.what == acquire || event.what == save || event.what == fetch;
    now = begins ? now + elements : now - elements;
    most = std::max(most, now);
  }
  return most;
}

}  // namespace train_gpt
