/// @file
/// `survivor`: one rank of a training run that continues when others die.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/run_epochs.hpp>
#include <llmmem/redundant_replica.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "survive_failures/events.hpp"
#include "survive_failures/part_state.hpp"
#include "survive_failures/plan.hpp"
#include "survive_failures/saved_job.hpp"
#include "survive_failures/shard_model.hpp"
#include "train_gpt/adam.hpp"
#include "train_gpt/corpus.hpp"
#include "train_gpt/worker_team.hpp"

namespace survive_failures {

/// How a rank's run ended.
enum class ending : std::uint8_t {
  finished,  ///< all steps are committed
  out,       ///< the others have continued without it; a fresh process may take its seat
  lost,      ///< the state of too many ranks is lost, and nothing is saved
};

/// One rank: data parallel with a sharded optimizer. A step of N shards and N parts, on any W of N ranks:
///
/// 1. each rank computes the gradients of its shards of the batch, with all weights (rank r: shards r, r + W,
///    ...);
/// 2. it sends each part's owner the gradients of that part; owners sum them in the order of shards, and
///    update the weights and moments of their parts;
/// 3. the replica keeps the parts on other ranks as well, and all ranks gather the new weights;
/// 4. if all ranks agree that this succeeded, the step is committed. Otherwise it does not count: the next
///    epoch begins without the dead and with the admitted ranks, and all have the last kept version.
///
/// With a folder for checkpoints, the state between two steps is saved there at intervals. If more ranks are
/// lost than the redundancy tolerates, or no remaining rank has kept a version, all load the newest
/// checkpoint, and compute the later steps again.
///
/// So the bits of every step depend only on the plan, and not on which ranks computed, died or returned.
///
/// @tparam Ranks   a `communicator` that has joined.
/// @tparam Report  called with each `job_event`.
/// @par Thread safety   one thread.
/// @par Errors          `llmmem::error` if ranks have different weights; nothing is committed from then on.
template <class Ranks, class Report>
class survivor {
 public:
  survivor(Ranks& ranks, const job_plan& plan, const train_gpt::corpus& text, Report report)
      : ranks_(&ranks),
        plan_(plan),
        report_(std::move(report)),
        cut_(plan.elements(), plan.ranks),
        model_(plan, text, team_),
        replica_(ranks, plan.redundancy, cut_.bytes(), cut_.homes()) {
    if (plan.is_saved()) saved_.emplace(plan, text);
  }

  [[nodiscard]] ending run() {
    const auto end = llmmem::run_epochs(*ranks_, *this, {.patience_ns = patience_ns});
    if (end.code() == llmmem::errc::no_quorum) return tell(event_kind::out), ending::out;
    if (end.value() == llmmem::epochs_end::stopped) return tell(event_kind::lost), ending::lost;
    tell(event_kind::finished, model_.digest());
    return ending::finished;
  }

  /// @name The functions that `run_epochs` calls
  /// @{
  [[nodiscard]] llmmem::redundancy::job_outcome begin() {
    attempt_ = attempt::beginning;
    const bool is_there = begin_epoch();
    return is_lost_ ? llmmem::redundancy::job_outcome::stop : told(is_there);
  }
  [[nodiscard]] bool is_over() const {
    return step_ == plan_.steps && (attempt_ == attempt::end || !is_save_due());
  }
  [[nodiscard]] llmmem::redundancy::job_outcome step() {
    if (is_save_due()) save();
    attempt_ = step_ < plan_.steps ? attempt::step : attempt::end;
    return told(attempt_ == attempt::end || take_step());
  }
  void agreed_on(const llmmem::comm::agreed& outcome) {
    if (is_well_ && !outcome.failed.empty()) tell(event_kind::failed);
    if (outcome.bits != 1 || !outcome.failed.empty() || !outcome.joining.empty()) tell(event_kind::agreed);
  }
  void commit() {
    if (attempt_ == attempt::end) return;
    replica_.commit();
    ++step_;
    tell(event_kind::committed, 0, loss_);
  }
  void drop() {
    replica_.drop();
    if (attempt_ == attempt::step) tell(event_kind::repeats);
  }
  /// @}

