/// Sharded state whose pieces lie in a tiered buffer: the bits of every operation are those of pieces in
/// memory.
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/sharded_state.hpp>
#include <llmmem/sharding/gather_schedule.hpp>
#include <llmmem/sharding/operator_tiles.hpp>
#include <llmmem/sharding/piece_store.hpp>
#include <llmmem/sharding/zero.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
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

/// The state of these arguments, deduced.
template <class Last>
using state_with = decltype(sharded_state(
    std::declval<const zero_partition&>(), std::declval<std::span<const tensor_facts>>(),
    std::declval<sim_ranks&>(), std::declval<host_space&>(), std::declval<Last>()));
using resident_state = sharded_state<zero_partition, sim_ranks, host_space>;
static_assert(std::same_as<state_with<sharded_options>, resident_state> &&
              std::same_as<state_with<sharded_options&>, resident_state> &&
              std::same_as<state_with<const sharded_options&>, resident_state> &&
              std::same_as<state_with<const sharded_options>, resident_state>);
static_assert(std::same_as<state_with<buffer_type&>,
                           sharded_state<zero_partition, sim_ranks, host_space, leased_pieces<buffer_type>>>);

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

/// A linear layer y = W x of a few samples, by the definition: one product after the other.
struct linear_layer {
  static constexpr std::uint64_t outputs = 37;
  static constexpr std::uint64_t inputs = 11;
  static constexpr std::uint64_t samples = 3;
  using numbers = std::vector<float>;

  explicit linear_layer(std::uint64_t seed) : x(numbers_of(samples * inputs, seed)) {
    dy = numbers_of(samples * outputs, seed + 1);
    y.resize(samples * outputs);
    dx.resize(samples * inputs);
  }
  static numbers numbers_of(std::uint64_t count, std::uint64_t seed) {
    std::vector<std::byte> bytes(4 * count);
    fill_floats(bytes, seed);
    numbers made(count);
    std::memcpy(made.data(), bytes.data(), bytes.size());
    return made;
  }
  void forward(index_range rows, std::span<const std::byte> weights) {
    const auto* const w = reinterpret_cast<const float*>(weights.data());
    for (std::uint64_t s = 0; s < samples; ++s) {
      for (std::uint64_t o = 0; o < rows.count; ++o) {
        for (std::uint64_t i = 0; i < inputs; ++i)
          y[s * outputs + rows.first + o] += w[o * inputs + i] * x[s * inputs + i];
      }
    }
  }
  void backward(index_range rows, std::span<const std::byte> weights, std::span<std::byte> gradients) {
    const auto* const w = reinterpret_cast<const float*>(weights.data());
    auto* const dw = reinterpret_cast<float*>(gradients.data());
    std::fill_n(dw, rows.count * inputs, 0.0F);
    for (std::uint64_t o = 0; o < rows.count; ++o) {
      for (std::uint64_t s = 0; s < samples; ++s) {
        const float d = dy[s * outputs + rows.first + o];
        for (std::uint64_t i = 0; i < inputs; ++i) {
          dx[s * inputs + i] += d * w[o * inputs + i];
          dw[o * inputs + i] += d * x[s * inputs + i];
        }
      }
    }
  }

  numbers x, dy, y{}, dx{};
};

/// The whole operator's weights, and the sum of the ranks' gradients.
const std::vector<std::byte>& all_weights() {
  static const std::vector<std::byte> all = [] {
    std::vector<std::byte> made(4 * linear_layer::outputs * linear_layer::inputs);
    fill_floats(made, 9);
    return made;
  }();
  return all;
}
linear_layer whole_layer(std::uint32_t self, std::vector<std::byte>& gradients) {
  linear_layer layer(50 + self);
  gradients.resize(all_weights().size());
  layer.forward({0, linear_layer::outputs}, all_weights());
  layer.backward({0, linear_layer::outputs}, all_weights(), gradients);
  return layer;
}

/// Writes this rank's part of the operator's weights.
template <class State>
void set_weights(State& state, const operator_tiles& tiles) {
  for (std::uint32_t t = 0; t < tiles.count(); ++t) {
    const auto mine = state.lease(tensor_id{t}, access_mode::write).value();
    const element_runs part = state.layout().local(tensor_id{t}, state.rank());
    const std::uint64_t begin = 4 * (tiles.rows(t).first * linear_layer::inputs + part.begin);
    std::copy_n(all_weights().begin() + static_cast<std::ptrdiff_t>(begin), mine.local().size(),
                mine.local().begin());
  }
}

