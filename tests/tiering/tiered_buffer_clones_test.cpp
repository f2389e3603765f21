/// Clones: what they share, when they part, and what that takes.
#include <llmmem/space/host.hpp>
#include <llmmem/testing/simulated_space.hpp>
#include <llmmem/tiered_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t page = 256;

/// Pages of host memory over host memory: every copy is over when it has begun.
struct two_tiers {
  host_space space{{.budget = 1 << 20}};
  tiered_buffer<host_space, host_space> buffer;

  explicit two_tiers(std::uint64_t top, std::uint64_t beneath = 64, tiered_options options = {})
      : buffer(std::move(options), {space, top * page, 64}, {space, beneath * page, 64}) {}
  ~two_tiers() { audited(); }
  two_tiers(const two_tiers&) = delete;
  two_tiers& operator=(const two_tiers&) = delete;

  void audited() const {
    for (const std::string& broken : buffer.audit())
      FAIL_CHECK(broken);
  }
  void fill(chunk_handle chunk, int value) {
    auto lease = buffer.write(chunk).value();
    std::ranges::fill(lease.span(), static_cast<std::byte>(value));
  }
  [[nodiscard]] chunk_handle filled(int value) {
    const chunk_handle made = buffer.create(page).value();
    fill(made, value);
    return made;
  }
  void change(chunk_handle chunk, std::uint64_t at, int value) {
    buffer.update(chunk, at, 1).value().span()[at] = static_cast<std::byte>(value);
  }
  [[nodiscard]] bool holds(chunk_handle chunk, int value) {
    const auto lease = buffer.read(chunk).value();
    return std::ranges::all_of(lease.span(),
                               [value](std::byte each) { return each == static_cast<std::byte>(value); });
  }
  /// Bytes taken of both tiers.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> used() const {
    const auto now = buffer.stats();
    return {now.tiers[0].used, now.tiers[1].used};
  }
};

using taken = std::pair<std::uint64_t, std::uint64_t>;

}  // namespace

TEST_CASE("exactly the calls that may change a chunk update its last change") {
  two_tiers w(4);
  const chunk_handle one = w.filled(1);
  const chunk_handle two = w.filled(2);
  const auto last_of = [&](chunk_handle chunk) { return w.buffer.last_change(chunk).value(); };
  CHECK(w.buffer.last_change({}).code() == errc::null_handle);
  CHECK(last_of(two) == w.buffer.changes());
  CHECK(last_of(one) < last_of(two));
  std::uint64_t before = last_of(one);
  const chunk_handle twin = w.buffer.clone(one).value();
  CHECK(w.holds(one, 1));
  REQUIRE(w.buffer.flush());
  REQUIRE(w.buffer.evict(one));
  REQUIRE(w.buffer.prefetch(one));
  CHECK(last_of(one) == before);
  CHECK(last_of(twin) == before);
  const auto changes = [&](chunk_handle chunk, auto&& work) {
    before = last_of(chunk);
    work();
    CHECK(last_of(chunk) > before);
    CHECK(last_of(chunk) == w.buffer.changes());
  };
  changes(one, [&] { w.change(one, 0, 3); });  // it parts
  CHECK(last_of(twin) < last_of(one));
  changes(one, [&] { w.fill(one, 4); });  // in place
  changes(one, [&] { REQUIRE(w.buffer.resize(one, page / 2)); });
  const chunk_handle third = w.buffer.clone(twin).value();
  changes(third, [&] { REQUIRE(w.buffer.resize(third, page / 2)); });
  const chunk_handle fourth = w.buffer.clone(twin).value();
  changes(fourth, [&] { REQUIRE(w.buffer.discard(fourth)); });
  changes(third, [&] { REQUIRE(w.buffer.discard(third)); });
  before = w.buffer.changes();
  CHECK(!w.buffer.write({}));
  {
    const auto held = w.buffer.read(two).value();
    CHECK(w.buffer.update(two).code() == errc::chunk_leased);  // refused: nothing changed
  }
  CHECK(w.buffer.changes() == before);
  two_tiers other(4);
  CHECK(w.buffer.identity() != other.buffer.identity());
}

TEST_CASE("clones of clones take no space, and count as one chunk in every tier") {
  two_tiers world(2, 1);
  auto& buffer = world.buffer;
  std::vector<chunk_handle> chunks{world.filled(1)};
  for (int i = 0; i < 9; ++i)
    chunks.push_back(buffer.clone(chunks[static_cast<std::size_t>(i / 2)]).value());
  CHECK(world.used() == taken{page, page});
  CHECK(buffer.stats().shared == 10);
  const auto first = buffer.read(chunks.front()).value();
  const auto last = buffer.read(chunks.back()).value();
  CHECK(first.span().data() == last.span().data());
  CHECK(buffer.bytes(chunks[5]).value() == page);
  CHECK(buffer.stats().parted_bytes == 0);
}

