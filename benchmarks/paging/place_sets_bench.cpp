// The one slow step of S3-FIFO's order, at most once in as many new entries as there are slots.
//
//   renumber_places/order/slots   all slots have a place, `in_order` or `at_random`; an item is a slot

#include <llmmem/eviction/detail/place_sets.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "support/timed.hpp"

namespace {

using namespace llmmem;

template <bool at_random>
void renumber(benchmark::State& state) {
  const auto slots = static_cast<std::uint32_t>(state.range(0));
  detail::place_sets<6> order(slot_count{slots}, {}, "order");
  std::vector<std::uint32_t> each(slots);
  std::iota(each.begin(), each.end(), 0U);
  if constexpr (at_random) std::shuffle(each.begin(), each.end(), std::mt19937(1));
  const auto renew = [&](std::uint32_t slot) {
    if (order.has_place(slot_id{slot})) order.remove(slot % 6, slot_id{slot});
    order.renew(slot_id{slot});
    order.insert(slot % 6, slot_id{slot});
  };
  const auto renew_all = [&] { std::for_each(each.begin(), each.end(), renew); };
  // That many renewals take the last place, and the next one renumbers and takes the last new place.
  renew_all();
  llmmem_benchmarks::measure(state, renew_all, [&] { renew(each.front()); }, [] {});
}

void sizes(benchmark::internal::Benchmark* rows) {
  rows->Arg(10'000)->Arg(5'000'000)->UseManualTime();
}

BENCHMARK(renumber<false>)->Name("renumber_places/in_order")->Apply(sizes);
BENCHMARK(renumber<true>)->Name("renumber_places/at_random")->Apply(sizes);

}  // namespace
