#include <llmmem/comm/sparse_sums.hpp>
#include <llmmem/comm/thread_network.hpp>
#include <llmmem/training/top_k_sums.hpp>
#include <llmmem/training/top_magnitudes.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/seeds.hpp"
#include "support/sim_world.hpp"

namespace {

using namespace llmmem;
using llmmem_tests::in_world;
using llmmem_tests::sim_ranks;
using floats = std::vector<float>;
constexpr std::uint64_t second = 1'000'000'000;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) { return bits_of(x) == bits_of(y); });
}

/// Few different magnitudes, so that many are equal.
floats some_floats(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::uint64_t kinds = 1 + random() % 200;
  floats made(count);
  for (float& each : made) {
    const float size = static_cast<float>(random() % kinds) / 64.0F;
    each = (random() % 2 == 0 ? size : -size) * static_cast<float>(1 << (random() % 8));
  }
  return made;
}

/// By the definition: sorted by magnitude and index.
std::vector<std::uint32_t> largest(std::span<const float> values, std::uint64_t count) {
  std::vector<std::uint32_t> order(values.size());
  for (std::uint32_t i = 0; i < order.size(); ++i)
    order[i] = i;
  const auto key = [&](std::uint32_t i) { return bits_of(values[i]) & 0x7FFF'FFFFU; };
  std::ranges::sort(
      order, [&](std::uint32_t a, std::uint32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
  order.resize(count);
  std::ranges::sort(order);
  return order;
}

std::vector<std::uint32_t> selected(std::span<const float> values, std::uint64_t count) {
  std::vector<std::uint32_t> made;
  select_top_magnitudes(values, count, [&](std::uint64_t place, std::uint32_t index) {
    CHECK(place == made.size());
    made.push_back(index);
  });
  return made;
}

float rounded(float value, sparse_values form) {
  if (form == sparse_values::f32) return value;
  return std::bit_cast<float>(f32_from_bf16_bits(bf16_from_f32_bits(bits_of(value))));
}

/// One rank of the oracle: dense lists, no messages.
struct dense_rank {
  floats momentum, unsent;

  /// Returns what the rank sends, filled up with zeros.
  floats step(const floats& gradients, std::uint64_t count, const top_k_options& by) {
    momentum.resize(gradients.size());
    unsent.resize(gradients.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      momentum[i] = by.momentum * momentum[i] + gradients[i];
      unsent[i] += momentum[i];
    }
    floats sent(gradients.size());
    for (const std::uint32_t i : largest(unsent, count)) {
      sent[i] = rounded(unsent[i], by.form);
      unsent[i] -= sent[i];
      if (by.sent == sent_momentum::cleared) momentum[i] = 0;
    }
    return sent;
  }
};

floats gradients_of(std::size_t count, std::uint64_t seed, std::uint32_t rank, std::uint64_t step) {
  return some_floats(count, seed * 1000 + rank * 100 + step);
}

/// A rank with its state and its lists.
struct sparse_rank {
  sparse_rank(std::size_t elements, std::uint64_t count, std::uint32_t world, sparse_values form)
      : momentum(elements),
        unsent(elements),
        lists(sparse_scratch_bytes(std::min<std::uint64_t>(count, elements), rank_count{world}, form)) {}
  [[nodiscard]] top_k_piece piece() { return {momentum, unsent}; }

  floats momentum, unsent;
  std::vector<std::byte> lists;
};

}  // namespace

TEST_SUITE("top_k_sums") {
  TEST_CASE("the largest magnitudes are chosen as by a sort, and listed by index") {
    for (const auto seed : llmmem_tests::seeds(100)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::size_t elements = 1 + random() % 700;
      floats values = some_floats(elements, seed);
      for (const float odd : {not_a_number, -not_a_number, infinity, -infinity, -0.0F, 1e-40F})
        values[random() % elements] = odd;
      const std::uint64_t count = random() % (elements + 1);
      CHECK(selected(values, count) == largest(values, count));
      CHECK(selected(values, elements).size() == elements);
    }
    CHECK(selected({}, 0).empty());
  }

  TEST_CASE("the count of a density is the nearest one, at least 1 and at most all") {
    CHECK(top_k_count(1000, 0.001) == 1);
    CHECK(top_k_count(300, 0.01) == 3);
    CHECK(top_k_count(100, 0.29) == 29);
    CHECK(top_k_count(10, 0.001) == 1);
    CHECK(top_k_count(7, 1) == 7);
    CHECK(top_k_count(0, 0.5) == 0);
    CHECK_THROWS_WITH_AS(check_top_k({.momentum = 1}),
                         "top_k_options: the momentum is not from 0 to below 1; DGC's is 0.9",
                         argument_error);
    CHECK_THROWS_AS(check_top_k({.momentum = not_a_number}), argument_error);
    CHECK_THROWS_AS(check_top_k({.momentum = -0.1F}), argument_error);
  }

  TEST_CASE("steps have the bits of the dense sum of what ranks send, and send the bytes of the formula") {
    for (const auto seed : llmmem_tests::seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 5);
      const std::size_t elements = 1 + random() % 300;
      const std::uint64_t count = random() % (elements + 1);
      const top_k_options by{.momentum = static_cast<float>(random() % 10) / 10,
                             .sent = random() % 2 == 0 ? sent_momentum::cleared : sent_momentum::kept,
                             .form = random() % 2 == 0 ? sparse_values::f32 : sparse_values::bf16};
      const auto algorithm = random() % 2 == 0 ? reduce_algorithm::direct : reduce_algorithm::ring;
      constexpr std::uint64_t steps = 4;

      std::vector<dense_rank> oracle(world);
      std::vector<floats> sums;
      for (std::uint64_t step = 0; step < steps; ++step) {
        for (std::uint32_t rank = 0; rank < world; ++rank) {
          const floats sent = oracle[rank].step(gradients_of(elements, seed, rank, step), count, by);
          if (rank == 0) {
            sums.push_back(sent);
            continue;
          }
          for (std::size_t i = 0; i < elements; ++i)
            sums.back()[i] += sent[i];
        }
      }
      in_world(world, seed, [&](sim_ranks& ranks, std::uint32_t self) {
        sparse_rank mine(elements, count, world, by.form);
        const collective_call call{.by = ranks.after(second), .algorithm = algorithm, .segment_bytes = 64};
        std::uint64_t before = 0;
        for (std::uint32_t rank = 0; rank < world; ++rank)
          before += ranks.traffic(ranks.seat_of(rank_id{rank})).sent_bytes;
        for (std::uint64_t step = 0; step < steps; ++step) {
          floats gradients = gradients_of(elements, seed, self, step);
          top_k_all_reduce(ranks, gradients, mine.piece(), count, by, mine.lists, call).value();
          CHECK(same_bits(gradients, sums[step]));
        }
        CHECK(same_bits(mine.momentum, oracle[self].momentum));
        CHECK(same_bits(mine.unsent, oracle[self].unsent));
        std::uint64_t sent = 0;
        for (std::uint32_t rank = 0; rank < world; ++rank)
          sent += ranks.traffic(ranks.seat_of(rank_id{rank})).sent_bytes;
        CHECK(sent - before == steps * sparse_sent_bytes(count, rank_count{world}, by.form));
      });
    }
  }

  TEST_CASE("with all elements and a momentum that is kept, it is SGD's sum of momenta, bit for bit") {
    constexpr std::size_t elements = 131;
    in_world(3, 1, [&](sim_ranks& ranks, std::uint32_t self) {
      // A count above the elements is as all of them.
      sparse_rank mine(elements, 1000, 3, sparse_values::f32);
      floats momentum(elements);
      for (std::uint64_t step = 0; step < 5; ++step) {
        floats gradients = gradients_of(elements, 7, self, step);
        for (std::size_t i = 0; i < elements; ++i)
          momentum[i] = 0.9F * momentum[i] + gradients[i];
        floats dense = momentum;
        collective_call call{.by = ranks.after(second)};
        all_reduce(ranks, std::as_writable_bytes(std::span(dense)), sum_f32, call).value();
        top_k_all_reduce(ranks, gradients, mine.piece(), 1000, {.sent = sent_momentum::kept}, mine.lists,
                         call)
            .value();
        for (float& each : dense)
          each += 0.0F;  // -0 of a momentum is 0 in what was unsent
        for (float& each : gradients)
          each += 0.0F;
        CHECK(same_bits(gradients, dense));
      }
    });
  }

  TEST_CASE("an infinity and a NaN of one rank reach all, spoil one step, and do not stay") {
    in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t self) {
      for (const sent_momentum sent : {sent_momentum::cleared, sent_momentum::kept}) {
        const top_k_options by{.sent = sent};
        sparse_rank mine(6, 2, 2, by.form);
        const collective_call call{.by = ranks.after(second)};
        floats gradients = {1, 2, 3, 4, 5, 6};
        if (self == 1) gradients = {1, not_a_number, -infinity, infinity, 5, 6};
        top_k_all_reduce(ranks, gradients, mine.piece(), 2, by, mine.lists, call).value();
        CHECK(std::isnan(gradients[1]));
        CHECK(gradients[2] == -infinity);
        CHECK(gradients[3] == 0);  // waits behind, and is dropped
        gradients.assign(6, 1);
        top_k_all_reduce(ranks, gradients, mine.piece(), 2, by, mine.lists, call).value();
        for (const floats& all : {gradients, mine.momentum, mine.unsent})
          CHECK(std::ranges::all_of(all, [](float each) { return std::isfinite(each); }));
      }
    });
  }

  TEST_CASE("without a count nothing is sent, and all gradients wait") {
    in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t self) {
      sparse_rank mine(2, 0, 2, sparse_values::f32);
      const collective_call call{.by = ranks.after(second)};
      floats gradients = {1, static_cast<float>(self)};
      top_k_all_reduce(ranks, gradients, mine.piece(), 0, {.momentum = 0.5F}, {}, call).value();
      CHECK(gradients == floats{0, 0});
      gradients = {1, 0};
      top_k_all_reduce(ranks, gradients, mine.piece(), 0, {.momentum = 0.5F}, {}, call).value();
      CHECK(mine.momentum == floats{1.5F, 0.5F * static_cast<float>(self)});
      CHECK(mine.unsent == floats{2.5F, 1.5F * static_cast<float>(self)});
    });
  }

  TEST_CASE("a piece saved and restored between steps continues with the same bits") {
    constexpr std::size_t elements = 90;
    in_world(2, 3, [&](sim_ranks& ranks, std::uint32_t self) {
      const top_k_options by{.form = sparse_values::bf16};
      const collective_call call{.by = ranks.after(second)};
      sparse_rank whole(elements, 9, 2, by.form);
      floats straight;
      sparse_rank saved = whole;
      for (std::uint64_t step = 0; step < 6; ++step) {
        straight = gradients_of(elements, 5, self, step);
        top_k_all_reduce(ranks, straight, whole.piece(), 9, by, whole.lists, call).value();
        if (step == 2) saved = whole;
      }
      floats resumed;
      for (std::uint64_t step = 3; step < 6; ++step) {
        resumed = gradients_of(elements, 5, self, step);
        top_k_all_reduce(ranks, resumed, saved.piece(), 9, by, saved.lists, call).value();
      }
      CHECK(same_bits(resumed, straight));
      CHECK(same_bits(saved.unsent, whole.unsent));
    });
  }

  TEST_CASE("a -0 stays only where all ranks have one, as in the dense sum") {
    for (const std::uint32_t world : {1U, 2U, 3U}) {
      in_world(world, 1, [&](sim_ranks& ranks, std::uint32_t self) {
        // Rank 0 has elements 0, 1 and 3, every other rank 1, 2 and 3.
        const std::array<std::uint32_t, 3> indices =
            self == 0 ? std::array{0U, 1U, 3U} : std::array{1U, 2U, 3U};
        std::vector<std::byte> lists(sparse_scratch_bytes(3, rank_count{world}, sparse_values::f32));
        sparse_list mine = own_sparse_list(ranks, lists, 3, sparse_values::f32);
        floats dense(5);
        for (std::uint32_t i = 0; i < 3; ++i) {
          const float value = i == 2 && self == 1 ? 1.0F : -0.0F;
          mine.set(i, indices[i], value);
          dense[indices[i]] = value;
        }
        collective_call call{.by = ranks.after(second)};
        all_reduce(ranks, std::as_writable_bytes(std::span(dense)), sum_f32, call).value();
        floats sum(5, 7.0F);
        sparse_all_reduce(ranks, sum, 3, sparse_values::f32, lists, call).value();
        CHECK(same_bits(sum, dense));
        CHECK(std::signbit(sum[0]) == (world == 1));
        CHECK(std::signbit(sum[1]));
      });
    }
  }

  TEST_CASE("lengths that do not fit are refused with both numbers, and nothing changes") {
    in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t) {
      const collective_call call{.by = ranks.after(second)};
      sparse_rank mine(10, 3, 2, sparse_values::f32);
      floats gradients(9, 1.0F);
      const auto message = [](const result<void>& done) { return done.error().message(); };
      CHECK(message(top_k_all_reduce(ranks, gradients, mine.piece(), 3, {}, mine.lists, call)) ==
            "top_k_all_reduce: two lengths must be equal, but are 9 and 10");
      gradients.assign(10, 1.0F);
      CHECK(message(top_k_all_reduce(ranks, gradients, mine.piece(), 4, {}, mine.lists, call)) ==
            "top_k_all_reduce: two lengths must be equal, but are 64 and 48");
      CHECK(mine.unsent == floats(10));
      CHECK(gradients == floats(10, 1.0F));
      std::vector<std::byte> lists(2 * 88);
      CHECK(message(sparse_all_reduce(ranks, gradients, 11, sparse_values::f32, lists, call)) ==
            "sparse_all_reduce: 11 requested, but the highest allowed is 10");
      CHECK(message(sparse_all_reduce(ranks, gradients, 3, sparse_values::f32, lists, call)) ==
            "sparse_all_reduce: two lengths must be equal, but are 48 and 176");
      // Its own list is checked before anything is sent.
      sparse_list list = own_sparse_list(ranks, mine.lists, 3, sparse_values::f32);
      for (std::uint32_t i = 0; i < 3; ++i)
        list.set(i, 2 - i, 1);
      const std::string self = std::to_string(to_index(ranks.rank()));
      CHECK(message(sparse_all_reduce(ranks, gradients, 3, sparse_values::f32, mine.lists, call)) ==
            "sparse_all_reduce: rank " + self +
                " has index 1 after 2 in its list; list each element once, in ascending order");
      CHECK_FALSE(ranks.is_revoked());
    });
  }

  TEST_CASE("a list of a peer that names an element twice, or none of the sum, is refused with its rank") {
    const std::array<std::pair<std::array<std::uint32_t, 2>, std::string>, 3> bad{
        {{{3, 3},
          "sparse_all_reduce: rank 1 has index 3 after 3 in its list; list each element once, in ascending "
          "order"},
         {{3, 10},
          "sparse_all_reduce: rank 1 has index 10 in its list, but the sum has 10 elements; give all ranks "
          "the same sizes"},
         {{0xFFFF'FFFFU, 0},
          "sparse_all_reduce: rank 1 has index 4294967295 in its list, but the sum has 10 elements; give all "
          "ranks the same sizes"}}};
    for (const auto& [indices, text] : bad) {
      in_world(2, 1, [&](sim_ranks& ranks, std::uint32_t self) {
        collective_call call{.by = ranks.after(second)};
        std::vector<std::byte> lists(sparse_scratch_bytes(2, rank_count{2}, sparse_values::bf16));
        sparse_list mine = own_sparse_list(ranks, lists, 2, sparse_values::bf16);
        if (self == 1) {  // sends the bytes without the checks
          mine.set(0, indices[0], 1);
          mine.set(1, indices[1], 1);
          all_gather(ranks, std::span(lists), even_blocks(lists.size(), rank_count{2}), call).value();
          return;
        }
        mine.set(0, 1, 1);
        mine.set(1, 9, 1);
        floats sum(10, 5.0F);
        CHECK(sparse_all_reduce(ranks, sum, 2, sparse_values::bf16, lists, call).error().message() == text);
        CHECK(sum == floats(10, 5.0F));
        CHECK(ranks.is_revoked());
      });
    }
  }

  TEST_CASE("a failed sum takes nothing out, and the ranks that are left sum again") {
    std::vector<dense_rank> oracle(2);
    floats expected = oracle[0].step(gradients_of(50, 4, 0, 0), 5, {});
    const floats more = oracle[1].step(gradients_of(50, 4, 1, 0), 5, {});
    for (std::size_t i = 0; i < expected.size(); ++i)
      expected[i] += more[i];
    thread_network net(3);
    std::vector<std::thread> threads;
    for (std::uint32_t seat = 0; seat < 3; ++seat) {
      threads.emplace_back([&, seat] {
        thread_endpoint end(net, seat_id{seat});
        communicator ranks(end);
        ranks.join(ranks.after(10 * second)).value();
        if (seat == 2) return;  // dies before the sum
        sparse_rank mine(50, 5, 3, sparse_values::f32);
        floats gradients = gradients_of(50, 4, seat, 0);
        const collective_call call{.by = ranks.after(10 * second)};
        const auto done = top_k_all_reduce(ranks, gradients, mine.piece(), 5, {}, mine.lists, call);
        CHECK_FALSE(done.has_value());
        ranks.revoke();
        ranks.shrink(ranks.agree(0, ranks.after(10 * second)).value());
        const std::span<std::byte> lists =
            std::span(mine.lists).first(sparse_scratch_bytes(5, rank_count{2}, sparse_values::f32));
        sparse_list list = own_sparse_list(ranks, lists, 5, sparse_values::f32);
        choose_top_k(mine.piece(), list);
        sparse_all_reduce(ranks, gradients, 5, sparse_values::f32, lists, call).value();
        settle_top_k(mine.piece(), list, {});
        CHECK(same_bits(gradients, expected));
        CHECK(same_bits(mine.unsent, oracle[seat].unsent));
        ranks.agree(0, ranks.after(10 * second)).value();
      });
    }
    for (std::thread& each : threads)
      each.join();
  }
}
