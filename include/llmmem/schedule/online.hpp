/// @file
/// The result of an online eviction policy on a trace, in the same virtual time as a plan.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/schedule/detail/executor.hpp>
#include <llmmem/schedule/detail/use_table.hpp>
#include <llmmem/schedule/simulate.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

/// Runs a trace over two tiers on demand. A missing chunk is fetched when the program asks for it, and
/// `policy` names the chunks that leave, one after another, until it fits; dirty ones are written back first.
/// The slot of a chunk has the chunk's number. With each access the policy receives the chunk's next use, as
/// a count of events: `min_eviction` uses it, `lru_eviction` does not.
///
/// @param policy  fresh, with a capacity of at least as many slots as there are chunks.
/// @par Complexity   O(events) policy calls an iteration.
/// @throws argument_error  when the machine has more than two tiers, tier 0 cannot hold the chunks leased at
///                         once, or the policy has too few slots.
template <eviction_policy Policy>
[[nodiscard]] schedule::simulation simulate_online(const schedule_trace& trace,
                                                   const schedule_machine& machine, Policy policy,
                                                   std::size_t iterations = 2,
                                                   timeline_detail detail = timeline_detail::none) {
  machine.check();
  const auto refuse = [](const std::string& why) { throw argument_error("simulate_online: " + why); };
  if (machine.tiers() != 2) refuse(std::to_string(machine.tiers()) + " tiers; it runs over 2");
  if (trace.max_leased_bytes() > machine.budgets[0]) {
    refuse("tier 0 has " + std::to_string(machine.budgets[0]) + " bytes; the trace leases " +
           std::to_string(trace.max_leased_bytes()) + " at once");
  }
  if (to_number(policy.capacity()) < trace.sizes().size()) {
    refuse("the policy has " + std::to_string(to_number(policy.capacity())) + " slots; there are " +
           std::to_string(trace.sizes().size()) + " chunks");
  }
  const detail::use_table uses(trace);
  detail::executor tiers(trace, machine, detail);
  const auto events = trace.events();
  const auto make_room = [&](std::uint64_t bytes) {
    while (!tiers.budget(0).fits(bytes)) {
      const auto victim = policy.victim();
      if (!victim) throw error("simulate_online: the policy names no victim, though chunks are unpinned");
      const chunk_id chunk{to_index(*victim)};
      if (!tiers.worthless(chunk) && !tiers.elsewhere(chunk, 0))
        static_cast<void>(tiers.write_back(chunk, 0, plan_moment::at_call, 0, 0));
      static_cast<void>(tiers.drop(chunk, 0));
      detail::evict(policy, *victim);
    }
  };
  schedule::simulation all;
  for (std::size_t iteration = 0; iteration < iterations; ++iteration) {
    tiers.begin_iteration();
    for (std::uint32_t i = 0; i < events.size(); ++i) {
      const trace_event& event = events[i];
      const slot_id slot{to_index(event.chunk)};
      tiers.compute(event.compute_ns, i);
      if (event.call == trace_call::acquire) {
        const std::uint64_t base = std::uint64_t{iteration} * events.size();
        const std::uint32_t next = uses.after(i);
        const access_hint hint{.next_use = next > i ? base + next : base + events.size() + next};
        if (tiers.at(event.chunk, 0).held &&
            (tiers.at(event.chunk, 0).newest || !tiering::reads(event.mode))) {
          policy.pin(slot);
          policy.touch(slot, hint);
        } else {
          make_room(trace.size(event.chunk));
          if (tiering::reads(event.mode)) {
            static_cast<void>(tiers.fetch(event.chunk, 0, plan_moment::at_call, i, i));
          } else {
            static_cast<void>(tiers.allocate(event.chunk));
          }
          policy.insert(slot, hint);
        }
      }
      if (tiers.serve(i) != detail::refusal::none)
        throw error("simulate_online: an event could not be served");
      if (event.call == trace_call::release) policy.unpin(slot);
    }
    tiers.compute(trace.tail_ns(), static_cast<std::uint32_t>(events.size()));
    all.iterations.push_back(tiers.end_iteration());
  }
  all.most_bytes = tiers.most_bytes();
  all.spans = tiers.take_spans();
  return all;
}

}  // namespace v0
}  // namespace llmmem
