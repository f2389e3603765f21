#include <llmmem/version/cow_range.hpp>
#include <llmmem/version/versioned.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

static_assert(std::is_same_v<versioned<std::byte, copy_on_write>, cow_range>);

namespace {

using bytes = std::vector<std::byte>;
using runs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

/// The definition: a whole copy of the range, and when each page was written, for each snapshot.
struct whole_copy {
  bytes contents;
  std::vector<std::uint64_t> written;
};

[[nodiscard]] runs changed(const std::vector<std::uint64_t>& written, std::uint64_t before) {
  runs all;
  for (std::uint64_t page = 0; page < written.size(); ++page) {
    if (written[page] <= before) continue;
    if (!all.empty() && all.back().first + all.back().second == page) {
      ++all.back().second;
    } else {
      all.emplace_back(page, 1);
    }
  }
  return all;
}

template <class From>
[[nodiscard]] runs runs_of(const From& from, std::uint64_t before) {
  runs all;
  from.changed_since(version_id{before},
                     [&](std::uint64_t first, std::uint64_t count) { all.emplace_back(first, count); });
  return all;
}

[[nodiscard]] bytes all_of(const cow_snapshot& snapshot) {
  bytes into(snapshot.bytes());
  snapshot.read(0, into).value();
  return into;
}

}  // namespace

TEST_CASE("snapshots read as complete copies do, within the pool's pages and with the fewest copies") {
  for (const auto seed : seeds(150)) {
    CAPTURE(seed);
    random_numbers random(seed);
    constexpr std::uint64_t page = 64;
    const std::size_t size = 1 + random.below(20 * page);
    const std::size_t pages = (size + page - 1) / page;
    bytes range(size);
    bytes pool(random.below(40 * page));
    const std::uint32_t most = 1 + random.below(5U);
    cow_range state(range, pool, {.page_bytes = page, .max_snapshots = most}, "state");
    whole_copy now{range, std::vector<std::uint64_t>(pages, 1)};
    std::map<std::uint64_t, whole_copy> copies;  // of live snapshots
    std::vector<cow_snapshot> held;
    std::uint64_t epoch = 1;
    // Pool pages in use: contents of pages that a live snapshot sees and the range no longer has.
    const auto needed = [&] {
      std::vector<std::pair<std::uint64_t, std::uint64_t>> distinct;
      for (const auto& [version, copy] : copies) {
        for (std::uint64_t i = 0; i < pages; ++i) {
          if (copy.written[i] != now.written[i]) distinct.emplace_back(i, copy.written[i]);
        }
      }
      std::sort(distinct.begin(), distinct.end());
      return static_cast<std::uint64_t>(std::unique(distinct.begin(), distinct.end()) - distinct.begin());
    };
    for (int step = 0; step < 150; ++step) {
      CAPTURE(step);
      switch (random.below(6U)) {
        case 0: {
          auto taken = state.snapshot();
          REQUIRE(taken.has_value() == (copies.size() < most));
          if (!taken) {
            CHECK(taken.code() == errc::table_full);
            break;
          }
          CHECK(to_number(taken->version()) == epoch);
          copies[epoch++] = now;
          held.push_back(*std::move(taken));
          break;
        }
        case 1: {
          const std::uint64_t wanted = random.below(epoch + 2);
          auto pin = state.pin(version_id{wanted});
          REQUIRE(pin.has_value() == copies.contains(wanted));
          if (pin) {
            held.push_back(*std::move(pin));
          } else {
            CHECK(pin.code() ==
                  (wanted == 0 || wanted >= epoch ? errc::no_such_version : errc::version_expired));
          }
          break;
        }
        case 2: {
          if (held.empty()) break;
          const std::size_t which = random.below(held.size());
          const std::uint64_t version = to_number(held[which].version());
          held[which] = std::move(held.back());
          held.pop_back();
          if (std::none_of(held.begin(), held.end(),
                           [&](const cow_snapshot& each) { return to_number(each.version()) == version; })) {
            copies.erase(version);
          }
          break;
        }
        default: {
          const std::uint64_t offset = random.below(size);
          const std::uint64_t length = random.below(std::min<std::uint64_t>(size - offset, 200) + 1);
          const std::uint64_t used = state.stats().used_pages;
          const whole_copy before = now;
          if (length != 0) {
            for (std::uint64_t i = offset / page; i <= (offset + length - 1) / page; ++i)
              now.written[i] = epoch;
          }
          const auto given = state.write(offset, length);
          const bool fits = needed() <= pool.size() / page;
          REQUIRE(given.has_value() == fits);
          if (!fits) {
            CHECK(given.code() == errc::out_of_bytes);
            const std::uint64_t need = (needed() - used) * page;
            CHECK(given.error().wanted == need);
            CHECK(given.error().index == (need > pool.size() / page * page ? 1 : 0));
            now = before;
            REQUIRE(state.stats().used_pages == used);
            break;
          }
          REQUIRE(given->data() == range.data() + offset);
          REQUIRE(given->size() == length);
          for (std::byte& each : *given)
            each = static_cast<std::byte>(random.next());
          now.contents = range;
        }
      }
      REQUIRE(range == now.contents);
      REQUIRE(state.stats().used_pages == needed());
      REQUIRE(state.live() == copies.size());
      CHECK(to_number(state.newest()) == epoch - 1);
      CHECK(to_number(state.oldest()) == (copies.empty() ? 0 : copies.begin()->first));
      for (const cow_snapshot& each : held) {
        const whole_copy& copy = copies.at(to_number(each.version()));
        REQUIRE(all_of(each) == copy.contents);
        const std::uint64_t before = random.below(epoch + 1);
        REQUIRE(runs_of(each, before) == changed(copy.written, before));
      }
      const std::uint64_t before = random.below(epoch + 1);
      REQUIRE(runs_of(state, before) == changed(now.written, before));
      REQUIRE(state.audit() == std::vector<std::string>{});
    }
    held.clear();
    CHECK(state.stats().used_pages == 0);
    CHECK(state.stats().max_used_pages <= pool.size() / page);
  }
}

