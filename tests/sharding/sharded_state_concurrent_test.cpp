#include <llmmem/sharded_state.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using namespace llmmem_tests;

using sim_ranks = communicator<sim_endpoint>;
using sim_state = sharded_state<table_partition, sim_ranks, host_space>;

std::vector<tensor_id> random_scope(random_numbers& random, std::uint32_t tensors) {
  std::vector<tensor_id> scope;
  for (std::uint32_t t = 0; t < tensors; ++t) {
    if (!random.once_in(4)) scope.push_back(tensor_id{t});
  }
  if (scope.size() > 1 && random.once_in(3)) std::swap(scope.front(), scope.back());
  return scope;
}

/// Floats of very different sizes, so that the order in which they are added shows.
std::vector<float> floats_of(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> made(count);
  for (float& each : made)
    each = static_cast<float>(static_cast<double>(random() % 2'000'001) - 1e6) *
           static_cast<float>(1 << (random() % 20));
  return made;
}

std::vector<std::byte> sum_by_rank(std::size_t count, std::uint32_t world, std::uint64_t seed) {
  std::vector<float> sum = floats_of(count, seed);
  for (std::uint32_t rank = 1; rank < world; ++rank) {
    const std::vector<float> more = floats_of(count, seed + rank);
    for (std::size_t i = 0; i < count; ++i)
      sum[i] += more[i];
  }
  return copy_of(std::as_bytes(std::span(sum)));
}

std::vector<tensor_facts> of_floats(std::vector<tensor_facts> tensors) {
  for (tensor_facts& each : tensors)
    each.element_bytes = 4;
  return tensors;
}

/// Vectors of floats, one a layer.
std::vector<tensor_facts> layers_of(std::vector<std::uint64_t> elements) {
  std::vector<tensor_facts> made;
  for (const std::uint64_t each : elements)
    made.push_back({"layer" + std::to_string(made.size()), tensor_shape::vector(each), 4});
  return made;
}

std::vector<tensor_id> ids(std::vector<std::uint32_t> numbers) {
  std::vector<tensor_id> made;
  for (const std::uint32_t each : numbers)
    made.push_back(tensor_id{each});
  return made;
}

}  // namespace

