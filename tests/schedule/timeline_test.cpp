#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/timeline.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

llmmem::schedule::simulation some_run(std::uint64_t seed, timeline_detail detail) {
  random_numbers random(seed);
  const auto trace =
      random_trace(random, {.chunks = 5, .accesses = 14, .most_units = 3, .writes = true, .overlaps = true});
  const schedule_machine machine{.budgets = {trace.max_leased_bytes() + 1'000},
                                 .links = {{.bytes_per_second = 1'000'000'000, .latency_ns = 10}}};
  return simulate(trace, schedule::next_use{}(trace, machine), 3, detail);
}

}  // namespace

TEST_CASE("a timeline accounts for every nanosecond of the program and every transfer, without overlap") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    const auto run = some_run(seed, timeline_detail::full);
    std::uint64_t whole = 0;
    std::uint64_t operations = 0;
    for (const plan_forecast& each : run.iterations) {
      whole += each.iteration_ns;
      operations += each.edges[0].onboard.operations + each.edges[0].offload.operations;
    }
    std::map<std::size_t, std::uint64_t> ended;
    std::uint64_t program = 0;
    std::uint64_t transfers = 0;
    for (const timeline_span& each : run.spans) {
      const bool moves = each.kind == llmmem::schedule::span_kind::transfer;
      std::uint64_t& end = ended[moves ? detail::row_of(each) : 0];
      REQUIRE(each.start_ns >= end);
      REQUIRE(each.finish_ns > each.start_ns);
      if (!moves) REQUIRE(each.start_ns == end);
      end = each.finish_ns;
      (moves ? transfers : program) += moves ? 1 : each.finish_ns - each.start_ns;
    }
    REQUIRE(program == whole);
    REQUIRE(transfers == operations);
    REQUIRE(some_run(seed, timeline_detail::none).spans.empty());
  }
}

TEST_CASE("the chrome trace is JSON with a bar for each span, in microseconds") {
  const auto run = some_run(3, timeline_detail::full);
  const auto parsed = nlohmann::json::parse(write_chrome_trace(run));
  std::size_t bars = 0;
  for (const auto& each : parsed["traceEvents"]) {
    if (each["ph"] != "X") continue;
    CHECK(each["ts"].get<double>() == doctest::Approx(static_cast<double>(run.spans[bars].start_ns) / 1000));
    ++bars;
  }
  CHECK(bars == run.spans.size());
}

TEST_CASE("the drawing has a row for computation, stalls and each direction of the link") {
  const std::string svg = write_timeline_svg(some_run(3, timeline_detail::full));
  for (const char* row : {">compute<", ">stall<", ">onboard, tier 1 to 0<", ">offload, tier 0 to 1<"})
    CHECK(svg.find(row) != std::string::npos);
  CHECK(svg.ends_with("</svg>\n"));
  CHECK_THROWS_WITH_AS(write_timeline_svg({}, {.width = 0}),
                       "write_timeline_svg: a width of 0 pixels; it must be 1 to 100000", argument_error);
}
