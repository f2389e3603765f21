#include <llmmem/schedule/cursor.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr chunk_id a{0};
constexpr chunk_id b{1};

template <class Script>
std::string why(Script script) {
  trace_recorder record;
  record.add_chunk(100);
  record.add_chunk(200);
  script(record);
  try {
    static_cast<void>(record.freeze());
  } catch (const error& wrong) {
    return wrong.what();
  }
  return "frozen";
}

}  // namespace

TEST_CASE("a trace has the recorded events") {
  trace_recorder record;
  const chunk_id first = record.add_chunk(100);
  const chunk_id second = record.add_chunk(200);
  record.acquire(first, access_mode::read);
  record.compute(5);
  record.compute(6);
  record.acquire(second, access_mode::write);
  record.release(first);
  record.release(second);
  record.compute(7);
  const auto trace = record.freeze();
  CHECK(trace.events()[1] == trace_event{11, second, trace_call::acquire, access_mode::write});
  CHECK(trace.compute_ns() == 18);
  CHECK(trace.tail_ns() == 7);
  CHECK(trace.max_leased_bytes() == 300);
  const auto thrice = trace.repeated(3);
  CHECK(thrice.events().size() == 12);
  CHECK(thrice.compute_ns() == 54);
  CHECK(thrice.events()[4].compute_ns == 7);
  CHECK(thrice.fingerprint() != trace.fingerprint());
  CHECK(record.freeze().fingerprint() == trace.fingerprint());
}

TEST_CASE("impossible events are refused by event and reason") {
  CHECK(why([](auto&) {}) == "frozen");
  CHECK(why([](auto& r) { r.acquire(a, access_mode::read); }) ==
        "trace: event 0, acquire of chunk 0: never released; an iteration ends with no lease");
  CHECK(why([](auto& r) {
          r.acquire(a, access_mode::read);
          r.acquire(a, access_mode::read);
        }) == "trace: event 1, acquire of chunk 0: event 0 has acquired it and not released it");
  CHECK(why([](auto& r) { r.release(b); }) ==
        "trace: event 0, release of chunk 1: no event has acquired it; acquire it first");
  CHECK(why([](auto& r) { r.acquire(chunk_id{2}, access_mode::read); }) ==
        "trace: event 0, acquire of chunk 2: it is not known; chunks are 0 to 2 - 1");
  CHECK(why([](auto& r) {
          r.discard(a);
          r.discard(a);
        }) == "trace: event 1, discard of chunk 0: event 0 has discarded it already");
  CHECK(why([](auto& r) {
          r.discard(a);
          r.acquire(a, access_mode::read_write);
        }) == "trace: event 1, acquire of chunk 0: event 0 has discarded it; acquire it to write all of it");
  CHECK(why([](auto& r) {
          r.acquire(a, access_mode::read);
          r.release(a);
          r.discard(a);
        }) ==
        "trace: event 0, acquire of chunk 0: event 2 has discarded it an iteration earlier; acquire it to "
        "write "
        "all of it");
  CHECK(why([](auto& r) { r.compute(~std::uint64_t{0}); }) ==
        "trace: its compute time exceeds 2^60 ns, the most of an iteration");
  CHECK(why([](auto& r) { r.add_chunk(0); }) == "trace: chunk 2 has 0 bytes");
}

TEST_CASE("an invalid machine is refused by tier or link and number") {
  const link_model link{.bytes_per_second = 1};
  CHECK_THROWS_WITH_AS(schedule_machine{}.check(),
                       "schedule_machine: no tier has a budget; there must be one above the unbounded tier",
                       argument_error);
  CHECK_THROWS_WITH_AS((schedule_machine{.budgets = {0}, .links = {link}}.check()),
                       "schedule_machine: tier 0 has a budget of 0 bytes; it must be 1 to 2^63 - 1",
                       argument_error);
  CHECK_THROWS_WITH_AS((schedule_machine{.budgets = {1, 1}, .links = {link}}.check()),
                       "schedule_machine: the edge below tier 1 has link 1, of 1 given; give one for each "
                       "of the 2 pairs of neighbours, or name theirs in edges",
                       argument_error);
  CHECK_THROWS_WITH_AS((schedule_machine{.budgets = {1}, .links = {link_model{}}}.check()),
                       "schedule_machine: link 0: a bandwidth of 0 bytes per second; it must be 1 to 2^60",
                       argument_error);
  const link_model too_fast{.bytes_per_second = 1, .offload_bytes_per_second = std::uint64_t{1} << 61};
  CHECK_THROWS_WITH_AS(
      (schedule_machine{.budgets = {1}, .links = {too_fast}}.check()),
      "schedule_machine: link 0: a bandwidth of 2305843009213693952 bytes per second; it must be 1 to 2^60",
      argument_error);
  schedule_machine{.budgets = {1, 1}, .links = {link}, .edges = {0, 0}}.check();
}

