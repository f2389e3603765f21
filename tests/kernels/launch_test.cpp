#include <llmmem/kernels/divider.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/launch.hpp>
#include <llmmem/kernels/packet.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/seeds.hpp"
#include "support/small_elements.hpp"

namespace {

using namespace llmmem;

/// Rows that are counted, not moved.
struct counted_map {
  std::uint64_t row_count = 0;
  std::uint32_t part_count = 0;
  [[nodiscard]] std::uint64_t rows() const noexcept { return row_count; }
  [[nodiscard]] std::uint32_t parts() const noexcept { return part_count; }
  [[nodiscard]] std::uint32_t longest_row() const noexcept { return 7; }
  [[nodiscard]] row_alignment alignment() const noexcept { return {}; }
  [[nodiscard]] row_move at(std::uint64_t, std::uint32_t) const noexcept { return {}; }
};
static_assert(row_map<counted_map>);

}  // namespace

TEST_SUITE("launch") {
  TEST_CASE("every lane of every row belongs to exactly one thread") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const row_work work{
          .rows = random() % 400,
          .parts = static_cast<std::uint32_t>(random() % 6),
          .packets = static_cast<std::uint32_t>(random() % 5 == 0 ? random() % 3000 : random() % 40)};
      const launch_limits limits{.multiprocessors = static_cast<std::uint32_t>(1 + random() % 4),
                                 .blocks = static_cast<std::uint32_t>(random() % 3 == 0 ? random() % 9 : 0)};
      const row_launch launch = plan_launch(work, limits);
      if (work.rows == 0 || work.parts == 0 || work.packets == 0) {
        CHECK(launch == row_launch{});
        continue;
      }
      if (limits.blocks != 0) CHECK(launch.row_blocks * launch.part_blocks <= limits.blocks);
      const std::uint32_t lanes = 1U << launch.lane_bits;
      CHECK(lanes <= row_launch::threads);
      // No lane is idle that a smaller number would spare, and none has more than four packets of a short
      // row.
      CHECK((lanes < 2 * work.packets || lanes == 1));
      if (work.packets <= 4 * row_launch::threads) CHECK(4 * lanes >= work.packets);
      std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<std::uint32_t>> seen;
      bool are_lanes_all = true;
      for (std::uint32_t y = 0; y < launch.row_blocks; ++y) {
        for (std::uint32_t x = 0; x < launch.part_blocks; ++x) {
          for (std::uint32_t thread = 0; thread < row_launch::threads; ++thread) {
            const row_share share = share_of(launch, y, x, thread);
            are_lanes_all = are_lanes_all && share.lanes == lanes;
            for (std::uint32_t part = share.part; part < work.parts; part += share.parts) {
              for (std::uint64_t row = share.first; row < work.rows; row += share.stride)
                seen[{row, part}].push_back(share.lane);
            }
          }
        }
      }
      CHECK(are_lanes_all);
      CHECK(seen.size() == work.rows * work.parts);
      for (auto& [at, by] : seen) {
        std::ranges::sort(by);
        bool is_each_once = by.size() == lanes;
        for (std::uint32_t lane = 0; is_each_once && lane < lanes; ++lane)
          is_each_once = by[lane] == lane;
        REQUIRE(is_each_once);
      }
    }
  }

  TEST_CASE("few rows get a lane per packet, many rows a lane per four packets") {
    const launch_limits h200{.multiprocessors = 132};
    CHECK(plan_launch({.rows = 16, .parts = 2, .packets = 128}, h200).lane_bits == 7);
    CHECK(plan_launch({.rows = 65536, .parts = 2, .packets = 128}, h200).lane_bits == 5);
    CHECK(plan_launch({.rows = 65536, .parts = 2, .packets = 128}, h200).row_blocks == 65536 / 8);
    CHECK(plan_launch({.rows = std::uint64_t{1} << 62, .parts = 1U << 31, .packets = 1}, h200).part_blocks ==
          0x7FFF'FFFF);
    CHECK(plan_launch({.rows = std::uint64_t{1} << 62, .parts = 1U << 31, .packets = 1}, h200).row_blocks ==
          65535);  // a grid's y has no more
  }

  TEST_CASE("rows that end within a packet count it") {
    CHECK(row_work::of(counted_map{3, 2}, 4).packets == 2);
    CHECK(row_work::of(counted_map{3, 2}, 7).packets == 1);
    CHECK(row_work::of(counted_map{3, 2}, 1).packets == 7);
  }

  TEST_CASE("accesses are as wide as both ends allow") {
    CHECK(packet_elements<copy_op>({16, 16}) == 16);
    CHECK(packet_elements<copy_op>({16, 4}) == 4);
    CHECK(packet_elements<copy_op>({1, 16}) == 1);
    CHECK(alignment_of(32U, 48U) == 16);
    CHECK(alignment_of(32U, 24U) == 8);
    CHECK(alignment_of(0U) == 16);
    CHECK(alignment_of(7U, std::uint64_t{1} << 40U) == 1);
  }
}

