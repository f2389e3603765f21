/// @file
/// The stores of one rank of several: weights, gradients and moments complete or sharded, as in ZeRO.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/operation_queue.hpp>
#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/training_state.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/background_sums.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/hierarchical_zero.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/concepts.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/training/loss_scale.hpp>
#include <llmmem/training/merge_sums.hpp>
#include <llmmem/training/top_k_sums.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train_gpt/chunk_store.hpp"
#include "train_gpt/gather_plan.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// What each rank keeps and sends. Equal on all ranks.
struct sharding {
  llmmem::zero_stage stage = llmmem::zero_stage::none;
  /// How many reads before its own a layer's weights are gathered; none if all ranks have them complete.
  std::uint32_t gather_ahead = 0;
  llmmem::sharded_wires wires{};  ///< the form of the messages of gathered weights and of summed gradients
  /// Whether the backward pass gathers weights within a node, from shards of what the forward pass gathered:
  /// with `wires.node_ranks`, sharded weights and no gathers ahead.
  bool keeps_secondary = false;
  /// How many layers' gradients are summed while the backward pass computes others; 0: it waits for each.
  std::uint32_t sums_in_flight = 0;
  /// The share of each layer's gradients that is sent; 0: all. With whole state and `corrects_momentum`.
  double top_k_density = 0;
  llmmem::top_k_options top_k{};
};

/// One rank's part of everything, at a stage of ZeRO; `zero_stage::none` is plain data parallelism. Each rank
/// has its own batches; after a layer's backward pass its gradients are the mean of all ranks', summed in the
/// order of ranks.
///
/// | | weights | gradients | moments | a step sends |
/// |---|---|---|---|---|
/// | none | whole | whole, all-reduced | whole | 2P (N-1)/N |
/// | optimizer | whole, gathered after the update | whole, reduced to owners | shard | 2P |
/// | gradients | the same | shard; a layer's whole while it is computed | shard | 2P |
/// | weights | shard; a layer's whole while it is used | the same | shard | 3P |
///
/// Adafactor's factors take so little that each rank keeps all of them, and changes them by the merged sums
/// of all ranks.
///
/// With `gather_ahead`, a separate thread gathers weights in advance, while the caller computes with other
/// layers. With `sums_in_flight`, it also sums gradients while the caller computes those of the layers
/// before; `finish_sums` ends the backward pass. That thread then sends all messages of a step; between steps
/// no message is in flight, and the transport is free for other uses. Weights read in addition to those of
/// `step_schedule` are gathered on demand.
///
/// With `top_k_density`, mean and variance are the rank's own: the momentum, and what it has not sent. The
/// gradients become the mean of what all ranks send, and a step sends their lists.
///
/// With a store of chunks, the rank's state is stored there between operations, for example in tiers.
/// Gathered data and buffers of sums always come from the space.
///
/// @par Thread safety   one thread, and all ranks the same calls.
/// @par Errors          as for `state_store`: a failure after a release is thrown by the next `acquire` or at
///                      the end of the step.
template <std::floating_point T, llmmem::memory_space Space, llmmem::transport Ranks,
          llmmem::piece_store Pieces = llmmem::resident_pieces<Space>>
  requires(sizeof(T) == 4)
class sharded_layers {
 public:
  using value_type = T;
  static constexpr bool leases_stay = Pieces::is_resident;

