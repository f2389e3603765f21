/// @file
/// A refit's plan: which bytes of which trainer's rank go where on which rank of an engine, as plain data.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/refit/refit_part.hpp>
#include <llmmem/refit/refit_rules.hpp>
#include <llmmem/refit/refit_tensor.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/ids.hpp>
#include <llmmem/sharding/reshard_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A trainer's or an engine's side of a refit: its tensors, the partition of them, and where its ranks are.
template <partition P>
struct refit_side {
  std::span<const refit_tensor> tensors{};
  const P& parts;                    ///< made from `facts_of(tensors)`
  std::span<const rank_id> ranks{};  ///< the transport's rank of each rank of the partition
};

/// Where the elements of a piece are in a rank's dense storage of a tensor.
struct refit_piece {
  rank_id rank{};          ///< the transport's
  element_runs storage{};  ///< position -> element of the storage
};

/// Copies of one part from a rank to another rank, or within a rank.
struct refit_copy {
  std::uint32_t scope = 0;
  rank_id from{};
  rank_id to{};
  reshard_copy moves{};  ///< `tensor` is a part, `source` and `destination` are pieces of the plan
};

/// The amount that one rank sends to another rank.
struct refit_link {
  rank_id from{};
  rank_id to{};
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;

  friend constexpr bool operator==(const refit_link&, const refit_link&) noexcept = default;
};

/// A plan. Every rank makes it from the same input and so has the same one: there is no rank that hands it
/// out.
///
/// @par Thread safety   a plain value.
struct refit_plan {
  std::vector<refit_tensor> source{};
  std::vector<refit_tensor> target{};
  std::vector<rank_id> senders{};
  std::vector<rank_id> receivers{};
  std::vector<element_runs> source_sets{};  ///< of tensor t and sender s: [t x senders + s]
  std::vector<element_runs> target_sets{};
  std::vector<refit_part> parts{};
  std::vector<refit_piece> stored{};
  std::vector<refit_piece> wanted{};
  std::vector<refit_copy> copies{};   ///< by scope, sender, receiver, target tensor
  std::vector<refit_link> links{};    ///< between different ranks, by sender and receiver
  std::uint32_t scopes = 0;           ///< rounds: a scope's tensors are complete before the next one
  std::uint64_t bytes = 0;            ///< of all links
  std::uint64_t kept_bytes = 0;       ///< copied within ranks
  std::vector<std::string> unused{};  ///< source tensors that no target has
  std::uint64_t fingerprint = 0;      ///< equal on ranks with equal plans
  refit_plan_options options{};

  /// Returns the number of `rank` among senders or receivers, or the length of the list.
  [[nodiscard]] static std::size_t place_of(std::span<const rank_id> side, rank_id rank) noexcept {
    return static_cast<std::size_t>(std::ranges::find(side, rank) - side.begin());
  }
  /// @pre `tensor` and the sender or receiver exist.
  [[nodiscard]] const element_runs& source_set(std::size_t tensor, std::size_t sender) const noexcept {
    return source_sets[tensor * senders.size() + sender];
  }
  [[nodiscard]] const element_runs& target_set(std::size_t tensor, std::size_t receiver) const noexcept {
    return target_sets[tensor * receivers.size() + receiver];
  }
  /// Returns the copies of a scope from a rank to a rank.
  [[nodiscard]] std::span<const refit_copy> of_link(std::uint32_t scope, rank_id from,
                                                    rank_id to) const noexcept;
  /// Returns the bytes that a rank sends to others.
  [[nodiscard]] std::uint64_t sent_bytes(rank_id from) const noexcept {
    std::uint64_t sum = 0;
    for (const refit_link& each : links)
      sum += each.from == from ? each.bytes : 0;
    return sum;
  }
  [[nodiscard]] const refit_part& part_of(const refit_copy& copy) const noexcept {
    return parts[to_index(copy.moves.tensor)];
  }
  /// Calls `visit(source element, target element, count)` for the runs of a copy, by elements of both ranks'
  /// storage of the tensors.
  template <class Visit>
  void each_run(const refit_copy& copy, Visit&& visit) const {
    copy.moves.each_run([&](std::uint64_t from, std::uint64_t to, std::uint64_t count) {
      each_piece_run(copy, from, to, count, visit);
    });
  }
  /// The same for `count` elements from two positions of the pieces on, which are of one run of the copy.
  template <class Visit>
  void each_piece_run(const refit_copy& copy, std::uint64_t from, std::uint64_t to, std::uint64_t count,
                      Visit&& visit) const {
    const element_runs& source_at = stored[to_index(copy.moves.source)].storage;
    const element_runs& target_at = wanted[to_index(copy.moves.destination)].storage;
    while (count != 0) {
      const std::uint64_t now =
          std::min({count, source_at.run - from % source_at.run, target_at.run - to % target_at.run});
      visit(source_at.element_at(from), target_at.element_at(to), now);
      from += now;
      to += now;
      count -= now;
    }
  }
};

