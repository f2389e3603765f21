#include <llmmem/arena/caching_split.hpp>
#include <llmmem/arena/size_class.hpp>
#include <llmmem/arena/stitched.hpp>
#include <llmmem/space/host_virtual.hpp>
#include <llmmem/testing/simulated_mapper.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/counting_metadata.hpp"
#include "support/heap_counter.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/testing_access.hpp"

using namespace llmmem;
using namespace llmmem::testing;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

using simulated = simulated_virtual_memory;
static_assert(arena_policy<caching_split_arena<simulated>>);
static_assert(arena_policy<size_class_arena<simulated>>);
static_assert(arena_policy<stitched_arena<simulated>>);
static_assert(arena_policy<stitched_arena<host_virtual_memory>>);

virtual_memory_options budget(std::uint64_t bytes, std::string name = "vm") {
  return {
      .budget = bytes, .max_ranges = 512, .max_handles = 1024, .max_mappings = 4096, .name = std::move(name)};
}

arena_options small_tables() {
  return {.max_blocks = 65536, .max_segments = 256, .name = "arena"};
}
stitched_options stitched_tables() {
  return {.arena = small_tables(), .max_stitched = 32, .max_parts = 512, .max_stitched_chunks = 1024};
}

template <class Arena, class Memory>
Arena make(Memory& memory) {
  if constexpr (std::is_same_v<Arena, stitched_arena<Memory>>) {
    return Arena(memory, stitched_tables());
  } else {
    return Arena(memory, small_tables());
  }
}

/// Sizes as training asks for them: few small, most of some MiB, some much larger.
std::uint64_t any_size(random_numbers& random) {
  switch (random.below(std::uint64_t{8})) {
    case 0:
      return 1 + random.below(std::uint64_t{4096});
    case 1:
    case 2:
      return 1 + random.below(mib);
    case 3:
      return mib * (1 + random.below(std::uint64_t{60}));
    default:
      return 1 + random.below(16 * mib);
  }
}

/// Frees one of those held, whichever. @pre there is one.
template <class Arena>
void free_any(Arena& arena, std::vector<arena_handle>& held, random_numbers& random) {
  const std::size_t at = random.below(held.size());
  REQUIRE(arena.free(held[at]));
  held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
}

/// What every arena promises of what it gives out, searched linearly.
class naive_arena {
 public:
  void gave(const arena_allocation& one) {
    REQUIRE(one.granted >= one.bytes);
    REQUIRE(reinterpret_cast<std::uintptr_t>(one.data) % arena_alignment == 0);
    for (const arena_allocation& other : live_)
      REQUIRE((one.data + one.granted <= other.data || other.data + other.granted <= one.data));
    live_.push_back(one);
  }
  arena_allocation take(std::uint64_t index) {
    const arena_allocation one = live_[index];
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    return one;
  }
  void check(const arena_stats& stats) const {
    std::uint64_t requested = 0, granted = 0;
    for (const arena_allocation& one : live_) {
      requested += one.bytes;
      granted += one.granted;
    }
    REQUIRE(stats.live == live_.size());
    REQUIRE(stats.requested == requested);
    REQUIRE(stats.granted == granted);
    REQUIRE(stats.reserved >= granted);
    REQUIRE(stats.largest_free <= stats.free());
  }
  [[nodiscard]] std::uint64_t size() const { return live_.size(); }
  [[nodiscard]] const std::vector<arena_allocation>& live() const { return live_; }

 private:
  std::vector<arena_allocation> live_;
};

