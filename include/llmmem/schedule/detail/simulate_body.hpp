/// @file
/// Follows a plan step by step. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/detail/executor.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

[[nodiscard]] inline std::string name_of(const plan_step& step) {
  constexpr const char* names[] = {"fetch", "write_back", "drop", "allocate"};
  const auto index = static_cast<std::size_t>(step.operation);
  return std::string(index < 4 ? names[index] : "step") + " of chunk " +
         std::to_string(to_index(step.chunk)) + " in tier " + std::to_string(step.from);
}

/// Follows one plan.
class plan_follower {
 public:
  plan_follower(const schedule_trace& trace, const schedule_plan& plan, timeline_detail detail)
      : trace_(&trace), plan_(&plan), machine_(trace, plan.machine, detail) {
    const auto refuse = [](const std::string& why) { throw argument_error("simulate: " + why); };
    if (plan.trace_fingerprint != trace.fingerprint() || plan.chunks != trace.sizes().size() ||
        plan.events != trace.events().size()) {
      refuse("the plan was made for another trace, of " + std::to_string(plan.events) + " events and " +
             std::to_string(plan.chunks) + " chunks; make a plan for this trace");
    }
  }

  [[nodiscard]] plan_forecast iteration(const plan_iteration& followed, std::size_t number) {
    number_ = number;
    steps_ = &followed.steps;
    next_ = 0;
    machine_.begin_iteration();
    const auto events = trace_->events();
    for (std::uint32_t i = 0; i < events.size(); ++i) {
      issue(i, plan_moment::ahead);
      machine_.compute(events[i].compute_ns, i);
      issue(i, plan_moment::at_call);
      const refusal why = machine_.serve(i);
      if (why != refusal::none) refuse_event(i, why);
    }
    issue(plan_->events, plan_moment::ahead);
    machine_.compute(trace_->tail_ns(), plan_->events);
    issue(plan_->events, plan_moment::at_call);
    if (next_ != steps_->size())
      refuse_step(next_, "it is out of order; steps are sorted by event and moment");
    if (machine_.first_waiting() != unresolved)
      refuse_step(machine_.first_waiting(), "it still waits for memory when the iteration ends");
    if (!as_good(machine_.placements(), plan_->start))
      throw argument_error(place() + "its chunks end in other tiers than the plan's start says");
    return machine_.end_iteration();
  }

  [[nodiscard]] executor& machine() noexcept { return machine_; }

 private:
  void issue(std::uint32_t event, plan_moment when) {
    while (next_ < steps_->size() && (*steps_)[next_].at_event == event && (*steps_)[next_].when == when) {
      const plan_step& step = (*steps_)[next_];
      const auto number = static_cast<std::uint32_t>(next_);
      if (to_index(step.chunk) >= plan_->chunks) refuse_step(next_, "there is no such chunk");
      const bool moves =
          step.operation == plan_operation::fetch || step.operation == plan_operation::write_back;
      const std::size_t upper = step.operation == plan_operation::fetch ? step.to : step.from;
      const bool tiers = step.operation == plan_operation::fetch        ? step.from == step.to + 1
                         : step.operation == plan_operation::write_back ? step.to == step.from + 1
                         : step.operation == plan_operation::allocate   ? step.from == 0
                                                                        : true;
      if (!tiers || step.from >= machine_.tiers() || (moves && upper + 1 >= machine_.tiers()))
        refuse_step(next_, "no transfer between these tiers is possible");
      if (step.bytes != trace_->size(step.chunk)) refuse_step(next_, "the chunk has another size");
      issued done{};
      switch (step.operation) {
        case plan_operation::fetch:
          done = machine_.fetch(step.chunk, step.to, when, event, number);
          break;
        case plan_operation::write_back:
          done = machine_.write_back(step.chunk, step.from, when, event, number);
          break;
        case plan_operation::drop:
          done = machine_.drop(step.chunk, step.from);
          break;
        case plan_operation::allocate:
          done = machine_.allocate(step.chunk);
          break;
        default:
          refuse_step(next_, "there is no such operation");
      }
      if (done.why != refusal::none) refuse_step(next_, text_of(done.why));
      ++next_;
    }
  }

  [[nodiscard]] std::string place() const { return "simulate: iteration " + std::to_string(number_) + ", "; }
  [[noreturn]] LLMMEM_COLD void refuse_step(std::size_t step, const std::string& why) const {
    const plan_step& wrong = (*steps_)[step];
    throw argument_error(place() + "step " + std::to_string(step) + ", " + name_of(wrong) + ": " + why);
  }
  [[noreturn]] LLMMEM_COLD void refuse_event(std::uint32_t event, refusal why) const {
    if (why == refusal::over_budget)
      refuse_step(machine_.first_waiting(),
                  "it waits for memory for ever, and event " + std::to_string(event) + " for it");
    throw argument_error(place() + describe(trace_->events()[event], event) +
                         "no step has brought it to tier 0");
  }

  const schedule_trace* trace_;
  const schedule_plan* plan_;
  executor machine_;
  const std::vector<plan_step>* steps_ = nullptr;
  std::size_t next_ = 0;
  std::size_t number_ = 0;
};

}  // namespace detail

LLMMEM_SCHEDULE_BODY schedule::simulation simulate(const schedule_trace& trace, const schedule_plan& plan,
                                                   std::size_t iterations, timeline_detail detail) {
  plan.machine.check();
  detail::plan_follower follower(trace, plan, detail);
  schedule::simulation all;
  for (std::size_t i = 0; i < iterations; ++i)
    all.iterations.push_back(follower.iteration(i == 0 ? plan.first : plan.steady, i));
  all.most_bytes = follower.machine().most_bytes();
  all.spans = follower.machine().take_spans();
  return all;
}

}  // namespace v0
}  // namespace llmmem
