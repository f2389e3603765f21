/// The tiers beneath a cache by themselves: hits by tier as lists by last use have them, and what follows a
/// wrong prefix.
#include <llmmem/offload/detail/tier_stack.hpp>

#include <doctest/doctest.h>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/event_orders.hpp"
#include "support/manual_transfers.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t block_bytes = 64;

/// A block is wanted above: the tier where it lay.
template <class World>
std::optional<std::size_t> bring_up(World& world, std::uint64_t id) {
  const block_key key = key_from_id(id);
  const auto found = world.stack.find(0, key);
  if (!found) return std::nullopt;
  world.stack.touch(0, key);
  if (found->tier != 0) {
    CHECK(world.stack.begin_read(found->tier, 0, found->slot, {}, 0) == decltype(world.stack)::begun::yes);
    world.end();
  }
  return found->tier;
}

using stack_type = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<host_space>>;

struct rig {
  rig(std::uint64_t upper, std::uint64_t lower, offload::store_policy down)
      : host({.budget = upper * block_bytes + 4096}),
        below({.budget = lower * block_bytes + 4096}),
        stack(options, std::span(&bytes, 1), std::span(&share, 1),
              offload::kv_tier(host, upper * block_bytes, down),
              offload::kv_tier(below, lower * block_bytes)) {}

  /// A block comes from above. Whether it was stored.
  bool offload(std::uint64_t id) {
    const block_key key = key_from_id(id);
    if (stack.find(0, key)) {
      stack.touch(0, key);
      return true;
    }
    const auto slot = stack.begin_fill(0, key, detail::parent_digest::none, false);
    if (!slot) return false;
    stack.settle(0, *slot);
    end();
    return true;
  }
  void end() {
    stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
  }

  kv_tiers_options options{.load_headroom = 0};
  std::uint64_t bytes = block_bytes;
  double share = 1;
  host_space host;
  host_space below;
  stack_type stack;
};

/// The same by two lists, the one unused for longest first.
class two_lists {
 public:
  two_lists(std::uint64_t upper, std::uint64_t lower) : upper_(upper), lower_(lower) {}

  void offload(std::uint64_t id) {
    if (has(above_, id) || has(below_, id)) return touch(id);
    into_above(id);
    into_below(id);
  }
  std::optional<std::size_t> onboard(std::uint64_t id) {
    if (!has(above_, id) && !has(below_, id)) return std::nullopt;
    touch(id);
    if (has(above_, id)) return 0;
    // Its lower copy is in use meanwhile, and used last afterwards.
    into_above(id, id);
    to_end(below_, id);
    return 1;
  }

 private:
  using list = std::list<std::uint64_t>;
  [[nodiscard]] static bool has(const list& in, std::uint64_t id) {
    return std::find(in.begin(), in.end(), id) != in.end();
  }
  static void to_end(list& in, std::uint64_t id) {
    in.remove(id);
    in.push_back(id);
  }
  void touch(std::uint64_t id) {
    if (has(above_, id)) to_end(above_, id);
    if (has(below_, id)) to_end(below_, id);
  }
  void into_above(std::uint64_t id, std::optional<std::uint64_t> = std::nullopt) {
    if (above_.size() == upper_) above_.pop_front();
    above_.push_back(id);
  }
  void into_below(std::uint64_t id) {
    if (below_.size() == lower_) below_.pop_front();
    below_.push_back(id);
  }

  std::uint64_t upper_;
  std::uint64_t lower_;
  list above_;
  list below_;
};

}  // namespace

TEST_CASE("hits by tier equal those of two lists in order of last use") {
  for (const std::uint64_t seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint64_t upper = 1 + random.below(std::uint64_t{20});
    const std::uint64_t lower = 1 + random.below(std::uint64_t{40});
    rig r(upper, lower, write_through{});
    two_lists oracle(upper, lower);
    for (int i = 0; i < 400; ++i) {
      const std::uint64_t id = random.below(std::uint64_t{50});
      if (random.once_in(2)) {
        REQUIRE(r.offload(id));
        oracle.offload(id);
      } else {
        REQUIRE(bring_up(r, id) == oracle.onboard(id));
      }
    }
    CHECK(r.stack.audit() == std::vector<std::string>{});
  }
}

