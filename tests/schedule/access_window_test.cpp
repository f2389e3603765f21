/// What a window of accesses says of a cache, held against MIN and against caches that do something else.
#include <llmmem/schedule/access_window.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/naive_min.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page = 4096;

/// A cache of equal chunks that drops the least recently used, or whichever comes, and tells a window.
struct told_cache {
  access_window& window;
  std::size_t capacity;
  random_numbers* random = nullptr;
  std::deque<std::uint32_t> resident{};  // the oldest first

  struct moment {
    std::set<std::uint32_t> resident;
    std::size_t accesses = 0;  // before it
  };
  std::vector<moment> moments{};  // before each event
  std::vector<std::uint32_t> accesses{};
  std::vector<bool> arrivals{};  // by event

  void tell(bool arrives = false) {
    moments.push_back({{resident.begin(), resident.end()}, accesses.size()});
    arrivals.push_back(arrives);
  }

  void access(std::uint32_t chunk) {
    const auto at = std::find(resident.begin(), resident.end(), chunk);
    if (at != resident.end()) {
      resident.erase(at);
      resident.push_back(chunk);
    } else {
      if (resident.size() == capacity) {
        const auto victim =
            resident.begin() + static_cast<std::ptrdiff_t>(random == nullptr ? 0 : random->below(capacity));
        tell();
        window.on_left(chunk_id{*victim}, page);
        resident.erase(victim);
      }
      tell(true);
      window.on_arrived(chunk_id{chunk}, page);
      resident.push_back(chunk);
    }
    tell();
    window.on_leased(chunk_id{chunk}, page, access_mode::read);
    accesses.push_back(chunk);
    tell();
    window.on_released(chunk_id{chunk}, page);
  }
};

}  // namespace

TEST_CASE("for equal chunks the minimum is what MIN fetches from the window's beginning") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    access_window window(1 + random.below(120U));
    const std::size_t capacity = 1 + random.below(8U);
    const std::uint32_t chunks = 1 + random.below(12U);
    told_cache cache{window, capacity, random.once_in(2) ? &random : nullptr};
    const std::uint64_t count = random.below(150U);
    const bool loops = random.once_in(3);
    for (std::uint64_t i = 0; i < count; ++i)
      cache.access(loops ? static_cast<std::uint32_t>(i % chunks) : random.below(chunks));
    const access_regret found = window.regret(capacity * page);
    if (cache.moments.empty()) {
      REQUIRE(found == access_regret{});
      continue;
    }
    const std::size_t begin = cache.moments.size() - window.size();
    const told_cache::moment& start = cache.moments[begin];
    const std::vector<std::uint32_t> seen(
        cache.accesses.begin() + static_cast<std::ptrdiff_t>(start.accesses), cache.accesses.end());
    REQUIRE(found.accesses == seen.size());
    const auto moved = static_cast<std::uint64_t>(
        std::count(cache.arrivals.begin() + static_cast<std::ptrdiff_t>(begin), cache.arrivals.end(), true));
    REQUIRE(found.moved_bytes == moved * page);
    REQUIRE(found.min_bytes == naive_min_misses(seen, capacity, start.resident) * page);
    REQUIRE(found.bytes() == found.moved_bytes - found.min_bytes);
  }
}

