#include <llmmem/eviction/detail/slot_heap.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::slot_heap;

namespace {

/// A key that counts its comparisons in what it points to.
struct counted_key {
  std::uint64_t value = 0;
  std::uint64_t* comparisons = nullptr;

  friend bool operator<(const counted_key& a, const counted_key& b) noexcept {
    ++*a.comparisons;
    return a.value < b.value;
  }
};

}  // namespace

TEST_CASE("every heap operation takes at most a few times log2(slots) comparisons") {
  constexpr std::uint32_t slots = 20'000;
  std::uint64_t comparisons = 0;
  slot_heap<counted_key> heap(slot_count{slots}, {}, "heap");
  std::uint64_t most = 0;
  const auto count = [&](auto&& operation) {
    comparisons = 0;
    operation();
    most = std::max(most, comparisons);
  };
  for (const auto seed : seeds(5)) {
    random_numbers random(seed);
    for (std::uint32_t i = 0; i < slots * 5; ++i) {
      const slot_id slot{random.below(slots)};
      // In turn at random, falling and rising: what makes trees lopsided.
      const std::uint64_t value = seed % 3 == 0 ? random.next() : seed % 3 == 1 ? slots * 9 - i : i;
      const counted_key key{value, &comparisons};
      if (heap.contains(slot)) {
        const slot_id leaving = random.once_in(2) ? *heap.front() : slot;
        count([&] { heap.remove(leaving); });
      } else {
        count([&] {
          heap.set_rank(slot, key);
          heap.push(slot);
        });
        count([&] { heap.set_rank(slot, key); });
      }
    }
  }
  CHECK(most <= 4 * static_cast<std::uint64_t>(std::bit_width(slots)));
}