TEST_SUITE("divider") {
  TEST_CASE("quotients are exact for every divisor, at every edge of every quotient") {
    for (const auto seed : llmmem_tests::seeds(4000)) {
      std::mt19937_64 random(seed);
      std::uint32_t by = static_cast<std::uint32_t>(random() >> (32 + random() % 32));
      if (seed < 70) by = static_cast<std::uint32_t>(seed);
      if (seed % 7 == 0) by = std::uint32_t{1} << random() % 32;
      if (seed % 11 == 0) by = 0xFFFF'FFFFU - static_cast<std::uint32_t>(random() % 4);
      if (by == 0) by = 1;
      const divider divide(by);
      constexpr std::uint64_t most = (std::uint64_t{1} << 63) - 1;
      for (int i = 0; i < 50; ++i) {
        const std::uint64_t near = (random() >> (1 + random() % 62)) / by * by;
        for (const std::uint64_t n :
             {near, near + 1, near == 0 ? 0 : near - 1, near + by - 1, most, most - by}) {
          if (n > most) continue;
          REQUIRE(divide.quotient(n) == n / by);
          REQUIRE(divide.remainder(n) == n % by);
        }
      }
    }
    CHECK(divider().quotient(17) == 17);
  }
}

TEST_SUITE("elements") {
  TEST_CASE("packets convert as their elements do one by one, for every pair of types") {
    const auto check = [](auto from, auto to) {
      constexpr dtype a = decltype(from)::value;
      constexpr dtype b = decltype(to)::value;
      constexpr unsigned n = 16 / std::max(sizeof(element_bits<a>), sizeof(element_bits<b>));
      std::mt19937_64 random(5);
      for (int i = 0; i < 3000; ++i) {
        packet<n * sizeof(element_bits<a>)> in{};
        auto* const bytes = reinterpret_cast<std::byte*>(&in);
        for (std::size_t k = 0; k < sizeof(in); ++k)
          bytes[k] = static_cast<std::byte>(random());
        const scaling_step<a, b> step{i % 2 == 0 ? 1.0F : 0.37F};
        const auto out = step.template apply<n>(in);
        for (unsigned k = 0; k < n; ++k) {
          packet<sizeof(element_bits<a>)> one{};
          std::memcpy(&one, bytes + k * sizeof(one), sizeof(one));
          const auto alone = step.template apply<1>(one);
          CHECK(std::memcmp(&alone, reinterpret_cast<const std::byte*>(&out) + k * sizeof(alone),
                            sizeof(alone)) == 0);
          const float value = llmmem_tests::load_element(a, bytes + k * sizeof(one));
          if (!(value == value)) continue;  // which NaN it becomes, the formats say
          std::byte expected[4]{};
          llmmem_tests::store_element(b, expected, value * step.factor);
          CHECK(std::memcmp(&alone, expected, sizeof(alone)) == 0);
        }
      }
    };
    const auto to_all = [&](auto from) {
      check(from, std::integral_constant<dtype, dtype::f32>());
      check(from, std::integral_constant<dtype, dtype::bf16>());
      check(from, std::integral_constant<dtype, dtype::f16>());
      check(from, std::integral_constant<dtype, dtype::fp8_e4m3>());
    };
    to_all(std::integral_constant<dtype, dtype::f32>());
    to_all(std::integral_constant<dtype, dtype::bf16>());
    to_all(std::integral_constant<dtype, dtype::f16>());
    to_all(std::integral_constant<dtype, dtype::fp8_e4m3>());
  }

  TEST_CASE("a NaN becomes the NaN that devices make") {
    const float nan = std::bit_cast<float>(0xFFC0'0001U);
    CHECK(nearest_of<dtype::bf16>(nan) == 0x7FFF);
    CHECK(nearest_of<dtype::f16>(nan) == 0x7FFF);
    CHECK(nearest_of<dtype::fp8_e4m3>(nan) == 0x7F);
    CHECK(nearest_of<dtype::f32>(nan) == 0xFFC0'0001U);
  }

  TEST_CASE("an element of a packet is at its place in little-endian memory") {
    packet<16> all{};
    for (unsigned i = 0; i < 16; ++i)
      set_element(all, i, static_cast<std::uint8_t>(i * 7 + 3));
    const auto* const bytes = reinterpret_cast<const std::byte*>(&all);
    for (unsigned i = 0; i < 16; ++i) {
      CHECK(bytes[i] == static_cast<std::byte>(i * 7 + 3));
      CHECK(element_of<std::uint8_t>(all, i) == i * 7 + 3);
    }
    CHECK(element_of<std::uint16_t>(all, 1) == (3 + 14) + ((3 + 21) << 8));
  }
}
