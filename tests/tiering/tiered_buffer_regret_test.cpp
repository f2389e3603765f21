/// How far from MIN a tiered buffer says it is.
#include <llmmem/eviction/min.hpp>
#include <llmmem/schedule/access_window.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/naive_min.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page = 256;

struct watched : tiered_traits {
  using observer = access_window;
};

template <class Eviction>
struct watched_world {
  using buffer_type = basic_tiered_buffer<watched, tier<host_space, Eviction>, tier<host_space>>;

  host_space above{{.budget = 1 << 20}};
  host_space beneath{{.budget = 1 << 20}};
  std::size_t capacity;
  buffer_type buffer;
  std::vector<chunk_handle> chunks;

  watched_world(std::size_t fit, std::size_t count, std::uint32_t events = 100'000)
      : capacity(fit),
        buffer(access_window(events), {}, {above, fit * page, 64}, {beneath, 2 * count * page, 64}) {
    for (std::size_t i = 0; i < count; ++i) {
      chunks.push_back(buffer.create(page).value());
      static_cast<void>(buffer.write(chunks.back()).value());
    }
    REQUIRE(buffer.flush());
    buffer.observer().clear();
  }

  void access(std::uint32_t chunk) { static_cast<void>(buffer.read(chunks[chunk]).value()); }
  [[nodiscard]] std::set<std::uint32_t> resident() const {
    std::set<std::uint32_t> found;
    for (std::uint32_t i = 0; i < chunks.size(); ++i) {
      if (buffer.tier_of(chunks[i]).value() == 0) found.insert(i);
    }
    return found;
  }
  [[nodiscard]] access_regret regret() const {
    return buffer.observer().regret(buffer.stats().tiers[0].budget);
  }
  [[nodiscard]] std::uint64_t brought() const { return buffer.stats().moved.links[0].onboard.bytes; }
};

[[nodiscard]] std::vector<std::uint32_t> random_accesses(std::uint64_t seed, std::uint32_t chunks) {
  random_numbers random(seed);
  std::vector<std::uint32_t> made(100 + random.below(200U));
  const bool loops = random.once_in(3);
  for (std::size_t i = 0; i < made.size(); ++i)
    made[i] = loops ? static_cast<std::uint32_t>(i % chunks) : random.below(chunks);
  return made;
}

/// One of the calls that make chunks come, go and change.
template <class Buffer>
void any_step(Buffer& buffer, chunk_handle& chunk, random_numbers& random) {
  switch (random.below(10U)) {
    case 0:
      REQUIRE(buffer.evict(chunk));
      break;
    case 1:
      static_cast<void>(buffer.discard(chunk));
      break;
    case 2:
      static_cast<void>(buffer.prefetch(chunk));
      break;
    case 3:
      static_cast<void>(buffer.resize(chunk, 64 + 64 * random.below(4U)));
      break;
    case 4: {
      const auto bytes = buffer.bytes(chunk).value();
      REQUIRE(buffer.remove(chunk));
      chunk = buffer.create(bytes).value();
      break;
    }
    case 5:
      buffer.progress();
      break;
    case 6: {
      const auto held = buffer.read(chunk);
      const auto again = buffer.read(chunk);
      break;
    }
    case 7:
      static_cast<void>(buffer.update(chunk));
      break;
    default:
      if (!buffer.read(chunk)) static_cast<void>(buffer.write(chunk));
  }
}

}  // namespace

TEST_CASE("a buffer's regret under LRU is the bytes brought up beyond MIN") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    const std::size_t capacity = 1 + seed % 9;
    const auto chunks = static_cast<std::uint32_t>(1 + seed % 13);
    watched_world<lru_eviction> world(capacity, chunks);
    const std::set<std::uint32_t> resident = world.resident();
    const std::vector<std::uint32_t> accesses = random_accesses(seed, chunks);
    for (const std::uint32_t each : accesses)
      world.access(each);
    const access_regret found = world.regret();
    CHECK(found.accesses == accesses.size());
    CHECK(found.moved_bytes == world.brought());
    CHECK(found.min_bytes == naive_min_misses(accesses, capacity, resident) * page);
  }
}

TEST_CASE("a window covers the last part of a long run") {
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    watched_world<lru_eviction> world(4, 9, 64);
    const std::vector<std::uint32_t> accesses = random_accesses(seed, 9);
    const std::size_t told = 16;  // of at most four events each
    for (std::size_t i = 0; i + told < accesses.size(); ++i)
      world.access(accesses[i]);
    world.buffer.observer().clear();
    const std::set<std::uint32_t> resident = world.resident();
    const std::vector<std::uint32_t> last(accesses.end() - told, accesses.end());
    const std::uint64_t before = world.brought();
    for (const std::uint32_t each : last)
      world.access(each);
    const access_regret found = world.regret();
    CHECK(found.accesses == told);
    CHECK(found.moved_bytes == world.brought() - before);
    CHECK(found.min_bytes == naive_min_misses(last, 4, resident) * page);
  }
}

