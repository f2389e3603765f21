/// @file
/// The bodies of `nccl_transport`.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/nccl_transport.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <nccl_side Side, class Api>
nccl_transport<Side, Api>::nccl_transport(Side& side, cudaStream_t stream, const nccl_options& options,
                                          Api api)
    : side_(&side), stream_(stream), options_(options), api_(std::move(api)) {
  const std::string who = options_.name;
  if (const char* const why = api_.why_no_device()) throw system_error(who + ": no device: " + why);
  int version = 0;
  if (const ncclResult_t status = api_.version(&version); status != ncclSuccess) {
    throw system_error(who + ": ncclGetVersion: " + api_.text(status));
  }
  // Where the headers had a call, what is loaded must have it too: it is looked for at its first use.
  constexpr int least = Api::has_grow ? 22900 : Api::has_revoke ? 22807 : 22800;
  if (version < least) {
    throw system_error(who + ": the NCCL that is loaded has version code " + std::to_string(version) +
                       ", at least " + std::to_string(least) +
                       " is needed; see which libnccl.so.2 the loader finds");
  }
  if (const cudaError_t status = api_.make_event(&event_); status != cudaSuccess) {
    throw system_error(who + ": cudaEventCreate: " + api_.text(status));
  }
  if (const cudaError_t status = api_.allocate(&marks_, 2, stream_); status != cudaSuccess) {
    static_cast<void>(api_.end_event(event_));
    throw system_error(who + ": cudaMallocAsync of 2 bytes: " + api_.text(status));
  }
}

template <nccl_side Side, class Api>
nccl_transport<Side, Api>::~nccl_transport() {
  abort();
  static_cast<void>(api_.release(marks_, stream_));
  static_cast<void>(api_.end_event(event_));
}

// What went wrong
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
failure nccl_transport<Side, Api>::refuse(error_code code, rank_id rank, std::uint64_t wanted,
                                          std::uint64_t found) const noexcept {
  return {.code = code, .index = to_index(rank), .wanted = wanted, .found = found, .where = options_.name};
}

template <nccl_side Side, class Api>
failure nccl_transport<Side, Api>::misfit(std::uint64_t wanted, std::uint64_t found) const noexcept {
  return refuse(errc::size_mismatch, rank_id{0}, wanted, found);
}

template <nccl_side Side, class Api>
failure nccl_transport<Side, Api>::trouble(const char* call, const char* text, int status) noexcept {
  static_cast<void>(std::snprintf(trouble_.data(), trouble_.size(), "%s: %s: %s", options_.name, call, text));
  return {
      .code = errc::library_failed, .index = static_cast<std::uint32_t>(status), .where = trouble_.data()};
}

template <nccl_side Side, class Api>
failure nccl_transport<Side, Api>::trouble(const char* call, ncclResult_t status) noexcept {
  return trouble(call, api_.text(status), static_cast<int>(status));
}

