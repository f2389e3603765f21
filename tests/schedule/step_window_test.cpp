/// The window over the steps of a plan, against a list of what is due.
#include <llmmem/schedule/detail/step_window.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "support/plan_targets.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using chunk_list = std::vector<chunk_id>;

plan_step step_at(std::uint32_t event, std::uint32_t chunk, plan_moment when = plan_moment::ahead,
                  plan_operation operation = plan_operation::fetch) {
  return {.at_event = event, .chunk = chunk_id{chunk}, .when = when, .operation = operation};
}

}  // namespace

TEST_CASE("steps begin when the program reaches their event, in the order of the plan") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    constexpr std::uint32_t events = 10;
    schedule_plan plan;
    for (std::uint32_t event = 0; event <= events; ++event) {
      for (const plan_moment when : {plan_moment::ahead, plan_moment::at_call}) {
        while (random.once_in(2))
          plan.first.steps.push_back(
              step_at(event, static_cast<std::uint32_t>(plan.first.steps.size()), when));
      }
    }
    detail::step_window window;
    window.start(plan);
    noting_target::notes noted;
    const noting_target::answers told;
    prefetch_stats stats;
    for (std::uint32_t event = 0; event <= events; ++event) {
      if (random.once_in(3)) continue;  // an event that the program skips: its steps begin with the next one
      for (const plan_moment when : {plan_moment::ahead, plan_moment::at_call}) {
        window.issue(event, when);
        window.begin_pending(noting_target{&noted, &told}, stats);
        chunk_list due;
        for (const plan_step& each : plan.first.steps) {
          if (each.at_event < event || (each.at_event == event && each.when <= when)) {
            due.push_back(each.chunk);
          }
        }
        REQUIRE(noted.begun == due);
        REQUIRE(stats.steps == due.size());
        REQUIRE(window.pending() == 0);
      }
    }
  }
}

TEST_CASE("a step that must wait delays those after it until it can begin") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(0, 1), step_at(0, 2)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.later = {chunk_id{1}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call);
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{0}});
  CHECK(window.pending() == 2);
  window.begin_pending(target, stats);
  CHECK(noted.begun.size() == 1);
  told.later.clear();
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{0}, chunk_id{1}, chunk_id{2}});
  CHECK(noted.progressed == 3);
  CHECK(stats.late == 0);
}

TEST_CASE("a step is asked for in the tier that it goes to or leaves, and counted by its outcome") {
  schedule_plan plan;
  plan_step fetch = step_at(0, 0);
  fetch.from = 2;
  fetch.to = 1;
  plan_step drop = step_at(0, 1, plan_moment::ahead, plan_operation::drop);
  drop.from = drop.to = 3;
  plan.first.steps = {fetch, drop, step_at(0, 2, plan_moment::ahead, plan_operation::allocate)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  const noting_target::answers told{.unneeded = {chunk_id{1}}};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call);
  window.begin_pending(noting_target{&noted, &told}, stats);
  CHECK(noted.tiers == std::vector<std::size_t>{1, 3, 0});
  CHECK(stats.steps == 1);
  CHECK(stats.unneeded == 1);  // room for a write counts as neither
  CHECK(window.pending() == 0);
}

TEST_CASE("steps whose event has come are given up, and a fetch of them becomes a prefetch") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(1, 1, plan_moment::ahead, plan_operation::write_back),
                      step_at(1, 2), step_at(2, 3)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  const noting_target::answers told{.later = {chunk_id{0}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(2, plan_moment::ahead);
  window.begin_pending(target, stats);
  CHECK(window.pending() == 4);
  window.give_up_late(1, target, stats);
  CHECK(stats.late == 3);
  CHECK(noted.prefetched == chunk_list{chunk_id{0}, chunk_id{2}});
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{3}});
}

TEST_CASE("steps of an iteration that has ended stay pending, and a full window forgets the oldest") {
  schedule_plan plan;
  for (std::uint32_t i = 0; i < 4; ++i)
    plan.first.steps.push_back(step_at(0, i));
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.later = {chunk_id{0}, chunk_id{1}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  for (int iteration = 0; iteration < 2; ++iteration) {
    window.begin_iteration(plan.first);
    window.issue(0, plan_moment::at_call);
    window.begin_pending(target, stats);
  }
  CHECK(window.pending() == 8);
  window.begin_iteration(plan.first);
  window.issue(0, plan_moment::at_call);
  CHECK(window.pending() == 8);
  told.later.clear();
  window.begin_pending(target, stats);
  const chunk_list once{chunk_id{0}, chunk_id{1}, chunk_id{2}, chunk_id{3}};
  chunk_list twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  CHECK(noted.begun == twice);
  window.begin_iteration(plan.first);
  window.issue(0, plan_moment::at_call);
  window.clear();
  CHECK(window.pending() == 0);
}

TEST_CASE("what a target throws passes through, and its step stays pending") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(0, 1)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.throwing = {chunk_id{0}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call);
  CHECK_THROWS_AS(window.begin_pending(target, stats), std::runtime_error);
  CHECK(window.pending() == 2);
  told.throwing.clear();
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{0}, chunk_id{1}});
}