 private:
  /// This rank's state at an agreement: `end` after all steps and the attempt of the last save.
  enum class attempt : std::uint8_t { beginning, step, end };

  static constexpr std::uint64_t patience_ns = 60'000'000'000;

  [[nodiscard]] llmmem::deadline soon() const { return ranks_->after(patience_ns); }
  [[nodiscard]] bool computes_twice() const noexcept {
    return plan_.redundancy.kind() == llmmem::redundancy_kind::compute;
  }
  [[nodiscard]] std::uint32_t world() const noexcept { return to_number(ranks_->world()); }
  [[nodiscard]] std::uint32_t self() const noexcept { return to_index(ranks_->rank()); }
  [[nodiscard]] std::uint32_t shards_of(std::uint32_t rank) const noexcept {
    return rank >= plan_.ranks ? 0 : (plan_.ranks - rank + world() - 1) / world();
  }
  [[nodiscard]] llmmem::collective_call call() const { return {.by = soon(), .tag = 0x6770'0000}; }

  void tell(event_kind kind, std::uint64_t value = 0, double loss = 0, std::string_view text = {}) {
    job_event event{.kind = kind,
                    .seat = to_index(ranks_->endpoint().self()),
                    .epoch = ranks_->epoch(),
                    .step = step_,
                    .at_ns = ranks_->endpoint().now_ns(),
                    .value = value,
                    .loss = loss};
    for (const llmmem::seat_id seat : ranks_->seats())
      event.members |= std::uint64_t{1} << to_index(seat);
    event.say(text);
    report_(event);
  }

  /// All ranks get the same result, because they have loaded the same.
  [[nodiscard]] bool is_save_due() const { return saved_ && saved_->is_due(step_) && loaded_ != step_; }
  /// Saves between two steps, with all ranks. If that fails, the training continues, and earlier checkpoints
  /// stay.
  void save() {
    std::vector<llmmem::part_bytes> own;
    for (const llmmem::part_id part : owned_[self()])
      own.push_back({part, parts_.at(part).bytes()});
    const save_outcome outcome = saved_->save(*ranks_, step_, own, call());
    tell(outcome.is_saved ? event_kind::saved : event_kind::unsaved, 0, 0, outcome.trouble);
  }

  [[nodiscard]] llmmem::redundancy::job_outcome told(bool is_well) {
    is_well_ = is_well;
    if (!is_well) tell(event_kind::failed);
    return is_well ? llmmem::redundancy::job_outcome::succeeded : llmmem::redundancy::job_outcome::failed;
  }

  /// Brings this rank to the common state: owners, their parts, all weights.
  bool begin_epoch() {
    tell(event_kind::began);
    const auto found = find_state();
    if (!found) return false;
    step_ = found->step;
    if (saved_ && !found->is_kept) tell(event_kind::restored, found->saved ? 1 : 0, 0, found->skip_reason);
    tell(event_kind::fetched, found->moved_bytes);
    assign_parts();
    const bool is_new = !found->is_kept && !found->saved;
    if (is_new) model_.draw_weights();
    loaded_ = found->saved ? std::optional(step_) : std::nullopt;
    if (found->saved) saved_->load(*found->saved, parts_);
    for (auto& [part, state] : parts_) {
      const value_range at = cut_[part];
      if (is_new) {
        state.begin(model_.weights().subspan(at.first, at.count));
      } else if (const auto bytes = replica_.recovered(part); found->is_kept && !bytes.empty()) {
        std::memcpy(state.bytes().data(), bytes.data(), bytes.size());
      }
    }
    // A rank that also computes others' parts needs all state once; otherwise the weights suffice.
    return gather(computes_twice() ? 3 : 1) && verify();
  }

  /// The same on all ranks, or nothing on at least one.
  [[nodiscard]] std::optional<state_found> find_state() {
    if (saved_) return saved_->recover(*ranks_, replica_, soon());
    const auto kept = replica_.recover(soon());
    is_lost_ = kept.code() == llmmem::errc::state_lost;
    if (kept.code() == llmmem::errc::setup_differs) static_cast<void>(kept.value());  // throws on all ranks
    if (!kept) return std::nullopt;
    return state_found{kept->is_recovered, kept->is_recovered ? kept->version : 0, kept->moved_bytes};
  }

  /// The ranks that update each part in this epoch: its owner, and, with redundant computation, the ranks
  /// that keep it.
  void assign_parts() {
    updates_.assign(world(), {});
    const std::span<const llmmem::rank_id> owners = replica_.owners();
    for (std::uint32_t i = 0; i < cut_.count(); ++i)
      updates_[to_index(owners[i])].push_back(llmmem::part_id{i});
    owned_ = updates_;
    if (computes_twice() && replica_.map()) {
      for (std::uint32_t rank = 0; rank < world(); ++rank) {
        for (const llmmem::rank_id ward : replica_.map()->kept_by(llmmem::rank_id{rank}))
          updates_[rank].insert(updates_[rank].end(), owned_[to_index(ward)].begin(),
                                owned_[to_index(ward)].end());
      }
    }
    parts_.clear();
    for (const llmmem::part_id part : updates_[self()])
      parts_.emplace(part, part_state(cut_[part].count));
  }

  /// One step, up to the agreement of all ranks that it counts.
  bool take_step() {
    compute_shards();
    if (!exchange_gradients()) return false;
    const train_gpt::adam_step<float> by({}, step_);
    for (auto& [part, state] : parts_)
      state.update(by, plan_.ranks);
    return keep() && gather(1);
  }

  void compute_shards() {
    gradients_.resize(shards_of(self()));
    losses_.assign(shards_of(self()), 0);
    for (std::uint32_t i = 0; i < gradients_.size(); ++i) {
      gradients_[i].resize(plan_.elements());
      losses_[i] = model_.compute(step_, self() + i * world(), gradients_[i]);
      let_time_pass(ranks_->endpoint());
      ranks_->poll();  // other ranks may wait for an answer
    }
  }
  /// Computation also takes virtual time.
  template <class End>
  static void let_time_pass(End& end) {
    if constexpr (requires { end.work(std::uint64_t{1}); }) end.work(2'000'000);
  }

  /// Sends every part's gradients to the ranks that update it, which sum them.
  bool exchange_gradients() {
    std::vector<std::uint64_t> out_blocks{0};
    out_.clear();
    for (std::uint32_t to = 0; to < world(); ++to) {
      for (const llmmem::part_id part : updates_[to]) {
        const value_range at = cut_[part];
        for (const std::vector<float>& of_shard : gradients_)
          out_.insert(out_.end(), of_shard.begin() + static_cast<std::ptrdiff_t>(at.first),
                      of_shard.begin() + static_cast<std::ptrdiff_t>(at.first + at.count));
      }
      out_blocks.push_back(out_.size() * sizeof(float));
    }
    std::size_t each = 0;  // values of a shard for this rank
    for (const llmmem::part_id part : updates_[self()])
      each += cut_[part].count;
    std::vector<std::uint64_t> in_blocks{0};
    for (std::uint32_t from = 0; from < world(); ++from)
      in_blocks.push_back(in_blocks.back() + shards_of(from) * each * sizeof(float));
    in_.resize(plan_.ranks * each);
    if (!all_to_all(*ranks_, std::as_bytes(std::span(out_)), out_blocks,
                    std::as_writable_bytes(std::span(in_)), in_blocks, call())) {
      return false;
    }
    std::size_t before = 0;  // values of a shard that belong to earlier parts
    for (const llmmem::part_id part : updates_[self()]) {
      part_state& state = parts_.at(part);
      state.clear_gradient();
      for (std::uint32_t shard = 0; shard < plan_.ranks; ++shard) {
        const std::uint32_t from = shard % world();
        const std::size_t at =
            in_blocks[from] / sizeof(float) + before * shards_of(from) + shard / world() * cut_[part].count;
        state.add_gradient(in_.data() + at);
      }
      before += cut_[part].count;
    }
    return true;
  }

  bool keep() {
    std::vector<llmmem::part_bytes> kept;
    for (const auto& [part, state] : parts_)
      kept.push_back({part, state.bytes()});
    const auto done = replica_.keep(step_ + 1, kept, soon());
    if (!done && done.code() == llmmem::errc::checksum_differs) {
      tell(event_kind::differs, done.error().index);
    }
    return done.has_value();
  }

  /// Gathers all ranks' parts and losses, in the order of ranks and parts.
  /// @param kinds  1: weights; 3: moments as well
  bool gather(std::size_t kinds) {
    std::vector<std::uint64_t> blocks{0};
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      std::uint64_t bytes = shards_of(rank) * sizeof(double);
      for (const llmmem::part_id part : owned_[rank])
        bytes += kinds * sizeof(float) * cut_[part].count;
      blocks.push_back(blocks.back() + bytes);
    }
    staging_.resize(blocks.back());
    losses_.resize(shards_of(self()));
    std::byte* at = staging_.data() + blocks[self()];
    const auto put = [&](const void* from, std::size_t bytes) {
      if (bytes != 0) std::memcpy(at, from, bytes);
      at += bytes;
    };
    put(losses_.data(), losses_.size() * sizeof(double));
    for (const llmmem::part_id part : owned_[self()])
      put(parts_.at(part).bytes().data(), kinds * sizeof(float) * cut_[part].count);
    if (!all_gather(*ranks_, staging_, blocks, call())) return false;

    std::vector<double> losses(plan_.ranks);
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      const std::byte* from = staging_.data() + blocks[rank];
      for (std::uint32_t i = 0; i < shards_of(rank); ++i, from += sizeof(double))
        std::memcpy(&losses[rank + i * world()], from, sizeof(double));
      for (const llmmem::part_id part : owned_[rank]) {
        const value_range range = cut_[part];
        std::memcpy(model_.weights().data() + range.first, from, range.count * sizeof(float));
        const auto here = parts_.find(part);
        if (kinds == 3 && here != parts_.end()) {
          std::memcpy(here->second.bytes().data(), from, here->second.bytes().size());
        }
        from += kinds * sizeof(float) * range.count;
      }
    }
    loss_ = 0;
    for (const double each : losses)
      loss_ += each / plan_.ranks;
    return true;
  }

