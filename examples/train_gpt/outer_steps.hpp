/// @file
/// `outer_steps`: the outer steps of one rank, between steps of training; and their state as part of a store.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/comm/wired_sums.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/training/outer_rounds.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "train_gpt/any_stores.hpp"
#include "train_gpt/chunk_store.hpp"
#include "train_gpt/outer_options.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Outer steps of all workers, layer by layer. Each rank changes the elements that its optimizer updates,
/// together with the ranks that have the same ones in the other workers.
///
/// @par Thread safety   the trainer's thread; `acquire` with memory that stays: any.
/// @par Errors          the exceptions of the stores; `comm_error` if another worker has failed.
class outer_steps {
 public:
  /// @param kept    the space whose use is measured together with a round's messages.
  /// @param layers  a store that outlives this object, as `chunks` do; its weights need not be drawn yet.
  outer_steps(chunk_store& chunks, const llmmem::host_space& kept, const gpt_shape& shape,
              any_state<float>& layers, const outer_options& by)
      : chunks_(&chunks),
        kept_(&kept),
        shape_(shape),
        layers_(&layers),
        by_(by),
        rounds_(chunks, elements(), by.by),
        resident_(layers.stays() ? 2 * fragments_.size() : 0) {}
  outer_steps(const outer_steps&) = delete;
  outer_steps& operator=(const outer_steps&) = delete;
  virtual ~outer_steps() = default;

  /// Takes the store's weights as base weights. All workers have drawn the same.
  void begin() {
    for (std::size_t i = 0; i < shape_.parts(); ++i) {
      const layer_id layer = shape_.layer(i);
      if (!fragments_[i]) continue;
      const element_range owned = layers_->owned(layer);
      const element_range held = layers_->held(layer, state_kind::weights);
      const std::span<float> weights = layers_->acquire_held(layer, state_kind::weights, lease_mode::read);
      const auto done = rounds_.begin(*fragments_[i], weights.subspan(owned.first - held.first, owned.count));
      layers_->release_held(layer, state_kind::weights, lease_mode::read);
      done.value();
      if (resident_.empty()) continue;
      for (const state_kind kind : {state_kind::base, state_kind::base_momentum})
        resident_[place(layer, kind)] = values(chunks_->read(chunk(layer, kind)).value().span());
    }
  }
  /// Takes an outer step if a round has ended.
  /// @param state  through which the weights change: gated, if the run is saved.
  /// @param done   steps of the run.
  void after_step(any_state<float>& state, std::uint64_t done) {
    if (done % by_.local_steps != 0) return;
    llmmem::collective_call call;
    call.scratch.reserve(messages_);
    for (std::size_t i = 0; i < shape_.parts(); ++i) {
      // Also of a layer that others update: its weights are refreshed at the lease's end, on all ranks.
      const state_lease<any_state<float>, lease_mode::read_write> weights(state, shape_.layer(i),
                                                                          state_kind::weights);
      if (!fragments_[i]) continue;
      rounds_.take(*fragments_[i], weights.values()).value();
      sum(rounds_, call);
      peak_bytes_ = std::max<std::uint64_t>(peak_bytes_, kept_->stats().used + call.scratch.capacity());
      rounds_.apply(weights.values()).value();
    }
  }

  /// Bytes of base weights and momentum.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept { return kept_bytes_; }
  /// The most that the space and the messages of a round have taken together.
  [[nodiscard]] std::uint64_t peak_bytes() const noexcept { return peak_bytes_; }