namespace {

using three_tiers = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<host_space>,
                                          offload::kv_tier<host_space>>;

/// Blocks in three tiers, of which the middle one demotes, and the same in three lists, oldest use first.
struct three_rig {
  three_rig(const std::array<std::uint64_t, 3>& wanted, offload::store_policy middle)
      : slots(wanted),
        stack(options, std::span(&bytes, 1), std::span(&share, 1),
              // One slot of the first tier is the way from the middle tier to the last.
              offload::kv_tier(spaces[0], (slots[0] + 1) * block_bytes, write_through{}),
              offload::kv_tier(spaces[1], slots[1] * block_bytes, middle),
              offload::kv_tier(spaces[2], slots[2] * block_bytes)) {}

  void end() {
    do {
      stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
    } while (!stack.is_idle());
  }
  static std::byte content(std::uint64_t id) { return static_cast<std::byte>(id * 7 + 1); }
  void offload(std::uint64_t id) {
    const block_key key = key_from_id(id);
    if (stack.find(0, key)) return stack.touch(0, key);
    const auto slot = stack.begin_fill(0, key, detail::parent_digest::none, false);
    REQUIRE(slot.has_value());
    std::ranges::fill(stack.first().medium.bytes_of(0, *slot), content(id));
    stack.settle(0, *slot);
    end();
  }
  std::optional<std::size_t> onboard(std::uint64_t id) {
    const auto tier = bring_up(*this, id);
    if (!tier) return tier;
    const auto here = stack.first().slots[0].find(key_from_id(id));
    REQUIRE(here.has_value());
    for (const std::byte each : stack.first().medium.bytes_of(0, *here))
      REQUIRE(each == content(id));
    return tier;
  }

  void lists_offload(std::uint64_t id) {
    if (touched(id)) return;
    into(0, id);
    into(1, id);
  }
  std::optional<std::size_t> lists_onboard(std::uint64_t id) {
    const auto tier = touched(id);
    if (tier && *tier != 0) into(0, id);
    return tier;
  }
  [[nodiscard]] bool is_in(std::size_t tier, std::uint64_t id) const {
    return std::ranges::find(lists[tier], id) != lists[tier].end();
  }
  /// The first tier that has it. Uses it in all.
  std::optional<std::size_t> touched(std::uint64_t id) {
    std::optional<std::size_t> out;
    for (std::size_t k = 3; k-- > 0;) {
      if (!is_in(k, id)) continue;
      lists[k].remove(id);
      lists[k].push_back(id);
      out = k;
    }
    return out;
  }
  void into(std::size_t tier, std::uint64_t id) {
    if (lists[tier].size() == slots[tier]) {
      const std::uint64_t gone = lists[tier].front();
      if (tier == 1 && !is_in(2, gone)) into(2, gone);
      lists[tier].remove(gone);
    }
    lists[tier].push_back(id);
  }

  std::array<std::uint64_t, 3> slots;
  kv_tiers_options options{.load_headroom = 0};
  std::uint64_t bytes = block_bytes;
  double share = 1;
  std::array<host_space, 3> spaces{host_space({.budget = 1 << 16}), host_space({.budget = 1 << 16}),
                                   host_space({.budget = 1 << 16})};
  three_tiers stack;
  std::array<std::list<std::uint64_t>, 3> lists;
};

}  // namespace

TEST_CASE("a middle tier sends down what it evicts: hits by tier equal those of three lists") {
  std::array<std::uint64_t, 3> hits{};
  for (const std::uint64_t seed : seeds(60)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::array slots{1 + random.below(std::uint64_t{8}), 1 + random.below(std::uint64_t{12}),
                           1 + random.below(std::uint64_t{20})};
    three_rig r(slots, seed % 2 == 0 ? offload::store_policy(write_back{})
                                     : offload::store_policy(demoting<write_back>{}));
    for (int i = 0; i < 400; ++i) {
      const std::uint64_t id = random.below(std::uint64_t{50});
      if (random.once_in(2)) {
        r.offload(id);
        r.lists_offload(id);
      } else {
        const auto found = r.onboard(id);
        REQUIRE(found == r.lists_onboard(id));
        if (found) ++hits[*found];
      }
      for (std::size_t k = 0; k < 3; ++k)
        r.stack.with(k, [&](const auto& level) { REQUIRE(level.slots[0].held() == r.lists[k].size()); });
    }
    CHECK(r.stack.audit() == std::vector<std::string>{});
  }
  for (const std::uint64_t each : hits)
    CHECK(each > 100);
}

