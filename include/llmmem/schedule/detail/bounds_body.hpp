/// @file
/// From Belady's rule to bytes and stall. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/schedule/bounds.hpp>
#include <llmmem/schedule/detail/bodies.hpp>
#include <llmmem/schedule/detail/fractional_min.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The range of a trace's chunk sizes, from which times are computed.
struct size_range {
  std::uint64_t largest = 1;
  bool equal = true;

  explicit size_range(const schedule_trace& trace) noexcept {
    for (const std::uint64_t size : trace.sizes()) {
      equal = equal && size == trace.sizes()[0];
      largest = std::max(largest, size);
    }
  }
  /// Returns the fewest transfers that carry `bytes`.
  [[nodiscard]] std::uint64_t transfers(std::uint64_t bytes) const noexcept {
    return bytes / largest + (bytes % largest != 0 ? 1 : 0);
  }
  /// Returns the least time that a link needs for `bytes` in that many transfers.
  [[nodiscard]] std::uint64_t time(const link_model& link, link_direction way, std::uint64_t bytes,
                                   std::uint64_t requests) const {
    if (bytes == 0) return 0;
    const std::uint64_t moved =
        equal ? transfers(bytes) * transfer_ns(link, largest, way) : transfer_ns(link, bytes, way);
    return moved + std::max(transfers(bytes), requests) * link.latency_ns;
  }
  /// Returns an n-th of `bytes`, rounded up to an amount that an iteration can move.
  [[nodiscard]] std::uint64_t share(std::uint64_t bytes, std::uint64_t n) const noexcept {
    const std::uint64_t each = bytes / n + (bytes % n != 0 ? 1 : 0);
    return equal ? transfers(each) * largest : each;
  }
};

[[nodiscard]] inline bool changes_anything(const schedule_trace& trace) noexcept {
  return std::any_of(trace.events().begin(), trace.events().end(), [](const trace_event& each) {
    return each.call == trace_call::acquire && tiering::writes(each.mode);
  });
}

/// The least bytes that one iteration moves, and the fewest transfers that move so many.
struct least_moves {
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;
};

[[nodiscard]] inline least_moves min_bytes(const schedule_trace& trace, std::uint64_t budget, gap_kind kind,
                                           bounded_iteration of, const size_range& sizes) {
  const std::uint64_t count = trace.events().size();
  if (kind == gap_kind::between_writes && !changes_anything(trace)) return {};
  // The iterations share the freely chosen beginning, so with more iterations each gains less from it.
  const std::uint64_t rounds =
      of == bounded_iteration::first ? 1 : std::clamp<std::uint64_t>(200'000 / count, 1, 64);
  fractional_min rule(trace, budget, kind, rounds);
  // What was written before the beginning may have moved down before it.
  rule.start(0, of == bounded_iteration::first || kind == gap_kind::between_writes ? beginning::empty
                                                                                   : beginning::free_choice);
  std::uint64_t most = 0;
  gap_sizes gaps = rule.gaps();  // of one iteration, as of each
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    std::uint64_t moved = 0;
    for (std::uint64_t i = 0; i < count; ++i)
      moved = rule.advance();
    if (round == 1) gaps = rule.gaps();
    // A gap that was given up has moved down by now, although it may end later.
    if (kind == gap_kind::between_writes) moved = rule.given_up();
    most = std::max(most, sizes.share(moved, round));
  }
  return {most, std::max(gaps.fewest(most), sizes.transfers(most))};
}

/// The largest sum of windows that do not overlap, for one edge, and the bytes of the first iteration's
/// window.
struct least_waiting {
  std::uint64_t stall_ns = 0;
  least_moves first{};
};

