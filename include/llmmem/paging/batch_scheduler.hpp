/// @file
/// Chooses the requests that run in the next step while the lengths of their answers are unknown: admission,
/// preemption and resumption over a paged KV cache.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/detail/scheduler_accounts.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/scheduling_order.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A request of a `batch_scheduler`; a default-constructed one names none.
struct request_ticket {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;

  friend constexpr bool operator==(const request_ticket&, const request_ticket&) noexcept = default;
};

/// What decides whether the KV of a preempted request is saved by the client or computed again. Saving
/// `written` tokens and bringing them back takes 2 x (`seconds_per_swap` + `written` x `bytes_per_token` /
/// `bytes_per_second`). Without it, the tokens in blocks that no other sequence holds are computed again, at
/// `compute_tokens_per_second`. The scheduler chooses the shorter time.
struct swap_costs {
  double compute_tokens_per_second = 0;  ///< of a prefill; 0: save whenever the client can
  double bytes_per_second = 0;           ///< of the client's copies, in one direction
  double bytes_per_token = 0;            ///< of KV, all layers together
  double seconds_per_swap = 0;           ///< before the first byte, in one direction
};

/// The construction parameters of a `batch_scheduler`.
struct scheduler_options {
  std::uint32_t max_running = 64;         ///< requests in one step, at most the cache's `max_sequences`
  std::uint32_t max_requests = 1'024;     ///< running and waiting together
  std::uint64_t max_step_tokens = 8'192;  ///< tokens computed in one step; longer prompts are split
  std::uint64_t watermark = 0;  ///< blocks (of each group) that admission leaves to running requests
  /// Steps that may be planned before the oldest of them is `completed`: 1, or 2 to plan a step while the
  /// previous one runs.
  std::uint32_t max_steps_in_flight = 1;
  swap_costs swap{};                     ///< for clients that can save KV
  std::string name = "batch_scheduler";  ///< the name in error texts
  metadata_source metadata{};            ///< source of memory for its tables
};

