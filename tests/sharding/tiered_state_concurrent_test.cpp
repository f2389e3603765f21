/// Sharded state whose pieces lie in a tiered buffer: the bits of every operation are those of pieces in
/// memory.
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::sim_endpoint;

using sim_ranks = communicator<sim_endpoint>;
using thread_ranks = communicator<thread_endpoint>;
using buffer_type = tiered_buffer<host_space, host_space>;
using scheduled = prefetch_schedule<buffer_type>;

static_assert(piece_store<resident_pieces<host_space>> && piece_store<leased_pieces<buffer_type>> &&
              piece_store<leased_pieces<scheduled>>);

/// Two tiers of one rank.
struct two_tiers {
  explicit two_tiers(std::uint64_t top_bytes)
      : top({.budget = top_bytes, .name = "top"}),
        last({.budget = std::uint64_t{1} << 24, .name = "last"}),
        buffer({}, {top, top_bytes, 64}, {last, std::uint64_t{1} << 24, 64}) {}

  host_space top;
  host_space last;
  buffer_type buffer;
};

std::vector<tensor_facts> of_floats(std::vector<tensor_facts> tensors) {
  for (tensor_facts& each : tensors)
    each.element_bytes = 4;
  return tensors;
}

std::vector<tensor_facts> layers_of(const std::vector<std::uint64_t>& elements) {
  std::vector<tensor_facts> made;
  for (const std::uint64_t each : elements)
    made.push_back({"layer" + std::to_string(made.size()), tensor_shape::vector(each), 4});
  return made;
}

void add(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

/// What a rank sees of a state that goes through every operation, and what it sent.
template <class State>
std::vector<std::byte> life_of(State& state, std::span<const tensor_facts> tensors, std::uint32_t self) {
  std::vector<std::byte> seen;
  const auto look = [&] {
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      const auto mine = state.lease(tensor_id{t}, access_mode::read).value();
      add(seen, mine.local());
      add(seen, mine.owned());
    }
  };
  look();  // zeros
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const auto mine = state.lease(tensor_id{t}, access_mode::write).value();
    const auto piece = dense(contents(tensors[t], t), state.layout().local(tensor_id{t}, state.rank()), 4);
    REQUIRE(mine.local().size() == piece.size());
    std::copy(piece.begin(), piece.end(), mine.local().begin());
  }
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    const tensor_id tensor{t};
    {
      const auto whole = state.gather({&tensor, 1}).value();
      CHECK(copy_of(whole.tensor(0)) == contents(tensors[t], t));
      add(seen, whole.tensor(0));
    }
    {
      auto whole = state.allocate_whole({&tensor, 1}).value();
      fill_floats(whole.tensor(0), 100 * t + self);
      (t % 2 == 0 ? state.reduce_scatter(whole, sum_f32) : state.all_reduce(whole, sum_f32)).value();
    }
    state.refresh({&tensor, 1}).value();
  }
  look();
  std::vector<std::byte> told(8);
  const std::uint64_t sent = state.stats().sent();
  std::memcpy(told.data(), &sent, 8);
  add(seen, told);
  return seen;
}

}  // namespace

