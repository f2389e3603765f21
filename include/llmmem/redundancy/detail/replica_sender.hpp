/// @file
/// `redundant_replica`: the messages that keep a version: checksums, copies, stripes.
#pragma once

#include <llmmem/comm/collectives.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/hash/crc32c.hpp>
#include <llmmem/hash/errors.hpp>
#include <llmmem/redundancy/coded_group.hpp>
#include <llmmem/redundancy/detail/epoch_owners.hpp>
#include <llmmem/redundancy/detail/kept_version.hpp>
#include <llmmem/redundancy/detail/replica_ranks.hpp>
#include <llmmem/redundancy/detail/replica_setup.hpp>
#include <llmmem/redundancy/rebuild_plan.hpp>
#include <llmmem/redundancy/redundancy.hpp>
#include <llmmem/redundancy/replica_map.hpp>
#include <llmmem/result.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Makes a version redundant: all ranks call `spread` with their own parts, and each then holds what the map
/// assigns to it. First the ranks exchange the checksums of their parts and stripes, so that each rank can
/// verify what it receives. From one version to the next the sender keeps only memory.
///
/// @par Complexity      for each owned byte the scheme's transfers: F - 1 copies, or m stripes of a coded
///                      state, in as many rounds as the group has other members. @par Thread safety one
///                      thread at a time.
/// @par Errors          those of the transport, which is then revoked; `errc::message_damaged`,
///   `errc::checksum_differs`.
class replica_sender {
 public:
  /// Both must outlive the sender.
  replica_sender(replica_ranks& ranks, const replica_setup& setup) noexcept
      : ranks_(&ranks), setup_(&setup) {}

  /// @param made     the version to fill; it already has this rank's own parts.
  /// @param owners   the owners in the version's epoch.
  /// @param by_part  this rank's bytes of its wards, if parts are computed twice.
  [[nodiscard]] result<void> spread(kept_version& made, const epoch_owners& owners,
                                    std::span<const std::span<const std::byte>> by_part, deadline by);

 private:
  /// This rank's group in a coded scheme.
  struct group_view {
    group_view(const replica_map& map, rank_id rank)
        : ranks(map.groups()[map.group_of(rank)]),
          layout(map.layout(map.group_of(rank))),
          self(map.member_of(rank)),
          is_xor(map.scheme().kind() == redundancy_kind::parity) {}

    [[nodiscard]] bool is_parity(std::uint32_t member, std::uint32_t codeword) const noexcept {
      return to_index(layout.piece_of(member, codeword)) >= layout.shape().data;
    }
    [[nodiscard]] redundancy::byte_range stripe(const kept_layout& of, std::uint32_t member,
                                                std::uint32_t codeword) const noexcept {
      return stripe_of(of.blob_bytes(ranks[member]), layout.shape().data, layout.stripe_in(member, codeword));
    }
    /// Returns the coefficient of a member's stripe in this rank's parity of the codeword.
    [[nodiscard]] std::uint8_t coefficient(std::uint32_t codeword, std::uint32_t member) const {
      if (is_xor) return 1;
      return code_coefficient(layout.shape(), layout.piece_of(self, codeword),
                              layout.piece_of(member, codeword));
    }

    const std::vector<rank_id>& ranks;
    coded_group layout;
    std::uint32_t self;
    bool is_xor;
  };

  [[nodiscard]] result<void> share_sums(kept_version& made, const std::optional<replica_map>& map,
                                        deadline by);
  [[nodiscard]] result<void> send_copies(kept_version& made, const replica_map& map, deadline by);
  [[nodiscard]] result<void> compare_wards(kept_version& made, std::span<const part_id> wards,
                                           std::span<const std::span<const std::byte>> by_part);
  [[nodiscard]] result<void> send_stripes(kept_version& made, const replica_map& map, deadline by);
  static void make_parities(kept_version& made, const group_view& group);
  [[nodiscard]] result<void> trade_stripe(kept_version& made, const group_view& group, std::uint32_t codeword,
                                          std::uint32_t to, std::uint32_t from, deadline by);
  [[nodiscard]] result<void> trade(std::optional<std::span<const std::byte>> out, rank_id to,
                                   std::optional<std::span<std::byte>> into, rank_id from, deadline by);

