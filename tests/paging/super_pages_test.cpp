#include <llmmem/eviction/any.hpp>
#include <llmmem/paging/super_pages.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/testing_access.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

using pool = super_page_pool<>;

std::vector<block_id> take(pool& from, std::size_t group, std::size_t count) {
  std::vector<block_id> out(count);
  from.allocate(group, out).value();
  return out;
}

void keep(pool& in, std::span<const block_id> blocks) {
  for (const block_id block : blocks)
    in.mark_cached(block);
}

void release(pool& to, std::span<const block_id> blocks) {
  for (const block_id block : blocks)
    to.release(block).value();
}

/// Pages of 1000 bytes: ten blocks of group 0, three of group 1 with 100 bytes left over.
pool small_pool(std::uint64_t pages) {
  static constexpr std::array<std::uint64_t, 2> sizes{100, 300};
  return pool({.budget_bytes = (pages + 1) * 1000, .page_bytes = 1000, .block_bytes = sizes, .name = "kv"});
}

/// The pool by its definition: blocks with counts, pages with groups, everything searched linearly.
class naive_pages {
 public:
  naive_pages(std::uint64_t pages, std::vector<std::uint64_t> page_blocks)
      : page_blocks_(std::move(page_blocks)), pages_(pages) {}

  struct block {
    std::size_t group;
    std::uint64_t page;
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint32_t references = 1;
    bool cached = false;
  };
  std::map<block_id, block> blocks;

  /// Retires the pages above `pages`: nothing is cached there any more.
  void resize(std::uint64_t pages) {
    pages_ = pages;
    for (auto& [id, each] : blocks)
      each.cached = each.cached && each.page <= pages;
  }
  [[nodiscard]] std::uint64_t retiring() const {
    std::set<std::uint64_t> pages;
    for (const auto& [id, each] : blocks)
      if (each.page > pages_) pages.insert(each.page);
    return pages.size();
  }

  /// Usable pages that no active block pins.
  [[nodiscard]] std::uint64_t open_pages() const {
    std::map<std::uint64_t, bool> pinned;
    for (const auto& [id, each] : blocks)
      if (each.page <= pages_) pinned[each.page] |= each.references != 0;
    std::uint64_t count = pages_;
    for (const auto& [page, is] : pinned)
      count -= is ? 1 : 0;
    return count;
  }

  [[nodiscard]] bool can_give(std::span<const std::uint64_t> wanted) const {
    std::uint64_t pages = 0;
    for (std::size_t g = 0; g < wanted.size(); ++g) {
      std::map<std::uint64_t, std::uint64_t> active;
      for (const auto& [id, each] : blocks)
        if (each.page <= pages_) active[each.page] += each.group == g && each.references != 0 ? 1 : 0;
      std::uint64_t room = 0;
      for (const auto& [page, count] : active)
        room += count == 0 ? 0 : page_blocks_[g] - count;
      for (std::uint64_t have = room; have < wanted[g]; have += page_blocks_[g])
        ++pages;
    }
    return pages <= open_pages();
  }

 private:
  std::vector<std::uint64_t> page_blocks_;
  std::uint64_t pages_;
};

}  // namespace

