/// @file
/// An engine's state of chunks, and its choice of the chunks to evict. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/engine_options.hpp>
#include <llmmem/schedule/detail/executor.hpp>
#include <llmmem/schedule/detail/use_table.hpp>
#include <llmmem/tiering/plan.hpp>

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The half of a planner's engine that makes space: candidates in the order in which they leave, and the
/// steps that move them. A position counts events over all iterations.
class evicting_engine {
 protected:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  evicting_engine(const schedule_trace& trace, const schedule_machine& machine, const use_table& uses,
                  const engine_options& options)
      : trace_(&trace),
        options_(options),
        machine_(trace, machine, timeline_detail::none),
        bounded_(machine.tiers() - 1),
        chunks_(trace.sizes().size()),
        heaps_(bounded_ * 2),
        pointers_(bounded_),
        unused_(bounded_),
        evicted_(trace.events().size()),
        left_(trace.events().size(), true),
        leaves_(trace.events().size(), true) {
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      most_bytes_ = std::max(most_bytes_, trace.sizes()[i]);
      const std::uint32_t first = uses.first(chunk_id{i});
      chunks_[i].next = first == use_table::none ? never : first;
    }
  }

  struct chunk_state {
    std::uint64_t next = never;                // position of its next acquire
    std::uint64_t recent = 0;                  // the number of its last release, counted over all chunks
    std::uint32_t acquired = use_table::none;  // event that last acquired it
    std::uint8_t unused = 0;                   // bit k: prefetched to tier k and not acquired since
    bool picked = false;                       // one of the victims being collected
  };
  struct entry {
    std::uint64_t key;
    std::uint32_t chunk;
    friend bool operator==(const entry&, const entry&) noexcept = default;
    friend std::strong_ordering operator<=>(const entry& a, const entry& b) noexcept {
      return a.key != b.key ? a.key <=> b.key : b.chunk <=> a.chunk;
    }
  };
  using heap = std::vector<entry>;

  [[nodiscard]] chunk_state& of(chunk_id chunk) noexcept { return chunks_[to_index(chunk)]; }
  [[nodiscard]] const chunk_state& of(chunk_id chunk) const noexcept { return chunks_[to_index(chunk)]; }
  [[nodiscard]] bool has(chunk_id chunk, std::size_t tier) const noexcept {
    return machine_.at(chunk, tier).held && machine_.at(chunk, tier).newest;
  }
  [[nodiscard]] std::uint64_t lines() const noexcept { return trace_->events().size(); }
  [[nodiscard]] const trace_event& event_at(std::uint64_t position) const noexcept {
    return trace_->events()[position < end_ ? position - base_ : position - end_];
  }

  // Candidates for eviction

  /// Returns the key by which `chunk` leaves `tier`: the highest key first.
  [[nodiscard]] std::uint64_t key(chunk_id chunk, std::size_t tier) const noexcept {
    const chunk_state& own = of(chunk);
    if (!has(chunk, tier)) return never;
    if (options_.evict == engine_options::order::least_recent) return ~own.recent;
    if (own.next >= end_ && goal_ != nullptr && !goal_->holds(chunk, tier)) return never;
    return weight(chunk, tier) == 0 || stays_above(chunk, tier) ? never : own.next;
  }
  /// Returns whether tier 0 has the chunk as well and, in the previous iteration, kept it from its last use
  /// to the next one. Then no access needs this tier's copy.
  [[nodiscard]] bool stays_above(chunk_id chunk, std::size_t tier) const noexcept {
    if (tier == 0 || !has(chunk, 0)) return false;
    const std::uint32_t acquired = of(chunk).acquired;
    return acquired != use_table::none && !leaves_[acquired];
  }
  /// Returns the cost of evicting `chunk`, in fetches.
  [[nodiscard]] std::uint64_t weight(chunk_id chunk, std::size_t tier) const noexcept {
    const chunk_state& own = of(chunk);
    const bool again = own.next != never && tiering::reads(event_at(own.next).mode);
    return (again ? 1 : 0) + (machine_.elsewhere(chunk, tier) ? 0 : options_.dirty_weight);
  }
  [[nodiscard]] bool dear(chunk_id chunk, std::size_t tier) const noexcept {
    return options_.evict == engine_options::order::furthest_use && has(chunk, tier) &&
           weight(chunk, tier) > 1;
  }
  [[nodiscard]] heap& heap_of(std::size_t tier, bool is_dear) noexcept {
    return heaps_[tier * 2 + (is_dear ? 1 : 0)];
  }

  /// Makes `chunk` a candidate in every tier that has a copy, from `tier` down, with its present key.
  void offer(chunk_id chunk, std::size_t tier) {
    for (; tier < bounded_; ++tier) {
      if (!machine_.at(chunk, tier).held) continue;
      heap& into = heap_of(tier, dear(chunk, tier));
      into.push_back({key(chunk, tier), to_index(chunk)});
      std::ranges::push_heap(into);
    }
  }
  [[nodiscard]] bool stands(const entry& each, std::size_t tier, bool is_dear) const noexcept {
    const chunk_id chunk{each.chunk};
    return machine_.at(chunk, tier).held && !of(chunk).picked && !(tier == 0 && machine_.leased(chunk)) &&
           key(chunk, tier) == each.key && dear(chunk, tier) == is_dear;
  }
  /// Returns the heap's best entry that is still valid; null if there is none.
  [[nodiscard]] const entry* best(std::size_t tier, bool is_dear) {
    heap& from = heap_of(tier, is_dear);
    while (!from.empty() && !stands(from.front(), tier, is_dear)) {
      std::ranges::pop_heap(from);
      from.pop_back();
    }
    return from.empty() ? nullptr : &from.front();
  }

  /// Frees the space that `bytes` lack in `tier`, from chunks used later than `limit` only; frees nothing if
  /// they are too few.
  [[nodiscard]] bool make_room(std::size_t tier, std::uint64_t bytes, std::uint64_t limit) {
    const std::uint64_t lacking = machine_.budget(tier).lacks(bytes);
    if (lacking == 0) return true;
    std::vector<std::pair<entry, bool>> victims;
    std::vector<std::pair<entry, bool>> aside;
    std::uint64_t freed = 0;
    while (freed < lacking) {
      const entry* cheap = best(tier, false);
      const entry* costly = best(tier, true);
      if (cheap == nullptr && costly == nullptr) break;
      bool is_dear = cheap == nullptr;
      if (cheap != nullptr && costly != nullptr && cheap->key != never) {
        // Compares the costs per event for which the space is free.
        const std::uint64_t until_cheap = cheap->key - std::min(cheap->key, position_) + 1;
        const std::uint64_t until_dear =
            costly->key == never ? never : costly->key - std::min(costly->key, position_) + 1;
        is_dear = until_dear / (1 + options_.dirty_weight) > until_cheap;
      }
      heap& from = heap_of(tier, is_dear);
      const entry chosen = from.front();
      const chunk_id chunk{chosen.chunk};
      const bool furthest = options_.evict == engine_options::order::furthest_use;
      // A prefetch to a tier in between may cost a write-back if that gains twice the time.
      const bool halves = is_dear && tier != 0 && limit != 0;
      const std::uint64_t latest = halves ? limit + (limit - position_) : limit;
      const bool late = of(chunk).next > latest || !has(chunk, tier) || (furthest && chosen.key == never);
      if (!late && furthest) break;
      of(chunk).picked = true;
      std::ranges::pop_heap(from);
      from.pop_back();
      (late ? victims : aside).emplace_back(chosen, is_dear);
      if (late) freed += trace_->size(chunk);
    }
    for (const auto& each : victims)
      of(chunk_id{each.first.chunk}).picked = false;
    for (const auto& each : aside)
      of(chunk_id{each.first.chunk}).picked = false;
    const bool enough = freed >= lacking;
    std::uint64_t spare = enough ? freed - lacking : 0;
    for (std::size_t i = victims.size(); i-- > 0;) {
      const std::uint64_t size = trace_->size(chunk_id{victims[i].first.chunk});
      if (enough && size > spare) continue;
      if (enough) spare -= size;
      aside.push_back(victims[i]);
      victims[i].first.chunk = use_table::none;
    }
    for (const auto& [each, is_dear] : aside) {
      heap_of(tier, is_dear).push_back(each);
      std::ranges::push_heap(heap_of(tier, is_dear));
    }
    if (!enough) return false;
    for (const auto& [each, is_dear] : victims) {
      if (each.chunk != use_table::none) evict(chunk_id{each.chunk}, tier);
    }
    return true;
  }

  void evict(chunk_id chunk, std::size_t tier) {
    if (has(chunk, tier) && !machine_.elsewhere(chunk, tier)) {
      if (tier == 0 && of(chunk).acquired != use_table::none) evicted_[of(chunk).acquired] = true;
      write_back(chunk, tier);
    }
    if (tier == 0 && of(chunk).acquired != use_table::none) left_[of(chunk).acquired] = true;
    note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
    count_used(chunk, tier);
    if (!machine_.leased(chunk)) offer(chunk, 0);
    for (std::size_t i = tier; i < bounded_; ++i)
      pointers_[i] = std::min(pointers_[i], std::max(of(chunk).next, position_));
  }
  void write_back(chunk_id chunk, std::size_t tier) {
    const std::size_t below = tier + 1;
    if (below < bounded_ && !machine_.at(chunk, below).held && !make_room(below, trace_->size(chunk), 0))
      throw argument_error("planner: tier " + std::to_string(below) + " has no space for chunk " +
                           std::to_string(to_index(chunk)));
    note(machine_.write_back(chunk, tier, when_, event_, number()), plan_operation::write_back, chunk, tier,
         below);
    if (below < bounded_) offer(chunk, below);
    if (tier != 0 || !machine_.leased(chunk)) offer(chunk, tier);
  }

  void count_unused(chunk_id chunk, std::size_t tier) noexcept {
    of(chunk).unused = static_cast<std::uint8_t>(of(chunk).unused | (1U << tier));
    unused_[tier] += trace_->size(chunk);
  }
  void count_used(chunk_id chunk, std::size_t tier) noexcept {
    if ((of(chunk).unused >> tier & 1U) == 0) return;
    of(chunk).unused = static_cast<std::uint8_t>(of(chunk).unused & ~(1U << tier));
    unused_[tier] -= trace_->size(chunk);
  }

  // Recording of steps

  [[nodiscard]] std::uint32_t number() const noexcept { return static_cast<std::uint32_t>(steps_->size()); }
  void note(const issued& done, plan_operation operation, chunk_id chunk, std::size_t from, std::size_t to) {
    if (done.why != refusal::none || done.start_ns == unresolved)
      throw error(std::string("planner: a step was refused: ") + text_of(done.why));
    plan_step made{.at_event = event_,
                   .chunk = chunk,
                   .when = when_,
                   .operation = operation,
                   .from = static_cast<std::uint8_t>(from),
                   .to = static_cast<std::uint8_t>(to),
                   .bytes = trace_->size(chunk),
                   .start_ns = done.start_ns - machine_.began(),
                   .finish_ns = done.finish_ns - machine_.began()};
    made.latest_ns = made.start_ns;
    steps_->push_back(made);
    used_.push_back(of(chunk).next == never ? never : of(chunk).next - base_);
  }

  const schedule_trace* trace_;
  engine_options options_;
  executor machine_;
  std::size_t bounded_;
  std::vector<chunk_state> chunks_;
  std::vector<heap> heaps_;              // of tier i: 2i has chunks cheap to evict, 2i + 1 the costly ones
  std::vector<std::uint64_t> pointers_;  // by tier: no chunk before this position is missing
  std::vector<std::uint64_t> unused_;    // by tier: bytes prefetched and not acquired since
  std::vector<bool> evicted_;            // by acquire: the chunk was evicted dirty afterwards
  std::vector<bool> left_;               // by acquire: the chunk left tier 0 before its next acquire
  std::vector<bool> leaves_;             // `left_` when this iteration began
  std::vector<std::uint64_t>
      used_;  // by step: the event that next acquires its chunk, counted from the iteration's first
  const engine_goal* goal_ = nullptr;
  std::vector<plan_step>* steps_ = nullptr;
  std::uint64_t most_bytes_ = 0;  // of a chunk
  std::uint64_t base_ = 0;        // position of this iteration's first event
  std::uint64_t end_ = 0;         // position of the next iteration's first event
  std::uint64_t position_ = 0;    // of the present event
  std::uint64_t releases_ = 0;
  std::uint32_t event_ = 0;
  plan_moment when_ = plan_moment::ahead;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
