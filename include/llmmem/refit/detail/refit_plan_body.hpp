/// @file
/// The body of `make_refit`.
#pragma once

#include <llmmem/codec/concepts.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/refit/detail/refit_parts.hpp>
#include <llmmem/refit/refit_plan.hpp>
#include <llmmem/sharding/partition_bytes.hpp>
#include <llmmem/sharding/reshard.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Visits the elements of `set` that are in `box` as regular pieces: `visit(positions in the box, elements of
/// the set's dense storage)`, both by the same positions of the piece.
template <class Visit>
void each_regular_piece(const element_runs& set, const element_runs& box, Visit&& visit) {
  struct found {
    std::uint64_t in_box = 0;
    std::uint64_t in_storage = 0;
    std::uint64_t run = 0;
    std::uint64_t box_stride = 0;
    std::uint64_t storage_stride = 0;
    std::uint64_t count = 0;
  } now;
  const auto form = [](std::uint64_t begin, std::uint64_t run, std::uint64_t stride,
                       std::uint64_t count) -> element_runs {
    if (count == 1 || stride == run) return {begin, run * count, run * count, 1};
    return {begin, run, stride, count};
  };
  const auto end = [&] {
    if (now.count != 0)
      visit(form(now.in_box, now.run, now.box_stride, now.count),
            form(now.in_storage, now.run, now.storage_stride, now.count));
  };
  intersect(set, box, [&](std::uint64_t first, std::uint64_t count) {
    const std::uint64_t in_box = box.position_of(first);
    const std::uint64_t in_storage = set.position_of(first);
    if (now.count == 1 && now.run == count) {
      now.box_stride = in_box - now.in_box;
      now.storage_stride = in_storage - now.in_storage;
    }
    if (now.count != 0 && now.run == count && in_box == now.in_box + now.count * now.box_stride &&
        in_storage == now.in_storage + now.count * now.storage_stride) {
      ++now.count;
      return;
    }
    end();
    now = {in_box, in_storage, count, 0, 0, 1};
  });
  end();
}

inline void check_refit_ranks(std::span<const rank_id> ranks, rank_count world, const char* side) {
  if (ranks.size() != to_number(world))
    throw argument_error("refit: " + std::to_string(ranks.size()) + " ranks for a " + side +
                         " partition of " + std::to_string(to_number(world)) +
                         "; give the transport's rank of each");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (std::ranges::find(ranks.first(i), ranks[i]) != ranks.begin() + static_cast<std::ptrdiff_t>(i))
      throw argument_error("refit: rank " + std::to_string(to_index(ranks[i])) + " is listed twice as a " +
                           side);
  }
}

/// @throws argument_error  when the set has a part of a group. Rows are whole groups, so a group is `group`
/// elements from a multiple of it on.
inline void check_groups(const refit_tensor& tensor, const element_runs& set) {
  if (tensor.group == 0 || set.empty()) return;
  const std::uint64_t columns = tensor.shape.columns();
  if (columns % tensor.group == 0 && set.begin % tensor.group == 0 && set.run % tensor.group == 0 &&
      set.stride % tensor.group == 0)
    return;
  throw argument_error("refit: the partition cuts groups of " + std::to_string(tensor.group) +
                       " elements of '" + tensor.name + "', whose rows have " + std::to_string(columns) +
                       ": split rows, or columns at multiples of the group");
}

/// Gives every target tensor its scope, so that what arrives of a scope's tensors fits on every rank.
[[nodiscard]] inline std::vector<std::uint32_t> refit_scopes(const refit_plan& plan,
                                                             const std::vector<dtype>& wires) {
  std::vector<std::uint32_t> scope_of(plan.target.size());
  std::vector<std::uint64_t> arriving(plan.receivers.size());
  std::uint32_t scope = 0;
  for (std::size_t t = 0; t < plan.target.size(); ++t) {
    if (plan.target[t].group != 0 && !plan.options.keeps_arrivals) {
      const auto bytes = [&](std::size_t r) {
        return plan.target_set(t, r).elements() * (bits_of(wires[t]) / 8);
      };
      bool is_full = false;
      for (std::size_t r = 0; r < arriving.size(); ++r) {
        if (bytes(r) > plan.options.arrival_bytes)
          throw length_error("refit: " + std::to_string(bytes(r)) + " bytes of '" + plan.target[t].name +
                             "' are quantised on arrival at rank " +
                             std::to_string(to_index(plan.receivers[r])) + ", but arrival_bytes is " +
                             std::to_string(plan.options.arrival_bytes));
        is_full = is_full || arriving[r] + bytes(r) > plan.options.arrival_bytes;
      }
      if (is_full) {
        ++scope;
        std::ranges::fill(arriving, 0);
      }
      for (std::size_t r = 0; r < arriving.size(); ++r)
        arriving[r] += bytes(r);
    }
    scope_of[t] = scope;
  }
  return scope_of;
}

[[nodiscard]] inline std::uint64_t fingerprint_of(const refit_plan& plan) {
  std::uint64_t sum = format_digest("refit 1");
  const auto add = [&](auto... numbers) {
    const std::uint64_t all[] = {static_cast<std::uint64_t>(numbers)...};
    for (std::uint64_t number : all) {
      for (int byte = 0; byte < 8; ++byte)
        sum = (sum ^ ((number >> (8 * byte)) & 0xFFU)) * 0x100'0000'01B3ULL;
    }
  };
  add(plan.options.keeps_arrivals);
  for (const auto* side : {&plan.source, &plan.target}) {
    for (const refit_tensor& each : *side) {
      sum = format_digest(each.name, sum);
      add(each.shape.rows(), each.shape.columns(), each.element, each.group);
    }
  }
  for (const refit_copy& each : plan.copies) {
    const element_runs& source = plan.stored[to_index(each.moves.source)].storage;
    const element_runs& target = plan.wanted[to_index(each.moves.destination)].storage;
    add(each.scope, to_index(each.from), to_index(each.to), plan.part_of(each).wire,
        to_index(each.moves.tensor), each.moves.source_offset, each.moves.destination_offset, each.moves.run,
        each.moves.count, each.moves.source_stride, each.moves.destination_stride, source.begin, source.run,
        source.stride, target.begin, target.run, target.stride);
  }
  return sum;
}

}  // namespace detail

