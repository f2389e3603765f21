/// @file
/// `token_dispatch`: which token goes to which place of which expert's buffer, which tokens are dropped, and
/// the way back.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>
#include <llmmem/sharding/element_runs.hpp>
#include <llmmem/sharding/experts.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Which assignments come first if an expert lacks space for all.
enum class dispatch_order : std::uint8_t {
  choice_first,  ///< the first choices of all tokens in their order, then all second choices, ... (GShard)
  token_first,   ///< token by token, each with all its choices: a stable sort by expert (FastMoE)
};

/// The setup of a `token_dispatch`.
struct dispatch_options {
  /// A capacity that drops no token.
  static constexpr std::uint32_t unlimited = 0xFFFF'FFFF;

  std::uint32_t experts = 0;
  std::uint32_t choices = 1;           ///< choices of each token: the k of top-k
  std::uint32_t capacity = unlimited;  ///< tokens that one expert takes of one group
  dispatch_order order = dispatch_order::choice_first;
  std::uint32_t max_tokens = 0;         ///< the most tokens of one group; determines the memory
  const char* name = "token_dispatch";  ///< the name in error texts; must outlive the object
};

/// Returns the capacity for a capacity factor: the share of `tokens` that an expert would receive if all
/// experts were equally popular, times the factor, rounded up (Switch, section 2.2).
///
/// @param percent  the factor in hundredths, so that the result is exact: 125 for 1.25.
/// @throws argument_error  when `experts` is 0.
/// @throws length_error    when the product passes 2^63 - 1, or the capacity 2^32 - 2.
[[nodiscard]] constexpr std::uint32_t expert_capacity(std::uint32_t tokens, std::uint32_t choices,
                                                      std::uint32_t experts, std::uint32_t percent) {
  if (experts == 0) throw argument_error("expert_capacity: 0 experts; a layer has at least one");
  const std::uint64_t hundredths = checked_multiply(std::uint64_t{tokens} * choices, percent,
                                                    "expert_capacity: tokens x choices x factor");
  const std::uint64_t divisor = std::uint64_t{experts} * 100;
  const std::uint64_t capacity = hundredths / divisor + (hundredths % divisor != 0 ? 1U : 0U);
  if (capacity >= dispatch_options::unlimited) {
    throw length_error("expert_capacity: " + std::to_string(capacity) +
                       " tokens per expert; slots are 32 bits wide");
  }
  return static_cast<std::uint32_t>(capacity);
}

/// Assigns the tokens of one group, the batch of one rank, to their experts. It only plans: it says where
/// rows go, and moves none.
///
/// A token makes `choices` choices of an expert; choice c of token t is *assignment* t x choices + c. An
/// assignment gets the next place of its expert's buffer while that has fewer than `capacity`, in the order
/// of the options; otherwise it is dropped, and the token bypasses the expert by its residual. A choice of
/// `no_expert` asks for nothing: GShard's second expert that was not drawn. So each assignment is in one
/// slot, or dropped, or unrouted:
///
///     kept().size() + dropped().size() + unrouted() == tokens() * choices
///
/// Slots are numbered by expert, then place, without holes: rows gathered in the order of `kept()` are
/// contiguous for each expert (the batched matrices of FastMoE, with unlimited capacity) and for each rank
/// (the send buffer of an all-to-all). `slot_of` is the inverse, for the way back. GShard's buffers of equal
/// size, [experts, capacity], are `padded_slot_of`.
///
/// The plan does not use weights of choices: the output of token t is the sum of weight[a] x row slot_of(a)
/// over its assignments that have a slot. GShard and Switch take groups one by one, so that capacity is for
/// each pair of a rank and an expert, and no rank needs another's choices; for one capacity over all,
/// dispatch all tokens as one group.
///
/// @par Complexity      `plan` O(tokens x choices + experts) and no allocation; all else O(1), or as
///                      documented. 12 bytes per assignment, 8 per expert, allocated by the constructor.
/// @par Thread safety   one writer.
/// @par Errors          the constructor throws; `plan` returns a failure and leaves the last plan as it was.
class token_dispatch {
 public:
  /// In place of a slot: the expert was full.
  static constexpr std::uint32_t dropped_slot = 0xFFFF'FFFF;
  /// In place of a slot: the choice was `no_expert`.
  static constexpr std::uint32_t unrouted_slot = 0xFFFF'FFFE;

