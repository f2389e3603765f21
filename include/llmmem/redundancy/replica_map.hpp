/// @file
/// `replica_map`: which rank keeps which state, which failures that survives, and the probability of a loss.
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

/// The fate of states when ranks fail.
struct survival {
  rank_set lost;  ///< ranks that failed and whose state cannot be restored

  [[nodiscard]] explicit operator bool() const noexcept { return lost.empty(); }
};

}  // namespace redundancy

using survival [[deprecated("its name is redundancy::survival")]] = redundancy::survival;

/// How a probability was computed.
enum class chance_method : std::uint8_t {
  counted,     ///< by a formula over all sets of failures
  enumerated,  ///< by trying all sets, one by one
  sampled,     ///< by trying a random sample of them
};

/// The probability that a state is lost.
struct loss_chance {
  double probability = 0;
  chance_method method = chance_method::counted;
  double standard_error = 0;  ///< of a sampled probability
};

/// Options for maps without a regular shape.
struct chance_options {
  /// Most sets of failures to try one by one; if there are more, a sample is taken.
  std::uint64_t most_enumerated = std::uint64_t{1} << 20;
  std::uint64_t samples = std::uint64_t{1} << 16;
  std::uint64_t seed = 1;
};

/// Which rank keeps which data: plain data, made by a placement, and the same on every rank that makes it
/// from the same arguments.
///
/// The members of a *group* are in order, and a mirror's copies go to the next members, around the group. So
/// a group of more than F ranks is a ring, and loses a state when F neighbours fail. A group of a coded
/// scheme that has more than k + m ranks gets more data pieces, never less parity. So every group tolerates
/// the loss of any `scheme().tolerates()` ranks.
///
/// @par Complexity      as stated; construction O(world x holders).
/// @par Thread safety   as a plain value.
class replica_map {
 public:
  /// @param groups  contain every rank of the world exactly once, and each at least `group_ranks()` ranks.
  /// @throws argument_error  otherwise, and for a coded group of more than 256 ranks.
  [[nodiscard]] static replica_map of_groups(const redundancy_scheme& scheme, rank_count world,
                                             std::vector<std::vector<rank_id>> groups);

  /// Makes a map of complete copies on any ranks. @param holders for each rank, `copies()` - 1 other ranks.
  /// @throws argument_error  otherwise, and for a coded scheme.
  [[nodiscard]] static replica_map of_holders(const redundancy_scheme& scheme,
                                              std::vector<std::vector<rank_id>> holders);

  [[nodiscard]] const redundancy_scheme& scheme() const noexcept { return scheme_; }
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(holders_.size())};
  }

  /// Returns the ranks that keep copies of `rank`'s state, or parity over stripes of it, excluding the rank
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

  /// Returns the states that are lost when all of `failed` fail at once. Ranks past the world are ignored.
  /// @par Complexity   O(world x holders).
  [[nodiscard]] redundancy::survival survives(const rank_set& failed) const;

  /// Returns the probability that a state is lost when `failures` ranks fail, if every set of that size is
  /// equally likely.
  ///
  /// For groups a formula counts the sets, in O(world x failures x copies), by sums of positive terms.
  /// Otherwise the function tries all sets if there are few, or a seeded sample.
  ///
  /// @throws argument_error  if `failures` exceeds the world, or no sample is allowed.
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
