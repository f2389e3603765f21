/// @file
/// `gather_schedule`: gathers the next scopes of a sharded state during the computation with this one,
/// according to a plan.
#pragma once

#include <llmmem/comm/operation_queue.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// One use of a scope, and how long the program computes with it.
struct gather_use {
  std::uint32_t scope = 0;
  std::uint64_t compute_ns = 0;
};

/// Plans the gathers of one iteration: whole tensors are the first tier, with a budget, and the ranks' pieces
/// the last. With `schedule::next_use` each scope is gathered as early as space and link allow, and the
/// scopes used again soonest stay: the last layer of a forward pass, for the backward pass. With
/// `schedule::lookahead{n}`, n uses ahead.
///
/// **All ranks follow the same plan.** Make it from the same numbers everywhere: measured by one rank and
/// sent to the others, or computed from a model. Otherwise the ranks wait for each other in different
/// gathers.
///
/// @param scope_bytes  of each scope, whole.
/// @param budget       bytes of whole tensors at once; at least the largest scope.
/// @param link         a gather's time: from `model/` and a measurement.
/// @throws argument_error  for a use of a scope that does not exist, or a budget that is too small for the
///                         largest.
template <schedule_planner Planner = schedule::next_use>
[[nodiscard]] schedule_plan plan_gathers(std::span<const std::uint64_t> scope_bytes,
                                         std::span<const gather_use> uses, std::uint64_t budget,
                                         const link_model& link, Planner planner = {}) {
  planner.span = plan_span::single;  // gathered tensors are stale once the weights have changed
  trace_recorder recorder;
  for (const std::uint64_t bytes : scope_bytes)
    static_cast<void>(recorder.add_chunk(bytes));
  for (const gather_use& each : uses) {
    if (each.scope >= scope_bytes.size()) {
      throw argument_error("plan_gathers: scope " + std::to_string(each.scope) + " is used, and there are " +
                           std::to_string(scope_bytes.size()));
    }
    recorder.acquire(chunk_id{each.scope}, access_mode::read);
    recorder.compute(each.compute_ns);
    recorder.release(chunk_id{each.scope});
  }
  return planner(recorder.freeze(), {.budgets = {budget}, .links = {link}});
}

/// Counters of a schedule of gathers.
struct gather_schedule_stats {
  std::uint64_t uses = 0;
  std::uint64_t gathers = 0;
  std::uint64_t ahead = 0;  ///< gathers that began while another scope was in use
  std::uint64_t kept = 0;   ///< uses of scopes that an earlier use had left gathered
};

/// Executes the plan of an iteration's gathers on a queue, concurrently with the program that uses them.
///
///     const schedule_plan plan = plan_gathers(bytes, uses, two_layers, link);
///     gather_schedule schedule(weights, queue, scopes, order, plan);
///     for (int step = 0; step < steps; ++step) {
///       schedule.begin_iteration();
///       for (std::size_t i = 0; i < order.size(); ++i) {
///         const auto layer = schedule.next().value();      // waits for it, if it must
///         compute(layer.whole());                          // while the next one arrives
///       }
///       schedule.end_iteration().value();
///       update();                                          // weights change: gathered scopes end here
///     }
///
/// It follows the steps of a plan, not the clock: when a gather begins depends only on what the program has
/// used, so that all ranks gather in one order. (A `prefetch_schedule` does not, because there each process
/// leaves a late step to the lease independently. The planners are the same.) A gather without space waits
/// for the drop that frees it.
///
/// @tparam State  a `sharded_state`; meanwhile only the queue runs its operations.
/// @par Complexity      a use O(steps of the plan at it).
/// @par Thread safety   one thread; the gathers run on the queue's. The program's thread leases pieces in
///                      tiers when a gather begins, and they stay in tier 0 until the scope's next use has
///                      begun, or ended if the rank has the tensor completely. A scope that stays for a later
///                      use holds no pieces meanwhile.
/// @par Errors          the constructor throws `argument_error` for a plan of other scopes or uses; `next`
///                      and `end_iteration` return the failure of a gather.
template <class State>
class gather_schedule {
 public:
  using whole_type = typename State::whole;
  using hold_type = typename State::hold_type;