  /// Transport and space outlive it.
  /// @throws the exceptions of `sharded_state`'s constructors; `std::system_error` if no thread can start.
  sharded_layers(Space& space, const gpt_shape& shape, Ranks& ranks, const sharding& how)
    requires(Pieces::is_resident)
      : ranks_(&ranks),
        stage_(how.stage),
        space_(&space),
        facts_(layer_catalogue(shape, sizeof(T))),
        weights_(of(llmmem::state_kind::weights), facts_, ranks, space, of_weights(how.wires)),
        gradients_(of(llmmem::state_kind::gradients), facts_, ranks, space, of_gradients(how.wires)) {
    make_optimizer_state(shape, space);
    plan_messages(space, shape, how);
  }
  /// The same over chunks.
  template <class Store>
    requires std::same_as<Pieces, llmmem::leased_pieces<Store>>
  sharded_layers(Space& space, Store& chunks, const gpt_shape& shape, Ranks& ranks, const sharding& how)
      : ranks_(&ranks),
        stage_(how.stage),
        space_(&space),
        facts_(layer_catalogue(shape, sizeof(T))),
        weights_(of(llmmem::state_kind::weights), facts_, ranks, space, chunks, of_weights(how.wires)),
        gradients_(of(llmmem::state_kind::gradients), facts_, ranks, space, chunks, of_gradients(how.wires)),
        chunks_(step_bounds::of(chunks)) {
    make_optimizer_state(shape, space, chunks);
    plan_messages(space, shape, how);
  }