/// The work of one request in a step: compute the KV of its tokens `first` to `first + count`.
struct scheduled_work {
  request_ticket ticket{};
  std::uint64_t user = 0;  ///< the value given to `submit`
  sequence_id sequence{};
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// A step: the work, and what prevents more.
struct scheduled_step {
  std::span<const scheduled_work> work{};  ///< valid until the step is completed
  /// Set if there is no work although a request waits or lacks blocks: what the next request needs. Other
  /// sequences hold the blocks, or fences that have not passed, or a step in flight, or running requests that
  /// have nothing to compute. If enough blocks are available, the request waits for a sequence of the cache,
  /// for a running slot or, over groups, until it can start again alone.
  block_shortage blocked{};
  std::size_t blocked_group = 0;  ///< the group of a `hybrid_allocator` that `blocked` counts
};

/// Counts since construction.
struct scheduler_stats {
  std::uint64_t running = 0;  ///< now
  std::uint64_t waiting = 0;  ///< now
  std::uint64_t steps = 0;
  std::uint64_t submitted = 0;
  std::uint64_t finished = 0;
  std::uint64_t exhausted = 0;  ///< ended because one sequence outgrew the cache, or `max_sequence_tokens`
  std::uint64_t admitted = 0;   ///< started for the first time
  std::uint64_t preempted = 0;
  std::uint64_t resumed = 0;
  std::uint64_t swapped_out = 0;        ///< preemptions whose KV the client saved
  std::uint64_t taken_back = 0;         ///< tokens that clients took back, refused drafts
  std::uint64_t dropped = 0;            ///< work planned ahead for requests that ended before it counted
  std::uint64_t computed_tokens = 0;    ///< scheduled
  std::uint64_t recomputed_tokens = 0;  ///< of those, computed before and lost to a preemption
  std::size_t metadata_bytes = 0;
};

/// What a `batch_scheduler` requires of the engine.
///
///     tokens(user)           returns all tokens of the request so far: the prompt, the generated ones, and
///                            drafts to verify in the next step. The span must stay valid until the scheduler
///                            call that asked returns. If drafts are refused, call `accepted` before the next
///                            `step`: other tokens may be in their places. A request that only shrinks is cut
///                            to its new length; one that shrinks to nothing ends as `exhausted`
///     copy(what)             carries out a copy on write; called in the order in which copies and swaps take
///                            effect, all before anything of the step is written. A
///                            client that queues the copy takes the addresses of both blocks in this
///                            call: later in the same `step` the source may return to the pool
///     exhausted(user, why)   reports that the request cannot continue, not even alone; it has been ended and
///                            its ticket is stale
///
/// Neither these calls nor the cache's callbacks may call the scheduler, which then returns
/// `errc::reentered`. Only `exhausted` may call `submit` and `finish`.
template <class C>
concept batch_client = requires(C& client, std::uint64_t user, const block_copy& what, const failure& why) {
  { client.tokens(user) } noexcept -> std::same_as<std::span<const token_id>>;
  { client.copy(what) } noexcept -> std::same_as<void>;
  { client.exhausted(user, why) } noexcept -> std::same_as<void>;
};

/// A `batch_client` of a scheduler over a `hybrid_allocator`: `copy` takes a `group_copy`, which names the
/// group whose layers it concerns.
template <class C>
concept group_batch_client =
    requires(C& client, std::uint64_t user, const group_copy& what, const failure& why) {
      { client.tokens(user) } noexcept -> std::same_as<std::span<const token_id>>;
      { client.copy(what) } noexcept -> std::same_as<void>;
      { client.exhausted(user, why) } noexcept -> std::same_as<void>;
    };

/// A client that knows how many tokens the steps in flight will add to a request.
///
/// `pending(user)` is asked when a step is planned while another runs that computes the request's last token.
/// It returns how many tokens, after those of `tokens(user)`, will exist when the running step ends: places
/// are reserved for them, and the next step computes them. 0: the request is left out of the step, because it
/// will end or because its drafts may be refused. For other clients it is 1.
template <class C>
concept foreseeing_client =
    (batch_client<C> || group_batch_client<C>) && requires(C& client, std::uint64_t user) {
      { client.pending(user) } noexcept -> std::same_as<std::uint64_t>;
    };

/// A client that can keep the KV of preempted requests elsewhere.
///
/// `swap_out(user, sequence, written)` saves the KV of the first `written` tokens, or returns false: they are
/// computed again on resumption. The blocks are released afterwards.
///
/// `swap_in(user, sequence, first, end)` is called once on resumption after `swap_out` returned true. It
/// writes the KV of tokens `first` to `end`, then discards what it saved; it is also called if `first` equals
/// `end`, because everything saved is still cached. If it returns false, the copy is lost and the tokens are
/// computed again.
///
/// A store that still reads the blocks after `swap_out` has returned keeps them by a fork that is released
/// behind the store's fence (`release_after`). The scheduler counts such blocks as coming and preempts no
/// further request for them.
///
/// Over a `hybrid_allocator` the tables of `sequence` name the blocks to save: what token `written` reads, of
/// a state the last one. `swap_in` is then called with `end` equal to that `written`, or with `first` equal
/// to `end`: then what was saved is worth nothing, for example because a state has gone past the last token
/// that must be computed. It writes every block that the tables name for tokens `first` to `end`; earlier
/// blocks of windows, and states before the last one, are in no table.
template <class C>
concept swapping_client =
    (batch_client<C> || group_batch_client<C>) &&
    requires(C& client, std::uint64_t user, sequence_id sequence, std::uint64_t tokens) {
      { client.swap_out(user, sequence, tokens) } noexcept -> std::same_as<bool>;
      { client.swap_in(user, sequence, tokens, tokens) } noexcept -> std::same_as<bool>;
    };

/// Runs as many requests as the cache holds, in the order of a policy, without knowing their final lengths.
///
///     batch_scheduler scheduler(cache, engine, {.max_running = 32});
///     scheduler.submit(7).value();                     // engine.tokens(7) is its prompt
///     for (;;) {
///       const auto step = scheduler.step().value();
///       ...                                            // compute step.work; a request that has reached its
///                                                      // last token gets one more in engine.tokens(user)
///       scheduler.completed().value();                 // all kernels are done, the KV is written
///       ...                                            // scheduler.finish(ticket) for completed requests
///     }
///
/// A running request that needs a block when none is available takes it from the last request in order that
/// holds blocks of its own. That request is preempted: its blocks are released (its cached blocks stay,
/// evictable), and it waits again. It resumes with all its tokens, prompt and answer; only those that neither
/// the cache nor the client has are computed again. Requests are preempted for the blocks that are lacking
/// and not already coming: blocks that wait for fences, and those of requests that leave with the step in
/// flight. Until they come, requests that need no block run on, and no request takes a block before an
/// earlier one.
///
/// *A step ahead*: with `max_steps_in_flight` 2, `step` may be called once more before `completed`, which
/// always completes the oldest step. A request whose last token the running step computes takes part in the
/// new step with the token that the running step will sample: its place is reserved, and `tokens(user)` has
/// it by the time the running step is completed. No block that a step in flight reads or writes is handed out
/// before that step is completed: requests that are finished, cut or preempted keep their blocks until then.
/// Run copies, swaps and steps in the order of the calls (on one stream).
///
///     auto running = scheduler.step().value();
///     for (;;) {
///       launch(running.work);
///       const auto next = scheduler.step().value();    // planned while `running` runs
///       wait(running);                                 // each sampled token is now in engine.tokens(user)
///       scheduler.completed().value();                 // `running`, the oldest
///       ...                                            // finish(ticket) for completed requests: the engine
///       running = next;                                // may skip their work in `next`
///     }
///
/// *No deadlock*: the first running request in order is never preempted and always gets the blocks it needs;
/// if it cannot have them although it runs alone, it has outgrown the cache and is ended as `exhausted`. So
/// each step with work advances the first request and, by induction, every request that its order lets come
/// first: see the bound of each order. *No token lost*: tokens belong to the client; the scheduler only
/// counts them.
///
/// *Groups of layers*: over a `hybrid_allocator` the scheduler counts the blocks of each group. Windows and
/// chunks need blocks for their reach and one step; admission counts steps of `max_step_tokens`. If a request
/// that runs alone lacks blocks for a step, the step is cut in half, down to one token. What a step in flight
/// reads, and what a cut by `accepted` to any token of the last step needs, is kept (`limit_releases`).
/// Refused drafts are cut at the nearest length that every group has: for states the last snapshot, in the
/// sequence or in the cache. If the blocks of a request that runs alone are scattered over so many pages that
/// another group gets none, the request is preempted, and starts again alone. The engine gives the
/// scheduler's sequences no fences (`read_until`).
///
/// @tparam Cache   a `paged_allocator` or a `hybrid_allocator`.
/// @tparam Client  a `batch_client`, over groups a `group_batch_client`; perhaps a `swapping_client` or a
///   `foreseeing_client`.
/// @tparam Order   a `scheduling_order`.
///
/// @par Complexity   a step is O(running requests + their new blocks), admission O(prompt); if blocks run
///   short, O(blocks of running requests) for each preemption. An order other than by arrival adds O(waiting
///   requests) for each admission and O(running requests squared) at most for each step. No allocation after
///   construction.
/// @par Thread safety   one caller at a time.
/// @par Waits   never. Between `completed` and the next `step` no kernel may read the cache's blocks, except
///   those of a step in flight: preempted blocks are released at once.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; all else returns a `result`.
/// @par Source   continuous batching as in Orca (Yu et al., OSDI 2022), recompute and swap preemption as in
///   vLLM (Kwon et al., SOSP 2023); the progress argument is our own.
template <class Cache, class Client, scheduling_order Order = first_come_first_served>
class batch_scheduler {
 public:
  batch_scheduler(Cache& cache, Client& client, scheduler_options options, Order order = {});

