/// @file
/// What a replay of a world's journal must reach.
#pragma once

#include <llmmem/paging/journal_replay.hpp>

#include <doctest/doctest.h>

namespace llmmem_tests {

/// Ends a world's journal with a digest, replays all of it, and compares the states of both caches.
///
/// @param world  has `cache()`, a `journaled` one, `bytes()` and `own(sequences)`; `state_of` takes its
/// caches.
/// @param make   makes a cache of the journal's header.
template <class World, class Make>
void check_replay(World& world, const Make& make) {
  world.cache().checkpoint();
  REQUIRE(world.cache().recording());
  const auto same = llmmem::paging::replay(world.bytes(), make);
  if (same.divergence()) FAIL(same.divergence()->message());
  CHECK(same.end().reason.empty());
  CHECK(same.end().records == world.cache().records());
  CHECK(same.end().offset == world.bytes().size());
  CHECK(same.sequences().size() == world.cache().stats().sequences);
  CHECK(state_of(same.cache(), same.sequences()) ==
        state_of(world.cache().cache(), world.own(same.sequences())));
}

}  // namespace llmmem_tests
