/// A trace and its plan.
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/schedule/detail/planned_trace.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

schedule_plan plan_of(const schedule_trace& trace, const char* planner = "test") {
  return {.planner = planner, .trace_fingerprint = trace.fingerprint()};
}

/// One chunk that is read `times` times, `ns` of computing apart.
schedule_trace reads(std::size_t times, std::uint64_t ns = 1) {
  trace_recorder record;
  const chunk_id chunk = record.add_chunk(100);
  for (std::size_t i = 0; i < times; ++i) {
    record.compute(ns);
    record.acquire(chunk, access_mode::read);
    record.release(chunk);
  }
  return record.freeze();
}

}  // namespace

TEST_CASE("the next use of a chunk is its next acquire, of this iteration or of the one after it") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const schedule_trace trace =
        random_trace(random, {.accesses = 15, .writes = true, .discards = true, .overlaps = true});
    detail::planned_trace planned;
    planned.set_trace(trace);
    const auto events = trace.events();
    for (std::uint32_t i = 0; i < events.size(); ++i) {
      if (events[i].call != trace_call::acquire) continue;
      std::uint64_t distance = 1;
      const auto is_next = [&] {
        const trace_event& event = events[(i + distance) % events.size()];
        return event.call == trace_call::acquire && event.chunk == events[i].chunk;
      };
      while (!is_next())
        ++distance;
      REQUIRE(planned.next_use(i) == distance);
    }
  }
}

TEST_CASE("an event other than an acquire has no next use") {
  CHECK(detail::next_uses(reads(2)) ==
        std::vector<std::uint64_t>{2, access_hint::never, 2, access_hint::never});
  CHECK(detail::next_uses(reads(0)).empty());
}

TEST_CASE("a plan stays as long as its events, and ends with them") {
  detail::planned_trace planned;
  CHECK_FALSE(planned.has_trace());
  CHECK_FALSE(planned.has_plan());
  CHECK_FALSE(planned.fits({}));
  planned.set_trace(reads(2));
  CHECK(planned.fits(plan_of(reads(2))));
  CHECK_FALSE(planned.fits(plan_of(reads(3))));
  planned.set_plan(plan_of(reads(2)));

  planned.set_trace(reads(2, 50));  // other times of the same events
  REQUIRE(planned.has_plan());
  CHECK(planned.fits(planned.plan()));
  CHECK(planned.trace().compute_ns() == 100);

  planned.set_trace(reads(3));
  CHECK(planned.has_trace());
  CHECK_FALSE(planned.has_plan());
  CHECK(planned.next_use(4) == 2);

  planned.set_plan(plan_of(reads(3)));
  planned.drop_plan();
  CHECK_FALSE(planned.has_plan());
  CHECK(planned.has_trace());
  planned.set_plan(plan_of(reads(3)));
  planned.clear();
  CHECK_FALSE(planned.has_plan());
  CHECK_FALSE(planned.has_trace());
}

TEST_CASE("a trace and a plan keep their addresses when others are exchanged") {
  detail::planned_trace planned;
  planned.set_trace(reads(2));
  planned.set_plan(plan_of(reads(2)));
  const schedule_trace* trace = &planned.trace();
  const schedule_plan* plan = &planned.plan();
  planned.set_trace(reads(2, 9));
  planned.set_plan(plan_of(reads(2), "another"));
  CHECK(&planned.trace() == trace);
  CHECK(&planned.plan() == plan);
  CHECK(plan->planner == "another");
}