  /// No rank continues before all have the same weights.
  bool verify() {
    std::vector<std::uint64_t> digests(world(), model_.digest());
    const auto bytes = std::as_writable_bytes(std::span(digests));
    if (!all_gather(*ranks_, bytes, llmmem::even_blocks(bytes.size(), ranks_->world(), 8), call())) {
      return false;
    }
    for (std::uint32_t rank = 0; rank < world(); ++rank) {
      if (digests[rank] != digests[self()]) {
        throw llmmem::error("after the recovery of step " + std::to_string(step_) + " seats " +
                            std::to_string(to_index(ranks_->seats()[rank])) + " and " +
                            std::to_string(to_index(ranks_->seats()[self()])) +
                            " have different weights: nothing is trained from here");
      }
    }
    tell(event_kind::verified, digests[self()]);
    return true;
  }

  Ranks* ranks_;
  job_plan plan_;
  Report report_;
  state_parts cut_;
  train_gpt::worker_team team_{1};
  shard_model model_;
  llmmem::redundant_replica<Ranks> replica_;
  std::optional<saved_job> saved_{};

  std::uint64_t step_ = 0;                 // committed
  std::optional<std::uint64_t> loaded_{};  // in this epoch
  double loss_ = 0;
  attempt attempt_ = attempt::beginning;
  bool is_well_ = true;
  bool is_lost_ = false;
  std::vector<std::vector<llmmem::part_id>> owned_{};    // by rank
  std::vector<std::vector<llmmem::part_id>> updates_{};  // by rank
  std::map<llmmem::part_id, part_state> parts_{};        // that this rank updates
  std::vector<std::vector<float>> gradients_{};          // of its shards
  std::vector<double> losses_{};                         // of its shards
  std::vector<float> out_{};
  std::vector<float> in_{};
  std::vector<std::byte> staging_{};
};

}  // namespace survive_failures
