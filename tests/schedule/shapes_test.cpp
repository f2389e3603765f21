#include <llmmem/eviction/lru.hpp>
#include <llmmem/eviction/min.hpp>
#include <llmmem/model/presets.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/online.hpp>
#include <llmmem/schedule/planners.hpp>
#include <llmmem/schedule/shapes.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/schedule_world.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t layer_bytes = 1'000;

schedule_machine resident(std::uint64_t layers) {
  return {.budgets = {layers * layer_bytes}, .links = {{.bytes_per_second = 1'000'000'000}}};
}

std::uint64_t fetched(const llmmem::schedule::simulation& run) {
  std::uint64_t operations = 0;
  for (const plan_forecast& each : run.iterations)
    operations += each.edges[0].onboard.operations;
  return operations;
}

/// Thousandths of the accesses of 50 iterations that were hits, rounded down.
std::uint64_t hits(const schedule_trace& trace, std::uint64_t misses) {
  const std::uint64_t accesses = trace.events().size() / 2 * 50;
  return (accesses - misses) * 1'000 / accesses;
}

/// MIN that may pass an access by, over `slots` kept besides: misses of 50 iterations.
std::uint64_t bypassing_min(const schedule_trace& trace, std::size_t slots) {
  std::vector<std::uint32_t> uses;
  for (const trace_event& event : trace.events()) {
    if (event.call == trace_call::acquire) uses.push_back(to_index(event.chunk));
  }
  const std::size_t count = uses.size();
  const auto next_after = [&](std::size_t at) {
    for (std::size_t i = at + 1; i < count * 50; ++i) {
      if (uses[i % count] == uses[at % count]) return i;
    }
    return count * 50;
  };
  std::vector<std::pair<std::uint32_t, std::size_t>> kept;  // and its next use
  std::uint64_t misses = 0;
  for (std::size_t i = 0; i < count * 50; ++i) {
    const auto found = std::find_if(kept.begin(), kept.end(),
                                    [&](const auto& each) { return each.first == uses[i % count]; });
    if (found == kept.end()) {
      ++misses;
    } else {
      kept.erase(found);
    }
    kept.push_back({uses[i % count], next_after(i)});
    if (kept.size() > slots) {
      kept.erase(std::max_element(kept.begin(), kept.end(),
                                  [](const auto& a, const auto& b) { return a.second < b.second; }));
    }
  }
  return misses;
}

}  // namespace

TEST_CASE(
    "eighty equal layers have the published hits: none under LRU in a loop, those of MIN there and back") {
  const auto loop = shapes::forward(80, layer_bytes, 500);
  const auto there_and_back = shapes::forward_backward(80, layer_bytes, 500);
  const auto lru = [](const schedule_trace& trace, std::uint64_t layers) {
    return hits(trace, fetched(simulate_online(trace, resident(layers), lru_eviction(slot_count{80}), 50)));
  };
  const auto min = [](const schedule_trace& trace, std::uint64_t layers) {
    return hits(trace, fetched(simulate_online(trace, resident(layers), min_eviction(slot_count{80}), 50)));
  };
  CHECK(lru(loop, 8) == 0);
  CHECK(lru(loop, 20) == 0);
  CHECK(lru(loop, 40) == 0);
  CHECK(hits(loop, bypassing_min(loop, 8)) == 98);
  CHECK(hits(loop, bypassing_min(loop, 20)) == 245);
  CHECK(hits(loop, bypassing_min(loop, 40)) == 490);
  for (const auto& [layers, expected] : {std::pair(8U, 99U), std::pair(20U, 247U), std::pair(40U, 495U)}) {
    CHECK(lru(there_and_back, layers) == expected);
    CHECK(min(there_and_back, layers) == expected);
    CHECK(hits(there_and_back, bypassing_min(there_and_back, layers)) == expected);
  }
}

TEST_CASE("min_eviction on demand, next use by bytes and its bound agree, iteration after iteration") {
  for (const std::uint64_t layers : {2U, 8U, 20U, 40U, 79U, 80U, 100U}) {
    for (const bool back : {false, true}) {
      CAPTURE(layers);
      const auto one =
          back ? shapes::forward_backward(80, layer_bytes, 500) : shapes::forward(80, layer_bytes, 500);
      const auto trace = one.repeated(50);
      const auto machine = resident(layers);
      const auto plan = schedule::next_use{plan_objective::bytes, plan_span::single}(trace, machine);
      CHECK(plan.first.forecast.edges[0].onboard.operations ==
            fetched(simulate_online(one, machine, min_eviction(slot_count{80}), 50)));
      CHECK(plan.first.regret().bytes == 0);
    }
  }
}

TEST_CASE("min_eviction on demand moves the same bytes as next use, on any trace of equal clean chunks") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 7, .accesses = 20, .overlaps = random.once_in(2)});
    const auto machine = resident(trace.max_leased_bytes() / layer_bytes + random.below(std::uint64_t{4}));
    const auto plan =
        schedule::next_use{plan_objective::bytes, plan_span::single}(trace.repeated(5), machine);
    REQUIRE(plan.first.forecast.edges[0].onboard.operations ==
            fetched(simulate_online(trace, machine, min_eviction(slot_count{7}), 5)));
  }
}

TEST_CASE("an online policy reads back all writes, and moves at least the bound") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto trace = random_trace(random, {.chunks = 6,
                                             .accesses = 20,
                                             .most_units = 3,
                                             .writes = true,
                                             .discards = true,
                                             .overlaps = random.once_in(2)});
    const schedule_machine machine{.budgets = {trace.max_leased_bytes() + random.below(std::uint64_t{3'000})},
                                   .links = {{.bytes_per_second = 1'000'000'000}}};
    const auto run = simulate_online(trace, machine, lru_eviction(slot_count{6}), 5);
    REQUIRE(run.most_bytes[0] <= machine.budgets[0]);
    const auto bound = lower_bound(trace, machine, bounded_iteration::first);
    REQUIRE(run.iterations[0].edges[0].onboard.bytes >= bound.edges[0].onboard.bytes);
    REQUIRE(run.iterations[0].edges[0].offload.bytes >= bound.edges[0].offload.bytes);
    REQUIRE(run.iterations[0].stalls.total() >= bound.stall_ns);
  }
}

TEST_CASE("a model's decoding step reads every parameter once") {
  for (const model_shape* model : {&models::llama3_8b, &models::llama3_70b, &models::mixtral_8x7b}) {
    const auto trace = shapes::decode(*model, 2, 4'800'000'000'000);
    std::uint64_t bytes = 0;
    for (const std::uint64_t size : trace.sizes())
      bytes += size;
    CHECK(bytes <= model->parameters() * 2);
    CHECK(bytes + model->layers * 2 > model->parameters() * 2);
    CHECK(trace.sizes().size() == model->layers + 2);
  }
}
