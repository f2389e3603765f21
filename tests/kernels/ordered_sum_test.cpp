#include <llmmem/comm/reduce_op.hpp>
#include <llmmem/kernels/elements.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/ordered_sum.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support/comm_job.hpp"
#include "support/guarded_bytes.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::testing::grid_executor;

constexpr std::array<reduce_op, 3> sums{sum_f32, sum_bf16, sum_f16};

/// Lengths around all that the kernel divides by.
std::uint64_t any_length(std::mt19937_64& random, std::uint64_t width) {
  constexpr std::uint64_t edges[] = {0, 4, 16, 20, 512, 2044, 2048, 2052, 20480};
  const std::uint64_t bytes = random() % 2 == 0 ? edges[random() % std::size(edges)] : random() % 20'000;
  return bytes / width * width;
}

bool is_nan(dtype elements, const std::byte* at) {
  if (elements == dtype::f32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, at, 4);
    return (bits & 0x7FFF'FFFFU) > 0x7F80'0000U;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, 2);
  return (bits & 0x7FFFU) > (elements == dtype::bf16 ? 0x7F80U : 0x7C00U);
}

/// The bits of all elements, a NaN as any other NaN.
std::vector<std::byte> without_payloads(std::span<const std::byte> from, const reduce_op& op) {
  std::vector<std::byte> out(from.begin(), from.end());
  for (std::size_t at = 0; at < out.size(); at += op.element_bytes) {
    if (is_nan(op.elements, out.data() + at)) std::memset(out.data() + at, 0x7F, op.element_bytes);
  }
  return out;
}

/// Runs nothing, and keeps how wide the accesses would be.
struct width_probe {
  unsigned* width;
  template <unsigned N, dtype E>
  result<void> each(const detail::ordered_sum_work<N, E>&) const {
    *width = N;
    return {};
  }
};

}  // namespace

TEST_SUITE("ordered_sum") {
  TEST_CASE("a sum in order has the bits that the host's reduce_op gives, for any number of parts") {
    for (const auto seed : seeds(120)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const reduce_op& op = sums[random() % sums.size()];
      const std::uint64_t bytes = any_length(random, op.element_bytes);
      const std::uint64_t count = 1 + random() % (random() % 4 == 0 ? 40 : 5);
      std::vector<guarded_bytes> parts;
      std::vector<const std::byte*> list;
      std::vector<std::byte> expected;
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t skew =
            random() % 3 == 0 ? random() % 16 / op.element_bytes * op.element_bytes : 0;
        const auto value = bytes_of_seed(bytes, random());  // any bits: infinities, subnormals and NaNs too
        parts.emplace_back(value, skew);
        if (i == 0) expected = value;
        if (i != 0) op.combine(expected.data(), value.data(), bytes);
        list.push_back(parts.back().data());
      }
      const bool is_in_place = random() % 3 == 0;
      guarded_bytes apart(std::vector<std::byte>(bytes), 0);
      std::byte* const into = is_in_place ? parts.front().data() : apart.data();
      const auto check = [&](const auto& run) {
        REQUIRE(sum_in_order(run, op.elements, list, into, bytes).has_value());
        CHECK(without_payloads({into, bytes}, op) == without_payloads(expected, op));
      };
      if (!is_in_place) check(host_executor{});
      check(grid_executor({.blocks = static_cast<std::uint32_t>(random() % 4)}));
      CHECK(apart.is_intact());
      for (const guarded_bytes& each : parts)
        CHECK(each.is_intact());
    }
  }

  TEST_CASE("a sum that is a NaN has the bits that devices produce") {
    const std::uint32_t infinity = 0x7F80'0000U;
    const std::uint32_t less = 0xFF80'0000U;
    const std::array parts{reinterpret_cast<const std::byte*>(&infinity),
                           reinterpret_cast<const std::byte*>(&less)};
    std::uint32_t sum = 0;
    sum_in_order(host_executor{}, dtype::f32, parts, reinterpret_cast<std::byte*>(&sum), 4).value();
    CHECK(sum == 0x7FFF'FFFFU);
  }

  TEST_CASE("packets are aligned without a shift where all addresses allow") {
    alignas(16) std::array<std::byte, 64> memory{};
    const auto width_at = [&](std::size_t part, std::size_t into) {
      unsigned width = 0;
      const std::array<const std::byte*, 1> parts{memory.data() + part};
      sum_in_order(width_probe{&width}, dtype::bf16, parts, memory.data() + 32 + into, 8).value();
      return width;
    };
    CHECK(width_at(0, 0) == 16);
    CHECK(width_at(16, 0) == 16);
    CHECK(width_at(8, 0) == 1);
    CHECK(width_at(0, 4) == 1);
    CHECK(width_at(2, 0) == 1);
  }

  TEST_CASE("arguments that no sum has are refused before anything begins") {
    alignas(16) std::array<std::byte, 64> memory{};
    const auto sum = [&](dtype elements, std::vector<const std::byte*> parts, std::byte* into,
                         std::uint64_t bytes) {
      return sum_in_order(host_executor{}, elements, parts, into, bytes).code();
    };
    std::byte* const at = memory.data();
    CHECK(sum(dtype::int8, {at}, at, 4) == errc::no_conversion);
    CHECK(sum(dtype::f32, {at}, at, 6) == errc::size_mismatch);
    CHECK(sum(dtype::f32, {}, at, 4) == errc::too_short);
    CHECK(sum(dtype::f32, {at, nullptr}, at, 4) == errc::null_handle);
    CHECK(sum(dtype::f32, {at}, nullptr, 4) == errc::null_handle);
    CHECK(sum(dtype::f32, {at + 4}, at, 8) == errc::overlapping_ranges);
    CHECK(sum(dtype::f32, {at + 16, at}, at, 8) == errc::overlapping_ranges);
    CHECK(
        sum_in_order(host_executor{}, dtype::f32, std::array<const std::byte*, 1>{}, nullptr, 0).has_value());
  }
}