/// Both passes in tiles: the bits of the operator that is whole, and the bytes that were predicted.
template <class State>
void check_tiles(State& weights, State& gradients, const operator_tiles& tiles, const host_space& space) {
  set_weights(weights, tiles);
  const rank_count world = weights.layout().world();
  const std::uint32_t self = to_index(weights.rank());
  std::vector<std::byte> own;
  const linear_layer whole = whole_layer(self, own);
  linear_layer layer(50 + self);
  const std::uint64_t used = space.stats().used;
  forward_tiles(weights, tiles, tensor_id{0}, [&](index_range rows, std::span<const std::byte> w) {
    layer.forward(rows, w);
  }).value();
  CHECK(layer.y == whole.y);
  const std::uint64_t forward = tiles.forward_bytes(weights.layout(), tensor_id{0}, weights.rank());
  CHECK(forward <= tiles.bytes(0));
  CHECK(space.stats().peak == used + forward);
  backward_tiles(weights, gradients, tiles, tensor_id{0}, sum_f32,
                 [&](index_range rows, std::span<const std::byte> w, std::span<std::byte> dw) {
                   layer.backward(rows, w, dw);
                 })
      .value();
  CHECK(layer.dx == whole.dx);
  CHECK(space.stats().peak ==
        used + tiles.backward_bytes(weights.layout(), tensor_id{0}, weights.rank(), 64));
  CHECK(space.stats().used == used);
  std::vector<float> sum;  // of all ranks, in their order
  for (std::uint32_t rank = 0; rank < to_number(world); ++rank) {
    std::vector<std::byte> bytes;
    static_cast<void>(whole_layer(rank, bytes));
    const auto* const more = reinterpret_cast<const float*>(bytes.data());
    if (rank == 0) {
      sum.assign(more, more + bytes.size() / 4);
      continue;
    }
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] += more[i];
  }
  for (std::uint32_t t = 0; t < tiles.count(); ++t) {
    const auto mine = gradients.lease(tensor_id{t}, access_mode::read).value();
    const element_runs part = gradients.layout().owned(tensor_id{t}, gradients.rank());
    CHECK(std::equal(
        mine.owned().begin(), mine.owned().end(),
        std::as_bytes(std::span(sum)).begin() +
            static_cast<std::ptrdiff_t>(4 * (tiles.rows(t).first * linear_layer::inputs + part.begin))));
  }
}

}  // namespace

