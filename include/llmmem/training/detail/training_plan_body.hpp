/// @file
/// The bodies of `training_plan`.
#pragma once

#include <llmmem/schedule/bounds.hpp>
#include <llmmem/sharding/sharded_wires.hpp>
#include <llmmem/tiering/machine.hpp>
#include <llmmem/training/detail/plan_checks.hpp>
#include <llmmem/training/detail/rank_shares.hpp>
#include <llmmem/training/detail/step_writer.hpp>
#include <llmmem/training/training_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Adds bytes, of which a plan may have too many.
inline void add_bytes(std::uint64_t& to, std::uint64_t more, const char* what) {
  to = checked_add(to, more, what);
}

/// Returns the most bytes of activations at once, if ranges are rounded as `memory` says.
[[nodiscard]] inline std::uint64_t records_at_once(const training_shape& shape,
                                                   const memory_rounding& memory) {
  std::uint64_t kept = 0;
  std::uint64_t most = 0;
  for (const training_layer& each : shape.layers) {
    const std::uint64_t stays = memory.taken(each.record.kept_bytes());
    const std::uint64_t in_use = each.record.is_complete()
                                     ? stays
                                     : checked_add(memory.taken(each.record.bytes), stays, "training_plan");
    most = std::max(most, checked_add(kept, in_use, "training_plan: bytes of activations"));
    kept += stays;
  }
  return most;
}

/// Returns the bytes of weights, gradients and the optimizer's state in plain memory.
[[nodiscard]] inline std::uint64_t resident_state(const training_plan& plan, const rank_shares_of& shares) {
  std::uint64_t sum = 0;
  const auto add_kind = [&](const auto& local) {
    std::uint64_t range = 0;
    for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
      range = checked_add(range, local(layer), "training_plan: bytes of a kind of state");
      if (plan.ranges == state_ranges::per_kind && layer + 1 < shares.layers()) continue;
      sum = checked_add(sum, plan.memory.taken(range), "training_plan: bytes of state");
      range = 0;
    }
  };
  for (const state_kind kind : {state_kind::weights, state_kind::gradients})
    add_kind([&](std::size_t layer) { return shares.local(layer, kind); });
  for (const optimizer_array array : optimizer_arrays)
    add_kind([&](std::size_t layer) { return shares.state(layer, array); });
  return sum;
}

/// Returns the most bytes of gathered layers and sums at once.
[[nodiscard]] inline predicted_bytes gathered_at_once(const training_plan& plan,
                                                      const rank_shares_of& shares) {
  std::uint64_t most = 0;
  std::uint64_t most_sum = 0;  // gradients and the messages of their sum
  std::uint64_t most_gradients = 0;
  std::uint64_t most_sum_messages = 0;
  std::uint64_t most_messages = 0;  // of a gather
  std::uint64_t most_rebuilt = 0;   // weights that are gathered in addition to the plan
  constexpr const char* what = "training_plan: bytes of gathered layers";
  std::vector<std::uint64_t> wholes;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t whole = plan.memory.taken(shares.whole(layer));
    const std::uint64_t weights = shares.is_gathered(layer, state_kind::weights) ? whole : 0;
    const std::uint64_t gradients = shares.is_gathered(layer, state_kind::gradients) ? whole : 0;
    const std::uint64_t sum_messages = plan.memory.taken(shares.sum_bytes(layer));
    const std::uint64_t sum = checked_add(gradients, sum_messages, what);
    // The embedding's gradients are made without its weights.
    const std::uint64_t messages = plan.memory.taken(shares.gather_bytes(layer));
    const bool needs_weights = shares.is_read_back(layer) && !shares.has_weights_back(layer);
    most = std::max(
        {most, checked_add(weights, messages, what), checked_add(sum, needs_weights ? weights : 0, what)});
    most_sum = std::max(most_sum, sum);
    most_gradients = std::max(most_gradients, gradients);
    most_sum_messages = std::max(most_sum_messages, sum_messages);
    most_messages = std::max(most_messages, messages);
    if (shares.is_read_by_rebuild(layer)) most_rebuilt = std::max(most_rebuilt, weights);
    wholes.push_back(whole);
  }
  // Contributions wait for their sums, of which one has messages at a time.
  std::uint64_t in_flight = 0;
  if (plan.sums_in_flight != 0) {
    const std::uint64_t sums = std::min<std::uint64_t>(plan.sums_in_flight, shares.layers());
    in_flight = checked_add(checked_multiply(sums, most_gradients, what), most_sum_messages, what);
  }
  if (plan.gather_ahead == 0) return {checked_add(most, in_flight, what), in_flight != 0};
  // The largest sum over `gather_ahead` + 1 consecutive layers, in the order of use: the plan's budget, of
  // which also a rank that has one of them completely may use all, with earlier layers that stay.
  std::uint64_t in_a_row = 0;
  const std::size_t layers = wholes.size();
  std::vector<std::uint64_t> uses(wholes.begin(), wholes.end());
  for (std::size_t layer = layers; layer-- > 1;)
    uses.push_back(wholes[layer]);
  for (std::size_t first = 0; first < uses.size(); ++first) {
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < uses.size() && i - first <= plan.gather_ahead; ++i)
      add_bytes(bytes, uses[i], what);
    in_a_row = std::max(in_a_row, bytes);
  }
  std::uint64_t all = 0;
  for (std::size_t layer = 0; layer < layers; ++layer)
    add_bytes(all, shares.is_gathered(layer, state_kind::weights) ? wholes[layer] : 0, what);
  add_bytes(most_sum, in_flight, what);
  add_bytes(most_sum, most_rebuilt, what);
  return {checked_add(checked_add(std::min(in_a_row, all), most_sum, what), most_messages, what), true};
}

