/// @file
/// Worlds driven by seeds.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace llmmem_tests {

/// A number of things that all worlds together show, where a sanitizer lets fewer of them be.
constexpr std::uint64_t in_worlds(std::uint64_t shown) {
  return is_watched ? shown / 5 : shown;
}

/// Drives a world from each of `count` seeds (a quarter of them where a sanitizer watches), for `steps` steps
/// and to its end, and shows it to `look`.
template <class World, class Look>
void run_worlds(std::uint64_t count, int steps, Look&& look) {
  for (const auto seed : seeds(count, (count + 3) / 4)) {
    CAPTURE(seed);
    World world{random_numbers(seed)};
    for (int i = 0; i < steps; ++i)
      world.step();
    world.end();
    look(world);
  }
}

}  // namespace llmmem_tests
