/// @file
/// The machine in virtual time: planners plan on it and `simulate` executes with it. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/execution_types.hpp>
#include <llmmem/schedule/detail/tier_budget.hpp>
#include <llmmem/schedule/timeline_span.hpp>
#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/tiering/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Tiers, links and the program's clock.
///
/// Tracks contents in the order of issue, and times as far as they are decided: the time of a transfer is
/// known once those of its link, source and space are, which is at once unless it waits for space that no
/// step has freed yet.
class executor {
 public:
  executor(const schedule_trace& trace, const schedule_machine& machine, timeline_detail detail)
      : trace_(&trace),
        machine_(&machine),
        tiers_(machine.tiers()),
        detail_(detail),
        copies_(trace.sizes().size() * tiers_),
        chunks_(trace.sizes().size()),
        lanes_(machine.links.size() * 2) {
    for (const std::uint64_t budget : machine.budgets)
      budgets_.emplace_back(budget);
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      copies_[i * tiers_ + tiers_ - 1] = {.held = true, .newest = true};
    begin_iteration();
  }

  struct copy {
    std::uint64_t ready_ns = 0;  // complete from this time on
    std::uint64_t busy_ns = 0;   // read by transfers until this time
    bool held = false;
    bool newest = false;
  };

  [[nodiscard]] std::uint64_t now() const noexcept { return now_; }
  [[nodiscard]] std::uint64_t began() const noexcept { return began_; }
  [[nodiscard]] const copy& at(chunk_id chunk, std::size_t tier) const noexcept {
    return copies_[to_index(chunk) * tiers_ + tier];
  }
  [[nodiscard]] std::size_t tiers() const noexcept { return tiers_; }
  [[nodiscard]] bool leased(chunk_id chunk) const noexcept { return chunks_[to_index(chunk)].leased; }
  [[nodiscard]] bool worthless(chunk_id chunk) const noexcept { return chunks_[to_index(chunk)].worthless; }
  [[nodiscard]] const tier_budget& budget(std::size_t tier) const noexcept { return budgets_[tier]; }
  [[nodiscard]] std::size_t lane(std::size_t upper, link_direction way) const noexcept {
    const std::uint32_t link = machine_->link_below(upper);
    const bool second = way == link_direction::offload && machine_->links[link].duplex == link_duplex::full;
    return std::size_t{link} * 2 + (second ? 1 : 0);
  }
  [[nodiscard]] std::uint64_t lane_free(std::size_t upper, link_direction way) const noexcept {
    return lanes_[lane(upper, way)].free_ns;
  }
  /// Returns whether a tier other than `tier` has the newest contents.
  [[nodiscard]] bool elsewhere(chunk_id chunk, std::size_t tier) const noexcept {
    for (std::size_t i = 0; i < tiers_; ++i) {
      if (i != tier && at(chunk, i).held && at(chunk, i).newest) return true;
    }
    return false;
  }

  issued fetch(chunk_id chunk, std::size_t to, plan_moment when, std::uint32_t event, std::uint32_t step) {
    return transfer(chunk, to + 1, to, to, link_direction::onboard, when, event, step);
  }
  issued write_back(chunk_id chunk, std::size_t from, plan_moment when, std::uint32_t event,
                    std::uint32_t step) {
    if (chunks_[to_index(chunk)].leased && chunks_[to_index(chunk)].writing) return {.why = refusal::leased};
    return transfer(chunk, from, from + 1, from, link_direction::offload, when, event, step);
  }
  issued drop(chunk_id chunk, std::size_t tier) {
    if (tier + 1 == tiers_) return {.why = refusal::home};
    copy& own = writable(chunk, tier);
    if (!own.held) return {.why = refusal::not_there};
    if (tier == 0 && leased(chunk)) return {.why = refusal::leased};
    if (own.newest && !worthless(chunk) && !elsewhere(chunk, tier)) return {.why = refusal::only_copy};
    if (own.ready_ns == unresolved || waits(chunk)) return {.why = refusal::in_use};
    const std::uint64_t time = std::max({now_, own.ready_ns, own.busy_ns});
    own = {};
    budgets_[tier].give(time, trace_->size(chunk));
    settle();
    return {.start_ns = time, .finish_ns = time};
  }
  issued allocate(chunk_id chunk) {
    copy& own = writable(chunk, 0);
    if (own.held) return {.why = refusal::already_there};
    const std::uint64_t time = budgets_[0].earliest(now_, trace_->size(chunk));
    if (time == unresolved) return {.why = refusal::over_budget};
    own = {.ready_ns = time, .held = true};
    arrivals_of(chunk) = {.cause = stall_cause::write_back};
    budgets_[0].take(time, trace_->size(chunk));
    return {.start_ns = time, .finish_ns = time};
  }

