#include <llmmem/arena/range_arena.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

/// Where no host may look: an arena never does.
std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);

/// Used ranges by their offset; free space is what lies between.
class naive_range {
 public:
  naive_range(std::uint64_t bytes, std::uint64_t unit) : bytes_(bytes / unit * unit), unit_(unit) {}

  [[nodiscard]] std::uint64_t rounded(std::uint64_t bytes) const {
    return (bytes + unit_ - 1) / unit_ * unit_;
  }

  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> gaps() const {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
    std::uint64_t at = 0;
    for (const auto& [offset, size] : used_) {
      if (offset != at) found.emplace_back(at, offset - at);
      at = offset + size;
    }
    if (at != bytes_) found.emplace_back(at, bytes_ - at);
    return found;
  }
  [[nodiscard]] std::uint64_t largest() const {
    std::uint64_t most = 0;
    for (const auto& gap : gaps())
      most = std::max(most, gap.second);
    return most;
  }
  /// The smallest gap that is large enough.
  [[nodiscard]] std::optional<std::uint64_t> best(std::uint64_t size) const {
    std::optional<std::uint64_t> found;
    for (const auto& gap : gaps()) {
      if (gap.second >= size && (!found || gap.second < *found)) found = gap.second;
    }
    return found;
  }
  [[nodiscard]] std::uint64_t gap_at(std::uint64_t offset) const {
    for (const auto& gap : gaps()) {
      if (gap.first == offset) return gap.second;
    }
    return 0;
  }
  [[nodiscard]] bool is_free(std::uint64_t offset, std::uint64_t size) const {
    for (const auto& gap : gaps()) {
      if (offset >= gap.first && offset + size <= gap.first + gap.second) return true;
    }
    return false;
  }
  /// What somebody who asks for these bytes is told.
  [[nodiscard]] failure refusal(std::uint64_t offset, std::uint64_t size) const {
    if (offset + size > bytes_) return {errc::past_the_bytes, 0, offset + size, bytes_};
    std::uint64_t first = offset;
    while (is_free(first, unit_))
      first += unit_;
    std::uint64_t end = first;
    while (end != offset + size && !is_free(end, unit_))
      end += unit_;
    return {errc::place_taken, 0, first, end};
  }
  void take(std::uint64_t offset, std::uint64_t size) { used_[offset] = size; }
  void give_back(std::uint64_t offset) { used_.erase(offset); }
  [[nodiscard]] std::uint64_t granted() const {
    std::uint64_t sum = 0;
    for (const auto& each : used_)
      sum += each.second;
    return sum;
  }

 private:
  std::uint64_t bytes_;
  std::uint64_t unit_;
  std::map<std::uint64_t, std::uint64_t> used_;
};

}  // namespace

TEST_CASE("a range arena takes the smallest sufficient gap, as a list of gaps does") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t unit = std::uint64_t{1} << random.below(8U);
    const std::uint64_t bytes = unit * (1 + random.below(200U)) + random.below(unit);
    range_arena arena(base, bytes, unit, {},
                      seed % 2 == 0 ? piece_lookup::by_size : piece_lookup::by_address_too);
    naive_range oracle(bytes, unit);
    std::vector<arena_allocation> live;
    for (int step = 0; step < 300; ++step) {
      CAPTURE(step);
      if (!live.empty() && random.once_in(2)) {
        const std::size_t at = random.below(live.size());
        oracle.give_back(static_cast<std::uint64_t>(live[at].data - base));
        REQUIRE(arena.free(live[at].handle));
        CHECK(arena.free(live[at].handle).code() == errc::stale_handle);
        live[at] = live.back();
        live.pop_back();
      } else if (random.once_in(3)) {
        const std::uint64_t size = 1 + random.below(bytes / 4 + 1);
        const std::uint64_t offset = random.below(bytes / unit) * unit;
        const auto had = arena.allocate_at(base + offset, size);
        REQUIRE(had.has_value() == oracle.is_free(offset, oracle.rounded(size)));
        if (!had) {
          CHECK(had.error() == oracle.refusal(offset, oracle.rounded(size)));
        } else {
          CHECK(had->data == base + offset);
          CHECK(had->granted == oracle.rounded(size));
          oracle.take(offset, had->granted);
          live.push_back(*had);
        }
        if (unit != 1) CHECK(arena.allocate_at(base + offset + 1, size).code() == errc::bad_granularity);
      } else {
        const std::uint64_t size = 1 + random.below(bytes / 4 + 1);
        const auto had = arena.allocate(size);
        const auto gap = oracle.best(oracle.rounded(size));
        REQUIRE(had.has_value() == gap.has_value());
        if (!had) {
          CHECK(had.code() == errc::out_of_bytes);
          CHECK(had.error().wanted == oracle.rounded(size));
          CHECK(had.error().found == oracle.largest());
        } else {
          const auto offset = static_cast<std::uint64_t>(had->data - base);
          CHECK(had->granted == oracle.rounded(size));
          CHECK(offset % unit == 0);
          CHECK(oracle.gap_at(offset) == *gap);
          oracle.take(offset, had->granted);
          live.push_back(*had);
        }
      }
      const arena_stats stats = arena.stats();
      REQUIRE(stats.granted == oracle.granted());
      REQUIRE(stats.live == live.size());
      REQUIRE(stats.largest_free == oracle.largest());
      for (const std::string& broken : arena.audit())
        FAIL_CHECK(broken);
    }
  }
}

