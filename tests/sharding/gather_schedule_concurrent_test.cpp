#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/gather_schedule.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using ranks_of = communicator<thread_endpoint>;
using state_of = sharded_state<table_partition, ranks_of, host_space>;

constexpr link_model wire{.bytes_per_second = 1'000'000'000};

std::vector<tensor_facts> layers_of(const std::vector<std::uint64_t>& elements) {
  std::vector<tensor_facts> made;
  for (const std::uint64_t each : elements)
    made.push_back({"layer" + std::to_string(made.size()), tensor_shape::vector(each), 4});
  return made;
}

/// Forward and back again.
std::vector<std::uint32_t> there_and_back(std::uint32_t layers) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < layers; ++i)
    order.push_back(i);
  for (std::uint32_t i = layers; i-- > 0;)
    order.push_back(i);
  return order;
}

std::vector<gather_use> timed(const std::vector<std::uint32_t>& order, std::uint64_t ns) {
  std::vector<gather_use> uses;
  for (const std::uint32_t each : order)
    uses.push_back({each, ns});
  return uses;
}

std::vector<std::vector<tensor_id>> one_each(std::size_t count) {
  std::vector<std::vector<tensor_id>> scopes;
  for (std::uint32_t i = 0; i < count; ++i)
    scopes.push_back({tensor_id{i}});
  return scopes;
}

std::vector<std::uint64_t> sizes_of(const std::vector<tensor_facts>& tensors) {
  std::vector<std::uint64_t> bytes;
  for (const tensor_facts& each : tensors)
    bytes.push_back(each.bytes());
  return bytes;
}

/// Each rank's pieces in iteration `round`.
void fill(state_of& state, const std::vector<tensor_facts>& tensors, std::uint64_t round) {
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const auto piece =
        dense(contents(tensors[t], 100 * round + t), state.layout().local(tensor_id{t}, state.rank()), 4);
    std::copy(piece.begin(), piece.end(), state.local(tensor_id{t}).begin());
  }
}

}  // namespace

