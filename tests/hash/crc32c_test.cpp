#include <llmmem/hash/copy_crc32c.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// The definition: a bit at a time.
std::uint32_t bitwise(std::uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  for (const std::byte each : bytes) {
    crc ^= static_cast<std::uint32_t>(each);
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82F6'3B78U : 0U);
  }
  return ~crc;
}

template <std::size_t count, class Make>
constexpr std::uint32_t checksum_of(Make&& make) {
  std::array<std::byte, count> bytes{};
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = make(i);
  return crc32c(0, bytes);
}

// RFC 3720, appendix B.4.
static_assert(checksum_of<32>([](std::size_t) { return std::byte{0}; }) == 0x8A91'36AA);
static_assert(checksum_of<32>([](std::size_t) { return std::byte{0xFF}; }) == 0x62A8'AB43);
static_assert(checksum_of<32>([](std::size_t i) { return static_cast<std::byte>(i); }) == 0x46DD'794E);
static_assert(checksum_of<32>([](std::size_t i) { return static_cast<std::byte>(31 - i); }) == 0x113F'DB5C);

}  // namespace

TEST_CASE("the checksum is the same by instruction, by table and by bit, in one piece or two") {
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    // Some of several rounds of lanes, and a rest.
    std::vector<std::byte> bytes(random.below(std::uint64_t{100}) + (random.once_in(10) ? 5'000 : 0) +
                                 (random.once_in(10) ? random.below(std::uint64_t{4}) * 12'288 : 0));
    for (std::byte& each : bytes)
      each = static_cast<std::byte>(random.below(256U));
    const std::span<const std::byte> all(bytes);
    const std::uint32_t expected = bitwise(0, all);
    REQUIRE(crc32c(0, all) == expected);
    REQUIRE(~detail::crc32c_run(~0U, all, detail::crc32c_word_by_table) == expected);
    if (detail::has_crc32c_instruction())
      REQUIRE(~detail::crc32c_run(~0U, all, detail::crc32c_word_by_instruction) == expected);
    if (detail::has_crc32c_instruction()) REQUIRE(~detail::crc32c_run_in_lanes(~0U, all) == expected);
    const std::size_t cut = random.below(std::uint64_t{bytes.size()} + 1);
    REQUIRE(crc32c(crc32c(0, all.first(cut)), all.subspan(cut)) == expected);
    // A copy in two pieces, at odd addresses, with a byte on both sides that is not its own.
    std::vector<std::byte> into(bytes.size() + 2, std::byte{0xA5});
    const std::span<std::byte> middle = std::span(into).subspan(1, bytes.size());
    const std::uint32_t head = copy_crc32c(0, all.first(cut), middle);
    REQUIRE(copy_crc32c(head, all.subspan(cut), middle.subspan(cut)) == expected);
    REQUIRE(std::equal(bytes.begin(), bytes.end(), middle.begin()));
    std::fill(middle.begin(), middle.end(), std::byte{0});
    REQUIRE(detail::copy_crc32c_in_pieces(0, all, middle) == expected);
    REQUIRE(std::equal(bytes.begin(), bytes.end(), middle.begin()));
    REQUIRE(into.front() == std::byte{0xA5});
    REQUIRE(into.back() == std::byte{0xA5});
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LLMMEM_TEST_IS_WATCHED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define LLMMEM_TEST_IS_WATCHED 1
#endif
#endif

TEST_CASE("a sanitizer sees every byte that a checksum reads, and otherwise long runs are folded") {
#if defined(LLMMEM_TEST_IS_WATCHED)
  CHECK_FALSE(detail::folds_crc32c(std::size_t{1} << 20));
#else
  CHECK(detail::folds_crc32c(512) == (detail::has_crc32c_folding() && detail::has_crc32c_instruction()));
  CHECK_FALSE(detail::folds_crc32c(511));
#endif
}

TEST_CASE("a lane of zero bytes after a state gives what the tables of lanes say") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const auto state = static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32));
    const std::vector<std::byte> zeros(detail::crc32c_lane);
    CHECK(detail::crc32c_past_lane(state) ==
          detail::crc32c_run(state, std::span(zeros), detail::crc32c_word_by_table));
  }
}

TEST_CASE("separate checksums of two parts combine to the checksum of both") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    std::vector<std::byte> bytes(random.below(std::uint64_t{3'000}));
    for (std::byte& each : bytes)
      each = static_cast<std::byte>(random.below(256U));
    const std::span<const std::byte> all(bytes);
    const std::size_t cut = random.below(std::uint64_t{bytes.size()} + 1);
    const std::uint32_t first = crc32c(0, all.first(cut));
    const std::uint32_t second = crc32c(0, all.subspan(cut));
    CHECK(crc32c_combine(first, second, bytes.size() - cut) == crc32c(0, all));
  }
}
