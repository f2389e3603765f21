#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/background_sums.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using thread_ranks = communicator<thread_endpoint>;
using buffer_type = tiered_buffer<host_space, host_space>;
using state_in_memory = sharded_state<table_partition, thread_ranks, host_space>;
using state_in_tiers = sharded_state<table_partition, thread_ranks, host_space, leased_pieces<buffer_type>>;

std::vector<tensor_facts> some_layers(random_numbers& random) {
  std::vector<tensor_facts> made;
  for (std::uint32_t i = 0; i < 5; ++i)
    made.push_back({"layer" + std::to_string(i), tensor_shape::vector(1 + random.below(900U)), 4});
  return made;
}

template <class State>
void add_pieces(State& state, std::vector<std::byte>& to) {
  for (std::uint32_t t = 0; t < state.tensors().size(); ++t) {
    const auto mine = state.lease(tensor_id{t}, access_mode::read).value();
    to.insert(to.end(), mine.owned().begin(), mine.owned().end());
  }
}

/// Two backward passes with each sum in the foreground; the owned parts after them.
template <class State>
std::vector<std::byte> foreground(State& state, std::uint32_t self, sum_holders holders) {
  std::vector<std::byte> seen;
  for (std::uint64_t pass = 0; pass < 2; ++pass) {
    for (auto t = static_cast<std::uint32_t>(state.tensors().size()); t-- > 0;) {
      const std::array scope{tensor_id{t}};
      const auto whole = state.allocate_whole(scope).value();
      fill_floats(whole.tensor(0), 1000 * pass + 10 * t + self);
      (holders == sum_holders::all ? state.all_reduce(whole, sum_f32) : state.reduce_scatter(whole, sum_f32))
          .value();
    }
    add_pieces(state, seen);
  }
  return seen;
}

/// The same with sums in the background.
template <class State>
std::vector<std::byte> background(State& state, std::uint32_t self, sum_holders holders,
                                  std::uint32_t in_flight) {
  std::vector<std::byte> seen;
  operation_queue queue;
  background_sums sums(state, queue, in_flight, holders);
  for (std::uint64_t pass = 0; pass < 2; ++pass) {
    const auto tensors = static_cast<std::uint32_t>(state.tensors().size());
    std::uint32_t next = tensors;  // sums end from the last tensor to the first
    const auto done = [&](std::span<const tensor_id> scope) {
      REQUIRE(scope.size() == 1);
      CHECK(to_index(scope[0]) == --next);
      CHECK(state.lease(scope[0], access_mode::read_write).has_value());  // the piece is still held
    };
    for (std::uint32_t t = tensors; t-- > 0;) {
      const std::array scope{tensor_id{t}};
      auto whole = state.allocate_whole(scope).value();
      fill_floats(whole.tensor(0), 1000 * pass + 10 * t + self);
      reduce_op op = sum_f32;
      sums.begin(std::move(whole), op, done).value();
      op = {};  // the sum has its own
      CHECK(sums.in_flight() == std::min(in_flight, tensors - t));
    }
    sums.finish(done).value();
    CHECK(next == 0);
    CHECK(sums.in_flight() == 0);
    CHECK(sums.stats().sums == (pass + 1) * tensors);
    add_pieces(state, seen);
  }
  return seen;
}

}  // namespace

