#include <llmmem/space/live_ranges.hpp>

#include <doctest/doctest.h>

#include "support/seeds.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace llmmem;
using llmmem_tests::seeds;

namespace {

std::array<std::byte, 4096> memory;  // only its addresses matter

std::string at(const std::byte* p) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", static_cast<const void*>(p));
  return text;
}

}  // namespace

TEST_CASE("the table behaves as a map from start to length") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    live_ranges<int> table;
    std::map<std::size_t, std::size_t> oracle;  // start, length
    for (int step = 0; step < 300; ++step) {
      const std::size_t start = random() % 256;
      const std::size_t length = 1 + random() % 16;
      const auto overlap = [&](std::size_t from, std::size_t bytes) {
        for (const auto& [s, l] : oracle) {
          if (from < s + l && s < from + bytes) return true;
        }
        return false;
      };
      if (!overlap(start, length)) {
        REQUIRE(table.reserve_one());
        table.insert(memory.data() + start, length, static_cast<int>(start));
        oracle.emplace(start, length);
      } else if (const auto found = oracle.find(start); found != oracle.end()) {
        const auto removed = table.remove(memory.data() + start);
        REQUIRE(removed.bytes == found->second);
        REQUIRE(removed.payload == static_cast<int>(start));
        oracle.erase(found);
      }
      REQUIRE(table.size() == oracle.size());
      REQUIRE(table.audit("table").empty());

      const std::size_t from = random() % 280;
      const std::size_t bytes = 1 + random() % 20;
      misuse::kind expected = misuse::kind::not_live;
      bool held = false;
      for (const auto& [s, l] : oracle) {
        if (from < s || from >= s + l) continue;
        expected = from != s    ? misuse::kind::inside
                   : bytes != l ? misuse::kind::wrong_size
                                : misuse::kind::none;
        held = from + bytes <= s + l;
      }
      REQUIRE(table.check("table", memory.data() + from, bytes).what == expected);
      REQUIRE((table.holding(memory.data() + from, bytes) != nullptr) == held);
    }
  }
}

TEST_CASE("each misuse is reported in one sentence with the addresses and lengths") {
  live_ranges<int> table;
  REQUIRE(table.reserve_one());
  table.insert(memory.data() + 64, 32, 0);
  const auto text = [&](std::size_t offset, std::uint64_t bytes) {
    return table.check("pool", memory.data() + offset, bytes).message();
  };
  CHECK(text(0, 32) ==
        "pool: deallocate of 32 bytes at " + at(memory.data()) +
            ": no live range is there; it was already deallocated, or belongs to another space");
  CHECK(text(72, 8) == "pool: deallocate of 8 bytes at " + at(memory.data() + 72) +
                           ": that is inside the live range of 32 bytes at " + at(memory.data() + 64) +
                           "; deallocate whole ranges");
  CHECK(text(64, 31) ==
        "pool: deallocate of 31 bytes at " + at(memory.data() + 64) +
            ": the live range there has 32 bytes; deallocate the range exactly as it was allocated");
  CHECK(text(64, 32) == "pool: deallocate of 32 bytes at " + at(memory.data() + 64) + ": valid");
  CHECK(misuse{.what = misuse::kind::in_flight, .where = "gpu", .address = memory.data(), .bytes = 1}
            .message() == "gpu: deallocate of 1 bytes at " + at(memory.data()) +
                              ": a copy that uses it is in flight; wait for its fence first");
}

TEST_CASE("the audit names a range that overlaps the one before it, or is empty") {
  live_ranges<int> table;
  REQUIRE(table.reserve_one());
  table.insert(memory.data(), 32, 0);
  REQUIRE(table.reserve_one());
  table.insert(memory.data() + 31, 32, 0);
  CHECK(table.audit("pool") == std::vector<std::string>{"pool: live range 1 overlaps the one before it"});
  live_ranges<int> empty;
  REQUIRE(empty.reserve_one());
  empty.insert(memory.data(), 0, 0);
  CHECK(empty.audit("pool") == std::vector<std::string>{"pool: live range 0 is empty"});
}