template <class Arena>
void behaves(std::uint64_t budget_bytes) {
  for (const auto seed : seeds(40)) {
    CAPTURE(seed);
    random_numbers random(seed);
    simulated memory(budget(budget_bytes));
    {
      auto arena = make<Arena>(memory);
      naive_arena naive;
      for (int i = 0; i < 250; ++i) {
        if (naive.size() == 0 || !random.once_in(i < 150 ? 3 : 2)) {
          const std::uint64_t bytes = any_size(random);
          const auto got = arena.allocate(bytes);
          if (got) {
            REQUIRE(got->bytes == bytes);
            naive.gave(*got);
            // All of it is memory, in the order of its addresses.
            for (std::uint64_t at = 0; at < bytes; at += 2 * mib)
              REQUIRE(memory.mapper().resolve(got->data + at).first != 0);
            REQUIRE(memory.mapper().resolve(got->data + bytes - 1).first != 0);
          } else {
            REQUIRE(got.code() == errc::out_of_bytes);
          }
        } else {
          const arena_allocation gone = naive.take(random.below(naive.size()));
          REQUIRE(arena.free(gone.handle));
          REQUIRE(arena.free(gone.handle).code() == errc::stale_handle);
        }
        if (random.once_in(60)) static_cast<void>(arena.trim());
        naive.check(arena.stats());
        REQUIRE(arena.stats().reserved == memory.used());
        if (i % 10 == 0) {
          REQUIRE(arena.audit() == std::vector<std::string>{});
          REQUIRE(memory.audit() == std::vector<std::string>{});
        }
        REQUIRE(memory.mapper().violations() == std::vector<std::string>{});
      }
      while (naive.size() != 0)
        REQUIRE(arena.free(naive.take(random.below(naive.size())).handle));
      REQUIRE(arena.audit() == std::vector<std::string>{});
      REQUIRE(arena.stats().requested == 0);
      REQUIRE(arena.stats().granted == 0);
      const std::uint64_t held = arena.stats().reserved;
      REQUIRE(arena.trim() == held);
      REQUIRE(memory.used() == 0);
      REQUIRE(arena.audit() == std::vector<std::string>{});
    }
    REQUIRE(memory.stats().ranges == 0);
    REQUIRE(memory.mapper().violations() == std::vector<std::string>{});
  }
}

/// Every allocation that succeeded, and the first refusal, of a fixed run of calls.
template <class Arena, class Check>
void survives_each_refusal(Check check) {
  bool finished = false;
  for (std::uint64_t nth = 1; !finished; ++nth) {
    CAPTURE(nth);
    REQUIRE(nth < 5000);
    simulated memory(budget(64 * mib));
    auto arena = make<Arena>(memory);
    random_numbers random(7);
    naive_arena naive;
    memory.mapper().refuse({.first = nth});
    for (int i = 0; i < 80; ++i) {
      if (naive.size() != 0 && random.once_in(2)) {
        REQUIRE(arena.free(naive.take(random.below(naive.size())).handle));
      } else {
        const std::uint64_t bytes = any_size(random);
        const arena_stats before = arena.stats();
        const std::uint64_t refused = memory.mapper().refused();
        const auto got = arena.allocate(bytes);
        if (got) {
          naive.gave(*got);
        } else if (memory.mapper().refused() != refused) {
          check(before, arena.stats());
        }
      }
      naive.check(arena.stats());
      REQUIRE(arena.audit() == std::vector<std::string>{});
      REQUIRE(memory.audit() == std::vector<std::string>{});
      REQUIRE(memory.mapper().violations() == std::vector<std::string>{});
    }
    finished = memory.mapper().refused() == 0;
    memory.mapper().refuse({});
    while (naive.size() != 0)
      REQUIRE(arena.free(naive.take(0).handle));
    static_cast<void>(arena.trim());
    REQUIRE(memory.used() == 0);
  }
}

}  // namespace

TEST_CASE("a size class arena returns the reported sizes, without overlap, and keeps exact account") {
  behaves<size_class_arena<simulated>>(256 * mib);
}
TEST_CASE("a caching split arena returns the reported sizes, without overlap, and keeps exact account") {
  behaves<caching_split_arena<simulated>>(256 * mib);
}
TEST_CASE("a stitched arena returns the reported sizes, without overlap, and keeps exact account") {
  behaves<stitched_arena<simulated>>(256 * mib);
}