TEST_CASE("a buffer that knows every next use has no regret") {
  for (const auto seed : seeds(30)) {
    CAPTURE(seed);
    const std::size_t capacity = 2 + seed % 7;
    const auto chunks = static_cast<std::uint32_t>(capacity + 1 + seed % 5);
    watched_world<min_eviction> world(capacity, chunks);
    const std::vector<std::uint32_t> accesses = random_accesses(seed, chunks);
    const auto next_use = [&](std::uint32_t chunk, std::size_t from) {
      const auto at = std::find(accesses.begin() + static_cast<std::ptrdiff_t>(from), accesses.end(), chunk);
      return at == accesses.end() ? access_hint::never : static_cast<std::uint64_t>(at - accesses.begin());
    };
    for (std::uint32_t i = 0; i < chunks; ++i)
      REQUIRE(world.buffer.expect(world.chunks[i], next_use(i, 0)));
    for (std::size_t i = 0; i < accesses.size(); ++i) {
      REQUIRE(world.buffer.expect(world.chunks[accesses[i]], next_use(accesses[i], i + 1)));
      world.access(accesses[i]);
    }
    const access_regret found = world.regret();
    CHECK(found.moved_bytes == world.brought());
    CHECK(found.bytes() == 0);
    CHECK(found.ratio() == 1.0);
  }
}

TEST_CASE(
    "evictions, discards, removals, resizes and clones are reported, and the count is at least the minimum") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    watched_world<lru_eviction> world(6, 8, 1 + random.below(300U));
    auto& buffer = world.buffer;
    for (int step = 0; step < 300; ++step) {
      chunk_handle& chunk = world.chunks[random.below(world.chunks.size())];
      any_step(buffer, chunk, random);
      const chunk_handle other = world.chunks[random.below(world.chunks.size())];
      if (random.once_in(6) && other != chunk) {
        REQUIRE(buffer.remove(chunk));
        chunk = buffer.clone(other).value();
      } else if (random.once_in(4)) {
        const auto held = buffer.read(chunk);
        static_cast<void>(buffer.update(other));
      }
      const access_regret now = world.regret();
      REQUIRE(now.moved_bytes >= now.min_bytes);
    }
  }
}

TEST_CASE("simultaneous leases of one chunk count as one access") {
  watched_world<lru_eviction> world(2, 2);
  {
    const auto one = world.buffer.read(world.chunks[0]).value();
    const auto two = world.buffer.read(world.chunks[0]).value();
  }
  CHECK(world.regret().accesses == 1);
  CHECK(world.buffer.observer().size() == 2);
}

TEST_CASE("an observer learns from its calls alone which chunks are in tier 0 and leased") {
  struct knows_all {
    std::map<std::uint32_t, std::uint64_t> resident{};
    std::set<std::uint32_t> leased{};
    int wrong = 0;

    void expect(bool right) noexcept { wrong += right ? 0 : 1; }
    void on_leased(chunk_id chunk, std::uint64_t bytes, access_mode mode) noexcept {
      if (mode == access_mode::write) resident.try_emplace(to_index(chunk), bytes);
      expect(resident.contains(to_index(chunk)) && resident[to_index(chunk)] == bytes);
      expect(leased.insert(to_index(chunk)).second);
    }
    void on_released(chunk_id chunk, std::uint64_t bytes) noexcept {
      expect(leased.erase(to_index(chunk)) == 1 && resident[to_index(chunk)] == bytes);
    }
    void on_arrived(chunk_id chunk, std::uint64_t bytes) noexcept {
      expect(resident.try_emplace(to_index(chunk), bytes).second);
    }
    void on_made(chunk_id chunk, std::uint64_t bytes) noexcept { on_arrived(chunk, bytes); }
    void on_left(chunk_id chunk, std::uint64_t bytes) noexcept {
      expect(resident[to_index(chunk)] == bytes && resident.erase(to_index(chunk)) == 1);
      expect(!leased.contains(to_index(chunk)));
    }
  };
  struct telling : tiered_traits {
    using observer = knows_all;
  };
  for (const bool clones : {false, true}) {
    for (const auto seed : seeds(40)) {
      CAPTURE(clones);
      CAPTURE(seed);
      random_numbers random(seed);
      host_space above({.budget = 1 << 20});
      host_space between({.budget = 1 << 20});
      host_space beneath({.budget = 1 << 20});
      basic_tiered_buffer<telling, tier<host_space>, tier<host_space>, tier<host_space>> buffer(
          {}, {above, 6 * page, 64}, {between, 12 * page, 64}, {beneath, 20 * page, 64});
      std::vector<chunk_handle> chunks;
      for (int i = 0; i < 12; ++i)
        chunks.push_back(buffer.create(page).value());
      for (int step = 0; step < 300; ++step) {
        chunk_handle& chunk = chunks[random.below(chunks.size())];
        any_step(buffer, chunk, random);
        if (clones && random.once_in(4)) {
          const chunk_handle of = chunks[random.below(chunks.size())];
          if (of != chunk) {
            REQUIRE(buffer.remove(chunk));
            chunk = buffer.clone(of).value();
          }
        }
        const knows_all& told = buffer.observer();
        REQUIRE(told.wrong == 0);
        REQUIRE(told.leased.empty());
        // Clones have numbers of their own.
        for (const chunk_handle each : chunks) {
          const auto at = buffer.tier_of(each);
          if (!clones) REQUIRE(told.resident.contains(each.slot) == (at && *at == 0));
        }
      }
    }
  }
}

TEST_CASE("a window counts as metadata of its buffer, and an unused one costs nothing") {
  const watched_world<lru_eviction> world(2, 2, 1000);
  const watched_world<lru_eviction> smaller(2, 2, 500);
  CHECK(world.buffer.stats().metadata_bytes - smaller.buffer.stats().metadata_bytes == 8000);
  struct plain {
    using clock = steady_meter_clock;
    using observer = ignore_accesses;
  };
  CHECK(sizeof(basic_tiered_buffer<watched, tier<host_space>, tier<host_space>>) -
            sizeof(basic_tiered_buffer<plain, tier<host_space>, tier<host_space>>) ==
        sizeof(access_window));
}