  /// Queues a request; from now on the client's `tokens(user)` must return its prompt.
  /// @return `errc::out_of_requests` when the scheduler already has `max_requests`, `errc::out_of_blocks` or
  ///   `errc::out_of_group_blocks` for a prompt that the whole cache cannot hold together with one more
  ///   token, even if it is computed token by token, `errc::sequence_full` for a prompt too long for a
  ///   sequence, `errc::empty_range` for one without tokens, `errc::out_of_range` for a class that the order
  ///   does not accept.
  result<request_ticket> submit(std::uint64_t user, const prefix_context& context = {},
                                const request_hints& hints = {}, const request_class& of = {}) noexcept;

  /// Grows the running requests by their new tokens, preempting the last ones if blocks run short, then
  /// admits waiting requests, the first in order first.
  /// @return `errc::step_pending` when `max_steps_in_flight` steps are not `completed` yet.
  result<scheduled_step> step() noexcept;

  /// Declares the KV of the oldest step's work written: full blocks become cached.
  result<void> completed() noexcept;

  /// Declares that only the first `kept` computed tokens of a request stand: later ones were drafts and are
  /// refused, even if `tokens(user)` has other tokens in their places. The sequence is cut to `kept` tokens,
  /// at once or when the last step in flight with its work is completed; from there on the request is
  /// computed again. Do not call it for the token that a step samples, only for tokens whose KV is wrong.
  /// @return `errc::past_the_end` if fewer than `kept` tokens were computed.
  result<void> accepted(request_ticket ticket, std::uint64_t kept) noexcept;

  /// Ends a request, running or waiting; from now on the scheduler asks for none of its tokens. If steps in
  /// flight have work of it, its blocks are released when the last of them is completed. Work that was
  /// planned while another step ran no longer counts then: the engine may skip it, and nothing of it is
  /// cached.
  result<void> finish(request_ticket ticket) noexcept;