  /// @throws argument_error  when there are no experts or choices.
  /// @throws length_error    when `max_tokens` x choices pass 2^32 - 3, or the experts 2^32 - 2.
  explicit token_dispatch(const dispatch_options& options) : options_(options) {
    const std::string name = std::string(options.name) + ": ";
    if (options.experts == 0) throw argument_error(name + "0 experts; a layer has at least one");
    if (options.choices == 0) throw argument_error(name + "0 choices; a token makes at least one");
    const std::uint64_t assignments = std::uint64_t{options.max_tokens} * options.choices;
    if (assignments >= unrouted_slot || options.experts >= to_index(no_expert)) {
      throw length_error(name + std::to_string(options.max_tokens) + " tokens x " +
                         std::to_string(options.choices) + " choices for " + std::to_string(options.experts) +
                         " experts; slots and experts are 32 bits wide");
    }
    slots_.resize(static_cast<std::size_t>(assignments));
    order_.resize(static_cast<std::size_t>(assignments));
    dropped_.resize(static_cast<std::size_t>(assignments));
    begins_.assign(std::size_t{options.experts} + 1, 0);
    demand_.assign(options.experts, 0);
  }

  /// Replaces the plan. @param chosen the expert of each assignment, [tokens, choices]. @returns
  /// `errc::size_mismatch` if that is not a multiple of the choices, `errc::out_of_range` for more than
  /// `max_tokens` or an expert that does not exist; the previous plan then stays.
  result<void> plan(std::span<const expert_id> chosen) noexcept;

  /// Returns the number of tokens of the last plan.
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] const dispatch_options& options() const noexcept { return options_; }

  /// Returns the slot of each assignment, or `dropped_slot`, or `unrouted_slot`: the way back of outputs.
  [[nodiscard]] std::span<const std::uint32_t> slots() const noexcept LLMMEM_LIFETIMEBOUND {
    return {slots_.data(), std::size_t{tokens_} * options_.choices};
  }
  /// Returns the slot of one assignment.
  [[nodiscard]] std::uint32_t slot_of(std::uint32_t token, std::uint32_t choice) const noexcept {
    return slots_[std::size_t{token} * options_.choices + choice];
  }
  /// Returns the assignment in each slot: the order to gather rows in.
  [[nodiscard]] std::span<const std::uint32_t> kept() const noexcept LLMMEM_LIFETIMEBOUND {
    return {order_.data(), kept_};
  }
  /// Returns the assignments whose expert was full, in their order of arrival.
  [[nodiscard]] std::span<const std::uint32_t> dropped() const noexcept LLMMEM_LIFETIMEBOUND {
    return {dropped_.data(), dropped_count_};
  }
  /// Returns how many choices were `no_expert`.
  [[nodiscard]] std::uint32_t unrouted() const noexcept { return unrouted_; }

  /// Returns the slots of an expert.
  [[nodiscard]] index_range slots_of(expert_id expert) const noexcept {
    const std::uint32_t begin = begins_[to_index(expert)];
    return {begin, begins_[std::size_t{to_index(expert)} + 1] - begin};
  }
  /// Returns how many assignments asked for an expert, including dropped ones: its load.
  [[nodiscard]] std::uint32_t demand(expert_id expert) const noexcept { return demand_[to_index(expert)]; }
  /// Returns the slots that go to `rank`, one of the `world` ranks that have the experts: its part of an
  /// all-to-all's send buffer.
  [[nodiscard]] index_range slots_to(rank_id rank, rank_count world) const noexcept {
    const index_range experts = experts_of(options_.experts, world, rank);
    const std::uint32_t begin = begins_[static_cast<std::size_t>(experts.first)];
    return {begin, begins_[static_cast<std::size_t>(experts.first + experts.count)] - begin};
  }
  /// Returns the place in buffers of `capacity` for each expert, [experts, capacity]. @pre `slot` exists, and
  /// belongs to `expert`
  [[nodiscard]] std::uint64_t padded_slot_of(std::uint32_t slot, expert_id expert) const noexcept {
    return std::uint64_t{to_index(expert)} * options_.capacity + (slot - begins_[to_index(expert)]);
  }

 private:
  [[nodiscard]] result<void> check(std::span<const expert_id> chosen) const noexcept;
  void place(std::span<const expert_id> chosen, std::uint32_t assignment) noexcept;

  dispatch_options options_;
  std::vector<std::uint32_t> slots_;  // by assignment
  std::vector<std::uint32_t> order_;  // by slot
  std::vector<std::uint32_t> dropped_;
  std::vector<std::uint32_t> begins_;  // of the slots of each expert, and the end of the last
  std::vector<std::uint32_t> demand_;  // of each expert
  std::uint32_t tokens_ = 0;
  std::uint32_t kept_ = 0;
  std::uint32_t dropped_count_ = 0;
  std::uint32_t unrouted_ = 0;
};

