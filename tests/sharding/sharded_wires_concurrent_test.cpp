#include <llmmem/comm/wired_collectives.hpp>
#include <llmmem/sharded_state.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"
#include "support/wired_floats.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::sim_endpoint;
using namespace llmmem_tests;

using sim_ranks = communicator<sim_endpoint>;
using sim_state = sharded_state<table_partition, sim_ranks, host_space>;

std::vector<tensor_facts> of_floats(std::vector<tensor_facts> tensors) {
  for (tensor_facts& each : tensors)
    each.element_bytes = 4;
  return tensors;
}

wire_form random_wire(random_numbers& random) {
  switch (random.below(5U)) {
    case 0:
      return wire_format::bf16;
    case 1:
      return {wire_format::fp8, 1 + random.below(300U)};
    case 2:
      return {wire_format::int4, 2 + 2 * random.below(40U), wire_scale::bf16};
    default:
      return {wire_format::int8, 1 + random.below(100U)};
  }
}

std::uint32_t random_node(random_numbers& random, std::uint32_t world) {
  const std::uint32_t node = 1 + random.below(world);
  return random.once_in(3) || world % node != 0 ? 0 : node;
}

/// The elements of a rank's part of a scope, one after the other; `whole[i]` is all of the i-th tensor.
template <class Part>
floats stream(const std::vector<floats>& whole, const std::vector<tensor_id>& scope, const Part& part) {
  floats all;
  for (std::size_t i = 0; i < scope.size(); ++i) {
    const element_runs runs = part(scope[i]);
    intersect(runs, runs, [&](std::uint64_t first, std::uint64_t count) {
      all.insert(all.end(), whole[i].begin() + static_cast<std::ptrdiff_t>(first),
                 whole[i].begin() + static_cast<std::ptrdiff_t>(first + count));
    });
  }
  return all;
}
template <class Part>
void put_stream(std::vector<floats>& whole, const std::vector<tensor_id>& scope, const Part& part,
                const floats& from) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < scope.size(); ++i) {
    const element_runs runs = part(scope[i]);
    intersect(runs, runs, [&](std::uint64_t first, std::uint64_t count) {
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), count,
                  whole[i].begin() + static_cast<std::ptrdiff_t>(first));
      at += count;
    });
  }
}

void set_bytes(std::span<std::byte> to, const floats& values) {
  REQUIRE(to.size() == values.size() * 4);
  if (!to.empty()) std::memcpy(to.data(), values.data(), to.size());
}

std::vector<tensor_id> all_of(const std::vector<tensor_facts>& tensors) {
  std::vector<tensor_id> scope;
  for (std::uint32_t t = 0; t < tensors.size(); ++t)
    scope.push_back(tensor_id{t});
  return scope;
}

std::vector<floats> wholes(const std::vector<tensor_facts>& tensors, std::uint64_t seed) {
  std::vector<floats> made;
  for (const tensor_facts& each : tensors)
    made.push_back(floats_of(each.shape.elements(), seed + made.size() * 1000));
  return made;
}

floats sum_over(const std::vector<floats>& parts, const sharded_wires& wires) {
  const std::size_t node = wires.node_ranks;
  if (parts.size() == 1) return parts[0];
  if (node == 1) return sum_of(parts, wires.sum.between);
  if (node == 0 || node == parts.size()) return sum_of(parts, wires.sum.within);
  std::vector<floats> nodes;
  for (std::size_t first = 0; first < parts.size(); first += node) {
    const auto begin = parts.begin() + static_cast<std::ptrdiff_t>(first);
    nodes.push_back(sum_of({begin, begin + static_cast<std::ptrdiff_t>(node)}, wires.sum.within));
  }
  return sum_of(nodes, wires.sum.between);
}

/// Floats with the bits of the expected ones; NaNs are none here.
bool equal(std::span<const std::byte> bytes, const floats& expected) {
  return bytes.size() == expected.size() * 4 &&
         (expected.empty() || std::memcmp(bytes.data(), expected.data(), bytes.size()) == 0);
}

}  // namespace

