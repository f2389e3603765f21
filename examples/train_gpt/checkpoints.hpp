/// @file
/// Checkpoints of a run: their contents, and how these are copied from a store and restored to one.
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
#include "train_gpt/any_stores.hpp"
#include "train_gpt/checkpoint_folders.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/gated_state.hpp"
#include "train_gpt/rank_voice.hpp"
#include "train_gpt/run_options.hpp"
#include "train_gpt/saved_tensors.hpp"
#include "train_gpt/shape.hpp"
#include "train_gpt/step_guard.hpp"
#include "train_gpt/stores.hpp"

namespace train_gpt {

/// Reports each commit on a stream at once.
class commit_notes {
 public:
  /// @param to  null: no reports.
  explicit commit_notes(std::FILE* to) noexcept : to_(to) {}
  void settled(const llmmem::commit_ticket& ticket) const {
    if (to_ == nullptr) return;
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

/// AdamW is not named, because earlier checkpoints had no other optimizer.
[[nodiscard]] constexpr const char* optimizer_name(llmmem::optimizer_form form) noexcept {
  switch (form) {
    case llmmem::optimizer_form::sgd:
      return " optimizer sgd";
    case llmmem::optimizer_form::adafactor:
      return " optimizer adafactor";
    case llmmem::optimizer_form::muon:
      return " optimizer muon";
    default:
      return "";
  }
}

/// The properties that a run must have in common with the one that it resumes.
[[nodiscard]] inline std::string run_identity(const command_line& asked, const corpus& text) {
  const gpt_shape& shape = asked.shape;
  // Nor is it named that nothing is clipped.
  const std::string clip = asked.guard.clip_norm ? fmt::format(" clip-norm {}", *asked.guard.clip_norm) : "";
  const std::string bits =
      asked.activation_bits != 0 ? fmt::format(" activation-bits {}", asked.activation_bits) : "";
  const outer_options& outer = asked.parallel.outer;
  const std::string apart =
      outer.joins() ? fmt::format(" workers {} local-steps {} outer {} rate {} momentum {}", outer.workers,
                                  outer.local_steps, outer.by.nesterov ? "nesterov" : "sgd", outer.by.rate,
                                  outer.by.momentum)
                    : "";
  // Each rank has its own momentum.
  const llmmem::top_k_plan& top_k = asked.parallel.top_k;
  const std::string largest =
      top_k.density != 0 ? fmt::format(" wire topk:{}{}{} ranks {}", top_k.density,
                                       top_k.form == llmmem::sparse_values::bf16 ? ":bf16" : "",
                                       asked.parallel.sent == llmmem::sent_momentum::kept ? ":kept" : "",
                                       asked.parallel.ranks)
                         : "";
  return fmt::format("layers {} width {} heads {} context {} batch {} seed {} text {:08x}{}{}{}{}{}",
                     shape.blocks, shape.width, shape.heads, shape.context, shape.batch, asked.seed,
                     text.checksum(), optimizer_name(shape.optimizer), clip, bits, apart, largest);
}

/// Saves a run during training, and resumes a saved one. Each of several ranks saves its share of every
/// checkpoint, all at the same steps, and loads the state that it holds, from checkpoints of any number of
/// ranks in any sharding.
///
/// @tparam IsConcurrent  `any_state::stays` of the store.
template <bool IsConcurrent>
class run_checkpoints {
 public:
  using view_type = store_view<IsConcurrent>;

  run_checkpoints(const command_line& asked, std::string identity, any_state<float>& store, rank_voice& ranks,
                  std::FILE* notes, step_guard* guard = nullptr)
      : asked_(&asked),
        identity_(std::move(identity)),
        ranks_(&ranks),
        notes_(ranks.rank() == 0 ? notes : nullptr),
        store_(&store),
        guard_(guard),
        saved_(asked.shape, store, asked.parallel.worker_of(ranks.rank()), asked.parallel.outer.joins(),
               static_cast<std::uint32_t>(ranks.rank())),
        folders_(asked.checkpoints, ranks, notes_),
        checkpointer_(
            folders_, saved_.tensors,
            {.ring_bytes = ring_for(saved_.bytes()), .chunk_bytes = chunk_bytes, .name = "train_gpt"},
            commit_notes(notes_)) {}

  [[nodiscard]] llmmem::snapshot_gate& gate() noexcept { return checkpointer_.gate(); }

  /// Resumes from the newest checkpoint if requested; afterwards copies may begin.
  /// @return the losses of the finished steps.
  /// @pre the store was initialised, so that every piece has contents.
  [[nodiscard]] std::vector<double> begin() {
    std::vector<double> losses;
    if (asked_->checkpoints.resumes) losses = resume();
    folders_.begin_copying();
    return losses;
  }

  /// Called between two steps: saves if it is time to.
  /// @param done    steps so far.
  /// @param losses  the losses of these steps.
  /// @throws llmmem::error  if a signal asked for the end; the text says whether the step is saved.
  void after_step(std::uint64_t done, std::span<const double> losses, double step_seconds) {
    learn(step_seconds);
    const bool is_last = done == asked_->steps;
    const agreed_on all = agree(done);
    if (all.ends && !is_last) {
      save(done, losses);
      const std::string unsaved = finish();
      throw llmmem::error(fmt::format("ended by SIGTERM after step {}, which is {}; continue with --resume",
                                      done, unsaved.empty() ? "saved" : "NOT saved: " + unsaved));
    }
    if (all.saves || is_last) save(done, losses);
  }

  /// Waits for pending saves. Returns why the last one is not committed; nothing if it is.
  [[nodiscard]] std::string finish() {
    checkpointer_.flush();
    if (!held_ || held_->ticket().is_committed()) return {};
    return held_->ticket().why();
  }

 private:
  struct agreed_on {
    bool ends = false;   // a signal arrived at any rank
    bool saves = false;  // by the first rank's clock
  };
  [[nodiscard]] agreed_on agree(std::uint64_t done) {
    const std::uint64_t mine =
        (asked_->checkpoints.termination->is_requested() ? 2U : 0U) | (is_due(done) ? 1U : 0U);
    const std::vector<std::uint64_t> all = ranks_->exchange(mine);
    agreed_on what{.ends = false, .saves = (all.front() & 1U) != 0};
    for (const std::uint64_t each : all)
      what.ends = what.ends || (each & 2U) != 0;
    return what;
  }

  static constexpr std::uint64_t chunk_bytes = std::uint64_t{1} << 20;
  /// As large as the state, so that a step stalls only for the copy; at most 64 MiB.
  [[nodiscard]] static constexpr std::uint64_t ring_for(std::uint64_t bytes) noexcept {
    return std::clamp<std::uint64_t>(bytes + 4 * chunk_bytes, 4 * chunk_bytes, std::uint64_t{64} << 20);
  }

  /// Restores the newest checkpoint, and returns the losses up to its step; none without a checkpoint.
  [[nodiscard]] std::vector<double> resume() {
    const checkpoint_folders::newest_checkpoint newest = folders_.newest();
    const std::uint64_t id = newest.found ? newest.found->id.generation + 1 : 0;
    for (const std::uint64_t each : ranks_->exchange(id)) {
      if (each == id) continue;
      throw llmmem::format_error(
          asked_->checkpoints.folder +
          ": its ranks found different checkpoints to continue with; look at the folder, "
          "and start again");
    }
    if (!newest.found) {
      if (!newest.skip_reason.empty())
        throw llmmem::format_error(asked_->checkpoints.folder + ": " + newest.message +
                                   "; take another folder to start again");
      return {};
    }
    const llmmem::found_checkpoint& found = *newest.found;
    const auto identity = llmmem::load_extra(*newest.storage, found, 0, "run");
    const std::string theirs = identity ? text_of(*identity) : "unknown";
    if (theirs != identity_) {
      throw example::usage_error(fmt::format("--resume: the checkpoint is of another run: {}; this one is {}",
                                             example::printable(theirs, 400), identity_));
    }
    if (found.id.step > asked_->steps) {
      throw example::usage_error(fmt::format("--resume: the checkpoint is of step {}, beyond --steps {}",
                                             found.id.step, asked_->steps));
    }
    // A checkpoint of a run without a guard has none: the scale begins as asked.
    // Of workers that train apart, each has its own; all ranks refuse what one of them cannot continue.
    const std::uint32_t workers = asked_->parallel.outer.workers;
    std::optional<std::vector<std::byte>> guarded;
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      auto saved =
          llmmem::load_extra(*newest.storage, found, worker * (found.manifest.world / workers), "loss_scale");
      const std::uint64_t skipped = saved ? step_guard::skipped_in(*saved, found.id.step) : 0;
      if (skipped != 0 && guard_ == nullptr) {
        throw example::usage_error(fmt::format(
            "--resume: the checkpoint's run has skipped {} of {} steps, which the optimizer does not "
            "count; add --loss-scale X",
            skipped, found.id.step));
      }
      if (worker == asked_->parallel.worker_of(ranks_->rank())) guarded = std::move(saved);
    }
    std::vector<double> losses = losses_of(*newest.storage, found);
    load(*newest.storage, found);
    if (guarded && guard_ != nullptr) guard_->restore(*guarded, found.id.step);
    last_saved_ = found.id.step;
    if (notes_ == nullptr) return losses;
    example::tell(notes_, "resumed from step {}\n", found.id.step);
    for (const std::string& each : newest.skip_reason)
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
    std::vector<llmmem::checkpoint_extra> extras;
    if (ranks_->rank() == 0)
      extras = {{"losses", {bytes.begin(), bytes.end()}}, {"run", {who.begin(), who.end()}}};
    if (asked_->parallel.is_first_of_worker(ranks_->rank()) && guard_ != nullptr)
      extras.push_back({"loss_scale", guard_->saved()});
    auto guard = checkpointer_.begin_snapshot(done, view_type(*store_, saved_), std::move(extras));
    if constexpr (!IsConcurrent) guard.wait_staged();
    held_.emplace(std::move(guard));
  }

  /// Measures the times of steps and saves.
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

  /// With `auto`, the first step is saved, to measure its cost.
  [[nodiscard]] bool is_due(std::uint64_t done) const {
    if (asked_->checkpoints.every != 0) return done % asked_->checkpoints.every == 0;
    if (seen_.committed == 0) return seen_.begun == seen_.failed;
    return done - last_saved_ >= tuner_.interval().steps;
  }

  void load(llmmem::posix_storage<>& storage, const llmmem::found_checkpoint& found) {
    llmmem::load_checkpoint(
        storage, found, saved_.wanted,
        [&](std::uint32_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) {
          view_type::each_piece(*store_, saved_.wanted_places[tensor], offset, bytes.size(),
                                lease_mode::read_write, [&](std::span<std::byte> piece, std::size_t at) {
                                  std::memcpy(piece.data(), bytes.data() + at, piece.size());
                                });
        },
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
  rank_voice* ranks_;
  std::FILE* notes_;  // null on all ranks except the first
  any_state<float>* store_;
  step_guard* guard_;  // or null
  saved_tensors saved_;
  checkpoint_folders folders_;
  llmmem::async_checkpointer<run_checkpointer_traits<view_type>> checkpointer_;
  std::optional<llmmem::snapshot_guard>
      held_;  // the last snapshot, whose state must not change before it is copied
  llmmem::interval_tuner tuner_{llmmem::interval_options{}};
  llmmem::checkpointer_stats seen_{};
  double stalled_ = 0;  // since the last measured save
  std::uint64_t last_saved_ = 0;
};

}  // namespace train_gpt