TEST_CASE("if the system refuses any call, every arena continues with what it had") {
  const auto any = [](const arena_stats& before, const arena_stats& after) {
    CHECK(after.live == before.live);
    CHECK(after.reserved <= before.reserved);  // caches may have been given back on the way
  };
  survives_each_refusal<size_class_arena<simulated>>(any);
  survives_each_refusal<caching_split_arena<simulated>>(any);
  survives_each_refusal<stitched_arena<simulated>>([](const arena_stats& before, const arena_stats& after) {
    CHECK(after.reserved == before.reserved);
    CHECK(after.free() == before.free());
  });
}

TEST_CASE("a system that refuses every call from some point on breaks no arena, which recovers afterwards") {
  for (std::uint64_t nth = 1; nth < 160; ++nth) {
    CAPTURE(nth);
    simulated memory(budget(64 * mib));
    auto arena = make<stitched_arena<simulated>>(memory);
    random_numbers random(nth % 5);
    naive_arena naive;
    memory.mapper().refuse({.first = nth, .lasting = true});
    for (int i = 0; i < 120; ++i) {
      if (i == 100) memory.mapper().refuse({});
      if (naive.size() != 0 && random.once_in(2)) {
        REQUIRE(arena.free(naive.take(random.below(naive.size())).handle));
      } else if (const auto got = arena.allocate(any_size(random))) {
        naive.gave(*got);
      }
      naive.check(arena.stats());
      REQUIRE(arena.audit() == std::vector<std::string>{});
      REQUIRE(memory.mapper().violations() == std::vector<std::string>{});
    }
    while (naive.size() != 0)
      REQUIRE(arena.free(naive.take(0).handle));
    static_cast<void>(arena.trim());
    REQUIRE(memory.used() == 0);
    REQUIRE(arena.counts().ranges == 0);
  }
}

TEST_CASE("stitched allocations hold what was written to them, regardless of frees around them") {
  for (const auto seed : seeds(6)) {
    CAPTURE(seed);
    random_numbers random(seed);
    host_virtual_memory memory(budget(48 * mib));
    auto arena = make<stitched_arena<host_virtual_memory>>(memory);
    std::vector<std::pair<arena_allocation, std::uint64_t>> live;  // and its pattern
    const auto word = [](std::uint64_t pattern, std::uint64_t i) {
      return (pattern + i) * 0x9E37'79B9'7F4A'7C15ULL;
    };
    const auto verify_and_free = [&](std::size_t index) {
      const auto [one, pattern] = live[index];
      for (std::uint64_t i = 0; i < one.bytes / 8; ++i) {
        std::uint64_t found = 0;
        std::memcpy(&found, one.data + i * 8, 8);
        if (found != word(pattern, i)) FAIL("byte " << i * 8 << " of " << one.bytes << " was overwritten");
      }
      REQUIRE(arena.free(one.handle));
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
    };
    for (int i = 0; i < 150; ++i) {
      const std::uint64_t bytes = random.once_in(4) ? 8 + random.below(mib) : 8 + random.below(10 * mib);
      const auto got = arena.allocate(bytes);
      if (!got) {
        REQUIRE(got.code() == errc::out_of_bytes);
        verify_and_free(random.below(live.size()));
        continue;
      }
      const std::uint64_t pattern = random.next();
      for (std::uint64_t k = 0; k < bytes / 8; ++k) {
        const std::uint64_t value = word(pattern, k);
        std::memcpy(got->data + k * 8, &value, 8);
      }
      live.emplace_back(*got, pattern);
      if (random.once_in(3)) verify_and_free(random.below(live.size()));
      if (random.once_in(40)) static_cast<void>(arena.trim());
    }
    CHECK(arena.counts().stitched > 5);
    CHECK(arena.audit() == std::vector<std::string>{});
    while (!live.empty())
      verify_and_free(live.size() - 1);
  }
}

