/// @file
/// `run_epochs`: a job's epochs one after the other, steps that count for all ranks or for none, until it is
/// over.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace redundancy {

/// How something went, for this rank.
enum class went : std::uint8_t {
  well,
  badly,  ///< a rank may have died: the next epoch begins without it. What another epoch would not mend, as
          ///< `errc::setup_differs`, is thrown instead, or it goes on for ever
  stop,   ///< the run is to end here, as where state is lost: nobody is asked. Others that do not come to the
          ///< same go on once this rank's endpoint is gone
};

}  // namespace redundancy

using went [[deprecated("its name is redundancy::went")]] = redundancy::went;

/// Ranks that agree, and begin epochs. `communicator` is one.
template <class T>
concept epoch_ranks =
    requires(T& ranks, const T& seen, const comm::agreed& outcome, std::uint64_t bits, deadline by) {
      { ranks.agree(bits, by) } -> std::same_as<result<comm::agreed>>;
      ranks.admit(outcome);
      { ranks.revoke() } noexcept;
      { seen.after(bits) } noexcept -> std::same_as<deadline>;
    };

/// What a rank does in epochs. All ranks' jobs must come to the same `is_over`, and take the same steps.
///
/// - `begin()`, when an epoch has begun: brings this rank to where all are. `redundant_replica::recover`, and
///   what it says to load.
/// - `is_over()`: no step is left.
/// - `step()`: one step, up to what counts only when all have done it. `redundant_replica::keep`.
/// - `commit()`: all have; `drop()`: not all have, or this epoch did not begin well, and the next `begin`
///   finds what was before. Both throw nothing.
/// - `agreed_on(outcome)`, if there is one: told of each agreement, before the `commit` or `drop` that comes
///   of it.
template <class J>
concept epoch_job = requires(J& job) {
  { job.begin() } -> std::same_as<redundancy::went>;
  { job.is_over() } -> std::convertible_to<bool>;
  { job.step() } -> std::same_as<redundancy::went>;
  job.commit();
  job.drop();
};

/// How `run_epochs` waits.
struct epoch_options {
  std::uint64_t patience_ns = 60'000'000'000;  ///< for all that live to come to an agreement
};

/// How the epochs ended.
enum class epochs_end : std::uint8_t {
  finished,  ///< the job is over, and all that live agreed that it is
  stopped,   ///< `begin` or `step` said so
};

namespace detail {

template <class J>
void tell_agreed(J& job, const comm::agreed& outcome) {
  if constexpr (requires { job.agreed_on(outcome); }) job.agreed_on(outcome);
}

}  // namespace detail

/// Runs a job on ranks of which any may die at any time, and in whose seats fresh processes may come. Each
/// rank calls it once it has joined:
///
///     while (true) {
///       begin the epoch, if one has begun; take a step, unless the job is over
///       if this did not go well: revoke the epoch, so that nobody waits
///       agree on whether it went well for all, who is out, and who comes
///       commit, or drop
///       end, if all are well and the job is over
///       begin the next epoch, if one is out, one comes, or it did not go well
///     }
///
/// So a step counts for all ranks or for none; who dies costs one step at most. Nobody leaves before all have
/// agreed that it is over, also where an epoch began with nothing left to do: who needs what a rank holds can
/// still have it. Who waits to join when the job ends finds nobody: its `join` comes to its deadline.
///
/// @par Complexity      of each step one agreement: 4 messages of some hundred bytes for each other rank.
/// @par Thread safety   one thread at a time, which owns the ranks meanwhile.
/// @par Errors          `errc::no_quorum` when the others have gone on without this rank: end the process
///      and let a fresh one join. What else the agreement returns: who lives did not answer in time. What the
///      job throws passes through, and the epoch is revoked: the others go on without this rank once it is
///      gone.
/// @par Source          epochs of User Level Failure Mitigation: Bland et al., IJHPCA 2013; a commit for each
///      step, by all or by none: Gray, "Notes on data base operating systems", 1978.
template <epoch_ranks T, epoch_job J>
[[nodiscard]] result<epochs_end> run_epochs(T& ranks, J& job, const epoch_options& options = {}) {
  try {
    for (bool is_settled = false;;) {
      redundancy::went how = is_settled ? redundancy::went::well : job.begin();
      const bool is_step = how == redundancy::went::well && !job.is_over();
      if (is_step) how = job.step();
      if (how != redundancy::went::well) ranks.revoke();
      if (how == redundancy::went::stop) return epochs_end::stopped;
      const result<comm::agreed> outcome =
          ranks.agree(how == redundancy::went::well ? 1 : 0, ranks.after(options.patience_ns));
      if (!outcome) return outcome.error();
      detail::tell_agreed(job, *outcome);
      const bool is_well = outcome->bits == 1;
      if (!is_well) job.drop();
      if (is_well && is_step) job.commit();
      if (is_well && job.is_over()) return epochs_end::finished;
      is_settled = is_well && outcome->failed.empty() && outcome->joining.empty();
      if (!is_settled) ranks.admit(*outcome);
    }
  } catch (...) {
    ranks.revoke();
    throw;
  }
}

}  // namespace v0
}  // namespace llmmem
