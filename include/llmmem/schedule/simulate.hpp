/// @file
/// Runs a trace on a machine in virtual time, strictly: by a plan, or by an online policy.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/machine.hpp>
#include <llmmem/schedule/plan.hpp>
#include <llmmem/schedule/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem::inline v0 {

/// What a stretch of a time line shows.
enum class span_kind : std::uint8_t { compute, stall, transfer };

/// A stretch of time. Those of one kind and lane do not overlap and are in order.
struct timeline_span {
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
  span_kind kind = span_kind::compute;
  stall_cause cause = stall_cause::demand_fetch;  ///< of a stall
  link_direction way = link_direction::onboard;   ///< of a transfer
  std::uint8_t tier = 0;                          ///< of a transfer: the upper end of its edge
  chunk_id chunk{};                               ///< of a stall or transfer
  std::uint32_t event = 0;                        ///< that the computing leads to, or that waits

  friend constexpr bool operator==(const timeline_span&, const timeline_span&) noexcept = default;
};

/// Times of all iterations count from the first one's beginning.
struct simulation {
  std::vector<plan_forecast> iterations{};
  std::vector<timeline_span> spans{};       ///< empty unless asked for
  std::vector<std::uint64_t> most_bytes{};  ///< of each tier with a budget: the most it ever held
};

/// Whether a simulation keeps its time line.
enum class timeline_detail : std::uint8_t { none, full };

/// Runs `plan` for `iterations` iterations: its first one, then the steady one over and over. Budgets hold at
/// every instant, bytes in flight counted in the tier they go to from a transfer's start; the contents that
/// an acquire gets are the newest, always.
///
/// @par Complexity   O((events + steps) log steps) an iteration.
/// @throws argument_error  when the plan was made for another trace, or does what cannot be done; the text
///                         names iteration, step and reason.
[[nodiscard]] simulation simulate(const schedule_trace& trace, const schedule_plan& plan,
                                  std::size_t iterations = 2, timeline_detail detail = timeline_detail::none);

}  // namespace llmmem::inline v0