/// Counts the memory and the messages of outer steps.
/// @param shares  of a rank of `worker`.
inline void count_outer(const training_plan& plan, const rank_shares_of& shares, std::uint32_t worker,
                        training_prediction& into) {
  if (plan.outer.local_steps == 0) return;
  constexpr const char* what = "training_plan: bytes of outer steps";
  const bool is_resident = plan.tiers.empty();
  std::uint64_t change = 0;
  std::uint64_t messages = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t bytes = sizeof(float) * shares.updated(layer);
    if (bytes == 0) continue;
    add_bytes(into.outer_bytes, 2 * bytes, what);
    if (is_resident) add_bytes(into.resident_outer_bytes, 2 * plan.memory.taken(bytes), what);
    change = std::max(change, bytes);
    messages = std::max(messages, shares.outer_sum_bytes(layer));
    add_bytes(into.sent_per_round, shares.sent_by_round(layer, worker), what);
    // Once, by the ranks of the first worker, of which several may keep the same.
    if (worker == 0) add_bytes(into.saved_bytes, 2 * shares.owned(layer), what);
  }
  into.round_bytes = messages + (is_resident ? plan.memory.taken(change) : 0);
}

/// The chunks of outer steps in tiers.
struct outer_chunks {
  std::uint64_t bytes = 0;  ///< of all
  std::uint64_t largest_chunk = 0;
  std::uint64_t largest_lease = 0;  ///< of a layer in a round, with its weights
};
[[nodiscard]] inline outer_chunks outer_chunks_of(const training_plan& plan, const rank_shares_of& shares) {
  outer_chunks all;
  if (plan.outer.local_steps == 0) return all;
  constexpr const char* what = "training_plan: bytes of outer steps";
  const auto chunk = [&](std::uint64_t bytes) {
    return checked_multiply((bytes + plan.granularity - 1) / plan.granularity, plan.granularity, what);
  };
  std::uint64_t change = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer)
    change = std::max(change, chunk(sizeof(float) * shares.updated(layer)));
  all.bytes = change;
  all.largest_chunk = change;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const std::uint64_t both = 2 * chunk(sizeof(float) * shares.updated(layer));
    add_bytes(all.bytes, both, what);
    const std::uint64_t weights = chunk(shares.local(layer, state_kind::weights));
    if (both == 0) continue;
    const std::uint64_t in_pages =
        tier_bytes(plan, weights) + 2 * tier_bytes(plan, both / 2) + tier_bytes(plan, change);
    all.largest_lease = std::max(all.largest_lease, in_pages);
  }
  return all;
}

