#include <llmmem/kernels/fill_verify.hpp>
#include <llmmem/kernels/host_executor.hpp>
#include <llmmem/model/bf16.hpp>
#include <llmmem/model/f16.hpp>
#include <llmmem/model/fp8.hpp>
#include <llmmem/testing/grid_executor.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using llmmem::testing::grid_executor;

constexpr std::byte untouched{0xA5};

/// SplitMix64 as its authors have it: a state that is stepped.
class split_mix {
 public:
  explicit split_mix(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

/// The first bytes of a pattern, one at a time.
std::vector<std::byte> bytes_of_seed(std::uint64_t seed, std::size_t count) {
  split_mix generator(seed);
  std::vector<std::byte> out;
  while (out.size() < count) {
    const std::uint64_t word = generator.next();
    for (unsigned i = 0; i < 8; ++i)
      out.push_back(static_cast<std::byte>(word >> (8 * i)));
  }
  out.resize(count);
  return out;
}

/// Some bytes at any address, of a longer piece of memory.
struct stretch {
  std::vector<std::byte> memory;
  std::size_t first;
  std::size_t bytes;

  explicit stretch(std::mt19937_64& random)
      : memory(random() % 4 == 0 ? 64 : 6000, untouched),
        first(random() % 33),
        bytes(random() % (memory.size() - first + 1)) {}
  [[nodiscard]] std::span<std::byte> span() { return std::span(memory).subspan(first, bytes); }
};

launch_limits any_limits(std::mt19937_64& random) {
  return {.blocks = static_cast<std::uint32_t>(random() % 3)};
}

}  // namespace

TEST_SUITE("fill_verify") {
  TEST_CASE(
      "a seeded pattern is the bytes of SplitMix64 at any address and length, and nothing else is written") {
    split_mix known(1234567);
    CHECK(known.next() == 6457827717110365317U);
    CHECK(known.next() == 3203168211198807973U);
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      stretch here(random);
      const std::uint64_t skipped = random() % 20;
      const std::uint64_t key = random();
      const std::vector<std::byte> all = bytes_of_seed(key, skipped + here.bytes);
      std::vector<std::byte> expected = here.memory;
      std::copy(all.begin() + static_cast<std::ptrdiff_t>(skipped), all.end(),
                expected.begin() + static_cast<std::ptrdiff_t>(here.first));
      const seeded_pattern pattern{.seed = key, .first_position = skipped};
      fill_memory(grid_executor(any_limits(random)), here.span(), pattern).value();
      CHECK(here.memory == expected);
      std::ranges::fill(here.memory, untouched);
      fill_memory(host_executor{}, here.span(), pattern).value();
      CHECK(here.memory == expected);
    }
  }

  TEST_CASE("packets are aligned, and each byte belongs to one item") {
    for (std::uintptr_t address = 4096; address < 4096 + 17; ++address) {
      for (std::uint64_t bytes = 1; bytes < 70; ++bytes) {
        CAPTURE(address);
        CAPTURE(bytes);
        const detail::memory_pieces pieces(reinterpret_cast<const std::byte*>(address), bytes);
        std::vector<int> times(bytes);
        for (std::uint64_t item = 0; item < pieces.items(); ++item) {
          const std::uint64_t position = pieces.position(item);
          const std::uint64_t length = pieces.is_packet(item) ? 16 : 1;
          if (length == 16) CHECK((address + position) % 16 == 0);
          REQUIRE(position + length <= bytes);
          for (std::uint64_t i = 0; i < length; ++i)
            ++times[position + i];
        }
        CHECK(times == std::vector<int>(bytes, 1));
        CHECK(pieces.items() <= 30 + bytes / 16);  // no more single ones than there must be
      }
    }
  }