TEST_CASE("a write parts without copying, and the clone keeps what was shared") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  REQUIRE(buffer.flush(chunk));
  const chunk_handle twin = buffer.clone(chunk).value();
  const auto before = buffer.stats();
  world.fill(twin, 2);
  CHECK(world.used() == taken{2 * page, 2 * page});
  CHECK(buffer.stats().shared == 0);
  CHECK(buffer.stats().parted_bytes == 0);
  CHECK(buffer.stats().moved.links == before.moved.links);
  CHECK(world.holds(chunk, 1));
  CHECK(world.holds(twin, 2));
}

TEST_CASE("an update parts with a copy in tier 0, all of which moves down") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  REQUIRE(buffer.flush(chunk));
  REQUIRE(buffer.evict(chunk));
  const chunk_handle twin = buffer.clone(chunk).value();
  world.change(twin, 7, 2);
  CHECK(buffer.stats().parted_bytes == page);
  CHECK(buffer.stats().moved.links[0].onboard.bytes == page);
  const auto before = buffer.stats().moved.links[0].offload.bytes;
  REQUIRE(buffer.flush());
  CHECK(buffer.stats().moved.links[0].offload.bytes - before == page);
  REQUIRE(buffer.evict(twin));
  {
    const auto lease = buffer.read(twin).value();
    CHECK(lease.span()[7] == std::byte{2});
    CHECK(lease.span()[8] == std::byte{1});
  }
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("the last sharer changes in place") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  const chunk_handle twin = buffer.clone(chunk).value();
  const chunk_handle third = buffer.clone(twin).value();
  world.fill(chunk, 2);
  REQUIRE(buffer.remove(third));
  CHECK(buffer.stats().shared == 0);
  const auto before = world.used();
  world.change(twin, 0, 3);
  CHECK(world.used() == before);
  CHECK(buffer.stats().parted_bytes == 0);
  CHECK(buffer.read(third).code() == errc::stale_handle);
  CHECK(world.holds(chunk, 2));
}

TEST_CASE("removing one clone keeps the others, and the last one frees the space") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  const chunk_handle twin = buffer.clone(chunk).value();
  REQUIRE(buffer.remove(chunk));
  world.audited();
  CHECK(world.holds(twin, 1));
  CHECK(world.used() == taken{page, page});
  REQUIRE(buffer.remove(twin));
  CHECK(world.used() == taken{0, 0});
}

TEST_CASE("a lease of one clone blocks its own conflicting calls and eviction, and none of another's") {
  two_tiers world(4, 64, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  const chunk_handle twin = buffer.clone(chunk).value();
  {
    const auto held = buffer.read(chunk).value();
    CHECK(buffer.write(chunk).error().message() ==
          "state: chunk 0 is leased 1 times; end these leases first");
    CHECK(buffer.remove(chunk).code() == errc::chunk_leased);
    CHECK(buffer.discard(chunk).code() == errc::chunk_leased);
    CHECK(buffer.resize(chunk, 1).code() == errc::chunk_leased);
    CHECK(buffer.evict(twin).error().message() == "state: chunk 1 is leased 1 times; end these leases first");
    const auto changing = buffer.update(twin).value();
    CHECK(changing.span()[0] == std::byte{1});
    changing.span()[0] = std::byte{9};
    CHECK(held.span()[0] == std::byte{1});
    CHECK(buffer.clone(twin).code() == errc::chunk_leased);
    const chunk_handle another = buffer.clone(chunk).value();
    CHECK(buffer.read(another).value().span().data() == held.span().data());
    REQUIRE(buffer.remove(another));
  }
  REQUIRE(buffer.evict(twin));
  CHECK(world.holds(chunk, 1));
  CHECK(buffer.read(twin).value().span()[0] == std::byte{9});
}

TEST_CASE("a discarded or resized clone has its own place and size, and the other keeps its contents") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  const chunk_handle twin = buffer.clone(chunk).value();
  const chunk_handle third = buffer.clone(chunk).value();
  REQUIRE(buffer.discard(twin));
  CHECK(buffer.read(twin).code() == errc::no_contents);
  for (const std::uint64_t bytes : {2 * page, page / 2}) {
    REQUIRE(buffer.resize(third, bytes));
    CHECK(buffer.bytes(third).value() == bytes);
    CHECK(buffer.bytes(chunk).value() == page);
    const auto lease = buffer.read(third).value();
    CHECK(std::ranges::all_of(lease.span().first(std::min(bytes, page)),
                              [](std::byte each) { return each == std::byte{1}; }));
  }
  CHECK(buffer.stats().parted_bytes == page);
  CHECK(world.holds(chunk, 1));
  CHECK(buffer.stats().shared == 0);
}