/// Counts the bytes that a rank sends, in a step and outside of steps.
inline void count_sent(const training_plan& plan, const rank_shares_of& shares, training_prediction& into) {
  constexpr const char* what = "training_plan: bytes sent";
  const std::uint64_t others = plan.ranks - 1;
  const std::size_t layers = shares.layers();
  const bool is_gathered = is_sharded(plan.zero, state_kind::weights);
  const std::size_t stay =
      plan.gather_ahead == 0 ? 0 : std::min<std::size_t>(plan.gather_ahead + 1, layers - 1);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    add_bytes(into.sent_per_step, shares.sent_by_sum(layer), what);
    add_bytes(into.sent_per_step, shares.sent_by_update(layer), what);
    if (is_gathered) {
      const bool is_read_back = shares.is_read_back(layer) && layer < layers - stay;
      add_bytes(into.sent_per_step, shares.sent_by_gather(layer), what);
      if (shares.is_read_by_rebuild(layer))
        add_bytes(into.sent_per_step, shares.sent_by_gather_back(layer), what);
      if (is_read_back) add_bytes(into.sent_per_step, shares.sent_by_gather_back(layer), what);
      add_bytes(into.sent_once, shares.sent_by_gather(layer), what);
    } else if (plan.zero != zero_stage::none) {
      add_bytes(into.sent_per_step, shares.owned(layer) * others, what);
      add_bytes(into.sent_once, shares.owned(layer) * others, what);
    }
  }
}

}  // namespace detail

inline schedule_trace step_trace(const training_plan& plan, const training_shape& shape, rank_id rank) {
  check_plan(plan, shape);
  return detail::step_writer(plan, shape, rank_id{to_index(rank) % plan.ranks}).write();
}

