/// @file
/// Saves of a state that changes on while views of it are read.
#pragma once

#include <llmmem/async_checkpointer.hpp>
#include <llmmem/testing/simulated_storage.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/newest_state.hpp"
#include "support/random.hpp"

namespace llmmem_tests {

/// What a checkpointer of a view saves with.
template <class View, class Coordinator = llmmem::solo_coordinator<llmmem::testing::simulated_storage>>
struct view_traits : llmmem::checkpointer_traits {
  using storage_type = llmmem::testing::simulated_storage;
  using coordinator_type = Coordinator;
  using view_type = View;
};

/// The last snapshot, for whose end a change may have to wait.
struct last_snapshot {
  std::optional<llmmem::snapshot_guard> guard{};
  std::uint64_t waits = 0;

  /// Returns once it has been read, and lets go of it. Whether there was one.
  bool wait() {
    if (!guard) return false;
    ++waits;
    guard->wait_staged();
    guard.reset();
    return true;
  }
};

/// A ring of two chunks or more, so that a view is read in many parts.
/// @param chunk_range  how far beyond 64 bytes a chunk may go.
/// @param ring_range  how far beyond two chunks the ring may go.
[[nodiscard]] inline llmmem::checkpointer_options random_ring(random_numbers& random,
                                                              std::uint64_t chunk_range,
                                                              std::uint64_t ring_range) {
  const std::uint64_t chunk = 64 + random.below(chunk_range);
  return {.ring_bytes = chunk * (2 + random.below(ring_range)), .chunk_bytes = chunk};
}

/// That the newest checkpoint is of `step`, with what its tensors had then.
inline void check_newest(llmmem::testing::simulated_storage& storage,
                         std::span<const llmmem::state_tensor> tensors, std::uint64_t step,
                         const std::vector<std::vector<std::byte>>& expected) {
  const newest_state newest = load_newest(storage, tensors);
  CHECK(newest.step == step);
  CHECK(newest.bytes == expected);
}

/// How often a state changes while it is saved.
struct change_counts {
  std::uint64_t steps = 0;
  int before = 0;              ///< changes before the view of a step is taken
  int meanwhile = 0;           ///< and after
  std::uint64_t stage_ns = 0;  ///< after some of the latter it is copied for that long; 0: by other threads
};

/// Saves steps 1, 2, ... of a world that changes on meanwhile, waits for some of them, and checks that they
/// have what the tensors had when the view was taken.
/// @param world  has `random`, `tensors`, `saving`, the last snapshot, `act()`, a change, `now()`, what the
///               tensors have, `view_now()` and `audit()`.
/// @return what the tensors had at the last step.
template <class Checkpointer, class World>
std::vector<std::vector<std::byte>> save_while_changing(Checkpointer& saves,
                                                        llmmem::testing::simulated_storage& storage,
                                                        World& world, const change_counts& counts) {
  std::vector<std::vector<std::byte>> expected;
  for (std::uint64_t step = 1; step <= counts.steps; ++step) {
    for (int i = 0; i < counts.before; ++i)
      world.act();
    expected = world.now();
    world.saving.guard.emplace(saves.begin_snapshot(step, world.view_now()));
    const llmmem::commit_ticket ticket = world.saving.guard->ticket();
    const llmmem::mutation_permit permit = saves.gate().mutate();
    for (int i = 0; i < counts.meanwhile; ++i) {
      world.act();
      if (counts.stage_ns != 0 && world.random.once_in(4)) saves.stage_for(counts.stage_ns);
    }
    for (const std::string& broken : world.audit())
      FAIL_CHECK(broken);
    if (world.random.once_in(3)) continue;
    REQUIRE(ticket.wait() == llmmem::commit_status::committed);
    check_newest(storage, world.tensors, step, expected);
  }
  return expected;
}

}  // namespace llmmem_tests