  TEST_CASE("poison is a NaN in every format and minus one in every integer") {
    std::vector<std::byte> memory(100, untouched);
    fill_memory(grid_executor(), std::span(memory).subspan(3, 90), poison_pattern{}).value();
    for (std::size_t i = 0; i < memory.size(); ++i)
      CHECK(memory[i] == (i < 3 || i >= 93 ? untouched : std::byte{0xFF}));
    CHECK(std::isnan(std::bit_cast<float>(0xFFFF'FFFFU)));
    CHECK(std::isnan(std::bit_cast<float>(f32_from_bf16_bits(0xFFFF))));
    CHECK(std::isnan(std::bit_cast<float>(f32_from_f16_bits(0xFFFF))));
    CHECK(std::isnan(std::bit_cast<float>(f32_from_e4m3_bits(0xFF))));
    CHECK(static_cast<std::int32_t>(0xFFFF'FFFFU) == -1);
    fill_memory(host_executor{}, memory, poison_pattern{std::byte{0x5C}}).value();
    CHECK(std::ranges::count(memory, std::byte{0x5C}) == 100);
  }

  TEST_CASE(
      "differences are counted, and the first position is reported regardless of the lane that finds it") {
    for (const auto seed : llmmem_tests::seeds(300)) {
      CAPTURE(seed);
      std::mt19937_64 random(seed);
      stretch here(random);
      const seeded_pattern pattern{.seed = seed, .first_position = random() % 9};
      fill_memory(host_executor{}, here.span(), pattern).value();
      mismatch_report report;
      verify_memory(grid_executor(any_limits(random)), here.span(), pattern, &report).value();
      CHECK(report == mismatch_report{});
      mismatch_report expected;
      const std::uint64_t changes = random() % 3 == 0 ? here.bytes : random() % 4;
      std::vector<bool> is_changed(here.bytes);
      for (std::uint64_t i = 0; i < changes && here.bytes != 0; ++i) {
        const std::size_t at = random() % here.bytes;
        if (is_changed[at]) continue;
        is_changed[at] = true;
        here.span()[at] ^= static_cast<std::byte>(1U << random() % 8);
        expected.first = std::min<std::uint64_t>(expected.first, at);
        ++expected.count;
      }
      // What lies around differs, and is no matter.
      verify_memory(grid_executor(any_limits(random)), here.span(), pattern, &report).value();
      CHECK(report == expected);
      mismatch_report of_host;
      verify_memory(host_executor{}, here.span(), pattern, &of_host).value();
      CHECK(of_host == expected);
      // A second one adds its own.
      verify_memory(host_executor{}, here.span(), pattern, &of_host).value();
      CHECK(of_host == mismatch_report{expected.first, 2 * expected.count});
    }
  }

  TEST_CASE("a copied block is verified by its source's position") {
    std::vector<std::byte> memory(4096);
    fill_memory(host_executor{}, memory, seeded_pattern{.seed = 1}).value();
    const std::vector<std::byte> block(memory.begin() + 1029, memory.begin() + 2029);
    mismatch_report report;
    verify_memory(grid_executor(), block, seeded_pattern{.seed = 1, .first_position = 1029}, &report).value();
    CHECK(report == mismatch_report{});
    verify_memory(grid_executor(), block, seeded_pattern{.seed = 1, .first_position = 1028}, &report).value();
    CHECK(report.first < 3);
    CHECK(report.count > 900);
  }

  TEST_CASE("positions beyond 2^32 differ from those below") {
    const seeded_pattern pattern{.seed = 7, .first_position = 5};
    const std::uint64_t far_away = (std::uint64_t{1} << 40) + 3;
    const packet<16> there = pattern.at(far_away);
    for (unsigned i = 0; i < 16; ++i) {
      const std::uint64_t position = far_away + 5 + i;
      const std::uint64_t word = split_mix(7 + position / 8 * 0x9e3779b97f4a7c15).next();
      CHECK(element_of<std::uint8_t>(there, i) == static_cast<std::uint8_t>(word >> position % 8 * 8));
    }
  }

  TEST_CASE("threads may share a report") {
    std::vector<std::byte> memory(40'000);
    fill_memory(host_executor{}, memory, seeded_pattern{}).value();
    for (std::size_t i = 17; i < memory.size(); i += 3)
      memory[i] ^= std::byte{0x10};
    mismatch_report report;
    std::vector<std::thread> threads;
    for (std::size_t t = 4; t-- > 0;)
      threads.emplace_back([&, t] {
        const auto part = std::span<const std::byte>(memory).subspan(t * 10'000, 10'000);
        verify_memory(host_executor{}, part, seeded_pattern{.first_position = t * 10'000}, &report).value();
      });
    for (std::thread& each : threads)
      each.join();
    CHECK(report.count == (memory.size() - 17 + 2) / 3);
    CHECK(report.first < 17 + 3);  // of the part where that is least
  }

  TEST_CASE("empty input is accepted, and missing memory is refused") {
    const std::span<std::byte> nothing;
    mismatch_report report;
    CHECK(fill_memory(host_executor{}, nothing, poison_pattern{}).has_value());
    CHECK(verify_memory(host_executor{}, nothing, poison_pattern{}, &report).has_value());
    CHECK(report == mismatch_report{});
    const std::span<std::byte> none(static_cast<std::byte*>(nullptr), 5);
    CHECK(fill_memory(host_executor{}, none, poison_pattern{}).error() == failure{errc::too_short, 0, 5, 0});
    CHECK(verify_memory(host_executor{}, none, poison_pattern{}, &report).error() ==
          failure{errc::too_short, 0, 5, 0});
    CHECK(verify_memory(host_executor{}, nothing, poison_pattern{}, nullptr).error() ==
          failure{errc::too_short, 0, 1, 0});
  }
}
