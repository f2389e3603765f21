/// @file
/// `prefetch_schedule`: learns what one iteration of a program touches, plans its transfers, and carries the
/// plan out on a `tiered_buffer` while the program runs on.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/simulate.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/schedule/use_forecast.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/chunk_key.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// How a schedule is set up.
struct prefetch_options {
  /// The links between the buffer's tiers, as `schedule_machine` has them; its budgets are the buffer's. One
  /// for each pair of neighbours, the one below tier 0 first: three tiers have two.
  std::vector<link_model> links{};
  /// Which link each pair has, where two share one; empty: each its own.
  std::vector<std::uint32_t> edges{};
  on_divergence divergence = on_divergence::repair;
  schedule_cursor::options follow{};
  /// With `on_divergence::repair`: iterations in a row that left the plan before another one is recorded.
  std::uint32_t re_record_after = 3;
  /// So many iterations that kept to the plan are timed, and the plan is made again with their times: the
  /// recording is of an iteration that waited for every chunk, beside caches that were cold. Planning takes
  /// tens of milliseconds for some hundred events.
  std::uint32_t replans = 0;
  std::string name = "prefetch_schedule";  ///< for error texts
};

/// What a schedule is doing.
enum class schedule_state : std::uint8_t {
  idle,       ///< calls go to the buffer, and nothing is noted
  recording,  ///< they are noted, too
  replaying,  ///< the plan's steps are carried out beside them
};

/// Counters of a schedule.
struct prefetch_stats {
  std::uint64_t on_plan = 0;     ///< calls that were the next event
  std::uint64_t skipped = 0;     ///< calls that were a later event
  std::uint64_t inserted = 0;    ///< calls that are not in the trace there
  std::uint64_t diverged = 0;    ///< times the plan was given up
  std::uint64_t steps = 0;       ///< of plans, carried out; no `useless` or `late` ones among them
  std::uint64_t useless = 0;     ///< steps whose effect was there already (a drop of what was discarded), or
                                 ///< could no longer be had
  std::uint64_t late = 0;        ///< steps whose event came before they could begin: left to the lease
  std::uint64_t recordings = 0;  ///< iterations recorded and planned
  std::uint64_t replans = 0;     ///< plans made again with the times of iterations that followed one
};

/// Stands between a program and its buffer. The program brackets its iterations and takes its leases here:
///
///     prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 2'000'000'000}}});
///     for (const chunk_handle each : chunks) schedule.add(each);
///     for (int step = 0; step < steps; ++step) {
///       schedule.begin_iteration();     // the first is recorded and planned, the others follow the plan
///       auto weights = schedule.read(layer_weights).value();
///       ...
///       schedule.end_iteration();
///     }
///     schedule.plan().steady.regret();  // stall_ns and bytes above what no plan could beat
///
/// or says by itself when to `record`, `freeze`, `make_plan` and `replay`. A program that knows its calls
/// beforehand need not record:
///
///     trace_recorder known = schedule.recorder();
///     known.acquire(schedule.add(layer_weights), access_mode::read);      // and so on, with guessed times
///     schedule.foresee(known.freeze());                                   // then the first iteration is
///     planned
///
/// The plan is data: print it (schedule/plan_text.hpp), draw it (schedule/timeline.hpp), run it in virtual
/// time (`simulate`), replace it by one of your own (`replay(plan)`). A step is carried out when the program
/// reaches its event, not when a clock says so: a program that is slower or faster than recorded keeps the
/// plan's order. A step that cannot begin yet waits for its turn; one whose event has come is left to the
/// lease that needs it.
///
/// **A wrong plan costs time, never data.** Every lease is the buffer's own. When the program does something
/// else than was recorded, `on_divergence` says what becomes of the plan.
///
/// Give tier 0 `min_eviction`: the schedule tells the buffer every chunk's next use, so that what leaves
/// unplanned is what is used last.
///
/// A chunk is leased once at a time here, also for reading: a recording with two leases of one is refused.
///
/// **Tensors** stand on a schedule as on a buffer: their chunks are known here from the beginning, and every
/// lease of a tensor is that of its chunk, or a share in it.
///
///     prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 2'000'000'000}}});
///     tiered_tensors weights(schedule, map_to_chunks(sizes));
///
/// @tparam Buffer   a `tiered_buffer`.
/// @tparam Planner  a `schedule_planner`.
/// @par Complexity      a call O(1) and the steps of its event, beside the buffer's own. Recording and
///                      planning allocate; replaying does not.
/// @par Thread safety   as the buffer: one thread at a time.
/// @par Errors          the constructor, `add`, `freeze`, `make_plan` and `replay` throw `argument_error`,
///                      `add` and `record` also `handle_error` for a chunk that is gone; leases are refused
///                      as by the buffer. What a space's copies throw when a lease ends is thrown by the
///                      next call.
template <class Buffer, schedule_planner Planner = next_use>
class prefetch_schedule {
 public:
  using top_range = typename Buffer::top_range;
  static constexpr std::size_t tiers = Buffer::tiers;
  static constexpr bool keeps_chunks = Buffer::keeps_chunks;