TEST_CASE("if free bytes are scattered, splitting fails, and stitching succeeds") {
  simulated for_split(budget(80 * mib));
  simulated for_stitched(budget(80 * mib));
  caching_split_arena<simulated> split(for_split, small_tables());
  stitched_arena<simulated> stitched(for_stitched, stitched_tables());
  const auto play = [](auto& arena) {
    std::vector<arena_handle> held;
    for (int i = 0; i < 8; ++i)
      held.push_back(arena.allocate(10 * mib - 512).value().handle);
    for (std::size_t i = 0; i < 8; i += 2)
      arena.free(held[i]).value();
    return arena.allocate(20 * mib);
  };
  const auto refused = play(split);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message() ==
        "arena: 20971520 bytes needed, but 0 left in its budget; release ranges, or raise the budget");
  CHECK(split.stats().free() == 40 * mib - 4 * 512);
  CHECK(split.stats().external_fragmentation() > 0.7);
  CHECK(play(stitched));
  CHECK(stitched.counts().stitched == 1);
  CHECK(stitched.stats().external_fragmentation() == 0);
}

TEST_CASE("a stitched arena serves its allocations in the order of its states") {
  simulated memory(budget(64 * mib));
  stitched_arena<simulated> arena(memory, stitched_tables());
  const auto counts = [&] { return arena.counts(); };
  std::vector<arena_allocation> held;
  for (int i = 0; i < 8; ++i)
    held.push_back(arena.allocate(8 * mib).value());
  CHECK(counts().grown == 8);
  CHECK(counts().stitched == 0);

  arena.free(held[1].handle).value();
  const auto same = arena.allocate(8 * mib - 5).value();  // S1, at home
  CHECK(same.data == held[1].data);
  CHECK(same.granted == 8 * mib);

  arena.free(same.handle).value();
  const auto part = arena.allocate(6 * mib).value();  // S2: no mapping
  const std::uint64_t calls = memory.mapper().calls();
  CHECK(part.data == held[1].data);
  CHECK(counts().split == 1);
  arena.free(part.handle).value();

  arena.free(held[3].handle).value();
  arena.free(held[5].handle).value();
  const auto joined = arena.allocate(20 * mib).value();  // S3
  CHECK(counts().stitched == 1);
  CHECK(memory.mapper().calls() == calls + 1 + 10 + 3);  // a reservation, ten chunks, access to three parts
  arena.free(joined.handle).value();
  CHECK(counts().idle == 1);
  const auto again = arena.allocate(20 * mib).value();  // S1, without a call
  CHECK(again.data == joined.data);
  CHECK(counts().reused == 1);
  CHECK(memory.mapper().calls() == calls + 14);

  const auto refused = arena.allocate(6 * mib);  // S5
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message() ==
        "arena: 2097152 bytes needed, but 0 left in its budget; release ranges, or raise the budget");
  CHECK(counts().refused == 1);
  arena.free(held[0].handle).value();
  CHECK(arena.allocate(6 * mib).has_value());
}

TEST_CASE("only missing chunks are created, and joined with free ones") {
  simulated memory(budget(64 * mib));
  stitched_arena<simulated> arena(memory, stitched_tables());
  const auto first = arena.allocate(4 * mib).value();
  const auto second = arena.allocate(4 * mib).value();
  arena.free(first.handle).value();
  CHECK(arena.allocate(10 * mib).has_value());
  CHECK(memory.used() == 14 * mib);
  CHECK(arena.counts().stitched == 1);
  CHECK(arena.free(second.handle));
}

TEST_CASE("chunks created in several gaps are all returned if a later call is refused") {
  for (std::uint64_t nth = 1;; ++nth) {
    CAPTURE(nth);
    simulated memory(budget(16 * mib));
    stitched_arena<simulated> arena(memory, stitched_tables());
    std::vector<arena_handle> held;
    for (int i = 0; i < 8; ++i)
      held.push_back(arena.allocate(2 * mib).value().handle);
    for (const std::size_t i : {std::size_t{1}, std::size_t{3}, std::size_t{5}})
      arena.free(held[i]).value();
    REQUIRE(arena.trim() == 6 * mib);
    memory.mapper().refuse({.first = nth});
    const auto got = arena.allocate(6 * mib);
    CHECK(arena.audit() == std::vector<std::string>{});
    CHECK(memory.mapper().violations() == std::vector<std::string>{});
    CHECK(got.has_value() == (memory.mapper().refused() == 0));
    CHECK(memory.used() == (got ? 16 : 10) * mib);
    CHECK(arena.stats().reserved == memory.used());
    if (got) {
      CHECK(nth == 17);  // three gaps of three calls; a reservation, three mappings with access
      break;
    }
  }
}