  [[nodiscard]] scheduler_stats stats() const noexcept;
  [[nodiscard]] const Order& order() const noexcept { return order_; }
  /// Gives access to the order, for example to change a tenant's share.
  [[nodiscard]] Order& order() noexcept { return order_; }

  /// Proves that both queues are sorted by arrival, that exactly the running requests hold sequences, and
  /// that they hold the tokens of the steps in flight. Returns one sentence for each violation. O(requests x
  /// requests in flight); allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  using accounts = detail::scheduler_accounts<Cache>;
  using counts = typename accounts::counts;
  static constexpr std::uint64_t none = ~std::uint64_t{0};
  /// Whether the cache accepts the value of a token whose place was reserved before.
  static constexpr bool reserves = requires(Cache& cache, sequence_id sequence) {
    cache.name_tokens(sequence, std::span<const token_id>{});
  };

  struct request {
    std::uint64_t user = 0;
    ranked_request rank{};  // its arrival is its place in both queues
    prefix_context context{};
    request_hints hints{};
    sequence_id sequence{};
    std::uint64_t prompt = 0;      // tokens when it was submitted
    std::uint64_t computed = 0;    // tokens whose KV was scheduled at any time
    std::uint64_t planned = 0;     // tokens in the sequence: those of steps in flight too
    std::uint64_t known = 0;       // of those, tokens whose values the cache has
    std::uint64_t written = 0;     // tokens whose KV is in the sequence
    std::uint64_t saved = 0;       // tokens whose KV the client has
    std::uint64_t cut = none;      // tokens that stand when no step in flight has work of it
    std::uint64_t oldest = 0;      // the first token of its oldest work in flight,
    std::uint64_t newest = 0;      // and of its newest
    std::uint64_t restart = 0;     // it ran alone and lacked blocks for this many tokens
    std::uint32_t in_flight = 0;   // steps that have work of it
    std::uint32_t generation = 0;  // odd while the slot holds a request
    bool is_running = false;
    bool has_run = false;
    bool is_ending = false;   // released when no step in flight has work of it
    bool is_leaving = false;  // preempted then
    bool is_held = false;     // left out of the step that is being planned
    bool is_saved = false;
    bool had_others = false;  // since it started again, other sequences, fences or pins held blocks
  };

  /// The calls allowed now: callbacks run while the queues are half changed.
  enum class calls : std::uint8_t { all, queue, none };

  /// What the scheduler knows of one entry of a step's work.
  struct work_note {
    bool is_early = false;    // planned while another step was in flight
    bool is_dropped = false;  // does not count
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, options_.name.c_str()};
  }
  [[nodiscard]] failure too_large(std::uint32_t index, const detail::block_lack& lack) const noexcept {
    if constexpr (accounts::is_grouped) {
      return refusal(errc::out_of_group_blocks, lack.group, lack.needed, lack.available);
    } else {
      return refusal(errc::out_of_blocks, index, lack.needed, lack.available);
    }
  }
  [[nodiscard]] result<void> check(request_ticket ticket) const noexcept;

