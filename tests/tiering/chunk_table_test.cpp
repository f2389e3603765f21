/// The table of chunks against sets of handles.
#include <llmmem/tiering/detail/chunk_table.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using table_type = detail::chunk_table<2, false>;

tiered_options options(std::uint32_t chunks) {
  return {.max_chunks = chunks, .name = "kv"};
}

}  // namespace

TEST_CASE("chunks share a record if they are clones of one another and have not parted") {
  constexpr std::uint32_t most = 12;
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    table_type table(options(most));
    // The oracle: each chunk, and the number of the contents that it has.
    std::vector<std::pair<chunk_handle, std::uint64_t>> alive;
    std::vector<chunk_handle> ended;
    std::uint64_t contents = 0;
    for (int step = 0; step < 150; ++step) {
      const bool is_full = alive.size() == most;
      const std::uint64_t choice = random.below(4U);
      if (alive.empty() || choice == 0) {
        const result<chunk_handle> made = table.enter({});
        REQUIRE(made.has_value() == !is_full);
        if (made) alive.emplace_back(*made, ++contents);
        if (!made) CHECK(made.code() == errc::table_full);
      } else {
        const std::size_t at = random.below(alive.size());
        const auto [chunk, has] = alive[at];
        const std::uint32_t slot = table.record_of(chunk);
        if (choice == 1) {
          const result<chunk_handle> made = table.share(slot);
          REQUIRE(made.has_value() == !is_full);
          if (made) alive.emplace_back(*made, has);
        } else if (choice == 2 && table[slot].sharers > 1) {
          const std::uint32_t own = table.part(chunk.slot, {});
          REQUIRE(own == table.slot_of(chunk.slot));
          alive[at].second = ++contents;
        } else if (choice == 3) {
          table.remove(chunk.slot);
          ended.push_back(chunk);
          alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(at));
        }
      }
      std::map<std::uint64_t, std::set<std::uint32_t>> slots;  // of each contents
      std::map<std::uint64_t, std::uint32_t> sharers;
      for (const auto& [chunk, has] : alive) {
        REQUIRE(table.check(chunk).code == errc::ok);
        slots[has].insert(table.slot_of(chunk.slot));
        ++sharers[has];
      }
      std::set<std::uint32_t> all;
      std::uint64_t shared = 0;
      for (const auto& [has, of] : slots) {
        REQUIRE(of.size() == 1);
        REQUIRE(all.insert(*of.begin()).second);  // other contents, another record
        REQUIRE(table[*of.begin()].sharers == sharers[has]);
        if (sharers[has] > 1) shared += sharers[has];
      }
      REQUIRE(table.shared() == shared);
      for (const chunk_handle& each : ended)
        REQUIRE(table.check(each).code == errc::stale_handle);
      std::vector<std::string> broken;
      table.audit(broken);
      REQUIRE(broken.empty());
    }
  }
}

TEST_CASE("a change counts only for its record") {
  table_type table(options(4));
  const chunk_handle one = table.enter({}).value();
  const chunk_handle two = table.enter({}).value();
  CHECK(table.changes() == 2);
  table.mark_changed(table[table.slot_of(one.slot)]);
  CHECK(table.changes() == 3);
  CHECK(table[table.slot_of(one.slot)].changed == 3);
  CHECK(table[table.slot_of(two.slot)].changed == 2);
  CHECK(table.share(table.slot_of(two.slot)).has_value());
  CHECK(table.changes() == 3);
  table.part(two.slot, {});
  CHECK(table.changes() == 4);
}

TEST_CASE("a policy knows a chunk's successor in a slot from the chunk") {
  table_type table(options(1));
  std::set<std::uint64_t> seen{0};
  for (int i = 0; i < 100; ++i) {
    const chunk_handle chunk = table.enter({}).value();
    CHECK(seen.insert(table.hint_of(table.slot_of(chunk.slot)).content).second);
    table.remove(chunk.slot);
  }
}

TEST_CASE("the audit of a table finds leases without a holder") {
  table_type table(options(4));
  const chunk_handle chunk = table.enter({}).value();
  ++table[table.slot_of(chunk.slot)].leases;
  std::vector<std::string> broken;
  table.audit(broken);
  CHECK(broken == std::vector<std::string>{"kv: chunk 0 has 1 leases, its sharers 0"});
}

TEST_CASE("the refusal of a full table names the table and its buffer") {
  table_type table(options(1));
  CHECK(table.enter({}).has_value());
  const failure why = table.share(0).error();
  CHECK(why.code == errc::table_full);
  CHECK(why.index == static_cast<std::uint32_t>(full_table::chunks));
  CHECK(std::string(table.where()) == "kv");
}