TEST_CASE(
    "a block that a middle tier sends down stays there until the next tier has it, or the write fails") {
  using stack_with_waits = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<manual_space>,
                                                 offload::kv_tier<manual_space>>;
  for (const ending how : {ending::moved, ending::failed}) {
    const kv_tiers_options options{.load_headroom = 0};
    const std::uint64_t bytes = block_bytes;
    const double share = 1;
    host_space host({.budget = 1 << 12});
    manual_space middle(block_bytes);
    manual_space last(block_bytes);
    offload::kv_tier below(middle, block_bytes, write_back{});
    offload::kv_tier lowest(last, block_bytes);
    below.granularity = lowest.granularity = 8;
    stack_with_waits stack(options, std::span(&bytes, 1), std::span(&share, 1),
                           offload::kv_tier(host, 4 * block_bytes, write_through{}), below, lowest);
    const auto poll = [&] {
      stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
    };
    const auto offload = [&](std::uint64_t id) {
      const auto slot = stack.begin_fill(0, key_from_id(id), detail::parent_digest::none, false);
      REQUIRE(slot.has_value());
      stack.settle(0, *slot);
    };
    const auto has = [&](std::size_t tier, std::uint64_t id) {
      return stack.with(tier, [&](const auto& level) {
        const auto slot = level.slots[0].find(key_from_id(id));
        return slot && level.slots[0].is_ready(*slot);
      });
    };
    const auto end_one = [&](manual_space& of, ending what) {
      REQUIRE(of.transfers().can_end().size() == 1);
      of.transfers().end(of.transfers().can_end()[0], what);
      poll();
    };
    offload(1);
    end_one(middle, ending::moved);
    CHECK(has(1, 1));
    offload(2);  // needs the middle tier's only slot
    CHECK(has(1, 1));
    end_one(middle, ending::moved);  // the read
    CHECK(has(1, 1));
    CHECK_FALSE(has(2, 1));
    end_one(last, how);
    CHECK(has(2, 1) == (how == ending::moved));
    CHECK_FALSE(has(1, 1));
    poll();
    end_one(middle, ending::moved);
    CHECK(has(1, 2));
    CHECK(stack.is_idle());
    CHECK(stack.audit() == std::vector<std::string>{});
  }
}