/// Returns the rows that each rank sends to each: [source x world + destination]; `groups[r]` is rank r's
/// plan.
///
/// @par Complexity   O(groups x world).
/// @throws argument_error  when there is not one group for each rank.
[[nodiscard]] inline std::vector<std::uint64_t> dispatch_matrix(std::span<const token_dispatch> groups,
                                                                rank_count world) {
  const std::size_t ranks = to_number(world);
  if (groups.size() != ranks) {
    throw argument_error("dispatch_matrix: " + std::to_string(groups.size()) + " groups of tokens and " +
                         std::to_string(ranks) + " ranks; each rank has one");
  }
  std::vector<std::uint64_t> rows(ranks * ranks, 0);
  for (std::size_t source = 0; source < ranks; ++source) {
    for (std::size_t to = 0; to < ranks; ++to) {
      const rank_id rank{static_cast<std::uint32_t>(to)};
      rows[source * ranks + to] = groups[source].slots_to(rank, world).count;
    }
  }
  return rows;
}

inline result<void> token_dispatch::check(std::span<const expert_id> chosen) const noexcept {
  const auto refuse = [&](error_code code, std::uint64_t wanted, std::uint64_t found) {
    return failure{.code = code, .wanted = wanted, .found = found, .where = options_.name};
  };
  const std::uint64_t whole = chosen.size() / options_.choices * options_.choices;
  if (whole != chosen.size()) return refuse(errc::size_mismatch, chosen.size(), whole);
  if (chosen.size() > slots_.size()) {
    return refuse(errc::out_of_range, chosen.size() / options_.choices, options_.max_tokens);
  }
  for (const expert_id each : chosen) {
    if (to_index(each) < options_.experts || each == no_expert) continue;
    return refuse(errc::out_of_range, to_index(each), options_.experts - 1);
  }
  return {};
}

/// Until all are placed, a slot is a place in its expert's buffer.
inline void token_dispatch::place(std::span<const expert_id> chosen, std::uint32_t assignment) noexcept {
  const expert_id expert = chosen[assignment];
  if (expert == no_expert) {
    slots_[assignment] = unrouted_slot;
    ++unrouted_;
    return;
  }
  const std::uint32_t before = demand_[to_index(expert)]++;
  if (before < options_.capacity) {
    slots_[assignment] = before;
    ++begins_[std::size_t{to_index(expert)} + 1];
    return;
  }
  slots_[assignment] = dropped_slot;
  dropped_[dropped_count_++] = assignment;
}

inline result<void> token_dispatch::plan(std::span<const expert_id> chosen) noexcept {
  if (const auto checked = check(chosen); !checked) return checked.error();
  const auto assignments = static_cast<std::uint32_t>(chosen.size());
  const std::uint32_t choices = options_.choices;
  tokens_ = assignments / choices;
  dropped_count_ = unrouted_ = 0;
  for (std::uint32_t& each : begins_)
    each = 0;
  for (std::uint32_t& each : demand_)
    each = 0;

  if (options_.order == dispatch_order::token_first) {
    for (std::uint32_t assignment = 0; assignment < assignments; ++assignment)
      place(chosen, assignment);
  } else {
    for (std::uint32_t choice = 0; choice < choices; ++choice) {
      for (std::uint32_t token = 0; token < tokens_; ++token)
        place(chosen, token * choices + choice);
    }
  }

  for (std::size_t expert = 1; expert < begins_.size(); ++expert)
    begins_[expert] += begins_[expert - 1];
  kept_ = begins_.back();
  for (std::uint32_t assignment = 0; assignment < assignments; ++assignment) {
    std::uint32_t& slot = slots_[assignment];
    if (slot >= unrouted_slot) continue;
    slot += begins_[to_index(chosen[assignment])];
    order_[slot] = assignment;
  }
  return {};
}

}  // namespace v0
}  // namespace llmmem
