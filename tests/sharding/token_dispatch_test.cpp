#include <llmmem/sharding/token_dispatch.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using llmmem_tests::random_numbers;
using llmmem_tests::seeds;

namespace {

std::vector<expert_id> choices_of(std::initializer_list<std::uint32_t> numbers) {
  std::vector<expert_id> chosen;
  for (const std::uint32_t each : numbers)
    chosen.push_back(expert_id{each});
  return chosen;
}

std::vector<std::uint32_t> list(std::span<const std::uint32_t> values) {
  return {values.begin(), values.end()};
}

/// The definition: experts' queues, filled in the order of the options.
struct oracle {
  std::map<std::uint32_t, std::vector<std::uint32_t>> queues;
  std::map<std::uint32_t, std::uint32_t> demand;
  std::vector<std::uint32_t> dropped;
  std::uint32_t unrouted = 0;

  oracle(const dispatch_options& options, const std::vector<expert_id>& chosen) {
    std::vector<std::uint32_t> order(chosen.size());
    for (std::uint32_t i = 0; i < order.size(); ++i)
      order[i] = i;
    if (options.order == dispatch_order::choice_first) {
      std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        const std::uint32_t choice_a = a % options.choices;
        const std::uint32_t choice_b = b % options.choices;
        return choice_a != choice_b ? choice_a < choice_b : a < b;
      });
    }
    for (const std::uint32_t assignment : order) {
      if (chosen[assignment] == no_expert) {
        ++unrouted;
        continue;
      }
      const std::uint32_t expert = to_index(chosen[assignment]);
      ++demand[expert];
      if (queues[expert].size() < options.capacity) {
        queues[expert].push_back(assignment);
      } else {
        dropped.push_back(assignment);
      }
    }
  }
};

}  // namespace

TEST_CASE(
    "every assignment is in one slot, dropped or unrouted, as queues in the documented order would have it") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    dispatch_options options{
        .experts = 1 + random.below(9U), .choices = 1 + random.below(3U), .max_tokens = 40};
    if (!random.once_in(4)) options.capacity = random.below(9U);
    if (random.once_in(2)) options.order = dispatch_order::token_first;
    token_dispatch dispatch(options);
    // Used again: nothing of the plan before is left.
    for (int round = 0; round < 3; ++round) {
      std::vector<expert_id> chosen(random.below(41U) * options.choices);
      for (auto& each : chosen)
        each = random.once_in(9) ? no_expert : expert_id{random.below(options.experts)};
      REQUIRE(dispatch.plan(chosen));
      const oracle expected(options, chosen);
      REQUIRE(dispatch.tokens() * options.choices == chosen.size());
      REQUIRE(dispatch.kept().size() + dispatch.dropped().size() + dispatch.unrouted() == chosen.size());
      REQUIRE(dispatch.unrouted() == expected.unrouted);
      REQUIRE(list(dispatch.dropped()) == expected.dropped);
      std::uint64_t next = 0;
      for (std::uint32_t e = 0; e < options.experts; ++e) {
        const auto found = expected.queues.find(e);
        const auto queue = found == expected.queues.end() ? std::vector<std::uint32_t>{} : found->second;
        const index_range slots = dispatch.slots_of(expert_id{e});
        REQUIRE(slots == index_range{next, queue.size()});
        REQUIRE(dispatch.demand(expert_id{e}) == (expected.demand.contains(e) ? expected.demand.at(e) : 0));
        for (const std::uint32_t assignment : queue) {
          const auto slot = static_cast<std::uint32_t>(next++);
          REQUIRE(dispatch.kept()[slot] == assignment);
          REQUIRE(dispatch.slots()[assignment] == slot);
          REQUIRE(dispatch.slot_of(assignment / options.choices, assignment % options.choices) == slot);
          REQUIRE(dispatch.padded_slot_of(slot, expert_id{e}) ==
                  std::uint64_t{e} * options.capacity + slot - slots.first);
        }
      }
      REQUIRE(next == dispatch.kept().size());
      for (const std::uint32_t each : dispatch.dropped())
        REQUIRE(dispatch.slots()[each] == token_dispatch::dropped_slot);
      for (std::size_t i = 0; i < chosen.size(); ++i)
        REQUIRE((dispatch.slots()[i] == token_dispatch::unrouted_slot) == (chosen[i] == no_expert));
    }
  }
}

TEST_CASE("first choices of later tokens come before second choices of earlier ones") {
  // Three tokens, two choices: all want expert 0, the first two as their first.
  const auto chosen = choices_of({1, 0, 0, 1, 0, 1});
  token_dispatch gshard({.experts = 2, .choices = 2, .capacity = 2, .max_tokens = 3});
  REQUIRE(gshard.plan(chosen));
  // Expert 0: first choices of tokens 1 and 2. Expert 1: of token 0, then the second choice of token 1.
  CHECK(list(gshard.kept()) == std::vector<std::uint32_t>{2, 4, 0, 3});
  CHECK(list(gshard.dropped()) == std::vector<std::uint32_t>{1, 5});
  token_dispatch by_token(
      {.experts = 2, .choices = 2, .capacity = 2, .order = dispatch_order::token_first, .max_tokens = 3});
  REQUIRE(by_token.plan(chosen));
  CHECK(list(by_token.kept()) == std::vector<std::uint32_t>{1, 2, 0, 3});
  CHECK(list(by_token.dropped()) == std::vector<std::uint32_t>{4, 5});
}

