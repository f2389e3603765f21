/// @file
/// Checkpoints of a run: what of it is saved, how it is copied out of a store, and put back into one.
#pragma once

#include <llmmem/async_checkpointer.hpp>
#include <llmmem/checkpoint/interval.hpp>
#include <llmmem/checkpoint/load.hpp>
#include <llmmem/checkpoint/termination.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/program.hpp"
#include "common/standard_streams.hpp"
#include "train_gpt/checkpoint_folders.hpp"
#include "train_gpt/command_line.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Weights as GPT-2's checkpoints call them, in `model.safetensors`; Adam's moments in
/// `optimizer.safetensors`.
struct saved_tensors {
  struct place {
    layer_id layer{};
    state_kind kind = state_kind::weights;
    std::size_t first = 0;  ///< element of the piece
  };
  std::vector<llmmem::state_tensor> tensors{};
  std::vector<place> places{};  ///< of each

  explicit saved_tensors(const gpt_shape& shape) {
    for (const state_kind kind : {state_kind::weights, state_kind::mean, state_kind::variance}) {
      for (std::size_t i = 0; i < shape.layers(); ++i) {
        const layer_id layer = shape.layer(i);
        for (const tensor_place& each : parameter_layout(shape, layer).tensors)
          add(each, layer, kind);
      }
    }
  }

 private:
  void add(const tensor_place& tensor, layer_id layer, state_kind kind) {
    const bool is_weight = kind == state_kind::weights;
    const char* const prefix = is_weight ? "" : kind == state_kind::mean ? "mean." : "variance.";
    std::vector<std::uint64_t> sizes{tensor.columns};
    if (tensor.rows != 1) sizes.insert(sizes.begin(), tensor.rows);
    tensors.push_back({.name = prefix + tensor.name,
                       .type = llmmem::safetensors_type::f32,
                       .shape = std::move(sizes),
                       .group = is_weight ? "model" : "optimizer",
                       .part = {}});
    places.push_back({layer, kind, tensor.offset});
  }
};

/// A store's tensors, to be copied piece by piece. Leases one piece at a time, between two steps; a store
/// whose leases are always the same memory is read beside the next step's passes, too.
template <state_store State, bool IsConcurrent>
class store_view {
 public:
  static constexpr bool is_concurrent = IsConcurrent;

  store_view(State& store, const saved_tensors& saved) noexcept : store_(&store), saved_(&saved) {}

  void copy_out(std::uint32_t tensor, std::uint64_t offset, std::span<std::byte> into) const {
    const saved_tensors::place& at = saved_->places[tensor];
    const state_lease<State, lease_mode::read> lease(*store_, at.layer, at.kind);
    const auto bytes = std::as_bytes(lease.values().subspan(at.first));
    std::memcpy(into.data(), bytes.data() + offset, into.size());
  }
  void copy_in(std::uint32_t tensor, std::uint64_t offset, std::span<const std::byte> from) const {
    const saved_tensors::place& at = saved_->places[tensor];
    const state_lease<State, lease_mode::read_write> lease(*store_, at.layer, at.kind);
    const auto bytes = std::as_writable_bytes(lease.values().subspan(at.first));
    std::memcpy(bytes.data() + offset, from.data(), from.size());
  }

 private:
  State* store_;
  const saved_tensors* saved_;
};

/// A store whose weights and moments change only with a permit of the gate: the first lease of a step that
/// changes them waits until a snapshot that was begun before is copied.
template <state_store State>
class gated_state {
 public:
  using value_type = typename State::value_type;

  gated_state(State& store, llmmem::snapshot_gate& gate) noexcept : store_(&store), gate_(&gate) {}

  [[nodiscard]] std::span<value_type> acquire(layer_id layer, state_kind kind, lease_mode mode) {
    if (kind != state_kind::gradients && mode != lease_mode::read && !permit_)
      permit_.emplace(gate_->mutate());
    return store_->acquire(layer, kind, mode);
  }
  void release(layer_id layer, state_kind kind, lease_mode mode) noexcept {
    store_->release(layer, kind, mode);
    if (!is_in_step_) permit_.reset();
  }
  [[nodiscard]] element_range owned(layer_id layer) const noexcept { return store_->owned(layer); }
  void begin_step(std::uint64_t step) {
    is_in_step_ = true;
    if constexpr (follows_steps<State>) store_->begin_step(step);
  }
  void end_step(std::uint64_t step) {
    if constexpr (follows_steps<State>) store_->end_step(step);
    is_in_step_ = false;
    permit_.reset();
  }