[[nodiscard]] inline least_waiting least_stall(const schedule_trace& trace, std::uint64_t budget,
                                               const link_model& link, bounded_iteration of,
                                               const size_range& sizes) {
  const auto events = trace.events();
  const std::uint64_t count = events.size();
  const std::uint64_t rounds = of == bounded_iteration::first || count > 1'000 ? 1 : 2;
  const std::uint64_t all = count * rounds;
  const std::uint64_t stride = all <= 2'000 ? 1 : all <= 100'000 ? all / 16 : all;
  std::vector<std::uint64_t> computed(all + 1);  // computing before each event
  for (std::uint64_t i = 0; i < all; ++i)
    computed[i + 1] =
        computed[i] + events[i % count].compute_ns + (i != 0 && i % count == 0 ? trace.tail_ns() : 0);
  std::vector<std::uint64_t> best(all + 1);
  fractional_min rule(trace, budget, gap_kind::to_read, rounds);
  fractional_min kept_dirty(trace, budget, gap_kind::between_writes, rounds);
  const bool changes = changes_anything(trace);
  least_moves first;
  for (std::uint64_t begin = 0; begin < all; ++begin) {
    if (begin != 0) best[begin] = std::max(best[begin], best[begin - 1]);
    if (begin % stride != 0) continue;
    rule.start(begin,
               begin == 0 && of == bounded_iteration::first ? beginning::empty : beginning::free_choice);
    kept_dirty.start(begin, beginning::empty);
    std::uint64_t before = 0;
    std::uint64_t written_before = 0;
    for (std::uint64_t i = begin; i < all; ++i) {
      if (i == count && begin == 0) first = {before, rule.gaps().fewest(before)};
      const std::uint64_t moved = rule.advance();
      if (changes) static_cast<void>(kept_dirty.advance());
      const std::uint64_t written = kept_dirty.given_up();
      if (moved == before && written == written_before) continue;
      before = moved;
      written_before = written;
      const std::uint64_t up = sizes.time(link, link_direction::onboard, moved, rule.gaps().fewest(moved));
      const std::uint64_t down =
          sizes.time(link, link_direction::offload, written, kept_dirty.gaps().fewest(written));
      const std::uint64_t takes = link.duplex == link_duplex::half ? up + down : std::max(up, down);
      const std::uint64_t meanwhile = computed[i + 1] - computed[begin];
      if (takes > meanwhile) best[i + 1] = std::max(best[i + 1], best[begin] + takes - meanwhile);
    }
    if (all == count && begin == 0) first = {before, rule.gaps().fewest(before)};
  }
  for (std::uint64_t i = 1; i <= all; ++i)
    best[i] = std::max(best[i], best[i - 1]);
  return {.stall_ns = best[all] / rounds + (best[all] % rounds != 0 ? 1 : 0),
          .first = {sizes.share(first.bytes, 1), std::max(first.requests, sizes.transfers(first.bytes))}};
}

}  // namespace detail

LLMMEM_SCHEDULE_BODY plan_bound lower_bound(const schedule_trace& trace, const schedule_machine& machine,
                                            bounded_iteration of) {
  machine.check();
  plan_bound bound;
  bound.edges.resize(machine.budgets.size());
  if (trace.events().empty()) return bound;
  const detail::size_range sizes(trace);
  std::vector<std::uint64_t> lanes(machine.links.size() * 2);
  std::uint64_t budget = 0;
  for (std::size_t tier = 0; tier < machine.budgets.size(); ++tier) {
    budget = checked_add(budget, machine.budgets[tier], "schedule_machine: budgets");
    const link_model& link = machine.links[machine.link_below(tier)];
    link_flow& edge = bound.edges[tier];
    const detail::least_waiting waiting = detail::least_stall(trace, budget, link, of, sizes);
    bound.stall_ns = std::max(bound.stall_ns, waiting.stall_ns);
    const detail::least_moves up =
        trace.events().size() > 100'000
            ? waiting.first
            : detail::min_bytes(trace, budget, detail::gap_kind::to_read, of, sizes);
    const detail::least_moves down =
        detail::min_bytes(trace, budget, detail::gap_kind::between_writes, of, sizes);
    edge.onboard.bytes = up.bytes;
    edge.onboard.operations = up.requests;
    edge.offload.bytes = down.bytes;
    edge.offload.operations = down.requests;
    for (const auto way : {link_direction::onboard, link_direction::offload}) {
      const bool second = way == link_direction::offload && link.duplex == link_duplex::full;
      lanes[machine.link_below(tier) * 2 + (second ? 1 : 0)] +=
          sizes.time(link, way, edge[way].bytes, edge[way].operations);
    }
  }
  if (of == bounded_iteration::steady) {
    for (const std::uint64_t busy : lanes)
      bound.stall_ns = std::max(bound.stall_ns, busy - std::min(busy, trace.compute_ns()));
  }
  return bound;
}

}  // namespace v0
}  // namespace llmmem