  /// A lease of the buffer whose end the schedule learns of. The schedule outlives it.
  template <access_mode Mode>
  class lease {
   public:
    using buffer_lease = typename Buffer::template lease<Mode>;

    lease() noexcept = default;
    lease(lease&& other) noexcept
        : schedule_(std::exchange(other.schedule_, nullptr)),
          chunk_(other.chunk_),
          held_(std::move(other.held_)) {}
    lease& operator=(lease&& other) noexcept {
      if (this != &other) {
        end();
        schedule_ = std::exchange(other.schedule_, nullptr);
        chunk_ = other.chunk_;
        held_ = std::move(other.held_);
      }
      return *this;
    }
    ~lease() { end(); }

    /// Ends it now.
    void end() noexcept {
      held_.end();
      if (schedule_ != nullptr) std::exchange(schedule_, nullptr)->released(chunk_);
    }
    [[nodiscard]] auto span() const noexcept
      requires requires(const buffer_lease& held) { held.span(); }
    {
      return held_.span();
    }
    [[nodiscard]] auto range() const noexcept { return held_.range(); }
    [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(held_); }
    /// As the buffer's. @pre it has not ended.
    result<void> also_changes(std::uint64_t offset, std::uint64_t count) noexcept
      requires(Mode == access_mode::read_write)
    {
      const result<void> noted = held_.also_changes(offset, count);
      if (noted && count != 0) schedule_->changed(chunk_);
      return noted;
    }

   private:
    friend class prefetch_schedule;
    lease(prefetch_schedule& schedule, chunk_id chunk, buffer_lease held) noexcept
        : schedule_(&schedule), chunk_(chunk), held_(std::move(held)) {}

    prefetch_schedule* schedule_ = nullptr;
    chunk_id chunk_{};
    buffer_lease held_;
  };
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// @param buffer  outlives the schedule, and is given leases by nothing else while it records or replays.
  prefetch_schedule(Buffer& buffer, prefetch_options options, Planner planner = {})
      : buffer_(&buffer), options_(std::move(options)), planner_(std::move(planner)) {
    if (options_.links.empty()) {
      throw argument_error(options_.name +
                           ": prefetch_options::links is empty; give the link below each tier");
    }
    machine().check();
  }
  prefetch_schedule(const prefetch_schedule&) = delete;
  prefetch_schedule& operator=(const prefetch_schedule&) = delete;