  /// Advances by `ns` of computing before `event`.
  void compute(std::uint64_t ns, std::uint32_t event) {
    if (ns == 0) return;
    span({.start_ns = now_,
          .finish_ns = later(now_, ns),
          .kind = schedule::span_kind::compute,
          .event = event});
    forecast_.compute_ns += ns;
    advance(later(now_, ns));
  }

  /// Applies the program's event, after a wait if necessary.
  refusal serve(std::uint32_t index) {
    const trace_event& event = trace_->events()[index];
    chunk_state& chunk = chunks_[to_index(event.chunk)];
    if (event.call == trace_call::release) {
      chunk.leased = false;
      return refusal::none;
    }
    if (event.call == trace_call::discard) {
      chunk.worthless = true;
      for (std::size_t tier = 0; tier < tiers_; ++tier)
        writable(event.chunk, tier).newest = false;
      return refusal::none;
    }
    copy& own = writable(event.chunk, 0);
    if (!own.held || (tiering::reads(event.mode) && !own.newest)) return refusal::not_there;
    if (own.ready_ns == unresolved || (tiering::writes(event.mode) && waits(event.chunk)))
      return refusal::over_budget;
    wait(index, event.chunk, own.ready_ns, tiering::writes(event.mode) ? own.busy_ns : 0);
    if (tiering::writes(event.mode)) {
      for (std::size_t tier = 1; tier < tiers_; ++tier)
        writable(event.chunk, tier).newest = false;
      own.newest = true;
    }
    chunk.worthless = false;
    chunk.leased = true;
    chunk.writing = tiering::writes(event.mode);
    return refusal::none;
  }

  void begin_iteration() {
    began_ = now_;
    forecast_ = {};
    forecast_.edges.resize(tiers_ - 1);
  }
  [[nodiscard]] plan_forecast end_iteration() {
    forecast_.iteration_ns = now_ - began_;
    return std::move(forecast_);
  }

  /// Returns the first step that still waits for space; `unresolved` if none does.
  [[nodiscard]] std::uint64_t first_waiting() const noexcept {
    std::uint64_t first = unresolved;
    for (const lane_state& each : lanes_) {
      if (each.begin != each.waiting.size())
        first = std::min<std::uint64_t>(first, each.waiting[each.begin].step);
    }
    return first;
  }

