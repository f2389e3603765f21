#include <llmmem/checkpoint/rank_state.hpp>
#include <llmmem/sharding/flat_uneven.hpp>
#include <llmmem/sharding/replicated.hpp>
#include <llmmem/sharding/split_2d.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "support/error_text.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/sharding_world.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// All hold all, and rank 0 is asked to write it.
struct lopsided {
  std::vector<tensor_facts> facts;
  std::uint32_t ranks;

  [[nodiscard]] rank_count world() const noexcept { return rank_count{ranks}; }
  [[nodiscard]] std::uint32_t tensors() const noexcept { return static_cast<std::uint32_t>(facts.size()); }
  [[nodiscard]] tensor_shape shape(tensor_id t) const noexcept { return facts[to_index(t)].shape; }
  [[nodiscard]] element_runs local(tensor_id t, rank_id) const noexcept {
    return element_runs::all_of(shape(t).elements());
  }
  [[nodiscard]] element_runs owned(tensor_id t, rank_id r) const noexcept {
    return to_index(r) == 0 ? local(t, r) : element_runs{};
  }
  [[nodiscard]] rank_id owner(tensor_id, std::uint64_t) const noexcept { return rank_id{0}; }
  [[nodiscard]] bool is_replicated(tensor_id) const noexcept { return true; }
};
static_assert(partition<lopsided>);

state_tensor tensor(const std::string& name, std::vector<std::uint64_t> shape,
                    safetensors_type type = safetensors_type::f32) {
  return {.name = name, .type = type, .shape = std::move(shape), .group = "model", .part = {}};
}

std::vector<state_tensor> random_catalogue(random_numbers& random) {
  constexpr safetensors_type types[] = {safetensors_type::u8, safetensors_type::bf16, safetensors_type::f32,
                                        safetensors_type::f64};
  std::vector<state_tensor> catalogue(1 + random.below(std::uint64_t{6}));
  for (std::size_t i = 0; i < catalogue.size(); ++i) {
    std::vector<std::uint64_t> shape(random.below(std::uint64_t{4}));
    for (auto& each : shape)
      each = random.once_in(8) ? 0 : 1 + random.below(std::uint64_t{9});
    catalogue[i] = tensor("t" + std::to_string(i), shape, types[random.below(4U)]);
  }
  return catalogue;
}

std::uint64_t elements_in(const state_tensor& of) {
  return tensor_shape::of(of.shape).elements();
}

element_runs saved(const state_tensor& of) {
  return of.part.value_or(element_runs::all_of(elements_in(of)));
}

}  // namespace