TEST_SUITE("sharded_wires") {
  TEST_CASE("shards are gathered as the wire restores them, on all ranks alike, and stay what they are") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(6U);
      const auto tensors = of_floats(random_tensors(random, 6));
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      const auto scope = all_of(tensors);
      const auto whole = wholes(tensors, seed);
      sharded_wires wires{.gather = random_wire(random), .node_ranks = random_node(random, world)};
      const std::uint32_t segment = 1 + random.below(3000U);
      bool is_split = world > 1;
      for (const tensor_id each : scope) {
        for (std::uint32_t r = 0; r < world; ++r)
          is_split = is_split && who.local(each, rank_id{r}) == who.owned(each, rank_id{r});
      }
      auto expected = whole;
      std::vector<std::uint64_t> blocks{0};
      for (std::uint32_t r = 0; r < world; ++r) {
        const auto part = [&](tensor_id t) { return who.owned(t, rank_id{r}); };
        const floats values = stream(whole, scope, part);
        if (is_split) put_stream(expected, scope, part, restored(wires.gather, values));
        blocks.push_back(blocks.back() + values.size());
      }
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = segment, .wires = wires});
        for (std::uint32_t t = 0; t < tensors.size(); ++t) {
          const auto local = [&](tensor_id) { return who.local(tensor_id{t}, rank_id{self}); };
          set_bytes(state.local(tensor_id{t}), stream({whole[t]}, {tensor_id{t}}, local));
        }
        const std::uint64_t before = sent_by(ranks);
        const auto got = state.gather(scope).value();
        for (std::size_t i = 0; i < scope.size(); ++i) {
          CHECK(equal(got.tensor(i), expected[i]));
          const auto local = [&](tensor_id) { return who.local(scope[i], rank_id{self}); };
          CHECK(equal(state.local(scope[i]), stream({whole[i]}, {scope[i]}, local)));
        }
        const std::uint64_t sent = sent_by(ranks) - before;
        CHECK(state.stats().gathers.sent == sent);
        if (is_split) CHECK(sent == gather_traffic(blocks, wires.gather, wires, ranks.rank()).total());
      });
    }
  }

  TEST_CASE("owners of any partition get the sum of restored contributions, in one hop and in two") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed + 500);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(6U);
      const auto tensors = of_floats(random_tensors(random, 6));
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      const auto scope = all_of(tensors);
      const sharded_wires wires{.sum = {random_wire(random), random_wire(random)},
                                .node_ranks = random_node(random, world)};
      const std::uint32_t segment = 1 + random.below(3000U);
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = segment, .wires = wires});
        auto mine = wholes(tensors, seed + self);
        std::vector<std::span<std::byte>> contribution;
        for (auto& each : mine)
          contribution.push_back(std::as_writable_bytes(std::span(each)));
        const std::uint64_t before = sent_by(ranks);
        state.reduce_scatter(scope, contribution, sum_f32).value();
        const std::uint64_t sent = sent_by(ranks) - before;
        std::vector<floats> parts;
        for (std::uint32_t r = 0; r < world; ++r) {
          parts.push_back(stream(wholes(tensors, seed + r), scope,
                                 [&](tensor_id t) { return who.owned(t, rank_id{self}); }));
        }
        const floats sum = sum_over(parts, wires);
        std::size_t at = 0;
        for (const tensor_id each : scope) {
          const std::size_t count = state.owned(each).size() / 4;
          const auto first = sum.begin() + static_cast<std::ptrdiff_t>(at);
          CHECK(equal(state.owned(each), floats(first, first + static_cast<std::ptrdiff_t>(count))));
          at += count;
        }
        CHECK(at == sum.size());
        CHECK(state.stats().reduces.sent == sent);
      });
    }
  }

  TEST_CASE("an all-reduce of complete tensors has the same bits on all ranks, and wired bytes both ways") {
    for (const auto seed : seeds(20)) {
      CAPTURE(seed);
      random_numbers random(seed + 900);
      const std::uint32_t world = 2 + random.below(5U);
      const auto tensors = of_floats(random_tensors(random, 4));
      const zero_partition who(tensors, rank_count{world}, zero_stage::none, state_kind::gradients);
      const auto scope = all_of(tensors);
      const sharded_wires wires{.sum = {random_wire(random), random_wire(random)},
                                .node_ranks = random_node(random, world)};
      std::vector<std::uint64_t> blocks{0};
      auto expected = wholes(tensors, 0);
      for (std::uint32_t r = 0; r < world; ++r) {
        std::vector<floats> parts;
        const auto part = [&](tensor_id t) { return who.owned(t, rank_id{r}); };
        for (std::uint32_t from = 0; from < world; ++from)
          parts.push_back(stream(wholes(tensors, seed + from), scope, part));
        put_stream(expected, scope, part, restored(wires.of_sums(), sum_over(parts, wires)));
        blocks.push_back(blocks.back() + parts[0].size());
      }
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sharded_state state(who, tensors, ranks, space, {.wires = wires});
        const auto mine = wholes(tensors, seed + self);
        const auto whole = state.allocate_whole(scope).value();
        for (std::size_t i = 0; i < scope.size(); ++i)
          set_bytes(whole.tensor(i), mine[i]);
        state.all_reduce(whole, sum_f32).value();
        for (std::size_t i = 0; i < scope.size(); ++i)
          CHECK(equal(state.local(scope[i]), expected[i]));
        const wire_traffic second = gather_traffic(blocks, wires.of_sums(), wires, ranks.rank());
        CHECK(state.stats().refreshes.sent == second.total());
        CHECK(sent_by(ranks) == state.stats().sent());
      });
    }
  }

  TEST_CASE("a node gathers hierarchical shards over the wire, and no byte leaves it") {
    const auto tensors =
        of_floats({{"a", tensor_shape::vector(700), 4}, {"b", tensor_shape::vector(300), 4}});
    const hierarchical_zero who(tensors, rank_count{4}, rank_count{2});
    const wire_form int8(wire_format::int8, 64);
    const auto whole = wholes(tensors, 1);
    const auto scope = all_of(tensors);
    auto expected = whole;
    for (std::uint32_t r = 0; r < 2; ++r) {
      const auto part = [&](tensor_id t) { return who.local(t, rank_id{r}); };
      put_stream(expected, scope, part, restored(int8, stream(whole, scope, part)));
    }
    in_sim_world(4, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      sharded_state state(who, tensors, ranks, space, {.wires = {.gather = int8, .node_ranks = 4}});
      for (const tensor_id each : scope) {
        const auto part = [&](tensor_id t) { return who.local(t, rank_id{self}); };
        set_bytes(state.local(each), stream({whole[to_index(each)]}, {each}, part));
      }
      const std::vector<rank_id> members{rank_id{self / 2 * 2}, rank_id{self / 2 * 2 + 1}};
      rank_group<sim_ranks> node(ranks, members);
      const auto got = state.gather_within(node, scope).value();
      for (std::size_t i = 0; i < scope.size(); ++i)
        CHECK(equal(got.tensor(i), expected[i]));
      const std::uint64_t sent = int8.bytes(who.secondary(rank_id{self}).count);
      for (std::uint32_t other = 0; other < 4; ++other)
        CHECK(ranks.traffic(seat_id{other}).sent_bytes == (other == (self ^ 1U) ? sent : 0));
    });
  }

  TEST_CASE("errors are kept by tensor: each step's sum is that of contributions and what was lost before") {
    for (const std::uint32_t node : {0U, 2U}) {
      const auto tensors =
          of_floats({{"a", tensor_shape::vector(333), 4}, {"b", tensor_shape::matrix(10, 21), 4}});
      const std::vector<split_axis> axes{split_axis::rows, split_axis::columns};
      const table_partition who(split_2d(tensors, axes, rank_count{4}));
      const auto scope = all_of(tensors);
      const wire_form int4(wire_format::int4, 32);
      const sharded_wires wires{.sum = {int4, wire_form()}, .node_ranks = node, .keeps_errors = true};
      in_sim_world(4, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = 300, .wires = wires});
        CHECK(state.stats().residual_bytes == 4 * (333 + 210));
        // Every rank's residuals, by owner: computed alike on all.
        std::vector<std::vector<floats>> lost(4, std::vector<floats>(4));
        for (std::uint64_t step = 0; step < 4; ++step) {
          auto mine = wholes(tensors, 10 * step + self);
          std::vector<std::span<std::byte>> contribution;
          for (auto& each : mine)
            contribution.push_back(std::as_writable_bytes(std::span(each)));
          state.reduce_scatter(scope, contribution, sum_f32).value();
          for (std::uint32_t owner = 0; owner < 4; ++owner) {
            std::vector<floats> parts;
            for (std::uint32_t r = 0; r < 4; ++r) {
              floats values = stream(wholes(tensors, 10 * step + r), scope,
                                     [&](tensor_id t) { return who.owned(t, rank_id{owner}); });
              floats& kept = lost[r][owner];
              kept.resize(values.size());
              for (std::size_t i = 0; i < values.size(); ++i)
                values[i] += kept[i];
              const floats sent = restored(int4, values);
              for (std::size_t i = 0; i < values.size(); ++i)
                kept[i] = values[i] - sent[i];
              parts.push_back(values);
            }
            if (owner != self) continue;
            const floats sum = sum_over(parts, wires);
            std::size_t at = 0;
            for (const tensor_id each : scope) {
              const std::size_t count = state.owned(each).size() / 4;
              const auto first = sum.begin() + static_cast<std::ptrdiff_t>(at);
              CHECK(equal(state.owned(each), floats(first, first + static_cast<std::ptrdiff_t>(count))));
              at += count;
            }
          }
        }
      });
    }
  }

  TEST_CASE("flat shards take the stated memory for messages, and nothing afterwards") {
    const auto tensors = of_floats({{"a", tensor_shape::vector(5000), 4}});
    const zero_partition who(tensors, rank_count{4}, zero_stage::weights, state_kind::weights);
    const auto scope = all_of(tensors);
    const std::vector<std::uint64_t> blocks{0, 1250, 2500, 3750, 5000};
    const wire_form int4(wire_format::int4, 100);
    in_sim_world(4, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t) {
      const sharded_wires wires{.gather = int4, .sum = {int4, int4}, .node_ranks = 2};
      const std::uint64_t before = space.stats().used;
      sharded_state state(who, tensors, ranks, space, {.segment_bytes = 2000, .wires = wires});
      const auto whole = state.gather(scope).value();
      CHECK(state.stats().peak_stage_bytes == gather_scratch_bytes(blocks, int4));
      state.reduce_scatter(whole, sum_f32).value();
      // Pieces of 500 elements: a sum, one to convert, two nodes' sums; and three messages.
      CHECK(wired_sum<wire_form>(blocks, wires.sum, 2, 2000).scratch_bytes() == 4 * 4 * 500 + 3 * 270);
      CHECK(state.stats().peak_stage_bytes ==
            std::max<std::uint64_t>(gather_scratch_bytes(blocks, int4), 4 * 4 * 500 + 3 * 270));
      CHECK(space.stats().used == before + 4 * 1250 + whole.buffer_bytes());
    });
  }

  TEST_CASE("wires that cannot be are refused with the remedy") {
    in_sim_world(2, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      auto tensors = of_floats({{"a", tensor_shape::vector(10), 4}});
      const table_partition of_two(flat_uneven::even(tensors, rank_count{2}));
      const wire_form int8(wire_format::int8);
      const auto make = [&](const table_partition& who, const sharded_wires& wires) {
        sim_state state(who, tensors, ranks, space, {.wires = wires});
      };
      CHECK_THROWS_WITH_AS(
          make(of_two, {.gather = int8, .node_ranks = 3}),
          "sharded_state: nodes of 3 ranks do not divide 2 ranks; give a divisor, or 0 for one hop",
          argument_error);
      CHECK_THROWS_WITH_AS(make(of_two, {.keeps_errors = true}),
                           "sharded_state: keeps_errors with plain sums, which lose nothing; give sums "
                           "another wire",
                           argument_error);
      // Nodes of one rank send contributions between nodes.
      const wire_form plain;
      CHECK_THROWS_AS(make(of_two, {.sum = {int8, plain}, .node_ranks = 1, .keeps_errors = true}),
                      argument_error);
      CHECK_NOTHROW(make(of_two, {.sum = {plain, int8}, .node_ranks = 1, .keeps_errors = true}));
      if (self == 0) {
        CHECK_THROWS_WITH_AS(
            make(table_partition(flat_uneven::even(tensors, rank_count{1})), {.gather = int8}),
            "sharded_state: wires for a partition of 1 ranks over a transport of 2; give it "
            "a rank_group of the partition's ranks",
            argument_error);
      }
      sim_state state(of_two, tensors, ranks, space, {.wires = {.sum = {int8, int8}}});
      const auto whole = state.allocate_whole(all_of(tensors)).value();
      reduce_op other = sum_f32;
      other.combine = xor_bytes.combine;
      CHECK_THROWS_WITH_AS(static_cast<void>(state.reduce_scatter(whole, other)),
                           "sharded_state: a sum over a wire is of floats; pass sum_f32, or plain wires",
                           argument_error);
      CHECK_FALSE(ranks.is_revoked());
      tensors[0].element_bytes = 2;
      CHECK_THROWS_WITH_AS(make(of_two, {.gather = int8}),
                           "sharded_state: wires for tensor 'a' with elements of 2 bytes; they carry floats "
                           "only",
                           argument_error);
    });
  }

  TEST_CASE("residuals beyond the largest size are refused, also on a rank without pieces") {
    in_sim_world(2, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      if (self != 0) return;
      // Four times 2^62 bytes are 2^64.
      const std::uint64_t each = std::uint64_t{1} << 60;
      std::vector<tensor_facts> tensors;
      for (const char* name : {"a", "b", "c", "d"})
        tensors.push_back({name, tensor_shape::vector(each), 4});
      const table_partition on_other(flat_uneven(tensors, std::vector<std::uint64_t>{0, 0, 4 * each}));
      const wire_form int8(wire_format::int8);
      const auto make = [&](bool keeps_errors) {
        sim_state state(on_other, tensors, ranks, space,
                        {.wires = {.sum = {int8, int8}, .keeps_errors = keeps_errors}});
      };
      CHECK_NOTHROW(make(false));
      CHECK_THROWS_AS(make(true), length_error);
    });
  }
}