TEST_CASE("a chunk without contents can have clones") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = buffer.create(page).value();
  const chunk_handle twin = buffer.clone(chunk).value();
  CHECK(world.used() == taken{0, page});
  CHECK(buffer.update(twin).code() == errc::no_contents);
  REQUIRE(buffer.resize(twin, 3));
  world.fill(chunk, 1);
  CHECK(buffer.read(twin).code() == errc::no_contents);
  CHECK(buffer.bytes(twin).value() == 3);
  world.fill(twin, 2);
  CHECK(world.holds(chunk, 1));
}

TEST_CASE("moving one clone moves the shared contents") {
  two_tiers world(4);
  auto& buffer = world.buffer;
  const chunk_handle chunk = world.filled(1);
  const chunk_handle twin = buffer.clone(chunk).value();
  REQUIRE(buffer.flush(twin));
  REQUIRE(buffer.evict(chunk));
  CHECK(buffer.tier_of(twin).value() == 1);
  REQUIRE(buffer.prefetch(twin));
  buffer.progress();
  CHECK(buffer.tier_of(chunk).value() == 0);
  CHECK(buffer.execute(chunk, plan_operation::drop, 0) == llmmem::tiering::step_outcome::done);
  CHECK(buffer.execute(twin, plan_operation::drop, 0) == llmmem::tiering::step_outcome::unneeded);
  CHECK(buffer.stats().moved.links[0].offload.bytes == page);
}

TEST_CASE("a parted clone keeps the count of leases of the shared contents") {
  host_space space({.budget = 1 << 20});
  tiered_buffer<tier<host_space, lru_eviction, write_through_selective<3>>, host_space> buffer(
      {}, {space, 4 * page, 64}, {space, 16 * page, 64});
  const chunk_handle chunk = buffer.create(page).value();
  static_cast<void>(buffer.write(chunk).value());
  const chunk_handle twin = buffer.clone(chunk).value();
  static_cast<void>(buffer.read(chunk).value());
  static_cast<void>(buffer.update(twin).value());
  buffer.progress();
  CHECK(buffer.stats().moved.links[0].offload.bytes == page);
}

TEST_CASE("a parting that is refused leaves both as they were, and keeps no place") {
  SUBCASE("no place in the last tier") {
    two_tiers world(4, 1, {.name = "state"});
    auto& buffer = world.buffer;
    const chunk_handle chunk = world.filled(1);
    const chunk_handle twin = buffer.clone(chunk).value();
    const auto before = world.used();
    const std::string text =
        "state: tier 1: 256 bytes needed, but 0 left in its budget; release ranges, or raise the budget";
    CHECK(buffer.write(twin).error().message() == text);
    CHECK(buffer.update(twin).error().message() == text);
    CHECK(buffer.discard(twin).error().message() == text);
    CHECK(buffer.resize(twin, 2 * page).code() == errc::out_of_bytes);
    CHECK(world.used() == before);
    CHECK(buffer.stats().shared == 2);
    REQUIRE(buffer.remove(chunk));
    world.fill(twin, 2);
  }
  SUBCASE("no space in tier 0 for both") {
    two_tiers world(1);
    auto& buffer = world.buffer;
    const chunk_handle chunk = world.filled(1);
    const chunk_handle twin = buffer.clone(chunk).value();
    CHECK(buffer.update(twin).code() == errc::out_of_bytes);
    CHECK(buffer.resize(twin, page / 2).code() == errc::out_of_bytes);
    {
      const auto held = buffer.read(chunk).value();
      CHECK(buffer.write(twin).code() == errc::out_of_bytes);
    }
    CHECK(world.used() == taken{page, page});
    CHECK(buffer.stats().shared == 2);
    CHECK(world.holds(twin, 1));
    world.fill(twin, 2);  // what is shared goes down for it
    CHECK(world.holds(chunk, 1));
    CHECK(world.holds(twin, 2));
  }
  SUBCASE("no free name") {
    two_tiers world(4, 64, {.max_chunks = 2, .name = "state"});
    const chunk_handle chunk = world.filled(1);
    const chunk_handle twin = world.buffer.clone(chunk).value();
    CHECK(world.buffer.clone(twin).error().message() ==
          "state: the table of chunks is full: 1 entries needed, 0 free; raise tiered_options::max_chunks");
    CHECK(world.buffer.create(page).code() == errc::table_full);
    world.fill(chunk, 2);
    CHECK(world.holds(twin, 1));
  }
}

