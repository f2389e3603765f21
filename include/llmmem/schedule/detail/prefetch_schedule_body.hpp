/// @file
/// Recording and replaying of `prefetch_schedule`.
#pragma once

#include <llmmem/schedule/prefetch_schedule.hpp>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// For each acquire of a trace, how many events lie between it and the chunk's next acquire, round the end.
[[nodiscard]] inline std::vector<std::uint64_t> next_uses(const schedule_trace& trace) {
  const auto events = trace.events();
  std::vector<std::uint64_t> next(events.size(), access_hint::never);
  std::vector<std::uint64_t> seen(trace.sizes().size(), access_hint::never);
  // Twice from the back: what comes after the end is the beginning.
  for (std::uint64_t i = 2 * events.size(); i-- > 0;) {
    const trace_event& event = events[i % events.size()];
    if (event.call != trace_call::acquire) continue;
    std::uint64_t& later = seen[to_index(event.chunk)];
    if (i < events.size()) next[i] = later - i;
    later = i;
  }
  return next;
}

}  // namespace detail

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::check_can_add() const {
  if (state_ == schedule_state::idle && !trace_) return;
  throw argument_error(options_.name + ": a chunk was added after recording began; add all of them first");
}

template <class Buffer, schedule_planner Planner>
chunk_id prefetch_schedule<Buffer, Planner>::add(chunk_handle chunk) {
  buffer_->bytes(chunk).value();
  if (chunk.slot < number_of_slot_.size() && number_of_slot_[chunk.slot] != ~0U &&
      chunks_[number_of_slot_[chunk.slot]] == chunk) {
    return chunk_id{number_of_slot_[chunk.slot]};
  }
  check_can_add();
  close_gaps();
  if (chunk.slot >= number_of_slot_.size()) number_of_slot_.resize(chunk.slot + std::size_t{1}, ~0U);
  number_of_slot_[chunk.slot] = static_cast<std::uint32_t>(chunks_.size());
  chunks_.push_back(chunk);
  return chunk_id{number_of_slot_[chunk.slot]};
}

template <class Buffer, schedule_planner Planner>
result<void> prefetch_schedule<Buffer, Planner>::remove(chunk_handle chunk) {
  const result<void> gone = buffer_->remove(chunk);
  if (!gone) return gone;
  if (chunk.slot >= number_of_slot_.size() || number_of_slot_[chunk.slot] == ~0U ||
      chunks_[number_of_slot_[chunk.slot]] != chunk) {
    return gone;
  }
  chunks_[std::exchange(number_of_slot_[chunk.slot], ~0U)] = {};
  has_gaps_ = true;
  state_ = schedule_state::idle;
  plan_.reset();
  trace_.reset();
  forecast_.reset();
  refused_.reset();
  pending_.clear();
  fell_back_ = false;
  return gone;
}

/// Numbers the chunks that are left.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::close_gaps() {
  if (!std::exchange(has_gaps_, false)) return;
  std::uint32_t kept = 0;
  for (const chunk_handle each : chunks_) {
    if (each == chunk_handle{}) continue;
    number_of_slot_[each.slot] = kept;
    chunks_[kept++] = each;
  }
  chunks_.resize(kept);
}

template <class Buffer, schedule_planner Planner>
chunk_id prefetch_schedule<Buffer, Planner>::known(chunk_handle chunk) const {
  if (chunk.slot >= number_of_slot_.size() || number_of_slot_[chunk.slot] == ~0U ||
      chunks_[number_of_slot_[chunk.slot]] != chunk) {
    throw argument_error(options_.name + ": chunk " + std::to_string(chunk.slot) +
                         " is not known here; add() it before the first iteration");
  }
  return chunk_id{number_of_slot_[chunk.slot]};
}

