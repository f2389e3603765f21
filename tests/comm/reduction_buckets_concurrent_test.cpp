#include <llmmem/comm/reduction_buckets.hpp>

#include <llmmem/comm/communicator.hpp>
#include <llmmem/testing/sim_network.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/error_text.hpp"
#include "support/seeds.hpp"
#include "support/sim_world.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::sim_endpoint;
using llmmem::testing::sim_network;
using llmmem_tests::in_world;
using llmmem_tests::seeds;

using ranks_of = llmmem_tests::sim_ranks;
constexpr std::uint64_t second = 1'000'000'000;

/// What a rank adds to a tensor: of very different sizes, so that the order of a sum shows.
std::vector<float> gradient(std::uint32_t rank, std::size_t tensor, std::size_t count) {
  std::mt19937_64 random(rank * 1000 + tensor);
  std::vector<float> made(count);
  for (float& each : made)
    each = static_cast<float>(random() % 2'000'001) * static_cast<float>(1 << (random() % 20));
  return made;
}

std::uint64_t messages_of(ranks_of& ranks) {
  std::uint64_t all = 0;
  for (const seat_id seat : ranks.seats())
    all += ranks.traffic(seat).sent_messages;
  return all;
}

}  // namespace

TEST_SUITE("reduction_buckets") {
  TEST_CASE(
      "for any order in which tensors become ready on each rank, the sums are those of single tensors") {
    for (const auto seed : seeds(30)) {
      CAPTURE(seed);
      std::mt19937_64 shape(seed);
      const auto world = static_cast<std::uint32_t>(1 + shape() % 4);
      std::vector<std::uint64_t> bytes(1 + shape() % 12);
      for (std::uint64_t& each : bytes)
        each = 4 * (shape() % 200);
      const std::uint64_t bucket = 1 + shape() % 1500;
      in_world(world, seed, [&](ranks_of& ranks, std::uint32_t rank) {
        reduction_buckets sums(ranks, bytes, sum_f32, {.bucket_bytes = bucket});
        for (int round = 0; round < 2; ++round) {  // it may be used again
          std::vector<std::uint32_t> order(bytes.size());
          std::iota(order.begin(), order.end(), 0U);
          std::mt19937_64 own(seed * 100 + rank);
          std::shuffle(order.begin(), order.end(), own);
          for (const std::uint32_t tensor : order) {
            auto mine = gradient(rank, tensor, bytes[tensor] / 4);
            sums.ready(tensor, std::as_bytes(std::span(mine)), ranks.after(second)).value();
            std::fill(mine.begin(), mine.end(), -1.0F);  // it was copied
          }
          CHECK(sums.summed() == sums.buckets());
          std::uint32_t given = 0;
          const auto done = sums.finish([&](std::uint32_t tensor, std::span<const std::byte> sum) {
            CHECK(tensor == given++);
            auto expected = gradient(rank, tensor, bytes[tensor] / 4);
            collective_call call{.by = ranks.after(second), .tag = 5};
            all_reduce(ranks, std::as_writable_bytes(std::span(expected)), sum_f32, call).value();
            REQUIRE(sum.size() == bytes[tensor]);
            CHECK((sum.empty() || std::memcmp(sum.data(), expected.data(), sum.size()) == 0));
          });
          CHECK(done.has_value());
          CHECK(given == bytes.size());
          CHECK(sums.summed() == 0);
        }
      });
    }
  }

  TEST_CASE("neighbouring tensors share a bucket up to its size, and a large tensor has its own") {
    in_world(1, 1, [&](ranks_of& ranks, std::uint32_t) {
      const auto buckets = [&](const std::vector<std::uint64_t>& bytes) {
        return reduction_buckets(ranks, bytes, sum_f32, {.bucket_bytes = 100}).buckets();
      };
      CHECK(buckets({}) == 0);
      CHECK(buckets({40, 40, 20}) == 1);
      CHECK(buckets({40, 40, 24}) == 2);
      CHECK(buckets({400}) == 1);
      CHECK(buckets({40, 400, 40}) == 3);
      CHECK(buckets({0, 0, 0}) == 1);
    });
  }

  TEST_CASE("a bucket is summed at once, as soon as it is complete and all earlier buckets are") {
    in_world(2, 3, [&](ranks_of& ranks, std::uint32_t rank) {
      const std::vector<std::uint64_t> bytes(20, 40);
      reduction_buckets sums(ranks, bytes, sum_f32, {.bucket_bytes = 400});
      CHECK(sums.buckets() == 2);
      const std::uint64_t before = messages_of(ranks);
      for (std::uint32_t i = 20; i-- > 1;) {
        const auto mine = gradient(rank, i, 10);
        sums.ready(i, std::as_bytes(std::span(mine)), ranks.after(second)).value();
        CHECK(sums.summed() == 0);  // the second is complete, the first is not
      }
      CHECK(messages_of(ranks) == before);
      const auto mine = gradient(rank, 0, 10);
      sums.ready(0, std::as_bytes(std::span(mine)), ranks.after(second)).value();
      CHECK(sums.summed() == 2);
      CHECK(messages_of(ranks) == before + 2);
    });
  }

  TEST_CASE("a tensor that does not fit is refused, and nothing is summed") {
    in_world(1, 1, [&](ranks_of& ranks, std::uint32_t) {
      CHECK(llmmem_tests::text_of([&] {
              static_cast<void>(reduction_buckets(ranks, std::vector<std::uint64_t>{8, 6}, sum_f32));
            }) == "reduction_buckets: tensor 1 has 6 bytes, which is not a multiple of an element's 4");
      const std::vector<std::uint64_t> bytes{8, 8};
      reduction_buckets sums(ranks, bytes, sum_f32);
      const std::vector<std::byte> eight(8);
      const auto nothing = [](std::uint32_t, std::span<const std::byte>) { CHECK(false); };
      CHECK(sums.ready(2, eight, no_deadline).error() == failure{errc::out_of_range, 2, 2, 2});
      CHECK(sums.ready(1, std::span(eight).first(4), no_deadline).error() ==
            failure{errc::size_mismatch, 1, 8, 4});
      CHECK(sums.finish(nothing).error() == failure{errc::size_mismatch, 0, 2, 0});
      sums.ready(0, eight, no_deadline).value();
      CHECK(sums.ready(0, eight, no_deadline).error() == failure{errc::size_mismatch, 0, 0, 8});
      CHECK(sums.finish(nothing).error() == failure{errc::size_mismatch, 1, 2, 1});
      sums.reset();
      sums.ready(0, eight, no_deadline).value();
      sums.ready(1, eight, no_deadline).value();
      CHECK(sums.finish([](std::uint32_t, std::span<const std::byte>) {}).has_value());
    });
  }

  TEST_CASE("when a rank dies, the others learn it and sum again in the next epoch") {
    sim_network net({.seats = 3, .seed = 2});
    net.kill_in_call(seat_id{2}, 60);
    net.run([&](sim_endpoint& end) {
      ranks_of ranks(end);
      ranks.join(ranks.after(second)).value();
      const std::vector<std::uint64_t> bytes(50, 4000);
      reduction_buckets sums(ranks, bytes, sum_f32, {.bucket_bytes = 8000});
      const auto all = [&] {
        for (std::uint32_t i = 0; i < bytes.size(); ++i) {
          const std::vector<float> ones(1000, 1.0F);
          if (!sums.ready(i, std::as_bytes(std::span(ones)), ranks.after(second))) return false;
        }
        return true;
      };
      const bool is_complete = all();  // in which rank 2 ends by an exception
      CHECK_FALSE(is_complete);
      CHECK(ranks.is_revoked());
      ranks.shrink(ranks.agree(0, ranks.after(second)).value());
      sums.reset();
      CHECK(all());
      sums.finish([](std::uint32_t, std::span<const std::byte> sum) {
            float first = 0;
            std::memcpy(&first, sum.data(), sizeof first);
            CHECK(first == 2.0F);
          })
          .value();
      ranks.agree(0, ranks.after(second)).value();
    });
  }
}
