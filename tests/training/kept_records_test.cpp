#include <llmmem/codec/block_int.hpp>
#include <llmmem/prefetch_schedule.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>
#include <llmmem/training/kept_records.hpp>
#include <llmmem/training/memory_chunks.hpp>
#include <llmmem/training/recompute_plan.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace {

using namespace llmmem;
using namespace llmmem_tests;

using memory = memory_chunks<host_space>;
using tiers = tiered_buffer<host_space, host_space>;

/// Byte k of record i in that step.
std::byte value(std::uint64_t step, std::uint32_t i, std::size_t k) {
  return static_cast<std::byte>(step * 31 + i * 7 + k * 3 + 1);
}

std::vector<record_form> random_forms(random_numbers& random) {
  std::vector<record_form> forms(1 + random.below(5U));
  for (record_form& each : forms) {
    each.bytes = 1 + random.below(500U);
    if (random.once_in(3)) continue;
    std::uint64_t at = random.below(4U);
    while (at < each.bytes) {
      const std::uint64_t bytes = 1 + random.below(static_cast<std::uint32_t>(each.bytes - at));
      each.kept.push_back({at, bytes});
      at += bytes + 1 + random.below(60U);
    }
  }
  return forms;
}

/// Two steps, forward and back; everything comes back as it was.
template <class Store>
kept_records_stats live(Store& store, const std::vector<record_form>& forms) {
  kept_records records(store, forms);
  const auto count = static_cast<std::uint32_t>(forms.size());
  for (std::uint64_t step = 0; step < 2; ++step) {
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::span<std::byte> room = records.save(i).value();
      REQUIRE(room.size() == forms[i].bytes);
      for (std::size_t k = 0; k < room.size(); ++k)
        room[k] = value(step, i, k);
      records.keep(i).value();
    }
    for (std::uint32_t i = count; i-- > 0;) {
      std::size_t rebuilt = 0;
      const auto found = records.fetch(i, [&](std::uint32_t which, std::span<std::byte> all) {
        CHECK(which == i);
        std::vector<bool> is_kept(all.size());
        for (const record_run& run : forms[i].kept) {
          for (std::uint64_t k = run.offset; k < run.offset + run.bytes; ++k) {
            is_kept[k] = true;
            REQUIRE(all[k] == value(step, i, k));
          }
        }
        for (std::size_t k = 0; k < all.size(); ++k) {
          if (!is_kept[k]) all[k] = value(step, i, k);
        }
        ++rebuilt;
      });
      CHECK(rebuilt == (forms[i].covers_all() ? 0U : 1U));
      const std::span<const std::byte> all = found.value();
      for (std::size_t k = 0; k < all.size(); ++k)
        REQUIRE(all[k] == value(step, i, k));
      records.drop(i);
    }
    CHECK(records.stats().live_bytes == 0);
  }
  return records.stats();
}

}  // namespace

