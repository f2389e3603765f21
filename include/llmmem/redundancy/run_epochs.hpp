/// @file
/// `run_epochs`: runs the epochs of a job until it is over, with steps that count for all ranks or for none.
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

/// The outcome for this rank.
enum class job_outcome : std::uint8_t {
  succeeded,
  failed,  ///< a rank may have died: the next epoch begins without it. Throw an error that another epoch
           ///< would not resolve, such as `errc::setup_differs`; otherwise the epochs repeat forever
  stop,    ///< the run ends on this rank, without an agreement, for example because state is lost. Ranks with
           ///< another outcome continue once this rank's endpoint is destroyed
  well [[deprecated("its name is succeeded")]] = succeeded,
  badly [[deprecated("its name is failed")]] = failed
};

using went [[deprecated("its name is redundancy::job_outcome")]] = job_outcome;

}  // namespace redundancy

using went [[deprecated("its name is redundancy::job_outcome")]] = redundancy::job_outcome;

/// Ranks that can agree and begin epochs. `communicator` is a model.
template <class T>
concept epoch_ranks =
    requires(T& ranks, const T& seen, const comm::agreed& outcome, std::uint64_t bits, deadline by) {
      { ranks.agree(bits, by) } -> std::same_as<result<comm::agreed>>;
      ranks.admit(outcome);
      { ranks.revoke() } noexcept;
      { seen.after(bits) } noexcept -> std::same_as<deadline>;
    };

/// The work of a rank in epochs. The jobs of all ranks must agree on `is_over`, and take the same steps.
///
/// - `begin()`, when an epoch has begun: brings this rank to the common state, by
///   `redundant_replica::recover` and by loading if that says so.
/// - `is_over()`: no step is left.
/// - `step()`: one step, which counts only when all ranks have done it. It ends with
///   `redundant_replica::keep`.
/// - `commit()`: all ranks have done the step. `drop()`: some have not, or the epoch failed to begin; the
///   next `begin` finds the previous state. Neither throws.
/// - `agreed_on(outcome)`, if it exists: called after each agreement, before the resulting `commit` or
///   `drop`.
template <class J>
concept epoch_job = requires(J& job) {
  { job.begin() } -> std::same_as<redundancy::job_outcome>;
  { job.is_over() } -> std::convertible_to<bool>;
  { job.step() } -> std::same_as<redundancy::job_outcome>;
  job.commit();
  job.drop();
};

/// The time limits of `run_epochs`.
struct epoch_options {
  std::uint64_t patience_ns = 60'000'000'000;  ///< for all live ranks to reach an agreement
};

/// How the epochs ended.
enum class epochs_end : std::uint8_t {
  finished,  ///< the job is over, and all live ranks agreed on that
  stopped,   ///< `begin` or `step` requested it
};

namespace detail {

template <class J>
void report_agreed(J& job, const comm::agreed& outcome) {
  if constexpr (requires { job.agreed_on(outcome); }) job.agreed_on(outcome);
}

}  // namespace detail

/// Runs a job on ranks that may die at any time, and whose seats fresh processes may take. Each rank calls it
/// after it has joined:
///
///     while (true) {
///       begin the epoch, if one has begun; take a step, unless the job is over
///       if this failed: revoke the epoch, so that no rank waits
///       agree on whether it succeeded for all, which ranks left, and which join
///       commit, or drop
///       end, if all succeeded and the job is over
///       begin the next epoch, if a rank left or joins, or it failed
///     }
///
/// So a step counts for all ranks or for none, and a death costs at most one step. No rank leaves before all
/// have agreed that the job is over, even if an epoch began with nothing left to do, so that ranks can still
/// get data from each other. A process that waits to join when the job ends finds no members, and its `join`
/// reaches its deadline.
///
/// @par Complexity      one agreement per step: 4 messages of some hundred bytes for each other rank.
/// @par Thread safety   one thread at a time, which owns the ranks during the call.
/// @par Errors          `errc::no_quorum` if the others have continued without this rank: end the process and
///                      let a fresh one join. Other errors of the agreement mean that a live rank did not
///                      answer in time. An exception of the job revokes the epoch and passes through; the
///                      others continue without this rank once its endpoint is destroyed.
/// @par Source          epochs of User Level Failure Mitigation: Bland et al., IJHPCA 2013; a commit of each
///                      step by all ranks or none: Gray, "Notes on data base operating systems", 1978.
template <epoch_ranks T, epoch_job J>
[[nodiscard]] result<epochs_end> run_epochs(T& ranks, J& job, const epoch_options& options = {}) {
  try {
    for (bool is_settled = false;;) {
      redundancy::job_outcome how = is_settled ? redundancy::job_outcome::succeeded : job.begin();
      const bool is_step = how == redundancy::job_outcome::succeeded && !job.is_over();
      if (is_step) how = job.step();
      if (how != redundancy::job_outcome::succeeded) ranks.revoke();
      if (how == redundancy::job_outcome::stop) return epochs_end::stopped;
      const result<comm::agreed> outcome =
          ranks.agree(how == redundancy::job_outcome::succeeded ? 1 : 0, ranks.after(options.patience_ns));
      if (!outcome) return outcome.error();
      detail::report_agreed(job, *outcome);
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
