/// A queue of slots against a vector.
#include <llmmem/tiering/detail/slot_queue.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/random.hpp"
#include "support/seeds.hpp"

using namespace llmmem;
using namespace llmmem_tests;

namespace {

constexpr std::uint32_t capacity = 17;

std::vector<std::uint32_t> contents(const detail::slot_queue& queue) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < queue.size(); ++i)
    all.push_back(queue[i]);
  return all;
}

}  // namespace

TEST_CASE("a queue of slots behaves as a vector, in its order") {
  for (const auto seed : seeds(50)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::slot_queue queue(capacity, {}, "test: queue");
    std::vector<std::uint32_t> oracle;
    for (int step = 0; step < 200; ++step) {
      const std::uint32_t slot = random.below(capacity);
      const auto at = std::ranges::find(oracle, slot);
      if (at != oracle.end()) {
        queue.take_out(slot);
        oracle.erase(at);
      } else if (random.once_in(3)) {
        queue.push_front(slot);
        oracle.insert(oracle.begin(), slot);
      } else {
        queue.push_back(slot);
        oracle.push_back(slot);
      }
      REQUIRE(contents(queue) == oracle);
      REQUIRE(queue.empty() == oracle.empty());
    }
  }
}

TEST_CASE("a walk takes out the requested slots and keeps the others") {
  for (const auto seed : seeds(100)) {
    CAPTURE(seed);
    random_numbers random(seed);
    detail::slot_queue queue(capacity, {}, "test: queue");
    const std::uint32_t size = random.below(capacity + 1);
    for (std::uint32_t i = 0; i < size; ++i)
      queue.push_back(i);
    const std::uint32_t seen = random.below(size + 1);
    std::vector<std::uint32_t> oracle;
    const auto go = [&] {
      detail::slot_queue::walk walk(queue);
      for (std::uint32_t i = 0; i < seen; ++i) {
        REQUIRE(walk.has_next());
        const std::uint32_t slot = walk.next();
        REQUIRE(slot == i);
        if (random.once_in(2)) {
          walk.take_out();
        } else {
          oracle.push_back(slot);
        }
      }
      if (random.once_in(2)) throw 1;  // whatever ends it
    };
    try {
      go();
    } catch (int) {
    }
    for (std::uint32_t i = seen; i < size; ++i)
      oracle.push_back(i);
    CHECK(contents(queue) == oracle);
  }
}

TEST_CASE("taking out a slot that is not in the queue changes nothing") {
  detail::slot_queue queue(capacity, {}, "test: queue");
  queue.push_back(3);
  queue.take_out(4);
  CHECK(contents(queue) == std::vector<std::uint32_t>{3});
}