TEST_SUITE("sharded_state") {
  TEST_CASE(
      "every partition gathers complete tensors, and each element is sent once to each rank that lacks it") {
    for (const auto seed : seeds(66)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(6U);
      const auto tensors = random_tensors(random, 7);
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      const auto scope = random_scope(random, who.tensors());
      const std::uint32_t segment = 1 + random.below(random.once_in(2) ? 8U : 4000U);
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = segment});
        std::uint64_t local_bytes = 0;
        for (std::uint32_t t = 0; t < who.tensors(); ++t) {
          const auto piece = dense(contents(tensors[t], t), who.local(tensor_id{t}, rank_id{self}),
                                   tensors[t].element_bytes);
          REQUIRE(state.local(tensor_id{t}).size() == piece.size());
          std::copy(piece.begin(), piece.end(), state.local(tensor_id{t}).begin());
          const auto owned = dense(contents(tensors[t], t), who.owned(tensor_id{t}, rank_id{self}),
                                   tensors[t].element_bytes);
          CHECK(copy_of(state.owned(tensor_id{t})) == owned);
          local_bytes += piece.size();
        }
        const std::uint64_t before = sent_by(ranks);
        {
          const auto whole = state.gather(scope).value();
          std::uint64_t buffer = 0;
          for (std::size_t i = 0; i < scope.size(); ++i) {
            const tensor_facts& facts = tensors[to_index(scope[i])];
            if (copy_of(whole.tensor(i)) != contents(facts, to_index(scope[i])))
              CHECK_MESSAGE(false, "tensor ", to_index(scope[i]), " of kind ", kind);
            const auto mine = who.local(scope[i], rank_id{self});
            const bool has_all = mine.elements() == facts.shape.elements();
            if (!has_all) buffer += facts.bytes();
            if (has_all) CHECK(whole.tensor(i).data() == state.local(scope[i]).data());
          }
          // But for what aligns an element.
          CHECK(whole.buffer_bytes() >= buffer);
          CHECK(whole.buffer_bytes() <= buffer + 8 * scope.size());
          CHECK(state.stats().whole_bytes == whole.buffer_bytes());
        }
        std::uint64_t sent = 0;
        for (const tensor_id each : scope) {
          for (std::uint32_t to = 0; to < world; ++to) {
            if (to == self) continue;
            sent += count_elements(who.owned(each, rank_id{self}), who.local(each, rank_id{to}), false) *
                    tensors[to_index(each)].element_bytes;
          }
        }
        CHECK(sent_by(ranks) - before == sent);
        const sharded_stats told = state.stats();
        CHECK(told.gathers.sent == sent);
        CHECK(told.gathers.calls == 1);
        CHECK(told.whole_bytes == 0);
        CHECK(told.local_bytes >= local_bytes);
        CHECK(space.used() == told.local_bytes);
      });
    }
  }

  TEST_CASE("an owner's changes arrive at all holders and at no other rank") {
    for (const auto seed : seeds(66)) {
      CAPTURE(seed);
      random_numbers random(seed + 1000);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(6U);
      const auto tensors = random_tensors(random, 7);
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      const auto scope = random_scope(random, who.tensors());
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = 50});
        for (std::uint32_t t = 0; t < who.tensors(); ++t) {
          const auto owned = dense(contents(tensors[t], t), who.owned(tensor_id{t}, rank_id{self}),
                                   tensors[t].element_bytes);
          std::copy(owned.begin(), owned.end(), state.owned(tensor_id{t}).begin());
        }
        const std::uint64_t before = sent_by(ranks);
        state.refresh(scope).value();
        std::uint64_t sent = 0;
        for (const tensor_id each : scope) {
          const std::size_t width = tensors[to_index(each)].element_bytes;
          const auto piece =
              dense(contents(tensors[to_index(each)], to_index(each)), who.local(each, rank_id{self}), width);
          CHECK(copy_of(state.local(each)) == piece);
          for (std::uint32_t to = 0; to < world; ++to) {
            if (to == self) continue;
            sent +=
                count_elements(who.owned(each, rank_id{self}), who.local(each, rank_id{to}), true) * width;
          }
        }
        CHECK(sent_by(ranks) - before == sent);
        CHECK(state.stats().refreshes == moved_bytes{1, sent, state.stats().refreshes.received});
      });
    }
  }

  TEST_CASE("sums arrive at the owners in the order of ranks, and by an all-reduce at all holders") {
    for (const auto seed : seeds(66)) {
      CAPTURE(seed);
      random_numbers random(seed + 2000);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(6U);
      const auto tensors = of_floats(random_tensors(random, 7));
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      const auto scope = random_scope(random, who.tensors());
      const std::uint32_t segment = 1 + random.below(random.once_in(2) ? 40U : 4000U);
      const bool is_all = random.once_in(2);
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(who, tensors, ranks, space, {.segment_bytes = segment});
        const auto whole = state.allocate_whole(scope).value();
        CHECK(sent_by(ranks) == 0);
        for (std::size_t i = 0; i < scope.size(); ++i) {
          const auto mine = floats_of(whole.tensor(i).size() / 4, 100 * i + self);
          if (!mine.empty()) std::memcpy(whole.tensor(i).data(), mine.data(), whole.tensor(i).size());
        }
        const std::uint64_t before = sent_by(ranks);
        (is_all ? state.all_reduce(whole, sum_f32) : state.reduce_scatter(whole, sum_f32)).value();
        std::uint64_t sent = 0;
        for (std::size_t i = 0; i < scope.size(); ++i) {
          const auto all = sum_by_rank(tensors[to_index(scope[i])].shape.elements(), world, 100 * i);
          const auto of = [&](const element_runs& runs) { return dense(all, runs, 4); };
          CHECK(copy_of(state.owned(scope[i])) == of(who.owned(scope[i], rank_id{self})));
          if (is_all) CHECK(copy_of(state.local(scope[i])) == of(who.local(scope[i], rank_id{self})));
          sent += all.size() - 4 * who.owned(scope[i], rank_id{self}).elements();
        }
        CHECK(state.stats().reduces.sent == sent);
        CHECK(sent_by(ranks) - before == sent + state.stats().refreshes.sent);
        CHECK(state.stats().peak_stage_bytes <= (world + 2) * std::max<std::uint64_t>(segment, 4));
      });
    }
  }

  TEST_CASE("ZeRO-3 sends 3P, plain data parallelism 2P, each (N - 1) / N of it") {
    for (const std::uint32_t world : {1U, 2U, 3U, 4U, 6U}) {
      const auto tensors = layers_of({120, 240, 24 * 60});
      const std::uint64_t all = 4 * (120 + 240 + 24 * 60);
      in_sim_world(world, world, [&](sim_ranks& ranks, host_space& space, std::uint32_t) {
        const auto of = [&](zero_stage stage, state_kind kind) {
          return table_partition(zero_partition(tensors, rank_count{world}, stage, kind));
        };
        for (const zero_stage stage :
             {zero_stage::none, zero_stage::optimizer, zero_stage::gradients, zero_stage::weights}) {
          sim_state weights(of(stage, state_kind::weights), tensors, ranks, space, {.name = "weights"});
          sim_state gradients(of(stage, state_kind::gradients), tensors, ranks, space, {.name = "gradients"});
          const std::uint64_t before = sent_by(ranks);
          for (const std::uint32_t layer : {0U, 1U, 2U})  // forward
            static_cast<void>(weights.gather(ids({layer})).value());
          for (const std::uint32_t layer : {2U, 1U, 0U}) {
            const auto w = weights.gather(ids({layer})).value();
            const auto g = gradients.allocate_whole(ids({layer})).value();
            if (stage == zero_stage::none) {
              gradients.all_reduce(g, sum_f32).value();
            } else {
              gradients.reduce_scatter(g, sum_f32).value();
            }
          }
          if (stage == zero_stage::optimizer || stage == zero_stage::gradients) {
            for (const std::uint32_t layer : {0U, 1U, 2U})
              weights.refresh(ids({layer})).value();
          }
          // Shards are of all tensors together, so that a rank's share of one layer differs; of all it does
          // not: what it sends of a reduce-scatter is all but its own, of a gather its own to all others.
          const std::uint64_t times = stage == zero_stage::weights ? 3 : 2;
          CHECK(sent_by(ranks) - before == times * all * (world - 1) / world);
        }
      });
    }
  }

  TEST_CASE("hierarchical ZeRO sends weights between nodes once per step, and none in the backward pass") {
    const auto tensors = layers_of({64, 192});
    const std::uint64_t all = 4 * 256;
    in_sim_world(4, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      const table_partition who(hierarchical_zero(tensors, rank_count{4}, rank_count{2}));
      sim_state state(who, tensors, ranks, space);
      const std::uint32_t first = self / 2 * 2;
      const std::vector<rank_id> members{rank_id{first}, rank_id{first + 1}};
      rank_group<sim_ranks> node(ranks, members);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto owned = dense(contents(tensors[t], t), who.owned(tensor_id{t}, rank_id{self}), 4);
        std::copy(owned.begin(), owned.end(), state.owned(tensor_id{t}).begin());
      }
      std::array<std::uint64_t, 4> before{};
      const auto traffic = [&] {
        std::array<std::uint64_t, 4> sent{};
        for (std::uint32_t seat = 0; seat < 4; ++seat) {
          const std::uint64_t now = ranks.traffic(seat_id{seat}).sent_bytes;
          sent[seat] = now - before[seat];
          before[seat] = now;
        }
        return sent;
      };
      const auto pass = [&] {
        for (const std::uint32_t t : {0U, 1U}) {
          const auto whole = state.gather_within(node, ids({t})).value();
          CHECK(copy_of(whole.tensor(0)) == contents(tensors[t], t));
        }
      };
      state.refresh(ids({0, 1})).value();
      pass();
      // A primary, a quarter, to the one of the other node that holds it too; a secondary to the neighbour.
      std::array<std::uint64_t, 4> expected{};
      const std::uint32_t across = (self + 2) % 4;
      const std::uint32_t neighbour = self ^ 1U;
      expected[across] = all / 4;
      expected[neighbour] = all / 2;
      CHECK(traffic() == expected);
      pass();
      expected[across] = 0;
      CHECK(traffic() == expected);
      CHECK(state.stats().local_bytes == all / 2);
      const std::vector<rank_id> apart{rank_id{self % 2}, rank_id{self % 2 + 2}};
      rank_group<sim_ranks> places(ranks, apart);
      const std::uint64_t found = self % 2 == 0 ? 64 : 128;  // the same on both nodes
      CHECK(state.gather_within(places, ids({1})).error() == failure{errc::size_mismatch, 1, 192, found});
      CHECK_FALSE(ranks.is_revoked());
    });
  }

  TEST_CASE(
      "a rank's peak is its pieces and the live complete tensors, and no further byte if ranges are flat") {
    const auto tensors = layers_of({1000, 3000, 2000});
    for (const std::uint32_t world : {1U, 2U, 3U, 5U}) {
      in_sim_world(world, world, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        const table_partition who(flat_uneven::even(tensors, rank_count{world}));
        sim_state state(who, tensors, ranks, space, {.segment_bytes = 1024});
        const std::uint64_t shard = even_share(6000, self, world).count * 4;
        CHECK(state.stats().local_bytes == shard);
        CHECK(space.stats().peak == shard);
        // A layer that is the rank's own anyway takes no buffer.
        const auto buffers = [&](std::vector<std::uint32_t> layers) {
          std::uint64_t bytes = 0;
          for (const std::uint32_t layer : layers) {
            const std::uint64_t all = tensors[layer].shape.elements();
            if (who.local(tensor_id{layer}, rank_id{self}).elements() != all) bytes += 4 * all;
          }
          return bytes;
        };
        if (world == 5) CHECK(buffers({0, 1, 2}) >= std::uint64_t{4} * 5000);
        for (const std::uint32_t layer : {0U, 1U, 2U, 1U})
          static_cast<void>(state.gather(ids({layer})).value());
        CHECK(space.stats().peak == shard + std::max({buffers({0}), buffers({1}), buffers({2})}));
        {
          const auto one = state.gather(ids({0})).value();
          auto two = state.gather(ids({1, 2})).value();
          auto moved = std::move(two);
          CHECK(moved.tensor(1).size() == 8000);
          CHECK(two.buffer_bytes() == 0);
          CHECK(state.stats().whole_bytes == buffers({0, 1, 2}));
        }
        CHECK(state.stats().peak_whole_bytes == buffers({0, 1, 2}));
        CHECK(space.stats().peak == shard + buffers({0, 1, 2}));
        CHECK(state.stats().peak_stage_bytes == 0);
        const auto sums = state.allocate_whole(ids({1})).value();
        const auto more = state.allocate_whole(ids({0, 2})).value();
        state.reduce_scatter(sums, sum_f32).value();
        // A window of 1024 bytes from each of the others, and their sum.
        const std::uint64_t summing = world == 1 ? 0 : world * 1024;
        CHECK(space.stats().peak <= shard + buffers({0, 1, 2}) + summing);
        CHECK(state.stats().peak_stage_bytes <= summing);
        CHECK(space.used() == shard + buffers({0, 1, 2}));
      });
    }
  }

  TEST_CASE("a reshard between any partitions, to more ranks or fewer, moves exactly the plan's bytes") {
    for (const auto seed : seeds(60)) {
      CAPTURE(seed);
      random_numbers random(seed + 3000);
      const std::uint32_t from_world = 1 + random.below(5U);
      const std::uint32_t to_world = 1 + random.below(5U);
      const std::uint32_t world = std::max(from_world, to_world) + random.below(2U);
      const auto tensors = random_tensors(random, 7);
      const auto from = partition_of_kind(random, tensors, random.below(state_kinds), from_world);
      const auto to = partition_of_kind(random, tensors, random.below(state_kinds), to_world);
      const live_reshard plan = reshard(tensors, from, to);
      in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sim_state state(from, tensors, ranks, space);
        CHECK(state.is_member() == (self < from_world));
        sim_state next(to, tensors, ranks, space, {.segment_bytes = 1 + random_numbers(seed).below(100U)});
        for (std::uint32_t t = 0; t < from.tensors() && self < from_world; ++t) {
          const auto piece = dense(contents(tensors[t], t), from.local(tensor_id{t}, rank_id{self}),
                                   tensors[t].element_bytes);
          std::copy(piece.begin(), piece.end(), state.local(tensor_id{t}).begin());
        }
        const std::uint64_t before = sent_by(ranks);
        state.reshard_to(next).value();
        std::uint64_t gives = 0;
        for (const auto& share : plan.moves.holders) {
          if (to_index(share.id) == self) gives = share.bytes;
        }
        std::uint64_t takes = 0;
        for (const auto& share : plan.moves.ranks) {
          if (to_index(share.id) == self) takes = share.bytes;
        }
        CHECK(sent_by(ranks) - before == gives);
        CHECK(next.stats().reshards.sent == gives);
        CHECK(next.stats().reshards.received == takes);
        for (std::uint32_t t = 0; t < to.tensors(); ++t) {
          const auto piece = self < to_world
                                 ? dense(contents(tensors[t], t), to.local(tensor_id{t}, rank_id{self}),
                                         tensors[t].element_bytes)
                                 : std::vector<std::byte>{};
          CHECK(copy_of(next.local(tensor_id{t})) == piece);
        }
      });
    }
  }

  TEST_CASE(
      "regardless of which rank dies within an operation, the others soon get an error, and no rank hangs") {
    std::uint64_t failed = 0;
    for (const auto seed : seeds(120)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 2 + random.below(4U);
      const auto tensors = layers_of({3000, 4001, 17});
      sim_network net({.seats = world, .seed = seed, .lane_bytes = 4096});
      const std::uint32_t victim = random.below(world);
      net.kill_in_call(seat_id{victim}, 12 + random.below(100U));
      const std::uint32_t which = random.below(3U);
      net.run([&](sim_endpoint& end) {
        sim_ranks ranks(end);
        if (!ranks.join(ranks.after(one_second))) return;
        host_space space({.budget = 1 << 24, .name = "rank"});
        {
          const zero_stage stage = which == 0 ? zero_stage::weights : zero_stage::optimizer;
          sim_state state(table_partition(zero_partition(tensors, ranks.world(), stage, state_kind::weights)),
                          tensors, ranks, space, {.patience_ns = 1000 * one_second, .segment_bytes = 2048});
          result<void> done;
          for (int round = 0; round < 20 && done; ++round) {
            const auto scope = ids({0, 1, 2});
            if (which == 0) {
              const auto whole = state.gather(scope);
              if (!whole) done = whole.error();
            } else {
              const auto whole = state.allocate_whole(scope).value();
              done = which == 1 ? state.all_reduce(whole, sum_f32) : state.refresh(scope);
            }
          }
          if (!done) {
            ++failed;
            CHECK((done.code() == errc::peer_failed || done.code() == errc::epoch_revoked));
            CHECK(ranks.is_revoked());
          }
          CHECK(end.now_ns() < 2 * one_second);
        }
        CHECK(space.used() == 0);  // an operation that failed keeps nothing
      });
    }
    CHECK(failed > 100);
  }

  TEST_CASE("a rank without memory for a gather ends it for all ranks") {
    for (const std::uint32_t budget : {4U * 100 + 4 * 300 - 1, 4U * 100 + 4 * 300}) {
      in_sim_world(3, 1, [&](sim_ranks& ranks, host_space&, std::uint32_t self) {
        const auto tensors = layers_of({300});
        host_space space({.budget = self == 1 ? budget : 1U << 20, .name = "device"});
        sim_state state(table_partition(flat_uneven::even(tensors, rank_count{3})), tensors, ranks, space);
        const auto whole = state.gather(ids({0}));
        if (budget % 2 == 0) {
          CHECK(whole.has_value());
          CHECK_FALSE(ranks.is_revoked());
        } else {
          CHECK(whole.code() == (self == 1 ? errc::out_of_bytes : errc::epoch_revoked));
        }
      });
    }
  }

  TEST_CASE("mismatched arguments are refused with all numbers, and nothing is sent or ended") {
    in_sim_world(2, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      auto tensors = layers_of({10, 20});
      const table_partition of_two(flat_uneven::even(tensors, rank_count{2}));
      CHECK_THROWS_WITH_AS(
          sim_state(table_partition(flat_uneven::even(tensors, rank_count{3})), tensors, ranks, space),
          "sharded_state: a partition of 3 ranks over a transport of 2; every rank of the partition must be "
          "a rank of the transport",
          argument_error);
      CHECK_THROWS_WITH_AS(sim_state(of_two, layers_of({10, 21}), ranks, space, {.name = "weights"}),
                           "weights: tensor 'layer1' is 21 x 1 in the catalogue and 20 x 1 in the partition",
                           argument_error);
      CHECK_THROWS_WITH_AS(sim_state(of_two, tensors, ranks, space, {.segment_bytes = 0}),
                           "sharded_state: sharded_options::segment_bytes is 0; use at least 1",
                           argument_error);
      tensors[1].element_bytes = 0;
      CHECK_THROWS_WITH_AS(sim_state(of_two, tensors, ranks, space),
                           "sharded_state: tensor 'layer1' has elements of 0 bytes", argument_error);
      tensors[1].element_bytes = 2;
      sim_state state(of_two, tensors, ranks, space, {.name = "weights"});
      CHECK(state.gather(ids({0, 2})).error() == failure{errc::no_such_tensor, 2, 2, 2});
      CHECK(state.gather(ids({2})).error().message() ==
            "weights: there is no tensor 2; the number of tensors is 2");
      CHECK(state.refresh(ids({7})).error() == failure{errc::no_such_tensor, 7, 7, 2});
      {
        const auto whole = state.allocate_whole(ids({0, 1})).value();
        CHECK(state.reduce_scatter(whole, sum_f32).error() == failure{errc::size_mismatch, 1, 4, 2});
        std::vector<std::span<std::byte>> cut{whole.tensor(0).first(12)};
        CHECK(state.reduce_scatter(ids({0}), cut, sum_f32).error() ==
              failure{errc::size_mismatch, 0, 40, 12});
        CHECK(state.reduce_scatter(ids({0, 1}), cut, sum_f32).error() ==
              failure{errc::size_mismatch, 0, 2, 1});
      }
      sim_state one(table_partition(flat_uneven::even(tensors, rank_count{1})), tensors, ranks, space);
      if (self == 1) {
        CHECK(one.gather(ids({0})).error() == failure{errc::out_of_range, 0, 1, 0});
        CHECK(one.local(tensor_id{0}).empty());
      } else {
        CHECK(one.gather(ids({0})).has_value());
      }
      auto wide = tensors;
      wide[1].element_bytes = 4;
      sim_state other(of_two, wide, ranks, space);
      CHECK_THROWS_WITH_AS(
          static_cast<void>(state.reshard_to(other)),
          "weights: tensor 'layer1' has elements of 2 bytes here and of 4 there; convert it before",
          argument_error);
      CHECK(sent_by(ranks) == 0);
      CHECK_FALSE(ranks.is_revoked());
    });
  }

  TEST_CASE("threads of a process share a sharded state") {
    using ranks_of = communicator<thread_endpoint>;
    const auto tensors = layers_of({70'001, 300'000, 5});
    in_thread_world(3, [&](ranks_of& ranks, host_space& space, std::uint32_t self) {
      const zero_partition who(tensors, rank_count{3}, zero_stage::weights, state_kind::weights);
      sharded_state weights(who, tensors, ranks, space);
      sharded_state gradients(who, tensors, ranks, space);
      for (std::uint32_t t = 0; t < 3; ++t) {
        const auto owned = dense(contents(tensors[t], t), who.owned(tensor_id{t}, rank_id{self}), 4);
        std::copy(owned.begin(), owned.end(), weights.owned(tensor_id{t}).begin());
      }
      for (const std::uint32_t t : {0U, 1U, 2U, 1U, 0U}) {
        const auto whole = weights.gather(ids({t})).value();
        CHECK(copy_of(whole.tensor(0)) == contents(tensors[t], t));
        const auto sums = gradients.allocate_whole(ids({t})).value();
        const auto mine = floats_of(sums.tensor(0).size() / 4, 100 * t + self);
        std::memcpy(sums.tensor(0).data(), mine.data(), sums.tensor(0).size());
        gradients.reduce_scatter(sums, sum_f32).value();
        const auto all = sum_by_rank(mine.size(), 3, 100 * t);
        CHECK(copy_of(gradients.owned(tensor_id{t})) ==
              dense(all, who.owned(tensor_id{t}, rank_id{self}), 4));
      }
    });
  }
}
