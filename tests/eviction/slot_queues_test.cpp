#include <llmmem/eviction/detail/slot_heap.hpp>
#include <llmmem/eviction/detail/slot_queues.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <map>
#include <utility>

#include "support/counting_metadata.hpp"
#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;
using llmmem::detail::slot_heap;
using llmmem::detail::slot_queues;

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

std::uint64_t log2_of(std::uint64_t n) {
  return static_cast<std::uint64_t>(std::bit_width(n));
}

}  // namespace

TEST_CASE("slot queues are sorted maps") {
  for (const auto seed : seeds(200)) {
    CAPTURE(seed);
    random_numbers random(seed);
    const std::uint32_t slots = 1 + static_cast<std::uint32_t>(seed % 60);
    slot_queues<3> queues(slot_count{slots}, {}, "queues");
    std::array<std::map<std::uint64_t, slot_id>, 3> sorted;
    std::map<slot_id, std::size_t> where;
    for (std::uint64_t i = 0; i < 1000; ++i) {
      const slot_id slot{random.below(slots)};
      if (where.contains(slot)) {
        const std::size_t queue = where[slot];
        queues.remove(queue, slot);
        sorted[queue].erase(queues.key(slot));
        where.erase(slot);
      } else {
        const std::size_t queue = random.below(std::uint32_t{3});
        queues.set_key(slot, random.below(std::uint64_t{1000}) * 1000 + i);
        queues.push(queue, slot);
        sorted[queue][queues.key(slot)] = slot;
        where[slot] = queue;
      }
      REQUIRE(queues.contains(slot) == where.contains(slot));
      for (std::size_t queue = 0; queue < 3; ++queue) {
        const auto front = queues.front(queue);
        REQUIRE(front.has_value() == !sorted[queue].empty());
        if (front) REQUIRE(*front == sorted[queue].begin()->second);
      }
    }
  }
}

TEST_CASE("no operation of a heap or of slot queues compares more than some times log2 of the slots") {
  constexpr std::uint32_t slots = 20'000;
  std::uint64_t comparisons = 0;
  slot_heap<counted_key> heap(slot_count{slots}, {}, "heap");
  slot_queues<2, counted_key> queues(slot_count{slots}, {}, "queues");
  std::uint64_t most_in_heap = 0;
  std::uint64_t most_in_queues = 0;
  const auto count = [&](std::uint64_t& most, auto&& operation) {
    comparisons = 0;
    operation();
    most = comparisons > most ? comparisons : most;
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
        count(most_in_heap, [&] { heap.remove(leaving); });
      } else {
        count(most_in_heap, [&] {
          heap.set_rank(slot, key);
          heap.push(slot);
        });
        count(most_in_heap, [&] { heap.set_rank(slot, key); });
      }
      if (queues.contains(slot)) {
        count(most_in_queues, [&] { queues.remove(0, slot); });
      } else {
        queues.set_key(slot, key);
        count(most_in_queues, [&] { queues.push(0, slot); });
      }
    }
  }
  CHECK(most_in_heap <= 4 * log2_of(slots));
  CHECK(most_in_queues <= 2 * log2_of(slots));
}

TEST_CASE("slot queues whose memory cannot be had leak nothing") {
  CHECK(fail_each_allocation(
            [](const metadata_source& source) { slot_queues<2>(slot_count{5}, source, "queues"); }) == 3);
}
