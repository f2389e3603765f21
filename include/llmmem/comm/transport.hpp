/// @file
/// `transport`: what collectives, sharded state and replicas require of the ranks they work between.
#pragma once

#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Ranks that exchange messages. See `communicator` for the guarantees of each call; the transport determines
/// the kind of memory: host or device.
///
///     rank(), world()                              this rank, and the number of ranks
///     after(ns)                                    the time `ns` from now
///     send(bytes, to, tag, by)                     by `by`, or a failure
///     recv(bytes, from, tag, by)
///     exchange(out, to, into, from, tag, by)       both at once
///     revoke()                                     ends all waits for this rank
template <class T>
concept transport =
    requires(T& ranks, const T& seen, std::span<const std::byte> out, std::span<std::byte> into, rank_id rank,
             std::uint32_t tag, deadline by, std::uint64_t ns) {
      { seen.rank() } noexcept -> std::same_as<rank_id>;
      { seen.world() } noexcept -> std::same_as<rank_count>;
      { seen.after(ns) } noexcept -> std::same_as<deadline>;
      { ranks.send(out, rank, tag, by) } -> std::same_as<result<void>>;
      { ranks.recv(into, rank, tag, by) } -> std::same_as<result<void>>;
      { ranks.exchange(out, rank, into, rank, tag, by) } -> std::same_as<result<void>>;
      { ranks.revoke() } noexcept;
    };

/// Some of a transport's ranks, renumbered from 0: those of a node, of a row of a grid, of a stage. A
/// `transport`. Groups that share two ranks must not communicate between these at the same time with the same
/// tags.
///
/// @par Thread safety   that of the underlying transport.
/// @par Errors          those of the underlying transport; ranks in them are its ranks.
template <transport T>
class rank_group {
 public:
  /// @param members  ranks of `beneath` in the order of their new numbers, including its own; each once.
  /// @throws argument_error  otherwise.
  rank_group(T& beneath, std::span<const rank_id> members);

  [[nodiscard]] rank_id rank() const noexcept { return rank_; }
  [[nodiscard]] rank_count world() const noexcept {
    return rank_count{static_cast<std::uint32_t>(members_.size())};
  }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return beneath_->after(ns); }
  /// Returns the stream of the underlying transport's messages, if they are on one.
  [[nodiscard]] auto stream() const noexcept
    requires requires(const T& ranks) { ranks.stream(); }
  {
    return beneath_->stream();
  }
  /// Returns the rank in the underlying transport.
  [[nodiscard]] rank_id beneath(rank_id rank) const noexcept { return members_[to_index(rank)]; }

  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by) {
    if (to_index(to) >= members_.size()) return no_such(to);
    return beneath_->send(bytes, beneath(to), tag, by);
  }
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by) {
    if (to_index(from) >= members_.size()) return no_such(from);
    return beneath_->recv(bytes, beneath(from), tag, by);
  }
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by) {
    if (to_index(to) >= members_.size()) return no_such(to);
    if (to_index(from) >= members_.size()) return no_such(from);
    return beneath_->exchange(out, beneath(to), into, beneath(from), tag, by);
  }
  /// Revokes for all underlying ranks, not only the group's.
  void revoke() noexcept { beneath_->revoke(); }

 private:
  [[nodiscard]] failure no_such(rank_id rank) const noexcept {
    return {.code = errc::out_of_range,
            .index = to_index(rank),
            .wanted = to_index(rank),
            .found = members_.size() - 1,
            .where = "rank_group"};
  }

  T* beneath_;
  std::vector<rank_id> members_;
  rank_id rank_{};
};

template <transport T>
rank_group<T>::rank_group(T& beneath, std::span<const rank_id> members)
    : beneath_(&beneath), members_(members.begin(), members.end()) {
  const std::uint32_t world = to_number(beneath.world());
  std::vector<bool> is_in(world, false);
  bool has_self = false;
  for (std::uint32_t i = 0; i < members.size(); ++i) {
    const std::uint32_t each = to_index(members[i]);
    if (each >= world) {
      throw argument_error("rank_group: rank " + std::to_string(each) + " of " + std::to_string(world) +
                           "; ranks are numbered from 0");
    }
    if (is_in[each]) throw argument_error("rank_group: rank " + std::to_string(each) + " is listed twice");
    is_in[each] = true;
    if (members[i] != beneath.rank()) continue;
    has_self = true;
    rank_ = rank_id{i};
  }
  if (!has_self) {
    throw argument_error("rank_group: rank " + std::to_string(to_index(beneath.rank())) +
                         " is not in it; only members may construct one");
  }
}

}  // namespace v0
}  // namespace llmmem
