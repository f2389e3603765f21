/// @file
/// Plans how each piece of a state comes back over a link and a processor after it: kept, fetched plain or
/// compressed, projected from hidden states, or computed again.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/model/model_shape.hpp>
#include <llmmem/transfer/link_model.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The ways in which a piece comes back.
enum class way_kind : std::uint8_t {
  keep,              ///< it stays in fast memory
  fetch,             ///< over the link, unchanged
  fetch_compressed,  ///< over the link, and decoded
  project,           ///< the layer's hidden states over the link; keys and values are computed from them
  recompute          ///< from its input, which remains if the piece before it is computed again, too
};

/// One way of one piece.
struct way_back {
  way_kind kind = way_kind::fetch;
  std::uint64_t link_bytes = 0;
  std::uint64_t compute_ns = 0;  ///< after its bytes have arrived
  std::uint64_t kept_bytes = 0;  ///< of fast memory, in the meantime
};

/// The path by which pieces come back: a link, then a processor; each handles one piece at a time.
struct way_back_machine {
  link_model link{};
  std::uint64_t kept_budget = 0;  ///< fast memory for pieces that stay
};

/// A way for each piece.
struct way_back_plan {
  std::vector<std::uint32_t> ways{};  ///< an index, by piece
  std::uint64_t time_ns = 0;          ///< until all pieces are back
  std::uint64_t link_ns = 0;          ///< total work of the link
  std::uint64_t compute_ns = 0;       ///< total work of the processor
  std::uint64_t kept_bytes = 0;
};

namespace detail {

[[nodiscard]] constexpr std::uint64_t link_time(const way_back_machine& machine, const way_back& way) {
  return way.link_bytes == 0 ? 0
                             : checked_add(transfer_ns(machine.link, way.link_bytes), machine.link.latency_ns,
                                           "plan_way_back: time of the link");
}

}  // namespace detail

/// Returns the times of a choice of ways. Pieces come in order: the processor begins a piece when its bytes
/// have arrived and the piece before is done.
/// @pre `ways` has a valid index for each piece
[[nodiscard]] inline way_back_plan time_way_back(std::span<const std::vector<way_back>> pieces,
                                                 std::vector<std::uint32_t> ways,
                                                 const way_back_machine& machine) {
  way_back_plan plan;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const way_back& way = pieces[i][ways[i]];
    plan.link_ns = checked_add(plan.link_ns, detail::link_time(machine, way), "plan_way_back: time");
    plan.compute_ns = checked_add(plan.compute_ns, way.compute_ns, "plan_way_back: time");
    plan.kept_bytes = checked_add(plan.kept_bytes, way.kept_bytes, "plan_way_back: kept bytes");
    const bool is_kept = way.link_bytes == 0 && way.compute_ns == 0;
    const bool needs_link = way.link_bytes != 0;
    if (!is_kept)
      plan.time_ns = checked_add(std::max(plan.time_ns, needs_link ? plan.link_ns : 0), way.compute_ns,
                                 "plan_way_back: time");
  }
  plan.ways = std::move(ways);
  return plan;
}