  void end_emptied() noexcept;
  void take_values(request& each) noexcept;
  void cut_back(request& each) noexcept;
  void rank() noexcept;
  [[nodiscard]] std::uint64_t pending_tokens(const request& each, std::uint64_t tokens) noexcept;
  void plan_growth() noexcept;
  bool grow_running(scheduled_step& out) noexcept;
  [[nodiscard]] counts coming_blocks() const noexcept;
  void keep_what_fits() noexcept;
  bool preempt_last(const counts& missing, std::uint64_t least) noexcept;
  bool step_down(std::uint32_t slot) noexcept;
  void limit_releases() noexcept;
  void note_others(request& each) noexcept;
  void give_up(std::uint32_t slot, const failure& why) noexcept;
  void preempt(std::uint32_t slot) noexcept;
  [[nodiscard]] bool is_worth_saving(const request& victim) const noexcept;
  [[nodiscard]] std::uint32_t next_waiting() const noexcept;
  void admit_waiting(scheduled_step& out) noexcept;
  /// The outcome of an attempt to start a request.
  enum class attempt : std::uint8_t { done, no_space, swap_lost };
  bool start(std::uint32_t place) noexcept;
  attempt start_with_less(std::uint32_t place, bool may_split) noexcept;
  attempt try_start(std::uint32_t place, std::uint64_t most_cached, bool may_split) noexcept;
  [[nodiscard]] bool fits_in_small_steps(const request& next) const noexcept;
  bool bring_back(request& starting, std::span<const token_id> tokens) noexcept;
  bool reserve_saved(request& starting, std::span<const token_id> tokens, std::uint64_t most) noexcept;
  bool write_saved(request& starting, std::uint64_t first) noexcept;
  [[nodiscard]] std::uint64_t step_limit(const request& each, std::uint64_t tokens) const noexcept;
  [[nodiscard]] bool has_restarted() const noexcept;
  [[nodiscard]] counts needed_to_start(const request& next) const noexcept {
    return accounts_.to_start(client_->tokens(next.user), next.context, options_.max_step_tokens);
  }
  void block_on(scheduled_step& out, const counts& needed, std::uint64_t leave) const noexcept {
    const detail::block_lack lack = accounts_.lack(needed, leave);
    out.blocked = {.needed = lack.needed, .available = lack.available};
    out.blocked_group = lack.group;
  }
  [[nodiscard]] std::uint64_t blocks_left_to_runners() const noexcept {
    return running_count_ == 0 ? 0 : options_.watermark;
  }
  void copy(const typename accounts::grown& from) noexcept {
    accounts::each_copy(from, [this](const auto& what) noexcept { client_->copy(what); });
  }
  void add_work(std::uint32_t slot, std::uint64_t first, std::uint64_t count) noexcept;
  void complete(const scheduled_work& done, const work_note& note) noexcept;
  void drop_early_work(request_ticket ticket) noexcept;
  void end(std::uint32_t slot) noexcept;
  void run(std::uint32_t slot) noexcept;
  void stop_running(std::uint32_t slot) noexcept;
  void wait_again(std::uint32_t slot) noexcept;
  void stop_waiting(std::uint32_t place) noexcept;

  [[nodiscard]] std::uint32_t& waiting_at(std::uint32_t i) noexcept {
    return waiting_[(first_waiting_ + i) % waiting_.size()];
  }
  [[nodiscard]] std::uint32_t waiting_at(std::uint32_t i) const noexcept {
    return waiting_[(first_waiting_ + i) % waiting_.size()];
  }
  /// The place of the step that is being planned, or is planned next, among the steps.
  [[nodiscard]] std::uint32_t planned_step() const noexcept {
    return (oldest_step_ + steps_in_flight_) % options_.max_steps_in_flight;
  }
  [[nodiscard]] std::size_t first_work(std::uint32_t step) const noexcept {
    return std::size_t{step} * options_.max_running;
  }

  Cache* cache_;
  accounts accounts_;
  Client* client_;
  scheduler_options options_;
  Order order_;
  detail::fixed_array<request> requests_;                   // by slot
  detail::fixed_array<std::uint32_t> free_slots_;           // a stack
  detail::fixed_array<std::uint32_t> running_;              // slots by arrival
  detail::fixed_array<std::uint32_t> ranked_;               // the same slots by the order, during a step
  detail::fixed_array<std::uint32_t> waiting_;              // a ring of slots by arrival
  detail::fixed_array<typename accounts::growth> growths_;  // of this step
  detail::fixed_array<typename accounts::grown> grown_;
  detail::fixed_array<std::uint32_t> growing_;  // their slots
  detail::fixed_array<scheduled_work> work_;    // of each step, max_running after each other
  detail::fixed_array<work_note> notes_;        // of each entry of work_
  std::array<std::uint32_t, 2> work_counts_{};  // by step
  std::uint32_t free_slot_count_;
  std::uint32_t running_count_ = 0;
  std::uint32_t first_waiting_ = 0;
  std::uint32_t waiting_count_ = 0;
  std::uint32_t growing_count_ = 0;
  std::uint32_t oldest_step_ = 0;
  std::uint32_t steps_in_flight_ = 0;  // not completed
  std::uint64_t step_tokens_ = 0;      // scheduled in this step
  std::uint64_t first_part_ = none;    // the most tokens of the first request in this step
  calls calls_ = calls::all;
  std::uint64_t arrivals_ = 0;
  std::uint32_t anchor_ = 0;             // with an order that changes: the running request that stays first,
  std::uint32_t anchor_generation_ = 0;  // and its generation
  scheduler_stats counters_{};
};

/// Deduces its types from its arguments.
template <class Cache, class Client>
batch_scheduler(Cache&, Client&, scheduler_options) -> batch_scheduler<Cache, Client>;
template <class Cache, class Client, class Order>
batch_scheduler(Cache&, Client&, scheduler_options, Order) -> batch_scheduler<Cache, Client, Order>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/batch_scheduler_admission.hpp>
#include <llmmem/paging/detail/batch_scheduler_body.hpp>
#include <llmmem/paging/detail/batch_scheduler_growth.hpp>
