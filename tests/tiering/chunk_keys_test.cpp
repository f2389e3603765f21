/// Keys of chunks against a map, over an index that is a map as well.
#include <llmmem/paging/prefix_index.hpp>
#include <llmmem/tiering/detail/chunk_keys.hpp>
#include <llmmem/tiering/detail/chunk_table.hpp>
#include <llmmem/transfer/errors.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

struct map_index {
  std::map<std::uint64_t, chunk_extent> entries;
  std::string where = "map";
  bool refuses = false;

  [[nodiscard]] static std::uint64_t capacity() { return 5; }
  [[nodiscard]] const std::string& path() const { return where; }
  result<void> keep(const chunk_extent& each) {
    if (refuses) return failure{.code = errc::dependency_failed};
    entries[each.bytes] = each;  // the test gives each chunk a size of its own
    return {};
  }
  result<void> drop(const chunk_key& key) {
    if (refuses) return failure{.code = errc::dependency_failed};
    std::erase_if(entries, [&](const auto& each) { return each.second.key == key; });
    return {};
  }
};

struct map_space {
  map_index all;
  map_index& index() { return all; }
  [[nodiscard]] const map_index& index() const { return all; }
  static std::uint64_t offset_of(const std::byte*) { return 0; }
};

struct format_seven {
  static constexpr std::uint64_t format_id = 7;
};

chunk_key key_of(std::uint64_t number) {
  chunk_key key{};
  key.low = number;
  key.high = ~number;
  return key;
}

}  // namespace

TEST_CASE("the index has the chunks with keys whose bytes in the last tier will not change") {
  using table_type = detail::chunk_table<2, true>;
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const tiered_options options{.max_chunks = 8, .name = "kv"};
    table_type table(options);
    map_space space;
    detail::chunk_keys<table_type, map_space, format_seven, true> keys(table, space, options);
    std::vector<chunk_handle> chunks;
    std::map<std::uint32_t, std::uint64_t> key_of_name;  // the oracle: names with keys
    std::map<std::uint32_t, bool> in_index;              // by slot
    for (std::uint64_t i = 0; i < 8; ++i) {
      table_type::record_type fresh;
      fresh.bytes = i + 1;
      fresh.copies[1].at = detail::residence::valid;
      fresh.copies[1].stored = 10 * (i + 1);
      chunks.push_back(table.enter(fresh).value());
    }
    for (int step = 0; step < 120; ++step) {
      const chunk_handle chunk = chunks[random.below(chunks.size())];
      const std::uint32_t slot = table.slot_of(chunk.slot);
      const bool has = key_of_name.contains(chunk.slot);
      space.all.refuses = random.once_in(5);
      switch (random.below(4U)) {
        case 0: {
          if (has) break;
          const std::uint64_t number = random.below(12U);
          bool is_taken = false;
          for (const auto& [name, key] : key_of_name)
            is_taken = is_taken || key == number;
          const result<void> free = keys.check_free(key_of(number));
          REQUIRE(free.has_value() == (!is_taken && key_of_name.size() < map_index::capacity()));
          if (!free) {
            REQUIRE(free.code() == (is_taken ? errc::key_taken : errc::table_full));
            break;
          }
          keys.set(chunk.slot, key_of(number));
          key_of_name[chunk.slot] = number;
          break;
        }
        case 1: {
          const result<void> gone = keys.give_up(chunk.slot);
          REQUIRE(gone.has_value() == (!space.all.refuses || !in_index[slot]));
          if (!gone) break;
          key_of_name.erase(chunk.slot);
          in_index[slot] = false;
          break;
        }
        case 2: {
          const result<void> gone = keys.unindex(slot);
          REQUIRE(gone.has_value() == (!space.all.refuses || !in_index[slot]));
          if (gone) in_index[slot] = false;
          break;
        }
        default: {
          table[slot].copies[1].at = random.once_in(3) ? detail::residence::absent : detail::residence::valid;
          if (in_index[slot]) table[slot].copies[1].at = detail::residence::valid;
          const bool rests = table[slot].copies[1].is_valid();
          const result<void> kept = keys.reindex(slot);
          REQUIRE(kept.has_value() == (!has || !rests || !space.all.refuses));
          if (kept && has && rests) in_index[slot] = true;
        }
      }
      std::size_t indexed = 0;
      for (const chunk_handle& each : chunks) {
        const auto at = key_of_name.find(each.slot);
        REQUIRE(keys.owns(each.slot) == (at != key_of_name.end()));
        if (at != key_of_name.end()) REQUIRE(keys.find(key_of(at->second)).value() == each);
        if (!in_index[table.slot_of(each.slot)]) continue;
        ++indexed;
        const chunk_extent& entry = space.all.entries.at(table[table.slot_of(each.slot)].bytes);
        REQUIRE(entry.key == key_of(at->second));
        REQUIRE(entry.stored == 10 * entry.bytes);
        REQUIRE(entry.format == 7);
      }
      REQUIRE(space.all.entries.size() == indexed);
      REQUIRE(keys.find(key_of(99)).code() == errc::no_such_key);
    }
  }
}