template <nccl_side Side, class Api>
std::uint64_t nccl_transport<Side, Api>::size_of(ncclDataType_t type) noexcept {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

// One call
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
ncclResult_t nccl_transport<Side, Api>::status_of(ncclComm_t comm) noexcept {
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = api_.async_error(comm, &status);
  return asked == ncclSuccess ? status : asked;
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::may_talk(rank_id with) const noexcept {
  if (to_index(with) >= to_number(world())) {
    return refuse(errc::out_of_range, with, to_index(with), to_number(world()) - 1);
  }
  if (!is_ready()) return refuse(errc::epoch_revoked, with, 0, side_->epoch());
  return {};
}

/// Hears the side channel. A failure when there is nothing to wait for any more.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::listen(std::optional<rank_id> with, std::uint64_t bytes,
                                               deadline by) {
  side_->poll();
  const rank_id whom = with.value_or(rank());
  if (with) {
    if (side_->has_failed(*with)) return refuse(errc::peer_failed, whom, bytes, 0);
  } else if (const std::optional<seat_id> dead = side_->failed().lowest()) {
    return refuse(errc::peer_failed, side_->rank_of(*dead).value_or(whom), bytes, 0);
  }
  if (side_->is_revoked()) return refuse(errc::epoch_revoked, whom, 0, side_->epoch());
  if (now() >= by.ns) return refuse(errc::peer_timed_out, whom, bytes, 0);
  return {};
}

template <nccl_side Side, class Api>
template <class Enqueue>
result<void> nccl_transport<Side, Api>::enqueue_and_wait(const char* name, std::optional<rank_id> with,
                                                         std::uint64_t bytes, deadline by, Enqueue enqueue) {
  ncclResult_t status = api_.group_start();
  if (is_error(status)) return trouble("ncclGroupStart", status);
  is_put_ = true;
  const ncclResult_t put = enqueue();
  status = api_.group_end();  // also when putting failed: groups must balance
  if (is_error(put)) return trouble(name, put);
  if (is_error(status)) return trouble(name, status);
  for (bool is_recorded = false;; api_.pause(options_.look_ns)) {
    status = status_of(comm_);
    if (is_error(status)) return trouble(name, status);
    if (status == ncclSuccess && !is_recorded) {
      if (const cudaError_t cuda = api_.record(event_, stream_); cuda != cudaSuccess) {
        return trouble("cudaEventRecord", api_.text(cuda), static_cast<int>(cuda));
      }
      is_recorded = is_event_out_ = true;
      is_put_ = false;
    }
    if (is_recorded) {
      const cudaError_t cuda = api_.query(event_);
      if (cuda == cudaSuccess) break;
      if (cuda != cudaErrorNotReady) return trouble(name, api_.text(cuda), static_cast<int>(cuda));
    }
    if (auto heard = listen(with, bytes, by); !heard) return heard;
  }
  is_event_out_ = false;
  return {};
}

template <nccl_side Side, class Api>
template <class Enqueue>
result<void> nccl_transport<Side, Api>::call(const char* name, std::optional<rank_id> with,
                                             std::uint64_t bytes, deadline by, Enqueue enqueue) {
  result<void> done;
  try {
    done = enqueue_and_wait(name, with, bytes, by, enqueue);
  } catch (...) {
    side_->revoke();
    stop();
    throw;
  }
  if (done) return done;
  ++stats_.failed_calls;
  side_->revoke();  // before this rank stops: the others wait for it
  stop();
  return done;
}

/// Ends what NCCL does, so that it touches no memory any more. What can be shrunk then is kept.
template <nccl_side Side, class Api>
void nccl_transport<Side, Api>::stop() {
  if (comm_ == nullptr || std::exchange(is_stopped_, true)) return;
  if constexpr (Api::has_revoke) {
    const deadline by = side_->after(options_.stop_ns);
    // While a group is being launched NCCL 2.28.9 would free its job and go on to use it; and what has failed
    // is not fit to be shrunk.
    bool may_revoke = status_of(comm_) == ncclSuccess;
    // What has reached the stream since the last look has no event behind it as yet.
    if (may_revoke && is_put_) may_revoke = is_event_out_ = api_.record(event_, stream_) == cudaSuccess;
    is_put_ = false;
    ncclResult_t status = may_revoke ? api_.revoke(comm_) : ncclInvalidUsage;
    for (;;) {
      if (is_error(status)) break;
      const bool is_idle = !is_event_out_ || api_.query(event_) != cudaErrorNotReady;
      if (status == ncclSuccess && is_idle) {
        is_event_out_ = false;
        ++stats_.revoked;
        return;
      }
      if (now() >= by.ns) break;
      api_.pause(options_.look_ns);
      status = status_of(comm_);
    }
  }
  abort();
}

/// Its windows end with it.
template <nccl_side Side, class Api>
void nccl_transport<Side, Api>::abort_communicator() noexcept {
  static_cast<void>(api_.abort(std::exchange(comm_, nullptr)));
  windows_.clear();
  ++stats_.aborted;
}

/// Ends what there is: the one before first, which lets go of the one that is being made of it.
template <nccl_side Side, class Api>
void nccl_transport<Side, Api>::abort() noexcept {
  is_stopped_ = true;
  is_event_out_ = is_put_ = false;
  if (comm_ != nullptr) abort_communicator();
  if (child() != nullptr) {
    static_cast<void>(api_.abort(take_child()));
    ++stats_.aborted;
  } else if (is_growing_) {
    // Nothing ends that: NCCL writes there when it is done, or fails.
    static_cast<void>(child_.release());
  }
  is_growing_ = false;
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::send(std::span<const std::byte> bytes, rank_id to,
                                             std::uint32_t /*tag*/, deadline by) {
  if (auto may = may_talk(to); !may) return may;
  if (to == rank()) return misfit(bytes.size(), 0);  // NCCL would wait for its other half for ever
  return call("ncclSend", to, bytes.size(), by, [&] {
    return api_.send(bytes.empty() ? mark(0) : bytes.data(), bytes.empty() ? 1 : bytes.size(),
                     static_cast<int>(to_index(to)), comm_, stream_);
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::recv(std::span<std::byte> bytes, rank_id from, std::uint32_t /*tag*/,
                                             deadline by) {
  if (auto may = may_talk(from); !may) return may;
  if (from == rank()) return misfit(bytes.size(), 0);
  return call("ncclRecv", from, bytes.size(), by, [&] {
    return api_.recv(bytes.empty() ? mark(1) : bytes.data(), bytes.empty() ? 1 : bytes.size(),
                     static_cast<int>(to_index(from)), comm_, stream_);
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::exchange(std::span<const std::byte> out, rank_id to,
                                                 std::span<std::byte> into, rank_id from,
                                                 std::uint32_t /*tag*/, deadline by) {
  if (auto may = may_talk(to); !may) return may;
  if (auto may = may_talk(from); !may) return may;
  const bool goes_to_self = to == rank();
  const bool comes_from_self = from == rank();
  if (goes_to_self != comes_from_self || (goes_to_self && out.size() != into.size())) {
    return misfit(goes_to_self ? out.size() : 0, comes_from_self ? into.size() : 0);
  }
  // Whoever of the two dies, this rank waits: for all.
  std::optional<rank_id> with = std::nullopt;
  if (to == from) with = to;
  return call("ncclSend and ncclRecv", with, out.size() + into.size(), by, [&] {
    const ncclResult_t sent = api_.send(out.empty() ? mark(0) : out.data(), out.empty() ? 1 : out.size(),
                                        static_cast<int>(to_index(to)), comm_, stream_);
    if (is_error(sent)) return sent;
    return api_.recv(into.empty() ? mark(1) : into.data(), into.empty() ? 1 : into.size(),
                     static_cast<int>(to_index(from)), comm_, stream_);
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::all_reduce(std::span<const std::byte> from, std::span<std::byte> into,
                                                   ncclDataType_t type, ncclRedOp_t op, deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t element = size_of(type);
  if (from.size() != into.size()) return misfit(from.size(), into.size());
  if (element == 0 || from.size() % element != 0) return misfit(element, from.size());
  if (from.empty()) return {};
  return call("ncclAllReduce", std::nullopt, from.size(), by, [&] {
    return api_.all_reduce(from.data(), into.data(), from.size() / element, type, op, comm_, stream_);
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::reduce_scatter(std::span<const std::byte> from,
                                                       std::span<std::byte> into, ncclDataType_t type,
                                                       ncclRedOp_t op, deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t element = size_of(type);
  const std::uint64_t all = std::uint64_t{to_number(world())} * into.size();
  if (from.size() != all) return misfit(all, from.size());
  if (element == 0 || into.size() % element != 0) return misfit(element, into.size());
  if (into.empty()) return {};
  return call("ncclReduceScatter", std::nullopt, from.size(), by, [&] {
    return api_.reduce_scatter(from.data(), into.data(), into.size() / element, type, op, comm_, stream_);
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::all_gather(std::span<const std::byte> from, std::span<std::byte> into,
                                                   deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t all = std::uint64_t{to_number(world())} * from.size();
  if (into.size() != all) return misfit(all, into.size());
  if (from.empty()) return {};
  return call("ncclAllGather", std::nullopt, into.size(), by,
              [&] { return api_.all_gather(from.data(), into.data(), from.size(), comm_, stream_); });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::broadcast(std::span<std::byte> bytes, rank_id root, deadline by) {
  if (auto may = may_talk(root); !may) return may;
  if (bytes.empty()) return {};
  return call("ncclBroadcast", std::nullopt, bytes.size(), by, [&] {
    return api_.broadcast(bytes.data(), bytes.size(), static_cast<int>(to_index(root)), comm_, stream_);
  });
}

// Windows
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
result<bool> nccl_transport<Side, Api>::register_window(std::span<std::byte> memory, deadline by,
                                                        nccl_window how)
  requires(Api::has_windows)
{
  if (auto may = may_talk(rank()); !may) return may.error();
  constexpr std::uint64_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  if (memory.empty()) return misfit(page, 0);
  if (address % page != 0) return refuse(errc::bad_granularity, rank(), address, page);
  for (const window& each : windows_) {
    const auto other = reinterpret_cast<std::uintptr_t>(each.memory.data());
    const std::uint64_t begin = std::max<std::uint64_t>(address, other);
    const std::uint64_t end = std::min<std::uint64_t>(address + memory.size(), other + each.memory.size());
    if (begin < end) return refuse(errc::overlapping_ranges, rank(), memory.size(), end - begin);
  }
  windows_.push_back({memory, std::make_unique<ncclWindow_t>(nullptr)});
  ncclWindow_t* const made = windows_.back().handle.get();
  const int flags = how == nccl_window::symmetric ? NCCL_WIN_COLL_SYMMETRIC : NCCL_WIN_DEFAULT;
  const result<void> done = call("ncclCommWindowRegister", std::nullopt, memory.size(), by, [&] {
    return api_.register_window(comm_, memory.data(), memory.size(), made, flags);
  });
  // A refusal ends the epoch: what NCCL may still write to goes with its communicator.
  if (!done) return done.error();
  if (*made != nullptr) return true;
  windows_.pop_back();
  return false;
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::deregister_window(std::span<const std::byte> memory)
  requires(Api::has_windows)
{
  const auto found =
      std::ranges::find_if(windows_, [&](const window& each) { return each.memory.data() == memory.data(); });
  if (found == windows_.end()) return {};
  // What was stopped may still be registering: its windows go with it.
  if (!is_ready()) return refuse(errc::epoch_revoked, rank(), 0, side_->epoch());
  const ncclResult_t status = api_.deregister_window(comm_, *found->handle);
  windows_.erase(found);
  if (is_error(status)) return trouble("ncclCommWindowDeregister", status);
  return {};
}

// Epochs
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
ncclConfig_t nccl_transport<Side, Api>::config() const noexcept {
  ncclConfig_t made = NCCL_CONFIG_INITIALIZER;
  made.blocking = 0;
  return made;
}

template <nccl_side Side, class Api>
ncclComm_t nccl_transport<Side, Api>::child() const noexcept {
  return child_ ? std::atomic_ref(*child_).load(std::memory_order_acquire) : nullptr;
}

template <nccl_side Side, class Api>
std::vector<int> nccl_transport<Side, Api>::ranks_of(const seat_set& seats) const {
  std::vector<int> ranks;
  for (const seat_id seat : seats) {
    if (const std::optional<rank_id> rank = side_->rank_of(seat))
      ranks.push_back(static_cast<int>(to_index(*rank)));
  }
  return ranks;
}

/// The AND of all members' bits. When one of them has died, that is what all are told.
template <nccl_side Side, class Api>
result<std::uint64_t> nccl_transport<Side, Api>::vote(std::uint64_t bits, owes next, deadline by) {
  const result<agreed> outcome = side_->agree(bits, by);
  if (!outcome) return outcome.error();
  owes_ = outcome->failed.empty() ? next : owes::nothing;
  if (const std::optional<seat_id> dead = outcome->failed.lowest()) {
    return refuse(errc::peer_failed, side_->rank_of(*dead).value_or(rank()), 0, 0);
  }
  return outcome->bits;
}

template <nccl_side Side, class Api>
result<agreed> nccl_transport<Side, Api>::agree(std::uint64_t bits, deadline by) {
  // The others may have gone on to the second vote, and wait for this rank to say no.
  while (owes_ != owes::nothing) {
    const result<std::uint64_t> voted = vote(0, owes_ == owes::both ? owes::second : owes::nothing, by);
    if (!voted && voted.code() != errc::peer_failed) return voted.error();
  }
  return side_->agree(bits, by);
}

/// Two votes: what all have to begin with, and whether all have made it. A rank that fails between says so,
/// and one that runs out of time owes it.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::make_by_votes(standing& how, deadline by) {
  owes_ = owes::both;
  const result<std::uint64_t> first =
      vote((how.may_keep ? 1U : 0U) | (how.is_new ? 2U : 0U), owes::second, by);
  if (!first) return first.error();
  const result<void> made = make(how, *first, by);
  if (!made) side_->revoke();
  const result<std::uint64_t> second = vote(made ? 1 : 0, owes::nothing, by);
  if (!made) return made;
  if (!second) return second.error();
  if (*second == 0) return refuse(errc::epoch_revoked, rank(), 0, side_->epoch());
  return {};
}

/// A communicator of the epoch that has begun, or none: that of the one before is gone either way.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::form(standing& how, deadline by) {
  result<void> made;
  try {
    made = make_by_votes(how, by);
  } catch (...) {
    side_->revoke();
    abort();
    throw;
  }
  if (!made) {
    side_->revoke();
    abort();
    return made;
  }
  if (comm_ != nullptr) abort_communicator();  // it has grown: all have left the one before
  comm_ = take_child();
  is_growing_ = false;
  is_stopped_ = false;
  return {};
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::make(standing& how, std::uint64_t said, deadline by) {
  const bool all_keep = (said & 1U) != 0 && (said & 2U) == 0;
  if (all_keep && !how.excluded.empty()) return make_shrunk(how.excluded, by);
  return make_planned(all_keep ? way::grow : way::fresh, by);
}

/// The first rank's, to all.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::exchange_plan(plan& what, deadline by) {
  if (rank() != rank_id{0}) return side_->recv(what, rank_id{0}, options_.side_tag, by);
  for (std::uint32_t i = 1; i < to_number(world()); ++i) {
    if (auto sent = side_->send(what, rank_id{i}, options_.side_tag, by); !sent) return sent;
  }
  return {};
}

/// A fresh one, or one that has grown: who joins does not know which, the first rank tells.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::make_planned(way first, deadline by) {
  ncclUniqueId id{};
  plan what{};
  what[0] = static_cast<std::byte>(first);
  if (rank() == rank_id{0}) {
    ncclResult_t status = ncclInvalidUsage;
    if (first == way::fresh) status = api_.unique_id(&id);
    if constexpr (Api::has_grow) {
      if (first == way::grow) status = api_.grow_id(comm_, &id);
    }
    if (status != ncclSuccess) return trouble("ncclGetUniqueId", status);
    std::memcpy(&what[1], &id, sizeof id);
  }
  if (auto told = exchange_plan(what, by); !told) return told;
  std::memcpy(&id, &what[1], sizeof id);
  const auto ranks = static_cast<int>(to_number(world()));
  const auto self = static_cast<int>(to_index(rank()));
  ncclConfig_t how = config();
  if (!child_) child_ = std::make_unique<ncclComm_t>(nullptr);
  if constexpr (Api::has_grow) {
    if (what[0] == static_cast<std::byte>(way::grow)) {
      const bool is_member = comm_ != nullptr;
      const ncclUniqueId* const its = is_member && self != 0 ? nullptr : &id;
      is_growing_ = true;
      const ncclResult_t status = api_.grow(comm_, ranks, its, is_member ? -1 : self, child_.get(), &how);
      if (is_error(status)) {
        is_growing_ = false;
        return trouble("ncclCommGrow", status);
      }
      if (auto made = wait_for_child("ncclCommGrow", by); !made) return made;
      ++stats_.grown;
      return {};
    }
  }
  abort();  // of the epoch before: all ranks are in this one, and wait for nothing there
  const ncclResult_t status = api_.init(child_.get(), ranks, id, self, &how);
  if (is_error(status)) return trouble("ncclCommInitRankConfig", status);
  if (auto made = wait_for_child("ncclCommInitRankConfig", by); !made) return made;
  ++stats_.fresh;
  return {};
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::make_shrunk(std::vector<int>& excluded, deadline by) {
  ncclConfig_t how = config();
  if (!child_) child_ = std::make_unique<ncclComm_t>(nullptr);
  const ncclResult_t status = api_.shrink(comm_, excluded.data(), static_cast<int>(excluded.size()),
                                          child_.get(), &how, NCCL_SHRINK_ABORT);
  if (is_error(status)) return trouble("ncclCommShrink", status);
  if (auto made = wait_for_child("ncclCommShrink", by); !made) return made;
  // To destroy it would wait for who is excluded.
  abort_communicator();
  ++stats_.shrunk;
  return {};
}

/// What it is made of tells how that goes; NCCL shows the new one early, or not before it is made.
template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::wait_for_child(const char* name, deadline by) {
  for (;; api_.pause(options_.look_ns)) {
    bool is_made = true;
    for (const ncclComm_t each : {comm_, child()}) {
      if (each == nullptr) continue;
      const ncclResult_t status = status_of(each);
      if (is_error(status)) return trouble(name, status);
      is_made = is_made && status == ncclSuccess;
    }
    if (is_made && child() != nullptr) return {};
    if (auto heard = listen(std::nullopt, 0, by); !heard) return heard;
  }
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::join(deadline by) {
  standing how{.is_new = true, .may_keep = true};
  return form(how, by);
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::shrink(const agreed& outcome, deadline by) {
  stop();
  standing how{.excluded = ranks_of(outcome.failed)};
  how.may_keep = comm_ != nullptr && !how.excluded.empty();
  side_->shrink(outcome);
  return form(how, by);
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::admit(const agreed& outcome, deadline by) {
  standing how;
  if constexpr (Api::has_grow) {
    // NCCL numbers who joins last; here the numbers are those of the seats.
    const std::span<const seat_id> seats = side_->seats();
    const std::optional<seat_id> first = outcome.joining.lowest();
    how.may_keep = is_ready() && outcome.failed.empty() && first && to_index(*first) > to_index(seats.back());
  }
  if (!how.may_keep) stop();
  side_->admit(outcome);
  return form(how, by);
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::leave(deadline by) {
  if (comm_ == nullptr) return {};
  if (is_stopped_) {  // NCCL does not finalise what was revoked
    abort();
    return {};
  }
  if constexpr (Api::has_windows) {
    for (const window& each : windows_)
      static_cast<void>(api_.deregister_window(comm_, *each.handle));
    windows_.clear();
  }
  ncclResult_t status = api_.finalize(comm_);
  result<void> done;
  while (status == ncclInProgress && done) {
    api_.pause(options_.look_ns);
    status = status_of(comm_);
    if (status == ncclInProgress) done = listen(std::nullopt, 0, by);
  }
  if (done && is_error(status)) done = trouble("ncclCommFinalize", status);
  if (!done) {
    side_->revoke();  // the others wait for this one
    abort();
    return done;
  }
  is_stopped_ = true;
  static_cast<void>(api_.destroy(std::exchange(comm_, nullptr)));
  return {};
}

}  // namespace v0
}  // namespace llmmem
