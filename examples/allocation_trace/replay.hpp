/// @file
/// Replays a recorded trace through an arena, and finds the smallest budget that suffices.
#pragma once

#include <llmmem/arena/arena.hpp>
#include <llmmem/arena/caching_split.hpp>
#include <llmmem/arena/size_class.hpp>
#include <llmmem/arena/stitched.hpp>
#include <llmmem/testing/simulated_mapper.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocation_trace/trace.hpp"

namespace allocation_trace {

using memory = llmmem::testing::simulated_virtual_memory;

inline constexpr std::array<std::string_view, 3> arena_names{"size_class", "caching_split", "stitched"};

/// The outcome of a replay.
struct replay_result {
  /// Index of the refused event; nothing if all succeeded.
  std::optional<std::size_t> failed_at{};
  llmmem::failure why{};           ///< of that event; its `where` is not valid
  llmmem::arena_stats stats{};     ///< at that event, or at the end
  llmmem::virtual_stats mapped{};  ///< the same
};

/// Replays every event, or up to the first refused one.
template <llmmem::arena_policy Arena>
[[nodiscard]] replay_result replay_in(const trace& from, Arena& arena, const memory& beneath) {
  replay_result found;
  std::vector<llmmem::arena_handle> handles(from.allocations());
  for (std::size_t i = 0; i < from.events().size(); ++i) {
    const event& each = from.events()[i];
    if (each.bytes == 0) {
      arena.free(handles[each.id]).value();
      continue;
    }
    const auto got = arena.allocate(each.bytes);
    if (!got) {
      found.failed_at = i;
      found.why = got.error();
      found.why.where = "";
      break;
    }
    handles[each.id] = got->handle;
  }
  found.stats = arena.stats();
  found.mapped = beneath.stats();
  return found;
}

/// Replays through the arena called `name`. @pre one of `arena_names`.
[[nodiscard]] inline replay_result replay(const trace& from, std::string_view name, std::uint64_t budget) {
  constexpr std::uint64_t chunk = std::uint64_t{2} << 20;
  const auto chunks = static_cast<std::uint32_t>(budget / chunk);
  memory beneath({.budget = budget,
                  .max_ranges = 1 << 14,
                  .max_handles = chunks + (1 << 14),
                  .max_mappings = 5 * chunks + (1 << 14)});
  const llmmem::arena_options options{.max_blocks = 1 << 17};
  if (name == "size_class") {
    llmmem::size_class_arena<memory> arena(beneath, options);
    return replay_in(from, arena, beneath);
  }
  if (name == "caching_split") {
    llmmem::caching_split_arena<memory> arena(beneath, options);
    return replay_in(from, arena, beneath);
  }
  llmmem::stitched_arena<memory> arena(
      beneath,
      {.arena = options, .max_stitched = 4096, .max_parts = 1 << 17, .max_stitched_chunks = 4 * chunks});
  return replay_in(from, arena, beneath);
}

/// Finds by bisection the smallest budget, in steps of 2 MiB, with which the trace succeeds; one step less
/// fails. An arena may fail again with a larger budget; none is designed to.
[[nodiscard]] inline std::uint64_t smallest_budget(const trace& from, std::string_view name) {
  constexpr std::uint64_t step = std::uint64_t{2} << 20;
  std::uint64_t fails = from.peak_live_bytes() / step - (from.peak_live_bytes() % step == 0 ? 1 : 0);
  std::uint64_t survives = fails + 1;
  for (std::uint64_t more = fails / 16 + 1; replay(from, name, survives * step).failed_at; more *= 2) {
    fails = survives;
    survives += more;
  }
  while (survives - fails > 1) {
    const std::uint64_t middle = fails + (survives - fails) / 2;
    (replay(from, name, middle * step).failed_at ? fails : survives) = middle;
  }
  return survives * step;
}

}  // namespace allocation_trace