TEST_SUITE("gather_schedule") {
  TEST_CASE(
      "scopes are gathered in order for any planner and budget, and the budget bounds the gathered bytes") {
    for (const auto seed : seeds(24)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 2 + random.below(2U);
      std::vector<std::uint64_t> elements;
      for (std::uint32_t i = 0; i < 4; ++i)
        elements.push_back(200 + random.below(400U));
      const auto tensors = layers_of(elements);
      const auto bytes = sizes_of(tensors);
      std::vector<std::uint32_t> order = there_and_back(4);
      if (random.once_in(3)) {
        for (std::uint32_t& each : order)
          each = random.below(4U);
      }
      const std::uint64_t largest = *std::max_element(bytes.begin(), bytes.end());
      const std::uint64_t budget = largest * (1 + random.below(4U));
      const auto uses = timed(order, 1 + random.below(20'000U));
      const schedule_plan plan = random.once_in(2)
                                     ? plan_gathers(bytes, uses, budget, wire)
                                     : plan_gathers(bytes, uses, budget, wire,
                                                    schedule::lookahead{.accesses = 1 + random.below(3U)});
      std::vector<std::uint64_t> gathers(world);
      in_thread_world(world, [&](ranks_of& ranks, host_space& space, std::uint32_t self) {
        const table_partition who(flat_uneven::even(tensors, rank_count{world}));
        state_of state(who, tensors, ranks, space);
        {
          operation_queue queue;
          gather_schedule schedule(state, queue, one_each(4), order, plan);
          for (std::uint64_t round = 0; round < 3; ++round) {
            fill(state, tensors, round);
            schedule.begin_iteration();
            for (const std::uint32_t each : order) {
              const auto layer = schedule.next().value();
              if (copy_of(layer.whole().tensor(0)) != contents(tensors[each], 100 * round + each))
                CHECK_MESSAGE(false, "layer ", each, " of round ", round);
            }
            schedule.end_iteration().value();
            CHECK(state.stats().whole_bytes == 0);
          }
          CHECK(schedule.stats().uses == 3 * order.size());
          gathers[self] = schedule.stats().gathers;
          CHECK(state.stats().peak_whole_bytes <= budget);
          CHECK(state.stats().gathers.calls == schedule.stats().gathers);
        }
      });
      for (const std::uint64_t each : gathers)
        CHECK(each == gathers[0]);
    }
  }

  TEST_CASE(
      "the next scope is gathered during the present one, and the last one forward stays for the backward "
      "pass") {
    const auto tensors = layers_of({300, 300, 300, 300});
    const auto order = there_and_back(4);
    in_thread_world(2, [&](ranks_of& ranks, host_space& space, std::uint32_t) {
      const table_partition who(flat_uneven::even(tensors, rank_count{2}));
      state_of state(who, tensors, ranks, space);
      operation_queue queue;
      const auto run = [&](std::uint64_t layers) {
        // As long to compute as to gather: 1200 bytes a microsecond.
        const schedule_plan plan = plan_gathers(sizes_of(tensors), timed(order, 1200), layers * 1200, wire);
        gather_schedule schedule(state, queue, one_each(4), order, plan);
        schedule.begin_iteration();
        for (std::size_t i = 0; i < order.size(); ++i)
          static_cast<void>(schedule.next().value());
        schedule.end_iteration().value();
        return schedule.stats();
      };
      const auto one = run(1);
      CHECK(one.ahead == 0);  // there is no room for two
      CHECK(one.gathers == 7);
      const auto two = run(2);
      CHECK(two.ahead >= 4);  // of 6
      CHECK(two.kept >= 1);
      CHECK(two.gathers == 8 - two.kept);
      CHECK(two.gathers == 6);
      const auto all = run(4);
      CHECK(all.gathers == 4);
      CHECK(all.kept == 4);
    });
  }

  TEST_CASE("the death of a rank ends the others' gathers, and no rank hangs") {
    const auto tensors = layers_of({3000, 3000, 3000});
    const auto order = there_and_back(3);
    for (std::uint32_t dies_at = 0; dies_at < 6; ++dies_at) {
      thread_network net(3);
      std::atomic<int> failed{0};
      std::vector<std::thread> threads;
      for (std::uint32_t seat = 0; seat < 3; ++seat) {
        threads.emplace_back([&, seat] {
          thread_endpoint end(net, seat_id{seat});
          ranks_of ranks(end);
          ranks.join(ranks.after(10 * one_second)).value();
          host_space space({.budget = 1 << 20, .name = "rank"});
          state_of state(table_partition(flat_uneven::even(tensors, rank_count{3})), tensors, ranks, space);
          operation_queue queue;
          gather_schedule schedule(state, queue, one_each(3), order,
                                   plan_gathers(sizes_of(tensors), timed(order, 1000), 24'000, wire));
          for (std::uint32_t round = 0; round < 100; ++round) {
            schedule.begin_iteration();
            for (std::uint32_t i = 0; i < order.size(); ++i) {
              if (seat == 1 && round == 1 && i == dies_at) net.kill(seat_id{1});
              try {
                const auto layer = schedule.next();
                if (layer) continue;
                CHECK((layer.code() == errc::peer_failed || layer.code() == errc::epoch_revoked));
              } catch (const rank_killed&) {
                CHECK(seat == 1);
              }
              ++failed;
              return;
            }
            if (!schedule.end_iteration()) {
              ++failed;
              return;
            }
          }
        });
      }
      for (std::thread& each : threads)
        each.join();
      CHECK(failed == 3);
    }
  }

  TEST_CASE("plans with different scopes and uses are refused with all numbers") {
    const auto tensors = layers_of({30, 30});
    CHECK_THROWS_WITH_AS(static_cast<void>(plan_gathers(sizes_of(tensors), timed({0, 2}, 1), 240, wire)),
                         "plan_gathers: scope 2 is used, and there are 2", argument_error);
    CHECK_THROWS_AS(static_cast<void>(plan_gathers(sizes_of(tensors), timed({0, 1}, 1), 119, wire)),
                    argument_error);
    in_thread_world(1, [&](ranks_of& ranks, host_space& space, std::uint32_t) {
      state_of state(table_partition(flat_uneven::even(tensors, rank_count{1})), tensors, ranks, space);
      operation_queue queue;
      const schedule_plan plan = plan_gathers(sizes_of(tensors), timed({0, 1}, 1), 240, wire);
      const auto made = [&](std::size_t scopes, std::vector<std::uint32_t> uses) {
        gather_schedule(state, queue, one_each(scopes), std::move(uses), plan);
      };
      CHECK_THROWS_WITH_AS(
          made(2, {0}),
          "gather_schedule: a plan of 2 chunks, 4 events and 2 tiers, for 2 scopes and 1 uses "
          "of them; plan_gathers makes one of two tiers, with two events per use",
          argument_error);
      CHECK_THROWS_WITH_AS(made(2, {0, 2}), "gather_schedule: scope 2 is used, and there are 2",
                           argument_error);
      std::vector<std::vector<tensor_id>> beyond{{tensor_id{0}}, {tensor_id{2}}};
      CHECK_THROWS_WITH_AS(gather_schedule(state, queue, beyond, std::vector<std::uint32_t>{0, 1}, plan),
                           "gather_schedule: tensor 2 is in a scope, and there are 2", argument_error);
    });
  }
}