template <class Buffer, schedule_planner Planner>
schedule_machine prefetch_schedule<Buffer, Planner>::machine() const {
  schedule_machine made{.budgets = {}, .links = options_.links, .edges = options_.edges};
  const auto stats = buffer_->stats();
  for (std::size_t i = 0; i + 1 < Buffer::tiers; ++i)
    made.budgets.push_back(stats.tiers[i].budget);
  return made;
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::begin_iteration() {
  rethrow();
  refused_.reset();
  if (forecast_) forecast_->begin_iteration();
  if (fell_back_) return expect_by_frequency();
  if (!plan_) return record();
  if (state_ != schedule_state::replaying) return replay();
  last_ns_ = buffer_->now_ns();
  timed_ns_.clear();
  if (cursor_->next() == 0) return;
  // The iteration before was cut short: the program says where it is.
  cursor_->restart();
  iterations_done_ = cursor_->iterations();
  pending_.clear();
  begin_plan_iteration(plan_->steady);
  issue(0, plan_moment::ahead);
  try_pending();
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::end_iteration() {
  rethrow();
  if (state_ == schedule_state::replaying && is_timing()) return plan_anew();
  if (state_ != schedule_state::recording) return;
  if (recorder_.events() == 0) return stop();
  freeze();
  make_plan();
}

/// The times of the iteration that ends become the trace's, when it was the trace from end to end.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::plan_anew() {
  const auto events = trace_->events();
  if (timed_ns_.size() != events.size() || cursor_->next() != 0) return;
  trace_recorder timed;
  for (const std::uint64_t bytes : trace_->sizes())
    timed.add_chunk(bytes);
  for (std::size_t i = 0; i < events.size(); ++i) {
    timed.compute(timed_ns_[i]);
    if (events[i].call == trace_call::acquire) timed.acquire(events[i].chunk, events[i].mode);
    if (events[i].call == trace_call::release) timed.release(events[i].chunk);
    if (events[i].call == trace_call::discard) timed.discard(events[i].chunk);
  }
  timed.compute(buffer_->now_ns() - last_ns_);
  state_ = schedule_state::idle;  // the next iteration begins the new plan
  trace_ = timed.freeze();
  make_plan();
  ++stats_.replans;
}

template <class Buffer, schedule_planner Planner>
trace_recorder prefetch_schedule<Buffer, Planner>::recorder() {
  close_gaps();
  trace_recorder knowing;
  for (const chunk_handle each : chunks_)
    knowing.add_chunk(buffer_->rounded_bytes(buffer_->bytes(each).value()));
  return knowing;
}

template <class Buffer, schedule_planner Planner>
const schedule_plan& prefetch_schedule<Buffer, Planner>::foresee(schedule_trace trace) {
  if (state_ == schedule_state::recording) {
    throw argument_error(options_.name + ": a trace was foreseen while one is recorded; freeze() that first");
  }
  close_gaps();
  const auto sizes = trace.sizes();
  bool same = sizes.size() == chunks_.size();
  for (std::size_t i = 0; same && i < sizes.size(); ++i)
    same = sizes[i] == buffer_->rounded_bytes(buffer_->bytes(chunks_[i]).value());
  if (!same) {
    throw argument_error(options_.name + ": a trace of " + std::to_string(sizes.size()) +
                         " chunks was foreseen that are not the " + std::to_string(chunks_.size()) +
                         " that were added; make it with recorder()");
  }
  state_ = schedule_state::idle;
  trace_ = std::move(trace);
  next_use_ = detail::next_uses(*trace_);
  return make_plan();
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::record() {
  recorder_ = recorder();
  if (options_.divergence == on_divergence::by_frequency && !forecast_) forecast_.emplace(chunks_.size());
  plan_.reset();
  last_ns_ = buffer_->now_ns();
  state_ = schedule_state::recording;
}

template <class Buffer, schedule_planner Planner>
const schedule_trace& prefetch_schedule<Buffer, Planner>::freeze() {
  if (state_ != schedule_state::recording) {
    throw argument_error(options_.name + ": nothing is being recorded; call record() first");
  }
  recorder_.compute(buffer_->now_ns() - last_ns_);
  state_ = schedule_state::idle;
  trace_ = recorder_.freeze();
  next_use_ = detail::next_uses(*trace_);
  ++stats_.recordings;
  return *trace_;
}

template <class Buffer, schedule_planner Planner>
const schedule_plan& prefetch_schedule<Buffer, Planner>::make_plan() {
  if (!trace_) throw argument_error(options_.name + ": there is no trace; record and freeze one first");
  plan_ = planner_(*trace_, machine());
  return *plan_;
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::replay(schedule_plan plan) {
  if (!trace_ || plan.trace_fingerprint != trace_->fingerprint()) {
    throw argument_error(options_.name +
                         ": the plan was made for another trace; plan the one that is frozen");
  }
  plan_ = std::move(plan);
  replay();
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::replay() {
  if (!plan_) throw argument_error(options_.name + ": there is no plan; call make_plan() first");
  cursor_.emplace(*trace_, options_.follow);
  iterations_done_ = 0;
  const std::size_t most = plan_->first.steps.size() > plan_->steady.steps.size()
                               ? plan_->first.steps.size()
                               : plan_->steady.steps.size();
  pending_.clear();
  pending_.reserve(2 * most);
  state_ = schedule_state::replaying;
  last_ns_ = buffer_->now_ns();
  timed_ns_.clear();
  timed_ns_.reserve(is_timing() ? trace_->events().size() : 0);
  begin_plan_iteration(plan_->first);
  issue(0, plan_moment::ahead);
  try_pending();
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::begin_plan_iteration(const plan_iteration& iteration) noexcept {
  following_ = &iteration;
  next_step_ = 0;
}

/// Steps of `event` up to `until`, and all before, become pending.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::issue(std::uint32_t event, plan_moment until) {
  const auto& steps = following_->steps;
  while (next_step_ < steps.size() &&
         (steps[next_step_].at_event < event ||
          (steps[next_step_].at_event == event && steps[next_step_].when <= until))) {
    if (pending_.size() == pending_.capacity()) pending_.erase(pending_.begin());  // the oldest is hopeless
    pending_.push_back(steps[next_step_++]);
  }
}

/// Begins what is pending, in its order, up to what must wait.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::try_pending() {
  buffer_->progress();
  std::size_t done = 0;
  for (; done < pending_.size(); ++done) {
    const plan_step& step = pending_[done];
    const std::size_t tier = step.operation == plan_operation::fetch ? step.to : step.from;
    const step_outcome outcome = buffer_->execute(chunks_[to_index(step.chunk)], step.operation, tier);
    if (outcome == step_outcome::later) break;
    if (step.operation == plan_operation::allocate) continue;  // the lease that writes takes its own room
    ++(outcome == step_outcome::done ? stats_.steps : stats_.useless);
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(done));
}

/// What is still pending although its event has come is left to the buffer: a fetch as a prefetch without a
/// plan.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::give_up_late(std::uint32_t event) {
  std::size_t kept = 0;
  for (const plan_step& step : pending_) {
    if (step.at_event > event) {
      pending_[kept++] = step;
      continue;
    }
    ++stats_.late;
    if (step.operation == plan_operation::fetch) {
      static_cast<void>(buffer_->prefetch(chunks_[to_index(step.chunk)]));
    }
  }
  pending_.resize(kept);
}

/// The program is about to do what the trace has as `event`.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::reach(std::uint32_t event) {
  at_ = event;
  issue(event, plan_moment::at_call);
  try_pending();
  give_up_late(event);
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::note_divergence() {
  ++stats_.diverged;
  state_ = schedule_state::idle;
  pending_.clear();
  if (options_.divergence == on_divergence::fall_back || options_.divergence == on_divergence::by_frequency) {
    fell_back_ = true;
    expect_by_frequency();  // what the plan has foretold does not hold
  }
  const bool for_good = ++left_in_a_row_ >= options_.re_record_after;
  if (options_.divergence == on_divergence::re_record ||
      (options_.divergence == on_divergence::repair && for_good)) {
    plan_.reset();
    left_in_a_row_ = 0;
  }
}

/// The program has been given `chunk`.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::count_use(chunk_id chunk) noexcept {
  if (!forecast_) return;
  forecast_->used(chunk);
  if (fell_back_) static_cast<void>(buffer_->expect(chunks_[to_index(chunk)], forecast_->next_use(chunk)));
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::expect_by_frequency() noexcept {
  if (!forecast_) return;
  for (std::uint32_t i = 0; i < chunks_.size(); ++i)
    static_cast<void>(buffer_->expect(chunks_[i], forecast_->next_use(chunk_id{i})));
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::before(trace_call what, chunk_id chunk, access_mode mode) {
  rethrow();
  if (state_ == schedule_state::recording) {
    recorder_.compute(buffer_->now_ns() - last_ns_);
    // An acquire is noted when it was granted.
    if (what == trace_call::release) recorder_.release(chunk);
    if (what == trace_call::discard) recorder_.discard(chunk);
    return;
  }
  if (state_ != schedule_state::replaying) return;
  if (what == trace_call::acquire && std::exchange(refused_, std::nullopt) == chunk) return;
  const std::uint64_t computed = is_timing() ? buffer_->now_ns() - last_ns_ : 0;
  const cursor_step step = cursor_->call(what, chunk, mode);
  switch (step.verdict) {
    case cursor_verdict::diverged:
      return note_divergence();
    case cursor_verdict::inserted:
      ++stats_.inserted;
      return;
    case cursor_verdict::on_plan:
      ++stats_.on_plan;
      if (is_timing() && timed_ns_.size() == step.index) timed_ns_.push_back(computed);
      break;
    case cursor_verdict::skipped:
      ++stats_.skipped;
      break;
  }
  const bool wrapped = cursor_->iterations() != iterations_done_ && cursor_->next() != 0;
  if (wrapped) after();  // the end of the iteration before was skipped
  reach(step.index);
  if (what == trace_call::acquire) {
    const std::uint64_t now = cursor_->iterations() * trace_->events().size() + step.index;
    static_cast<void>(buffer_->expect(chunks_[to_index(chunk)], now + next_use_[step.index]));
  }
}

/// The call is done: what the plan has ahead of the next event begins.
template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::after() {
  if (state_ == schedule_state::recording) last_ns_ = buffer_->now_ns();
  if (state_ != schedule_state::replaying) return;
  if (cursor_->iterations() != iterations_done_) {
    iterations_done_ = cursor_->iterations();
    left_in_a_row_ = 0;
    issue(plan_->events, plan_moment::at_call);
    begin_plan_iteration(plan_->steady);
  }
  issue(cursor_->next(), plan_moment::ahead);
  try_pending();
  if (is_timing()) last_ns_ = buffer_->now_ns();
}

template <class Buffer, schedule_planner Planner>
template <access_mode Mode, class Take>
auto prefetch_schedule<Buffer, Planner>::take(chunk_id number, access_mode noted, Take take_from_buffer)
    -> result<lease<Mode>> {
  before(trace_call::acquire, number, noted);
  auto had = take_from_buffer();
  if (had && state_ == schedule_state::recording) recorder_.acquire(number, noted);
  if (!had) refused_ = number;
  if (had) count_use(number);
  after();
  if (!had) return had.error();
  return lease<Mode>(*this, number, std::move(*had));
}

/// As what a lease of bytes that are not named yet was recorded, where that is the next event.
template <class Buffer, schedule_planner Planner>
access_mode prefetch_schedule<Buffer, Planner>::mode_at_next(chunk_id chunk) const noexcept {
  if (state_ != schedule_state::replaying || trace_->events().empty()) return access_mode::read;
  const trace_event& next = trace_->events()[cursor_->next()];
  const bool is_it = next.call == trace_call::acquire && next.chunk == chunk && reads(next.mode);
  return is_it ? next.mode : access_mode::read;
}

template <class Buffer, schedule_planner Planner>
auto prefetch_schedule<Buffer, Planner>::update(chunk_handle chunk, std::uint64_t offset, std::uint64_t count,
                                                patience wait) -> result<update_lease> {
  const chunk_id number = known(chunk);
  const access_mode noted = count == 0 ? mode_at_next(number) : access_mode::read_write;
  return take<access_mode::read_write>(number, noted,
                                       [&] { return buffer_->update(chunk, offset, count, wait); });
}

template <class Buffer, schedule_planner Planner>
void prefetch_schedule<Buffer, Planner>::released(chunk_id chunk) noexcept {
  try {
    before(trace_call::release, chunk, access_mode::read);
    after();
  } catch (...) {
    thrown_ = std::current_exception();
  }
}

template <class Buffer, schedule_planner Planner>
result<void> prefetch_schedule<Buffer, Planner>::discard(chunk_handle chunk) {
  before(trace_call::discard, known(chunk), access_mode::read);
  const result<void> done = buffer_->discard(chunk);
  after();
  return done;
}

}  // namespace v0
}  // namespace llmmem