  [[nodiscard]] std::span<T> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    throw_what_failed();
    const llmmem::tensor_id tensor{to_index(layer)};
    if (kind == state_kind::gradients && mode == lease_mode::read) finish_sums();
    if (kind == state_kind::weights && mode == lease_mode::read) return as_values(whole_weights_of(tensor));
    if (kind == state_kind::gradients && mode == lease_mode::write) {
      whole_gradients_ = gradients_.allocate_whole({&tensor, 1}).value();
      return as_values(whole_gradients_.tensor(0));
    }
    piece& held = held_[static_cast<std::size_t>(kind)];
    if (kind == state_kind::factors) {
      held = kept(kind).lease(tensor, access_of(mode, true)).value();
      return as_values(held.local());
    }
    // The parts of a piece that others own stay.
    const bool is_all =
        stage_ == llmmem::zero_stage::none || owned(layer).count == this->held(layer, kind).count;
    held = kept(kind).lease(tensor, access_of(mode, is_all)).value();
    return mine(held);
  }

  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    const llmmem::tensor_id tensor{to_index(layer)};
    held_[static_cast<std::size_t>(kind)] = {};
    if (kind == state_kind::weights) {
      if (mode == lease_mode::read) {
        // The plan continues at the lease's end, and this rank will not: its gathers would meet the others'
        // sums.
        if (schedule_ && std::uncaught_exceptions() != 0) revoke();
        planned_weights_.end();
        whole_weights_ = {};
        if (secondary_) secondary_->whole = {};
      } else {
        share(tensor, kind);
      }
    } else if (kind == state_kind::gradients && mode == lease_mode::write) {
      share(tensor, kind);
      whole_gradients_ = {};
    } else if (kind == state_kind::gradients && mode == lease_mode::read) {
      static_cast<void>(gradients_.discard(tensor));  // the optimizer has used them
    }
  }

  [[nodiscard]] element_range owned(layer_id layer) const noexcept {
    return stage_ == llmmem::zero_stage::none ? all_of(layer) : saved(layer, state_kind::weights);
  }

  /// @name This rank's part of a checkpoint
  /// @{
  [[nodiscard]] element_range saved(layer_id layer, state_kind kind) const noexcept {
    const bool is_own = kind == state_kind::mean || kind == state_kind::variance;
    if (top_k_density_ != 0 && is_own) return held(layer, kind);
    return range_of(kept(kind).layout().owned(llmmem::tensor_id{to_index(layer)}, ranks_->rank()));
  }
  [[nodiscard]] element_range held(layer_id layer, state_kind kind) const noexcept {
    return range_of(kept(kind).layout().local(llmmem::tensor_id{to_index(layer)}, ranks_->rank()));
  }
  [[nodiscard]] std::span<T> acquire_held(layer_id layer, state_kind kind, lease_mode mode) {
    const llmmem::tensor_id tensor{to_index(layer)};
    if constexpr (Pieces::is_resident) {
      return as_values(kept(kind).local(tensor));  // readable by any thread
    } else {
      piece& held = held_[static_cast<std::size_t>(kind)];
      held = kept(kind).lease(tensor, access_of(mode, true)).value();
      return as_values(held.local());
    }
  }
  void release_held(layer_id /*layer*/, state_kind kind, lease_mode /*mode*/) noexcept {
    if constexpr (!Pieces::is_resident) held_[static_cast<std::size_t>(kind)] = {};
  }
  /// @}

  void begin_step(std::uint64_t /*step*/) {
    throw_what_failed();
    chunks_.begin();
    if (secondary_) secondary_->begin_step();
    if (!schedule_) return;
    schedule_->begin_iteration();
    next_read_ = 0;
  }
  void end_step(std::uint64_t /*step*/) {
    throw_what_failed();
    if (secondary_) secondary_->end_step();
    if (schedule_) {
      next_read_ = reads_.size();
      schedule_->end_iteration().value();
    }
    chunks_.end();
  }

  /// Waits until the gradients of all layers are the means of all ranks'.
  void finish_sums() {
    if (!sums_) return;
    const auto done = sums_->finish(to_means());
    if (!done) failed_ = done;
    throw_what_failed();
  }

  /// Adds the means of the gradients that this rank owns to `norm`, as they are summed; null: no longer.
  bool adds_gradients_to(llmmem::gradient_norm* norm) noexcept {
    norm_ = norm;
    return true;
  }

  /// Adds the sums of all ranks, each of the elements that it owns. With plain data parallelism each rank's
  /// are complete.
  void merge_sums(std::span<llmmem::unordered_sum> sums) {
    if (stage_ == llmmem::zero_stage::none) return;
    talk([&] {
      merging_.by = ranks_->after(patience_ns);
      return llmmem::merge_all(*ranks_, sums, merging_);
    }).value();
  }

  /// With plain data parallelism all ranks have the whole state, and may share out work on it.
  [[nodiscard]] work_share shared_by() const noexcept {
    if (stage_ != llmmem::zero_stage::none) return {};
    return {to_index(ranks_->rank()), to_number(ranks_->world())};
  }
  /// Gathers each rank's block of `all`.
  void gather_blocks(std::span<std::byte> all, std::span<const std::uint64_t> blocks) {
    talk([&] {
      merging_.by = ranks_->after(patience_ns);
      return llmmem::all_gather(*ranks_, all, blocks, merging_);
    }).value();
  }

  /// The sums in the background: nothing without `sums_in_flight`.
  [[nodiscard]] llmmem::background_sums_stats sum_stats() const noexcept {
    return sums_ ? sums_->stats() : llmmem::background_sums_stats{};
  }
  /// The gathers ahead: nothing without `gather_ahead`.
  [[nodiscard]] llmmem::gather_schedule_stats gather_stats() const noexcept {
    return schedule_ ? schedule_->stats() : llmmem::gather_schedule_stats{};
  }

  /// Bytes that this rank keeps, without the buffers of an operation.
  [[nodiscard]] std::uint64_t kept_bytes() const noexcept {
    std::uint64_t bytes = weights_.stats().local_bytes + gradients_.stats().local_bytes;
    for (const std::optional<state>* const each : {&mean_, &variance_, &factors_})
      bytes += *each ? (*each)->stats().local_bytes : 0;
    return bytes;
  }

 private:
  using state = llmmem::sharded_state<llmmem::zero_partition, Ranks, Space, Pieces>;
  using piece = llmmem::piece_lease<Pieces>;

  static constexpr std::uint64_t patience_ns = 60'000'000'000;

  /// The weights of a step's forward pass in shards of each node. They are plain, so the backward pass has
  /// the same bits. Outside steps it has nothing.
  struct secondary_shards {
    using state = llmmem::sharded_state<llmmem::hierarchical_zero, Ranks, Space>;

    secondary_shards(std::span<const llmmem::tensor_facts> facts, Ranks& ranks, Space& space,
                     std::uint32_t node_ranks)
        : weights(llmmem::hierarchical_zero(facts, ranks.world(), llmmem::rank_count{node_ranks}), facts,
                  ranks, space, {.name = "secondary weights"}),
          node(ranks, members(ranks, node_ranks)),
          is_kept(facts.size()) {}

    void begin_step() { is_in_step = true; }
    void end_step() {
      is_in_step = false;
      is_kept.assign(is_kept.size(), false);
    }
    [[nodiscard]] bool has(llmmem::tensor_id tensor) const { return is_kept[to_index(tensor)]; }
    void keep(llmmem::tensor_id tensor, std::span<const std::byte> all) {
      if (!is_in_step) return;
      const std::uint64_t begin = weights.layout().local(tensor, weights.rank()).begin;
      const std::span<std::byte> to = weights.local(tensor);
      if (!to.empty()) std::memcpy(to.data(), all.subspan(begin * sizeof(T), to.size()).data(), to.size());
      is_kept[to_index(tensor)] = true;
    }
    [[nodiscard]] llmmem::result<void> gather(llmmem::tensor_id tensor) {
      auto gathered = weights.gather_within(node, {&tensor, 1});
      if (!gathered) return gathered.error();
      whole = std::move(*gathered);
      return {};
    }
    [[nodiscard]] static std::vector<llmmem::rank_id> members(Ranks& ranks, std::uint32_t node_ranks) {
      std::vector<llmmem::rank_id> all;
      const std::uint32_t first = to_index(ranks.rank()) / node_ranks * node_ranks;
      for (std::uint32_t i = 0; i < node_ranks; ++i)
        all.push_back(llmmem::rank_id{first + i});
      return all;
    }

    state weights;
    llmmem::rank_group<Ranks> node;
    std::vector<bool> is_kept;
    bool is_in_step = false;
    typename state::whole whole{};
  };

  /// @param memory  the space, and the store of chunks if there is one.
  template <class... Memory>
  void make_optimizer_state(const gpt_shape& shape, Memory&... memory) {
    for (const state_kind kind : optimizer_kinds(shape)) {
      const bool is_factors = kind == state_kind::factors;
      std::optional<state>& it = is_factors ? factors_ : kind == state_kind::mean ? mean_ : variance_;
      const std::vector<llmmem::tensor_facts> facts = state_catalogue(shape, kind, sizeof(T));
      const llmmem::zero_partition split(facts, ranks_->world(),
                                         is_factors ? llmmem::zero_stage::none : stage_,
                                         llmmem::state_kind::optimizer);
      it.emplace(split, facts, *ranks_, memory...,
                 llmmem::sharded_options{.name = is_factors                 ? "factors"
                                                 : kind == state_kind::mean ? "mean"
                                                                            : "variance"});
    }
  }
  /// Prepares what runs on the communicating thread, and the secondary shards.
  void plan_messages(Space& space, const gpt_shape& shape, const sharding& how) {
    llmmem::check_top_k(how.top_k);
    top_k_density_ = how.top_k_density;
    top_k_ = how.top_k;
    const bool gathers_ahead = stage_ == llmmem::zero_stage::weights && how.gather_ahead != 0;
    if (gathers_ahead || how.sums_in_flight != 0) queue_.emplace();
    if (gathers_ahead) plan_gathers_ahead(shape, how.gather_ahead);
    if (how.sums_in_flight != 0) {
      const bool is_complete = stage_ == llmmem::zero_stage::none;
      sums_.emplace(gradients_, *queue_, how.sums_in_flight,
                    is_complete ? llmmem::sum_holders::all : llmmem::sum_holders::owners);
    }
    if (how.keeps_secondary) secondary_.emplace(facts_, *ranks_, space, how.wires.node_ranks);
  }
  void plan_gathers_ahead(const gpt_shape& shape, std::uint32_t gather_ahead) {
    reads_ = weight_reads(shape);
    next_read_ = reads_.size();  // until a step begins
    std::vector<std::vector<llmmem::tensor_id>> layers;
    for (std::uint32_t i = 0; i < facts_.size(); ++i)
      layers.push_back({llmmem::tensor_id{i}});
    schedule_.emplace(weights_, *queue_, std::move(layers), reads_,
                      plan_weight_gathers(facts_, reads_, gather_ahead));
  }

  [[nodiscard]] static llmmem::sharded_options of_weights(const llmmem::sharded_wires& wires) {
    return {.name = "weights", .wires = {.gather = wires.gather, .node_ranks = wires.node_ranks}};
  }
  [[nodiscard]] static llmmem::sharded_options of_gradients(const llmmem::sharded_wires& wires) {
    llmmem::sharded_options options{.name = "gradients", .wires = wires};
    options.wires.gather = {};
    return options;
  }
  [[nodiscard]] llmmem::zero_partition of(llmmem::state_kind kind) const {
    return {facts_, ranks_->world(), stage_, kind};
  }
  [[nodiscard]] static std::span<T> as_values(std::span<std::byte> bytes) noexcept {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  /// The range that this rank's optimizer updates: its shard, or, with plain data parallelism, everything.
  [[nodiscard]] std::span<T> mine(const piece& held) const noexcept {
    return as_values(stage_ == llmmem::zero_stage::none ? held.local() : held.owned());
  }
  [[nodiscard]] state& kept(state_kind kind) noexcept {
    return const_cast<state&>(std::as_const(*this).kept(kind));
  }
  [[nodiscard]] const state& kept(state_kind kind) const noexcept {
    switch (kind) {
      case state_kind::weights:
        return weights_;
      case state_kind::gradients:
        return gradients_;
      case state_kind::mean:
        return *mean_;
      case state_kind::variance:
        return *variance_;
      case state_kind::factors:
      case state_kind::base:  // not kept here
      case state_kind::base_momentum:
        break;
    }
    return *factors_;
  }
  [[nodiscard]] static llmmem::access_mode access_of(lease_mode mode, bool is_all) noexcept {
    if (mode == lease_mode::read) return llmmem::access_mode::read;
    return mode == lease_mode::write && is_all ? llmmem::access_mode::write : llmmem::access_mode::read_write;
  }
  [[nodiscard]] static element_range range_of(const llmmem::element_runs& runs) noexcept {
    return {runs.begin, runs.elements()};
  }
  [[nodiscard]] element_range all_of(layer_id layer) const noexcept {
    return {0, facts_[to_index(layer)].shape.elements()};
  }

  /// Runs work on the communicating thread, if there is one.
  template <class Work>
  llmmem::result<void> talk(Work&& work) {
    return queue_ ? queue_->run(work) : work();
  }
  void revoke() {
    static_cast<void>(talk([&]() -> llmmem::result<void> {
      ranks_->revoke();
      return {};
    }));
  }

  [[nodiscard]] std::span<std::byte> whole_weights_of(llmmem::tensor_id tensor) {
    if (next_read_ < reads_.size() && reads_[next_read_] == to_index(tensor)) {
      ++next_read_;
      planned_weights_ = schedule_->next().value();
      return planned_weights_.whole().tensor(0);
    }
    if (secondary_ && secondary_->has(tensor)) {
      talk([&] { return secondary_->gather(tensor); }).value();
      return secondary_->whole.tensor(0);
    }
    talk([&]() -> llmmem::result<void> {
      auto gathered = weights_.gather({&tensor, 1});
      if (!gathered) return gathered.error();
      whole_weights_ = std::move(*gathered);
      return {};
    }).value();
    if (secondary_) secondary_->keep(tensor, whole_weights_.tensor(0));
    return whole_weights_.tensor(0);
  }

  /// Combines the written data with that of all ranks.
  void share(llmmem::tensor_id tensor, state_kind kind) noexcept {
    if (!failed_ || thrown_) return;  // this rank's run is over
    // The data is unfinished, and the other ranks would wait for it.
    if (std::uncaught_exceptions() != 0) return revoke();
    try {
      const bool is_complete = stage_ == llmmem::zero_stage::none;
      llmmem::result<void> done;
      if (kind == state_kind::gradients && sums_) {
        done = sums_->begin(std::move(whole_gradients_), llmmem::sum_f32, to_means());
      } else if (kind == state_kind::gradients && top_k_density_ != 0) {
        done = sum_largest(tensor);
      } else if (kind == state_kind::gradients) {
        done = talk([&] {
          return is_complete ? gradients_.all_reduce(whole_gradients_, llmmem::sum_f32)
                             : gradients_.reduce_scatter(whole_gradients_, llmmem::sum_f32);
        });
        if (done) divide(tensor);
      } else if (!is_complete) {
        done = talk([&] { return weights_.refresh({&tensor, 1}); });
      }
      if (!done) failed_ = done;
    } catch (...) {
      thrown_ = std::current_exception();
      revoke();
    }
  }

  /// Sums what all ranks send of a layer's gradients, and divides.
  [[nodiscard]] llmmem::result<void> sum_largest(llmmem::tensor_id tensor) {
    const std::span<T> gradients = as_values(whole_gradients_.tensor(0));
    const piece momentum = mean_->lease(tensor, llmmem::access_mode::read_write).value();
    const piece unsent = variance_->lease(tensor, llmmem::access_mode::read_write).value();
    const std::uint64_t count = llmmem::top_k_count(gradients.size(), top_k_density_);
    const std::uint64_t bytes = llmmem::sparse_scratch_bytes(count, ranks_->world(), top_k_.form);
    const llmmem::space_buffer lists(*space_, bytes, std::align_val_t{alignof(std::uint64_t)});
    merging_.by = ranks_->after(patience_ns);
    const auto done =
        llmmem::top_k_all_reduce(*ranks_, gradients, {as_values(momentum.local()), as_values(unsent.local())},
                                 count, top_k_, {lists.range().data, bytes}, merging_);
    const auto ranks = static_cast<T>(to_number(ranks_->world()));
    for (T& each : gradients)
      each = each / ranks;
    return done;
  }
  [[nodiscard]] auto to_means() {
    return [this](std::span<const llmmem::tensor_id> summed) {
      for (const llmmem::tensor_id each : summed)
        divide(each);
    };
  }
  /// Divides the sum, to give the mean.
  void divide(llmmem::tensor_id tensor) {
    const auto ranks = static_cast<T>(to_number(ranks_->world()));
    const piece sum = gradients_.lease(tensor, llmmem::access_mode::read_write).value();
    for (T& each : mine(sum))
      each /= ranks;
    if (norm_ != nullptr) norm_->add(as_values(sum.owned()));
  }

  void throw_what_failed() const {
    if (thrown_) std::rethrow_exception(thrown_);
    failed_.value();
  }

  Ranks* ranks_;
  llmmem::zero_stage stage_;
  Space* space_;
  std::vector<llmmem::tensor_facts> facts_;
  state weights_;
  state gradients_;
  std::optional<state> mean_{};      // of an optimizer with moments
  std::optional<state> variance_{};  // of one with two
  std::optional<state> factors_{};   // of Adafactor
  std::optional<secondary_shards> secondary_{};
  step_bounds chunks_{};
  std::array<piece, 5> held_{};  // by kind
  typename state::whole whole_weights_{};
  typename state::whole whole_gradients_{};
  llmmem::result<void> failed_{};
  std::exception_ptr thrown_{};
  llmmem::gradient_norm* norm_ = nullptr;
  llmmem::collective_call merging_{};
  double top_k_density_ = 0;  // 0: sums of all gradients
  llmmem::top_k_options top_k_{};

  // For gathers ahead and sums in flight, which end before the states that they are of.
  std::vector<std::uint32_t> reads_{};  // the layers of a step's plan
  std::size_t next_read_ = 0;           // past the end between steps
  std::optional<llmmem::operation_queue> queue_{};
  std::optional<llmmem::gather_schedule<state>> schedule_{};
  typename llmmem::gather_schedule<state>::lease planned_weights_{};
  std::optional<llmmem::background_sums<state>> sums_{};
};

}  // namespace train_gpt