TEST_CASE("texts name an existing chunk, regardless of which clones have parted or ended") {
  two_tiers world(4, 64, {.name = "state"});
  auto& buffer = world.buffer;
  const chunk_handle chunk = buffer.create(page).value();
  const chunk_handle twin = buffer.clone(chunk).value();
  CHECK(buffer.read(twin).error().message() == "state: chunk 1 has no contents; write all of it first");
  CHECK(buffer.tier_of(chunk).error().message() == "state: chunk 0 has no contents; write all of it first");
  REQUIRE(buffer.remove(twin));
  CHECK(buffer.read(chunk).error().message() == "state: chunk 0 has no contents; write all of it first");
}

TEST_CASE("clones take space only for differences: a stash of versions takes one place per changed chunk") {
  for (const auto seed : seeds(20)) {
    CAPTURE(seed);
    random_numbers random(seed);
    two_tiers world(4);
    // The oracle: contents by chunk; places are their distinct origins.
    struct version {
      chunk_handle chunk;
      int value;
      int origin;
    };
    std::vector<version> all{{world.filled(0), 0, 0}};
    int origins = 1;
    for (int step = 0; step < 120; ++step) {
      const std::size_t at = random.below(all.size());
      const version& v = all[at];
      const auto sharers = std::ranges::count(all, v.origin, &version::origin);
      if (all.size() < 30 && random.once_in(2)) {
        all.push_back({world.buffer.clone(v.chunk).value(), v.value, v.origin});
      } else if (all.size() > 1 && random.once_in(4)) {
        REQUIRE(world.buffer.remove(v.chunk));
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(at));
      } else {
        world.fill(v.chunk, step);
        all[at].value = step;
        if (sharers > 1) all[at].origin = origins++;
      }
      std::vector<int> places;
      std::uint64_t shared = 0;
      for (const version& each : all) {
        places.push_back(each.origin);
        shared += std::ranges::count(all, each.origin, &version::origin) > 1 ? 1U : 0U;
      }
      std::ranges::sort(places);
      const auto distinct = static_cast<std::uint64_t>(
          std::distance(places.begin(), std::unique(places.begin(), places.end())));
      REQUIRE(world.buffer.stats().tiers[1].used == distinct * page);
      REQUIRE(world.buffer.stats().shared == shared);
      const version& seen = all[random.below(all.size())];
      REQUIRE(world.holds(seen.chunk, seen.value));
      world.audited();
    }
  }
}

TEST_CASE("a tier 0 that the host cannot access parts by its own copies") {
  llmmem::testing::virtual_clock clock;
  llmmem::testing::simulated_space device(clock, {.budget = 4 * page});
  host_space beneath({.budget = 16 * page});
  tiered_buffer<llmmem::testing::simulated_space, host_space> buffer({}, {device, 4 * page, 64},
                                                                     {beneath, 16 * page, 64});
  const chunk_handle chunk = buffer.create(page).value();
  const std::vector<std::byte> ones(page, std::byte{1});
  const std::vector<std::byte> twos(page / 2, std::byte{2});
  {
    const auto lease = buffer.write(chunk).value();
    device.copy_in_async(lease.range(), ones, {}).value().wait();
  }
  const chunk_handle twin = buffer.clone(chunk).value();
  {
    const auto lease = buffer.update(twin, 0, page / 2).value();
    device.copy_in_async(lease.range().subrange(0, page / 2).value(), twos, {}).value().wait();
  }
  std::vector<std::byte> seen(page);
  device.copy_out_async(seen, buffer.read(twin).value().range(), {}).value().wait();
  CHECK(std::ranges::equal(std::span(seen).first(page / 2), twos));
  CHECK(std::ranges::equal(std::span(seen).subspan(page / 2), std::span(ones).subspan(page / 2)));
  device.copy_out_async(seen, buffer.read(chunk).value().range(), {}).value().wait();
  CHECK(seen == ones);
  CHECK(buffer.stats().parted_bytes == page);
  CHECK(buffer.audit().empty());
}
