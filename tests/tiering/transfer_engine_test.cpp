/// The engine of transfers against plain copies of bytes.
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/detail/transfer_engine.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/tiered_objects.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::nth;

namespace {

using two = tiered_objects<tier<host_space>, tier<host_space>>;
using bytes = std::vector<std::byte>;

bytes seen(const detail::tier_copy& copy) {
  return {copy.data, copy.data + object_page};
}

/// A chunk of one page with a valid copy in tier 0 that is all dirty.
std::uint32_t make_dirty(two& world, int value) {
  const std::uint32_t slot = world.make();
  detail::tier_copy& top = world.copy(slot, 0);
  REQUIRE(world.parts.stack.take(nth<0>, top, object_page).has_value());
  world.parts.stack.become_valid(nth<0>, slot);
  std::fill_n(top.data, object_page, static_cast<std::byte>(value));
  top.dirty.add({0, object_page});
  return slot;
}

}  // namespace

TEST_CASE("fetched bytes equal stored ones, and only the dirty units move if a copy is below") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    two world({.max_chunks = 4}, 4, 4);
    auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
    const std::uint32_t slot = make_dirty(world, 1);
    detail::tier_copy& top = world.copy(slot, 0);
    detail::tier_copy& beneath = world.copy(slot, 1);
    REQUIRE(engine.begin_store(nth<0>, slot, false, llmmem::transfer::urgency::demand).is_done());
    REQUIRE(engine.complete(chunks[slot].transfer).has_value());
    bytes lower = seen(top);
    std::uint64_t moved = object_page;
    for (int step = 0; step < 20; ++step) {
      // Bytes change that are marked, and bytes that are not: only units of 64 with a mark go down.
      bytes expected = lower;
      const std::uint64_t begin = random.below(object_page);
      const std::uint64_t end = begin + 1 + random.below(object_page - begin);
      for (std::uint64_t i = 0; i < object_page; ++i)
        top.data[i] = static_cast<std::byte>(random.next());
      top.dirty.add({begin, end});
      const std::uint64_t from = begin / 64 * 64;
      const std::uint64_t to = (end + 63) / 64 * 64;
      std::copy_n(top.data + from, to - from, expected.begin() + static_cast<std::ptrdiff_t>(from));
      moved += to - from;
      REQUIRE(engine.begin_store(nth<0>, slot, false, llmmem::transfer::urgency::demand).is_done());
      const std::uint32_t id = chunks[slot].transfer;
      REQUIRE(engine.is_under_way(id));
      REQUIRE(top.pins == 1);
      REQUIRE(beneath.pins == 1);
      REQUIRE(engine.complete(id).has_value());
      REQUIRE(top.dirty.empty());
      REQUIRE(top.pins + beneath.pins == 0);
      lower = seen(beneath);
      REQUIRE(lower == expected);
    }
    stack.drop_clean(nth<0>, slot);
    REQUIRE(stack.take(nth<0>, top, object_page).has_value());
    const detail::attempt begun = engine.begin_fetch(nth<0>, slot, llmmem::transfer::urgency::demand);
    REQUIRE(begun.on == chunks[slot].transfer);
    REQUIRE(engine.complete(begun.on).has_value());
    CHECK(seen(top) == lower);
    CHECK(engine.is_idle());
    const auto flow = world.parts.stats().moved.links[0];
    CHECK(flow[link_direction::offload].bytes == moved);
    CHECK(flow[link_direction::onboard].bytes == object_page);
    CHECK(world.audit().empty());
  }
}

TEST_CASE(
    "a store whose copy will leave counts as leaving until it ends, and then the copy no longer exists") {
  two world({.max_chunks = 4}, 4, 4);
  auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
  const std::uint32_t slot = make_dirty(world, 7);
  REQUIRE(engine.begin_store(nth<0>, slot, false, llmmem::transfer::urgency::demand).is_done());
  CHECK(stack.leaving(0) == 0);
  engine.let_drop(chunks[slot].transfer);
  CHECK(stack.leaving(0) == object_page);
  CHECK(engine.touching(0) == chunks[slot].transfer);
  CHECK(engine.complete(chunks[slot].transfer).has_value());
  CHECK(stack.leaving(0) == 0);
  CHECK(world.copy(slot, 0).granted == 0);
  CHECK(seen(world.copy(slot, 1)) == bytes(object_page, std::byte{7}));
  CHECK(world.parts.stats().tiers[0].write_backs == 1);
}

TEST_CASE("at most as many transfers begin as the table has, and each end lets another begin") {
  constexpr std::uint32_t most = 3;
  two world({.max_chunks = 8, .max_transfers = most}, 8, 8);
  auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
  std::vector<std::uint32_t> slots;
  for (int i = 0; i < 6; ++i)
    slots.push_back(make_dirty(world, i));
  for (std::uint32_t i = 0; i < most; ++i) {
    REQUIRE(engine.can_begin(nth<0>).is_done());
    REQUIRE(engine.begin_store(nth<0>, slots[i], false, llmmem::transfer::urgency::demand).is_done());
  }
  const detail::attempt refused = engine.can_begin(nth<0>);
  CHECK(refused.how == detail::attempt::kind::blocked);
  REQUIRE(engine.is_under_way(refused.on));
  CHECK(engine.complete(refused.on).has_value());
  CHECK(engine.can_begin(nth<0>).is_done());
  for (const std::uint32_t slot : slots) {
    if (chunks[slot].transfer != detail::no_index) CHECK(engine.complete(chunks[slot].transfer).has_value());
  }
  CHECK(engine.is_idle());
}

TEST_CASE("a failure that no call waited for is counted, and the last is kept") {
  two world({.max_chunks = 4}, 4, 4);
  auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
  engine.note({.code = errc::checksum_differs, .index = 3});
  engine.note({.code = errc::out_of_bytes, .index = 5});
  CHECK(engine.background_failure().code == errc::out_of_bytes);  // the last
  CHECK(world.parts.stats().background_failures == 2);
}
