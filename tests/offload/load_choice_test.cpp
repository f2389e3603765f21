/// How much of a prompt is worth loading, against all choices that exist.
#include <llmmem/offload/load_choice.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using offload::load_overlap;

namespace {

constexpr std::uint64_t block_tokens = 4;
constexpr std::uint64_t pending = max_kv_tiers;

/// A prompt of blocks: which tier has each, or `pending`; the rest must be computed.
struct world {
  std::vector<std::size_t> blocks{};
  std::vector<std::uint64_t> bytes{};
  std::uint64_t first = 0;
  std::uint64_t goal = 0;
  offload::load_costs costs{};
};

world any_world(random_numbers& random) {
  world out;
  const std::size_t count = random.below(std::size_t{9});
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_pending = random.below(std::uint32_t{8}) == 0;
    out.blocks.push_back(is_pending ? pending : random.below(max_kv_tiers));
    out.bytes.push_back(1 + random.below(std::uint64_t{1000}));
  }
  out.first = block_tokens * random.below(std::uint64_t{3});
  out.goal = out.first + block_tokens * count + random.below(std::uint64_t{20});
  out.costs = {.prefill_ns = random.below(std::uint64_t{300}),
               .overlap = random.below(std::uint32_t{2}) == 0 ? load_overlap::none : load_overlap::by_layer,
               .pending_ns = random.below(std::uint64_t{500})};
  for (auto& each : out.costs.links) {
    if (random.below(std::uint32_t{4}) == 0) continue;  // a link that costs nothing
    each.link = {.bytes_per_second = 100'000'000 + random.below(std::uint64_t{20'000'000'000}),
                 .latency_ns = random.below(std::uint64_t{200})};
    each.pending_bytes = random.below(std::uint32_t{2}) == 0 ? 0 : random.below(std::uint64_t{3000});
  }
  return out;
}

/// The definition, for one length.
struct outcome {
  std::uint64_t ns = 0;
  bool has_waited = false;
};
outcome outcome_of(const world& of, std::size_t blocks) {
  const auto link_ns = [&](std::size_t k, std::uint64_t bytes) -> std::uint64_t {
    const link_model& link = of.costs.links[k].link;
    if (bytes == 0 || link.bytes_per_second == 0) return 0;
    return link.latency_ns + (bytes * 1'000'000'000 + link.bytes_per_second - 1) / link.bytes_per_second;
  };
  outcome out;
  std::uint64_t wait = of.costs.pending_ns;
  for (std::size_t k = 0; k < max_kv_tiers; ++k)
    wait = std::max(wait, link_ns(k, of.costs.links[k].pending_bytes));
  std::uint64_t over[max_kv_tiers] = {};
  for (std::size_t i = 0; i < blocks; ++i) {
    out.has_waited = out.has_waited || of.blocks[i] == pending;
    over[0] += of.bytes[i];
    if (of.blocks[i] != pending && of.blocks[i] != 0) over[of.blocks[i]] += of.bytes[i];
  }
  std::uint64_t load = 0;
  for (std::size_t k = 0; k < max_kv_tiers; ++k) {
    const std::uint64_t before = out.has_waited ? 0 : of.costs.links[k].pending_bytes;
    if (over[k] != 0) load = std::max(load, link_ns(k, before + over[k]));
  }
  const std::uint64_t compute = (of.goal - of.first - blocks * block_tokens) * of.costs.prefill_ns;
  out.ns = of.costs.overlap == load_overlap::none ? load + compute : std::max(load, compute);
  if (out.has_waited) out.ns += wait;
  return out;
}

offload::load_choice choice_of(const world& of) {
  offload::load_chooser chooser(of.costs, of.first, of.goal);
  offload::loadable_length length{.tokens = of.first};
  for (std::size_t i = 0; i < of.blocks.size(); ++i) {
    length.tokens += block_tokens;
    (of.blocks[i] == pending ? length.pending_bytes : length.bytes[of.blocks[i]]) += of.bytes[i];
    chooser.offer(length);
  }
  return chooser.choice();
}

}  // namespace

TEST_CASE("no length of a prompt is cheaper to load than the chosen one, now or after a wait") {
  std::uint64_t waits = 0;
  std::uint64_t partial = 0;
  for (const auto seed : seeds(4000, 1000)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const world of = any_world(random);
    const offload::load_choice choice = choice_of(of);
    std::uint64_t now = ~std::uint64_t{0};
    std::uint64_t later = ~std::uint64_t{0};
    std::uint64_t longest_now = of.first;
    std::uint64_t longest_later = of.first;
    for (std::size_t blocks = 0; blocks <= of.blocks.size(); ++blocks) {
      const outcome each = outcome_of(of, blocks);
      std::uint64_t& best = each.has_waited ? later : now;
      if (each.ns > best) continue;
      best = each.ns;
      (each.has_waited ? longest_later : longest_now) = of.first + blocks * block_tokens;
    }
    REQUIRE(choice.ns == now);
    REQUIRE(choice.tokens == longest_now);
    REQUIRE(choice.waiting_ns == later);
    REQUIRE(choice.waiting_tokens == longest_later);
    REQUIRE(choice.waits() == (later < now));
    waits += choice.waits() ? 1U : 0U;
    partial +=
        choice.tokens != of.first && choice.tokens < of.first + of.blocks.size() * block_tokens ? 1U : 0U;
  }
  CHECK(waits > 30);
  CHECK(partial > 100);
}

TEST_CASE("times of slow links and long prompts saturate") {
  offload::load_costs costs{.prefill_ns = ~std::uint64_t{0}};
  costs.links[0].link.bytes_per_second = 1;
  offload::load_chooser chooser(costs, 0, 16);
  chooser.offer({.tokens = 8, .bytes = {~std::uint64_t{0}}});
  CHECK(chooser.choice().ns == ~std::uint64_t{0});
  chooser.offer({.tokens = 16, .bytes = {1}});
  CHECK(chooser.choice() == offload::load_choice{.tokens = 16, .ns = 1'000'000'000});
}
