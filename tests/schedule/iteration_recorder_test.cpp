/// The recorder of an iteration, by a clock that the test moves.
#include <llmmem/schedule/detail/iteration_recorder.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Knows the chunks of `trace`.
trace_recorder knowing(const schedule_trace& trace) {
  trace_recorder made;
  for (const std::uint64_t bytes : trace.sizes())
    made.add_chunk(bytes);
  return made;
}

bool is_same(const schedule_trace& one, const schedule_trace& other) {
  return one.fingerprint() == other.fingerprint() && std::ranges::equal(one.events(), other.events()) &&
         one.tail_ns() == other.tail_ns();
}

}  // namespace

TEST_CASE("an iteration recorded call by call equals its trace, without the waits of calls") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const schedule_trace trace = random_trace(
        random, {.accesses = 20, .most_units = 3, .writes = true, .discards = true, .overlaps = true});
    std::uint64_t now = random.below(1'000U);
    detail::iteration_recorder recorder;
    recorder.begin_recording(knowing(trace), now);
    REQUIRE(recorder.empty());
    for (const trace_event& event : trace.events()) {
      now += event.compute_ns;
      recorder.note_call(event.call, event.chunk, now);
      if (event.call == trace_call::acquire) recorder.granted(event.chunk, event.mode);
      REQUIRE_FALSE(recorder.empty());
      now += random.below(5'000U);  // waiting
      recorder.call_ended(now);
    }
    REQUIRE(is_same(recorder.freeze(now + trace.tail_ns()), trace));
  }
}

TEST_CASE("a refused lease is not recorded, and the computation around it adds up") {
  trace_recorder chunks;
  const chunk_id chunk = chunks.add_chunk(100);
  detail::iteration_recorder recorder;
  recorder.begin_recording(chunks, 0);
  recorder.note_call(trace_call::acquire, chunk, 10);
  recorder.call_ended(15);
  CHECK(recorder.empty());
  recorder.note_call(trace_call::acquire, chunk, 22);
  recorder.granted(chunk, access_mode::read);
  recorder.also_changes(chunk);
  recorder.call_ended(30);
  recorder.note_call(trace_call::release, chunk, 31);
  recorder.call_ended(31);
  const schedule_trace trace = recorder.freeze(35);
  REQUIRE(trace.events().size() == 2);
  CHECK(trace.events()[0] == trace_event{17, chunk, trace_call::acquire, access_mode::read_write});
  CHECK(trace.events()[1] == trace_event{1, chunk, trace_call::release, access_mode::read});
  CHECK(trace.tail_ns() == 4);
}

TEST_CASE("a recording with a lease that is still held is refused by the recorder's own error") {
  trace_recorder chunks;
  const chunk_id chunk = chunks.add_chunk(100);
  detail::iteration_recorder recorder;
  recorder.begin_recording(chunks, 0);
  recorder.note_call(trace_call::acquire, chunk, 1);
  recorder.granted(chunk, access_mode::read);
  CHECK_THROWS_AS(static_cast<void>(recorder.freeze(2)), argument_error);
}

TEST_CASE("an iteration timed from end to end changes only the times of its trace") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const schedule_trace trace = random_trace(random, {.accesses = 10, .writes = true, .discards = true});
    const auto events = static_cast<std::uint32_t>(trace.events().size());
    const std::uint32_t left_out = random.below(2 * events);
    detail::iteration_recorder recorder;
    std::uint64_t now = 0;
    recorder.begin_timing(events, now);
    std::vector<std::uint64_t> times;
    for (std::uint32_t i = 0; i < events; ++i) {
      times.push_back(random.below(3'000U));
      now += times.back();
      if (i != left_out) recorder.note_time(i, recorder.computed(now));
      now += random.below(5'000U);  // waiting
      recorder.call_ended(now);
      if (i + 1 < events) REQUIRE_FALSE(recorder.retimed(trace, now));
    }
    const std::optional<schedule_trace> timed = recorder.retimed(trace, now + 9);
    REQUIRE(timed.has_value() == (left_out >= events));
    if (!timed) continue;
    REQUIRE(timed->fingerprint() == trace.fingerprint());
    REQUIRE(timed->tail_ns() == 9);
    for (std::uint32_t i = 0; i < events; ++i) {
      trace_event expected = trace.events()[i];
      expected.compute_ns = times[i];
      REQUIRE(timed->events()[i] == expected);
    }
    recorder.begin_timing(events, now);
    REQUIRE_FALSE(recorder.retimed(trace, now));
  }
}

TEST_CASE("an event that is recorded twice does not replace a missing one") {
  trace_recorder record;
  const chunk_id chunk = record.add_chunk(100);
  record.acquire(chunk, access_mode::read);
  record.release(chunk);
  const schedule_trace trace = record.freeze();
  detail::iteration_recorder recorder;
  recorder.begin_timing(2, 0);
  recorder.note_time(0, 1);
  recorder.note_time(0, 1);
  CHECK_FALSE(recorder.retimed(trace, 2));
  recorder.note_time(1, 1);
  CHECK(recorder.retimed(trace, 2));
}
