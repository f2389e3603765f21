/// @file
/// What all planners are made of: one iteration after another is lived through in virtual time, and every
/// decision written down as a step. Private to schedule/.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/schedule/detail/executor.hpp>
#include <llmmem/schedule/detail/use_table.hpp>
#include <llmmem/schedule/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace llmmem::inline v0::detail {

/// How an engine decides.
struct engine_options {
  enum class order : std::uint8_t { least_recent, furthest_use };
  enum class prefetch : std::uint8_t { none, by_count, by_time };

  order evict = order::furthest_use;
  prefetch ahead = prefetch::by_time;
  std::uint32_t count = 0;  ///< by count: acquires to look at
  std::uint64_t ahead_bytes =
      max_bytes;  ///< by time: the most that lies in tier 0 unused, one chunk at least
  std::uint64_t ahead_bytes_below = max_bytes;  ///< the same of the tiers below; 0: only on the way to tier 0
  std::uint64_t dirty_weight = 1;               ///< what a write-back costs, in fetches of as many bytes
  bool clean_early = false;  ///< writes back on release what the iteration before evicted dirty
  bool cyclic = true;        ///< false: nothing comes after the iteration
};

/// The state that an iteration must end in, for each chunk and tier but the last.
class engine_goal {
 public:
  engine_goal(const std::vector<plan_placement>& placements, std::size_t chunks, std::size_t tiers)
      : tiers_(tiers), held_(chunks * tiers), home_(chunks, true) {
    for (const plan_placement& each : placements) {
      if (!each.newest) continue;
      held_[to_index(each.chunk) * tiers_ + each.tier] = true;
      home_[to_index(each.chunk)] = each.home;
    }
  }
  [[nodiscard]] bool holds(chunk_id chunk, std::size_t tier) const noexcept {
    return held_[to_index(chunk) * tiers_ + tier];
  }
  /// Whether the last tier's copy is to be the newest, too.
  [[nodiscard]] bool home(chunk_id chunk) const noexcept { return home_[to_index(chunk)]; }
  void all_home() { home_.assign(home_.size(), true); }

 private:
  std::size_t tiers_;
  std::vector<bool> held_;
  std::vector<bool> home_;
};

