/// @file
/// The bodies of `gather_schedule`.
#pragma once

#include <llmmem/sharding/gather_schedule.hpp>

namespace llmmem {
inline namespace v0 {

template <class State>
gather_schedule<State>::gather_schedule(State& state, operation_queue& queue,
                                        std::vector<std::vector<tensor_id>> scopes,
                                        std::vector<std::uint32_t> uses, schedule_plan plan)
    : queue_(&queue), uses_(std::move(uses)), plan_(std::move(plan)) {
  if (plan_.chunks != scopes.size() || plan_.events != 2 * uses_.size() || plan_.machine.tiers() != 2) {
    throw argument_error("gather_schedule: a plan of " + std::to_string(plan_.chunks) + " chunks, " +
                         std::to_string(plan_.events) + " events and " +
                         std::to_string(plan_.machine.tiers()) + " tiers, for " +
                         std::to_string(scopes.size()) + " scopes and " + std::to_string(uses_.size()) +
                         " uses of them; plan_gathers makes one of two tiers, with two events per use");
  }
  for (std::vector<tensor_id>& scope : scopes) {
    std::uint64_t bytes = 0;
    for (const tensor_id each : scope) {
      if (to_index(each) >= state.tensors().size()) {
        throw argument_error("gather_schedule: tensor " + std::to_string(to_index(each)) +
                             " is in a scope, and there are " + std::to_string(state.tensors().size()));
      }
      bytes += state.tensors()[to_index(each)].bytes();
    }
    slots_.push_back(std::make_unique<slot>(state, std::move(scope), bytes));
  }
  for (const std::uint32_t each : uses_) {
    if (each >= slots_.size()) {
      throw argument_error("gather_schedule: scope " + std::to_string(each) + " is used, and there are " +
                           std::to_string(slots_.size()));
    }
  }
  pending_.reserve(slots_.size());
  cursor_ = plan_.first.steps.size();
  use_ = uses_.size();
}

template <class State>
void gather_schedule<State>::begin_iteration() {
  static_cast<void>(drop_all());
  cursor_ = 0;
  use_ = 0;
  issue_up_to(0, plan_moment::ahead);
}

template <class State>
result<typename gather_schedule<State>::lease> gather_schedule<State>::next() {
  const std::uint32_t scope = uses_[use_];
  const auto event = static_cast<std::uint32_t>(2 * use_);
  ++use_;
  ++stats_.uses;
  slot& it = *slots_[scope];
  if (it.is_here && it.was_used) ++stats_.kept;
  issue_up_to(event, plan_moment::at_call);
  if (!it.is_here) start(scope);
  it.is_leased = true;
  result<void> done = arrived(it);
  if (done && std::exchange(it.was_used, true)) {  // it stayed, and its pieces may have moved
    done = it.state->hold_again(it.whole);
    if (!done) it.state->ranks().revoke();  // the other ranks must not wait for this one
  }
  if (!done) {
    it.is_leased = false;
    return done.error();
  }
  is_in_use_ = true;
  issue_up_to(event + 1, plan_moment::ahead);
  return result<lease>(lease(*this, scope));
}

/// Executes all steps of the plan up to moment `when` of `event`, including those at it.
template <class State>
void gather_schedule<State>::issue_up_to(std::uint32_t event, plan_moment when) {
  for (; cursor_ < plan_.first.steps.size(); ++cursor_) {
    const plan_step& step = plan_.first.steps[cursor_];
    if (step.at_event > event || (step.at_event == event && step.when > when)) break;
    const std::uint32_t scope = to_index(step.chunk);
    slot& it = *slots_[scope];
    if (step.operation == plan_operation::drop) {
      drop(scope);
    } else if (step.operation == plan_operation::fetch && !it.is_here && !it.is_pending &&
               is_used_from(scope, step.at_event)) {
      it.is_pending = true;
      pending_.push_back(scope);
    }
    start_pending();
  }
}

template <class State>
void gather_schedule<State>::start_pending() {
  std::size_t begun = 0;
  while (begun < pending_.size() &&
         held_bytes_ + slots_[pending_[begun]]->bytes <= plan_.machine.budgets.front()) {
    slots_[pending_[begun]]->is_pending = false;
    start(pending_[begun++]);
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(begun));
}

template <class State>
void gather_schedule<State>::start(std::uint32_t scope) {
  slot& it = *slots_[scope];
  if (std::exchange(it.is_pending, false)) std::erase(pending_, scope);
  it.is_here = true;
  it.was_used = false;
  it.is_dropped = false;
  held_bytes_ += it.bytes;
  ++stats_.gathers;
  if (is_in_use_) ++stats_.ahead;
  it.refused = {};
  if (auto had = it.state->hold(it.scope, access_mode::read)) {
    it.held = std::move(*had);
  } else {
    it.refused = had.error();
  }
  queue_->put(it);
}

template <class State>
void gather_schedule<State>::drop(std::uint32_t scope) noexcept {
  slot& it = *slots_[scope];
  if (!it.is_here) return;
  if (it.is_leased) {
    it.is_dropped = true;
    return;
  }
  static_cast<void>(
      settled(it));  // unused so far, and the plan drops it: the outcome of the gather does not matter
  it.whole = whole_type{};
  it.is_here = false;
  held_bytes_ -= it.bytes;
}

template <class State>
void gather_schedule<State>::released(std::uint32_t scope) noexcept {
  slot& it = *slots_[scope];
  it.is_leased = false;
  is_in_use_ = false;
  const auto event = static_cast<std::uint32_t>(2 * use_ - 1);
  // After its last use the program may change the source of the gather, and this may be exactly that piece.
  if (it.is_dropped || !is_used_from(scope, event)) {
    drop(scope);
  } else {
    it.state->let_go(it.whole);
  }
  issue_up_to(event, plan_moment::at_call);
  issue_up_to(event + 1, plan_moment::ahead);
}

/// Waits for a gather; its pieces need not be held from then on.
template <class State>
result<void> gather_schedule<State>::arrived(slot& it) {
  struct ending {
    hold_type& held;
    ~ending() { held.end(); }
  } const at_end{it.held};
  return queue_->wait(it);
}

/// An exception of the gather counts as a failure here: a `next` that waits for the gather throws it.
template <class State>
result<void> gather_schedule<State>::settled(slot& it) noexcept {
  try {
    return arrived(it);
  } catch (...) {
    return failure{.code = errc::stopped, .where = "gather_schedule"};
  }
}

template <class State>
result<void> gather_schedule<State>::drop_all() noexcept {
  result<void> all;
  for (const std::unique_ptr<slot>& its : slots_) {
    slot& each = *its;
    if (each.is_here) {
      const result<void> done = settled(each);
      if (!done && all) all = done;
    }
    each.whole = whole_type{};
    each.is_here = false;
    each.is_pending = false;
    each.is_leased = false;
    each.is_dropped = false;
  }
  pending_.clear();
  held_bytes_ = 0;
  return all;
}

}  // namespace v0
}  // namespace llmmem