  replica_ranks* ranks_;
  const replica_setup* setup_;
  std::vector<std::byte> scratch_{};                       // a stripe of another rank
  std::vector<std::vector<std::uint32_t>> stripe_sums_{};  // by rank, of the version in progress
};

inline result<void> replica_sender::spread(kept_version& made, const epoch_owners& owners,
                                           std::span<const std::span<const std::byte>> by_part, deadline by) {
  const std::optional<replica_map>& map = owners.map();
  if (auto done = share_sums(made, map, by); !done || !map) return done;
  if (setup_->scheme().kind() == redundancy_kind::compute)
    return compare_wards(made, owners.wards(), by_part);
  return map->scheme().is_coded() ? send_stripes(made, *map, by) : send_copies(made, *map, by);
}

/// Sends to all ranks the checksums of this rank's parts and, for coded states, of its stripes. Each message
/// ends with a checksum of itself.
inline result<void> replica_sender::share_sums(kept_version& made, const std::optional<replica_map>& map,
                                               deadline by) {
  const kept_layout& layout = made.facts().layout;
  const auto stripes = [&](rank_id rank) {
    return map && map->scheme().is_coded() ? map->layout(map->group_of(rank)).shape().data : 0U;
  };
  std::vector<std::uint32_t> words;
  std::vector<std::uint64_t> blocks{0};
  for (std::uint32_t rank = 0; rank < layout.world; ++rank) {
    const auto parts = std::ranges::count(layout.owners, rank_id{rank});
    words.resize(words.size() + static_cast<std::size_t>(parts) + stripes(rank_id{rank}) + 1);
    blocks.push_back(words.size() * sizeof(std::uint32_t));
  }
  const auto said_by = [&](rank_id rank) {
    const std::size_t i = to_index(rank);
    return std::span(words).subspan(blocks[i] / 4, (blocks[i + 1] - blocks[i]) / 4);
  };
  const std::span<std::uint32_t> own = said_by(made.self());
  std::size_t at = 0;
  for (std::size_t i = 0; i < layout.owners.size(); ++i) {
    if (layout.owners[i] == made.self()) own[at++] = made.facts().sums[i];
  }
  for (std::uint32_t stripe = 0; stripe < stripes(made.self()); ++stripe) {
    const redundancy::byte_range range = stripe_of(made.own().size(), stripes(made.self()), stripe);
    own[at++] = crc32c(0, made.own().subspan(range.first, range.count));
  }
  own[at] = crc32c(0, std::as_bytes(own.first(at)));
  if (auto done = all_gather(*ranks_, std::as_writable_bytes(std::span(words)), blocks, setup_->call(by));
      !done)
    return done;
  stripe_sums_.assign(layout.world, {});
  for (std::uint32_t rank = 0; rank < layout.world; ++rank) {
    const std::span<const std::uint32_t> said = said_by(rank_id{rank});
    const std::uint32_t sum = crc32c(0, std::as_bytes(said.first(said.size() - 1)));
    if (sum != said.back()) return setup_->refuse(errc::message_damaged, rank, said.back(), sum);
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < layout.owners.size(); ++i) {
      if (layout.owners[i] == rank_id{rank}) made.set_sum(part_id{i}, said[next++]);
    }
    for (std::uint32_t stripe = 0; stripe < stripes(rank_id{rank}); ++stripe)
      stripe_sums_[rank].push_back(said[next++]);
  }
  return {};
}

/// Sends, receives, or does both at once.
inline result<void> replica_sender::trade(std::optional<std::span<const std::byte>> out, rank_id to,
                                          std::optional<std::span<std::byte>> into, rank_id from,
                                          deadline by) {
  result<void> done;
  if (out && into) {
    done = ranks_->exchange(*out, to, *into, from, setup_->tag(), by);
  } else if (out) {
    done = ranks_->send(*out, to, setup_->tag(), by);
  } else if (into) {
    done = ranks_->recv(*into, from, setup_->tag(), by);
  }
  if (!done) ranks_->revoke();
  return done;
}

