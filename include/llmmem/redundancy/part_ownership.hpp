/// @file
/// Parts of a state, who owns them in an epoch, and what must move when that changes.
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

/// A part of the state of all ranks: the shard of one, a layer, an expert, a sequence's blocks. It is owned
/// by one rank at a time, which may own several.
enum class part_id : std::uint32_t {};

/// The number in it, to index with.
[[nodiscard]] constexpr std::uint32_t to_index(part_id part) noexcept {
  return static_cast<std::uint32_t>(part);
}

/// The scheme, or the nearest that so many ranks can hold: fewer copies, fewer data pieces a parity, and only
/// then fewer parities. Nothing for one rank alone.
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

/// Who owned what when a version was kept, by ranks of that epoch.
struct kept_layout {
  std::vector<std::uint64_t> part_bytes{};  ///< by part, the same in all epochs
  std::vector<rank_id> owners{};            ///< by part
  std::uint32_t world = 0;

  /// Where a part begins in the *blob* of its owner: all parts of a rank, in order, one behind the other.
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

/// What the members of the next epoch are to those of the one in which a version was kept.
struct membership_change {
  /// By rank of then: its rank now, if it lives and has kept that version.
  std::vector<std::optional<rank_id>> now{};
  /// By part: the rank now at the part's home, if there is one. A part goes home when it can.
  std::vector<std::optional<rank_id>> home{};
  std::uint32_t world = 0;  ///< ranks now

  /// Ranks of then that are gone.
  [[nodiscard]] rank_set lost() const {
    rank_set gone;
    for (std::uint32_t i = 0; i < now.size(); ++i) {
      if (!now[i]) gone.insert(rank_id{i});
    }
    return gone;
  }
};

/// Where the bytes of a transfer lie at its source.
enum class kept_place : std::uint8_t {
  own,     ///< in its own blob
  copy,    ///< in its copy of the blob of `of`
  parity,  ///< in its parity piece of codeword `codeword` of its group
};

/// Bytes that one rank sends another, or keeps, to make a part whole. Ranks are those of now, `of` is one of
/// then.
struct part_transfer {
  part_id part{};
  std::uint64_t part_offset = 0;  ///< where they go, or are added, in the part
  std::uint64_t bytes = 0;
  rank_id source{};
  rank_id target{};
  kept_place place = kept_place::own;
  rank_id of{};
  std::uint32_t codeword = 0;
  std::uint64_t place_offset = 0;  ///< where they come from
  std::uint8_t coefficient = 1;    ///< of a sum
  bool is_summed = false;          ///< the part's bytes are the sum of all transfers that say so

  friend constexpr bool operator==(const part_transfer&, const part_transfer&) noexcept = default;
};

/// Who owns what in the next epoch, and what must move for it.
struct ownership_plan {
  std::vector<rank_id> owners{};  ///< by part, ranks of now
  std::vector<part_transfer>
      transfers{};                ///< all ranks go through them in this order: no two wait for each other
  rank_set unrecoverable{};       ///< ranks of then whose state nobody can give back
  std::uint64_t moved_bytes = 0;  ///< between ranks
};

/// A part stays with its owner if that lives, goes home if its home is there, and is else adopted: by who
/// holds a copy, so that nothing moves, or by who owns least.
///
/// An owner whose own place is damaged keeps its parts, and gets them from others.
///
/// @param map      how the version was kept; none: by nobody but its owners.
/// @param damaged  by ranks of then: where nothing is to come from.
/// @par Complexity   O(parts x (world + parts)), and `plan_recovery`.
[[nodiscard]] ownership_plan plan_ownership(const kept_layout& layout, const std::optional<replica_map>& map,
                                            const membership_change& change,
                                            const damaged_places& damaged = {});

}  // namespace v0
}  // namespace llmmem

#include <llmmem/redundancy/detail/part_ownership_body.hpp>