TEST_CASE("without a capacity the order is a stable sort by expert, and its inverse brings rows back") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    token_dispatch dispatch(
        {.experts = 6, .choices = 2, .order = dispatch_order::token_first, .max_tokens = 30});
    std::vector<expert_id> chosen(60);
    for (auto& each : chosen)
      each = expert_id{random.below(6U)};
    REQUIRE(dispatch.plan(chosen));
    std::vector<std::uint32_t> sorted(60);
    for (std::uint32_t i = 0; i < 60; ++i)
      sorted[i] = i;
    std::sort(sorted.begin(), sorted.end(), [&](std::uint32_t a, std::uint32_t b) {
      return chosen[a] != chosen[b] ? chosen[a] < chosen[b] : a < b;
    });
    REQUIRE(list(dispatch.kept()) == sorted);
    REQUIRE(dispatch.dropped().empty());
    // Out and back: weights of a token's choices that sum to one give the token itself.
    for (std::uint32_t token = 0; token < 30; ++token) {
      double combined = 0;
      for (std::uint32_t choice = 0; choice < 2; ++choice)
        combined += (choice == 0 ? 0.75 : 0.25) * (dispatch.kept()[dispatch.slot_of(token, choice)] / 2);
      REQUIRE(combined == token);
    }
  }
}

TEST_CASE("the rows sent between two ranks are those of one's tokens and the other's experts") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t world = 1 + random.below(5U);
    const std::uint32_t experts = 1 + random.below(8U);
    std::vector<token_dispatch> groups;
    std::vector<std::uint64_t> expected(std::size_t{world} * world, 0);
    for (std::uint32_t source = 0; source < world; ++source) {
      groups.emplace_back(dispatch_options{.experts = experts, .choices = 2, .capacity = 3, .max_tokens = 9});
      std::vector<expert_id> chosen(18);
      for (auto& each : chosen)
        each = expert_id{random.below(experts)};
      REQUIRE(groups.back().plan(chosen));
      for (const std::uint32_t assignment : groups.back().kept()) {
        const rank_id to = rank_of(chosen[assignment], experts, rank_count{world});
        ++expected[std::size_t{source} * world + to_index(to)];
      }
      std::uint64_t next = 0;
      for (std::uint32_t to = 0; to < world; ++to) {
        const index_range slots = groups.back().slots_to(rank_id{to}, rank_count{world});
        REQUIRE(slots.first == next);
        next += slots.count;
      }
      REQUIRE(next == groups.back().kept().size());
    }
    REQUIRE(dispatch_matrix(groups, rank_count{world}) == expected);
  }
}

TEST_CASE("a capacity is tokens x choices x factor / experts, rounded up") {
  // Figure 3 of Switch: 6 tokens, 3 experts; factor 1.0 gives 2 slots, 1.5 gives 3.
  CHECK(expert_capacity(6, 1, 3, 100) == 2);
  CHECK(expert_capacity(6, 1, 3, 150) == 3);
  CHECK(expert_capacity(1024, 2, 16, 125) == 160);
  CHECK(expert_capacity(10, 1, 1, 110) == 11);
  CHECK(expert_capacity(7, 1, 4, 100) == 2);
  CHECK(expert_capacity(0, 1, 4, 100) == 0);
  CHECK_THROWS_WITH_AS(expert_capacity(1, 1, 0, 100), "expert_capacity: 0 experts; a layer has at least one",
                       argument_error);
  CHECK_THROWS_WITH_AS(expert_capacity(0xFFFF'FFFF, 1, 1, 100),
                       "expert_capacity: 4294967295 tokens per expert; slots are 32 bits wide", length_error);
  CHECK_THROWS_AS(expert_capacity(0xFFFF'FFFF, 0xFFFF'FFFF, 1, 100), length_error);
}

TEST_CASE("impossible choices are refused, and the previous plan is kept") {
  token_dispatch dispatch({.experts = 2, .choices = 2, .max_tokens = 2, .name = "moe.3"});
  REQUIRE(dispatch.plan(choices_of({1, 0})));
  const auto refused = [&](std::initializer_list<std::uint32_t> numbers) {
    const auto outcome = dispatch.plan(choices_of(numbers));
    CHECK(list(dispatch.kept()) == std::vector<std::uint32_t>{1, 0});
    CHECK(dispatch.tokens() == 1);
    return outcome.error().message();
  };
  CHECK(refused({0, 1, 1}) == "moe.3: two lengths must be equal, but are 3 and 2");
  CHECK(refused({0, 1, 1, 0, 0, 0}) == "moe.3: 3 requested, but the highest allowed is 2");
  CHECK(refused({0, 1, 1, 2}) == "moe.3: 2 requested, but the highest allowed is 1");
  CHECK_THROWS_WITH_AS(token_dispatch(dispatch_options{}),
                       "token_dispatch: 0 experts; a layer has at least one", argument_error);
  CHECK_THROWS_WITH_AS(token_dispatch({.experts = 1, .choices = 0}),
                       "token_dispatch: 0 choices; a token makes at least one", argument_error);
  CHECK_THROWS_WITH_AS(
      token_dispatch({.experts = 1, .choices = 2, .max_tokens = 0x8000'0000}),
      "token_dispatch: 2147483648 tokens x 2 choices for 1 experts; slots and experts are 32 bits wide",
      length_error);
  CHECK_THROWS_AS(token_dispatch({.experts = 0xFFFF'FFFF}), length_error);
  const std::vector<token_dispatch> groups(2, dispatch);
  CHECK_THROWS_WITH_AS(dispatch_matrix(groups, rank_count{3}),
                       "dispatch_matrix: 2 groups of tokens and 3 ranks; each rank has one", argument_error);
}
