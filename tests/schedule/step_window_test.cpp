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
        window.issue(event, when, [] { return std::uint64_t{0}; });
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

TEST_CASE("a waiting step delays those after it until it can begin") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(0, 1), step_at(0, 2)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.later = {chunk_id{1}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
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

TEST_CASE("a step is requested in the tier that it goes to or leaves, and counted by its outcome") {
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
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
  window.begin_pending(noting_target{&noted, &told}, stats);
  CHECK(noted.tiers == std::vector<std::size_t>{1, 3, 0});
  CHECK(stats.steps == 1);
  CHECK(stats.unneeded == 1);  // room for a write counts as neither
  CHECK(window.pending() == 0);
}

TEST_CASE("steps whose event has come are given up, and a fetch among them becomes a prefetch") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(1, 1, plan_moment::ahead, plan_operation::write_back),
                      step_at(1, 2), step_at(2, 3)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  const noting_target::answers told{.later = {chunk_id{0}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(2, plan_moment::ahead, [] { return std::uint64_t{0}; });
  window.begin_pending(target, stats);
  CHECK(window.pending() == 4);
  window.give_up_late(1, target, stats);
  CHECK(stats.late == 3);
  CHECK(noted.prefetched == chunk_list{chunk_id{0}, chunk_id{2}});
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{3}});
}

TEST_CASE("steps of an ended iteration stay pending, and a full window drops the oldest") {
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
    window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
    window.begin_pending(target, stats);
  }
  CHECK(window.pending() == 8);
  window.begin_iteration(plan.first);
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
  CHECK(window.pending() == 8);
  told.later.clear();
  window.begin_pending(target, stats);
  const chunk_list once{chunk_id{0}, chunk_id{1}, chunk_id{2}, chunk_id{3}};
  chunk_list twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  CHECK(noted.begun == twice);
  window.begin_iteration(plan.first);
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
  window.clear();
  CHECK(window.pending() == 0);
}

TEST_CASE("an exception of a target passes through, and its step stays pending") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(0, 1)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.throwing = {chunk_id{0}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
  CHECK_THROWS_AS(window.begin_pending(target, stats), std::runtime_error);
  CHECK(window.pending() == 2);
  told.throwing.clear();
  window.begin_pending(target, stats);
  CHECK(noted.begun == chunk_list{chunk_id{0}, chunk_id{1}});
}

TEST_CASE("a late fetch is reported by the largest share of its wait, and one without a lease as unused") {
  schedule_plan plan;
  const auto fetch = [](std::uint32_t chunk) {
    plan_step step = step_at(0, chunk);
    step.from = 1;
    step.start_ns = 1'000;
    step.finish_ns = 1'100;  // planned to take 100 ns
    return step;
  };
  plan_step drop = step_at(1, 4, plan_moment::ahead, plan_operation::drop);
  plan.first.steps = {fetch(0), fetch(1), fetch(2), fetch(3), fetch(4), drop};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  noting_target::answers told{.later = {chunk_id{1}}};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  const auto now = [&] { return told.now_ns; };
  told.now_ns = 5'000;
  window.issue(0, plan_moment::at_call, now);
  told.blocker = tiering::step_blocker::space;
  window.begin_pending(target, stats);  // chunk 0 begins, chunk 1 waits for room
  CHECK(window.is_expected(chunk_id{0}));
  CHECK_FALSE(window.is_expected(chunk_id{1}));
  window.leased(chunk_id{0}, 90, 5'100);  // it took what was planned: the lease came early
  CHECK_FALSE(window.is_expected(chunk_id{0}));
  told.now_ns = 5'400;
  told.later.clear();
  window.begin_pending(target, stats);
  window.leased(chunk_id{1}, 300, 5'500);    // 400 ns late to begin
  window.leased(chunk_id{2}, 0, 0);          // in time
  window.leased(chunk_id{3}, 1'000, 6'500);  // 400 ns late as well, and in flight for 1,100, not 100
  window.issue(1, plan_moment::at_call, now);
  window.begin_pending(target, stats);  // drops chunk 4, which nobody leased
  const auto& first = window.records().first;
  const auto is = [&](std::size_t step, step_cause why, std::uint64_t ns) {
    CHECK(first[step].late == 1);
    CHECK(first[step].late_ns == ns);
    CHECK(first[step].causes[static_cast<std::size_t>(why)] == 1);
  };
  is(0, step_cause::issued_late, 90);
  is(1, step_cause::no_room, 300);
  CHECK(first[2] == step_record{.begun = 1});
  is(3, step_cause::link_busy, 1'000);
  CHECK(first[4] == step_record{.begun = 1, .unused = 1});
  CHECK(first[5] == step_record{.begun = 1});
}

TEST_CASE("a step that never began is late by its blocker, and its lease's wait is added") {
  schedule_plan plan;
  plan.first.steps = {step_at(0, 0), step_at(0, 1)};
  detail::step_window window;
  window.start(plan);
  noting_target::notes noted;
  const noting_target::answers told{.later = {chunk_id{0}}, .blocker = tiering::step_blocker::lease};
  const noting_target target{&noted, &told};
  prefetch_stats stats;
  window.issue(0, plan_moment::at_call, [] { return std::uint64_t{0}; });
  window.begin_pending(target, stats);
  window.give_up_late(0, target, stats);
  window.leased(chunk_id{0}, 70, 0);
  for (const step_record& each : window.records().first) {
    CHECK(each.late == 1);
    CHECK(each.causes[static_cast<std::size_t>(step_cause::leased)] == 1);
  }
  CHECK(window.records().first[0].late_ns == 70);
  window.clear();  // chunk 1 was left to the lease, not fetched for nothing
  CHECK(window.records().first[1].unused == 0);
}
