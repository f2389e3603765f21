/// @file
/// Chooses the requests that run in the next step while the lengths of their answers are unknown: admission,
/// preemption and resumption over a paged KV cache.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

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

/// The construction parameters of a `batch_scheduler`.
struct scheduler_options {
  std::uint32_t max_running = 64;         ///< requests in one step, at most the cache's `max_sequences`
  std::uint32_t max_requests = 1'024;     ///< running and waiting together
  std::uint64_t max_step_tokens = 8'192;  ///< tokens computed in one step; longer prompts are split
  std::uint64_t watermark = 0;            ///< blocks that admission leaves to running requests
  std::string name = "batch_scheduler";   ///< the name in error texts
  metadata_source metadata{};             ///< source of memory for its tables
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
  std::span<const scheduled_work> work{};  ///< valid until the next step
  /// Set if there is no work although a request waits: what the next request needs. Other sequences hold the
  /// blocks, or running requests that have nothing to compute. If enough blocks are available, the request
  /// waits for a sequence of the cache or for a running slot.
  block_shortage blocked{};
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
  std::uint64_t computed_tokens = 0;    ///< scheduled
  std::uint64_t recomputed_tokens = 0;  ///< of those, computed before and lost to a preemption
  std::size_t metadata_bytes = 0;
};

/// What a `batch_scheduler` requires of the engine.
///
///     tokens(user)           returns all tokens of the request so far: the prompt and the generated ones.
///                            The span must stay valid until the scheduler call that asked returns. Never
///                            fewer than were computed: to take tokens back, finish the request and submit
///                            it again. A request that shrinks nevertheless ends as `exhausted`
///     copy(what)             carries out a copy on write; called in the order in which copies and swaps take
///                            effect, all before anything of the step is written
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

/// A client that can keep the KV of preempted requests elsewhere.
///
/// `swap_out(user, sequence, written)` saves the KV of the first `written` tokens, or returns false: they are
/// computed again on resumption. The blocks are released afterwards.
///
/// `swap_in(user, sequence, first, end)` is called once on resumption after `swap_out` returned true. It
/// writes the KV of tokens `first` to `end`, then discards what it saved; it is also called if `first` equals
/// `end`, because everything saved is still cached. If it returns false, the copy is lost and the tokens are
/// computed again.
template <class C>
concept swapping_client =
    batch_client<C> && requires(C& client, std::uint64_t user, sequence_id sequence, std::uint64_t tokens) {
      { client.swap_out(user, sequence, tokens) } noexcept -> std::same_as<bool>;
      { client.swap_in(user, sequence, tokens, tokens) } noexcept -> std::same_as<bool>;
    };

/// Runs as many requests as the cache holds, first come first served, without knowing their final lengths.
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
/// A running request that needs a block when none is available takes it from the request that arrived last.
/// That request is preempted: its blocks are released (its cached blocks stay, evictable), and it waits at
/// the head of the queue. It resumes with all its tokens, prompt and answer; only those that neither the
/// cache nor the client has are computed again.
///
/// *No deadlock*: the request that arrived first is never preempted and always gets the blocks it needs; if
/// it cannot have them although it runs alone, it has outgrown the cache and is ended as `exhausted`. So each
/// step with work advances the first request and, by induction, every request. *No token lost*: tokens belong
/// to the client; the scheduler only counts them.
///
/// @tparam Cache   a `paged_allocator`.
/// @tparam Client  a `batch_client`, perhaps a `swapping_client`.
///
/// @par Complexity   a step is O(running requests + their new blocks), admission O(prompt). No allocation
///   after construction.
/// @par Thread safety   one caller at a time.
/// @par Waits   never. Between `completed` and the next `step` no kernel may read the cache's blocks:
///   preempted blocks are released at once.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; all else returns a `result`.
/// @par Source   continuous batching as in Orca (Yu et al., OSDI 2022), recompute and swap preemption as in
///   vLLM (Kwon et al., SOSP 2023); the progress argument is our own.
template <class Cache, class Client>
class batch_scheduler {
 public:
  batch_scheduler(Cache& cache, Client& client, scheduler_options options);

  /// Queues a request; from now on the client's `tokens(user)` must return its prompt.
  /// @return `errc::out_of_requests` when the scheduler already has `max_requests`, `errc::out_of_blocks` for
  ///   a prompt that the whole cache cannot hold together with one more token, `errc::sequence_full` for a
  ///   prompt too long for a sequence, `errc::empty_range` for one without tokens.
  result<request_ticket> submit(std::uint64_t user, const prefix_context& context = {},
                                const request_hints& hints = {}) noexcept;

