/// @file
/// `replica_map`: which rank keeps whose state, what that survives, and with which probability.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/coded_group.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/sharding/ids.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

namespace redundancy {

/// What happens to states when ranks fail.
struct survival {
  rank_set lost;  ///< ranks that failed and whose state cannot be restored

  [[nodiscard]] explicit operator bool() const noexcept { return lost.empty(); }
};

}  // namespace redundancy

using survival [[deprecated("its name is redundancy::survival")]] = redundancy::survival;

/// How a probability was computed.
enum class chance_method : std::uint8_t {
  counted,     ///< over all sets of failures, by a formula
  enumerated,  ///< over all of them, one by one
  sampled,     ///< over some of them, at random
};

/// The probability that a state is lost.
struct loss_chance {
  double probability = 0;
  chance_method method = chance_method::counted;
  double standard_error = 0;  ///< of a sampled one
};

/// Options for maps without a regular shape.
struct chance_options {
  std::uint64_t most_enumerated = std::uint64_t{1} << 20;  ///< sets of failures; more are sampled
  std::uint64_t samples = std::uint64_t{1} << 16;
  std::uint64_t seed = 1;
};

/// Which rank holds what, made by a placement: plain data, the same on every rank that makes it from the same
/// facts.
///
/// In a *group* members are in order and a mirror's copies go to the next ones, around: a group of more than
/// F ranks is a ring, and loses a state when F neighbours fail. A group of a coded scheme that has more than
/// k + m ranks gets more data pieces, never less parity. So every group tolerates the loss of any
/// `scheme().tolerates()` ranks.
///
/// @par Complexity      as stated; construction O(world x holders).
/// @par Thread safety   as a plain value.
class replica_map {
 public:
  /// @param groups  every rank of the world in exactly one, each group with at least `group_ranks()`.
  /// @throws argument_error  otherwise, and for a coded group of more than 256 ranks.
  [[nodiscard]] static replica_map of_groups(const redundancy_scheme& scheme, rank_count world,
                                             std::vector<std::vector<rank_id>> groups);

  /// Makes a map of whole copies on any ranks. @param holders  for each rank, `copies()` - 1 other ranks.
  /// @throws argument_error  otherwise, and for a coded scheme.
  [[nodiscard]] static replica_map of_holders(const redundancy_scheme& scheme,
                                              std::vector<std::vector<rank_id>> holders);

  [[nodiscard]] const redundancy_scheme& scheme() const noexcept { return scheme_; }
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(holders_.size())};
  }

  /// Returns the ranks that keep copies of `rank`'s state, or parity over stripes of it, without the rank
  /// itself.
  /// @pre to_index(rank) < world()
  [[nodiscard]] std::span<const rank_id> holders(rank_id rank) const noexcept LLMMEM_LIFETIMEBOUND {
    return holders_[to_index(rank)];
  }
  /// Returns the ranks whose state `rank` keeps copies of, or parity over. @pre to_index(rank) < world()
  [[nodiscard]] std::span<const rank_id> kept_by(rank_id rank) const noexcept LLMMEM_LIFETIMEBOUND {
    return kept_[to_index(rank)];
  }

  /// The groups, members in order; none for a map of holders.
  [[nodiscard]] std::span<const std::vector<rank_id>> groups() const noexcept LLMMEM_LIFETIMEBOUND {
    return groups_;
  }
  /// Returns the group of `rank`: `groups()[group_of(rank)][member_of(rank)]`. @pre there are groups
  [[nodiscard]] std::uint32_t group_of(rank_id rank) const noexcept { return place_[to_index(rank)].group; }
  [[nodiscard]] std::uint32_t member_of(rank_id rank) const noexcept { return place_[to_index(rank)].member; }
  /// Returns the code of a group, with k = its ranks minus m. @pre `scheme().is_coded()`, group <
  /// groups().size()
  [[nodiscard]] coded_group layout(std::uint32_t group) const noexcept {
    const auto members = static_cast<std::uint32_t>(groups_[group].size());
    return coded_group({.data = members - scheme_.shape().parity, .parity = scheme_.shape().parity});
  }

  /// Returns the bytes that `rank` keeps for others when every state has `own` bytes. @throws length_error
  /// past 2^63 - 1.
  [[nodiscard]] std::uint64_t extra_bytes(rank_id rank, std::uint64_t own) const {
    if (!scheme_.is_coded()) return checked_multiply(kept_by(rank).size(), own, "redundancy: copies x bytes");
    const code_shape shape = layout(group_of(rank)).shape();
    return checked_multiply(shape.parity, stripe_bytes(own, shape.data), "redundancy: parity pieces x bytes");
  }

  /// Returns what is lost when all of `failed` fail at once. Ranks past the world are ignored.
  /// @par Complexity   O(world x holders).
  [[nodiscard]] redundancy::survival survives(const rank_set& failed) const;

  /// Returns the probability that a state is lost when `failures` ranks fail, every set of that size being
  /// equally likely.
  ///
  /// With groups it is counted, O(world x failures x copies), by sums of positive terms. Otherwise all sets
  /// are tried if there are few, or a seeded sample.
  ///
  /// @throws argument_error  when more fail than exist, or no sample is allowed.
  [[nodiscard]] loss_chance loss_probability(std::uint32_t failures,
                                             const chance_options& options = {}) const;

 private:
  struct place {
    std::uint32_t group = 0;
    std::uint32_t member = 0;
  };

  replica_map(const redundancy_scheme& scheme, std::vector<std::vector<rank_id>> holders);

  redundancy_scheme scheme_;
  std::vector<std::vector<rank_id>> holders_;
  std::vector<std::vector<rank_id>> kept_;
  std::vector<std::vector<rank_id>> groups_{};
  std::vector<place> place_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/replica_map_body.hpp>