TEST_SUITE("background_sums") {
  TEST_CASE("sums in the background have the bits of the foreground, in memory and in tiers") {
    for (const auto seed : seeds(12)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 1 + random.below(3U);
      const auto tensors = some_layers(random);
      const auto stage = random.once_in(2) ? zero_stage::weights : zero_stage::none;
      const table_partition who(zero_partition(tensors, rank_count{world}, stage, state_kind::gradients));
      const auto holders = stage == zero_stage::none ? sum_holders::all : sum_holders::owners;
      const std::uint32_t in_flight = 1 + random.below(3U);
      in_thread_world(world, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
        state_in_memory first(who, tensors, ranks, space);
        const auto expected = foreground(first, self, holders);
        state_in_memory second(who, tensors, ranks, space);
        CHECK(background(second, self, holders, in_flight) == expected);
        CHECK(second.stats().whole_bytes == 0);
        CHECK(second.stats().reduces.sent == first.stats().reduces.sent);
        // The first tier holds what is in flight and one more, and not everything.
        host_space top({.budget = std::uint64_t{4} * 4096, .name = "top"});
        host_space last({.budget = 1 << 20, .name = "last"});
        buffer_type buffer({}, {top, std::uint64_t{4} * 4096, 64}, {last, 1 << 20, 64});
        state_in_tiers third(who, tensors, ranks, space, buffer);
        CHECK(background(third, self, holders, in_flight) == expected);
      });
    }
  }

  TEST_CASE("the death of a rank ends the others' sums, and no rank hangs") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(3000), 4},
                                            {"b", tensor_shape::vector(3000), 4}};
    for (std::uint32_t dies_at = 0; dies_at < 4; ++dies_at) {
      thread_network net(3);
      std::atomic<int> failed{0};
      std::vector<std::thread> threads;
      for (std::uint32_t seat = 0; seat < 3; ++seat) {
        threads.emplace_back([&, seat] {
          thread_endpoint end(net, seat_id{seat});
          thread_ranks ranks(end);
          ranks.join(ranks.after(10 * one_second)).value();
          host_space space({.budget = 1 << 20, .name = "rank"});
          state_in_memory state(table_partition(flat_uneven::even(tensors, rank_count{3})), tensors, ranks,
                                space);
          operation_queue queue;
          background_sums sums(state, queue, 2);
          const auto done = [](std::span<const tensor_id>) {};
          for (std::uint32_t i = 0; i < 200; ++i) {
            if (seat == 1 && i == dies_at) net.kill(seat_id{1});
            try {
              const std::array scope{tensor_id{i % 2}};
              auto result = sums.begin(state.allocate_whole(scope).value(), sum_f32, done);
              if (result && i % 2 == 1) result = sums.finish(done);
              if (result) continue;
              CHECK((result.code() == errc::peer_failed || result.code() == errc::epoch_revoked));
            } catch (const rank_killed&) {
              CHECK(seat == 1);
            }
            ++failed;
            return;
          }
        });
      }
      for (std::thread& each : threads)
        each.join();
      CHECK(failed == 3);
    }
  }

  TEST_CASE("a piece that cannot be held ends the sums of all ranks, with the reason on its own") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(60), 4}};
    const table_partition who(flat_uneven::even(tensors, rank_count{2}));
    std::barrier both_have_summed(2);
    in_thread_world(2, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      host_space top({.budget = 4096, .name = "top"});
      host_space last({.budget = 1 << 16, .name = "last"});
      buffer_type buffer({}, {top, 4096, 64}, {last, 1 << 16, 64});
      state_in_tiers state(who, tensors, ranks, space, buffer);
      operation_queue queue;
      background_sums sums(state, queue, 2);
      std::uint32_t finished = 0;
      const auto done = [&](std::span<const tensor_id>) { ++finished; };
      const std::array scope{tensor_id{0}};
      sums.begin(state.allocate_whole(scope).value(), sum_f32, done).value();
      sums.finish(done).value();
      CHECK(finished == 1);
      both_have_summed.arrive_and_wait();  // the revocation may otherwise overtake the first sum
      auto whole = state.allocate_whole(scope).value();
      if (self == 0) {
        const auto reader = state.lease(tensor_id{0}, access_mode::read).value();
        CHECK(sums.begin(std::move(whole), sum_f32, done).code() == errc::chunk_leased);
        CHECK(sums.in_flight() == 0);
      } else {
        static_cast<void>(sums.begin(std::move(whole), sum_f32, done));
        CHECK(sums.finish(done).code() == errc::epoch_revoked);
      }
      CHECK(finished == 1);
    });
  }

  TEST_CASE("sums in the background need a place for one") {
    const std::vector<tensor_facts> tensors{{"a", tensor_shape::vector(30), 4}};
    in_thread_world(1, [&](thread_ranks& ranks, host_space& space, std::uint32_t) {
      state_in_memory state(table_partition(flat_uneven::even(tensors, rank_count{1})), tensors, ranks,
                            space);
      operation_queue queue;
      CHECK_THROWS_WITH_AS(background_sums(state, queue, 0),
                           "background_sums: 0 sums in flight, which would sum in the foreground; use 1, or "
                           "call the state's own reduce_scatter",
                           argument_error);
    });
  }
}
