#include <llmmem/hash/crc32c.hpp>
#include <llmmem/redundancy/detail/part_arrival.hpp>
#include <llmmem/redundancy/gf256.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "support/comm_job.hpp"
#include "support/seeds.hpp"

namespace {

using llmmem::crc32c;
using llmmem::gf256_multiply;
using llmmem::detail::part_arrival;
using llmmem::detail::part_memory;
using llmmem_tests::bytes_of_seed;

/// Bytes that are sent, a piece at a time, to be added to a part or to be a stretch of it.
struct stretch {
  std::uint64_t offset = 0;
  std::vector<std::byte> bytes{};
  std::uint8_t coefficient = 1;
};

void land(part_arrival& part, const stretch& from, bool is_summed, std::mt19937_64& random) {
  for (std::uint64_t at = 0; at < from.bytes.size();) {
    const std::uint64_t piece = std::min<std::uint64_t>(from.bytes.size() - at, 1 + random() % 40);
    const std::span<const std::byte> bytes = std::span(from.bytes).subspan(at, piece);
    const std::uint64_t offset = from.offset + at;
    at += piece;
    if (random() % 2 == 0) {
      part.take(offset, bytes, from.coefficient, is_summed);
      continue;
    }
    const std::span<std::byte> straight = part.landing(offset, piece, is_summed);
    if (straight.empty()) {
      part.add(offset, bytes, from.coefficient);
      continue;
    }
    std::copy(bytes.begin(), bytes.end(), straight.begin());
    part.landed(offset, piece, from.coefficient);
  }
}

}  // namespace

TEST_SUITE("part_arrival") {
  TEST_CASE(
      "a part is the sum of the arriving bytes, with zeros elsewhere, regardless of its destination's "
      "contents") {
    for (const auto seed : llmmem_tests::seeds(2000)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const std::uint64_t size = random() % 200;
      std::vector<std::byte> expected(size);
      std::vector<std::byte> destination = bytes_of_seed(size, seed);
      part_arrival part{destination};
      const bool is_summed = random() % 4 != 0;
      const std::uint64_t stretches = is_summed ? random() % 6 : 1;
      for (std::uint64_t i = 0; i < stretches && size != 0; ++i) {
        stretch from;
        from.offset = is_summed ? random() % size : 0;
        from.bytes = bytes_of_seed(is_summed ? random() % (size - from.offset + 1) : size, random());
        if (is_summed && random() % 2 == 0) from.coefficient = static_cast<std::uint8_t>(1 + random() % 255);
        land(part, from, is_summed, random);
        for (std::uint64_t k = 0; k < from.bytes.size(); ++k)
          expected[from.offset + k] ^= static_cast<std::byte>(
              gf256_multiply(from.coefficient, static_cast<std::uint8_t>(from.bytes[k])));
      }
      const std::uint32_t sum = part.finish();
      CHECK(destination == expected);
      CHECK(sum == crc32c(0, expected));
    }
  }

  TEST_CASE("a part that is sent again replaces the first, and so does its checksum") {
    const std::vector<std::byte> first = bytes_of_seed(100, 1);
    const std::vector<std::byte> second = bytes_of_seed(100, 2);
    std::vector<std::byte> destination(100);
    part_arrival part{destination};
    part.take(0, first, 1, false);
    part.take(0, second, 1, false);
    CHECK(part.finish() == crc32c(0, second));
    CHECK(destination == second);
  }

  TEST_CASE("the first term of a sum is received in its place, and only the others are added to it") {
    std::vector<std::byte> destination(100, std::byte{9});
    part_arrival part{destination};
    const std::vector<std::byte> bytes(60, std::byte{3});
    CHECK(part.landing(0, 60, true).data() == destination.data());
    CHECK(part.landing(0, 60, true).size() == 60);
    part.take(0, bytes, 1, true);
    CHECK(part.landing(0, 60, true).empty());
    CHECK(part.landing(59, 2, true).empty());
    CHECK(part.landing(60, 40, true).data() == destination.data() + 60);
    CHECK(part.landing(0, 60, false).size() == 60);
  }

  TEST_CASE("memory for a part keeps its bytes until it is destroyed, also after moves") {
    std::vector<part_memory> memories;
    for (const std::uint64_t bytes : {0U, 1U, 5000U, 3U << 20U}) {
      memories.emplace_back(bytes);
      CHECK(memories.back().bytes().size() == bytes);
      std::ranges::fill(memories.back().bytes(), std::byte{7});
    }
    const std::byte* const there = memories.back().bytes().data();
    part_memory moved;
    moved = std::move(memories.back());
    CHECK(memories.back().bytes().empty());
    CHECK(moved.bytes().data() == there);
    CHECK(moved.bytes().size() == 3U << 20U);
    CHECK(moved.bytes().back() == std::byte{7});
    CHECK(memories[2].bytes().front() == std::byte{7});
  }
}