  /// Grows the running requests by their new tokens, preempting from the back if blocks run short, then
  /// admits requests from the front of the queue.
  /// @return `errc::step_pending` before the last step was `completed`.
  result<scheduled_step> step() noexcept;

  /// Declares the KV of the last step's work written: full blocks become cached.
  result<void> completed() noexcept;

  /// Ends a request, running or waiting. During a step it takes effect when the step is completed.
  result<void> finish(request_ticket ticket) noexcept;

  [[nodiscard]] scheduler_stats stats() const noexcept;

  /// Proves the order of both queues, and that exactly the running requests hold sequences. Returns one
  /// sentence for each violation. O(requests); allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  struct request {
    std::uint64_t user = 0;
    std::uint64_t arrival = 0;  // its place in every queue
    prefix_context context{};
    request_hints hints{};
    sequence_id sequence{};
    std::uint64_t computed = 0;    // tokens whose KV was scheduled at any time
    std::uint64_t written = 0;     // tokens whose KV is in the sequence
    std::uint64_t saved = 0;       // tokens whose KV the client has
    std::uint32_t generation = 0;  // odd while the slot holds a request
    bool is_running = false;
    bool has_run = false;
    bool is_ending = false;
    bool is_saved = false;
  };

  /// The calls allowed now: callbacks run while the queues are half changed.
  enum class calls : std::uint8_t { all, queue, none };

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, options_.name.c_str()};
  }
  [[nodiscard]] std::uint64_t blocks_for(std::uint64_t tokens) const noexcept {
    return tokens / cache_->block_tokens() + (tokens % cache_->block_tokens() != 0 ? 1 : 0);
  }
  [[nodiscard]] result<void> check(request_ticket ticket) const noexcept;

  void end_shrunken() noexcept;
  void plan_growth() noexcept;
  bool grow_running(scheduled_step& out) noexcept;
  void give_up(std::uint32_t slot, const failure& why) noexcept;
  void preempt_last() noexcept;
  void admit_waiting(scheduled_step& out) noexcept;
  bool start(std::uint32_t slot) noexcept;
  bool bring_back(request& starting, std::span<const token_id> tokens) noexcept;
  [[nodiscard]] std::uint64_t needed_to_start(const request& next) const noexcept;
  [[nodiscard]] std::uint64_t blocks_left_to_runners() const noexcept {
    return running_count_ == 0 ? 0 : options_.watermark;
  }
  void copy(const block_copy& what) noexcept {
    if (what) client_->copy(what);
  }
  void add_work(std::uint32_t slot, std::uint64_t first, std::uint64_t count) noexcept;
  void end(std::uint32_t slot) noexcept;

  [[nodiscard]] std::uint32_t& waiting_at(std::uint32_t i) noexcept {
    return waiting_[(first_waiting_ + i) % waiting_.size()];
  }
  [[nodiscard]] std::uint32_t waiting_at(std::uint32_t i) const noexcept {
    return waiting_[(first_waiting_ + i) % waiting_.size()];
  }

  Cache* cache_;
  Client* client_;
  scheduler_options options_;
  detail::fixed_array<request> requests_;          // by slot
  detail::fixed_array<std::uint32_t> free_slots_;  // a stack
  detail::fixed_array<std::uint32_t> running_;     // slots by arrival
  detail::fixed_array<std::uint32_t> waiting_;     // a ring of slots by arrival
  detail::fixed_array<paging::growth> growths_;    // of this step
  detail::fixed_array<append_result> grown_;
  detail::fixed_array<std::uint32_t> growing_;  // their slots
  detail::fixed_array<scheduled_work> work_;
  std::uint32_t free_slot_count_;
  std::uint32_t running_count_ = 0;
  std::uint32_t first_waiting_ = 0;
  std::uint32_t waiting_count_ = 0;
  std::uint32_t growing_count_ = 0;
  std::uint32_t work_count_ = 0;
  std::uint64_t step_tokens_ = 0;  // scheduled in this step
  bool is_pending_ = false;        // a step is out and not completed
  calls calls_ = calls::all;
  std::uint64_t arrivals_ = 0;
  scheduler_stats counters_{};
};

/// Deduces its types from its arguments.
template <class Cache, class Client>
batch_scheduler(Cache&, Client&, scheduler_options) -> batch_scheduler<Cache, Client>;

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/batch_scheduler_body.hpp>