TEST_SUITE("pieces in tiers") {
  TEST_CASE("every operation has the same bits and messages, regardless of where the pieces are") {
    for (const auto seed : seeds(22)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto kind = static_cast<std::uint32_t>(seed % state_kinds);
      const std::uint32_t world = 1 + random.below(4U);
      const auto tensors = of_floats(random_tensors(random, 5));
      const table_partition who = partition_of_kind(random, tensors, kind, world);
      std::uint64_t most = 0;  // the largest piece, in whole units: tier 0 holds little more
      for (std::uint32_t t = 0; t < who.tensors(); ++t) {
        for (std::uint32_t r = 0; r < world; ++r)
          most = std::max(most, who.local(tensor_id{t}, rank_id{r}).elements() * 4);
      }
      const std::uint64_t top = most / 64 * 64 + 128;
      const auto lives = [&](auto make) {
        std::vector<std::vector<std::byte>> seen(world);
        in_sim_world(world, seed, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
          seen[self] = make(ranks, space, self);
        });
        return seen;
      };
      const auto resident = lives([&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        sharded_state state(who, tensors, ranks, space);
        return life_of(state, tensors, self);
      });
      const auto in_tiers = lives([&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        two_tiers tiers(top);
        std::vector<std::byte> seen;
        {
          sharded_state state(who, tensors, ranks, space, tiers.buffer, {.name = "in tiers"});
          seen = life_of(state, tensors, self);
          CHECK(state.stats().local_bytes == local_bytes(who, tensors, rank_id{self}));
          CHECK(tiers.buffer.stats().tiers[0].peak <= top);
        }
        CHECK(tiers.buffer.stats().tiers[1].used == 0);
        CHECK(tiers.buffer.audit().empty());
        return seen;
      });
      const auto planned = lives([&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        two_tiers tiers(top);
        scheduled schedule(tiers.buffer, {.links = {{.bytes_per_second = 1'000'000'000}}});
        sharded_state state(who, tensors, ranks, space, schedule);
        return life_of(state, tensors, self);
      });
      CHECK(in_tiers == resident);
      CHECK(planned == resident);
    }
  }

  TEST_CASE("a reshard moves pieces between tiers of different ranks, one tensor at a time") {
    const auto tensors = layers_of({700, 3, 0, 512, 129, 600, 600});
    for (const std::uint32_t world : {2U, 3U, 4U}) {
      CAPTURE(world);
      in_sim_world(world, world, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
        const zero_partition before(tensors, rank_count{world}, zero_stage::weights, state_kind::weights);
        const zero_partition after(tensors, rank_count{world - 1}, zero_stage::weights, state_kind::weights);
        two_tiers tiers(3 * 2816);
        sharded_state from(before, tensors, ranks, space, tiers.buffer);
        for (std::uint32_t t = 0; t < tensors.size(); ++t) {
          const auto mine = from.lease(tensor_id{t}, access_mode::write).value();
          const auto piece = dense(contents(tensors[t], t), before.local(tensor_id{t}, rank_id{self}), 4);
          std::copy(piece.begin(), piece.end(), mine.local().begin());
        }
        sharded_state to(after, tensors, ranks, space, tiers.buffer);
        from.reshard_to(to).value();
        if (!to.is_member()) return;
        for (std::uint32_t t = 0; t < tensors.size(); ++t) {
          const auto mine = to.lease(tensor_id{t}, access_mode::read).value();
          CHECK(copy_of(mine.local()) ==
                dense(contents(tensors[t], t), after.local(tensor_id{t}, rank_id{self}), 4));
        }
      });
    }
  }

  TEST_CASE("prefetching gathers lease the shards on the program's thread, and return them as they arrive") {
    const auto tensors = layers_of({900, 640, 640, 640, 333});
    const std::vector<std::uint32_t> order{0, 1, 2, 3, 4, 4, 3, 2, 1, 0};
    std::vector<gather_use> uses;
    std::vector<std::uint64_t> bytes;
    std::vector<std::vector<tensor_id>> scopes;
    for (const tensor_facts& each : tensors) {
      bytes.push_back(each.bytes());
      scopes.push_back({tensor_id{static_cast<std::uint32_t>(scopes.size())}});
    }
    for (const std::uint32_t each : order)
      uses.push_back({each, 1000});
    for (const std::uint32_t world : {1U, 2U, 3U}) {
      CAPTURE(world);
      in_thread_world(world, [&](thread_ranks& ranks, host_space& space, std::uint32_t) {
        const zero_partition who(tensors, rank_count{world}, zero_stage::weights, state_kind::weights);
        two_tiers tiers(3 * 3648);
        sharded_state weights(who, tensors, ranks, space, tiers.buffer);
        operation_queue queue;
        gather_schedule schedule(weights, queue, scopes, order,
                                 plan_gathers(bytes, uses, 8 * 900, {.bytes_per_second = 1'000'000'000},
                                              schedule::lookahead{.accesses = 1}));
        for (std::uint32_t step = 0; step < 3; ++step) {
          for (std::uint32_t t = 0; t < tensors.size(); ++t) {
            const auto mine = weights.lease(tensor_id{t}, access_mode::write).value();
            const auto piece =
                dense(contents(tensors[t], t + 10 * step), who.local(tensor_id{t}, ranks.rank()), 4);
            std::copy(piece.begin(), piece.end(), mine.local().begin());
          }
          schedule.begin_iteration();
          for (const std::uint32_t each : order) {
            const auto layer = schedule.next().value();
            CHECK(copy_of(layer.whole().tensor(0)) == contents(tensors[each], each + 10 * step));
          }
          schedule.end_iteration().value();
          // Nothing is held any more: each may be evicted.
          for (std::uint32_t t = 0; t < tensors.size(); ++t)
            CHECK(weights.lease(tensor_id{t}, access_mode::read_write).has_value());
        }
        CHECK(schedule.stats().ahead > 0);
      });
    }
  }

  TEST_CASE("a piece leased for reading is not changed, and a rank without memory ends the call for all") {
    const auto tensors = layers_of({640, 640});
    in_sim_world(2, 1, [&](sim_ranks& ranks, host_space& space, std::uint32_t self) {
      const zero_partition who(tensors, rank_count{2}, zero_stage::optimizer, state_kind::weights);
      two_tiers tiers(2560);
      sharded_state state(who, tensors, ranks, space, tiers.buffer);
      {
        const auto held = state.lease(tensor_id{0}, access_mode::read).value();
        CHECK(state.lease(tensor_id{0}, access_mode::read).has_value());
        CHECK(state.lease(tensor_id{0}, access_mode::write).code() == errc::chunk_leased);
        CHECK(state.discard(tensor_id{0}).code() == errc::chunk_leased);
        CHECK(state.lease(tensor_id{1}, access_mode::read).code() == errc::out_of_bytes);
      }
      CHECK(state.lease(tensor_id{7}, access_mode::read).code() == errc::no_such_tensor);
      CHECK(state.discard(tensor_id{7}).code() == errc::no_such_tensor);
      state.discard(tensor_id{1}).value();
      CHECK(state.lease(tensor_id{1}, access_mode::read).code() == errc::no_contents);
      CHECK(state.lease(tensor_id{1}, access_mode::write).has_value());
      const tensor_id second{1};
      std::optional<piece_lease<leased_pieces<buffer_type>>> in_the_way;
      if (self == 1) in_the_way.emplace(state.lease(tensor_id{0}, access_mode::read).value());
      ranks.agree(0, ranks.after(one_second)).value();
      const auto done = state.refresh({&second, 1});
      CHECK(done.code() == (self == 1 ? errc::out_of_bytes : errc::epoch_revoked));
      in_the_way.reset();
      ranks.shrink(ranks.agree(0, ranks.after(one_second)).value());
    });
  }
}