  /// @name Base weights and momentum in checkpoints, between rounds
  /// @{
  [[nodiscard]] element_range held(layer_id layer) const noexcept { return layers_->owned(layer); }
  /// The first worker saves them for all.
  [[nodiscard]] element_range saved(layer_id layer) const noexcept {
    return layers_->saved(layer, state_kind::weights);
  }
  [[nodiscard]] std::span<float> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    if (!fragments_[to_index(layer)]) return {};
    if (!resident_.empty()) return resident_[place(layer, kind)];
    if (mode == lease_mode::read) {
      auto lease = chunks_->read(chunk(layer, kind)).value();
      const std::span<float> read = values(lease.span());
      held_[slot(kind)] = std::move(lease);
      return read;
    }
    auto lease = chunks_->update(chunk(layer, kind)).value();
    const std::span<float> changed = values(lease.span());
    held_[slot(kind)] = std::move(lease);
    return changed;
  }
  void release(state_kind kind) noexcept {
    if (resident_.empty()) held_[slot(kind)] = std::monostate{};
  }
  /// @}

 protected:
  using rounds = llmmem::outer_rounds<chunk_store>;
  static constexpr std::uint64_t patience_ns = 60'000'000'000;

  /// Sums over all workers.
  virtual void sum(rounds& of, llmmem::collective_call& call) = 0;

 private:
  [[nodiscard]] std::vector<std::uint64_t> elements() {
    std::vector<std::uint64_t> all;
    for (std::size_t i = 0; i < shape_.parts(); ++i) {
      const std::uint64_t owned = layers_->owned(shape_.layer(i)).count;
      fragments_.push_back(std::nullopt);
      if (owned == 0) continue;  // a small layer, on many ranks
      fragments_.back() = static_cast<std::uint32_t>(all.size());
      all.push_back(owned);
      kept_bytes_ += 2 * sizeof(float) * owned;
      messages_ = std::max(messages_,
                           llmmem::all_reduce_scratch_bytes(owned, llmmem::rank_count{by_.workers}, by_.wire,
                                                            llmmem::collective_call{}.segment_bytes));
    }
    return all;
  }
  [[nodiscard]] static std::size_t slot(state_kind kind) noexcept { return kind == state_kind::base ? 0 : 1; }
  [[nodiscard]] static std::size_t place(layer_id layer, state_kind kind) noexcept {
    return 2 * to_index(layer) + slot(kind);
  }
  [[nodiscard]] rounds::chunk_type chunk(layer_id layer, state_kind kind) const noexcept {
    const std::uint32_t fragment = *fragments_[to_index(layer)];
    return kind == state_kind::base ? rounds_.base(fragment) : rounds_.momentum(fragment);
  }
  [[nodiscard]] static std::span<float> values(std::span<std::byte> bytes) noexcept {
    return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
  }

  chunk_store* chunks_;
  const llmmem::host_space* kept_;
  gpt_shape shape_;
  any_state<float>* layers_;
  outer_options by_;
  std::vector<std::optional<std::uint32_t>> fragments_{};  // of each layer
  std::uint64_t kept_bytes_ = 0;
  std::uint64_t messages_ = 0;
  rounds rounds_;
  std::vector<std::span<float>> resident_;  // any thread reads these; of memory that moves: none
  std::array<std::variant<std::monostate, chunk_store::read_lease, chunk_store::update_lease>, 2> held_{};
  std::uint64_t peak_bytes_ = 0;
};

/// The same over a transport of all ranks of all workers, those of a worker side by side.
template <llmmem::transport Ranks>
class outer_steps_over final : public outer_steps {
 public:
  outer_steps_over(Ranks& ranks, chunk_store& chunks, const llmmem::host_space& kept, const gpt_shape& shape,
                   any_state<float>& layers, const outer_options& by)
      : outer_steps(chunks, kept, shape, layers, by), wire_(by.wire), peers_(ranks, peers(ranks, by)) {}

 private:
  [[nodiscard]] static std::vector<llmmem::rank_id> peers(const Ranks& ranks, const outer_options& by) {
    const std::uint32_t each = to_number(ranks.world()) / by.workers;
    std::vector<llmmem::rank_id> all;
    for (std::uint32_t worker = 0; worker < by.workers; ++worker)
      all.push_back(llmmem::rank_id{worker * each + to_index(ranks.rank()) % each});
    return all;
  }
  void sum(rounds& of, llmmem::collective_call& call) override {
    call.by = peers_.after(patience_ns);
    of.sum(peers_, wire_, call).value();
  }

  llmmem::wire_form wire_;
  llmmem::rank_group<Ranks> peers_;
};

/// A store with the base weights and the momentum of outer steps, for checkpoints.
class joined_state final : public forwarded_state<float> {
 public:
  joined_state(any_state<float>& store, outer_steps& steps) noexcept
      : forwarded_state(store), steps_(&steps) {}

  [[nodiscard]] element_range saved(layer_id layer, state_kind kind) const noexcept override {
    return is_outer(kind) ? steps_->saved(layer) : forwarded_state::saved(layer, kind);
  }
  [[nodiscard]] element_range held(layer_id layer, state_kind kind) const noexcept override {
    return is_outer(kind) ? steps_->held(layer) : forwarded_state::held(layer, kind);
  }
  [[nodiscard]] std::span<float> acquire_held(layer_id layer, state_kind kind, lease_mode mode) override {
    return is_outer(kind) ? steps_->acquire(layer, kind, mode)
                          : forwarded_state::acquire_held(layer, kind, mode);
  }
  void release_held(layer_id layer, state_kind kind, lease_mode mode) noexcept override {
    is_outer(kind) ? steps_->release(kind) : forwarded_state::release_held(layer, kind, mode);
  }

 private:
  [[nodiscard]] static constexpr bool is_outer(state_kind kind) noexcept {
    return kind == state_kind::base || kind == state_kind::base_momentum;
  }

  outer_steps* steps_;
};

/// A trainer with outer steps between its steps, if there are any.
template <class Trainer>
class joining_trainer {
 public:
  /// @param outer  or null.
  joining_trainer(Trainer& trainer, any_state<float>& state, outer_steps* outer) noexcept
      : trainer_(&trainer), state_(&state), outer_(outer) {}

  [[nodiscard]] double step(const token_batch& batch, std::uint64_t number) {
    const double loss = trainer_->step(batch, number);
    if (outer_ != nullptr) outer_->after_step(*state_, number + 1);
    return loss;
  }
  [[nodiscard]] double evaluate(const token_batch& batch) { return trainer_->evaluate(batch); }
  [[nodiscard]] std::uint64_t digest() { return trainer_->digest(); }

 private:
  Trainer* trainer_;
  any_state<float>* state_;
  outer_steps* outer_;
};

}  // namespace train_gpt