TEST_CASE("a write that copies a damaged block is given up, and a write of a sound copy stays") {
  const auto sum = crc32c(0, std::vector<std::byte>(block_bytes, std::byte{1}));
  const block_key key = key_from_id(1);
  const kv_tiers_options options{.load_headroom = 0};
  const std::uint64_t bytes = block_bytes;
  const double share = 1;
  const auto has = [&](const auto& stack, std::size_t tier) {
    return stack.with(tier, [&](const auto& level) { return level.slots[0].find(key).has_value(); });
  };
  // The slot of tier 0 or 1 that has the block.
  const auto bytes_at = [&](auto& stack, auto& level) {
    static_cast<void>(stack);
    return level.medium.bytes_of(0, *level.slots[0].find(key));
  };
  const auto fill = [&](auto& stack, std::uint64_t id) {
    const auto slot = stack.begin_fill(0, key_from_id(id), detail::parent_digest::none, false);
    if (!slot) return;
    std::ranges::fill(stack.first().medium.bytes_of(0, *slot), static_cast<std::byte>(id));
    if (id == 1) stack.first().slots[0].note_sum(*slot, sum);
    stack.settle(0, *slot);
  };
  const auto poll = [&](auto& stack) {
    stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
  };
  // From the first tier: as it arrives, and for room, when another block needs its slot.
  using two_tiers = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<manual_space>>;
  for (const bool for_room : {false, true}) {
    for (const bool is_damaged : {false, true}) {
      CAPTURE(for_room);
      CAPTURE(is_damaged);
      host_space host({.budget = 1 << 12});
      manual_space last(2 * block_bytes);
      offload::kv_tier lowest(last, 2 * block_bytes);
      lowest.granularity = 8;
      const offload::store_policy down =
          for_room ? offload::store_policy(write_back{}) : offload::store_policy(write_through{});
      two_tiers stack(options, std::span(&bytes, 1), std::span(&share, 1),
                      offload::kv_tier(host, block_bytes, down), lowest);
      fill(stack, 1);
      if (for_room) fill(stack, 2);
      REQUIRE(last.transfers().can_end().size() == 1);
      if (is_damaged) bytes_at(stack, stack.first())[7] ^= std::byte{4};
      CHECK(stack.verify_copy(0, key) ==
            (is_damaged ? offload::copy_state::damaged : offload::copy_state::sound));
      CHECK(has(stack, 1) == !is_damaged);
      last.transfers().end(last.transfers().can_end()[0], ending::moved);
      poll(stack);
      CHECK(stack.find(0, key).has_value() == !is_damaged);
      CHECK(stack.is_idle());
      CHECK(stack.audit() == std::vector<std::string>{});
      fill(stack, 3);  // the slots serve other blocks
      CHECK(stack.find(0, key_from_id(3)).has_value());
    }
  }
  // From a middle tier, whose copy is damaged or not when the first tier's is.
  using manual_last = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<host_space>,
                                            offload::kv_tier<manual_space>>;
  for (const bool is_middle_damaged : {false, true}) {
    CAPTURE(is_middle_damaged);
    host_space host({.budget = 1 << 12});
    host_space middle({.budget = 1 << 12});
    manual_space last(block_bytes);
    offload::kv_tier lowest(last, block_bytes);
    lowest.granularity = 8;
    manual_last stack(options, std::span(&bytes, 1), std::span(&share, 1),
                      offload::kv_tier(host, 4 * block_bytes, write_through{}),
                      offload::kv_tier(middle, block_bytes, write_back{}), lowest);
    fill(stack, 1);
    poll(stack);
    fill(stack, 2);  // needs the middle tier's only slot
    poll(stack);
    REQUIRE(last.transfers().can_end().size() == 1);
    REQUIRE(has(stack, 1));
    bytes_at(stack, stack.first())[7] ^= std::byte{4};
    if (is_middle_damaged)
      stack.with(1, [&](auto& level) {
        if constexpr (requires { level.medium.bytes_of(0, slot_id{0}); })
          bytes_at(stack, level)[7] ^= std::byte{4};
      });
    CHECK(stack.verify_copy(0, key) == offload::copy_state::damaged);
    last.transfers().end(last.transfers().can_end()[0], ending::moved);
    poll(stack);
    poll(stack);
    CHECK(has(stack, 2) == !is_middle_damaged);
    CHECK_FALSE(has(stack, 0));
    CHECK(stack.audit() == std::vector<std::string>{});
  }
}

namespace {

/// Three blocks over a first tier with room for all, a middle one of one slot that demotes, and a last one of
/// two slots. The middle one sends the first block down to take the second.
class small_world {
 public:
  static constexpr std::uint32_t events = 10;
  static constexpr std::uint64_t ids = 3;

  explicit small_world(std::uint32_t transfers) : options_{.max_transfers = transfers, .load_headroom = 0} {
    happen(0);
    happen(2);
    happen(0);
  }
  /// What is wrong, if anything is.
  std::string happen(std::uint32_t event) {
    switch (event) {
      case 0:
        offload();
        break;
      case 1:
        load(1);
        break;
      case 8:
        for (std::size_t k = 0; k < 3; ++k)
          drop(k, 1);
        is_harmed_ = true;
        break;
      case 9:
        drop(0, 1);  // as if the first tier evicted it
        break;
      default:
        end_oldest(event < 5 ? middle_ : last_, (event - 2) % 3);
    }
    poll();
    return check();
  }
  std::string end() {
    for (int i = 0; i < 50 && !stack_.is_idle(); ++i) {
      stack_.wait_for_one(7, 7);
      poll();
    }
    if (!stack_.is_idle()) return "transfers never end";
    for (std::size_t k = 0; k < 3; ++k) {
      if (stack_.with(k, [](const auto& level) { return level.slots[0].in_use(); }) != 0)
        return "a slot is left in use";
    }
    if (const auto broken = stack_.audit(); !broken.empty()) return broken[0];
    return check();
  }

