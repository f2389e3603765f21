/// @file
/// Computes the result of MIN on a window of events. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/access_window.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/detail/fractional_min.hpp>
#include <llmmem/schedule/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

LLMMEM_SCHEDULE_BODY access_window::access_window(std::uint32_t events, const metadata_source& metadata)
    : events_(events, metadata, "access_window: events") {
  if (events == 0) throw argument_error("access_window: 0 events; it must keep at least 1");
}

LLMMEM_SCHEDULE_BODY access_regret access_window::regret(std::uint64_t budget) const {
  access_regret found;
  // Each chunk's number in the trace. With another size it counts as another chunk.
  using name = std::pair<chunk_id, std::uint64_t>;
  std::vector<name> names;
  names.reserve(size());
  for (std::size_t i = 0; i < size(); ++i)
    names.emplace_back(at(i).chunk, at(i).bytes);
  std::ranges::sort(names);
  const auto twice = std::ranges::unique(names);
  names.erase(twice.begin(), twice.end());

  struct seen_chunk {
    bool known = false;
    bool leased = false;
  };
  std::vector<seen_chunk> chunks(names.size());
  trace_recorder record;
  for (const name& each : names)
    record.add_chunk(each.second);
  const auto number = [&](const event& of) {
    const auto found_at = std::ranges::lower_bound(names, name{of.chunk, of.bytes});
    return static_cast<std::uint32_t>(found_at - names.begin());
  };
  const auto begin = [&](std::uint32_t chunk, access_mode mode) {
    if (!std::exchange(chunks[chunk].leased, true)) record.acquire(chunk_id{chunk}, mode);
  };
  const auto end = [&](std::uint32_t chunk) {
    if (std::exchange(chunks[chunk].leased, false)) record.release(chunk_id{chunk});
  };

  // Tier 0 held each chunk that is used, released or dropped before it arrives.
  for (std::size_t i = 0; i < size(); ++i) {
    const std::uint32_t chunk = number(at(i));
    const kind what = at(i).what;
    if (std::exchange(chunks[chunk].known, true)) continue;
    if (what == kind::arrived || what == kind::written || what == kind::made) continue;
    begin(chunk, access_mode::read);
    if (what != kind::released) end(chunk);
  }
  const std::size_t before = record.events();
  for (std::size_t i = 0; i < size(); ++i) {
    const std::uint32_t chunk = number(at(i));
    const kind what = at(i).what;
    if (what == kind::read || what == kind::updated || what == kind::written) {
      ++found.accesses;
      begin(chunk, what == kind::read      ? access_mode::read
                   : what == kind::written ? access_mode::write
                                           : access_mode::read_write);
    } else if (what == kind::released) {
      end(chunk);
    } else if (what == kind::made) {
      begin(chunk, access_mode::write);
      end(chunk);
    } else if (what == kind::arrived) {
      found.moved_bytes += at(i).bytes;
    }
  }
  const std::size_t after = record.events();
  if (after == before) return found;
  for (std::uint32_t chunk = 0; chunk < names.size(); ++chunk)
    end(chunk);

  const schedule_trace trace = record.freeze();
  detail::fractional_min rule(trace, budget, detail::gap_kind::to_read, 1);
  rule.start(0, detail::beginning::empty);
  std::uint64_t free = 0;
  for (std::size_t i = 0; i < after; ++i) {
    const std::uint64_t moved = rule.advance();
    if (i + 1 <= before) free = moved;
    found.min_bytes = moved - free;
  }
  return found;
}

}  // namespace v0
}  // namespace llmmem
