/// @file
/// The parts of a state, their owners in an epoch, and the bytes that must move when the owners change.
#pragma once

#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/redundancy/recovery.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// A part of the state of all ranks: the shard of one rank, a layer, an expert, a sequence's blocks. One rank
/// at a time owns it; a rank may own several.
enum class part_id : std::uint32_t {};

/// Returns its number, as an index.
[[nodiscard]] constexpr std::uint32_t to_index(part_id part) noexcept {
  return static_cast<std::uint32_t>(part);
}

/// Returns the scheme, or the nearest one that so many ranks can hold: with fewer copies or fewer data pieces
/// per parity, and only then with fewer parities. Nothing for one rank alone.
[[nodiscard]] inline std::optional<redundancy_scheme> scheme_for(const redundancy_scheme& wanted,
                                                                 rank_count world) {
  const std::uint32_t ranks = to_number(world);
  if (ranks < 2) return std::nullopt;
  if (ranks >= wanted.group_ranks()) return wanted;
  if (!wanted.is_coded()) return redundancy_scheme::mirror(ranks);
  const std::uint32_t parity = wanted.shape().parity < ranks ? wanted.shape().parity : ranks - 1;
  if (wanted.kind() == redundancy_kind::parity) return redundancy_scheme::parity(ranks - 1);
  return redundancy_scheme::rs({.data = ranks - parity, .parity = parity});
}

/// The owners of parts when a version was kept, by ranks of that epoch.
struct kept_layout {
  std::vector<std::uint64_t> part_bytes{};  ///< by part, the same in all epochs
  std::vector<rank_id> owners{};            ///< by part
  std::uint32_t world = 0;

  /// Returns where a part begins in the *blob* of its owner: all parts of a rank, in order, concatenated.
  [[nodiscard]] std::uint64_t offset_of(part_id part) const noexcept {
    std::uint64_t offset = 0;
    for (std::uint32_t i = 0; i < to_index(part); ++i)
      offset += owners[i] == owners[to_index(part)] ? part_bytes[i] : 0;
    return offset;
  }
  [[nodiscard]] std::uint64_t blob_bytes(rank_id rank) const noexcept {
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < owners.size(); ++i)
      bytes += owners[i] == rank ? part_bytes[i] : 0;
    return bytes;
  }
};

/// Maps the members of the epoch in which a version was kept to those of the next epoch.
struct membership_change {
  /// By old rank: its present rank, if it is alive and has kept that version.
  std::vector<std::optional<rank_id>> now{};
  /// By part: the present rank at the part's home, if there is one, to which the part returns.
  std::vector<std::optional<rank_id>> home{};
  std::uint32_t world = 0;  ///< number of present ranks

  /// Returns the old ranks that are lost.
  [[nodiscard]] rank_set lost() const {
    rank_set gone;
    for (std::uint32_t i = 0; i < now.size(); ++i) {
      if (!now[i]) gone.insert(rank_id{i});
    }
    return gone;
  }
};

/// Where the bytes of a transfer are at its source.
enum class kept_place : std::uint8_t {
  own,     ///< in its own blob
  copy,    ///< in its copy of the blob of `of`
  parity,  ///< in its parity piece of codeword `codeword` of its group
};

/// Bytes that one rank sends to another, or keeps, to complete a part. All ranks are present ones, except
/// `of`, an old one.
struct part_transfer {
  part_id part{};
  std::uint64_t part_offset = 0;  ///< where the bytes go, or are added, in the part
  std::uint64_t bytes = 0;
  rank_id source{};
  rank_id target{};
  kept_place place = kept_place::own;
  rank_id of{};
  std::uint32_t codeword = 0;
  std::uint64_t place_offset = 0;  ///< where they come from in the source place
  std::uint8_t coefficient = 1;    ///< of these bytes in a sum
  bool is_summed = false;          ///< the part's bytes are the sum of all transfers with this flag

  friend constexpr bool operator==(const part_transfer&, const part_transfer&) noexcept = default;
};

/// The owners of parts in the next epoch, and the transfers that this takes.
struct ownership_plan {
  std::vector<rank_id> owners{};           ///< by part, present ranks
  std::vector<part_transfer> transfers{};  ///< all ranks process them in this order: no deadlock
  rank_set unrecoverable{};                ///< old ranks whose state cannot be restored
  std::uint64_t moved_bytes = 0;           ///< between ranks
};

/// Plans the owners of the next epoch. A part returns home if its home is occupied, stays with its owner if
/// that rank lives, and is otherwise adopted: by a rank that holds a copy, so that nothing moves, or by the
/// rank that owns least. An owner whose own bytes are damaged keeps its parts, and gets them from others.
///
/// @param map      how the version was kept; none: only its owners have it.
/// @param damaged  places, by old rank, from which nothing is taken.
/// @par Complexity   O(parts x (world + parts)), and `plan_recovery`.
[[nodiscard]] ownership_plan plan_ownership(const kept_layout& layout, const std::optional<replica_map>& map,
                                            const membership_change& change,
                                            const damaged_places& damaged = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/part_ownership_body.hpp>