 private:
  using stack_type = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<manual_space>,
                                           offload::kv_tier<manual_space>>;
  static offload::kv_tier<manual_space> tier(manual_space& space, std::uint64_t slots) {
    offload::kv_tier<manual_space> out(space, slots * block_bytes, write_back{});
    out.granularity = 8;
    return out;
  }
  static std::byte content(std::uint64_t id) { return static_cast<std::byte>(id * 7 + 1); }

  void poll() {
    stack_.poll(0, [this](const detail::load_cookie&, slot_id upper, const failure& why) noexcept {
      if (why.code == errc::ok) stack_.first().slots[0].unpin(upper);
    });
  }
  void offload() {
    if (stored_ == ids) return;
    const std::uint64_t id = stored_ + 1;
    const auto slot = stack_.begin_fill(0, key_from_id(id), detail::parent_digest::none, false);
    if (!slot) return;  // transfers use the slots of dropped contents
    ++stored_;
    std::ranges::fill(stack_.first().medium.bytes_of(0, *slot), content(id));
    stack_.settle(0, *slot);
  }
  void load(std::uint64_t id) {
    const auto found = stack_.find(0, key_from_id(id));
    if (!found || found->tier == 0) return;
    const bool is_ready =
        stack_.with(found->tier, [&](const auto& level) { return level.slots[0].is_ready(found->slot); });
    if (is_ready)
      static_cast<void>(
          stack_.begin_read(found->tier, 0, found->slot, {.load = 1, .generation = 1, .entry = 0}, 0));
  }
  void drop(std::size_t tier, std::uint64_t id) {
    const auto slot =
        stack_.with(tier, [&](const auto& level) { return level.slots[0].find(key_from_id(id)); });
    if (slot) stack_.drop(tier, 0, *slot);
  }
  void end_oldest(manual_space& of, std::uint32_t how) {
    const auto ready = of.transfers().can_end();
    if (ready.empty()) return;
    constexpr std::array ways{ending::moved, ending::failed, ending::flipped};
    of.transfers().end(ready[0], ways[how]);
    is_harmed_ = is_harmed_ || how != 0;
  }
  [[nodiscard]] std::string check() const {
    for (std::uint64_t id = 1; id <= stored_; ++id) {
      const auto found = stack_.find(0, key_from_id(id));
      if (!found && !is_harmed_) return "a block is lost";
      if (!found || found->tier != 0 || !stack_.first().slots[0].is_ready(found->slot)) continue;
      for (const std::byte each : stack_.first().medium.bytes_of(0, found->slot)) {
        if (each != content(id)) return "wrong bytes";
      }
    }
    return {};
  }

  kv_tiers_options options_;
  std::uint64_t bytes_ = block_bytes;
  double share_ = 1;
  host_space host_{{.budget = 1 << 12}};
  manual_space middle_{block_bytes};
  manual_space last_{2 * block_bytes};
  stack_type stack_{options_,
                    std::span(&bytes_, 1),
                    std::span(&share_, 1),
                    offload::kv_tier(host_, (ids + 1) * block_bytes, write_through{}),
                    tier(middle_, 1),
                    tier(last_, 2)};
  std::uint64_t stored_ = 0;
  bool is_harmed_ = false;
};

}  // namespace