TEST_CASE("a cursor that receives its own trace is always on plan") {
  for (const auto seed : seeds(50)) {
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 5, .accesses = 20, .writes = true});
    schedule_cursor cursor(trace);
    for (std::uint64_t iteration = 0; iteration < 3; ++iteration) {
      REQUIRE(cursor.iterations() == iteration);
      for (std::uint32_t i = 0; i < trace.events().size(); ++i) {
        const trace_event& event = trace.events()[i];
        REQUIRE(cursor.call(event.call, event.chunk, event.mode) == cursor_step{cursor_verdict::on_plan, i});
      }
    }
  }
}

TEST_CASE("a cursor skips omitted events, waits out unplanned ones, and finally gives up") {
  trace_recorder record;
  for (std::uint32_t i = 0; i < 10; ++i) {
    record.add_chunk(1);
    record.acquire(chunk_id{i}, access_mode::read);
    record.release(chunk_id{i});
  }
  const auto trace = record.freeze();
  schedule_cursor cursor(trace, {.reach = 6, .patience = 2});
  using enum cursor_verdict;
  CHECK(cursor.call(trace_call::acquire, chunk_id{0}) == cursor_step{on_plan, 0});
  CHECK(cursor.call(trace_call::release, chunk_id{0}) == cursor_step{on_plan, 1});
  CHECK(cursor.call(trace_call::acquire, chunk_id{2}) == cursor_step{skipped, 4});
  CHECK(cursor.call(trace_call::release, chunk_id{2}) == cursor_step{on_plan, 5});
  CHECK(cursor.call(trace_call::acquire, chunk_id{9}) == cursor_step{inserted, 6});  // out of reach
  CHECK(cursor.call(trace_call::acquire, chunk_id{3}, access_mode::write) == cursor_step{inserted, 6});
  CHECK(cursor.call(trace_call::acquire, chunk_id{3}) == cursor_step{on_plan, 6});
  CHECK(cursor.call(trace_call::acquire, chunk_id{0}) == cursor_step{inserted, 7});
  CHECK(cursor.call(trace_call::acquire, chunk_id{0}) == cursor_step{inserted, 7});
  CHECK_FALSE(cursor.diverged());
  CHECK(cursor.call(trace_call::acquire, chunk_id{0}).verdict == diverged);
  CHECK(cursor.call(trace_call::release, chunk_id{3}).verdict == diverged);
  cursor.restart();
  CHECK(cursor.call(trace_call::acquire, chunk_id{0}) == cursor_step{on_plan, 0});
}

TEST_CASE("a cursor finds its place over the end of the iteration") {
  trace_recorder record;
  for (std::uint32_t i = 0; i < 4; ++i) {
    record.add_chunk(1);
    record.acquire(chunk_id{i}, access_mode::read);
    record.release(chunk_id{i});
  }
  const auto trace = record.freeze();
  schedule_cursor cursor(trace);
  for (std::uint32_t i = 0; i < 3; ++i) {
    static_cast<void>(cursor.call(trace_call::acquire, chunk_id{i}));
    static_cast<void>(cursor.call(trace_call::release, chunk_id{i}));
  }
  CHECK(cursor.call(trace_call::acquire, chunk_id{1}) == cursor_step{cursor_verdict::skipped, 2});
  CHECK(cursor.iterations() == 1);
  CHECK(cursor.next() == 3);
}
