#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/kernels/plane_split.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::grid_executor;

constexpr std::byte untouched{0xA5};

/// Memory of which a piece is used, from any address on.
struct piece {
  std::vector<std::byte> memory;
  std::size_t first;

  piece(std::size_t bytes, std::size_t at) : memory(at + bytes + 40, untouched), first(at) {}
  [[nodiscard]] std::byte* data() { return memory.data() + first; }
};

/// Elements, and both planes by the definition of the format: an element at a time.
struct split_world {
  std::uint64_t count;
  piece elements;
  piece exponents;
  piece others;

  split_world(std::uint64_t of, std::size_t a, std::size_t b, std::size_t c)
      : count(of), elements(2 * of, a), exponents(of, b), others(of, c) {}

  void set(std::uint64_t i, std::uint16_t bits) {
    elements.data()[2 * i] = static_cast<std::byte>(bits & 0xFFU);
    elements.data()[2 * i + 1] = static_cast<std::byte>(bits >> 8U);
    const unsigned sign = bits >> 15U;
    const unsigned exponent = bits >> 7U & 0xFFU;
    const unsigned mantissa = bits & 0x7FU;
    exponents.data()[i] = static_cast<std::byte>(exponent);
    others.data()[i] = static_cast<std::byte>(2 * mantissa + sign);
  }

  /// Splits and merges into memory that is as it was, and compares all of it.
  template <class Run>
  void check(const Run& run) {
    piece split_exponents(count, exponents.first);
    piece split_others(count, others.first);
    piece merged(2 * count, elements.first);
    split_planes(run, elements.data(), count, {split_exponents.data(), split_others.data()}).value();
    CHECK(split_exponents.memory == exponents.memory);
    CHECK(split_others.memory == others.memory);
    merge_planes(run, {split_exponents.data(), split_others.data()}, count, merged.data()).value();
    CHECK(merged.memory == elements.memory);
  }
};

/// Runs items one by one, and counts how many of them write each byte of a memory. @pre none writes
/// `untouched`
struct write_counts {
  std::vector<std::byte>& memory;
  std::vector<unsigned>& items;
  template <class Work>
  result<void> each(const Work& work) const {
    for (std::uint64_t item = 0; item < work.items(); ++item) {
      std::ranges::fill(memory, untouched);
      work.run(item);
      for (std::size_t i = 0; i < memory.size(); ++i)
        items[i] += memory[i] != untouched ? 1U : 0U;
    }
    return {};
  }
};

}  // namespace

TEST_SUITE("plane_split") {
  TEST_CASE("all patterns split as the format says and join again, at every width") {
    for (const std::size_t at : {0U, 4U, 1U}) {
      CAPTURE(at);
      split_world world(65536, 2 * at, at, at);
      for (std::uint32_t bits = 0; bits < 65536; ++bits)
        world.set(bits, static_cast<std::uint16_t>(bits));
      world.check(host_executor{});
      world.check(grid_executor());
    }
  }

  TEST_CASE("any length and alignment works, and nothing else is written") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      const auto any_place = [&] { return random() % 3 == 0 ? random() % 17 : 4 * (random() % 5); };
      const bool is_aligned = random() % 3 == 0;
      const std::uint64_t count = random() % 3 == 0 ? random() % 40 : random() % 3000;
      split_world world(count, is_aligned ? 16 : any_place(), is_aligned ? 0 : any_place(),
                        is_aligned ? 16 : any_place());
      for (std::uint64_t i = 0; i < count; ++i)
        world.set(i, static_cast<std::uint16_t>(random()));
      world.check(host_executor{});
      world.check(grid_executor({.blocks = static_cast<std::uint32_t>(random() % 3)}));
    }
  }

  TEST_CASE("one item writes each byte of the planes, whatever their offsets are") {
    for (std::size_t first = 0; first < 8; ++first) {
      for (std::size_t second = 0; second < 8; ++second) {
        for (const std::uint64_t count : {1U, 7U, 8U, 9U, 40U}) {
          CAPTURE(first);
          CAPTURE(second);
          CAPTURE(count);
          const std::vector<std::byte> elements(2 * count);
          std::vector<std::byte> planes(128);
          std::vector<unsigned> items(planes.size());
          split_planes(write_counts{planes, items}, elements.data(), count,
                       {planes.data() + first, planes.data() + 64 + second})
              .value();
          std::vector<unsigned> expected(planes.size());
          std::fill_n(&expected[first], count, 1U);
          std::fill_n(&expected[64 + second], count, 1U);
          CHECK(items == expected);
        }
      }
    }
  }

  TEST_CASE("packets are aligned without a shift where all three addresses allow") {
    using detail::plane_work;
    struct widths {
      mutable unsigned found = 0;
      result<void> each(const plane_work<plane_direction::split, 8>&) const {
        return found = 8, result<void>{};
      }
      result<void> each(const detail::shifted_split_work&) const { return found = 1, result<void>{}; }
    };
    alignas(16) std::byte memory[256]{};
    const auto width = [&](std::size_t a, std::size_t b, std::size_t c) {
      const widths run;
      split_planes(run, memory + a, 8, {memory + 64 + b, memory + 128 + c}).value();
      return run.found;
    };
    CHECK(width(0, 16, 0) == 8);
    CHECK(width(0, 8, 0) == 8);
    CHECK(width(8, 0, 0) == 1);
    CHECK(width(0, 4, 0) == 1);
    CHECK(width(0, 0, 1) == 1);
  }

  TEST_CASE("empty input is accepted, and missing memory is refused") {
    std::byte byte{};
    CHECK(split_planes(host_executor{}, nullptr, 0, {}).has_value());
    CHECK(merge_planes(host_executor{}, {}, 0, nullptr).has_value());
    const failure none{errc::too_short, 0, 9, 0};
    CHECK(split_planes(host_executor{}, nullptr, 9, {&byte, &byte}).error() == none);
    CHECK(split_planes(host_executor{}, &byte, 9, {nullptr, &byte}).error() == none);
    CHECK(merge_planes(host_executor{}, {&byte, nullptr}, 9, &byte).error() == none);
    CHECK(merge_planes(host_executor{}, {&byte, &byte}, 9, nullptr).error() == none);
  }
}