TEST_SUITE("rank_state") {
  TEST_CASE("one rank saves each element, and has it in one span") {
    for (const auto seed : seeds(400)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::vector<state_tensor> catalogue = random_catalogue(random);
      const rank_count world{1 + random.below(6U)};
      const any_partition any =
          random_partition(random, facts_of(catalogue), random.below(partition_kinds), world);
      std::visit(
          [&](const auto& split) {
            const auto ranks = rank_states(catalogue, split);
            REQUIRE(ranks.size() == to_number(world));
            for (std::uint32_t t = 0; t < catalogue.size(); ++t) {
              std::set<std::uint64_t> seen;
              for (std::uint32_t rank = 0; rank < to_number(world); ++rank) {
                const state_tensor& each = ranks[rank][t];
                REQUIRE(each.name == catalogue[t].name);
                REQUIRE(each.shape == catalogue[t].shape);
                REQUIRE(each.type == catalogue[t].type);
                const element_runs held = split.local(tensor_id{t}, rank_id{rank});
                const auto range = range_within(held, saved(each));
                REQUIRE(range);
                REQUIRE(range->count == saved(each).elements());
                std::uint64_t at = range->first;
                for (const std::uint64_t element : elements_of(saved(each))) {
                  REQUIRE(seen.insert(element).second);
                  REQUIRE(held.contains(element));
                  REQUIRE(held.position_of(element) == at++);
                }
                if (!split.is_replicated(tensor_id{t}))
                  REQUIRE(saved(each) == split.owned(tensor_id{t}, rank_id{rank}));
              }
              REQUIRE(seen.size() == elements_in(catalogue[t]));
            }
            const std::uint32_t rank = random.below(to_number(world));
            const auto alone = rank_state(catalogue, split, rank_id{rank});
            REQUIRE(alone.size() == catalogue.size());
            for (std::size_t t = 0; t < alone.size(); ++t)
              REQUIRE(alone[t].part == ranks[rank][t].part);
          },
          any);
    }
  }

  TEST_CASE("common tensors are distributed so that no rank saves more than 1.1 times as much as another") {
    for (const auto seed : seeds(300)) {
      CAPTURE(seed);
      random_numbers random(seed);
      std::vector<state_tensor> catalogue(1 + random.below(std::uint64_t{40}));
      for (std::size_t i = 0; i < catalogue.size(); ++i)
        catalogue[i] = tensor("t" + std::to_string(i), {1 + random.below(std::uint64_t{5000})},
                              random.once_in(2) ? safetensors_type::bf16 : safetensors_type::f64);
      const std::uint32_t world = 1 + random.below(8U);
      std::uint64_t bytes = 0;
      for (const tensor_facts& each : facts_of(catalogue))
        bytes += each.bytes();
      if (bytes / world < std::uint64_t{32} * 8) continue;  // the level is under 32 elements
      const auto ranks = rank_states(catalogue, lopsided{facts_of(catalogue), world});
      const rank_shares shares = shares_of(ranks);
      CHECK(shares.largest * 10 <= shares.smallest * 11);
    }
  }

  TEST_CASE("common tensors stay uncut if that is even enough, and are cut otherwise") {
    std::vector<state_tensor> layers;
    for (int i = 0; i < 24; ++i)
      layers.push_back(tensor("layer." + std::to_string(i), {64, 64}));
    const auto whole_in = [&](std::uint32_t world) {
      std::uint64_t whole = 0;
      for (const auto& rank : rank_states(layers, lopsided{facts_of(layers), world})) {
        for (const state_tensor& each : rank)
          whole += each.part ? 0U : 1U;
      }
      return whole;
    };
    CHECK(whole_in(4) == 24);
    layers.pop_back();
    CHECK(whole_in(2) == 23);  // 12 and 11: no rank has more than 1.1 times what the other has
    layers.push_back(tensor("embedding", {1000, 64}));
    const auto ranks = rank_states(layers, lopsided{facts_of(layers), 4});
    std::uint64_t parts = 0;
    for (const auto& rank : ranks)
      parts += rank.back().part && !rank.back().part->empty() ? 1U : 0U;
    CHECK(parts > 1);
    CHECK(shares_of(ranks).largest * 10 <= shares_of(ranks).smallest * 11);
  }

  TEST_CASE("split tensors count first, and common ones even out the rest") {
    const std::vector<state_tensor> catalogue = {tensor("weight", {3, 4096}), tensor("norm", {12288})};
    const std::vector<tensor_facts> facts = facts_of(catalogue);
    const split_axis axes[] = {split_axis::rows, split_axis::none};
    const auto ranks = rank_states(catalogue, split_2d(facts, axes, rank_count{2}));
    const rank_shares shares = shares_of(ranks);
    CHECK(shares.largest - shares.smallest <= 8);
    CHECK(saved(ranks[0][0]).elements() == 8192);
    CHECK(saved(ranks[0][1]).elements() == 4096);
  }

  TEST_CASE("elements that share a byte are never separated") {
    const std::vector<state_tensor> catalogue = {tensor("narrow", {3, 8}, safetensors_type::f4),
                                                 tensor("wide", {1000})};
    const auto ranks = rank_states(catalogue, lopsided{facts_of(catalogue), 3});
    std::uint64_t whole = 0;
    for (const auto& rank : ranks) {
      CHECK((saved(rank[0]).empty() || !rank[0].part));
      whole += rank[0].part ? 0U : 1U;
    }
    CHECK(whole == 1);
  }

  TEST_CASE("elements that share a byte also count") {
    std::vector<state_tensor> catalogue = {tensor("wide", {1400})};
    for (int i = 0; i < 4; ++i)
      catalogue.push_back(tensor("narrow" + std::to_string(i), {64, 64}, safetensors_type::f4));
    const rank_shares shares = shares_of(rank_states(catalogue, lopsided{facts_of(catalogue), 3}));
    CHECK(shares.smallest + shares.largest > 0);
    CHECK(shares.largest * 10 <= shares.smallest * 11);
  }

  TEST_CASE("rank 0 saves a tensor without elements, as empty") {
    const std::vector<state_tensor> catalogue = {tensor("none", {0, 8}), tensor("some", {100})};
    const auto ranks = rank_states(catalogue, flat_uneven::even(facts_of(catalogue), rank_count{2}));
    CHECK(!ranks[0][0].part);
    CHECK(ranks[1][0].part == element_runs{});
  }

  TEST_CASE("a partition of another state is refused") {
    std::vector<state_tensor> catalogue = {tensor("a", {4, 4})};
    const llmmem::sharding::replicated split(facts_of(catalogue), rank_count{2});
    CHECK(text_of([&] { static_cast<void>(rank_state(catalogue, split, rank_id{2})); }) ==
          "rank_state: rank 2 of 2");
    catalogue.push_back(tensor("b", {4}));
    CHECK(text_of([&] { static_cast<void>(rank_states(catalogue, split)); }) ==
          "rank_state: 2 tensors, but the partition has 1");
    catalogue = {tensor("a", {4, 5})};
    CHECK(text_of([&] { static_cast<void>(rank_states(catalogue, split)); }) ==
          "rank_state: tensor 'a' has a shape other than the partition's");
    catalogue = {tensor("a", {4, 4})};
    catalogue[0].part = element_runs::flat_range(0, 8);
    CHECK(text_of([&] { static_cast<void>(rank_states(catalogue, split)); }) ==
          "rank_state: tensor 'a' is already a part; pass whole tensors");
  }

  TEST_CASE("the place of a part within the held piece is reported if it is one range") {
    for (const auto seed : seeds(500)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint64_t elements = 1 + random.below(std::uint64_t{40});
      const element_runs held = random_runs(random, elements);
      const element_runs part = random_runs(random, elements);
      std::optional<std::uint64_t> first;
      std::uint64_t next = 0;
      bool is_range = true;
      std::uint64_t position = 0;
      for (const std::uint64_t element : elements_of(held)) {
        if (elements_of(part).contains(element)) {
          if (!first) first = next = position;
          is_range = is_range && next++ == position;
        }
        ++position;
      }
      for (const std::uint64_t element : elements_of(part))
        is_range = is_range && held.contains(element);
      const auto range = range_within(held, part);
      if (part.empty()) {
        CHECK(range == index_range{0, 0});
      } else if (elements_of(held).size() > 0 && is_range) {
        CHECK(range == index_range{*first, part.elements()});
      } else {
        bool is_part = true;
        for (const std::uint64_t element : elements_of(part))
          is_part = is_part && held.contains(element);
        if (is_part) CHECK(!range);  // of what is not held nothing is promised
      }
    }
  }
}