TEST_CASE("a loop over one chunk too many misses every time under LRU, and rarely under MIN") {
  access_window window(10'000);
  told_cache cache{window, 8};
  for (std::uint32_t i = 0; i < 900; ++i)
    cache.access(i % 9);
  const access_regret found = window.regret(8 * page);
  CHECK(found.accesses == 900);
  CHECK(found.moved_bytes == 900 * page);
  // Nine to begin with, then one in eight accesses.
  CHECK(found.min_bytes == (9 + (900 - 9) / 8) * page);
  CHECK(found.ratio() == doctest::Approx(7.5));
}

TEST_CASE("the moved bytes are at least the minimum, for any sizes, writes and leases") {
  for (const auto seed : seeds(400)) {
    CAPTURE(seed);
    random_numbers random(seed);
    access_window window(1 + random.below(200U));
    const std::uint64_t budget = 40 + random.below(60U);
    struct chunk {
      std::uint64_t bytes = 0;
      bool has_contents = false;
      bool resident = false;
      bool leased = false;
    };
    std::vector<chunk> chunks(2 + random.below(10U));
    for (chunk& each : chunks)
      each.bytes = 1 + random.below(20U);
    std::uint64_t used = 0;
    const auto leave = [&](std::uint32_t i) {
      window.on_left(chunk_id{i}, chunks[i].bytes);
      used -= chunks[i].bytes;
      chunks[i].resident = false;
    };
    for (int step = 0; step < 300; ++step) {
      const auto i = random.below(static_cast<std::uint32_t>(chunks.size()));
      chunk& c = chunks[i];
      if (c.leased) {
        window.on_released(chunk_id{i}, c.bytes);
        c.leased = false;
        continue;
      }
      if (c.resident && random.once_in(8)) {
        leave(i);
        continue;
      }
      if (random.once_in(20)) {
        // Removed; one of another size gets its number.
        if (c.resident) leave(i);
        c = {.bytes = 1 + random.below(20U)};
        continue;
      }
      const bool writes_all = !c.has_contents || random.once_in(5);
      if (!c.resident) {
        for (std::uint32_t v = 0; v < chunks.size() && used + c.bytes > budget; ++v) {
          if (chunks[v].resident && !chunks[v].leased && random.once_in(2)) leave(v);
        }
        if (used + c.bytes > budget) continue;
        if (!writes_all) window.on_arrived(chunk_id{i}, c.bytes);
        c.resident = true;
        used += c.bytes;
        if (!writes_all && random.once_in(4)) continue;  // in advance
      }
      c.has_contents = true;
      c.leased = true;
      window.on_leased(chunk_id{i}, c.bytes,
                       writes_all          ? access_mode::write
                       : random.once_in(3) ? access_mode::read_write
                                           : access_mode::read);
      const access_regret now = window.regret(budget);
      REQUIRE(now.moved_bytes >= now.min_bytes);
    }
  }
}

TEST_CASE("a leased chunk reduces the bytes that MIN may keep") {
  access_window window(100);
  const auto use = [&](std::uint32_t chunk) {
    window.on_arrived(chunk_id{chunk}, page);
    window.on_leased(chunk_id{chunk}, page, access_mode::read);
    window.on_released(chunk_id{chunk}, page);
    window.on_left(chunk_id{chunk}, page);
  };
  window.on_arrived(chunk_id{0}, page);
  window.on_leased(chunk_id{0}, page, access_mode::read);
  for (std::uint32_t i = 0; i < 6; ++i)
    use(1 + i % 2);
  // Chunk 0 stays all the time: of two chunks by turns, none can be kept beside it and the one in use.
  CHECK(window.regret(2 * page).min_bytes == 7 * page);
  CHECK(window.regret(3 * page).min_bytes == 3 * page);
  CHECK(window.regret(3 * page).ratio() == doctest::Approx(7.0 / 3.0));
  // The same when it was leased before the window began.
  window.clear();
  for (std::uint32_t i = 0; i < 6; ++i)
    use(1 + i % 2);
  window.on_released(chunk_id{0}, page);
  CHECK(window.regret(2 * page).min_bytes == 6 * page);
  CHECK(window.regret(3 * page).min_bytes == 2 * page);
}

TEST_CASE("overwritten chunks need not come up, in tier 0 or not") {
  access_window window(100);
  for (int round = 0; round < 3; ++round) {
    window.on_leased(chunk_id{0}, page, access_mode::write);
    window.on_released(chunk_id{0}, page);
    window.on_left(chunk_id{0}, page);
  }
  CHECK(window.regret(page) == access_regret{.accesses = 3});
  CHECK(window.regret(page).ratio() == 1.0);
  window.on_arrived(chunk_id{0}, page);
  window.on_leased(chunk_id{0}, page, access_mode::read_write);
  CHECK(window.regret(page) == access_regret{.accesses = 4, .moved_bytes = page, .min_bytes = 0});
  CHECK(window.regret(page / 2).min_bytes == page / 2);
}

TEST_CASE("contents made in tier 0 need not come up, and may be kept from then on") {
  access_window window(100);
  const auto read = [&](std::uint32_t chunk) {
    window.on_leased(chunk_id{chunk}, page, access_mode::read);
    window.on_released(chunk_id{chunk}, page);
  };
  window.on_arrived(chunk_id{0}, page);
  read(0);
  window.on_left(chunk_id{0}, page);
  window.on_made(chunk_id{1}, page);
  window.on_left(chunk_id{1}, page);
  window.on_arrived(chunk_id{1}, page);
  read(1);
  // With room for one, 0 had to leave for it; with room for both, neither had to come again.
  CHECK(window.regret(page) == access_regret{.accesses = 2, .moved_bytes = 2 * page, .min_bytes = page});
  window.on_left(chunk_id{1}, page);
  window.on_arrived(chunk_id{0}, page);
  read(0);
  CHECK(window.regret(page).min_bytes == 2 * page);
  CHECK(window.regret(2 * page).min_bytes == page);
  // It lay in nobody's way before it was made.
  window.clear();
  read(0);
  read(1);
  window.on_left(chunk_id{0}, page);
  window.on_made(chunk_id{2}, page);
  CHECK(window.regret(2 * page) == access_regret{.accesses = 2});
}

TEST_CASE("a window keeps its configured number of events, in fixed memory") {
  CHECK_THROWS_WITH_AS(access_window(0), "access_window: 0 events; it must keep at least 1", argument_error);
  counting_metadata metadata;
  {
    access_window window(16, metadata.source());
    CHECK(window.capacity() == 16);
    CHECK(window.metadata_bytes() == 256);
    CHECK(window.regret(1) == access_regret{});
    for (std::uint32_t i = 0; i < 40; ++i)
      window.on_arrived(chunk_id{i}, 1);
    CHECK(window.size() == 16);
    CHECK(window.regret(100).moved_bytes == 16);
    window.clear();
    CHECK(window.size() == 0);
    const access_window moved = std::move(window);
    CHECK(moved.capacity() == 16);
  }
}
