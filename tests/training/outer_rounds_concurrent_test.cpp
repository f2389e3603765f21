#include <llmmem/comm/operation_queue.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/memory_chunks.hpp>
#include <llmmem/training/outer_rounds.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "support/seeds.hpp"
#include "support/state_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using memory = memory_chunks<host_space>;
using tiers = tiered_buffer<host_space, host_space>;
using thread_ranks = communicator<thread_endpoint>;
using floats = std::vector<float>;

floats some_floats(std::uint64_t count, random_numbers& random) {
  floats made(count);
  for (float& each : made)
    each = (static_cast<float>(random.below(2001U)) - 1000.0F) / 512.0F;
  return made;
}

bool same_bits(const floats& a, const floats& b) {
  return std::ranges::equal(a, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

/// A worker's local steps: another change on each worker, fragment and round.
void train(floats& weights, std::uint32_t worker, std::uint64_t round, std::uint32_t fragment) {
  random_numbers random(1 + worker + 10 * round + 1000 * fragment);
  for (float& each : weights)
    each += (static_cast<float>(random.below(201U)) - 100.0F) / 4096.0F;
}

/// The weights of all fragments, by worker.
using all_weights = std::vector<std::vector<floats>>;

/// Rounds of all fragments in turn, of workers that train.
template <class Store, transport T>
std::vector<floats> run_rounds(Store& store, T& workers, std::span<const floats> start, const outer_hyper& by,
                               std::uint64_t rounds) {
  std::vector<std::uint64_t> elements;
  for (const floats& each : start)
    elements.push_back(each.size());
  outer_rounds outer(store, elements, by);
  std::vector<floats> weights(start.begin(), start.end());
  for (std::uint32_t f = 0; f < outer.fragments(); ++f)
    outer.begin(f, weights[f]).value();
  collective_call call{.by = workers.after(20 * one_second)};
  for (std::uint64_t round = 0; round < rounds; ++round) {
    for (std::uint32_t f = 0; f < outer.fragments(); ++f) {
      train(weights[f], to_index(workers.rank()), round, f);
      outer.take(f, weights[f]).value();
      outer.sum(workers, wire_form{}, call).value();
      outer.apply(weights[f]).value();
      CHECK(outer.rounds(f) == round + 1);
    }
  }
  return weights;
}

/// The same by its formulas, in doubles: by worker, and as many fragments as `start`.
all_weights by_formulas(std::span<const floats> start, const outer_hyper& by, std::uint64_t rounds,
                        std::uint32_t workers) {
  all_weights at(workers, std::vector<floats>(start.begin(), start.end()));
  for (std::uint32_t f = 0; f < start.size(); ++f) {
    std::vector<double> base(start[f].begin(), start[f].end());
    std::vector<double> momentum(base.size());
    for (std::uint64_t round = 0; round < rounds; ++round) {
      for (std::uint32_t w = 0; w < workers; ++w)
        train(at[w][f], w, round, f);
      for (std::size_t i = 0; i < base.size(); ++i) {
        double mean = 0;
        for (std::uint32_t w = 0; w < workers; ++w)
          mean += (base[i] - static_cast<double>(at[w][f][i])) / workers;
        momentum[i] = static_cast<double>(by.momentum) * momentum[i] + mean;
        const double step = by.nesterov ? mean + static_cast<double>(by.momentum) * momentum[i] : momentum[i];
        base[i] -= static_cast<double>(by.rate) * step;
        for (std::uint32_t w = 0; w < workers; ++w) {
          const auto own = static_cast<double>(at[w][f][i]);
          at[w][f][i] = static_cast<float>(base[i] + static_cast<double>(by.keep_local) * (own - base[i]));
        }
      }
    }
  }
  return at;
}

bool are_near(std::span<const floats> seen, std::span<const floats> right) {
  for (std::size_t f = 0; f < right.size(); ++f)
    for (std::size_t i = 0; i < right[f].size(); ++i)
      if (!(std::abs(seen[f][i] - right[f][i]) <= 2e-5F)) return false;
  return seen.size() == right.size();
}

outer_hyper some_hyper(random_numbers& random) {
  return {.rate = 0.25F * static_cast<float>(1 + random.below(4U)),
          .momentum = 0.3F * static_cast<float>(random.below(4U)),
          .nesterov = random.once_in(2),
          .keep_local = random.once_in(2) ? 0.0F : 0.5F};
}

}  // namespace

TEST_SUITE("outer_rounds") {
  TEST_CASE("rounds are those of the formulas, with the same bits in memory, in tiers and on all workers") {
    for (const auto seed : seeds(12)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const std::uint32_t world = 1 + random.below(3U);
      const outer_hyper by = some_hyper(random);
      std::vector<floats> start;
      for (std::uint32_t f = 0; f < 1 + random.below(3U); ++f)
        start.push_back(some_floats(1 + random.below(700U), random));
      const auto right = by_formulas(start, by, 3, world);
      std::mutex mutex;
      all_weights seen(world);
      in_thread_world(world, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
        memory in_memory(space);
        const auto first = run_rounds(in_memory, ranks, start, by, 3);
        CHECK(space.stats().used == 0);                                      // the chunks are removed
        host_space top({.budget = std::uint64_t{3} * 4096, .name = "top"});  // one fragment's round
        host_space last({.budget = 1 << 18, .name = "last"});
        tiers buffer({}, {top, std::uint64_t{3} * 4096, 64}, {last, 1 << 18, 64});
        const auto second = run_rounds(buffer, ranks, start, by, 3);
        CHECK(are_near(first, right[self]));
        for (std::size_t f = 0; f < start.size(); ++f)
          CHECK(same_bits(first[f], second[f]));
        const std::lock_guard held(mutex);
        seen[self] = first;
      });
      for (std::uint32_t w = 1; by.keep_local == 0 && w < world; ++w)
        for (std::size_t f = 0; f < start.size(); ++f)
          CHECK(same_bits(seen[w][f], seen[0][f]));
    }
  }

  TEST_CASE("a rate of 1 without momentum joins the workers in the mean of their weights") {
    in_thread_world(2, [](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      memory store(space);
      outer_rounds outer(store, std::array<std::uint64_t, 1>{3}, {.rate = 1, .momentum = 0});
      floats weights{1, 2, 3};
      outer.begin(0, weights).value();
      const std::uint64_t between_rounds = space.stats().used;
      weights = self == 0 ? floats{3, 2, -1} : floats{5, 4, 1};
      collective_call call{.by = ranks.after(20 * one_second)};
      outer.take(0, weights).value();
      outer.sum(ranks, wire_form{}, call).value();
      outer.apply(weights).value();
      CHECK(weights == floats{4, 3, 0});
      CHECK(space.stats().used == between_rounds);
    });
  }

  TEST_CASE("workers of several ranks join shard by shard") {
    random_numbers random(7);
    const floats whole = some_floats(90, random);
    const outer_hyper by{};
    in_thread_world(4, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      const std::uint32_t shard = self % 2;  // two workers, each of two ranks
      const std::array same_shard{rank_id{shard}, rank_id{shard + 2}};
      rank_group workers(ranks, same_shard);
      memory store(space);
      const std::vector<floats> mine{
          floats(whole.begin() + (shard == 0 ? 0 : 40), whole.begin() + (shard == 0 ? 40 : 90))};
      const auto seen = run_rounds(store, workers, mine, by, 2);
      CHECK(are_near(seen, by_formulas(mine, by, 2, 2)[to_index(workers.rank())]));
    });
  }

  TEST_CASE("a sum runs on another thread while the worker trains, which keeps a share of its steps") {
    in_thread_world(2, [](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      memory store(space);
      outer_rounds outer(store, std::array<std::uint64_t, 1>{1},
                         {.rate = 1, .momentum = 0, .keep_local = 0.5F});
      floats weights{0};
      outer.begin(0, weights).value();
      weights[0] = self == 0 ? 2.0F : 4.0F;
      outer.take(0, weights).value();
      collective_call call{.by = ranks.after(20 * one_second)};
      operation_queue queue;
      struct sum_entry : operation_queue::entry {
        outer_rounds<memory>* outer = nullptr;
        thread_ranks* ranks = nullptr;
        collective_call* call = nullptr;
        sum_entry()
            : entry([](entry& self) -> result<void> {
                auto& it = static_cast<sum_entry&>(self);
                return it.outer->sum(*it.ranks, wire_form{}, *it.call);
              }) {}
      } entry;
      entry.outer = &outer;
      entry.ranks = &ranks;
      entry.call = &call;
      queue.put(entry);
      weights[0] += 8;  // the steps taken meanwhile
      queue.wait(entry).value();
      outer.apply(weights).value();
      CHECK(weights[0] == (self == 0 ? 6.5F : 7.5F));  // half way between the mean, 3, and 10 or 12
      floats base(1), momentum(1);
      outer.save(0, base, momentum).value();
      CHECK(base[0] == 3);
    });
  }

  TEST_CASE("what was saved continues with the same bits, and so does a worker that joins") {
    random_numbers random(3);
    const floats start = some_floats(50, random);
    in_thread_world(2, [&](thread_ranks& ranks, host_space& space, std::uint32_t self) {
      collective_call call{.by = ranks.after(20 * one_second)};
      const auto round = [&](outer_rounds<memory>& outer, floats& weights, std::uint64_t number) {
        train(weights, self, number, 0);
        outer.take(0, weights).value();
        outer.sum(ranks, wire_form{}, call).value();
        outer.apply(weights).value();
      };
      memory store(space);
      outer_rounds outer(store, std::array<std::uint64_t, 1>{50});
      floats weights = start;
      outer.begin(0, weights).value();
      for (std::uint64_t number = 0; number < 2; ++number)
        round(outer, weights, number);
      floats base(50), momentum(50);
      outer.save(0, base, momentum).value();
      floats again = weights;
      for (std::uint64_t number = 2; number < 4; ++number)
        round(outer, weights, number);
      outer_rounds other(store, std::array<std::uint64_t, 1>{50});
      other.restore(0, base, momentum).value();
      for (std::uint64_t number = 2; number < 4; ++number)
        round(other, again, number);
      CHECK(same_bits(again, weights));
      CHECK(other.rounds(0) == 2);
      // A checkpointer of chunks copies the same values, and writes them back.
      outer.save(0, base, momentum).value();
      const auto values = [&](chunk_handle chunk) {
        const auto lease = store.read(chunk).value();
        const auto* const from = reinterpret_cast<const float*>(lease.span().data());
        return floats(from, from + 50);
      };
      CHECK(same_bits(values(outer.base(0)), base));
      CHECK(same_bits(values(outer.momentum(0)), momentum));
      std::memset(store.update(outer.base(0)).value().span().data(), 0, 200);
      outer.save(0, base, momentum).value();
      CHECK(same_bits(base, floats(50)));
    });
  }

  TEST_CASE("the death of a worker in a round changes nothing, and the others take the round again") {
    for (std::uint32_t dies_at = 0; dies_at < 4; ++dies_at) {
      CAPTURE(dies_at);
      thread_network net(3);
      std::array<floats, 3> ends;
      std::atomic<int> repeated{0};
      std::vector<std::thread> threads;
      for (std::uint32_t seat = 0; seat < 3; ++seat) {
        threads.emplace_back([&, seat] {
          thread_endpoint end(net, seat_id{seat});
          thread_ranks ranks(end);
          ranks.join(ranks.after(10 * one_second)).value();
          host_space space({.budget = 1 << 20, .name = "rank"});
          memory store(space);
          outer_rounds outer(store, std::array<std::uint64_t, 1>{20'000});
          random_numbers random(1);
          floats weights = some_floats(20'000, random);
          outer.begin(0, weights).value();
          try {
            for (std::uint64_t round = 0; round < 5;) {
              floats trained = weights;
              train(trained, seat, round, 0);
              if (seat == 1 && round == dies_at) net.kill(seat_id{1});
              outer.take(0, trained).value();
              collective_call call{.by = ranks.after(20 * one_second)};
              const std::uint64_t in_round = space.stats().used;
              bool is_summed = false;
              try {
                is_summed = outer.sum(ranks, wire_form{}, call).has_value();
              } catch (const rank_killed&) {
                CHECK_THROWS_AS(outer.sum(ranks, wire_form{}, call).value(), argument_error);
                throw;
              }
              const auto all = ranks.agree(is_summed ? 1 : 0, ranks.after(20 * one_second)).value();
              if (all.bits == 1) {
                outer.apply(trained).value();
                weights = trained;
                ++round;
              } else {
                CHECK(outer.rounds(0) == round);
                if (!is_summed) {
                  CHECK_THROWS_AS(outer.apply(trained).value(), argument_error);
                  CHECK_THROWS_AS(outer.sum(ranks, wire_form{}, call).value(), argument_error);
                  CHECK(space.stats().used == in_round);  // sum's thread may not be the store's
                }
                floats base(20'000), momentum(20'000);
                outer.save(0, base, momentum).value();
                CHECK(same_bits(base, weights));
                outer.end_round();
                CHECK(space.stats().used < in_round);
                outer.save(0, base, momentum).value();
                CHECK(same_bits(base, weights));
                ranks.shrink(all);
                ++repeated;
              }
            }
            ends[seat] = weights;
          } catch (const rank_killed&) {
            CHECK(seat == 1);
          }
        });
      }
      for (std::thread& each : threads)
        each.join();
      CHECK(repeated == 2);
      CHECK(ends[0].size() == 20'000);
      CHECK(same_bits(ends[0], ends[2]));
      CHECK(ends[1].empty());
    }
  }

  TEST_CASE("what a store refuses leaves no chunk in it") {
    host_space top({.budget = 3 * 4096, .name = "top"}), last({.budget = 4 * 4096, .name = "last"});
    tiers buffer({}, {top, 3 * 4096, 64}, {last, 4 * 4096, 64});
    const std::array<std::uint64_t, 2> fits{512, 256};
    for (const std::uint64_t too_large : {4000U, 1600U, 1200U})  // for base weights, momentum, the change
      CHECK_THROWS_AS(outer_rounds(buffer, std::array<std::uint64_t, 2>{512, too_large}), out_of_memory);
    CHECK(outer_rounds(buffer, fits).fragments() == 2);
  }

  TEST_CASE("each refusal says what to do, and changes nothing") {
    in_thread_world(1, [](thread_ranks& ranks, host_space& space, std::uint32_t) {
      memory store(space);
      const std::array<std::uint64_t, 2> sizes{2, 3};
      const auto made = [&](const outer_hyper& by) {
        return outer_rounds<memory>(store, sizes, by).fragments();
      };
      CHECK(made({}) == 2);
      CHECK_THROWS_WITH_AS(made({.rate = 0}),
                           "outer_rounds: the rate is not a number above 0; DiLoCo's is 0.7", argument_error);
      CHECK_THROWS_WITH_AS(made({.rate = std::nanf("")}),
                           "outer_rounds: the rate is not a number above 0; DiLoCo's is 0.7", argument_error);
      CHECK_THROWS_WITH_AS(made({.momentum = 1}),
                           "outer_rounds: the momentum is not from 0 to below 1; DiLoCo's is 0.9",
                           argument_error);
      CHECK_THROWS_WITH_AS(made({.keep_local = 1}),
                           "outer_rounds: keep_local is not from 0 to below 1; 1 would join nothing",
                           argument_error);
      CHECK_THROWS_WITH_AS(outer_rounds<memory>(store, std::span<const std::uint64_t>{}),
                           "outer_rounds: no fragments; one of all weights will do", argument_error);
      CHECK_THROWS_WITH_AS(outer_rounds<memory>(store, std::array<std::uint64_t, 2>{4, 0}),
                           "outer_rounds: fragment 1 has 0 elements; leave out what is empty",
                           argument_error);
      outer_rounds outer(store, sizes);
      floats two{1, 2}, three{1, 2, 3};
      collective_call call{.by = ranks.after(one_second)};
      CHECK_THROWS_WITH_AS(
          outer.take(0, two).value(),
          "outer_rounds::take: the fragment has no base weights; call begin or restore first",
          argument_error);
      outer.begin(0, two).value();
      CHECK(outer.begin(1, two).code() == errc::size_mismatch);
      CHECK(outer.begin(2, two).code() == errc::out_of_range);
      CHECK(outer.take(0, three).code() == errc::size_mismatch);
      CHECK_THROWS_WITH_AS(outer.sum(ranks, wire_form{}, call).value(),
                           "outer_rounds::sum: no change to sum; call take first", argument_error);
      outer.take(0, two).value();
      CHECK_THROWS_WITH_AS(outer.apply(two).value(),
                           "outer_rounds::apply: no sum to apply; call take, and sum until it succeeds",
                           argument_error);
      outer.sum(ranks, wire_form{}, call).value();
      CHECK_THROWS_WITH_AS(outer.sum(ranks, wire_form{}, call).value(),
                           "outer_rounds::sum: no change to sum; call take first", argument_error);
      CHECK(outer.apply(three).code() == errc::size_mismatch);
      outer.apply(two).value();
      CHECK(two == floats{1, 2});
      CHECK(outer.restore(0, two, three).code() == errc::size_mismatch);
      CHECK(outer.restore(0, two, {}).code() == errc::size_mismatch);
      CHECK(outer.save(0, two, three).code() == errc::size_mismatch);
    });
  }
}