TEST_CASE("every chunk that an idle range maps is kept") {
  simulated memory(budget(16 * mib));
  stitched_arena<simulated> arena(memory, stitched_tables());
  std::vector<arena_handle> held;
  for (int i = 0; i < 8; ++i)
    held.push_back(arena.allocate(2 * mib).value().handle);
  arena.free(held[1]).value();
  arena.free(held[3]).value();
  arena.free(arena.allocate(4 * mib).value().handle).value();
  REQUIRE(arena.counts().idle == 1);
  memory.mapper().refuse({.first = 1});  // taking the idle range apart
  CHECK(arena.trim() == 0);
  CHECK(arena.stats().reserved == memory.used());
  CHECK(arena.audit() == std::vector<std::string>{});
  CHECK(arena.trim() == 4 * mib);
  CHECK(memory.used() == 12 * mib);
  CHECK(arena.audit() == std::vector<std::string>{});
}

TEST_CASE("small requests share chunks, and an emptied chunk is free for anything") {
  simulated memory(budget(2 * mib));
  stitched_arena<simulated> arena(memory, stitched_tables());
  std::vector<arena_handle> held;
  for (int i = 0; i < 4; ++i)
    held.push_back(arena.allocate(512 * 1024).value().handle);
  CHECK(arena.allocate(1).code() == errc::out_of_bytes);
  for (const arena_handle& each : held)
    arena.free(each).value();
  CHECK(arena.stats().largest_free == 2 * mib);
  CHECK(arena.allocate(2 * mib).has_value());
}

TEST_CASE("after everything is freed, each segment of a caching split arena is one free block") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    simulated memory(budget(512 * mib));
    caching_split_arena<simulated> arena(memory, small_tables());
    std::vector<arena_handle> held;
    for (int i = 0; i < 120; ++i) {
      if (const auto got = arena.allocate(any_size(random))) held.push_back(got->handle);
    }
    CHECK(arena.blocks() > arena.segments());
    while (!held.empty())
      free_any(arena, held, random);
    CHECK(arena.blocks() == arena.segments());
  }
}

TEST_CASE("after everything is freed, the chunks of a stitched arena are one run") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    simulated memory(budget(256 * mib));
    stitched_arena<simulated> arena(memory, stitched_tables());
    std::vector<arena_handle> held;
    for (int i = 0; i < 200; ++i) {
      if (const auto got = arena.allocate(any_size(random))) {
        held.push_back(got->handle);
      } else if (!held.empty()) {
        free_any(arena, held, random);
      }
    }
    for (const arena_handle& each : held)
      REQUIRE(arena.free(each));
    CHECK(arena.free_runs() == 1);
    CHECK(arena.stats().largest_free == arena.stats().reserved);
  }
}

TEST_CASE("the caching split arena rounds and reserves as its model allocator does") {
  simulated memory(budget(512 * mib));
  caching_split_arena<simulated> arena(memory, small_tables());
  const auto reserves = [&](std::uint64_t bytes) {
    const std::uint64_t before = memory.used();
    const auto got = arena.allocate(bytes).value();
    return std::pair{got.granted, memory.used() - before};
  };
  using rounded_and_reserved = std::pair<std::uint64_t, std::uint64_t>;
  CHECK(reserves(1) == rounded_and_reserved{512, 2 * mib});
  CHECK(reserves(mib) == rounded_and_reserved{mib, 0});
  CHECK(reserves(mib + 1) == rounded_and_reserved{mib + 512, 20 * mib});
  CHECK(reserves(10 * mib - 512) == rounded_and_reserved{10 * mib - 512, 0});
  CHECK(reserves(10 * mib) == rounded_and_reserved{10 * mib, 10 * mib});
  CHECK(reserves(11 * mib) == rounded_and_reserved{12 * mib, 12 * mib});  // a rest of 1 MiB stays with it
  CHECK(reserves(13 * mib - 512) == rounded_and_reserved{13 * mib - 512, 14 * mib});  // more is split off
}

