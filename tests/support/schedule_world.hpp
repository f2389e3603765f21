/// @file
/// Random small traces, and what brute force makes of them.
#pragma once

#include <llmmem/schedule/trace.hpp>
#include <llmmem/tiering/machine.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace llmmem_tests {

/// How a random trace may look.
struct trace_shape {
  std::uint32_t chunks = 4;
  std::uint32_t accesses = 8;
  std::uint64_t most_units = 1;  ///< sizes are 1 to as many thousand bytes
  bool writes = false;
  bool discards = false;
  bool overlaps = false;  ///< leases of two chunks at once
  std::uint64_t most_compute = 2'000;
};

/// A trace that follows the rules, of leases that are released at once or, with overlaps, one later.
inline llmmem::schedule_trace random_trace(random_numbers& random, const trace_shape& shape) {
  using namespace llmmem;
  trace_recorder record;
  for (std::uint32_t i = 0; i < shape.chunks; ++i)
    record.add_chunk(1'000 * (1 + random.below(shape.most_units)));
  std::vector<bool> worthless(shape.chunks);
  std::vector<chunk_id> held;
  std::vector<std::pair<chunk_id, bool>> first;  // whether the first access is a full write
  std::vector<bool> seen(shape.chunks);
  std::vector<bool> begins_written(shape.chunks);
  const auto let_go = [&](std::size_t most) {
    while (held.size() > most) {
      record.compute(random.below(shape.most_compute + 1));
      record.release(held.front());
      if (shape.discards && begins_written[to_index(held.front())] && random.once_in(3)) {
        record.discard(held.front());
        worthless[to_index(held.front())] = true;
      }
      held.erase(held.begin());
    }
  };
  for (std::uint32_t i = 0; i < shape.accesses; ++i) {
    const chunk_id chunk{random.below(shape.chunks)};
    if (std::find(held.begin(), held.end(), chunk) != held.end()) continue;
    auto mode = !shape.writes ? access_mode::read : static_cast<access_mode>(random.below(std::uint32_t{3}));
    if (worthless[to_index(chunk)]) mode = access_mode::write;
    if (!seen[to_index(chunk)]) begins_written[to_index(chunk)] = mode == access_mode::write;
    seen[to_index(chunk)] = true;
    worthless[to_index(chunk)] = false;
    let_go(shape.overlaps && random.once_in(2) ? 1 : 0);
    record.compute(random.below(shape.most_compute + 1));
    record.acquire(chunk, mode);
    held.push_back(chunk);
  }
  let_go(0);
  return record.freeze();
}

/// The fewest bytes that an iteration can bring in: every choice of what to drop at every acquire is tried,
/// over sets of resident chunks. For reading traces of tier 0 over one link; chunks are dropped only when
/// room is needed, which is never worse.
class least_fetched {
 public:
  least_fetched(const llmmem::schedule_trace& trace, std::uint64_t budget)
      : trace_(&trace), budget_(budget) {}

  /// From nothing, ending anyhow.
  [[nodiscard]] std::uint64_t once() { return go({{0U, 0}})->second; }

  /// The least of an iteration that ends with what it began with.
  [[nodiscard]] std::uint64_t cyclic() {
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (std::uint32_t begin = 0; begin < (1U << trace_->sizes().size()); ++begin) {
      if (bytes(begin) > budget_) continue;
      std::map<std::uint32_t, std::uint64_t> ends;
      go({{begin, 0}}, &ends);
      // What is missing at the end is brought in; what is too much was dropped.
      for (const auto& [set, cost] : ends)
        least = std::min(least, cost + bytes(begin & ~set));
    }
    return least;
  }

 private:
  using states = std::map<std::uint32_t, std::uint64_t>;

  [[nodiscard]] std::uint64_t bytes(std::uint32_t set) const {
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < trace_->sizes().size(); ++i)
      sum += (set >> i & 1U) != 0 ? trace_->sizes()[i] : 0;
    return sum;
  }

  /// All sets that can be resident after the last event, with the least bytes for each.
  states::value_type* go(states now, states* ends = nullptr) {
    std::uint32_t leased = 0;
    for (const llmmem::trace_event& event : trace_->events()) {
      const std::uint32_t bit = 1U << to_index(event.chunk);
      if (event.call != llmmem::trace_call::acquire) {
        leased &= ~bit;
        continue;
      }
      leased |= bit;
      states next;
      for (const auto& [set, cost] : now) {
        const std::uint32_t with = set | bit;
        const std::uint64_t paid = cost + ((set & bit) != 0 ? 0 : trace_->size(event.chunk));
        // Every subset that keeps what is leased.
        const std::uint32_t free = with & ~leased;
        for (std::uint32_t kept = free;; kept = (kept - 1) & free) {
          if (bytes(kept | leased) <= budget_) {
            const auto [at, fresh] = next.try_emplace(kept | leased, paid);
            if (!fresh) at->second = std::min(at->second, paid);
          }
          if (kept == 0) break;
        }
      }
      now = std::move(next);
    }
    if (ends != nullptr) *ends = now;
    last_ = std::move(now);
    return &*std::min_element(last_.begin(), last_.end(),
                              [](const auto& a, const auto& b) { return a.second < b.second; });
  }

  const llmmem::schedule_trace* trace_;
  std::uint64_t budget_;
  states last_;
};

/// The least time that an iteration from an empty tier 0 can take, for reading traces over one link: every
/// order of fetches, every victim, every moment to issue is tried. A state is what is there, what is on its
/// way, and when the link is free.
class least_time {
 public:
  least_time(const llmmem::schedule_trace& trace, const llmmem::schedule_machine& machine)
      : trace_(&trace), machine_(&machine) {}