inline std::span<const refit_copy> refit_plan::of_link(std::uint32_t scope, rank_id from,
                                                       rank_id to) const noexcept {
  const auto is_before = [](const refit_copy& a, const refit_copy& b) {
    if (a.scope != b.scope) return a.scope < b.scope;
    return a.from != b.from ? a.from < b.from : a.to < b.to;
  };
  const auto found = std::ranges::equal_range(copies, refit_copy{scope, from, to, {}}, is_before);
  return {found.begin(), found.end()};
}

/// Returns the plan that fills every element of the target's tensors on every rank of its partition, each
/// from one source:
///
/// - What a rank that is on both sides holds is copied within the rank; everything else is sent once to each
///   rank that needs it, and nothing else is sent. Of several ranks with the same elements, the one with the
///   fewest bytes to send so far sends them (`make_reshard`).
/// - Elements travel in the narrower one of both types, and are converted by the sender (f32 to bf16) or the
///   receiver (bf16 to f32). Tensors that are quantised on arrival travel in the trainer's type,
///   or from f32 in that of `quantizes_from`.
/// - A target tensor that no rule names takes the source of its own name.
///
/// @par Complexity   O(parts x ranks + runs) beyond `make_reshard`: runs of columns count one by one.
/// @throws argument_error  for rules that leave an element of a target tensor without a source, or with two,
///   for bands outside a tensor, for types between which nothing converts, for a rank that is listed twice on
///   a side, and for a partition that cuts a group of a quantised tensor: with the names.
/// @throws length_error    when one tensor that is quantised on arrival exceeds `arrival_bytes` on a rank.
template <partition From, partition To>
[[nodiscard]] refit_plan make_refit(const refit_side<From>& source, const refit_side<To>& target,
                                    std::span<const refit_rule> rules = {},
                                    const refit_plan_options& options = {});

/// Returns one line for all, and one for each link, to print and to compare.
[[nodiscard]] inline std::string to_text(const refit_plan& plan) {
  std::string text = "refit: " + std::to_string(plan.parts.size()) + " parts, " +
                     std::to_string(plan.copies.size()) + " copies in " + std::to_string(plan.scopes) +
                     " rounds, " + std::to_string(plan.bytes) + " bytes sent, " +
                     std::to_string(plan.kept_bytes) + " kept\n";
  for (const refit_link& each : plan.links) {
    text += "rank " + std::to_string(to_index(each.from)) + " -> rank " + std::to_string(to_index(each.to)) +
            ": " + std::to_string(each.elements) + " elements, " + std::to_string(each.bytes) + " bytes\n";
  }
  for (const std::string& each : plan.unused)
    text += "unused: " + each + "\n";
  return text;
}

}  // namespace v0
}  // namespace llmmem

#include <llmmem/refit/detail/refit_plan_body.hpp>