  /// A scope in use. One at a time.
  class lease {
   public:
    lease() noexcept = default;
    lease(lease&& other) noexcept
        : schedule_(std::exchange(other.schedule_, nullptr)), scope_(other.scope_) {}
    lease& operator=(lease&& other) noexcept {
      if (this != &other) {
        end();
        schedule_ = std::exchange(other.schedule_, nullptr);
        scope_ = other.scope_;
      }
      return *this;
    }
    ~lease() { end(); }

    /// @pre it has not ended.
    [[nodiscard]] const whole_type& whole() const noexcept { return schedule_->slots_[scope_]->whole; }
    void end() noexcept {
      if (schedule_ != nullptr) std::exchange(schedule_, nullptr)->released(scope_);
    }

   private:
    friend class gather_schedule;
    lease(gather_schedule& schedule, std::uint32_t scope) noexcept : schedule_(&schedule), scope_(scope) {}

    gather_schedule* schedule_ = nullptr;
    std::uint32_t scope_ = 0;
  };

  /// State and queue outlive it.
  /// @param uses  the scopes in the order of use, as the plan was made for.
  gather_schedule(State& state, operation_queue& queue, std::vector<std::vector<tensor_id>> scopes,
                  std::vector<std::uint32_t> uses, schedule_plan plan);
  gather_schedule(const gather_schedule&) = delete;
  gather_schedule& operator=(const gather_schedule&) = delete;
  /// Waits for operations in flight.
  ~gather_schedule() { static_cast<void>(drop_all()); }

  /// Begins the gathers that the plan has before the first use. Drops scopes that an earlier iteration left.
  void begin_iteration();
  /// Returns the next scope of the order. @pre the previous lease has ended, and a use is left
  [[nodiscard]] result<lease> next();
  /// Drops all scopes, used or not: an iteration may end before its last use. @pre no lease lives
  result<void> end_iteration() {
    result<void> done = drop_all();
    cursor_ = plan_.first.steps.size();
    return done;
  }

  [[nodiscard]] const schedule_plan& plan() const noexcept { return plan_; }
  [[nodiscard]] const gather_schedule_stats& stats() const noexcept { return stats_; }

 private:
  struct slot : operation_queue::entry {
    slot(State& of, std::vector<tensor_id> scope_of, std::uint64_t bytes_of)
        : entry([](entry& self) -> result<void> { return static_cast<slot&>(self).gather(); }),
          state(&of),
          scope(std::move(scope_of)),
          bytes(bytes_of) {}
    [[nodiscard]] result<void> gather() {
      if (!refused) {  // its pieces could not be held: the other ranks must not wait for this one
        state->ranks().revoke();
        return refused;
      }
      result<whole_type> made = state->gather(scope);
      if (!made) return made.error();
      whole = std::move(*made);
      return {};
    }

    State* state;
    std::vector<tensor_id> scope;
    std::uint64_t bytes;
    hold_type held{};        // its pieces, until it has arrived: leased and ended by the program's thread
    result<void> refused{};  // why they could not be leased
    whole_type whole{};
    bool is_here = false;  // gathered or in flight
    bool is_pending = false;
    bool was_used = false;
    bool is_leased = false;
    bool is_dropped = false;  // once the lease has ended
  };

  void issue_up_to(std::uint32_t event, plan_moment when);
  void start(std::uint32_t scope);
  void start_pending();
  void drop(std::uint32_t scope) noexcept;
  [[nodiscard]] result<void> arrived(slot& it);
  [[nodiscard]] result<void> settled(slot& it) noexcept;
  void released(std::uint32_t scope) noexcept;
  [[nodiscard]] result<void> drop_all() noexcept;
  [[nodiscard]] bool is_used_from(std::uint32_t scope, std::uint32_t event) const noexcept {
    for (std::size_t i = (event + 1) / 2; i < uses_.size(); ++i) {
      if (uses_[i] == scope) return true;
    }
    return false;
  }

  operation_queue* queue_;
  std::vector<std::unique_ptr<slot>> slots_;  // each stays at its address
  std::vector<std::uint32_t> uses_;
  schedule_plan plan_;
  std::vector<std::uint32_t> pending_{};  // in the plan's order, still without space
  std::size_t cursor_ = 0;                // the next step
  std::size_t use_ = 0;                   // the next use
  bool is_in_use_ = false;                // a lease lives
  std::uint64_t held_bytes_ = 0;          // here or in flight, by whole scopes: the same on all ranks
  gather_schedule_stats stats_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/sharding/detail/gather_schedule_body.hpp>