inline result<void> replica_sender::send_copies(kept_version& made, const replica_map& map, deadline by) {
  const std::uint32_t world = made.facts().layout.world;
  const std::uint32_t self = to_index(made.self());
  const auto keeps = [&](std::uint32_t holder, std::uint32_t rank) {
    const std::span<const rank_id> holders = map.holders(rank_id{rank});
    return std::ranges::find(holders, rank_id{holder}) != holders.end();
  };
  for (std::uint32_t d = 1; d < world; ++d) {
    const std::uint32_t to = (self + d) % world;
    const std::uint32_t from = (self + world - d) % world;
    std::optional<std::span<const std::byte>> out;
    std::optional<std::span<std::byte>> into;
    if (keeps(to, self)) out = made.own();
    if (keeps(self, from)) into = made.make_copy(rank_id{from});
    if (auto done = trade(out, rank_id{to}, into, rank_id{from}, by); !done) return done;
    if (!into) continue;
    if (const auto wrong = made.mismatch_in(rank_id{from}, *into))
      return setup_->refuse(errc::message_damaged, from, wrong->wanted, wrong->found);
  }
  return {};
}

/// Two ranks have computed the part, and their results must be equal.
inline result<void> replica_sender::compare_wards(kept_version& made, std::span<const part_id> wards,
                                                  std::span<const std::span<const std::byte>> by_part) {
  for (const part_id part : wards) {
    const std::span<const std::byte> bytes = by_part[to_index(part)];
    const std::uint32_t sum = crc32c(0, bytes);
    const std::uint32_t wanted = made.facts().sums[to_index(part)];
    if (sum != wanted) return setup_->refuse(errc::checksum_differs, to_index(part), wanted, sum);
    made.add_to_copy(made.facts().layout.owners[to_index(part)], bytes);
  }
  return {};
}

/// Each member sends its stripe of a codeword to the members that keep the codeword's parities, which add it.
inline result<void> replica_sender::send_stripes(kept_version& made, const replica_map& map, deadline by) {
  const group_view group(map, made.self());
  const std::uint32_t members = group.layout.members();
  make_parities(made, group);
  for (std::uint32_t d = 1; d < members; ++d) {
    const std::uint32_t to = (group.self + d) % members;
    const std::uint32_t from = (group.self + members - d) % members;
    for (std::uint32_t codeword = 0; codeword < members; ++codeword) {
      if (auto done = trade_stripe(made, group, codeword, to, from, by); !done) return done;
    }
  }
  return {};
}

/// Makes parities that are as long as the longest stripe of their codeword.
inline void replica_sender::make_parities(kept_version& made, const group_view& group) {
  const std::uint32_t members = group.layout.members();
  made.begin_parities(members);
  for (std::uint32_t codeword = 0; codeword < members; ++codeword) {
    if (!group.is_parity(group.self, codeword)) continue;
    std::uint64_t longest = 0;
    for (std::uint32_t member = 0; member < members; ++member) {
      if (group.is_parity(member, codeword)) continue;
      longest = std::max(longest, group.stripe(made.facts().layout, member, codeword).count);
    }
    made.make_parity(codeword, longest);
  }
}

/// Sends this rank's stripe of a codeword to one member, and adds another member's stripe to this rank's
/// parity.
inline result<void> replica_sender::trade_stripe(kept_version& made, const group_view& group,
                                                 std::uint32_t codeword, std::uint32_t to, std::uint32_t from,
                                                 deadline by) {
  const kept_layout& layout = made.facts().layout;
  std::optional<std::span<const std::byte>> out;
  if (group.is_parity(to, codeword) && !group.is_parity(group.self, codeword)) {
    const redundancy::byte_range own = group.stripe(layout, group.self, codeword);
    out = made.own().subspan(own.first, own.count);
  }
  std::optional<std::span<std::byte>> into;
  if (group.is_parity(group.self, codeword) && !group.is_parity(from, codeword)) {
    scratch_.resize(group.stripe(layout, from, codeword).count);
    into = scratch_;
  }
  const rank_id sender = group.ranks[from];
  if (auto done = trade(out, group.ranks[to], into, sender, by); !done || !into) return done;
  const std::uint32_t sum = crc32c(0, *into);
  const std::uint32_t wanted = stripe_sums_[to_index(sender)][group.layout.stripe_in(from, codeword)];
  if (sum != wanted) return setup_->refuse(errc::message_damaged, to_index(sender), wanted, sum);
  made.add_to_parity(codeword, *into, group.coefficient(codeword, from));
  return {};
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