TEST_CASE("in every order of four events of three tiers no byte is wrong, no block is lost and all ends") {
  // Every third world has one transfer at a time; 3 has no factor in common with the 10 events either.
  const std::uint32_t orders = llmmem_tests::run_event_orders(
      4, [](std::uint32_t order) { return small_world(order % 3 == 0 ? 1 : 6); });
  CHECK(orders == 10'000);
}

TEST_CASE("a wait passes over a block that has been read and waits for the next tier's only transfer") {
  small_world world(1);
  for (const std::uint32_t event : {2U, 5U, 2U, 0U, 9U, 1U, 2U})
    REQUIRE(world.happen(event) == "");
  CHECK(world.end() == "");
}

TEST_CASE("two middle tiers of four that send blocks down do not wait for each other") {
  using four_tiers = detail::kv_tier_stack<offload::kv_tier<host_space>, offload::kv_tier<host_space>,
                                           offload::kv_tier<host_space>, offload::kv_tier<host_space>>;
  const kv_tiers_options options{.load_headroom = 0};
  const std::uint64_t bytes = block_bytes;
  const double share = 1;
  std::array<host_space, 4> spaces{host_space({.budget = 1 << 12}), host_space({.budget = 1 << 12}),
                                   host_space({.budget = 1 << 12}), host_space({.budget = 1 << 12})};
  const auto stack_over = [&](std::uint64_t first_slots) {
    return four_tiers(options, std::span(&bytes, 1), std::span(&share, 1),
                      offload::kv_tier(spaces[0], first_slots * block_bytes, write_through{}),
                      offload::kv_tier(spaces[1], block_bytes, write_back{}),
                      offload::kv_tier(spaces[2], block_bytes, write_back{}),
                      offload::kv_tier(spaces[3], 2 * block_bytes));
  };
  for (const std::uint64_t slots : {1U, 2U})  // each of the two has its own slot of the first tier
    CHECK_THROWS_AS(static_cast<void>(stack_over(slots)), argument_error);
  four_tiers stack = stack_over(3);
  for (std::uint64_t id = 1; id <= 6; ++id) {
    const auto slot = stack.begin_fill(0, key_from_id(id), detail::parent_digest::none, false);
    REQUIRE(slot.has_value());
    stack.settle(0, *slot);
    for (int i = 0; i < 20; ++i)
      stack.poll(0, [](const detail::load_cookie&, slot_id, const failure&) noexcept {});
    REQUIRE(stack.is_idle());
    for (std::uint64_t back = 0; back < 4 && back < id; ++back) {
      const std::size_t tier = back == 0 ? 0 : back == 1 ? 2 : 3;  // the second tier has the newest as well
      const auto found = stack.find(0, key_from_id(id - back));
      REQUIRE(found.has_value());
      CHECK(found->tier == tier);
    }
  }
  CHECK(stack.audit() == std::vector<std::string>{});
}

TEST_CASE("a read ahead does not displace the block that it reads") {
  kv_tiers_options options{.load_headroom = 0};
  rig r(2, 2, write_back{});
  CHECK(r.offload(1));
  CHECK(r.offload(2));
  for (const std::uint64_t id : {3U, 4U}) {  // 1 and 2 go down
    while (!r.offload(id))
      r.end();
  }
  const auto found = r.stack.find(0, key_from_id(1));
  REQUIRE(found.has_value());
  REQUIRE(found->tier == 1);
  while (r.stack.begin_read(1, 0, found->slot, {}, 0) != stack_type::begun::yes) {
    r.end();
    REQUIRE(r.stack.find(0, key_from_id(1)).has_value());
  }
  r.end();
  CHECK(r.stack.find(0, key_from_id(1))->tier == 0);
  CHECK(r.stack.audit() == std::vector<std::string>{});
}

TEST_CASE("a chunk is sound only if its chain is known back to the beginning and has no wrong chunk") {
  const auto key = [](std::uint64_t id) { return key_from_id(id); };
  const auto parent = [&](std::uint64_t id) { return detail::parent_digest{paging::key_digest(key(id))}; };
  detail::prefix_links links;
  links.add(key(1), detail::parent_digest::none);  // 1 - 2 - 3 and 1 - 4
  links.add(key(2), parent(1));
  links.add(key(3), parent(2));
  links.add(key(4), parent(1));
  links.add(key(4), detail::parent_digest::unknown);  // a copy that does not know its parent
  links.add(key(6), parent(5));                       // 5 is not known
  links.add(key(7), detail::parent_digest::unknown);
  links.judge(key(2));
  CHECK(links.is_sound(key(1)));
  CHECK_FALSE(links.is_sound(key(2)));
  CHECK_FALSE(links.is_sound(key(3)));
  CHECK(links.is_sound(key(4)));
  CHECK_FALSE(links.is_sound(key(6)));
  CHECK_FALSE(links.is_sound(key(7)));
}

TEST_CASE("a tier's bytes are divided by shares, and a group without a slot is refused") {
  const std::uint64_t bytes[] = {100, 300};
  const double shares[] = {1, 3};
  const auto regions = detail::divide_tier(4000, 64, bytes, shares, "t");
  CHECK(regions[0].stride == 128);
  CHECK(regions[0].slots == 7);
  CHECK(regions[1].first == 7 * 128);
  CHECK(regions[1].slots == 9);
  CHECK_THROWS_AS(static_cast<void>(detail::divide_tier(400, 64, bytes, shares, "t")), length_error);
}
