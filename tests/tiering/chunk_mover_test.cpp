/// The mover of chunks against a list of what lies in tier 0.
#include <llmmem/eviction/fifo.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/tiering/detail/chunk_mover.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"
#include "support/tiered_objects.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::is_clean;
using llmmem::detail::newest;

namespace {

// First in, first out: what leaves next is known without a look at accesses.
using two = tiered_objects<tier<host_space, fifo_eviction>, tier<host_space>>;

constexpr std::size_t room = 3;

/// Brings chunks in and out as told; keeps which are in tier 0, the first to leave first.
class resident_list {
 public:
  explicit resident_list(two& world) : world_(world) {}

  void came(std::uint32_t slot) {
    if (holds(slot)) return;
    if (in_.size() == room) in_.pop_front();
    in_.push_back(slot);
  }
  void left(std::uint32_t slot) { std::erase(in_, slot); }
  [[nodiscard]] bool holds(std::uint32_t slot) const { return std::ranges::find(in_, slot) != in_.end(); }
  void compare(const std::vector<std::uint32_t>& slots) {
    for (const std::uint32_t slot : slots) {
      CAPTURE(slot);
      REQUIRE(world_.copy(slot, 0).is_valid() == holds(slot));
    }
  }

 private:
  two& world_;
  std::deque<std::uint32_t> in_;
};

}  // namespace

TEST_CASE("a chunk brought in displaces the oldest one, whose bytes are then below") {
  for (const auto seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    two world({.max_chunks = 8}, room, 8);
    auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
    resident_list oracle(world);
    std::vector<std::uint32_t> slots;
    std::vector<std::byte> values(8);
    for (int i = 0; i < 6; ++i)
      slots.push_back(world.make());
    for (int step = 0; step < 150; ++step) {
      const std::uint32_t slot = slots[random.below(slots.size())];
      const bool has_contents = newest(chunks[slot]) != 2;
      switch (random.below(4U)) {
        case 0:  // new contents
          REQUIRE(mover.make_resident(slot, false, llmmem::tiering::wait_complete).has_value());
          values[slot] = static_cast<std::byte>(random.next());
          std::fill_n(world.copy(slot, 0).data, object_page, values[slot]);
          world.copy(slot, 0).dirty.add({0, object_page});
          oracle.came(slot);
          break;
        case 1:
          if (!has_contents) break;
          REQUIRE(mover.make_resident(slot, true, llmmem::tiering::wait_complete).has_value());
          oracle.came(slot);
          REQUIRE(std::all_of(world.copy(slot, 0).data, world.copy(slot, 0).data + object_page,
                              [&](std::byte each) { return each == values[slot]; }));
          break;
        case 2:
          REQUIRE(mover.evict(slot).has_value());
          mover.progress();  // host memory: what was begun is over
          oracle.left(slot);
          break;
        default:
          REQUIRE(mover.flush(slot).has_value());
          if (has_contents) REQUIRE(world.copy(slot, 1).is_valid());
          if (oracle.holds(slot)) REQUIRE(is_clean(chunks[slot], 0));
      }
      mover.progress();
      oracle.compare(slots);
      REQUIRE(world.audit().empty());
    }
  }
}

TEST_CASE("prefetches take space in the order of the calls, and none from each other") {
  two world({.max_chunks = 8}, room, 8);
  auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
  std::vector<std::uint32_t> slots;
  for (int i = 0; i < 6; ++i) {
    slots.push_back(world.make());
    REQUIRE(mover.make_resident(slots.back(), false, llmmem::tiering::wait_complete).has_value());
    world.copy(slots.back(), 0).dirty.add({0, object_page});
    REQUIRE(mover.flush(slots.back()).has_value());
    REQUIRE(mover.evict(slots.back()).has_value());
  }
  for (const std::uint32_t slot : slots)
    mover.prefetch(slot);
  mover.progress();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    CAPTURE(i);
    CHECK(world.copy(slots[i], 0).is_valid() == (i < room));
    CHECK(chunks[slots[i]].wanted == (i >= room));
  }
  mover.unqueue_prefetch(slots[3]);
  REQUIRE(mover.evict(slots[1]).has_value());
  mover.progress();
  mover.progress();
  CHECK(!world.copy(slots[3], 0).is_valid());  // nobody wants it any more
  CHECK(world.copy(slots[4], 0).is_valid());
  CHECK(!world.copy(slots[5], 0).is_valid());
  CHECK(world.audit().empty());
}

TEST_CASE("a copy in use blocks only itself: the next one leaves") {
  two world({.max_chunks = 8}, room, 8);
  auto& [chunks, stack, keys, engine, mover, desk] = world.parts;
  std::vector<std::uint32_t> slots;
  for (int i = 0; i < 4; ++i)
    slots.push_back(world.make());
  for (std::size_t i = 0; i < room; ++i) {
    REQUIRE(mover.make_resident(slots[i], false, llmmem::tiering::wait_complete).has_value());
    world.copy(slots[i], 0).dirty.add({0, object_page});
  }
  {
    const detail::pinned_copy kept(stack, detail::nth<0>, slots[0]);
    REQUIRE(mover.make_resident(slots[3], false, llmmem::tiering::wait_complete).has_value());
    CHECK(world.copy(slots[0], 0).is_valid());
    CHECK(!world.copy(slots[1], 0).is_valid());
    CHECK(world.copy(slots[1], 1).is_valid());  // written back first
  }
  const detail::pinned_copy first(stack, detail::nth<0>, slots[0]);
  const detail::pinned_copy second(stack, detail::nth<0>, slots[2]);
  const detail::pinned_copy third(stack, detail::nth<0>, slots[3]);
  CHECK(mover.make_resident(slots[1], true, llmmem::tiering::wait_complete).code() == errc::out_of_bytes);
  CHECK(world.copy(slots[1], 0).granted == 0);  // no place stays taken for nothing
}