template <partition From, partition To>
refit_plan make_refit(const refit_side<From>& source, const refit_side<To>& target,
                      std::span<const refit_rule> rules, const refit_plan_options& options) {
  detail::check_catalogue(source.parts, facts_of(source.tensors), "refit: source");
  detail::check_catalogue(target.parts, facts_of(target.tensors), "refit: target");
  detail::check_refit_ranks(source.ranks, source.parts.world(), "source");
  detail::check_refit_ranks(target.ranks, target.parts.world(), "target");
  refit_plan plan;
  plan.source.assign(source.tensors.begin(), source.tensors.end());
  plan.target.assign(target.tensors.begin(), target.tensors.end());
  plan.senders.assign(source.ranks.begin(), source.ranks.end());
  plan.receivers.assign(target.ranks.begin(), target.ranks.end());
  plan.options = options;
  detail::refit_part_maker maker(plan.source, plan.target, plan.options);
  maker.apply(rules);
  plan.parts = maker.parts();
  plan.unused = maker.unused();

  const auto sets_of = [](const auto& parts, std::size_t ranks) {
    std::vector<element_runs> sets;
    for (std::uint32_t t = 0; t < parts.tensors(); ++t) {
      for (std::uint32_t r = 0; r < ranks; ++r)
        sets.push_back(parts.local(tensor_id{t}, rank_id{r}));
    }
    return sets;
  };
  plan.source_sets = sets_of(source.parts, plan.senders.size());
  plan.target_sets = sets_of(target.parts, plan.receivers.size());
  for (std::size_t t = 0; t < plan.target.size(); ++t) {
    for (std::size_t r = 0; r < plan.receivers.size(); ++r)
      detail::check_groups(plan.target[t], plan.target_set(t, r));
  }

  // Every part is a tensor of its own for `make_reshard`; its elements are positions in the part.
  std::vector<tensor_facts> facts;
  std::vector<stored_piece> stored;
  std::vector<wanted_piece> wanted;
  std::vector<dtype> wires(plan.target.size());
  for (std::uint32_t p = 0; p < plan.parts.size(); ++p) {
    const refit_part& part = plan.parts[p];
    wires[to_index(part.target)] = part.wire;
    facts.push_back({.name = plan.target[to_index(part.target)].name,
                     .shape = tensor_shape::vector(part.to.elements()),
                     .element_bytes = static_cast<std::uint32_t>(bits_of(part.wire) / 8)});
    for (std::size_t s = 0; s < plan.senders.size(); ++s) {
      const rank_id rank = plan.senders[s];
      detail::each_regular_piece(plan.source_set(to_index(part.source), s), part.from,
                                 [&](const element_runs& positions, const element_runs& storage) {
                                   stored.push_back({tensor_id{p}, holder_id{to_index(rank)}, positions});
                                   plan.stored.push_back({rank, storage});
                                 });
    }
    for (std::size_t r = 0; r < plan.receivers.size(); ++r) {
      const rank_id rank = plan.receivers[r];
      detail::each_regular_piece(
          plan.target_set(to_index(part.target), r), part.to,
          [&](const element_runs& positions, const element_runs& storage) {
            wanted.push_back({tensor_id{p}, rank, positions, holder_id{to_index(rank)}});
            plan.wanted.push_back({rank, storage});
          });
    }
  }
  const reshard_plan moves = make_reshard(facts, stored, wanted);

  const std::vector<std::uint32_t> scope_of = detail::refit_scopes(plan, wires);
  plan.scopes = scope_of.empty() ? 0 : scope_of.back() + 1;
  for (const reshard_copy& copy : moves.copies) {
    const rank_id from = plan.stored[to_index(copy.source)].rank;
    const rank_id to = plan.wanted[to_index(copy.destination)].rank;
    plan.copies.push_back({scope_of[to_index(plan.parts[to_index(copy.tensor)].target)], from, to, copy});
    const std::uint64_t bytes = copy.elements() * facts[to_index(copy.tensor)].element_bytes;
    if (from == to) {
      plan.kept_bytes += bytes;
      continue;
    }
    plan.bytes += bytes;
    const auto is_it = [&](const refit_link& each) { return each.from == from && each.to == to; };
    auto link = std::ranges::find_if(plan.links, is_it);
    if (link == plan.links.end()) link = plan.links.insert(link, refit_link{from, to, 0, 0});
    link->elements += copy.elements();
    link->bytes += bytes;
  }
  std::ranges::sort(plan.links, [](const refit_link& a, const refit_link& b) {
    return std::tuple(a.from, a.to) < std::tuple(b.from, b.to);
  });
  std::ranges::sort(plan.copies, [](const refit_copy& a, const refit_copy& b) {
    const auto key = [](const refit_copy& c) {
      return std::tuple(c.scope, c.from, c.to, c.moves.tensor, c.moves.destination,
                        c.moves.destination_offset);
    };
    return key(a) < key(b);
  });
  plan.fingerprint = detail::fingerprint_of(plan);
  return plan;
}

}  // namespace v0
}  // namespace llmmem