 private:
  State* store_;
  llmmem::snapshot_gate* gate_;
  std::optional<llmmem::mutation_permit> permit_;
  bool is_in_step_ = false;
};

/// Says on a stream what has been committed, as soon as it is.
class commit_notes {
 public:
  explicit commit_notes(std::FILE* to) noexcept : to_(to) {}
  void settled(const llmmem::commit_ticket& ticket) const {
    if (ticket.is_committed()) {
      example::tell(to_, "committed {} {}\n", ticket.step(), ticket.generation());
    } else {
      example::tell(to_, "train_gpt: step {}: {}: {}\n", ticket.step(), to_string(ticket.status()),
                    example::printable(ticket.why(), 1024));
    }
    std::fflush(to_);
  }

 private:
  std::FILE* to_;
};

/// A run's checkpointer.
template <class View>
struct run_checkpointer_traits : llmmem::checkpointer_traits {
  using view_type = View;
  using coordinator_type = checkpoint_folders;
  using observer_type = commit_notes;
};

/// What a run must have in common with the one it goes on with.
[[nodiscard]] inline std::string run_identity(const command_line& asked, const corpus& text) {
  const gpt_shape& shape = asked.shape;
  return fmt::format("layers {} width {} heads {} context {} batch {} seed {} text {:08x}", shape.blocks,
                     shape.width, shape.heads, shape.context, shape.batch, asked.seed, text.checksum());
}

/// Saves a run as it goes, and goes on with one that was saved.
template <state_store State, bool IsConcurrent>
class run_checkpoints {
 public:
  using view_type = store_view<State, IsConcurrent>;

  run_checkpoints(const command_line& asked, std::string identity, State& store, std::FILE* notes)
      : asked_(&asked),
        identity_(std::move(identity)),
        notes_(notes),
        store_(&store),
        saved_(asked.shape),
        folders_(asked.checkpoints, notes),
        checkpointer_(folders_, saved_.tensors,
                      {.ring_bytes = ring_bytes, .chunk_bytes = chunk_bytes, .name = "train_gpt"},
                      commit_notes(notes)) {}

  [[nodiscard]] llmmem::snapshot_gate& gate() noexcept { return checkpointer_.gate(); }

  /// Goes on with the newest checkpoint if that was asked for; then copies may be made.
  /// @return the losses of the steps that are done.
  /// @pre the store was initialised, so that every piece has contents.
  [[nodiscard]] std::vector<double> begin() {
    std::vector<double> losses;
    if (asked_->checkpoints.resumes) losses = resume();
    folders_.begin_copying();
    return losses;
  }

  /// Between two steps: saves when it is time to.
  /// @param done    steps so far.
  /// @param losses  of them.
  /// @throws llmmem::error  when a signal asked for the end; it says whether the step is saved.
  void after_step(std::uint64_t done, std::span<const double> losses, double step_seconds) {
    learn(step_seconds);
    const bool is_last = done == asked_->steps;
    if (asked_->checkpoints.termination->is_there() && !is_last) {
      save(done, losses);
      const std::string unsaved = finish();
      throw llmmem::error(fmt::format("ended by SIGTERM after step {}, which is {}; go on with --resume",
                                      done, unsaved.empty() ? "saved" : "NOT saved: " + unsaved));
    }
    if (is_due(done) || is_last) save(done, losses);
  }

  /// Waits for what is pending. Why the last save is not committed; nothing when it is.
  [[nodiscard]] std::string finish() {
    checkpointer_.flush();
    if (!held_ || held_->ticket().is_committed()) return {};
    return held_->ticket().why();
  }

 private:
  static constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  static constexpr std::uint64_t ring_bytes = std::uint64_t{64} << 20;