TEST_CASE("a second write to a page copies nothing, and neither does a first one without snapshots") {
  bytes range(10 * 64);
  bytes pool(4 * 64);
  cow_range state(range, pool, {.page_bytes = 64});
  CHECK(state.write(0, 640).has_value());
  {
    const auto gone = state.snapshot().value();
  }
  CHECK(state.write(0, 640).has_value());
  CHECK(state.stats().copied_pages == 0);
  const auto kept = state.snapshot().value();
  CHECK(state.write(0, 65).has_value());
  CHECK(state.stats().copied_pages == 2);
  CHECK(state.write(0, 128).has_value());
  CHECK(state.stats().copied_pages == 2);
  const auto later = state.snapshot().value();
  CHECK(state.write(64, 1).has_value());
  CHECK(state.stats().copied_pages == 3);
  CHECK(state.write(128, 1).has_value());  // one copy for both snapshots
  CHECK(state.stats().copied_pages == 4);
  CHECK(state.stats().used_pages == 4);
}

TEST_CASE("a full pool refuses a write with the shortage, or asks for the end of snapshots") {
  bytes range(10 * 64);
  bytes pool(2 * 64 + 63);
  cow_range state(range, pool, {.page_bytes = 64}, "weights");
  auto first = state.snapshot().value();
  CHECK(state.write(0, 128).has_value());
  CHECK(state.write(128, 1).error().message() ==
        "weights: 64 bytes needed, but 0 left in its budget; release ranges, or raise the budget");
  CHECK(state.write(128, 192).error().message() ==
        "weights: 192 bytes needed in one piece, but it never has more than 128; raise its budget, or "
        "request smaller pieces");
  CHECK(state.stats().refused_writes == 2);
  CHECK(runs_of(state, 1) == runs{{0, 2}});
  std::vector<std::uint64_t> missing;
  CHECK(state
            .write(64, 128,
                   [&](std::uint64_t shortage) {
                     missing.push_back(shortage);
                     first.release();
                     return true;
                   })
            .has_value());
  CHECK(missing == std::vector<std::uint64_t>{64});
  CHECK(state.stats().used_pages == 0);
}

TEST_CASE("an incremental save of a snapshot takes the changes up to it and no later ones") {
  bytes range(8 * 64);
  bytes pool(8 * 64);
  cow_range state(range, pool, {.page_bytes = 64});
  {
    const auto whole = state.snapshot().value();
    CHECK(runs_of(whole, 0) == runs{{0, 8}});
  }
  CHECK(state.write(2 * 64, 128).has_value());
  const auto next = state.snapshot().value();
  CHECK(state.write(3 * 64, 128).has_value());
  CHECK(runs_of(next, 1) == runs{{2, 2}});
  CHECK(runs_of(state, 1) == runs{{2, 3}});
  CHECK(runs_of(state, 2) == runs{{3, 2}});
  CHECK(runs_of(next, 2).empty());
}

