#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/communicator.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"

namespace {

using namespace llmmem;
using namespace llmmem::testing;
using llmmem_tests::bytes_of_seed;
using llmmem_tests::in_world;

using ranks_of = llmmem_tests::sim_ranks;
constexpr std::uint64_t second = 1'000'000'000;

std::uint64_t sent_by(ranks_of& ranks) {
  std::uint64_t bytes = 0;
  for (const seat_id seat : ranks.seats())
    bytes += ranks.traffic(seat).sent_bytes;
  return bytes;
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

std::span<std::byte> bytes_in(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// Rank by rank, as `reduce_algorithm::direct` promises.
std::vector<float> sum_by_rank(std::size_t count, std::uint32_t world, std::uint64_t seed) {
  std::vector<float> sum = floats_of(count, seed);
  for (std::uint32_t rank = 1; rank < world; ++rank) {
    const std::vector<float> more = floats_of(count, seed + rank);
    for (std::size_t i = 0; i < count; ++i)
      sum[i] += more[i];
  }
  return sum;
}

/// Begins with the rank after the one whose block it is.
std::vector<float> sum_by_ring(std::size_t count, std::uint32_t world, std::uint64_t seed,
                               std::span<const std::uint64_t> blocks) {
  std::vector<float> sum(count);
  for (std::uint32_t owner = 0; owner < world; ++owner) {
    for (std::uint32_t d = 1; d <= world; ++d) {
      const std::vector<float> more = floats_of(count, seed + (owner + d) % world);
      for (std::size_t i = blocks[owner] / 4; i < blocks[owner + 1] / 4; ++i)
        sum[i] = d == 1 ? more[i] : sum[i] + more[i];
    }
  }
  return sum;
}

std::vector<std::uint64_t> random_blocks(std::uint64_t bytes, std::uint32_t world, std::uint32_t element,
                                         std::mt19937_64& random) {
  std::vector<std::uint64_t> blocks{0};
  for (std::uint32_t i = 1; i < world; ++i)
    blocks.push_back(random() % (bytes / element + 1) * element);
  blocks.push_back(bytes);
  std::sort(blocks.begin(), blocks.end());
  return blocks;
}

}  // namespace

TEST_SUITE("collectives") {
  TEST_CASE(
      "a broadcast from any root reaches all ranks, and sends as many copies as there are other ranks") {
    for (std::uint32_t world = 1; world <= 9; ++world) {
      CAPTURE(world);
      in_world(world, world, [&](ranks_of& ranks, std::uint32_t self) {
        for (std::uint32_t root = 0; root < world; ++root) {
          for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{9000}}) {
            auto data = bytes_of_seed(bytes, self);
            const std::uint64_t before = sent_by(ranks);
            broadcast(ranks, data, rank_id{root}, {.by = ranks.after(second)}).value();
            CHECK(data == bytes_of_seed(bytes, root));
            std::uint64_t children = 0;  // by the definition: the subtree of place p spans its lowest bit
            const std::uint32_t place = (self + world - root) % world;
            for (std::uint32_t step = 1; step < world && (place == 0 || (place & (step - 1)) == 0);
                 step *= 2) {
              if (place != 0 && (place & step) != 0) break;
              if (place + step < world) ++children;
            }
            CHECK(sent_by(ranks) - before == children * bytes);
          }
        }
      });
    }
  }