  /// @name Chunks
  /// @{
  /// Makes a chunk of the buffer known. Its number counts up from 0; one that is known keeps its own. Before
  /// the first recording, or after a `remove`.
  chunk_id add(chunk_handle chunk);
  /// The buffer's calls, for chunks that are known here from then on. @throws as `add`.
  result<chunk_handle> create(std::uint64_t bytes) {
    check_can_add();
    return added(buffer_->create(bytes));
  }
  result<chunk_handle> create(std::uint64_t bytes, const chunk_key& key)
    requires(keeps_chunks)
  {
    check_can_add();
    return added(buffer_->create(bytes, key));
  }
  result<chunk_handle> find(const chunk_key& key)
    requires(keeps_chunks)
  {
    return added(buffer_->find(key));
  }
  /// Ends a chunk of the buffer. One that is known here takes trace and plan with it: the next iteration is
  /// recorded, and the numbers of those behind it count down.
  result<void> remove(chunk_handle chunk);
  [[nodiscard]] result<std::uint64_t> bytes(chunk_handle chunk) const noexcept {
    return buffer_->bytes(chunk);
  }
  [[nodiscard]] result<std::size_t> tier_of(chunk_handle chunk) const noexcept {
    return buffer_->tier_of(chunk);
  }
  /// @}

  /// @name Iterations
  /// @{
  /// Records where there is no plan, or no longer; else replays, from the beginning wherever the iteration
  /// before was left. After `on_divergence::fall_back` had to, no change; after `by_frequency`, what the one
  /// before has used counts: O(chunks).
  void begin_iteration();
  /// What was recorded is frozen and planned, unless it was nothing. With `prefetch_options::replans`, so is
  /// what was timed.
  void end_iteration();

  /// Knows the chunks that were added, by their numbers: to write down what an iteration will do.
  [[nodiscard]] trace_recorder recorder();
  /// Plans a trace that is known beforehand, as if it had been recorded. Its times may be guesses, if
  /// `prefetch_options::replans` has them measured.
  /// @throws argument_error  when its chunks are not those of `recorder()`, or while recording.
  const schedule_plan& foresee(schedule_trace trace);

  void record();
  /// Ends the recording. @throws argument_error  naming the event that cannot be, a lease that is still held
  /// say.
  const schedule_trace& freeze();
  /// Plans what was frozen for the buffer's tiers.
  const schedule_plan& make_plan();
  /// Follows the plan from the beginning of an iteration on.
  void replay();
  /// The same with a plan from elsewhere. @throws argument_error  when it was made for another trace.
  void replay(schedule_plan plan);
  /// Follows nothing and notes nothing.
  void stop() noexcept { state_ = schedule_state::idle; }
  /// @}

