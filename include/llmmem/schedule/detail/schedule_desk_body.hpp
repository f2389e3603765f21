/// @file
/// Iterations and calls of `schedule_desk`.
#pragma once

#include <llmmem/schedule/detail/schedule_desk.hpp>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Buffer>
void schedule_desk<Buffer>::check_can_add() const {
  if (state_ == schedule_state::idle && !planned_.has_trace()) return;
  refuse("a chunk was added after recording began; add all of them first");
}

template <class Buffer>
chunk_id schedule_desk<Buffer>::add(chunk_handle chunk) {
  buffer_.bytes(chunk).value();
  if (const std::optional<chunk_id> number = chunks_.find(chunk)) return *number;
  check_can_add();
  return chunks_.add(chunk);
}

template <class Buffer>
result<void> schedule_desk<Buffer>::remove(chunk_handle chunk) {
  const result<void> gone = buffer_.remove(chunk);
  if (!gone || !chunks_.remove(chunk)) return gone;
  state_ = schedule_state::idle;
  planned_.clear();
  runner_.forget_pending();
  response_.forget();
  refused_.reset();
  return gone;
}

template <class Buffer>
chunk_id schedule_desk<Buffer>::known(chunk_handle chunk) const {
  if (const std::optional<chunk_id> number = chunks_.find(chunk)) return *number;
  refuse("chunk " + std::to_string(chunk.slot) + " is not known here; add() it before the first iteration");
}

template <class Buffer>
schedule_machine schedule_desk<Buffer>::machine() const {
  schedule_machine made{.budgets = {}, .links = options_.links, .edges = options_.edges};
  const auto stats = buffer_.stats();
  for (std::size_t i = 0; i + 1 < Buffer::tiers; ++i)
    made.budgets.push_back(stats.tiers[i].budget);
  return made;
}

template <class Buffer>
void schedule_desk<Buffer>::begin_iteration() {
  rethrow();
  refused_.reset();
  const bool was_left = std::exchange(between_, between::no) == between::used;
  response_.begin_iteration();
  if (response_.fell_back()) return expect_by_frequency();
  if (!planned_.has_plan()) return record();
  if (state_ != schedule_state::replaying) return replay();
  begin_timing();
  if (runner_.is_at_beginning() && !was_left) return;
  runner_.restart();  // calls between may have moved chunks that the plan had begun to bring
  runner_.begin_due(target(), stats_);
}

template <class Buffer>
template <class MakePlan>
void schedule_desk<Buffer>::end_iteration(MakePlan make_plan) {
  rethrow();
  if (state_ == schedule_state::replaying && runner_.is_at_beginning()) between_ = between::yes;
  if (state_ == schedule_state::replaying && is_timing()) {
    if (!runner_.is_at_beginning()) return;
    auto timed = recorder_.retimed(planned_.trace(), buffer_.now_ns());
    if (!timed) return;
    state_ = schedule_state::idle;  // the next iteration begins the new plan
    planned_.set_trace(std::move(*timed));
    make_plan();
    ++stats_.replans;
    return;
  }
  if (state_ != schedule_state::recording) return;
  if (recorder_.empty()) return stop();
  freeze();
  make_plan();
}

template <class Buffer>
trace_recorder schedule_desk<Buffer>::recorder() {
  chunks_.close_gaps();
  trace_recorder knowing;
  for (const chunk_handle each : chunks_.all())
    knowing.add_chunk(rounded_bytes(each));
  return knowing;
}

template <class Buffer>
void schedule_desk<Buffer>::plan_known_trace(schedule_trace trace) {
  if (state_ == schedule_state::recording) {
    refuse("plan_known_trace() is not possible while a trace is recorded; freeze() that first");
  }
  chunks_.close_gaps();
  const auto sizes = trace.sizes();
  const auto chunks = chunks_.all();
  bool same = sizes.size() == chunks.size();
  for (std::size_t i = 0; same && i < sizes.size(); ++i)
    same = sizes[i] == rounded_bytes(chunks[i]);
  if (!same) {
    refuse("a trace of " + std::to_string(sizes.size()) +
           " chunks was given to plan_known_trace(), but its chunks are not the " +
           std::to_string(chunks.size()) + " that were added; make it with recorder()");
  }
  response_.know_chunks(chunks.size());
  state_ = schedule_state::idle;
  planned_.set_trace(std::move(trace));
}

template <class Buffer>
void schedule_desk<Buffer>::record() {
  trace_recorder knowing = recorder();
  response_.know_chunks(chunks_.size());
  planned_.drop_plan();
  recorder_.begin_recording(std::move(knowing), buffer_.now_ns());
  state_ = schedule_state::recording;
}

template <class Buffer>
const schedule_trace& schedule_desk<Buffer>::freeze() {
  if (state_ != schedule_state::recording) refuse("nothing is being recorded; call record() first");
  state_ = schedule_state::idle;
  planned_.set_trace(recorder_.freeze(buffer_.now_ns()));
  ++stats_.recordings;
  return planned_.trace();
}

template <class Buffer>
const schedule_trace& schedule_desk<Buffer>::trace_to_plan() const {
  if (!planned_.has_trace()) refuse("there is no trace; record and freeze one first");
  return planned_.trace();
}

template <class Buffer>
const schedule_plan& schedule_desk<Buffer>::set_plan(schedule_plan plan) {
  planned_.set_plan(std::move(plan));
  return planned_.plan();
}

template <class Buffer>
void schedule_desk<Buffer>::replay(schedule_plan plan) {
  if (!planned_.fits(plan)) refuse("the plan was made for another trace; plan the one that is frozen");
  planned_.set_plan(std::move(plan));
  replay();
}