TEST_CASE(
    "a snapshot reads a page in place until it is written, then in the pool; the last page may be short") {
  bytes range(100, std::byte{1});
  bytes pool(128);
  cow_range state(range, pool, {.page_bytes = 64});
  const auto kept = state.snapshot().value();
  CHECK(kept.pages() == 2);
  const auto where = [&](std::uint64_t page) {
    std::span<const std::byte> seen;
    kept.visit(page, [&](std::span<const std::byte> bytes_seen) { seen = bytes_seen; }).value();
    return seen;
  };
  CHECK(where(1).data() == range.data() + 64);
  CHECK(where(1).size() == 36);
  state.write(99, 1).value()[0] = std::byte{2};
  CHECK(where(1).data() == pool.data());
  CHECK(where(1).size() == 36);
  CHECK(where(1)[35] == std::byte{1});
  CHECK(where(0).data() == range.data());
  CHECK_THROWS_AS(static_cast<void>(kept.visit(0, [](auto) { throw std::runtime_error("no"); })),
                  std::runtime_error);
  CHECK(state.write(0, 1).has_value());  // would wait forever for a reader that never left
}

TEST_CASE("nothing is allocated after construction") {
  bytes range(1000);
  bytes pool(1000);
  cow_range state(range, pool, {.page_bytes = 64});
  bytes into(1000);
  const std::uint64_t allocated = heap_allocations();
  for (int i = 0; i < 20; ++i) {
    const auto kept = state.snapshot();
    const auto given = state.write(0, 900);
    const auto read = kept->read(0, into);
    CHECK((given && read));
  }
  CHECK(heap_allocations() == allocated);
}

TEST_CASE("missing pages and bytes, and empty snapshots, are refused") {
  bytes range(100);
  cow_range state(range, {}, {.page_bytes = 64}, "state");
  CHECK(state.write(90, 11).error().message() ==
        "state: bytes up to 101 requested, but it has 100; request fewer, or make it larger");
  CHECK(state.write(101, 0).code() == errc::past_the_bytes);
  CHECK(state.write(1, ~std::uint64_t{0}).code() == errc::past_the_bytes);
  CHECK(state.write(100, 0).has_value());
  const auto kept = state.snapshot().value();
  CHECK(kept.visit(2, [](auto) {}).error().message() == "state: 2 requested, but the highest allowed is 1");
  bytes into(2);
  CHECK(kept.read(99, into).error().message() ==
        "state: bytes up to 101 requested, but it has 100; request fewer, or make it larger");
  const cow_snapshot none;
  CHECK(none.read(0, into).code() == errc::null_handle);
  CHECK(none.visit(0, [](auto) {}).code() == errc::null_handle);
  CHECK(none.version() == no_version);
  CHECK(none.pages() == 0);
  CHECK(runs_of(none, 0).empty());
  CHECK(state.pin(version_id{9}).error().message() ==
        "state: version 9 was never published, the newest is 1 (0: none); publish first");
}

TEST_CASE("a range, a pool or pages that cannot be used are refused with the reason") {
  bytes range(128);
  bytes pool(128);
  CHECK_THROWS_WITH_AS(cow_range(range, pool, {.page_bytes = 63}, "s"),
                       "s: page_bytes is 63, allowed are powers of two from 64 on", length_error);
  CHECK_THROWS_WITH_AS(cow_range(range, pool, {.page_bytes = 96}, "s"),
                       "s: page_bytes is 96, allowed are powers of two from 64 on", length_error);
  CHECK_THROWS_WITH_AS(cow_range({}, pool, {}, "s"), "s: a range of 0 bytes; give it at least 1",
                       length_error);
  CHECK_THROWS_WITH_AS(cow_range(range, std::span(range).subspan(64), {}, "s"),
                       "s: range and pool overlap; the pool must be memory of its own", argument_error);
  CHECK_THROWS_WITH_AS(cow_range(range, pool, {.max_snapshots = 0}, "s"),
                       "s: max_snapshots is 0; allow at least one", argument_error);
  const std::span<std::byte> vast(range.data(), std::size_t{1} << 40);
  CHECK_THROWS_WITH_AS(
      cow_range(vast, {}, {.page_bytes = 64}, "s"),
      "s: 17179869184 pages and 0 in the pool, the most is 4294967294 each; take larger pages", length_error);
}