TEST_CASE(
    "blocks of several sizes never overlap, batches succeed completely or not at all, and every byte is "
    "accounted for") {
  std::uint64_t refused = 0;
  std::uint64_t evictions = 0;
  std::uint64_t emptied = 0;
  std::uint64_t resizes = 0;
  for (const auto seed : seeds(300)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::size_t groups = 1 + random.below(std::uint64_t{4});
    const std::uint64_t page_bytes = 64 + random.below(std::uint64_t{200});
    const std::uint64_t most_pages = 1 + random.below(std::uint64_t{9});
    std::uint64_t pages = random.once_in(2) ? most_pages : 1 + random.below(most_pages);
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> page_blocks;
    for (std::size_t g = 0; g < groups; ++g) {
      sizes.push_back(1 + random.below(random.once_in(2) ? page_bytes : page_bytes / 8));
      page_blocks.push_back(page_bytes / sizes.back());
    }
    const std::string_view policy = eviction_names[random.below(std::uint64_t{eviction_names.size()})];
    const std::uint64_t remainder = random.below(page_bytes);
    const super_page_options options{.budget_bytes = (pages + 1) * page_bytes + remainder,
                                     .budget_capacity_bytes = (most_pages + 1) * page_bytes + remainder,
                                     .page_bytes = page_bytes,
                                     .block_bytes = sizes,
                                     .name = "kv"};
    super_page_pool<any_eviction> kv(options, [&](slot_count slots, const metadata_source& source) {
      return make_eviction(policy, slots, source);
    });
    naive_pages oracle(pages, page_blocks);
    const auto forget = [&](std::span<const block_id> gone) noexcept {
      for (const block_id block : gone) {
        const auto at = oracle.blocks.find(block);
        if (at == oracle.blocks.end()) std::terminate();
        const bool retires = at->second.page > pages;
        if (retires ? !at->second.cached : at->second.references != 0) std::terminate();
        at->second.cached = false;
        if (at->second.references == 0) oracle.blocks.erase(at);
      }
    };
    for (int step = 0; step < 300; ++step) {
      const auto any = [&] {
        auto at = oracle.blocks.begin();
        std::advance(at, static_cast<std::ptrdiff_t>(random.below(std::uint64_t{oracle.blocks.size()})));
        return at;
      };
      const std::uint32_t what = random.below(std::uint32_t{14});
      if (oracle.blocks.empty() || what < 3) {
        std::vector<std::vector<block_id>> out(groups);
        std::vector<group_blocks> wanted;
        std::vector<std::uint64_t> counts(groups);
        for (std::size_t g = 0; g < groups; ++g) {
          counts[g] =
              random.once_in(3) ? 0 : random.below(2 * page_blocks[g] < 9 ? 2 * page_blocks[g] + 1 : 9);
          out[g].resize(counts[g]);
          if (counts[g] != 0) wanted.push_back({g, out[g]});
        }
        std::vector<std::uint64_t> leave(random.once_in(2) ? 0 : groups);
        for (std::size_t g = 0; g < leave.size(); ++g) {
          leave[g] = random.below(std::uint64_t{4});
          counts[g] += leave[g];
        }
        const auto before = oracle.blocks.size();
        const bool possible = oracle.can_give(counts);
        const auto done = kv.allocate(wanted, leave, forget);
        REQUIRE(done.has_value() == possible);
        std::vector<group_shortage> lacks(groups);
        if (!done) {
          ++refused;
          REQUIRE(done.code() == errc::out_of_group_blocks);
          REQUIRE(oracle.blocks.size() == before);
          REQUIRE(!kv.shortage(counts, lacks));
          REQUIRE(done.error().wanted == counts[done.error().index]);
          // One block less than what is lacking can be had, with all that the groups before it want.
          for (std::size_t g = done.error().index + 1; g < groups; ++g)
            counts[g] = 0;
          counts[done.error().index] = done.error().found;
          REQUIRE(oracle.can_give(counts));
          ++counts[done.error().index];
          REQUIRE(!oracle.can_give(counts));
        } else {
          for (const group_blocks& each : wanted) {
            for (const block_id block : each.out) {
              REQUIRE(kv.group_of(block) == each.group);
              REQUIRE_FALSE(kv.is_retiring(block));
              REQUIRE(oracle.blocks
                          .emplace(block, naive_pages::block{each.group, kv.layout().page_of(block),
                                                             kv.offset(block), sizes[each.group]})
                          .second);
            }
          }
          REQUIRE((leave.empty() || oracle.can_give(leave)));
        }
      } else {
        const auto at = any();
        const block_id block = at->first;
        naive_pages::block& known = at->second;
        switch (what) {
          case 3:
            REQUIRE(kv.share(block).has_value());
            ++known.references;
            break;
          case 4:
          case 8:
          case 9:
            if (known.references != 0 && !known.cached && kv.is_retiring(block)) break;
            if (known.references != 0 && !known.cached) {
              kv.mark_cached(block);
              known.cached = true;
            } else {
              kv.touch(block);
            }
            break;
          case 5:
            if (!random.once_in(4)) break;
            kv.unmark_cached(block);
            known.cached = false;
            if (known.references == 0) oracle.blocks.erase(at);
            break;
          case 6:
            if (!random.once_in(10)) break;
            if (random.once_in(2)) {
              pages = 1 + random.below(most_pages);
              const std::uint64_t retiring =
                  kv.resize((pages + 1) * page_bytes + random.below(remainder + 1), forget).value();
              oracle.resize(pages);
              REQUIRE(retiring == oracle.retiring());
              ++resizes;
            } else if (random.once_in(2)) {
              static_cast<void>(kv.reclaim_pages(1, forget));
            } else {
              static_cast<void>(kv.evict_one(random.below(std::uint64_t{groups}), forget));
            }
            break;
          default:
            REQUIRE(kv.release(block).has_value() == (known.references != 0));
            if (known.references == 0) break;
            if (--known.references == 0 && !known.cached) oracle.blocks.erase(at);
        }
      }
      const auto found = kv.audit();
      REQUIRE_MESSAGE(found.empty(), found.front());
      // Recounted from the blocks alone.
      std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
      std::uint64_t active = 0;
      std::uint64_t idle = 0;
      for (const auto& [id, each] : oracle.blocks) {
        ranges.push_back({each.offset, each.offset + each.bytes});
        (each.references != 0 ? active : idle) += each.bytes;
        REQUIRE(each.offset == std::uint64_t(kv.unit_index(id)) * kv.layout().unit);
        REQUIRE(kv.record(id).references() == each.references);
      }
      std::sort(ranges.begin(), ranges.end());
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        REQUIRE(ranges[i].first >= (i == 0 ? page_bytes : ranges[i - 1].second));
        REQUIRE(ranges[i].first / page_bytes == (ranges[i].second - 1) / page_bytes);
      }
      if (!ranges.empty()) {
        const bool retires = oracle.retiring() != 0;
        REQUIRE(ranges.back().second <= (retires ? kv.max_physical_bytes() : kv.physical_bytes()));
      }
      REQUIRE(kv.retiring_pages() == oracle.retiring());
      REQUIRE(kv.stats().active_bytes == active);
      REQUIRE(kv.stats().idle_bytes == idle);
    }
    while (!oracle.blocks.empty()) {
      const auto at = oracle.blocks.begin();
      while (at->second.references != 0) {
        kv.release(at->first).value();
        --at->second.references;
      }
      kv.unmark_cached(at->first);
      oracle.blocks.erase(at);
    }
    REQUIRE(kv.free_pages() == pages);
    REQUIRE(kv.retiring_pages() == 0);
    REQUIRE(kv.audit().empty());
    evictions += kv.stats().evictions;
    emptied += kv.stats().pages_emptied;
  }
  CHECK(refused > 1'000);
  CHECK(evictions > 1'000);
  CHECK(emptied > 100);
  CHECK(resizes > 200);
}

TEST_CASE("a page belongs to one group until its last block is free") {
  pool kv = small_pool(2);
  auto small = take(kv, 0, 11);
  CHECK(kv.free_pages() == 0);
  CHECK(kv.available(1) == 0);
  release(kv, std::span(small).first(10));
  CHECK(kv.free_pages() == 1);
  auto large = take(kv, 1, 3);
  CHECK(kv.free_pages() == 0);
  release(kv, std::span(small).last(1));
  release(kv, large);
  CHECK(kv.free_pages() == 2);
  CHECK(kv.audit().empty());
}

TEST_CASE("waste is reported to the byte, by cause") {
  pool kv = small_pool(3);
  auto small = take(kv, 0, 4);
  auto large = take(kv, 1, 4);
  keep(kv, std::span(large).first(1));
  release(kv, std::span(large).first(1));
  const super_page_stats all = kv.stats();
  CHECK(all.budget_bytes == 4000);
  CHECK(all.null_bytes == 1000);
  CHECK(all.free_pages == 0);
  CHECK(all.active_bytes == 4 * 100 + 3 * 300);
  CHECK(all.idle_bytes == 300);
  CHECK(all.free_bytes == 6 * 100 + 2 * 300);
  CHECK(all.padding_bytes == 2 * 100);
  CHECK(kv.stats(1).page_tail_bytes == 100);
  CHECK(kv.stats(1).padding_bytes == 200);
  CHECK(kv.stats(0).padding_bytes == 0);
}

TEST_CASE(
    "the order in which blocks will be handed out is visited: equal for equal lives, different for others") {
  const auto order_of = [](const pool& kv) {
    std::vector<std::uint64_t> words;
    kv.visit_order([&](std::uint64_t word) { words.push_back(word); });
    return words;
  };
  // The blocks of two pages freed in either order: the pages leave the stack the other way round.
  const auto freed = [&](bool first_page_last, std::size_t left) {
    pool kv = small_pool(3);
    const auto blocks = take(kv, 0, 20);
    const auto one = std::span(blocks).first(10);
    const auto two = std::span(blocks).last(10).first(10 - left);
    release(kv, first_page_last ? two : one);
    release(kv, first_page_last ? one : two);
    return kv;
  };
  CHECK(order_of(freed(true, 0)) == order_of(freed(true, 0)));
  CHECK(order_of(freed(true, 0)) != order_of(freed(false, 0)));
  // Free blocks of one page.
  const auto lent = [&](std::size_t first, bool cached) {
    pool kv = small_pool(2);
    const auto blocks = take(kv, 0, 5);
    if (cached) keep(kv, blocks);
    release(kv, std::span(blocks).subspan(first, 1));
    release(kv, std::span(blocks).subspan(1 - first, 1));
    return kv;
  };
  for (const bool cached : {false, true}) {
    CHECK(order_of(lent(0, cached)) == order_of(lent(0, cached)));
    CHECK(order_of(lent(0, cached)) != order_of(lent(1, cached)));
  }
}

TEST_CASE("a block comes from the fullest page, so that other pages become empty") {
  pool kv = small_pool(3);
  auto blocks = take(kv, 0, 30);
  // Page 1 keeps 8, page 2 keeps 9, page 3 keeps 1.
  release(kv, std::span(blocks).subspan(0, 2));
  release(kv, std::span(blocks).subspan(10, 1));
  release(kv, std::span(blocks).subspan(20, 9));
  const auto next = take(kv, 0, 3);
  CHECK(kv.layout().page_of(next[0]) == 2);
  CHECK(kv.layout().page_of(next[1]) == 1);
  CHECK(kv.layout().page_of(next[2]) == 1);
  release(kv, std::span(blocks).last(1));
  CHECK(kv.free_pages() == 1);
}

TEST_CASE(
    "a new page comes from the page that keeps the fewest cached blocks, and no other block is evicted") {
  // Scattered survivors: each page keeps one block in use but two, of which one keeps ten, the other two.
  pool kv = small_pool(20);
  auto blocks = take(kv, 0, 200);
  keep(kv, blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::size_t page = i / 10;
    if (page == 7 && i % 10 > 1) kv.unmark_cached(blocks[i]);
    if (i % 10 != 0 || page == 7 || page == 3) kv.release(blocks[i]).value();
  }
  std::uint64_t gone = 0;
  std::vector<block_id> large(3);
  kv.allocate(1, large, [&](std::span<const block_id> each) noexcept { gone += each.size(); }).value();
  CHECK(gone == 2);
  CHECK(kv.layout().page_of(large[0]) == 8);
  gone = 0;
  kv.allocate(1, large, [&](std::span<const block_id> each) noexcept { gone += each.size(); }).value();
  CHECK(gone == 10);
  CHECK(kv.layout().page_of(large[0]) == 4);
  // What is idle beside blocks in use helps group 0 alone.
  CHECK(kv.available(1) == 0);
  CHECK(kv.available(0) == 18 * 9);
  const auto none = kv.allocate(1, large);
  CHECK(none.error().message() ==
        "kv: group 1 needs 3 blocks, but 0 are available to it; release sequences, or build it with a larger "
        "budget");
}

TEST_CASE("a group gives up its own block if that is the oldest, otherwise an older page") {
  pool kv = small_pool(2);
  auto small = take(kv, 0, 10);
  auto large = take(kv, 1, 3);
  keep(kv, small);
  keep(kv, large);
  release(kv, std::span(large).first(1));  // the oldest, in a page in use
  release(kv, small);
  release(kv, std::span(large).subspan(1, 1));
  static_cast<void>(take(kv, 1, 1));
  CHECK(kv.stats(0).idle_blocks == 10);  // group 1 gave up its own
  CHECK(kv.stats(1).idle_blocks == 1);
  static_cast<void>(take(kv, 1, 1));
  CHECK(kv.stats(0).idle_blocks == 0);  // the page of group 0 was older than the one that is left
  CHECK(kv.stats(1).idle_blocks == 1);
  CHECK(kv.stats().pages_emptied == 1);
}

TEST_CASE("a touch makes an idle block, and its page, the most recent") {
  pool kv = small_pool(2);
  auto first = take(kv, 1, 3);
  auto second = take(kv, 1, 3);
  keep(kv, first);
  keep(kv, second);
  release(kv, first);
  release(kv, second);
  for (const block_id block : first)
    kv.touch(block);
  static_cast<void>(take(kv, 0, 10));
  CHECK(kv.record(first[0]).is_idle());
  CHECK(!kv.record(second[0]).is_idle());
}

TEST_CASE("the requests of several groups are considered together") {
  pool kv = small_pool(3);
  std::vector<block_id> small(11);
  std::vector<block_id> large(3);
  const std::array<group_blocks, 2> fits{{{0, small}, {1, large}}};
  kv.allocate(fits).value();
  CHECK(kv.free_pages() == 0);
  release(kv, small);
  std::vector<block_id> more(4);
  const std::array<group_blocks, 2> too_much{{{0, small}, {1, more}}};
  const auto none = kv.allocate(too_much);  // 2 pages and 2 more are needed, 2 are there
  CHECK(none.error() == failure{errc::out_of_group_blocks, 1, 4, 0, ""});
  std::array<group_shortage, 2> lacks{};
  CHECK(!kv.shortage(std::array<std::uint64_t, 2>{11, 4}, lacks));
  CHECK(lacks[0].missing() == 0);
  CHECK(lacks[0].pages == 2);
  CHECK(lacks[1].missing() == 4);
  CHECK(lacks[1].pages == 2);
}

TEST_CASE("a pool that shrinks drops what is cached above its budget, and keeps what is held") {
  pool kv({.budget_bytes = 3000,
           .budget_capacity_bytes = 5500,
           .page_bytes = 1000,
           .block_bytes = std::array<std::uint64_t, 2>{100, 300},
           .name = "kv"});
  CHECK(kv.physical_bytes() == 3000);
  CHECK(kv.max_physical_bytes() == 5000);
  CHECK(kv.resize(5500).value() == 0);
  CHECK(kv.stats().pages == 4);
  CHECK(kv.stats().remainder_bytes == 500);
  // Page 1 is full of small blocks; page 2 has a held and a cached one, page 3 a large cached one.
  const auto small = take(kv, 0, 12);
  const auto large = take(kv, 1, 1);
  kv.mark_cached(small[11]);
  keep(kv, large);
  release(kv, std::span(small).subspan(11));
  release(kv, large);
  std::vector<block_id> gone;
  const auto forget = [&](std::span<const block_id> blocks) noexcept {
    gone.insert(gone.end(), blocks.begin(), blocks.end());
  };
  CHECK(kv.resize(2999, forget).value() == 1);
  CHECK(gone == std::vector{small[11], large[0]});
  CHECK(kv.stats().retiring_pages == 1);
  CHECK(kv.available(0) == 0);
  std::array<block_id, 1> more{};
  CHECK(kv.allocate(0, more).error().message() ==
        "kv: group 0 needs 1 blocks, but 0 are available to it; release sequences, or build it with a larger "
        "budget");
  CHECK(kv.audit() == std::vector<std::string>{});
  SUBCASE("the last release ends the retirement") {
    release(kv, std::span(small).subspan(10, 1));
    CHECK(kv.retiring_pages() == 0);
    CHECK(kv.free_pages() == 0);
  }
  SUBCASE("growing ends it as well, and the page's other blocks are available again") {
    CHECK(kv.resize(3000).value() == 0);
    CHECK(kv.available(0) == 9);
  }
  CHECK(kv.audit() == std::vector<std::string>{});
  CHECK(kv.resize(1999).error().message() ==
        "kv: a budget of 1999 bytes asked for, but the pool allows two pages to 5500 bytes; build it with a "
        "larger budget_capacity_bytes to grow further");
  CHECK(kv.resize(5501).code() == errc::bad_budget);
}

TEST_CASE("offsets are exact past four gigabytes, and one multiplication finds every block") {
  const std::array<std::uint64_t, 2> sizes{std::uint64_t{3} << 28, std::uint64_t{1} << 20};
  pool kv(
      {.budget_bytes = std::uint64_t{64} << 30, .page_bytes = std::uint64_t{1} << 30, .block_bytes = sizes});
  CHECK(kv.layout().unit == std::uint64_t{1} << 20);
  CHECK(kv.layout().shift == 10);
  const auto large = take(kv, 0, 20);
  const auto small = take(kv, 1, 2);
  CHECK(kv.offset(large.back()) == std::uint64_t{20} << 30);
  CHECK(kv.unit_index(large.back()) == 20 * 1024);
  CHECK(kv.offset(small[1]) == (std::uint64_t{21} << 30) + (std::uint64_t{1} << 20));
  CHECK(std::uint64_t(kv.unit_index(small[1])) * kv.layout().unit == kv.offset(small[1]));
  CHECK(kv.offset(null_block) == 0);
  CHECK(kv.unit_index(null_block) == 0);
}

TEST_CASE("impossible sizes are refused with their numbers") {
  const auto build = [](std::uint64_t budget, std::uint64_t page, std::vector<std::uint64_t> sizes) {
    pool kv({.budget_bytes = budget, .page_bytes = page, .block_bytes = sizes, .name = "kv"});
  };
  CHECK_THROWS_WITH_AS(build(4000, 1000, {}), "kv: 0 groups; use 1 to 16", length_error);
  CHECK_THROWS_WITH_AS(build(4000, 1000, {1, 1001}),
                       "kv: blocks of 1001 bytes in group 1; use 1 to the bytes of a page, 1000",
                       length_error);
  CHECK_THROWS_WITH_AS(build(4000, 1000, {0}),
                       "kv: blocks of 0 bytes in group 0; use 1 to the bytes of a page, 1000", length_error);
  CHECK_THROWS_WITH_AS(build(1999, 1000, {10}),
                       "kv: a budget of 1999 bytes is too small; the null page and one more take 2000",
                       length_error);
  CHECK_THROWS_WITH_AS(
      build(40'000'000, 100'000, {3}),
      "kv: 33333 blocks of group 0 in a page, more than the limit of 32768; use smaller pages", length_error);
  CHECK_THROWS_WITH_AS(build(std::uint64_t{1} << 40, 1 << 20, {1 << 8}),
                       "kv: 1048576 pages of up to 4096 blocks are too many; block ids of 31 bits can name "
                       "524287 such pages: use larger blocks",
                       length_error);
  CHECK_THROWS_WITH_AS(
      build(std::uint64_t{1} << 34, 1 << 20, {(1 << 20) - 1}),
      "kv: offsets in units of 1 bytes, the largest common divisor of pages and blocks, take 17179869184 "
      "values, but int32 has 2147483647: choose sizes with a larger common divisor",
      length_error);
}

TEST_CASE("blocks cached here not held are refused by name") {
  pool kv = small_pool(2);
  CHECK(kv.release(null_block).code() == errc::null_handle);
  CHECK(kv.release(block_id{9999}).code() == errc::foreign_handle);
  const auto one = take(kv, 0, 1);
  kv.release(one[0]).value();
  CHECK(kv.release(one[0]).code() == errc::double_free);
  CHECK(kv.share(one[0]).code() == errc::double_free);
}

TEST_CASE("the page size with the least waste is found, or none is reported") {
  const std::array<std::uint64_t, 2> sizes{300, 700};
  CHECK(choose_page_bytes(sizes, 700, 3000, 100) == page_choice{2100, 0});
  CHECK(choose_page_bytes(sizes, 800, 1000, 100) == page_choice{900, 200});
  constexpr std::uint64_t all = ~std::uint64_t{0};
  constexpr std::uint64_t quarter = std::uint64_t{1} << 62;
  CHECK(choose_page_bytes(sizes, 0, all, quarter) == page_choice{quarter, 4});
  CHECK(choose_page_bytes(sizes, all - 5, all, 5) == page_choice{all - 5, 10});
  CHECK_THROWS_AS(choose_page_bytes(sizes, all - 5, all, quarter), length_error);
  CHECK_THROWS_WITH_AS(choose_page_bytes(sizes, 100, 600, 100),
                       "choose_page_bytes: no multiple of 100 from 100 to 600 holds a block of every group",
                       length_error);
}

TEST_CASE("nothing is allocated from the heap after construction, also during evictions") {
  pool kv = small_pool(8);
  random_numbers random(1);
  std::array<block_id, 6> held{};
  std::size_t count = 0;
  const std::uint64_t before = heap_allocations();
  for (int i = 0; i < 20'000; ++i) {
    if (count == held.size()) {
      for (; count > 0; --count) {
        if (random.once_in(2)) kv.mark_cached(held[count - 1]);
        kv.release(held[count - 1]).value();
      }
    }
    kv.allocate(random.below(std::uint64_t{2}), std::span(held).subspan(count++, 1)).value();
  }
  CHECK(heap_allocations() == before);
  CHECK(kv.stats().pages_emptied > 50);
}

TEST_CASE("audit names the broken page, block and group") {
  using corrupt = testing_access;
  struct damage {
    void (*inflict)(pool&);
    std::vector<std::string> found;
  };
  const std::vector<damage> all{
      {[](pool& kv) { ++corrupt::page(kv, 1).active; },
       {"kv: page 1 counts 2 active and 1 idle blocks, it has 1 and 1",
        "kv: page 1 is in a list it does not belong to", "kv: page 1 is in a list it does not belong to",
        "kv: group 0 has 0 open and 0 mixed pages of fill level 1, but its masks differ",
        "kv: group 0 counts 1 pages, 1 active and 1 idle blocks, space for 9; there are 1, 2, 1, 8",
        "kv: page 1 is missing from a list"}},
      {[](pool& kv) { corrupt::free_page(kv, 0) = corrupt::free_page(kv, 1); },
       {"kv: the free pages name page 3, which is assigned, named twice or does not exist"}},
      {[](pool& kv) { corrupt::forget_free_page(kv); },
       {"kv: page 3 is leaked", "kv: accounts for 4000 of 5000 bytes"}},
      {[](pool& kv) { corrupt::withdraw_candidate(kv, 0, 11); },
       {"kv: block 17 is idle but not an eviction candidate (last: idled)"}},
      {[](pool& kv) { corrupt::page(kv, 1).touched = 1; },
       {"kv: block 17 was never handed out (last: idled)",
        "kv: page 1 lists block 2 as free, but it is in use, listed twice or does not exist"}},
      {[](pool& kv) { corrupt::page(kv, 1).last_idle = 0; },
       {"kv: block 17 became idle later than its page records (last: idled)"}},
      {[](pool& kv) { corrupt::idle_blocks(kv).remove(1, 17); },
       {"kv: page 1 lists 0 idle blocks, it has 1"}},
      {[](pool& kv) { corrupt::idle_blocks(kv).push_back(1, 33); },
       {"kv: page 1 lists block 33 as idle, but it is not idle, or not its own"}},
      {[](pool& kv) { corrupt::page(kv, 1).free_block = 0; },
       {"kv: page 1 lists block 0 as free, but it is in use, listed twice or does not exist"}},
      {[](pool& kv) { corrupt::page(kv, 1).free_block = detail::no_index; },
       {"kv: page 1 has handed out 3 blocks, but accounts for 2"}},
      {[](pool& kv) { corrupt::assign_page(kv, 0); }, {"kv: page 3 is empty but not free"}},
      {[](pool& kv) { corrupt::emptiable_pages(kv).remove(2, 2); },
       {"kv: 0 pages can be emptied, the count says 1", "kv: page 2 is missing from a list"}},
      {[](pool& kv) { corrupt::emptiable_pages(kv).push_back(2, 1); },
       {"kv: page 1 is in a list it does not belong to"}},
      {[](pool& kv) { ++corrupt::group(kv, 0).spare; },
       {"kv: group 0 counts 1 pages, 1 active and 1 idle blocks, space for 10; there are 1, 1, 1, 9"}},
      {[](pool& kv) { corrupt::group(kv, 0).open = 0; },
       {"kv: group 0 has 1 open and 1 mixed pages of fill level 1, but its masks differ"}},
      {[](pool& kv) { corrupt::group(kv, 0).mixed = 0; },
       {"kv: group 0 has 1 open and 1 mixed pages of fill level 1, but its masks differ"}},
      {[](pool& kv) { ++corrupt::group(kv, 0).pages; },
       {"kv: group 0 counts 2 pages, 1 active and 1 idle blocks, space for 9; there are 1, 1, 1, 9",
        "kv: accounts for 6000 of 5000 bytes"}},
      {[](pool& kv) { corrupt::hold(kv, block_id{26}); },
       {"kv: block 26 is in use where its page has no block (last: allocated)",
        "kv: page 1 counts 1 active and 1 idle blocks, it has 2 and 1",
        "kv: page 1 has handed out 3 blocks, but accounts for 4"}},
      {[](pool& kv) { corrupt::group(kv, 1).wanted = 1; },
       {"kv: group 1 wants 1 blocks, but no allocation is in progress"}},
      {[](pool& kv) { corrupt::hold(kv, block_id{1}); },
       {"kv: block 1 is in use where its page has no block (last: allocated)",
        "kv: page 0 counts 0 active and 0 idle blocks, it has 1 and 0"}},
  };
  for (const damage& each : all) {
    CAPTURE(each.found.front());
    // Page 1: block 16 active, 17 idle, 18 free again. Page 2: block 32 idle. Pages 3 and 4: free.
    pool kv = small_pool(4);
    const auto small = take(kv, 0, 3);
    const auto large = take(kv, 1, 1);
    kv.mark_cached(small[1]);
    keep(kv, large);
    release(kv, std::span(small).subspan(1));
    release(kv, large);
    REQUIRE(kv.audit() == std::vector<std::string>{});
    each.inflict(kv);
    CHECK(kv.audit() == each.found);
  }
}