class planner_engine {
 public:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  planner_engine(const schedule_trace& trace, const schedule_machine& machine, const use_table& uses,
                 const engine_options& options)
      : trace_(&trace),
        uses_(&uses),
        options_(options),
        machine_(trace, machine, timeline_detail::none),
        bounded_(machine.tiers() - 1),
        chunks_(trace.sizes().size()),
        heaps_(bounded_ * 2),
        pointers_(bounded_),
        unused_(bounded_),
        evicted_(trace.events().size()),
        served_ns_(trace.events().size()) {
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      most_bytes_ = std::max(most_bytes_, trace.sizes()[i]);
      const std::uint32_t first = uses.first(chunk_id{i});
      chunks_[i].next = first == use_table::none ? never : first;
    }
  }

  /// One iteration, from the state that the one before has left. With a goal it ends in that state.
  [[nodiscard]] plan_iteration run(const engine_goal* goal) {
    plan_iteration made;
    steps_ = &made.steps;
    used_.clear();
    goal_ = goal;
    machine_.begin_iteration();
    const auto events = trace_->events();
    end_ = base_ + events.size();
    for (std::uint64_t& pointer : pointers_)
      pointer = base_;
    for (std::uint32_t i = 0; i < events.size(); ++i)
      live_through(i);
    event_ = static_cast<std::uint32_t>(events.size());
    when_ = plan_moment::ahead;
    position_ = end_;
    if (goal != nullptr) {
      close();
    } else if (options_.cyclic) {
      if (options_.ahead != engine_options::prefetch::none) prefetch(later_by(trace_->tail_ns()));
      tidy();
    }
    machine_.compute(trace_->tail_ns(), event_);
    made.forecast = machine_.end_iteration();
    set_latest(made);
    base_ = end_;
    return made;
  }

  /// Begins with what another engine has seen leave dirty.
  void learn(const planner_engine& other) { evicted_ = other.evicted_; }

  [[nodiscard]] std::vector<plan_placement> placements() const { return machine_.placements(); }

 private:
  struct chunk_state {
    std::uint64_t next = never;                // position of its next acquire
    std::uint64_t recent = 0;                  // when it was last released, as a count
    std::uint32_t acquired = use_table::none;  // event that last acquired it
    std::uint8_t unused = 0;                   // bit k: prefetched to tier k and not acquired since
    bool picked = false;                       // among the victims being gathered
  };
  struct entry {
    std::uint64_t key;
    std::uint32_t chunk;
    friend bool operator<(const entry& a, const entry& b) noexcept {
      return a.key != b.key ? a.key < b.key : a.chunk > b.chunk;
    }
  };
  using heap = std::vector<entry>;

  [[nodiscard]] std::uint64_t later_by(std::uint64_t ns) const noexcept { return machine_.now() + ns; }
  [[nodiscard]] chunk_state& of(chunk_id chunk) noexcept { return chunks_[to_index(chunk)]; }
  [[nodiscard]] const chunk_state& of(chunk_id chunk) const noexcept { return chunks_[to_index(chunk)]; }
  [[nodiscard]] bool has(chunk_id chunk, std::size_t tier) const noexcept {
    return machine_.at(chunk, tier).held && machine_.at(chunk, tier).newest;
  }
  [[nodiscard]] std::uint64_t lines() const noexcept { return trace_->events().size(); }
  [[nodiscard]] const trace_event& event_at(std::uint64_t position) const noexcept {
    return trace_->events()[position < end_ ? position - base_ : position - end_];
  }

  void live_through(std::uint32_t index) {
    const trace_event& event = trace_->events()[index];
    event_ = index;
    position_ = base_ + index;
    when_ = plan_moment::ahead;
    const bool acquires = event.call == trace_call::acquire;
    const bool wanted =
        acquires && (reads(event.mode) ? !has(event.chunk, 0) : !machine_.at(event.chunk, 0).held);
    if (wanted && !reads(event.mode) && options_.ahead != engine_options::prefetch::none)
      allocate(event.chunk);
    std::uint64_t until = later_by(event.compute_ns);
    if (acquires && machine_.at(event.chunk, 0).held)
      until = std::max(until, machine_.at(event.chunk, 0).ready_ns);
    if (options_.ahead != engine_options::prefetch::none) prefetch(until);
    machine_.compute(event.compute_ns, index);
    when_ = plan_moment::at_call;
    if (acquires && reads(event.mode) && !has(event.chunk, 0)) bring(event.chunk, 0, 0);
    if (acquires && !reads(event.mode) && !machine_.at(event.chunk, 0).held) allocate(event.chunk);
    if (machine_.serve(index) != refusal::none) throw error("planner: an event could not be served");
    served_ns_[index] = machine_.now() - machine_.began();
    chunk_state& chunk = of(event.chunk);
    if (acquires) {
      const std::uint32_t next = uses_->after(index);
      chunk.next = next > index ? base_ + next : options_.cyclic ? end_ + next : never;
      chunk.acquired = index;
      for (std::size_t tier = 0; tier < bounded_; ++tier)
        count_used(event.chunk, tier);
      offer(event.chunk, 1);
    } else {
      chunk.recent = ++releases_;
      event_ = index + 1;
      when_ = plan_moment::ahead;
      if (options_.clean_early && evicted_[chunk.acquired] && event.call == trace_call::release &&
          has(event.chunk, 0) && !machine_.elsewhere(event.chunk, 0))
        write_back(event.chunk, 0);
      offer(event.chunk, 0);
    }
  }

  // What may be evicted

  /// By which order `chunk` leaves `tier`: the highest key first.
  [[nodiscard]] std::uint64_t key(chunk_id chunk, std::size_t tier) const noexcept {
    const chunk_state& own = of(chunk);
    if (!has(chunk, tier)) return never;
    if (options_.evict == engine_options::order::least_recent) return ~own.recent;
    if (own.next >= end_ && goal_ != nullptr && !goal_->holds(chunk, tier)) return never;
    return weight(chunk, tier) == 0 ? never : own.next;
  }
  /// What evicting costs, in fetches.
  [[nodiscard]] std::uint64_t weight(chunk_id chunk, std::size_t tier) const noexcept {
    const chunk_state& own = of(chunk);
    const bool again = own.next != never && reads(event_at(own.next).mode);
    return (again ? 1 : 0) + (machine_.elsewhere(chunk, tier) ? 0 : options_.dirty_weight);
  }
  [[nodiscard]] bool dear(chunk_id chunk, std::size_t tier) const noexcept {
    return options_.evict == engine_options::order::furthest_use && has(chunk, tier) &&
           weight(chunk, tier) > 1;
  }
  [[nodiscard]] heap& heap_of(std::size_t tier, bool is_dear) noexcept {
    return heaps_[tier * 2 + (is_dear ? 1 : 0)];
  }

  /// Makes `chunk` a candidate wherever it has a copy, from `tier` down, in its present order.
  void offer(chunk_id chunk, std::size_t tier) {
    for (; tier < bounded_; ++tier) {
      if (!machine_.at(chunk, tier).held) continue;
      heap& into = heap_of(tier, dear(chunk, tier));
      into.push_back({key(chunk, tier), to_index(chunk)});
      std::push_heap(into.begin(), into.end());
    }
  }
  [[nodiscard]] bool stands(const entry& each, std::size_t tier, bool is_dear) const noexcept {
    const chunk_id chunk{each.chunk};
    return machine_.at(chunk, tier).held && !of(chunk).picked && !(tier == 0 && machine_.leased(chunk)) &&
           key(chunk, tier) == each.key && dear(chunk, tier) == is_dear;
  }
  /// The heap's best candidate that is still one; null: none.
  [[nodiscard]] const entry* best(std::size_t tier, bool is_dear) {
    heap& from = heap_of(tier, is_dear);
    while (!from.empty() && !stands(from.front(), tier, is_dear)) {
      std::pop_heap(from.begin(), from.end());
      from.pop_back();
    }
    return from.empty() ? nullptr : &from.front();
  }

  /// Frees what `bytes` lack in `tier`, of chunks used later than `limit` only; nothing when that is too
  /// little.
  [[nodiscard]] bool make_room(std::size_t tier, std::uint64_t bytes, std::uint64_t limit) {
    const std::uint64_t lacking = machine_.room(tier).lacks(bytes);
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
        // By cost for each event that its room is had.
        const std::uint64_t near = cheap->key - std::min(cheap->key, position_) + 1;
        const std::uint64_t far =
            costly->key == never ? never : costly->key - std::min(costly->key, position_) + 1;
        is_dear = far / (1 + options_.dirty_weight) > near;
      }
      heap& from = heap_of(tier, is_dear);
      const entry chosen = from.front();
      const chunk_id chunk{chosen.chunk};
      const bool furthest = options_.evict == engine_options::order::furthest_use;
      const bool late = of(chunk).next > limit || !has(chunk, tier) || (furthest && chosen.key == never);
      if (!late && furthest) break;
      of(chunk).picked = true;
      std::pop_heap(from.begin(), from.end());
      from.pop_back();
      (late ? victims : aside).push_back({chosen, is_dear});
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
      std::push_heap(heap_of(tier, is_dear).begin(), heap_of(tier, is_dear).end());
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
    note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
    count_used(chunk, tier);
    if (!machine_.leased(chunk)) offer(chunk, 0);
    for (std::size_t i = tier; i < bounded_; ++i)
      pointers_[i] = std::min(pointers_[i], std::max(of(chunk).next, position_));
  }
  void write_back(chunk_id chunk, std::size_t tier) {
    const std::size_t below = tier + 1;
    if (below < bounded_ && !machine_.at(chunk, below).held && !make_room(below, trace_->size(chunk), 0))
      throw argument_error("planner: tier " + std::to_string(below) + " has no room for chunk " +
                           std::to_string(to_index(chunk)));
    note(machine_.write_back(chunk, tier, when_, event_, number()), plan_operation::write_back, chunk, tier,
         below);
    if (below < bounded_) offer(chunk, below);
    if (tier != 0 || !machine_.leased(chunk)) offer(chunk, tier);
  }

  // What is brought in

  /// Brings `chunk` to `tier` through those below, evicting what is used later than `limit`. Room is made
  /// from the top down, as what leaves one tier may go to the next; the copy that is read stays.
  [[nodiscard]] bool try_bring(chunk_id chunk, std::size_t tier, std::uint64_t limit) {
    std::size_t from = tier + 1;
    while (!has(chunk, from))
      ++from;
    of(chunk).picked = true;
    bool room = true;
    for (std::size_t to = tier; to < from && room; ++to)
      room = machine_.at(chunk, to).held || make_room(to, trace_->size(chunk), limit);
    for (std::size_t to = from; to-- > tier && room;) {
      note(machine_.fetch(chunk, to, when_, event_, number()), plan_operation::fetch, chunk, to + 1, to);
      if (when_ == plan_moment::ahead) count_unused(chunk, to);
    }
    of(chunk).picked = false;
    of(chunk).recent = ++releases_;
    offer(chunk, machine_.leased(chunk) ? 1 : 0);
    return room;
  }
  void bring(chunk_id chunk, std::size_t tier, std::uint64_t limit) {
    if (!try_bring(chunk, tier, limit)) {
      throw argument_error("planner: tier 0 to " + std::to_string(bounded_ - 1) + " have no room for chunk " +
                           std::to_string(to_index(chunk)) + " of " + std::to_string(trace_->size(chunk)) +
                           " bytes beside what is leased");
    }
  }
  void allocate(chunk_id chunk) {
    if (!make_room(0, trace_->size(chunk), 0)) {
      if (when_ == plan_moment::ahead) return;
      bring(chunk, 0, 0);  // says why
    }
    note(machine_.allocate(chunk), plan_operation::allocate, chunk, 0, 0);
  }

  /// Brings in ahead of time what links can start on before `until`.
  void prefetch(std::uint64_t until) {
    if (options_.ahead == engine_options::prefetch::by_count) return prefetch_by_count();
    for (std::size_t tier = bounded_; tier-- > 0;) {
      if (tier != 0 && options_.ahead_bytes_below == 0) continue;
      while (machine_.lane_free(tier, link_direction::onboard) < std::max(until, machine_.now() + 1)) {
        if (!prefetch_next(tier)) break;
      }
    }
    if (!options_.clean_early) return;
    for (std::size_t tier = 1; tier < bounded_; ++tier) {
      while (machine_.lane_free(tier, link_direction::offload) < std::max(until, machine_.now() + 1)) {
        if (!clean_next(tier)) break;
      }
    }
  }
  /// Writes back what would leave `tier` next if it were clean.
  [[nodiscard]] bool clean_next(std::size_t tier) {
    if (machine_.room(tier).fits(most_bytes_)) return false;
    const entry* cheap = best(tier, false);
    const entry* costly = best(tier, true);
    if (costly == nullptr || (cheap != nullptr && cheap->key >= costly->key)) return false;
    write_back(chunk_id{costly->chunk}, tier);
    return true;
  }
  [[nodiscard]] bool prefetch_next(std::size_t tier) {
    std::uint64_t& pointer = pointers_[tier];
    pointer = std::max(pointer, position_);
    const std::uint64_t stop = options_.cyclic ? position_ + lines() : end_;
    for (; pointer < stop; ++pointer) {
      const trace_event& event = event_at(pointer);
      if (event.call != trace_call::acquire || !reads(event.mode)) continue;
      if (pointer >= end_ && goal_ != nullptr && !goal_->holds(event.chunk, tier)) continue;
      // A write comes before it, or it is leased now: then nothing can or need be fetched.
      if (of(event.chunk).next != pointer || present(event.chunk, tier)) continue;
      break;
    }
    if (pointer >= stop) return false;
    const chunk_id chunk = event_at(pointer).chunk;
    const std::uint64_t bytes = trace_->size(chunk);
    const std::uint64_t most = tier == 0 ? options_.ahead_bytes : options_.ahead_bytes_below;
    if (unused_[tier] != 0 && (unused_[tier] > most || bytes > most - unused_[tier])) return false;
    const std::uint64_t limit = pointer;
    if (!try_bring(chunk, tier, limit)) return false;
    pointer = std::max(pointer, limit);
    return true;
  }
  [[nodiscard]] bool present(chunk_id chunk, std::size_t tier) const noexcept {
    for (std::size_t i = 0; i <= tier; ++i) {
      if (has(chunk, i)) return true;
    }
    return false;
  }
  void prefetch_by_count() {
    if (options_.count == 0) return;
    const std::uint64_t stop = options_.cyclic ? position_ + lines() : end_;
    std::uint64_t last = position_;
    std::uint32_t seen = 0;
    for (std::uint64_t i = position_; i < stop && seen < options_.count; ++i) {
      if (event_at(i).call == trace_call::acquire) {
        ++seen;
        last = i;
      }
    }
    for (std::uint64_t i = position_; i <= last && i < stop; ++i) {
      const trace_event& event = event_at(i);
      if (event.call != trace_call::acquire || !reads(event.mode) || of(event.chunk).next != i) continue;
      if (i >= end_ && goal_ != nullptr && !goal_->holds(event.chunk, 0)) continue;
      if (!has(event.chunk, 0) && !try_bring(event.chunk, 0, last)) break;
    }
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

  // The end of an iteration

  /// Drops what nobody can use any more.
  void tidy() {
    for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        const chunk_id chunk{i};
        if (!machine_.at(chunk, tier).held || has(chunk, tier)) continue;
        note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
        count_used(chunk, tier);
      }
    }
  }

  /// Makes the state that of the goal.
  void close() {
    const auto chunk_count = static_cast<std::uint32_t>(chunks_.size());
    for (std::uint32_t i = 0; i < chunk_count; ++i) {
      const chunk_id chunk{i};
      const std::size_t last = bounded_;
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        const bool refresh = goal_->holds(chunk, tier + 1) && tier + 1 < last;
        const bool home = goal_->home(chunk) && !machine_.worthless(chunk);
        if (has(chunk, tier) &&
            ((refresh && !has(chunk, tier + 1)) || (home && !reaches_home(chunk, tier)))) {
          write_back(chunk, tier);
        }
        if (machine_.at(chunk, tier).held && !(goal_->holds(chunk, tier) && has(chunk, tier))) {
          if (has(chunk, tier) && !machine_.elsewhere(chunk, tier) && !machine_.worthless(chunk))
            write_back(chunk, tier);
          note(machine_.drop(chunk, tier), plan_operation::drop, chunk, tier, tier);
          count_used(chunk, tier);
        }
      }
      offer(chunk, 0);
    }
    // In the order of use, so that the next iteration finds first what it needs first.
    std::vector<std::pair<std::uint64_t, std::uint32_t>> missing;
    for (std::uint32_t i = 0; i < chunk_count; ++i) {
      for (std::size_t tier = 0; tier < bounded_; ++tier) {
        if (goal_->holds(chunk_id{i}, tier) && !has(chunk_id{i}, tier)) {
          missing.push_back({chunks_[i].next, i});
          break;
        }
      }
    }
    std::sort(missing.begin(), missing.end());
    for (const auto& [next, i] : missing) {
      const chunk_id chunk{i};
      for (std::size_t tier = bounded_; tier-- > 0;) {
        if (!goal_->holds(chunk, tier) || has(chunk, tier)) continue;
        if (tier != 0 && present(chunk, tier - 1)) {
          if (has(chunk, tier - 1)) write_back(chunk, tier - 1);
          continue;
        }
        bring(chunk, tier, 0);
        for (std::size_t below = tier + 1; below < bounded_; ++below) {
          if (!goal_->holds(chunk, below) && machine_.at(chunk, below).held) {
            note(machine_.drop(chunk, below), plan_operation::drop, chunk, below, below);
            count_used(chunk, below);
          }
        }
        offer(chunk, 0);
      }
    }
  }
  [[nodiscard]] bool reaches_home(chunk_id chunk, std::size_t tier) const noexcept {
    for (std::size_t below = tier + 1; below <= bounded_; ++below) {
      if (has(chunk, below)) return true;
    }
    return false;
  }

  // What is written down

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

  /// From the last fetch to the first: each ends before its chunk is used and before the next one starts.
  void set_latest(plan_iteration& made) const {
    std::uint64_t next_start = never;
    for (std::size_t i = made.steps.size(); i-- > 0;) {
      plan_step& step = made.steps[i];
      const std::uint64_t use = used_[i];
      if (step.operation != plan_operation::fetch || step.to != 0 || use == never) continue;
      const std::uint64_t served =
          use < lines() ? served_ns_[use] : made.forecast.iteration_ns + served_ns_[use - lines()];
      const std::uint64_t finish = std::min(served, next_start);
      const std::uint64_t takes = step.finish_ns - step.start_ns;
      if (finish > takes) step.latest_ns = std::max(step.start_ns, finish - takes);
      next_start = step.latest_ns;
    }
  }
  const schedule_trace* trace_;
  const use_table* uses_;
  engine_options options_;
  executor machine_;
  std::size_t bounded_;
  std::vector<chunk_state> chunks_;
  std::vector<heap> heaps_;               // of tier i: 2i the cheap to evict, 2i + 1 the dear
  std::vector<std::uint64_t> pointers_;   // by tier: before it nothing is missing
  std::vector<std::uint64_t> unused_;     // by tier: bytes prefetched and not acquired since
  std::vector<bool> evicted_;             // by acquire: the chunk left dirty afterwards
  std::vector<std::uint64_t> served_ns_;  // by event
  std::vector<std::uint64_t>
      used_;  // by step: the event that next acquires its chunk, from the iteration's first
  const engine_goal* goal_ = nullptr;
  std::vector<plan_step>* steps_ = nullptr;
  std::uint64_t most_bytes_ = 0;  // of a chunk
  std::uint64_t base_ = 0;        // position of this iteration's first event
  std::uint64_t end_ = 0;         // position of the next one's
  std::uint64_t position_ = 0;    // of the event at hand
  std::uint64_t releases_ = 0;
  std::uint32_t event_ = 0;
  plan_moment when_ = plan_moment::ahead;
};

}  // namespace llmmem::inline v0::detail