  /// Returns the `plan_placement` entries, by chunk, then tier.
  [[nodiscard]] std::vector<plan_placement> placements() const {
    std::vector<plan_placement> all;
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      for (std::size_t tier = 0; tier + 1 < tiers_; ++tier) {
        const copy& own = at(chunk_id{i}, tier);
        if (!own.held) continue;
        all.push_back(
            {chunk_id{i}, static_cast<std::uint8_t>(tier), own.newest, at(chunk_id{i}, tiers_ - 1).newest});
      }
    }
    return all;
  }
  [[nodiscard]] std::vector<std::uint64_t> most_bytes() {
    std::vector<std::uint64_t> all;
    for (tier_budget& each : budgets_) {
      each.advance(unresolved - 1);
      all.push_back(each.most());
    }
    return all;
  }
  [[nodiscard]] std::vector<timeline_span> take_spans() noexcept { return std::move(spans_); }

 private:
  struct arrival {
    stall_cause cause = stall_cause::prefetch_late;
    std::uint32_t event = 0;  // the event that a demand fetch serves
    bool blocked = false;     // has waited for space that no step had freed
    std::uint64_t budget_wait_ns = 0;
  };
  struct chunk_state {
    bool leased = false;
    bool writing = false;
    bool worthless = false;
    arrival came{};
  };
  struct waiting_transfer {
    chunk_id chunk;
    std::uint8_t from;
    std::uint8_t to;
    std::uint8_t upper;
    link_direction way;
    bool in_place;
    bool blocked;
    std::uint32_t step;
    std::uint64_t issued_ns;
  };
  struct lane_state {
    std::uint64_t free_ns = 0;
    std::vector<waiting_transfer> waiting;
    std::size_t begin = 0;
    issued last{};
  };

  [[nodiscard]] static std::uint64_t later(std::uint64_t time, std::uint64_t ns) {
    if (ns > (std::uint64_t{1} << 62) - std::min(time, std::uint64_t{1} << 62)) {
      throw length_error("schedule: " + std::to_string(time) + " + " + std::to_string(ns) +
                         " ns exceed 2^62 ns; check the bandwidths and sizes");
    }
    return time + ns;
  }
  [[nodiscard]] copy& writable(chunk_id chunk, std::size_t tier) noexcept {
    return copies_[to_index(chunk) * tiers_ + tier];
  }
  [[nodiscard]] arrival& arrivals_of(chunk_id chunk) noexcept { return chunks_[to_index(chunk)].came; }
  void span(const timeline_span& each) {
    if (detail_ == timeline_detail::full) spans_.push_back(each);
  }
  void advance(std::uint64_t time) {
    now_ = time;
    for (tier_budget& each : budgets_)
      each.advance(now_);
  }
  [[nodiscard]] bool waits(chunk_id chunk) const noexcept {
    for (const lane_state& each : lanes_) {
      for (std::size_t i = each.begin; i < each.waiting.size(); ++i) {
        if (each.waiting[i].chunk == chunk) return true;
      }
    }
    return false;
  }

  issued transfer(chunk_id chunk, std::size_t from, std::size_t to, std::size_t upper, link_direction way,
                  plan_moment when, std::uint32_t event, std::uint32_t step) {
    copy& source = writable(chunk, from);
    copy& target = writable(chunk, to);
    if (!source.held || !source.newest) return {.why = refusal::not_there};
    // Writing back a clean copy is useless, but no error.
    if (target.held && target.newest && way == link_direction::onboard)
      return {.why = refusal::already_there};
    const bool in_place = target.held;
    if (in_place && to == 0 && leased(chunk)) return {.why = refusal::leased};
    if (!in_place) target = {.ready_ns = unresolved, .held = true};
    target.newest = true;
    const std::uint64_t was_ready = target.ready_ns;
    target.ready_ns = unresolved;
    if (to == 0)
      arrivals_of(chunk) = {
          .cause = when == plan_moment::at_call ? stall_cause::demand_fetch : stall_cause::prefetch_late,
          .event = event};
    transfer::flow& taken = forecast_.edges[upper][way];
    taken.bytes += trace_->size(chunk);
    ++taken.operations;
    lane_state& line = lanes_[lane(upper, way)];
    line.waiting.push_back({.chunk = chunk,
                            .from = static_cast<std::uint8_t>(from),
                            .to = static_cast<std::uint8_t>(to),
                            .upper = static_cast<std::uint8_t>(upper),
                            .way = way,
                            .in_place = in_place,
                            .blocked = false,
                            .step = step,
                            .issued_ns = in_place ? std::max(now_, was_ready) : now_});
    settle();
    if (line.begin == line.waiting.size()) return line.last;
    return {.start_ns = unresolved, .finish_ns = unresolved};
  }

  /// Computes the time of every transfer that it can, repeatedly while one makes another possible.
  void settle() {
    bool again = true;
    while (again) {
      again = false;
      for (lane_state& line : lanes_) {
        while (line.begin != line.waiting.size() && resolve(line, line.waiting[line.begin])) {
          if (++line.begin == line.waiting.size()) {
            line.waiting.clear();
            line.begin = 0;
          }
          again = true;
        }
      }
    }
  }

  [[nodiscard]] bool resolve(lane_state& line, waiting_transfer& each) {
    copy& source = writable(each.chunk, each.from);
    copy& target = writable(each.chunk, each.to);
    if (source.ready_ns == unresolved) return false;
    const std::uint64_t bytes = trace_->size(each.chunk);
    const std::uint64_t asked = std::max({each.issued_ns, line.free_ns, source.ready_ns});
    const std::uint64_t from = std::max({asked, each.blocked ? now_ : 0, each.in_place ? target.busy_ns : 0});
    std::uint64_t start = from;
    if (!each.in_place && each.to + std::size_t{1} < tiers_) {
      start = budgets_[each.to].earliest(from, bytes);
      if (start == unresolved) {
        each.blocked = true;
        return false;
      }
      budgets_[each.to].take(start, bytes);
    }
    const link_model& link = machine_->links[machine_->link_below(each.upper)];
    const std::uint64_t finish = later(later(start, link.latency_ns), transfer_ns(link, bytes, each.way));
    line.free_ns = finish;
    source.busy_ns = std::max(source.busy_ns, finish);
    target.ready_ns = finish;
    if (each.to == 0) {
      arrivals_of(each.chunk).budget_wait_ns = start - asked;
      arrivals_of(each.chunk).blocked = each.blocked;
    }
    span({.start_ns = start,
          .finish_ns = finish,
          .kind = schedule::span_kind::transfer,
          .way = each.way,
          .tier = each.upper,
          .chunk = each.chunk});
    line.last = {.start_ns = start, .finish_ns = finish};
    return true;
  }

  void wait(std::uint32_t event, chunk_id chunk, std::uint64_t ready, std::uint64_t busy) {
    const arrival& came = arrivals_of(chunk);
    if (ready > now_) {
      const std::uint64_t whole = ready - now_;
      const std::uint64_t for_budget = std::min(whole, came.budget_wait_ns);
      const stall_cause of_budget = came.blocked ? stall_cause::budget : stall_cause::write_back;
      const stall_cause own = came.cause == stall_cause::demand_fetch && came.event != event
                                  ? stall_cause::prefetch_late
                                  : came.cause;
      stall(of_budget, for_budget, chunk, event);
      stall(own, whole - for_budget, chunk, event);
    }
    if (busy > now_) stall(stall_cause::write_back, busy - now_, chunk, event);
  }
  void stall(stall_cause cause, std::uint64_t ns, chunk_id chunk, std::uint32_t event) {
    if (ns == 0) return;
    forecast_.stalls[cause] += ns;
    span({.start_ns = now_,
          .finish_ns = now_ + ns,
          .kind = schedule::span_kind::stall,
          .cause = cause,
          .chunk = chunk,
          .event = event});
    advance(now_ + ns);
  }

  const schedule_trace* trace_;
  const schedule_machine* machine_;
  std::size_t tiers_;
  timeline_detail detail_;
  std::uint64_t now_ = 0;
  std::uint64_t began_ = 0;
  std::vector<copy> copies_;  // by chunk, then tier
  std::vector<chunk_state> chunks_;
  std::vector<tier_budget> budgets_;
  std::vector<lane_state> lanes_;  // of link i: 2i, and 2i + 1 for the other direction
  plan_forecast forecast_{};
  std::vector<timeline_span> spans_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
