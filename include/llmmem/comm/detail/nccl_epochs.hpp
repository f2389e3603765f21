/// @file
/// How ranks form an NCCL communicator for an epoch. Private to comm/.
#pragma once

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/detail/nccl_communicator.hpp>
#include <llmmem/comm/detail/nccl_report.hpp>
#include <llmmem/comm/detail/side_channel.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/nccl_types.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/config.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Forms the communicator of each epoch, so that either all ranks have made it, or no rank uses one. The
/// ranks vote on what they have, make it the same way (shrunk, grown, or fresh), and vote on whether all have
/// succeeded.
///
/// It stores nothing about an epoch itself; the side channel and the communicator do.
///
/// @par Complexity, Thread safety, Errors   as the functions of `nccl_transport` of the same names.
template <nccl_side Side, class Api>
class nccl_epochs {
 public:
  /// All arguments must outlive it.
  nccl_epochs(side_channel<Side>& channel, nccl_communicator<Api>& comm, Api& api, const nccl_report& report,
              const nccl_options& options) noexcept
      : channel_(channel), comm_(comm), api_(api), report_(report), options_(options) {}

  [[nodiscard]] result<void> join(deadline by) {
    standing how{.is_new = true, .may_keep = true};
    return form(how, by);
  }
  [[nodiscard]] result<void> shrink(const comm::agreed& outcome, deadline by);
  [[nodiscard]] result<void> admit(const comm::agreed& outcome, deadline by);
  [[nodiscard]] result<void> leave(deadline by);

 private:
  enum class way : std::uint8_t { fresh = 1, grow };
  // The method, and NCCL's id.
  using plan = std::array<std::byte, 1 + sizeof(ncclUniqueId)>;
  struct standing {
    std::vector<int> excluded{};  // ranks of the present communicator
    bool is_new = false;
    bool may_keep = false;  // the present communicator can become the next
  };

  [[nodiscard]] failure trouble(const char* call, ncclResult_t status) const noexcept {
    return report_.trouble(call, api_.text(status), static_cast<int>(status));
  }
  [[nodiscard]] result<void> form(standing& how, deadline by);
  [[nodiscard]] result<void> make_by_votes(standing& how, deadline by);
  [[nodiscard]] result<void> make(standing& how, std::uint64_t said, deadline by);
  [[nodiscard]] result<void> make_planned(way first, deadline by);
  [[nodiscard]] ncclResult_t new_id(way first, ncclUniqueId& id);
  [[nodiscard]] result<void> wait_for_child(const char* name, ncclResult_t begun, deadline by);

  side_channel<Side>& channel_;
  nccl_communicator<Api>& comm_;
  Api& api_;
  const nccl_report& report_;
  const nccl_options& options_;
};

template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::shrink(const comm::agreed& outcome, deadline by) {
  Side& side = channel_.side();
  comm_.stop(side);
  standing how{.excluded = channel_.ranks_of(outcome.failed)};
  how.may_keep = comm_.is_there() && !how.excluded.empty();
  side.shrink(outcome);
  return form(how, by);
}

template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::admit(const comm::agreed& outcome, deadline by) {
  Side& side = channel_.side();
  standing how;
  if constexpr (Api::has_grow) {
    // NCCL numbers the joining ranks last; here the numbers follow the seats.
    const std::span<const seat_id> seats = side.seats();
    const std::optional<seat_id> first = outcome.joining.lowest();
    const bool is_ready = comm_.is_there() && !comm_.is_stopped() && !side.is_revoked();
    how.may_keep = is_ready && outcome.failed.empty() && first && to_index(*first) > to_index(seats.back());
  }
  if (!how.may_keep) comm_.stop(side);
  side.admit(outcome);
  return form(how, by);
}