TEST_CASE("a range arena refuses an impossible range and granularity with the numbers") {
  CHECK_THROWS_WITH_AS(range_arena(base, 4096, 48, {.name = "tier 0"}),
                       "tier 0: granularity 48; it must be a power of two that divides the range's start",
                       argument_error);
  CHECK_THROWS_AS(range_arena(base, 4096, 0), argument_error);
  CHECK_THROWS_AS(range_arena(base + 1, 4096, 64), argument_error);
  CHECK_THROWS_WITH_AS(range_arena(base, 63, 64, {.name = "tier 0"}),
                       "tier 0: the range has 63 bytes; it must be 64 to 2^48", length_error);
  CHECK_THROWS_AS(range_arena(base, (std::uint64_t{1} << 48) + 1, 64), length_error);
}

TEST_CASE("a range arena reports that no block is left for a split, or that nothing fits") {
  range_arena arena(base, 4096, 64, {.max_blocks = 2, .name = "tier 0"});
  const auto first = arena.allocate(64).value();
  CHECK(arena.allocate(64).error().message() ==
        "tier 0: a table of fixed size is full: 1 entries needed, 0 free; raise its max_ option");
  CHECK(arena.allocate(4096).error().message() ==
        "tier 0: 4096 bytes needed, but 4032 left in its budget; release ranges, or raise the budget");
  CHECK(arena.allocate(4032));
  CHECK(arena.free(first.handle));
  CHECK(arena.trim() == 0);
  CHECK(arena.capacity() == 4096);
}

TEST_CASE(
    "a range arena asked for a place reports which bytes another allocation has, and where the range ends") {
  range_arena arena(base, 4096, 64, {.name = "weights: tier 1"});
  REQUIRE(arena.allocate_at(base + 1024, 100));
  CHECK(arena.allocate_at(base + 960, 640).error().message() ==
        "weights: tier 1: bytes 1024 to 1151 of its range belong to another piece; name free bytes, or free "
        "the pieces there first (pieces take whole multiples of the granularity)");
  CHECK(arena.allocate_at(base + 4032, 65).error().message() ==
        "weights: tier 1: bytes up to 4160 requested, but it has 4096; request fewer, or make it larger");
  CHECK(arena.allocate_at(base - 64, 64).code() == errc::past_the_bytes);
  CHECK(arena.allocate_at(base + 8192, 64).code() == errc::past_the_bytes);
  CHECK(arena.stats().live == 1);
}

TEST_CASE("a range arena without entries for the rests around a piece refuses it, and stays as it was") {
  for (std::uint32_t entries = 1; entries < 8; ++entries) {
    CAPTURE(entries);
    range_arena arena(base, 64 * 16, 16, {.max_blocks = entries}, piece_lookup::by_address_too);
    std::uint64_t live = 0;
    // Each one splits the free piece at the end into three.
    for (std::uint64_t at = 1; at < 64; at += 4) {
      const bool fits = 2 * live + 3 <= entries;
      const auto had = arena.allocate_at(base + at * 16, 32);
      REQUIRE(had.has_value() == fits);
      if (!had) CHECK(had.code() == errc::table_full);
      live += fits ? 1 : 0;
      CHECK(arena.stats().live == live);
      for (const std::string& broken : arena.audit())
        FAIL_CHECK(broken);
    }
  }
}
