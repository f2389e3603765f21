/// @file
/// The communication of an NCCL transport outside NCCL. Private to comm/.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/detail/nccl_report.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/nccl_types.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Listens to the side channel while NCCL works, and holds the two votes by which ranks form a communicator:
/// on what each rank starts from, and on whether each has made it.
///
/// All members give both votes, unless another member has died. A vote that a rank could not give before its
/// deadline is *owed*: `agree` gives it first, as a no, because the others may wait for it.
///
/// @par Complexity      a vote is one agreement of the side channel.
/// @par Thread safety   one thread at a time, which also is the side channel's.
/// @par Errors          those of the side channel, including its exceptions.
template <nccl_side Side>
class side_channel {
 public:
  /// Both must outlive it. @param tag  of its messages.
  side_channel(Side& side, const nccl_report& report, std::uint32_t tag) noexcept
      : side_(side), report_(report), tag_(tag) {}

  [[nodiscard]] Side& side() const noexcept { return side_; }

  /// Handles news. Fails when waiting is pointless: a death, the epoch's end, or the deadline.
  /// @param with   the awaited rank; nothing: all ranks.
  /// @param bytes  for the failure's text.
  [[nodiscard]] result<void> listen(std::optional<rank_id> with, std::uint64_t bytes, deadline by);

  /// @name Votes
  /// @{
  /// Returns the AND of all members' bits. Both votes are owed until it has ended.
  [[nodiscard]] result<std::uint64_t> first_vote(std::uint64_t bits, deadline by) {
    owes_ = owes::both;
    return vote(bits, owes::second, by);
  }
  /// Returns whether all members have made the communicator.
  [[nodiscard]] result<bool> second_vote(bool has_made, deadline by) {
    const result<std::uint64_t> voted = vote(has_made ? 1 : 0, owes::nothing, by);
    if (!voted) return voted.error();
    return *voted != 0;
  }
  /// The side channel's agreement, after the owed votes.
  [[nodiscard]] result<comm::agreed> agree(std::uint64_t bits, deadline by);
  /// @}

  /// Copies the bytes of rank 0 to all ranks.
  [[nodiscard]] result<void> share(std::span<std::byte> bytes, deadline by);
  /// Returns the ranks of `seats`, in order, in NCCL's numbering.
  [[nodiscard]] std::vector<int> ranks_of(const seat_set& seats) const;

 private:
  enum class owes : std::uint8_t { nothing, both, second };

  [[nodiscard]] result<std::uint64_t> vote(std::uint64_t bits, owes next, deadline by);

  Side& side_;
  const nccl_report& report_;
  std::uint32_t tag_;
  owes owes_ = owes::nothing;
};

template <nccl_side Side>
result<void> side_channel<Side>::listen(std::optional<rank_id> with, std::uint64_t bytes, deadline by) {
  side_.poll();
  const rank_id whom = with.value_or(side_.rank());
  if (with) {
    if (side_.has_failed(*with)) return report_.refuse(errc::peer_failed, whom, bytes, 0);
  } else if (const std::optional<seat_id> dead = side_.failed().lowest()) {
    return report_.refuse(errc::peer_failed, side_.rank_of(*dead).value_or(whom), bytes, 0);
  }
  if (side_.is_revoked()) return report_.refuse(errc::epoch_revoked, whom, 0, side_.epoch());
  if (side_.after(0).ns >= by.ns) return report_.refuse(errc::peer_timed_out, whom, bytes, 0);
  return {};
}

/// Returns the AND of all members' bits. A dead member is a failure, reported to all members.
template <nccl_side Side>
result<std::uint64_t> side_channel<Side>::vote(std::uint64_t bits, owes next, deadline by) {
  const result<comm::agreed> outcome = side_.agree(bits, by);
  if (!outcome) return outcome.error();
  owes_ = outcome->failed.empty() ? next : owes::nothing;
  if (const std::optional<seat_id> dead = outcome->failed.lowest()) {
    return report_.refuse(errc::peer_failed, side_.rank_of(*dead).value_or(side_.rank()), 0, 0);
  }
  return outcome->bits;
}

template <nccl_side Side>
result<comm::agreed> side_channel<Side>::agree(std::uint64_t bits, deadline by) {
  while (owes_ != owes::nothing) {
    const result<std::uint64_t> voted = vote(0, owes_ == owes::both ? owes::second : owes::nothing, by);
    if (!voted && voted.code() != errc::peer_failed) return voted.error();
  }
  return side_.agree(bits, by);
}

template <nccl_side Side>
result<void> side_channel<Side>::share(std::span<std::byte> bytes, deadline by) {
  if (side_.rank() != rank_id{0}) return side_.recv(bytes, rank_id{0}, tag_, by);
  for (std::uint32_t i = 1; i < to_number(side_.world()); ++i) {
    if (auto sent = side_.send(bytes, rank_id{i}, tag_, by); !sent) return sent;
  }
  return {};
}

template <nccl_side Side>
std::vector<int> side_channel<Side>::ranks_of(const seat_set& seats) const {
  std::vector<int> ranks;
  for (const seat_id seat : seats) {
    if (const std::optional<rank_id> rank = side_.rank_of(seat))
      ranks.push_back(static_cast<int>(to_index(*rank)));
  }
  return ranks;
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
