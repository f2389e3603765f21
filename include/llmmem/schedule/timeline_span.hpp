/// @file
/// Spans of time: the elements of a simulation's time line.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/tiering/access.hpp>
#include <llmmem/transfer/flow.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

namespace schedule {

/// The kind of activity that a span of a time line shows.
enum class span_kind : std::uint8_t { compute, stall, transfer };

}  // namespace schedule

using span_kind [[deprecated("its name is schedule::span_kind")]] = schedule::span_kind;

/// A span of time. Spans of one kind and lane are in order and do not overlap.
struct timeline_span {
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
  schedule::span_kind kind = schedule::span_kind::compute;
  stall_cause cause = stall_cause::demand_fetch;  ///< of a stall
  link_direction way = link_direction::onboard;   ///< of a transfer
  std::uint8_t tier = 0;                          ///< of a transfer: the upper end of its edge
  chunk_id chunk{};                               ///< of a stall or transfer
  std::uint32_t event = 0;                        ///< the event after the computing, or the event that waits

  friend constexpr bool operator==(const timeline_span&, const timeline_span&) noexcept = default;
};

/// Whether a simulation records its time line.
enum class timeline_detail : std::uint8_t { none, full };

}  // namespace v0
}  // namespace llmmem