TEST_SUITE("kept_records") {
  TEST_CASE(
      "records are restored completely from the kept data, in memory and in tiers, within the plan's peak") {
    for (const auto seed : seeds(40)) {
      CAPTURE(seed);
      random_numbers random(seed);
      const auto forms = random_forms(random);
      std::vector<record_choices> choices;
      std::uint64_t largest = 0;
      for (const record_form& each : forms) {
        choices.push_back({.bytes = each.bytes, .ways = {{each.kept_bytes(), 1}}});
        largest = std::max(largest, each.bytes);
      }
      const std::uint64_t peak = peak_of(choices, std::vector<std::uint32_t>(forms.size()));
      host_space space({.budget = 1 << 20, .name = "memory"});
      {
        memory store(space);
        CHECK(live(store, forms).peak_bytes == peak);
      }
      CHECK(space.used() == 0);
      CHECK(space.stats().peak == peak);  // what the plan counts is what the space gives

      host_space top({.budget = 1 << 12, .name = "top"});
      host_space last({.budget = 1 << 16, .name = "last"});
      // Room for what one layer uses, wherever it lies there: the kept parts of the others have to leave.
      const std::uint64_t room = 3 * ((largest + 15) / 16 * 16);
      tiers buffer({}, {top, room, 16}, {last, 1 << 16, 16});
      CHECK(live(buffer, forms).peak_bytes == peak);
      prefetch_schedule schedule(buffer, {.links = {{.bytes_per_second = 1'000'000'000}}});
      CHECK(live(schedule, forms).peak_bytes == peak);
      CHECK(buffer.stats().tiers[1].used == 0);
      CHECK(buffer.audit().empty());
    }
  }

  TEST_CASE("encoded runs come back as the codec restores them at their position, in memory and in tiers") {
    using codec = block_int<4, 32>;
    constexpr std::uint64_t bytes = 800;
    const record_form form{
        .bytes = bytes,
        .kept = {
            {0, 400, codec::worst_case_bytes(400)}, {400, 40}, {440, 360, codec::worst_case_bytes(360)}}};
    REQUIRE(form.covers_all());
    CHECK(form.kept_bytes() == 4 * 4 + 50 + 40 + 3 * 4 + 45);
    std::vector<float> values(bytes / 4);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i % 17) - 8.2F;
    const auto record = std::as_bytes(std::span(values));
    const auto came_through = [&](auto& store, std::uint32_t i, std::uint64_t version) {
      kept_records records(store, {form, form}, codec(bytes));
      records.set_version(version);
      std::ranges::copy(record, records.save(i).value().begin());
      records.keep(i).value();
      CHECK(records.stats().live_bytes == form.kept_bytes());
      const auto found =
          records.fetch(i, [](std::uint32_t, std::span<std::byte>) { FAIL("nothing is missing"); });
      const std::vector<std::byte> all(found.value().begin(), found.value().end());
      records.drop(i);
      CHECK(records.stats().live_bytes == 0);
      CHECK(records.stats().rebuilds == 0);
      return all;
    };
    host_space space({.budget = 1 << 16, .name = "memory"});
    memory store(space);
    const std::vector<std::byte> all = came_through(store, 1, 7);
    std::vector<std::byte> expected(record.begin(), record.end());
    codec by(bytes);
    for (const record_run& run : form.kept) {
      if (run.encoded == 0) continue;
      std::vector<std::byte> coded(run.encoded);
      by.encode(record.subspan(run.offset, run.bytes), coded,
                {.chunk = 1, .version = 7, .group = run.offset / 4})
          .value();
      by.decode(coded, std::span(expected).subspan(run.offset, run.bytes)).value();
    }
    CHECK(all == expected);
    CHECK(all != std::vector<std::byte>(record.begin(), record.end()));
    CHECK(came_through(store, 0, 7) != all);
    CHECK(came_through(store, 1, 8) != all);
    CHECK(space.used() == 0);

    host_space last({.budget = 1 << 16, .name = "last"});
    tiers buffer({}, {space, 2 * 1024, 16}, {last, 1 << 16, 16});
    CHECK(came_through(buffer, 1, 7) == all);
  }

  TEST_CASE("a codec that refuses is a value, and a wrong encoded size an error") {
    using codec = block_int<8>;
    host_space space({.budget = 1 << 16, .name = "memory"});
    memory store(space);
    CHECK_THROWS_WITH_AS(kept_records(store, {{.bytes = 40, .kept = {{0, 40, 40}}}}, codec(40)),
                         "kept_records: record 0 encodes 40 bytes as 40, but its codec takes 14; give its "
                         "worst_case_bytes, or 0 for a run that is kept as it is",
                         argument_error);
    CHECK_THROWS_AS(kept_records(store, {{.bytes = 40, .kept = {{0, 40, 14}}}}), argument_error);
    kept_records records(store, {{.bytes = 80, .kept = {{0, 80, codec::worst_case_bytes(80)}}}}, codec(40));
    static_cast<void>(records.save(0).value());
    CHECK(records.keep(0).code() == errc::out_of_range);  // the codec is for 40 bytes
    CHECK(space.used() == 0);
    CHECK(records.stats().live_bytes == 0);
  }

  TEST_CASE("a shortage is a value, and leaves no incomplete record") {
    const std::vector<record_form> forms{{.bytes = 300, .kept = {{0, 100}}}, {.bytes = 300, .kept = {}}};
    host_space space({.budget = 399, .name = "memory"});
    memory store(space);
    kept_records records(store, forms);
    static_cast<void>(records.save(0).value());
    CHECK(records.keep(0).code() == errc::out_of_bytes);
    CHECK(space.used() == 0);
    CHECK(records.stats().live_bytes == 0);
    static_cast<void>(records.save(1).value());
    records.keep(1).value();
    CHECK(records.save(0).code() == errc::out_of_bytes);
    CHECK(records.stats().live_bytes == 300);
    records.drop(1);
    CHECK(space.used() == 0);
  }

  TEST_CASE("an exception of recomputation passes through, and the record is dropped") {
    const std::vector<record_form> forms{{.bytes = 30, .kept = {{0, 10}}}};
    host_space space({.budget = 1000, .name = "memory"});
    memory store(space);
    kept_records records(store, forms);
    static_cast<void>(records.save(0).value());
    records.keep(0).value();
    CHECK_THROWS_AS(static_cast<void>(records.fetch(
                        0, [](std::uint32_t, std::span<std::byte>) { throw std::runtime_error("no"); })),
                    std::runtime_error);
    CHECK(space.used() == 0);
    CHECK(records.fetch(0, [](std::uint32_t, std::span<std::byte>) {}).code() == errc::no_contents);
  }

  TEST_CASE("forms other than the record's are refused") {
    host_space space({.budget = 1000, .name = "memory"});
    memory store(space);
    const auto refused = [&](record_form form) {
      CHECK_THROWS_AS(kept_records(store, {form}), argument_error);
    };
    refused({.bytes = 0, .kept = {}});
    refused({.bytes = 10, .kept = {{0, 0}}});
    refused({.bytes = 10, .kept = {{8, 3}}});
    refused({.bytes = 10, .kept = {{11, 1}}});
    refused({.bytes = 10, .kept = {{4, 2}, {5, 2}}});
    refused({.bytes = 10, .kept = {{4, 2}, {0, 2}}});
    CHECK_THROWS_WITH_AS(
        kept_records(store, {{.bytes = 10, .kept = {{8, 3}}}}),
        "kept_records: record 0 of 10 bytes keeps 3 from byte 8 on; runs must be inside the record, in "
        "order, without overlap",
        argument_error);
  }
}

TEST_SUITE("memory_chunks") {
  TEST_CASE("a chunk takes memory from its first write until it is discarded, and has one lease") {
    host_space space({.budget = 1000, .name = "memory"});
    memory store(space);
    const chunk_handle chunk = store.create(600).value();
    CHECK(space.used() == 0);
    CHECK(store.read(chunk).code() == errc::no_contents);
    CHECK(store.update(chunk).code() == errc::no_contents);
    {
      const auto lease = store.write(chunk).value();
      CHECK(space.used() == 600);
      std::fill(lease.span().begin(), lease.span().end(), std::byte{7});
      CHECK(store.read(chunk).code() == errc::chunk_leased);
      CHECK(store.discard(chunk).code() == errc::chunk_leased);
    }
    CHECK(store.read(chunk).value().span()[599] == std::byte{7});
    const chunk_handle other = store.create(500).value();
    CHECK(store.write(other).code() == errc::out_of_bytes);
    store.discard(chunk).value();
    CHECK(space.used() == 0);
    CHECK(store.write(other).has_value());
    CHECK(store.read(chunk).code() == errc::no_contents);
    CHECK(store.read({9, 1, 0}).code() == errc::no_contents);
    CHECK(store.discard({9, 1, 0}).code() == errc::no_contents);
  }
}
