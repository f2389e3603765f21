/// @file
/// Every order of a few events, each in a small world of its own.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "support/seeds.hpp"

namespace llmmem_tests {

/// Lets every sequence of `depth` events happen in a world of its own, and checks that none goes wrong; stops
/// at the first that does. Returns how many sequences there are.
/// @param make  `make(order)`: a world with `events`, how many kinds of event it has, below 13;
/// `happen(event)` and
///              `end()`, which return what is wrong, or nothing
template <class Make>
std::uint32_t run_event_orders(std::uint32_t depth, Make&& make) {
  constexpr std::uint32_t events = decltype(make(std::uint32_t{0}))::events;
  static_assert(events < 13);
  std::uint32_t orders = 1;
  for (std::uint32_t i = 0; i < depth; ++i)
    orders *= events;
  // A sanitizer watches every 13th: 13 has no factor in common with `events`, so each event occurs in each
  // place.
  const std::uint32_t stride = is_watched ? 13 : 1;
  for (std::uint32_t order = 0; order < orders; order += stride) {
    auto world = make(order);
    std::string wrong;
    for (std::uint32_t i = 0, rest = order; i < depth && wrong.empty(); ++i, rest /= events)
      wrong = world.happen(rest % events);
    if (wrong.empty()) wrong = world.end();
    if (wrong.empty()) continue;
    CAPTURE(order);
    CHECK(wrong == "");
    break;
  }
  return orders;
}

}  // namespace llmmem_tests
