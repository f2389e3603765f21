/// @file
/// Where copies and parity go: `ring_neighbours`, `grouped` and `failure_domains`.
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

/// Makes a map for a scheme and a world, and is a plain value. It throws `argument_error` for what cannot be
/// placed, with what could.
template <class P>
concept replica_placement =
    std::copyable<P> && requires(const P& p, const redundancy_scheme& scheme, rank_count world) {
      { p.place(scheme, world) } -> std::same_as<replica_map>;
      { p.name() } noexcept -> std::same_as<const char*>;
    };

/// A mirror's copies go to the next F - 1 ranks, around the world: simple, and even for any world. Every F
/// neighbours that fail lose a state, so that more sets of failures do than with `grouped`. Coded schemes
/// have groups of consecutive ranks, as `grouped` with a jump of 1.
class ring_neighbours {
 public:
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const;
  [[nodiscard]] const char* name() const noexcept { return "ring_neighbours"; }
};

namespace redundancy {

/// Groups of ranks that lie a jump apart: n, n + J, n + 2J, ... A failure that takes J consecutive ranks,
/// such as a host of J, then takes at most one of each group.
///
/// Ranks n with the same n modulo J are a *column*, which is cut into groups. What is left over when a
/// column's ranks are no multiple of a group's goes, of mirrors, to the last group, which is then a ring
/// (Gemini's mixed placement: fewest sets of F failures lose something), and with coded schemes to the first
/// groups, one rank each, more only where there are fewer groups than ranks left.
///
/// @par Source   Wang et al., "Gemini", SOSP 2023; the cliques of NVIDIA's resiliency extension, which refuse
///               a world that is no multiple of J F.
class grouped {
 public:
  /// @throws argument_error  for a jump of 0.
  explicit grouped(std::uint32_t jump = 1) : jump_(jump) {
    if (jump == 0)
      throw argument_error("grouped: a jump of 0; it is at least 1, the ranks that fail together");
  }

  [[nodiscard]] std::uint32_t jump() const noexcept { return jump_; }
  [[nodiscard]] replica_map place(const redundancy_scheme& scheme, rank_count world) const;
  [[nodiscard]] const char* name() const noexcept { return "grouped"; }

 private:
  std::uint32_t jump_;
};

}  // namespace redundancy

using grouped [[deprecated("its name is redundancy::grouped")]] = redundancy::grouped;

/// What fails as one: a host, a rack, a power supply.
enum class domain_id : std::uint32_t {};

/// The number in it.
[[nodiscard]] constexpr std::uint32_t to_index(domain_id domain) noexcept {
  return static_cast<std::uint32_t>(domain);
}

/// What `failure_domains` does when ranks of one domain would have to share a group.
enum class crowded_domains : std::uint8_t {
  refuse,  ///< throws
  spread,  ///< puts as few of a domain into a group as can be; `fatal_domains` tells what that is worth
};

/// Groups whose ranks are all in different domains, so that the loss of a domain is one to a group.
///
/// Ranks are sorted by domain, largest first, and dealt to world / group groups like cards, one each:
/// possible exactly where no domain has more ranks than there are groups. Groups then differ by at most one
/// rank. Where it is not, a mirror is still placed without groups, each copy in another domain on the rank
/// that keeps least, if there are F domains: some ranks then keep more than others. Coded schemes have no
/// such way out.
class failure_domains {
 public:
  /// @param domains  each rank's, in order: its number is the world's.
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

/// Domains whose loss alone loses a state, ascending: none is what a placement by domains promises.
/// @pre domains.size() is the map's world.
[[nodiscard]] std::vector<domain_id> fatal_domains(const replica_map& map,
                                                   std::span<const domain_id> domains);

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/placement_body.hpp>