/// Returns the ways by which all pieces are back soonest. Pieces cross the link in order, and are then
/// computed in order. A piece is computed again only if all pieces before it are. Exact: no choice is faster.
/// So, if these are among the ways, it is never slower than fetching everything or computing everything
/// again.
///
/// @param pieces  the ways of each piece.
/// @par Complexity      O(pieces x front log front), where the front consists of the pairs of times that no
///                      other pair beats; with equal pieces it is small: 32 layers of 4 ways take
///                      milliseconds.
/// @par Thread safety   a pure function.
/// @throws argument_error  for a piece without a usable way, and for a needed link without bandwidth.
/// @throws length_error    past 2^63 - 1.
/// @par Source          HCache (Gao et al. 2024, arXiv 2410.05004) mixes hidden states with one other way;
///                      two machines in sequence: Johnson (1954).
[[nodiscard]] inline way_back_plan plan_way_back(std::span<const std::vector<way_back>> pieces,
                                                 const way_back_machine& machine) {
  struct partial {
    std::uint64_t link = 0;
    std::uint64_t time = 0;
    std::uint64_t kept = 0;
    bool is_chain = true;  // all pieces so far were computed again
    std::size_t before = 0;
    std::uint32_t way = 0;
  };
  std::vector<std::vector<partial>> fronts{{partial{}}};
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::vector<partial> next;
    for (std::size_t from = 0; from < fronts.back().size(); ++from) {
      const partial& so_far = fronts.back()[from];
      for (std::uint32_t w = 0; w < pieces[i].size(); ++w) {
        const way_back& way = pieces[i][w];
        const bool recomputes = way.kind == way_kind::recompute;
        if (recomputes && !so_far.is_chain) continue;
        partial one{.before = from, .way = w};
        one.kept = checked_add(so_far.kept, way.kept_bytes, "plan_way_back: kept bytes");
        if (one.kept > machine.kept_budget) continue;
        one.link = checked_add(so_far.link, detail::link_time(machine, way), "plan_way_back: time");
        one.time = so_far.time;
        if (way.link_bytes != 0) one.time = std::max(one.time, one.link);
        one.time = checked_add(one.time, way.compute_ns, "plan_way_back: time");
        one.is_chain = recomputes;
        next.push_back(one);
      }
    }
    if (next.empty()) {
      throw argument_error("plan_way_back: piece " + std::to_string(i) +
                           " has no usable way; give it one that fetches it");
    }
    std::ranges::sort(next, [](const partial& a, const partial& b) {
      return std::tie(a.link, a.time, a.kept, b.is_chain, a.before, a.way) <
             std::tie(b.link, b.time, b.kept, a.is_chain, b.before, b.way);
    });
    // A chain can continue like any other partial plan, and can also recompute.
    std::vector<partial> front;
    std::map<std::uint64_t, std::uint64_t> seen[2];  // least kept bytes up to each time: of chains, and of
                                                     // all
    const auto is_beaten = [](const std::map<std::uint64_t, std::uint64_t>& by, const partial& it) {
      const auto behind = by.upper_bound(it.time);
      return behind != by.begin() && std::prev(behind)->second <= it.kept;
    };
    const auto add = [](std::map<std::uint64_t, std::uint64_t>& to, const partial& it) {
      auto at = to.insert_or_assign(it.time, it.kept).first;
      for (++at; at != to.end() && at->second >= it.kept;)
        at = to.erase(at);
    };
    for (const partial& each : next) {
      if (is_beaten(seen[each.is_chain ? 0 : 1], each)) continue;
      if (each.is_chain) add(seen[0], each);
      if (!is_beaten(seen[1], each)) add(seen[1], each);
      front.push_back(each);
    }
    fronts.push_back(std::move(front));
  }
  std::size_t at = 0;
  for (std::size_t i = 1; i < fronts.back().size(); ++i) {
    if (fronts.back()[i].time < fronts.back()[at].time) at = i;
  }
  std::vector<std::uint32_t> ways(pieces.size());
  for (std::size_t i = pieces.size(); i-- > 0;) {
    ways[i] = fronts[i + 1][at].way;
    at = fronts[i + 1][at].before;
  }
  return time_way_back(pieces, std::move(ways), machine);
}

/// Returns the ways of a model's cached keys and values, with 16-bit elements, layer by layer: fetch,
/// project, recompute. Counts products only: two operations per weight and token, and for a recomputed layer
/// the attention of each token over the earlier ones.
///
/// @param flops_per_second  of the processor.
/// @throws argument_error  for 0 operations per second or 0 tokens.
/// @throws length_error    past 2^63 - 1.
[[nodiscard]] inline std::vector<std::vector<way_back>> kv_ways(const model_shape& model,
                                                                std::uint64_t tokens,
                                                                std::uint64_t flops_per_second) {
  if (flops_per_second == 0) throw argument_error("kv_ways: 0 operations a second");
  if (tokens == 0) throw argument_error("kv_ways: 0 tokens");
  const auto times = [](std::uint64_t a, std::uint64_t b) { return checked_multiply(a, b, "kv_ways"); };
  const auto nanoseconds = [&](double operations) {
    const double exact = operations * 1e9 / static_cast<double>(flops_per_second);
    const auto whole = static_cast<std::uint64_t>(exact);
    return exact - static_cast<double>(whole) < 0.5 ? whole : whole + 1;  // <cmath> has 8,000 lines
  };
  const std::uint64_t width = model.kv_elements_per_layer();
  const auto t = static_cast<double>(tokens);
  const auto hidden = static_cast<double>(model.hidden);
  const double project = 2 * hidden * static_cast<double>(width) * t;
  const auto weights = static_cast<double>(model.attention_parameters()) +
                       static_cast<double>(model.mlp_parameters(model.intermediate));
  const double again =
      2 * weights * t + 2 * t * t * static_cast<double>(times(model.heads, model.head_width));
  const std::vector<way_back> ways{{.kind = way_kind::fetch, .link_bytes = times(times(2, width), tokens)},
                                   {.kind = way_kind::project,
                                    .link_bytes = times(times(2, model.hidden), tokens),
                                    .compute_ns = nanoseconds(project)},
                                   {.kind = way_kind::recompute, .compute_ns = nanoseconds(again)}};
  return std::vector<std::vector<way_back>>(static_cast<std::size_t>(model.layers), ways);
}

}  // namespace v0
}  // namespace llmmem