TEST_CASE("a caching split arena returns empty segments before it refuses") {
  simulated memory(budget(40 * mib));
  caching_split_arena<simulated> arena(memory, small_tables());
  const auto a = arena.allocate(20 * mib).value();
  const auto b = arena.allocate(20 * mib).value();
  CHECK(arena.allocate(mib).code() == errc::out_of_bytes);
  arena.free(a.handle).value();
  CHECK(memory.used() == 40 * mib);  // kept
  CHECK(arena.allocate(16 * mib).has_value());
  CHECK(memory.used() == 40 * mib);  // cut, as more than 1 MiB is left
  arena.free(b.handle).value();
  CHECK(arena.allocate(512).has_value());  // the other pool: an empty segment makes room
  CHECK(memory.used() == 22 * mib);
}

TEST_CASE("the classes of a size class arena ascend, hold their size and waste less than an eighth") {
  using arena = size_class_arena<simulated>;
  std::uint64_t last = 0;
  for (std::uint32_t index = 0; arena::class_bytes(index) < max_arena_bytes; ++index) {
    const std::uint64_t bytes = arena::class_bytes(index);
    REQUIRE(bytes > last);
    REQUIRE(arena::class_of(bytes) == index);
    REQUIRE(arena::class_of(last + 1) == index);
    if (last >= 4096) REQUIRE((bytes - last) * 8 <= last);
    last = bytes;
  }
}

TEST_CASE("a size class arena moves whole slabs from class to class when it must") {
  simulated memory(budget(4 * mib));
  size_class_arena<simulated> arena(memory, small_tables());
  std::vector<arena_handle> held;
  for (int i = 0; i < 8; ++i)
    held.push_back(arena.allocate(512 * 1024).value().handle);
  CHECK(arena.allocate(4096).code() == errc::out_of_bytes);
  for (std::size_t i = 0; i < 4; ++i)
    arena.free(held[i]).value();
  CHECK(arena.allocate(4096).has_value());  // out of the slab that fell empty
  CHECK(arena.slabs() == 2);
  CHECK(arena.stats().reserved == 4 * mib);
}

TEST_CASE_TEMPLATE("every arena refuses impossible requests with the numbers", Arena,
                   size_class_arena<simulated>, caching_split_arena<simulated>, stitched_arena<simulated>) {
  simulated memory(budget(64 * mib));
  simulated other_memory(budget(64 * mib));
  auto arena = make<Arena>(memory);
  auto other = make<Arena>(other_memory);
  CHECK(arena.allocate(0).error().message() == "arena: an allocation of 0 bytes; request at least 1");
  CHECK(arena.allocate(max_arena_bytes + 1).error().message() ==
        "arena: bytes up to 281474976710657 requested, but it has 281474976710656; request fewer, or make it "
        "larger");
  CHECK(arena.allocate(max_arena_bytes).code() == errc::out_of_bytes);
  CHECK(arena.stats().refusals == 3);
  const auto got = arena.allocate(5).value();
  static_cast<void>(other.allocate(5).value());
  CHECK(arena.free({}).code() == errc::null_handle);
  CHECK(other.free(got.handle).code() == errc::foreign_handle);
  CHECK(arena.free(got.handle));
  CHECK(arena.free(got.handle).code() == errc::stale_handle);
  const auto again = arena.allocate(5).value();  // the same place, another life
  CHECK(again.data == got.data);
  CHECK(arena.free(got.handle).code() == errc::stale_handle);
  CHECK(arena.free(again.handle));
}