  TEST_CASE("an all-gather brings blocks of any size to all ranks, directly and over the ring") {
    for (const auto seed : llmmem_tests::seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 6);
      const std::uint64_t bytes = random() % 20'000;
      const auto blocks = random_blocks(bytes, world, 1, random);
      const reduce_algorithm way = random() % 2 == 0 ? reduce_algorithm::ring : reduce_algorithm::direct;
      const auto segment =
          static_cast<std::uint32_t>(random() % 2 == 0 ? 256 * 1024 : 500 + random() % 5'000);
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        const auto expected = bytes_of_seed(bytes, 77);
        std::vector<std::byte> data(bytes);
        std::copy(expected.begin() + static_cast<std::ptrdiff_t>(blocks[self]),
                  expected.begin() + static_cast<std::ptrdiff_t>(blocks[self + 1]),
                  data.begin() + static_cast<std::ptrdiff_t>(blocks[self]));
        all_gather(ranks, data, blocks,
                   {.by = ranks.after(second), .algorithm = way, .segment_bytes = segment})
            .value();
        CHECK(data == expected);
      });
    }
  }

  TEST_CASE("a sum has the bits of its order: the ranks' order if direct, the ring's order over the ring") {
    for (const auto seed : llmmem_tests::seeds(40)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 6);
      const std::size_t count = random() % 4000;
      const auto blocks = random_blocks(count * 4, world, 4, random);
      const auto even = even_blocks(count * 4, rank_count{world}, 4);
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        const auto by_rank = sum_by_rank(count, world, seed);
        collective_call call{.by = ranks.after(second), .segment_bytes = 1000};
        std::vector<float> data = floats_of(count, seed + self);
        const std::uint64_t before = sent_by(ranks);
        reduce_scatter(ranks, bytes_in(data), blocks, sum_f32, call).value();
        CHECK(sent_by(ranks) - before == (world == 1 ? 0 : count * 4 - (blocks[self + 1] - blocks[self])));
        const std::vector<float> own = floats_of(count, seed + self);
        for (std::size_t i = 0; i < count; ++i) {
          const bool is_mine = i * 4 >= blocks[self] && i * 4 < blocks[self + 1];
          if (data[i] != (is_mine ? by_rank[i] : own[i])) CHECK_MESSAGE(false, "element ", i);
        }
        for (const std::uint32_t small : {0U, 1U << 20U}) {
          call.small_bytes = small;
          data = own;
          const std::uint64_t earlier = sent_by(ranks);
          all_reduce(ranks, bytes_in(data), sum_f32, call).value();
          CHECK(data == by_rank);
          if (small != 0) CHECK(sent_by(ranks) - earlier == (world - 1) * count * 4);  // all of it to all
        }
        call.algorithm = reduce_algorithm::ring;
        data = own;
        const auto by_ring = sum_by_ring(count, world, seed, blocks);
        reduce_scatter(ranks, bytes_in(data), blocks, sum_f32, call).value();
        for (std::size_t i = blocks[self] / 4; i < blocks[self + 1] / 4; ++i) {
          if (data[i] != by_ring[i]) CHECK_MESSAGE(false, "element ", i, " by ring");
        }
        data = own;
        all_reduce(ranks, bytes_in(data), sum_f32, call).value();
        CHECK(data == sum_by_ring(count, world, seed, even));
      });
    }
  }

  TEST_CASE(
      "an all-reduce moves 2 (N - 1) / N of its bytes, and gives all ranks the same result by every "
      "algorithm") {
    for (std::uint32_t world = 2; world <= 8; ++world) {
      CAPTURE(world);
      const std::size_t count = std::size_t{world} * 300;
      in_world(world, world, [&](ranks_of& ranks, std::uint32_t self) {
        for (const reduce_algorithm way :
             {reduce_algorithm::direct, reduce_algorithm::ring, reduce_algorithm::tree}) {
          collective_call call{
              .by = ranks.after(second), .algorithm = way, .segment_bytes = 777, .small_bytes = 0};
          std::vector<float> data = floats_of(count, self);
          const std::uint64_t before = sent_by(ranks);
          all_reduce(ranks, bytes_in(data), sum_f32, call).value();
          if (way != reduce_algorithm::tree)
            CHECK(sent_by(ranks) - before == 2 * (world - 1) * count * 4 / world);
          // The same bits everywhere: exclusive or of two equal ones is nothing.
          std::vector<float> other(data.size());
          ranks
              .exchange(std::as_bytes(std::span(data)), rank_id{(self + 1) % world}, bytes_in(other),
                        rank_id{(self + world - 1) % world}, 3, ranks.after(second))
              .value();
          CHECK(std::memcmp(other.data(), data.data(), count * 4) == 0);
          const std::vector<float> by_rank = sum_by_rank(count, world, 0);
          for (std::size_t i = 0; i < count; ++i) {
            if (std::abs(data[i] - by_rank[i]) > 1e-5F * 1e12F) CHECK_MESSAGE(false, "element ", i);
          }
        }
      });
    }
  }

  TEST_CASE("sums round bfloat16s at each step, and combine bytes by exclusive or") {
    in_world(3, 1, [&](ranks_of& ranks, std::uint32_t self) {
      collective_call call{.by = ranks.after(second)};
      // 256 + 1 is halfway between two bfloat16s: to even, twice.
      std::vector<std::uint16_t> values(
          101, bf16_from_f32_bits(std::bit_cast<std::uint32_t>(self == 0 ? 256.F : 1.F)));
      all_reduce(ranks, std::as_writable_bytes(std::span(values)), sum_bf16, call).value();
      CHECK(values ==
            std::vector<std::uint16_t>(101, bf16_from_f32_bits(std::bit_cast<std::uint32_t>(256.F))));
      std::vector<std::byte> bytes = bytes_of_seed(1001, self);
      all_reduce(ranks, bytes, xor_bytes, call).value();
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        const std::byte expected =
            bytes_of_seed(1001, 0)[i] ^ bytes_of_seed(1001, 1)[i] ^ bytes_of_seed(1001, 2)[i];
        if (bytes[i] != expected) CHECK_MESSAGE(false, "byte ", i);
        if (i == 20) break;
      }
    });
  }

  TEST_CASE("an all-to-all exchanges blocks of any size, in one hop and in two") {
    for (const auto seed : llmmem_tests::seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(1 + random() % 8);
      std::vector<std::vector<std::uint64_t>> sizes(world, std::vector<std::uint64_t>(world));
      for (auto& row : sizes) {
        for (auto& each : row)
          each = random() % 3 == 0 ? 0 : random() % 5000;
      }
      const std::uint64_t block = random() % 3000;
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t self) {
        std::vector<std::uint64_t> outs{0};
        std::vector<std::uint64_t> ins{0};
        std::vector<std::byte> out;
        std::vector<std::byte> expected;
        for (std::uint32_t other = 0; other < world; ++other) {
          const auto goes = bytes_of_seed(sizes[self][other], self * 100 + other);
          out.insert(out.end(), goes.begin(), goes.end());
          outs.push_back(out.size());
          const auto comes = bytes_of_seed(sizes[other][self], other * 100 + self);
          expected.insert(expected.end(), comes.begin(), comes.end());
          ins.push_back(expected.size());
        }
        std::vector<std::byte> into(expected.size());
        collective_call call{.by = ranks.after(second)};
        all_to_all(ranks, out, outs, into, ins, call).value();
        CHECK(into == expected);

        out.clear();
        expected.clear();
        for (std::uint32_t other = 0; other < world; ++other) {
          const auto goes = bytes_of_seed(block, self * 100 + other);
          out.insert(out.end(), goes.begin(), goes.end());
          const auto comes = bytes_of_seed(block, other * 100 + self);
          expected.insert(expected.end(), comes.begin(), comes.end());
        }
        for (std::uint32_t node = 1; node <= world; ++node) {
          if (world % node != 0) continue;
          into.assign(expected.size(), std::byte{0});
          std::vector<peer_traffic> before;
          for (const seat_id seat : ranks.seats())
            before.push_back(ranks.traffic(seat));
          two_hop_all_to_all(ranks, out, into, node, call).value();
          CHECK(into == expected);
          // Few large messages between nodes: to the same place of each, all of this node's.
          for (std::uint32_t other = 0; other < world; ++other) {
            const peer_traffic& now = ranks.traffic(seat_id{other});
            const bool is_same_node = other / node == self / node;
            const bool is_same_place = other % node == self % node;
            const std::uint64_t hop = is_same_node ? world / node : node;
            const bool talks = other != self && (is_same_node || is_same_place);
            CHECK(now.sent_bytes - before[other].sent_bytes == (talks ? hop * block : 0));
          }
        }
      });
    }
  }

  TEST_CASE("no rank leaves a barrier before all ranks have entered it") {
    for (std::uint32_t world = 1; world <= 7; ++world) {
      std::uint32_t there = 0;  // one thread at a time runs
      in_world(world, world, [&](ranks_of& ranks, std::uint32_t self) {
        for (std::uint32_t round = 1; round <= 3; ++round) {
          ranks.endpoint().work(self * round * 1'000'000);
          ++there;
          barrier(ranks, {.by = ranks.after(second)}).value();
          CHECK(there >= world * round);
        }
      });
    }
  }

  TEST_CASE(
      "regardless of which rank dies within a collective, no call waits for long, and those left can "
      "continue") {
    std::uint64_t failed = 0;
    for (const auto seed : llmmem_tests::seeds(120)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto world = static_cast<std::uint32_t>(2 + random() % 4);
      sim_network net({.seats = world, .seed = seed, .lane_bytes = 4096});
      const seat_id victim{static_cast<std::uint32_t>(random() % world)};
      net.kill_in_call(victim, 15 + random() % 150);
      const auto which = random() % 5;
      net.run([&](sim_endpoint& end) {
        ranks_of ranks(end);
        ranks.join(ranks.after(second)).value();
        for (std::uint32_t round = 0; round < 4; ++round) {
          const std::uint32_t now = to_number(ranks.world());
          collective_call call{
              .by = ranks.after(1000 * second), .tag = round, .segment_bytes = 4096, .small_bytes = 0};
          call.algorithm = which == 1   ? reduce_algorithm::ring
                           : which == 2 ? reduce_algorithm::tree
                                        : reduce_algorithm::direct;
          std::vector<float> data(std::size_t{now} * 4000, 1.F);
          result<void> done;
          if (which < 3) done = all_reduce(ranks, bytes_in(data), sum_f32, call);
          if (which == 3) done = broadcast(ranks, bytes_in(data), rank_id{0}, call);
          if (which == 4) {
            std::vector<float> into(data.size());
            const auto blocks = even_blocks(data.size() * 4, ranks.world(), 4);
            done = all_to_all(ranks, bytes_in(data), blocks, bytes_in(into), blocks, call);
          }
          if (!done) {
            ++failed;
            CHECK((done.code() == errc::peer_failed || done.code() == errc::epoch_revoked));
          }
          const llmmem::comm::agreed outcome = ranks.agree(done ? 1 : 0, ranks.after(1000 * second)).value();
          if (outcome.bits == 0 || !outcome.failed.empty()) ranks.shrink(outcome);
        }
        CHECK(end.now_ns() < second);
      });
    }
    CHECK(failed > 50);
  }

  TEST_CASE("a group of some ranks runs its own collectives") {
    in_world(5, 1, [&](ranks_of& ranks, std::uint32_t self) {
      // {4, 1, 3} and {0, 2}: in that order.
      const std::vector<rank_id> odd{rank_id{4}, rank_id{1}, rank_id{3}};
      const std::vector<rank_id> even{rank_id{0}, rank_id{2}};
      const bool is_odd = self == 4 || self % 2 == 1;
      rank_group<ranks_of> group(ranks, is_odd ? odd : even);
      static_assert(transport<rank_group<ranks_of>>);
      CHECK(group.beneath(group.rank()) == ranks.rank());
      CHECK(group.world() == rank_count{is_odd ? 3U : 2U});
      std::vector<std::byte> ids(to_number(group.world()), std::byte{0});
      ids[to_index(group.rank())] = static_cast<std::byte>(self);
      all_gather(group, ids, even_blocks(ids.size(), group.world()), {.by = ranks.after(second)}).value();
      CHECK(ids == (is_odd ? std::vector{std::byte{4}, std::byte{1}, std::byte{3}}
                           : std::vector{std::byte{0}, std::byte{2}}));
      CHECK(group.send({}, rank_id{3}, 1, ranks.after(1)).error() ==
            failure{errc::out_of_range, 3, 3, is_odd ? 2U : 1U});
      const std::vector<rank_id> twice{ranks.rank(), ranks.rank()};
      CHECK_THROWS_AS(rank_group<ranks_of>(ranks, twice), argument_error);
      const std::vector<rank_id> beyond{ranks.rank(), rank_id{5}};
      CHECK_THROWS_WITH_AS(rank_group<ranks_of>(ranks, beyond),
                           "rank_group: rank 5 of 5; ranks are numbered from 0", argument_error);
      CHECK_THROWS_AS(rank_group<ranks_of>(ranks, {}), argument_error);
    });
  }

  TEST_CASE("mismatched sizes are refused before any rank sends, and revoke nothing") {
    in_world(2, 1, [&](ranks_of& ranks, std::uint32_t) {
      collective_call call{.by = ranks.after(second)};
      std::vector<std::byte> data(10);
      const auto refused = [&](std::vector<std::uint64_t> blocks) {
        return all_gather(ranks, data, blocks, call).error();
      };
      CHECK(refused({0, 5}) == failure{errc::size_mismatch, 0, 3, 2});
      CHECK(refused({1, 5, 10}) == failure{errc::size_mismatch, 0, 0, 1});
      CHECK(refused({0, 5, 11}) == failure{errc::size_mismatch, 0, 10, 11});
      CHECK(refused({0, 11, 10}) == failure{errc::size_mismatch, 0, 11, 10});
      const std::vector<std::uint64_t> odd{0, 5, 10};
      CHECK(reduce_scatter(ranks, data, odd, sum_bf16, call).error() ==
            failure{errc::size_mismatch, 0, 2, 5});
      CHECK(all_reduce(ranks, data, sum_f32, call).error() == failure{errc::size_mismatch, 0, 4, 10});
      CHECK(two_hop_all_to_all(ranks, data, data, 3, call).error() == failure{errc::size_mismatch, 0, 2, 3});
      CHECK(broadcast(ranks, data, rank_id{2}, call).error() == failure{errc::size_mismatch, 0, 2, 2});
      CHECK_FALSE(ranks.is_revoked());
    });
  }
}