  [[nodiscard]] std::uint64_t once() { return after(0, {}); }

 private:
  struct state {
    std::uint32_t held = 0;  // in tier 0 or on its way
    std::uint32_t leased = 0;
    std::uint64_t link_ns = 0;                                    // free in, from now
    std::vector<std::pair<std::uint32_t, std::uint64_t>> coming;  // chunk, arrives in
    friend bool operator<(const state& a, const state& b) {
      return std::tie(a.held, a.leased, a.link_ns, a.coming) <
             std::tie(b.held, b.leased, b.link_ns, b.coming);
    }
  };

  [[nodiscard]] std::uint64_t bytes(std::uint32_t set) const {
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < trace_->sizes().size(); ++i)
      sum += (set >> i & 1U) != 0 ? trace_->sizes()[i] : 0;
    return sum;
  }
  static void pass(state& now, std::uint64_t ns) {
    now.link_ns -= std::min(now.link_ns, ns);
    std::vector<std::pair<std::uint32_t, std::uint64_t>> left;
    for (const auto& [chunk, in] : now.coming) {
      if (in > ns) left.push_back({chunk, in - ns});
    }
    now.coming = left;
  }

  /// The least time from before event `index` to the end.
  std::uint64_t after(std::uint32_t index, const state& now) {
    const auto events = trace_->events();
    if (index == events.size()) return trace_->tail_ns();
    const auto known = known_.find({index, now});
    if (known != known_.end()) return known->second;
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    // Time between two events is cut where the link comes free: there the next fetch may begin.
    run(index, now, events[index].compute_ns, 0, least);
    known_[{index, now}] = least;
    return least;
  }

  /// `left` ns of computing remain before event `index`; `spent` have gone by.
  void run(std::uint32_t index, state now, std::uint64_t left, std::uint64_t spent, std::uint64_t& least) {
    const auto events = trace_->events();
    const llmmem::trace_event& event = events[index];
    const auto chunk_count = static_cast<std::uint32_t>(trace_->sizes().size());
    if (now.link_ns == 0) {
      for (std::uint32_t chunk = 0; chunk < chunk_count; ++chunk) {
        if ((now.held >> chunk & 1U) != 0) continue;
        // While the program waits for a chunk, to fetch another one first only makes it wait longer.
        if (left == 0 && event.call == llmmem::trace_call::acquire && chunk != to_index(event.chunk) &&
            (now.held >> to_index(event.chunk) & 1U) == 0)
          continue;
        const std::uint32_t free = now.held & ~now.leased & ~on_the_way(now);
        for (std::uint32_t kept = free;; kept = (kept - 1) & free) {
          const std::uint32_t held = (now.held & ~free) | kept | (1U << chunk);
          if (bytes(held) <= machine_->budgets[0] && !more_fits(now.held, free, kept, chunk)) {
            state next = now;
            next.held = held;
            const auto& link = machine_->links[0];
            next.link_ns = link.latency_ns + llmmem::transfer_ns(link, trace_->sizes()[chunk]);
            next.coming.push_back({chunk, next.link_ns});
            std::sort(next.coming.begin(), next.coming.end());
            run(index, next, left, spent, least);
          }
          if (kept == 0) break;
        }
      }
    }
    // Or the link waits: until it is free, or the event.
    const std::uint64_t step = now.link_ns != 0 && now.link_ns < left ? now.link_ns : left;
    if (left != 0 && step < left) {
      pass(now, step);
      run(index, now, left - step, spent + step, least);
      return;
    }
    pass(now, left);
    spent += left;
    if (left != 0) {
      run(index, now, 0, spent, least);
      return;
    }
    const std::uint32_t bit = 1U << to_index(event.chunk);
    if (event.call != llmmem::trace_call::acquire) {
      now.leased &= ~bit;
    } else {
      if ((now.held & bit) == 0) {
        // Nothing else will bring it: the link must, when it is free.
        if (now.link_ns == 0) return;
        const std::uint64_t wait = now.link_ns;
        pass(now, wait);
        run(index, now, 0, spent + wait, least);
        return;
      }
      for (const auto& [chunk, in] : now.coming) {
        if (chunk == to_index(event.chunk)) {
          const std::uint64_t wait = in;
          pass(now, wait);
          spent += wait;
          break;
        }
      }
      now.leased |= bit;
    }
    const std::uint64_t rest = after(index + 1, now);
    if (rest != std::numeric_limits<std::uint64_t>::max()) least = std::min(least, spent + rest);
  }
  [[nodiscard]] static std::uint32_t on_the_way(const state& now) {
    std::uint32_t set = 0;
    for (const auto& [chunk, in] : now.coming)
      set |= 1U << chunk;
    return set;
  }
  /// Whether less need be dropped: then this choice is never better.
  [[nodiscard]] bool more_fits(std::uint32_t held, std::uint32_t free, std::uint32_t kept,
                               std::uint32_t chunk) const {
    for (std::uint32_t i = 0; i < 32; ++i) {
      const std::uint32_t bit = 1U << i;
      if ((free & bit) != 0 && (kept & bit) == 0 &&
          bytes((held & ~free) | kept | bit | (1U << chunk)) <= machine_->budgets[0])
        return true;
    }
    return false;
  }

  const llmmem::schedule_trace* trace_;
  const llmmem::schedule_machine* machine_;
  std::map<std::pair<std::uint32_t, state>, std::uint64_t> known_;
};

}  // namespace llmmem_tests
