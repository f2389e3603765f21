/// @file
/// Worlds driven by seeds.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>

#include "support/random.hpp"
#include "support/seeds.hpp"

namespace llmmem_tests {

/// Drives a world from each of `count` seeds, for `steps` steps and to its end, and shows it to `look`.
template <class World, class Look>
void run_worlds(std::uint64_t count, int steps, Look&& look) {
  for (const auto seed : seeds(count)) {
    CAPTURE(seed);
    World world{random_numbers(seed)};
    for (int i = 0; i < steps; ++i)
      world.step();
    world.end();
    look(world);
  }
}

}  // namespace llmmem_tests