template <class Buffer>
void schedule_desk<Buffer>::replay() {
  if (!planned_.has_plan()) refuse("there is no plan; call make_plan() first");
  runner_.start(planned_.trace(), planned_.plan(), options_.follow);
  state_ = schedule_state::replaying;
  between_ = between::no;
  begin_timing();
  runner_.begin_due(target(), stats_);
}

template <class Buffer>
void schedule_desk<Buffer>::leave_plan() {
  ++stats_.diverged;
  state_ = schedule_state::idle;
  runner_.forget_pending();
  const bool drop = response_.plan_left();
  if (response_.fell_back()) expect_by_frequency();  // the plan's expectations no longer hold
  if (drop) planned_.drop_plan();
}

template <class Buffer>
void schedule_desk<Buffer>::expect_by_frequency() noexcept {
  if (!response_.has_forecast()) return;
  for (std::uint32_t i = 0; i < chunks_.size(); ++i)
    target().expect(chunk_id{i}, response_.next_use(chunk_id{i}));
}

template <class Buffer>
void schedule_desk<Buffer>::before(trace_call what, chunk_id chunk, access_mode mode) {
  rethrow();
  if (state_ == schedule_state::recording) recorder_.note_call(what, chunk, buffer_.now_ns());
  if (state_ != schedule_state::replaying) return;
  if (between_ != between::no) {
    between_ = between::used;
    ++stats_.between;
    return;
  }
  if (what == trace_call::acquire && std::exchange(refused_, std::nullopt) == chunk) return;
  follow(what, chunk, mode);
}

template <class Buffer>
void schedule_desk<Buffer>::follow(trace_call what, chunk_id chunk, access_mode mode) {
  const std::uint64_t computed = is_timing() ? recorder_.computed(buffer_.now_ns()) : 0;
  const cursor_step step = runner_.call(what, chunk, mode);
  switch (step.verdict) {
    case cursor_verdict::diverged:
      return leave_plan();
    case cursor_verdict::inserted:
      ++stats_.inserted;
      return;
    case cursor_verdict::on_plan:
      ++stats_.on_plan;
      if (is_timing()) recorder_.note_time(step.index, computed);
      break;
    case cursor_verdict::skipped:
      ++stats_.skipped;
      break;
  }
  if (runner_.has_wrapped()) after();
  runner_.reach(step.index, target(), stats_);
  if (what == trace_call::acquire) {
    target().expect(chunk, runner_.position_of(step.index) + planned_.next_use(step.index));
  }
}

/// Ends a call that was served.
template <class Buffer>
void schedule_desk<Buffer>::after() {
  if (state_ == schedule_state::recording) recorder_.call_ended(buffer_.now_ns());
  if (state_ != schedule_state::replaying || between_ != between::no) return;
  if (runner_.call_ended(target(), stats_)) response_.plan_kept();
  if (is_timing()) recorder_.call_ended(buffer_.now_ns());
}

template <class Buffer>
template <access_mode Mode, class Take>
auto schedule_desk<Buffer>::take(chunk_id number, access_mode noted, Take take_from_buffer)
    -> result<lease<Mode>> {
  before(trace_call::acquire, number, noted);
  // If a step of the plan fetches the chunk, the lease waits for as long as the step is late.
  const bool is_expected = state_ == schedule_state::replaying && runner_.is_expected(number);
  const bool waits = is_expected && !target().is_above(number);
  const std::uint64_t came = waits ? buffer_.now_ns() : 0;
  auto had = take_from_buffer();
  if (had && is_expected) {
    const std::uint64_t now = waits ? buffer_.now_ns() : 0;
    runner_.leased(number, now - came, now);
  }
  if (had) {
    if (state_ == schedule_state::recording) recorder_.granted(number, noted);
    response_.used(number);
    if (response_.fell_back() && response_.has_forecast()) {
      target().expect(number, response_.next_use(number));
    }
  } else {
    refused_ = number;
  }
  after();
  if (!had) return had.error();
  return lease<Mode>(*this, number, std::move(*had));
}

/// Returns the recorded mode of the next event if that is an acquire of `chunk`: for leases that have not
/// named their bytes yet.
template <class Buffer>
access_mode schedule_desk<Buffer>::mode_at_next(chunk_id chunk) const noexcept {
  if (state_ != schedule_state::replaying) return access_mode::read;
  const trace_event* next = runner_.next_event();
  if (next == nullptr) return access_mode::read;
  const bool is_it = next->call == trace_call::acquire && next->chunk == chunk && tiering::reads(next->mode);
  return is_it ? next->mode : access_mode::read;
}

template <class Buffer>
auto schedule_desk<Buffer>::update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                                   tiering::patience wait) -> result<lease<access_mode::read_write>> {
  const chunk_id number = known(chunk);
  const access_mode noted = count == 0 ? mode_at_next(number) : access_mode::read_write;
  return take<access_mode::read_write>(number, noted,
                                       [&] { return buffer_.update(chunk, offset, count, wait); });
}

template <class Buffer>
void schedule_desk<Buffer>::released(chunk_id chunk) noexcept {
  try {
    before(trace_call::release, chunk, access_mode::read);
    after();
  } catch (...) {
    thrown_ = std::current_exception();
  }
}

template <class Buffer>
result<void> schedule_desk<Buffer>::discard(chunk_handle chunk) {
  before(trace_call::discard, known(chunk), access_mode::read);
  const result<void> done = buffer_.discard(chunk);
  after();
  return done;
}

template <class Buffer>
void schedule_desk<Buffer>::progress() {
  rethrow();
  if (state_ == schedule_state::replaying) {
    runner_.progress(target(), stats_);
  } else {
    buffer_.progress();
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