template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::leave(deadline by) {
  if (!comm_.is_there()) return {};
  if (comm_.is_stopped()) {  // NCCL does not finalise a revoked communicator
    comm_.abort();
    return {};
  }
  ncclResult_t status = comm_.begin_finalize();
  result<void> done;
  while (status == ncclInProgress && done) {
    api_.pause(options_.poll_ns);
    status = comm_.status();
    if (status == ncclInProgress) done = channel_.listen(std::nullopt, 0, by);
  }
  if (done && is_error(status)) done = trouble("ncclCommFinalize", status);
  if (!done) {
    channel_.side().revoke();  // the others wait for this rank
    comm_.abort();
    return done;
  }
  comm_.destroy();
  return {};
}

/// Makes a communicator of the new epoch, or none: the previous one no longer exists in either case.
template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::form(standing& how, deadline by) {
  result<void> made;
  try {
    made = make_by_votes(how, by);
  } catch (...) {
    channel_.side().revoke();
    comm_.abort();
    throw;
  }
  if (!made) {
    channel_.side().revoke();
    comm_.abort();
    return made;
  }
  comm_.adopt_child();
  return {};
}

/// A rank that fails between the votes reports it in the second one.
template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::make_by_votes(standing& how, deadline by) {
  const std::uint64_t bits = (how.may_keep ? 1U : 0U) | (how.is_new ? 2U : 0U);
  const result<std::uint64_t> first = channel_.first_vote(bits, by);
  if (!first) return first.error();
  const result<void> made = make(how, *first, by);
  if (!made) channel_.side().revoke();
  const result<bool> second = channel_.second_vote(made.has_value(), by);
  if (!made) return made;
  if (!second.has_value()) return second.error();
  const Side& side = channel_.side();
  if (!*second) return report_.refuse(errc::epoch_revoked, side.rank(), 0, side.epoch());
  return {};
}

template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::make(standing& how, std::uint64_t said, deadline by) {
  const bool all_keep = (said & 1U) != 0 && (said & 2U) == 0;
  if (all_keep && !how.excluded.empty()) {
    return wait_for_child("ncclCommShrink", comm_.begin_shrunk(how.excluded), by);
  }
  return make_planned(all_keep ? way::grow : way::fresh, by);
}

template <nccl_side Side, class Api>
ncclResult_t nccl_epochs<Side, Api>::new_id(way first, ncclUniqueId& id) {
  if (first == way::fresh) return api_.unique_id(&id);
  if constexpr (Api::has_grow) return api_.grow_id(comm_.handle(), &id);
  return ncclInvalidUsage;
}

/// Makes a fresh one, or a grown one: a joining rank learns from rank 0 which.
template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::make_planned(way first, deadline by) {
  const Side& side = channel_.side();
  ncclUniqueId id{};
  plan what{};
  what[0] = static_cast<std::byte>(first);
  if (side.rank() == rank_id{0}) {
    if (const ncclResult_t status = new_id(first, id); status != ncclSuccess) {
      return trouble("ncclGetUniqueId", status);
    }
    std::memcpy(&what[1], &id, sizeof id);
  }
  if (auto told = channel_.share(what, by); !told) return told;
  std::memcpy(&id, &what[1], sizeof id);
  const auto ranks = static_cast<int>(to_number(side.world()));
  const auto self = static_cast<int>(to_index(side.rank()));
  if constexpr (Api::has_grow) {
    if (what[0] == static_cast<std::byte>(way::grow)) {
      return wait_for_child("ncclCommGrow", comm_.begin_grown(ranks, id, self), by);
    }
  }
  return wait_for_child("ncclCommInitRankConfig", comm_.begin_fresh(ranks, id, self), by);
}

/// @param begun  NCCL's result for the call `name`, which began to make the child.
template <nccl_side Side, class Api>
result<void> nccl_epochs<Side, Api>::wait_for_child(const char* name, ncclResult_t begun, deadline by) {
  if (is_error(begun)) return trouble(name, begun);
  for (;; api_.pause(options_.poll_ns)) {
    const ncclResult_t status = comm_.look_at_child();
    if (status == ncclSuccess) return {};
    if (is_error(status)) return trouble(name, status);
    if (auto heard = channel_.listen(std::nullopt, 0, by); !heard) return heard;
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
