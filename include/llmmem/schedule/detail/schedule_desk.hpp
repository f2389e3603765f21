/// @file
/// The work of a `prefetch_schedule` at each call of the program. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/schedule/detail/divergence_response.hpp>
#include <llmmem/schedule/detail/iteration_recorder.hpp>
#include <llmmem/schedule/detail/plan_runner.hpp>
#include <llmmem/schedule/detail/planned_trace.hpp>
#include <llmmem/schedule/detail/scheduled_chunks.hpp>
#include <llmmem/schedule/prefetch_types.hpp>
#include <llmmem/schedule/scheduled_lease.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/measure_links.hpp>
#include <llmmem/tiering/plan.hpp>
#include <llmmem/tiering/tiered_types.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Serves each call from the buffer, and informs the other objects: the recorder during a recording, the
/// runner during a plan, the response when the program has left the plan.
///
/// | object | knows |
/// |---|---|
/// | `scheduled_chunks` | the numbers of the chunks |
/// | `iteration_recorder` | the calls and times of this iteration |
/// | `planned_trace` | the trace, and the plan for it |
/// | `plan_runner` | the program's position in the plan, which steps are due |
/// | `divergence_response` | whether a plan that was left is dropped; how often chunks are used |
///
/// @par Complexity, Thread safety, Errors   as `prefetch_schedule`.
template <class Buffer>
class schedule_desk {
 public:
  template <access_mode Mode>
  using lease = scheduled_lease<schedule_desk, typename Buffer::template lease<Mode>, Mode>;

  schedule_desk(Buffer& buffer, prefetch_options options)
      : buffer_(buffer),
        options_(std::move(options)),
        response_(options_.divergence, options_.re_record_after) {
    if (options_.links.empty()) options_.links = measured_links();
    machine().check();
  }
  schedule_desk(const schedule_desk&) = delete;
  schedule_desk& operator=(const schedule_desk&) = delete;

  /// @name Chunks
  /// @{
  chunk_id add(chunk_handle chunk);
  void check_can_add() const;
  [[nodiscard]] result<chunk_handle> added(result<chunk_handle> chunk) {
    if (chunk) add(*chunk);
    return chunk;
  }
  result<void> remove(chunk_handle chunk);
  /// @}

  /// @name Iterations
  /// @{
  /// Begins the next iteration; state and plan determine its kind.
  void begin_iteration();
  /// @param make_plan  plans the iteration's trace: a new recording, or the trace with new times.
  template <class MakePlan>
  void end_iteration(MakePlan make_plan);
  [[nodiscard]] trace_recorder recorder();
  /// Sets a trace from another source.
  void plan_known_trace(schedule_trace trace);
  void record();
  const schedule_trace& freeze();
  /// @throws argument_error  when there is no trace.
  [[nodiscard]] const schedule_trace& trace_to_plan() const;
  const schedule_plan& set_plan(schedule_plan plan);
  void replay();
  void replay(schedule_plan plan);
  void stop() noexcept { state_ = schedule_state::idle; }
  /// @}

  /// @name Calls
  /// @{
  template <access_mode Mode, class Take>
  [[nodiscard]] result<lease<Mode>> take(chunk_handle chunk, Take take_from_buffer) {
    return take<Mode>(known(chunk), Mode, std::move(take_from_buffer));
  }
  [[nodiscard]] result<lease<access_mode::read_write>> update(chunk_handle chunk, std::uint64_t offset,
                                                              std::uint64_t count, tiering::patience wait);
  result<void> discard(chunk_handle chunk);
  /// Records that a lease has ended. Keeps an exception for the next call.
  void released(chunk_id chunk) noexcept;
  /// Records that a lease taken to read changes its chunk.
  void changed(chunk_id chunk) noexcept {
    if (state_ == schedule_state::recording) recorder_.also_changes(chunk);
  }
  void progress();
  /// @}

  [[nodiscard]] Buffer& buffer() const noexcept { return buffer_; }
  [[nodiscard]] schedule_state state() const noexcept { return state_; }
  [[nodiscard]] const planned_trace& planned() const noexcept { return planned_; }
  [[nodiscard]] schedule_machine machine() const;
  [[nodiscard]] const prefetch_stats& stats() const noexcept { return stats_; }
  [[nodiscard]] const step_records& records() const noexcept { return runner_.records(); }

 private:
  /// @param noted  the mode that the recording gives the lease.
  template <access_mode Mode, class Take>
  [[nodiscard]] result<lease<Mode>> take(chunk_id number, access_mode noted, Take take_from_buffer);
  void before(trace_call what, chunk_id chunk, access_mode mode);
  void follow(trace_call what, chunk_id chunk, access_mode mode);
  void after();
  void leave_plan();
  void expect_by_frequency() noexcept;
  [[nodiscard]] access_mode mode_at_next(chunk_id chunk) const noexcept;
  /// Returns whether the desk times the iterations that follow the plan.
  [[nodiscard]] bool is_timing() const noexcept { return stats_.replans < options_.replans; }
  void begin_timing() {
    recorder_.begin_timing(is_timing() ? planned_.trace().events().size() : 0, buffer_.now_ns());
  }
  void rethrow() {
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }
  [[nodiscard]] chunk_id known(chunk_handle chunk) const;
  /// Whether an iteration that followed the plan has ended and the next has not begun, and whether there was
  /// a call since.
  enum class between : std::uint8_t { no, yes, used };

  [[nodiscard]] std::vector<link_model> measured_links() const {
    auto links = measure_links(buffer_);
    if (!links) {
      refuse("prefetch_options::links is empty, and they cannot be measured (" + links.error().message() +
             "); give the link below each tier, or space for two more chunks");
    }
    return std::move(*links);
  }
  [[nodiscard]] std::uint64_t rounded_bytes(chunk_handle chunk) const {
    return buffer_.rounded_bytes(buffer_.bytes(chunk).value());
  }
  [[nodiscard]] numbered_buffer<Buffer> target() const noexcept { return {buffer_, chunks_}; }
  [[noreturn]] void refuse(const std::string& why) const { throw argument_error(options_.name + ": " + why); }

  Buffer& buffer_;
  prefetch_options options_;
  schedule_state state_ = schedule_state::idle;
  between between_ = between::no;
  scheduled_chunks chunks_;
  iteration_recorder recorder_;
  planned_trace planned_;
  plan_runner runner_;
  divergence_response response_;
  std::optional<chunk_id> refused_;  // chunk whose last lease was refused: the program may try again
  std::exception_ptr thrown_;        // thrown while a lease ended
  prefetch_stats stats_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/schedule/detail/schedule_desk_body.hpp>