TEST_SUITE("pieces in tiers") {
  TEST_CASE(
      "a linear layer in tiles has the bits of the whole one, in memory and in tiers, and takes a tile") {
    const tensor_shape shape = tensor_shape::matrix(linear_layer::outputs, linear_layer::inputs);
    for (const std::uint32_t world : {1U, 2U, 3U}) {
      for (const std::uint32_t count : {1U, 3U, 37U}) {
        CAPTURE(world);
        CAPTURE(count);
        const operator_tiles tiles(shape, count, 4);
        const std::vector<tensor_facts> tensors = tiles.tensors("layer");
        CHECK(tensors.back().name == "layer tile " + std::to_string(count - 1));
        in_sim_world(world, 1, [&](auto& ranks, host_space& space, std::uint32_t) {
          const zero_partition split(tensors, rank_count{world}, zero_stage::weights, state_kind::weights);
          {
            using resident = sharded_state<zero_partition, sim_ranks, host_space>;
            resident weights(split, tensors, ranks, space, {.segment_bytes = 64});
            resident gradients(split, tensors, ranks, space, {.segment_bytes = 64});
            check_tiles(weights, gradients, tiles, space);
          }
          two_tiers tiers(4096);
          host_space gathered({.budget = 1 << 20, .name = "gathered"});
          sharded_state weights(split, tensors, ranks, gathered, tiers.buffer,
                                sharded_options{.segment_bytes = 64});
          sharded_state gradients(split, tensors, ranks, gathered, tiers.buffer,
                                  sharded_options{.segment_bytes = 64});
          check_tiles(weights, gradients, tiles, gathered);
        });
      }
    }
  }

  TEST_CASE("tiles gathered ahead are two at once") {
    const operator_tiles tiles(tensor_shape::matrix(linear_layer::outputs, linear_layer::inputs), 6, 4);
    const std::vector<tensor_facts> tensors = tiles.tensors("layer");
    in_thread_world(2, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      const zero_partition split(tensors, rank_count{2}, zero_stage::weights, state_kind::weights);
      sharded_state weights(split, tensors, ranks, space);
      set_weights(weights, tiles);
      const std::uint64_t used = space.stats().used;
      std::vector<std::vector<tensor_id>> scopes;
      std::vector<std::uint32_t> order;
      std::vector<std::uint64_t> bytes;
      std::vector<gather_use> uses;
      for (std::uint32_t t = 0; t < tiles.count(); ++t) {
        scopes.push_back({tensor_id{t}});
        order.push_back(t);
        bytes.push_back(tiles.bytes(t));
        uses.push_back({t, 1000});
      }
      operation_queue queue;
      gather_schedule schedule(
          weights, queue, scopes, order,
          plan_gathers(bytes, uses, 2 * tiles.bytes(0), {.bytes_per_second = 1'000'000}));
      std::vector<std::byte> own;
      linear_layer layer(50 + self);
      schedule.begin_iteration();
      for (const std::uint32_t t : order) {
        const auto tile = schedule.next().value();
        layer.forward(tiles.rows(t), tile.whole().tensor(0));
      }
      schedule.end_iteration().value();
      CHECK(layer.y == whole_layer(self, own).y);
      CHECK(schedule.stats().ahead != 0);
      CHECK(space.stats().peak <= used + 2 * tiles.bytes(0));
    });
  }

  TEST_CASE("tiles that are none, or of another catalogue, are refused") {
    const tensor_shape shape = tensor_shape::matrix(4, 3);
    CHECK_THROWS_WITH_AS(operator_tiles(shape, 0, 4),
                         "operator_tiles: 0 tiles of 4 rows; each has at least one", argument_error);
    CHECK_THROWS_WITH_AS(operator_tiles(shape, 5, 4),
                         "operator_tiles: 5 tiles of 4 rows; each has at least one", argument_error);
    CHECK_THROWS_WITH_AS(operator_tiles(shape, 2, 0), "operator_tiles: elements of 0 bytes; give their width",
                         argument_error);
    CHECK_THROWS_AS(operator_tiles(tensor_shape::matrix(std::uint64_t{1} << 62, 1), 2, 4), length_error);
    const operator_tiles tiles(shape, 2, 4);
    in_sim_world(1, 1, [&](auto& ranks, host_space& space, std::uint32_t) {
      const std::vector<tensor_facts> tensors = operator_tiles(shape, 3, 4).tensors("layer");
      const zero_partition split(tensors, rank_count{1}, zero_stage::weights, state_kind::weights);
      sharded_state state(split, tensors, ranks, space);
      std::uint32_t used = 0;
      const auto done = forward_tiles(state, tiles, tensor_id{0}, [&](auto, auto) { ++used; });
      CHECK(done.error().message() == "forward_tiles: two lengths must be equal, but are 24 and 12");
      CHECK(used == 1);
      const auto back =
          backward_tiles(state, state, tiles, tensor_id{1}, sum_f32, [&](auto, auto, auto) { ++used; });
      CHECK(back.error().message() == "backward_tiles: two lengths must be equal, but are 24 and 12");
      CHECK(used == 1);
    });
  }

  TEST_CASE("a rank without memory for a tile's gradients ends the backward pass for all ranks") {
    const operator_tiles tiles(tensor_shape::matrix(4, 3), 2, 4);
    const std::vector<tensor_facts> tensors = tiles.tensors("layer");
    in_sim_world(2, 1, [&](auto& ranks, host_space& space, std::uint32_t self) {
      const zero_partition split(tensors, rank_count{2}, zero_stage::weights, state_kind::weights);
      const std::uint64_t pieces = 2 * 12;
      host_space of_sums({.budget = self == 1 ? pieces : std::uint64_t{1} << 20, .name = "sums"});
      sharded_state weights(split, tensors, ranks, space);
      sharded_state gradients(split, tensors, ranks, of_sums);
      const auto done =
          backward_tiles(weights, gradients, tiles, tensor_id{0}, sum_f32, [](auto, auto, auto) {});
      CHECK(done.code() == (self == 1 ? errc::out_of_bytes : errc::epoch_revoked));
    });
  }

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

  TEST_CASE("a scope that stays gathered holds no memory of the tier until its next use") {
    // The plan has memory for all layers at once, the tier for two. A rank alone has each completely.
    const auto tensors = layers_of({900, 900, 900, 900});
    const std::vector<std::uint32_t> order{0, 1, 2, 3, 3, 2, 1, 0};
    std::vector<gather_use> uses;
    for (const std::uint32_t each : order)
      uses.push_back({each, 1000});
    const std::vector<std::uint64_t> bytes(4, 3600);
    in_thread_world(1, [&](thread_ranks& ranks, host_space& space, std::uint32_t) {
      const zero_partition who(tensors, rank_count{1}, zero_stage::weights, state_kind::weights);
      two_tiers tiers(2 * 3648);
      sharded_state weights(who, tensors, ranks, space, tiers.buffer);
      for (std::uint32_t t = 0; t < tensors.size(); ++t) {
        const auto mine = weights.lease(tensor_id{t}, access_mode::write).value();
        const auto all = contents(tensors[t], t);
        std::copy(all.begin(), all.end(), mine.local().begin());
      }
      operation_queue queue;
      gather_schedule schedule(weights, queue,
                               {{tensor_id{0}}, {tensor_id{1}}, {tensor_id{2}}, {tensor_id{3}}}, order,
                               plan_gathers(bytes, uses, 4 * 3600, {.bytes_per_second = 1'000'000'000},
                                            schedule::lookahead{.accesses = 1}));
      schedule.begin_iteration();
      for (const std::uint32_t each : order) {
        const auto layer = schedule.next().value();
        CHECK(copy_of(layer.whole().tensor(0)) == contents(tensors[each], each));
      }
      schedule.end_iteration().value();
      CHECK(schedule.stats().kept == 4);
      CHECK(schedule.stats().gathers == 4);
    });
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