  /// Puts back what the newest checkpoint has, and gives the losses up to its step; none without one.
  [[nodiscard]] std::vector<double> resume() {
    const checkpoint_folders::newest_checkpoint newest = folders_.newest();
    if (!newest.found) {
      if (!newest.passed_over.empty())
        throw llmmem::format_error(asked_->checkpoints.folder + ": " + newest.message +
                                   "; take another folder to begin anew");
      return {};
    }
    const llmmem::found_checkpoint& found = *newest.found;
    const auto identity = llmmem::load_extra(*newest.storage, found, 0, "run");
    const std::string theirs = identity ? text_of(*identity) : "unknown";
    if (theirs != identity_) {
      throw example::usage_error(fmt::format("--resume: the checkpoint is of another run: {}; this one is {}",
                                             example::printable(theirs, 200), identity_));
    }
    if (found.id.step > asked_->steps) {
      throw example::usage_error(fmt::format("--resume: the checkpoint is of step {}, beyond --steps {}",
                                             found.id.step, asked_->steps));
    }
    std::vector<double> losses = losses_of(*newest.storage, found);
    load(*newest.storage, found);
    last_saved_ = found.id.step;
    example::tell(notes_, "resumed from step {}\n", found.id.step);
    for (const std::string& each : newest.passed_over)
      example::tell(notes_, "train_gpt: passed over {}\n", example::printable(each, 1024));
    std::fflush(notes_);
    return losses;
  }

  [[nodiscard]] static std::string text_of(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  void save(std::uint64_t done, std::span<const double> losses) {
    const auto bytes = std::as_bytes(losses);
    const auto who = std::as_bytes(std::span(identity_.data(), identity_.size()));
    last_saved_ = done;
    auto guard = checkpointer_.begin_snapshot(
        done, view_type(*store_, saved_),
        {{"losses", {bytes.begin(), bytes.end()}}, {"run", {who.begin(), who.end()}}});
    if constexpr (!IsConcurrent) guard.wait_staged();
    held_.emplace(std::move(guard));
  }

  /// Takes note of how long steps and saves take.
  void learn(double step_seconds) {
    const llmmem::checkpointer_stats now = checkpointer_.stats();
    const double stalled = static_cast<double>(now.stall_ns - seen_.stall_ns) * 1e-9;
    tuner_.observe_step(std::max(step_seconds - stalled, 0.0));
    stalled_ += stalled;
    if (now.committed > seen_.committed) {
      const double durable = static_cast<double>(now.persist_ns - seen_.persist_ns) * 1e-9;
      tuner_.observe_save(std::exchange(stalled_, 0.0), durable);
    }
    seen_ = now;
  }

  /// With `auto`, the first step is saved, to learn what that takes.
  [[nodiscard]] bool is_due(std::uint64_t done) const {
    if (asked_->checkpoints.every != 0) return done % asked_->checkpoints.every == 0;
    if (seen_.committed == 0) return seen_.begun == seen_.failed;
    return done - last_saved_ >= tuner_.every().steps;
  }

  void load(llmmem::posix_storage<>& storage, const llmmem::found_checkpoint& found) {
    const view_type view(*store_, saved_);
    std::vector<llmmem::wanted_tensor> wanted;
    for (const llmmem::state_tensor& each : saved_.tensors)
      wanted.push_back({.name = each.name, .part = {}, .type = each.type, .shape = each.shape});
    llmmem::load_checkpoint(storage, found, wanted,
                            [&](std::uint32_t tensor, std::uint64_t offset,
                                std::span<const std::byte> bytes) { view.copy_in(tensor, offset, bytes); },
                            {.readers = IsConcurrent ? 2U : 1U, .sink = llmmem::sink_calls::by_readers});
  }

  [[nodiscard]] static std::vector<double> losses_of(llmmem::posix_storage<>& storage,
                                                     const llmmem::found_checkpoint& found) {
    const auto bytes = llmmem::load_extra(storage, found, 0, "losses");
    if (!bytes || bytes->size() != found.id.step * sizeof(double))
      throw llmmem::format_error(found.folder + ": it lacks the losses of its steps");
    std::vector<double> losses(static_cast<std::size_t>(found.id.step));
    std::memcpy(losses.data(), bytes->data(), bytes->size());
    return losses;
  }

  const command_line* asked_;
  std::string identity_;
  std::FILE* notes_;
  State* store_;
  saved_tensors saved_;
  checkpoint_folders folders_;
  llmmem::async_checkpointer<run_checkpointer_traits<view_type>> checkpointer_;
  std::optional<llmmem::snapshot_guard>
      held_;  // the last one: its state is not to change before it is copied
  llmmem::interval_tuner tuner_{llmmem::interval_options{}};
  llmmem::checkpointer_stats seen_{};
  double stalled_ = 0;  // since the last save that was learnt from
  std::uint64_t last_saved_ = 0;
};

}  // namespace train_gpt
