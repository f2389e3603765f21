/// @file
/// `prefetch_schedule`: learns what one iteration of a program accesses, plans its transfers, and executes
/// the plan on a `tiered_buffer` while the program runs.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/result.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/cursor.hpp>
#include <llmmem/schedule/detail/schedule_desk.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/prefetch_types.hpp>
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
#include <utility>

namespace llmmem {
inline namespace v0 {

/// A layer between a program and its buffer. The program marks its iterations and takes its leases here:
///
///     prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 2'000'000'000}}});
///     for (const chunk_handle each : chunks) schedule.add(each);
///     for (int step = 0; step < steps; ++step) {
///       schedule.begin_iteration();     // the first is recorded and planned, the others follow the plan
///       auto weights = schedule.read(layer_weights).value();
///       ...
///       schedule.end_iteration();
///     }
///     schedule.plan().steady.regret();  // stall_ns and bytes above the lower bounds
///
/// or calls `record`, `freeze`, `make_plan` and `replay` itself. A program that knows its calls beforehand
/// skips the recording, and its first iteration follows a plan, too:
///
///     trace_recorder known = schedule.recorder();
///     known.acquire(schedule.add(layer_weights), access_mode::read);      // and so on, with guessed times
///     schedule.plan_known_trace(known.freeze());
///
/// The plan is data: print it (schedule/plan_text.hpp), draw it (schedule/timeline.hpp), run it in virtual
/// time (`simulate`), replace it with your own (`replay(plan)`). The schedule executes a step when the
/// program reaches its event, regardless of the clock: a program that is slower or faster than recorded keeps
/// the plan's order. A step that cannot begin yet waits for its turn. If its event comes first, the lease
/// that needs the chunk brings it up.
///
/// **A wrong plan costs time, never data.** Every lease is the buffer's own. When the program leaves the
/// recorded calls, `on_divergence` determines the response.
///
/// Give tier 0 `min_eviction`: the schedule informs the buffer of every chunk's next use, so an eviction
/// outside the plan takes the chunk whose next use is last.
///
/// A chunk has at most one lease at a time here, even for reading: the schedule refuses a recording with two
/// leases of one chunk.
///
/// **Tensors** work over a schedule as over a buffer: the schedule knows their chunks from the beginning, and
/// every lease of a tensor is the lease of its chunk, or a share of that lease.
///
///     prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 2'000'000'000}}});
///     tiered_tensors weights(schedule, map_to_chunks(sizes));
///
/// @tparam Buffer   a `tiered_buffer`.
/// @tparam Planner  a `schedule_planner`.
/// @par Complexity      a call O(1) plus the steps of its event, in addition to the buffer's own cost.
///                      Recording and planning allocate; replaying does not.
/// @par Thread safety   as the buffer: one thread at a time.
/// @par Errors          the constructor, `add`, `freeze`, `make_plan` and `replay` throw `argument_error`,
///                      `add` and `record` also `handle_error` for a chunk that no longer exists; leases are
///                      refused as by the buffer. If a space's copies throw when a lease ends, the next call
///                      throws that.
template <class Buffer, schedule_planner Planner = schedule::next_use>
class prefetch_schedule {
  using desk_type = detail::schedule_desk<Buffer>;

 public:
  using top_range = typename Buffer::top_range;
  static constexpr std::size_t tiers = Buffer::tiers;
  static constexpr bool persists_chunks = Buffer::persists_chunks;
  [[deprecated("its name is persists_chunks")]] static constexpr bool keeps_chunks = persists_chunks;

  /// A lease of the buffer that reports its end to the schedule: see `scheduled_lease`.
  template <access_mode Mode>
  using lease = typename desk_type::template lease<Mode>;
  using read_lease = lease<access_mode::read>;
  using write_lease = lease<access_mode::write>;
  using update_lease = lease<access_mode::read_write>;

  /// @param buffer  outlives the schedule, and gives no leases to other callers while the schedule records or
  ///                replays.
  prefetch_schedule(Buffer& buffer, prefetch_options options, Planner planner = {})
      : desk_(buffer, std::move(options)), planner_(std::move(planner)) {}
  prefetch_schedule(const prefetch_schedule&) = delete;
  prefetch_schedule& operator=(const prefetch_schedule&) = delete;

  /// @name Chunks
  /// @{
  /// Adds a chunk of the buffer. Numbers count up from 0; a known chunk keeps its number. Call it before the
  /// first recording, or after a `remove`.
  chunk_id add(chunk_handle chunk) { return desk_.add(chunk); }
  /// The buffer's calls, which also add the chunk to the schedule. @throws as `add`.
  result<chunk_handle> create(std::uint64_t bytes) {
    desk_.check_can_add();
    return desk_.added(buffer().create(bytes));
  }
  result<chunk_handle> create(std::uint64_t bytes, const chunk_key& key)
    requires(persists_chunks)
  {
    desk_.check_can_add();
    return desk_.added(buffer().create(bytes, key));
  }
  result<chunk_handle> find(const chunk_key& key)
    requires(persists_chunks)
  {
    return desk_.added(buffer().find(key));
  }
  /// Ends a chunk of the buffer. If the schedule knows it, the schedule drops its trace and plan: it records
  /// the next iteration, and the numbers of later chunks decrease by one.
  result<void> remove(chunk_handle chunk) { return desk_.remove(chunk); }
  [[nodiscard]] result<std::uint64_t> bytes(chunk_handle chunk) const noexcept {
    return buffer().bytes(chunk);
  }
  [[nodiscard]] result<std::size_t> tier_of(chunk_handle chunk) const noexcept {
    return buffer().tier_of(chunk);
  }
  /// @}

  /// @name Iterations
  /// @{
  /// Records if there is no plan; otherwise replays from the beginning, regardless of where the program left
  /// the previous iteration. After `on_divergence::fall_back` has dropped the plan, it does nothing; after
  /// `by_frequency`, it counts the chunks that the previous iteration used: O(chunks).
  void begin_iteration() { desk_.begin_iteration(); }
  /// Freezes and plans the recording, unless it is empty. With `prefetch_options::replans`, plans again with
  /// the measured times. From here to the next `begin_iteration` the program may use any chunks, for example
  /// for an evaluation: the plan does not cover these calls, and they do not end it.
  void end_iteration() {
    desk_.end_iteration([this] { make_plan(); });
  }

  /// Returns a recorder that has the added chunks, by their numbers, so that the caller can write down the
  /// calls of an iteration.
  [[nodiscard]] trace_recorder recorder() { return desk_.recorder(); }
  /// Plans a trace that is known beforehand, as if it had been recorded. Its times may be guesses if
  /// `prefetch_options::replans` measures them.
  /// @throws argument_error  when its chunks are not those of `recorder()`, or while recording.
  const schedule_plan& plan_known_trace(schedule_trace trace) {
    desk_.plan_known_trace(std::move(trace));
    return make_plan();
  }
  [[deprecated("call plan_known_trace()")]] const schedule_plan& foresee(schedule_trace trace) {
    return plan_known_trace(std::move(trace));
  }

  void record() { desk_.record(); }
  /// Ends the recording. @throws argument_error that names the impossible event, for example a lease that is
  /// still held.
  const schedule_trace& freeze() { return desk_.freeze(); }
  /// Plans the frozen trace for the buffer's tiers.
  const schedule_plan& make_plan() {
    return desk_.set_plan(planner_(desk_.trace_to_plan(), desk_.machine()));
  }
  /// Follows the plan from the beginning of an iteration.
  void replay() { desk_.replay(); }
  /// The same with another plan. @throws argument_error when the plan was made for another trace.
  void replay(schedule_plan plan) { desk_.replay(std::move(plan)); }
  /// Stops following and recording.
  void stop() noexcept { desk_.stop(); }
  /// @}

  /// @name Calls   as the buffer's, for chunks that were added
  /// @{
  result<read_lease> read(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return desk_.template take<access_mode::read>(chunk, [&] { return buffer().read(chunk, wait); });
  }
  result<write_lease> write(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return desk_.template take<access_mode::write>(chunk, [&] { return buffer().write(chunk, wait); });
  }
  result<update_lease> update(chunk_handle chunk, tiering::patience wait = tiering::wait_complete) {
    return desk_.template take<access_mode::read_write>(chunk, [&] { return buffer().update(chunk, wait); });
  }
  /// With `count` = 0, the lease only reads until `also_changes`.
  result<update_lease> update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                              tiering::patience wait = tiering::wait_complete) {
    return desk_.update(chunk, offset, count, wait);
  }
  result<void> discard(chunk_handle chunk) { return desk_.discard(chunk); }
  /// @}

  /// @name Movement   the buffer's, in addition to every plan
  /// @{
  /// Does nothing while the schedule follows a plan, because the plan knows more. Otherwise passes the call
  /// to the buffer, for facts that no plan can know: experts that were just chosen, for example.
  result<void> prefetch(chunk_handle chunk) {
    return state() == schedule_state::replaying ? result<void>{} : buffer().prefetch(chunk);
  }
  result<void> evict(chunk_handle chunk) { return buffer().evict(chunk); }
  result<void> flush(chunk_handle chunk) { return buffer().flush(chunk); }
  result<void> persist()
    requires(persists_chunks)
  {
    return buffer().persist();
  }
  /// @}

  /// Begins the steps that can begin now. It uses memory freed while the program computes, which otherwise
  /// the next call would use. Never waits.
  void progress() { desk_.progress(); }

  [[nodiscard]] schedule_state state() const noexcept { return desk_.state(); }
  [[nodiscard]] bool has_plan() const noexcept { return desk_.planned().has_plan(); }
  /// @pre `has_plan()`.
  [[nodiscard]] const schedule_plan& plan() const noexcept { return desk_.planned().plan(); }
  [[nodiscard]] const schedule_trace& trace() const noexcept { return desk_.planned().trace(); }
  [[nodiscard]] schedule_machine machine() const { return desk_.machine(); }
  /// Returns the plan in virtual time. @pre `has_plan()`.
  [[nodiscard]] schedule::simulation simulate(std::size_t iterations = 2,
                                              timeline_detail detail = timeline_detail::none) const {
    return llmmem::simulate(trace(), plan(), iterations, detail);
  }
  [[nodiscard]] const prefetch_stats& stats() const noexcept { return desk_.stats(); }
  /// Returns which steps of `plan()` were late, by how much and why, and which had no effect: one record for
  /// each step. Each `replay` begins new records, and so does each new plan.
  [[nodiscard]] const step_records& records() const noexcept { return desk_.records(); }
  /// Returns the buffer below: for a checkpoint's views, and to call `audit`. Lease its chunks only through
  /// the schedule.
  [[nodiscard]] Buffer& buffer() const noexcept { return desk_.buffer(); }
  /// Returns the space of the buffer's tier 0.
  [[nodiscard]] auto& first_space() const noexcept { return buffer().first_space(); }

 private:
  desk_type desk_;
  Planner planner_;
};

}  // namespace v0
}  // namespace llmmem