inline training_prediction predict(const training_plan& plan, const training_shape& shape, rank_id rank,
                                   std::span<const link_model> links, const link_model& network) {
  check_plan(plan, shape);
  const std::uint64_t world = std::uint64_t{plan.ranks} * plan.outer.workers;
  if (to_index(rank) >= world) {
    throw argument_error("training_plan: rank " + std::to_string(to_index(rank)) + " of " +
                         std::to_string(world));
  }
  if (!links.empty() && links.size() != plan.tiers.size()) {
    throw argument_error("training_plan: " + std::to_string(links.size()) + " links for " +
                         std::to_string(plan.tiers.size()) + " budgets; give one link below each budget");
  }
  const detail::rank_shares_of shares(plan, shape, rank_id{to_index(rank) % plan.ranks});
  training_prediction all;
  constexpr const char* state = "training_plan: bytes of state";
  constexpr const char* memory = "training_plan: bytes";
  std::uint64_t compute_ns = 0;
  for (std::size_t layer = 0; layer < shares.layers(); ++layer) {
    const training_layer& it = shape.layers[layer];
    detail::add_bytes(all.kept.weights, shares.local(layer, state_kind::weights), state);
    detail::add_bytes(all.kept.gradients, shares.local(layer, state_kind::gradients), state);
    detail::add_bytes(all.saved_bytes, shares.owned(layer), state);
    for (const detail::optimizer_array array : detail::optimizer_arrays) {
      detail::add_bytes(all.kept.optimizer, shares.state(layer, array), state);
      detail::add_bytes(all.saved_bytes, shares.owned_state(layer, array), state);
    }
    compute_ns += it.forward_ns + it.backward_ns + it.update_ns + it.rebuild_ns;
  }
  all.records_bytes = detail::records_at_once(shape, {.from_bytes = max_bytes});
  all.workspace_bytes = shape.workspace_bytes;
  all.gathered = detail::gathered_at_once(plan, shares);
  detail::count_sent(plan, shares, all);
  detail::count_outer(plan, shares, to_index(rank) / plan.ranks, all);
  if (plan.wires.keeps_errors && plan.ranks > 1) {
    for (std::size_t layer = 0; layer < shares.layers(); ++layer)
      detail::add_bytes(all.residual_bytes, shares.whole(layer), state);
    all.residual_bytes = plan.memory.taken(all.residual_bytes);
  }
  for (std::size_t layer = 0; layer < shares.layers(); ++layer)
    detail::add_bytes(all.secondary_bytes, shares.secondary(layer), state);
  all.secondary_bytes = plan.memory.taken(all.secondary_bytes);
  all.fast = {std::max(all.gathered.bytes, all.round_bytes), all.gathered.is_bound};
  for (const std::uint64_t more :
       {all.residual_bytes, all.secondary_bytes, all.workspace_bytes, all.resident_outer_bytes})
    detail::add_bytes(all.fast.bytes, more, memory);
  if (plan.tiers.empty()) {
    all.resident_state_bytes = detail::resident_state(plan, shares);
    all.resident_records_bytes = detail::records_at_once(shape, plan.memory);
    detail::add_bytes(all.fast.bytes, all.resident_state_bytes, memory);
    detail::add_bytes(all.fast.bytes, all.resident_records_bytes, memory);
  } else {
    const schedule_trace trace = step_trace(plan, shape, rank);
    const detail::outer_chunks outer = detail::outer_chunks_of(plan, shares);
    std::uint64_t chunks = outer.bytes;
    for (const std::uint64_t each : trace.sizes())
      chunks = checked_add(chunks, each, "training_plan: bytes of all chunks");
    const std::uint64_t held = detail::most_held_of_tier(plan, shape, rank);
    all.largest_lease_bytes = std::max(held, outer.largest_lease);
    if (all.largest_lease_bytes > plan.tiers.front()) {
      throw argument_error(
          "training_plan: a first tier of " + std::to_string(plan.tiers.front()) + " bytes; " +
          (outer.largest_lease > held ? "an outer step" : "a step") + " leases " +
          std::to_string(all.largest_lease_bytes) + " at once" +
          (plan.tier_page_bytes == 1 ? "" : ", in pages of " + std::to_string(plan.tier_page_bytes)) +
          "; give it at least as many");
    }
    const auto sizes = trace.sizes();
    const auto largest = std::ranges::max_element(sizes);
    const std::uint64_t chunk = largest == sizes.end() ? 0 : *largest;
    all.largest_chunk_bytes = detail::tier_bytes(plan, std::max(chunk, outer.largest_chunk));
    for (std::size_t tier = 1; tier < plan.tiers.size(); ++tier) {
      if (plan.tiers[tier] >= all.largest_chunk_bytes) continue;
      throw argument_error("training_plan: tier " + std::to_string(tier) + " of " +
                           std::to_string(plan.tiers[tier]) + " bytes; the largest chunk takes " +
                           std::to_string(all.largest_chunk_bytes));
    }
    for (const std::uint64_t budget : plan.tiers)
      all.tiers.push_back({budget, true});
    all.tiers.push_back({chunks, false});
    all.fast = {checked_add(all.fast.bytes, all.tiers.front().bytes, memory), true};
    if (!links.empty()) {
      const plan_bound bound = lower_bound(
          trace, {.budgets = plan.tiers, .links = {links.begin(), links.end()}}, bounded_iteration::steady);
      for (std::size_t edge = 0; edge < bound.edges.size(); ++edge)
        all.min_moved_bytes.push_back(bound.bytes(edge));
      all.stall_ns = bound.stall_ns;
    }
  }
  if (network.bytes_per_second != 0) {
    const std::uint64_t round = plan.outer.local_steps == 0 ? 0 : all.sent_per_round / plan.outer.local_steps;
    const std::uint64_t sending = transfer_ns(network, checked_add(all.sent_per_step, round, memory));
    all.stall_ns = std::max(all.stall_ns, sending > compute_ns ? sending - compute_ns : 0);
  }
  all.step_ns = compute_ns + all.stall_ns;
  return all;
}

}  // namespace v0
}  // namespace llmmem
