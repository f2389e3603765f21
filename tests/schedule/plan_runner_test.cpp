/// A plan carried out beside the calls of its trace, on a target that notes what it is asked.
#include <llmmem/schedule/detail/plan_runner.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/plan_targets.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using chunk_list = std::vector<chunk_id>;

/// A trace that reads `chunks` chunks one after another. Its plan has a step ahead of each event; those of
/// the first iteration have the event's number as their chunk, those of the steady one 100 more, and after
/// the last event comes one step more.
struct followed_program {
  explicit followed_program(std::uint32_t chunks) : trace(read_in_turn(chunks)) {
    plan.events = 2 * chunks;
    for (std::uint32_t event = 0; event <= plan.events; ++event) {
      plan.first.steps.push_back({.at_event = event, .chunk = chunk_id{event}});
      plan.steady.steps.push_back({.at_event = event, .chunk = chunk_id{100 + event}});
    }
    runner.start(trace, plan, {.reach = 4, .patience = 3});
    runner.begin_due(target, stats);
  }
  followed_program(const followed_program&) = delete;
  followed_program& operator=(const followed_program&) = delete;

  [[nodiscard]] static schedule_trace read_in_turn(std::uint32_t chunks) {
    trace_recorder record;
    for (std::uint32_t i = 0; i < chunks; ++i)
      record.add_chunk(100);
    for (std::uint32_t i = 0; i < chunks; ++i) {
      record.acquire(chunk_id{i}, access_mode::read);
      record.release(chunk_id{i});
    }
    return record.freeze();
  }

  /// As the schedule does; true when the call ended an iteration.
  bool call(std::uint32_t event) {
    const trace_event& what = trace.events()[event];
    const cursor_step step = runner.call(what.call, what.chunk, what.mode);
    REQUIRE((step.verdict == cursor_verdict::on_plan || step.verdict == cursor_verdict::skipped));
    REQUIRE(step.index == event);
    if (runner.has_wrapped()) CHECK(runner.call_ended(target, stats));
    runner.reach(event, target, stats);
    last_position = runner.position_of(event);
    return runner.call_ended(target, stats);
  }

  schedule_trace trace;
  schedule_plan plan;
  noting_target::notes noted;
  noting_target::answers told;
  noting_target target{&noted, &told};
  prefetch_stats stats;
  detail::plan_runner runner;
  std::uint64_t last_position = 0;
};

/// `from` to `to`, without `to`.
chunk_list chunks(std::uint32_t from, std::uint32_t to) {
  chunk_list all;
  for (; from < to; ++from)
    all.push_back(chunk_id{from});
  return all;
}

chunk_list operator+(chunk_list first, const chunk_list& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

TEST_CASE("steps ahead of an event begin after the previous event, and iterations follow each other") {
  followed_program program(3);
  CHECK(program.runner.is_at_beginning());
  CHECK(program.noted.begun == chunks(0, 1));
  for (std::uint32_t event = 0; event < 5; ++event) {
    CHECK_FALSE(program.call(event));
    CHECK(program.noted.begun == chunks(0, event + 2));
    CHECK_FALSE(program.runner.is_at_beginning());
    CHECK(program.runner.next_event() == &program.trace.events()[event + 1]);
  }
  CHECK(program.call(5));
  CHECK(program.runner.is_at_beginning());
  CHECK(program.noted.begun == chunks(0, 7) + chunks(100, 101));
  CHECK_FALSE(program.call(0));
  CHECK(program.last_position == 6);
  CHECK(program.noted.begun == chunks(0, 7) + chunks(100, 102));
}

TEST_CASE("the steps of skipped events still run, also past the end of the iteration") {
  followed_program program(4);
  program.call(0);
  program.call(3);
  CHECK(program.noted.begun == chunks(0, 5));
  program.call(6);
  CHECK_FALSE(program.call(1));  // the release at the end of the iteration did not happen
  CHECK(program.noted.begun == chunks(0, 9) + chunks(100, 103));
  CHECK(program.last_position == 9);
}

TEST_CASE("an unfinished iteration is given up, with its waiting steps") {
  followed_program program(3);
  program.told.later = {chunk_id{2}};
  program.call(0);
  program.call(1);
  CHECK(program.noted.begun == chunks(0, 2));
  program.told.later.clear();
  program.runner.restart();
  program.runner.begin_due(program.target, program.stats);
  CHECK(program.runner.is_at_beginning());
  CHECK(program.noted.begun == chunks(0, 2) + chunks(100, 101));
  for (std::uint32_t event = 0; event < 5; ++event)
    CHECK_FALSE(program.call(event));
  CHECK(program.call(5));
}

TEST_CASE("a waiting step begins with progress, or is given up at its event") {
  followed_program program(3);
  program.told.later = {chunk_id{1}};
  program.call(0);
  CHECK(program.noted.begun == chunks(0, 1));
  program.told.later.clear();
  program.runner.progress(program.target, program.stats);
  CHECK(program.noted.begun == chunks(0, 2));
  program.told.later = {chunk_id{2}};
  program.call(1);
  program.call(2);
  CHECK(program.stats.late == 1);
  CHECK(program.noted.prefetched == chunks(2, 3));
  program.told.later = {chunk_id{4}};
  program.call(3);
  program.runner.forget_pending();
  program.told.later.clear();
  program.runner.progress(program.target, program.stats);
  CHECK(program.noted.begun == chunks(0, 2) + chunks(3, 4));
}

TEST_CASE("mismatched calls are distinguished, and a trace without events matches none") {
  followed_program program(3);
  for (int i = 0; i < 3; ++i) {
    CHECK(program.runner.call(trace_call::discard, chunk_id{0}, access_mode::read).verdict ==
          cursor_verdict::inserted);
  }
  CHECK_FALSE(program.runner.has_wrapped());
  CHECK(program.runner.call(trace_call::discard, chunk_id{0}, access_mode::read).verdict ==
        cursor_verdict::diverged);

  followed_program empty(0);
  CHECK(empty.runner.next_event() == nullptr);
  CHECK(empty.runner.call(trace_call::acquire, chunk_id{0}, access_mode::read).verdict ==
        cursor_verdict::diverged);
}