TEST_CASE_TEMPLATE("no arena allocates from the heap once it is built", Arena,
                   size_class_arena<host_virtual_memory>, caching_split_arena<host_virtual_memory>,
                   stitched_arena<host_virtual_memory>) {
  host_virtual_memory memory(budget(64 * mib));
  auto arena = make<Arena>(memory);
  random_numbers random(3);
  std::vector<arena_handle> held;
  held.reserve(400);
  const auto before = heap_allocations();
  for (int i = 0; i < 400; ++i) {
    if (const auto got = arena.allocate(any_size(random))) held.push_back(got->handle);
    if (held.size() > 5 || random.once_in(3)) {
      static_cast<void>(arena.free(held.back()));
      held.pop_back();
    }
  }
  static_cast<void>(arena.trim());
  CHECK(heap_allocations() == before);
}

TEST_CASE_TEMPLATE("an arena with full tables refuses, and has space again after a free", Arena,
                   size_class_arena<simulated>, caching_split_arena<simulated>, stitched_arena<simulated>) {
  simulated memory(budget(64 * mib));
  arena_options few = small_tables();
  few.max_blocks = 4;
  std::optional<Arena> arena;
  if constexpr (std::is_same_v<Arena, stitched_arena<simulated>>) {
    arena.emplace(memory, stitched_options{.arena = few});
  } else {
    arena.emplace(memory, few);
  }
  std::vector<arena_handle> held;
  result<arena_allocation> got = arena_allocation{};
  while ((got = arena->allocate(2 * mib)))
    held.push_back(got->handle);
  CHECK(got.code() == errc::table_full);
  CHECK(held.size() >= 3);
  CHECK(arena->audit() == std::vector<std::string>{});
  arena->free(held.back()).value();
  CHECK(arena->allocate(2 * mib).has_value());
}

TEST_CASE("idle stitched ranges make space for new ones when a table is full") {
  simulated memory(budget(64 * mib));
  stitched_options few = stitched_tables();
  SUBCASE("ranges") {
    few.max_stitched = 1;
  }
  SUBCASE("parts") {
    few.max_parts = 3;
  }
  SUBCASE("mappings") {
    few.max_stitched_chunks = 4;
  }
  stitched_arena<simulated> arena(memory, few);
  std::vector<arena_handle> held;
  for (int i = 0; i < 32; ++i)
    held.push_back(arena.allocate(2 * mib).value().handle);
  for (std::size_t i = 0; i < 32; i += 2)
    arena.free(held[i]).value();
  const auto two = arena.allocate(4 * mib).value();
  arena.free(two.handle).value();
  const auto three = arena.allocate(6 * mib).value();
  CHECK(arena.counts().evicted == 1);
  CHECK(arena.allocate(4 * mib).code() == errc::table_full);  // the live one stays
  CHECK(arena.audit() == std::vector<std::string>{});
  arena.free(three.handle).value();
  CHECK(arena.allocate(4 * mib).has_value());
  CHECK(memory.mapper().violations() == std::vector<std::string>{});
}

TEST_CASE("idle stitched ranges make space if the system maps no more") {
  simulated memory(simulated_mapper({.most_mappings = 32 + 4}), budget(64 * mib));
  stitched_arena<simulated> arena(memory, stitched_tables());
  std::vector<arena_handle> held;
  for (int i = 0; i < 32; ++i)
    held.push_back(arena.allocate(2 * mib).value().handle);
  for (std::size_t i = 0; i < 32; i += 2)
    arena.free(held[i]).value();
  const auto two = arena.allocate(4 * mib).value();
  arena.free(two.handle).value();
  CHECK(arena.allocate(6 * mib).has_value());
  CHECK(arena.counts().evicted == 1);
  const auto refused = arena.allocate(4 * mib);
  CHECK(refused.code() == errc::map_refused);
  CHECK(refused.error().index == simulated_mapper::error);
  CHECK(arena.audit() == std::vector<std::string>{});
}