  /// @name Calls   as those of the buffer, for chunks that were added
  /// @{
  result<read_lease> read(chunk_handle chunk, patience wait = wait_complete) {
    return take<access_mode::read>(chunk, [&] { return buffer_->read(chunk, wait); });
  }
  result<write_lease> write(chunk_handle chunk, patience wait = wait_complete) {
    return take<access_mode::write>(chunk, [&] { return buffer_->write(chunk, wait); });
  }
  result<update_lease> update(chunk_handle chunk, patience wait = wait_complete) {
    return take<access_mode::read_write>(chunk, [&] { return buffer_->update(chunk, wait); });
  }
  /// Of no bytes, it is one to read until `also_changes`.
  result<update_lease> update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                              patience wait = wait_complete);
  result<void> discard(chunk_handle chunk);
  /// @}

  /// @name Movement   the buffer's, beside every plan
  /// @{
  /// No change while a plan is followed, which knows better. What it cannot know (experts that were just
  /// chosen, say), tell the buffer.
  result<void> prefetch(chunk_handle chunk) {
    return state_ == schedule_state::replaying ? result<void>{} : buffer_->prefetch(chunk);
  }
  result<void> evict(chunk_handle chunk) { return buffer_->evict(chunk); }
  result<void> flush(chunk_handle chunk) { return buffer_->flush(chunk); }
  result<void> persist()
    requires(keeps_chunks)
  {
    return buffer_->persist();
  }
  /// @}

  /// Begins what can begin by now: room comes free while the program computes, and nobody sees it before the
  /// next call. Never waits.
  void progress() {
    rethrow();
    if (state_ == schedule_state::replaying) {
      try_pending();
    } else {
      buffer_->progress();
    }
  }

  [[nodiscard]] schedule_state state() const noexcept { return state_; }
  [[nodiscard]] bool has_plan() const noexcept { return plan_.has_value(); }
  /// @pre `has_plan()`.
  [[nodiscard]] const schedule_plan& plan() const noexcept { return *plan_; }
  [[nodiscard]] const schedule_trace& trace() const noexcept { return *trace_; }
  [[nodiscard]] schedule_machine machine() const;
  /// The plan in virtual time. @pre `has_plan()`.
  [[nodiscard]] simulation simulate(std::size_t iterations = 2,
                                    timeline_detail detail = timeline_detail::none) const {
    return llmmem::simulate(*trace_, *plan_, iterations, detail);
  }
  [[nodiscard]] const prefetch_stats& stats() const noexcept { return stats_; }

 private:
  template <access_mode Mode, class Take>
  auto take(chunk_handle chunk, Take take_from_buffer) -> result<lease<Mode>> {
    const chunk_id number = known(chunk);
    return take<Mode>(number, Mode, std::move(take_from_buffer));
  }
  /// @param noted  as what the lease is recorded.
  template <access_mode Mode, class Take>
  auto take(chunk_id number, access_mode noted, Take take_from_buffer) -> result<lease<Mode>>;
  void released(chunk_id chunk) noexcept;
  void changed(chunk_id chunk) noexcept {
    if (state_ == schedule_state::recording) recorder_.also_changes(chunk);
  }
  void check_can_add() const;
  [[nodiscard]] result<chunk_handle> added(result<chunk_handle> chunk) {
    if (chunk) add(*chunk);
    return chunk;
  }
  void close_gaps();
  [[nodiscard]] access_mode mode_at_next(chunk_id chunk) const noexcept;
  void rethrow() {
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }
  [[nodiscard]] chunk_id known(chunk_handle chunk) const;

  void before(trace_call what, chunk_id chunk, access_mode mode);
  void after();
  void reach(std::uint32_t event);
  void issue(std::uint32_t event, plan_moment until);
  void try_pending();
  void give_up_late(std::uint32_t event);
  void begin_plan_iteration(const plan_iteration& iteration) noexcept;
  void note_divergence();
  [[nodiscard]] bool is_timing() const noexcept { return stats_.replans < options_.replans; }
  void plan_anew();
  void count_use(chunk_id chunk) noexcept;
  void expect_by_frequency() noexcept;

  Buffer* buffer_;
  prefetch_options options_;
  Planner planner_;
  std::vector<chunk_handle> chunks_;
  std::vector<std::uint32_t> number_of_slot_;
  bool has_gaps_ = false;  // in `chunks_`, where one was removed

  schedule_state state_ = schedule_state::idle;
  bool fell_back_ = false;
  std::optional<use_forecast> forecast_;  // with `on_divergence::by_frequency`
  std::uint32_t left_in_a_row_ = 0;       // iterations that left the plan
  std::optional<chunk_id> refused_;       // chunk whose last lease was refused: the program may ask again
  std::exception_ptr thrown_;             // while a lease ended
  trace_recorder recorder_;
  std::uint64_t last_ns_ = 0;
  std::vector<std::uint64_t> timed_ns_;  // computing before each event of the iteration that is followed
  std::optional<schedule_trace> trace_;
  std::optional<schedule_plan> plan_;
  std::vector<std::uint64_t> next_use_;  // by event of an acquire: events until the chunk's next one

  std::optional<schedule_cursor> cursor_;
  std::uint64_t iterations_done_ = 0;
  const plan_iteration* following_ = nullptr;
  std::size_t next_step_ = 0;
  std::vector<plan_step> pending_;  // begun in this order
  std::uint32_t at_ = 0;            // event of the call under way
  prefetch_stats stats_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/schedule/detail/prefetch_schedule_body.hpp>
