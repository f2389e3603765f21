/// The tiers beneath a cache by themselves: hits by tier as lists by last use have them, and what follows a
/// wrong prefix.
#include <llmmem/offload/detail/tier_stack.hpp>

#include <doctest/doctest.h>
#include <llmmem/space/host.hpp>

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint64_t block_bytes = 64;

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
  /// A block is wanted above: the tier where it lay.
  std::optional<std::size_t> onboard(std::uint64_t id) {
    const block_key key = key_from_id(id);
    const auto found = stack.find(0, key);
    if (!found) return std::nullopt;
    stack.touch(0, key);
    if (found->tier != 0) {
      CHECK(stack.begin_read(1, 0, found->slot, {}, 0) == stack_type::begun::yes);
      end();
    }
    return found->tier;
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
        REQUIRE(r.onboard(id) == oracle.onboard(id));
      }
    }
    CHECK(r.stack.audit() == std::vector<std::string>{});
  }
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