TEST_CASE("a failed setup of an arena reports the reason, and leaks nothing") {
  simulated memory(budget(64 * mib, "vm"));
  CHECK_THROWS_WITH_AS(
      (stitched_arena<simulated>(memory, {.arena = small_tables(), .chunk_bytes = 3 * mib})),
      "arena: chunks of 3145728 bytes are not a multiple of the granularity, 2097152 bytes, and of "
      "1024",
      length_error);
  simulated tiny(budget(mib));
  CHECK_THROWS_WITH_AS(
      (stitched_arena<simulated>(tiny, stitched_tables())),
      "arena: a budget of 1048576 bytes makes 0 chunks of 2097152; their number must be 1 to 4294967294",
      length_error);
  CHECK(fail_each_allocation([&](const metadata_source& source) {
          arena_options options = small_tables();
          options.metadata = source;
          caching_split_arena<simulated> arena(memory, options);
        }) == 3);
  CHECK(fail_each_allocation([&](const metadata_source& source) {
          arena_options options = small_tables();
          options.metadata = source;
          size_class_arena<simulated> arena(memory, options);
        }) == 3);
  CHECK(fail_each_allocation([&](const metadata_source& source) {
          stitched_options options = stitched_tables();
          options.arena.metadata = source;
          stitched_arena<simulated> arena(memory, options);
        }) == 13);
  CHECK(memory.stats().ranges == 0);
}

TEST_CASE("the audit of a stitched arena names the wrong chunk, range and count") {
  using corrupt = testing_access;
  using arena_type = stitched_arena<simulated>;
  struct damage {
    void (*inflict)(arena_type&);
    std::vector<std::string> found;
  };
  const std::vector<damage> all{
      {[](arena_type& arena) { std::swap(corrupt::chunk_handle(arena, 1), corrupt::chunk_handle(arena, 4)); },
       {"arena: chunk 1 is not mapped at its address", "arena: chunk 4 is not mapped at its address",
        "arena: stitched range 0 does not map chunk 4"}},
      {[](arena_type& arena) { corrupt::lose_range(arena, 0); }, {"arena: allocation 5 lost its range"}},
      {[](arena_type& arena) { corrupt::miscount_mappings(arena); },
       {"arena: mappings of stitched ranges are miscounted"}},
      {[](arena_type& arena) { corrupt::chunks(arena).give_back({3, 1}); }, {"arena: chunk 3 has 1 users"}},
      {[](arena_type& arena) { corrupt::chunks(arena).add({6, 1}); },
       {"arena: chunk 6 is not mapped at its address",
        "arena: reserved is counted as 12582912, it adds up to 14680064"}},
      {[](arena_type& arena) { ++corrupt::allocation(arena, 1).requested; },
       {"arena: requested is counted as 10486760, it adds up to 10486761"}},
      {[](arena_type& arena) { corrupt::allocation(arena, 1).where = 0; },
       {"arena: chunk 0 has 2 users", "arena: chunk 1 has 0 users"}},
      {[](arena_type& arena) { corrupt::shift_home(arena, 2 * mib); },
       {"arena: a small block is outside its chunk 2", "arena: a small block is outside its chunk 2"}},
  };
  for (const damage& each : all) {
    CAPTURE(each.found.front());
    // Seven chunks: 1 and 3 hold a run each, 0, 4 and 5 are stitched, 2 is shared, 6 was never made.
    simulated memory(budget(14 * mib));
    arena_type arena(memory, stitched_tables());
    std::vector<arena_handle> held;
    for (int i = 0; i < 6; ++i)
      held.push_back(arena.allocate(2 * mib).value().handle);
    for (const std::size_t i : {0U, 2U, 4U, 5U})
      arena.free(held[i]).value();
    static_cast<void>(arena.allocate(6 * mib).value());
    static_cast<void>(arena.allocate(1000).value());
    REQUIRE(arena.audit() == std::vector<std::string>{});
    each.inflict(arena);
    CHECK(arena.audit() == each.found);
  }
}
