/// @file
/// Where copies and parity are placed: `ring_neighbours`, `grouped` and `failure_domains`.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/sharding/concepts.hpp>
#include <llmmem/sharding/ids.hpp>

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Makes a map, a plain value, for a scheme and a world. Throws `argument_error` for an impossible placement;
/// the text says what is possible.
template <class P>
concept replica_placement =
    std::copyable<P> && requires(const P& p, const redundancy_scheme& scheme, rank_count world) {
      { p.place(scheme, world) } -> std::same_as<replica_map>;
      { p.name() } noexcept -> std::same_as<const char*>;
    };

/// Puts a mirror's copies on the next F - 1 ranks, in a ring around the world: simple, and even for any
/// world. If any F neighbours fail, a state is lost, so more sets of failures lose a state than with
/// `grouped`. Coded schemes have groups of consecutive ranks, like `grouped` with a jump of 1.
class ring_neighbours {
 public:
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const;
  [[nodiscard]] const char* name() const noexcept { return "ring_neighbours"; }
};

namespace redundancy {

/// Groups of ranks at a distance of a jump: n, n + J, n + 2J, ... A failure of J consecutive ranks, such as a
/// host of J, then hits at most one rank of each group.
///
/// Ranks with the same n modulo J are a *column*, which is divided into groups. A column may have ranks left
/// over. For mirrors they join the last group, which is then a ring (Gemini's mixed placement, with which the
/// fewest sets of F failures lose something). For coded schemes they join the first groups, one rank each,
/// and more only if there are fewer groups than remaining ranks.
///
/// @par Source   Wang et al., "Gemini", SOSP 2023; the cliques of NVIDIA's resiliency extension, which refuse
///   a world that is not a multiple of J F.
class grouped {
 public:
  /// @throws argument_error  for a jump of 0.
  explicit grouped(std::uint32_t jump = 1) : jump_(jump) {
    if (jump == 0)
      throw argument_error("grouped: a jump of 0; use at least 1, the number of ranks that fail together");
  }

  [[nodiscard]] std::uint32_t jump() const noexcept { return jump_; }
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const;
  [[nodiscard]] const char* name() const noexcept { return "grouped"; }

 private:
  std::uint32_t jump_;
};

}  // namespace redundancy

using grouped [[deprecated("its name is redundancy::grouped")]] = redundancy::grouped;

/// A unit of failure: a host, a rack, a power supply.
enum class domain_id : std::uint32_t {};

/// Returns its number.
[[nodiscard]] constexpr std::uint32_t to_index(domain_id domain) noexcept {
  return static_cast<std::uint32_t>(domain);
}

/// What `failure_domains` does when ranks of one domain would have to share a group.
enum class crowded_domains : std::uint8_t {
  refuse,  ///< throws
  spread,  ///< puts as few ranks of a domain into a group as possible; check the result with `fatal_domains`
};

/// Groups whose ranks are all in different domains, so that a group loses at most one rank with a domain.
///
/// Ranks are sorted by domain, largest first, and dealt like cards to world / group groups. This works
/// exactly if no domain has more ranks than there are groups, and groups then differ by at most one rank.
/// Otherwise, given F domains, a mirror is placed without groups: each copy goes to another domain, on the
/// rank that keeps least, so some ranks keep more than others. Coded schemes have no such alternative.
class failure_domains {
 public:
  /// @param domains  of each rank, in order: as many as the world has ranks.
  explicit failure_domains(std::vector<domain_id> domains, crowded_domains crowded = crowded_domains::refuse)
      : domains_(std::move(domains)), crowded_(crowded) {}

  [[nodiscard]] std::span<const domain_id> domains() const noexcept LLMMEM_LIFETIMEBOUND { return domains_; }
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const;
  [[nodiscard]] const char* name() const noexcept { return "failure_domains"; }

 private:
  std::vector<domain_id> domains_;
  crowded_domains crowded_;
};

static_assert(replica_placement<ring_neighbours>);
static_assert(replica_placement<redundancy::grouped>);
static_assert(replica_placement<failure_domains>);

/// Returns the domains whose loss alone loses a state, ascending; a placement by domains guarantees that
/// there is none.
/// @pre domains.size() is the map's world.
[[nodiscard]] std::vector<domain_id> fatal_domains(const replica_map& map,
                                                   std::span<const domain_id> domains);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/placement_body.hpp>
