/// @file
/// The bodies of `nccl_transport`.
#pragma once

#include <llmmem/comm/errors.hpp>
#include <llmmem/comm/nccl_transport.hpp>

#include <string>
#include <utility>

namespace llmmem {
inline namespace v0 {

template <nccl_side Side, class Api>
nccl_transport<Side, Api>::nccl_transport(Side& side, cudaStream_t stream, const nccl_options& options,
                                          Api api)
    : options_(options),
      api_(checked(std::move(api), options.name)),
      report_(options.name),
      channel_(side, report_, options.side_tag),
      marker_(api_, stream, options.name),
      comm_(api_, marker_, options_, stats_),
      epochs_(channel_, comm_, api_, report_, options_) {}

/// Returns the library, if there is a device and the library is new enough.
template <nccl_side Side, class Api>
Api nccl_transport<Side, Api>::checked(Api api, const char* name) {
  const std::string who = name;
  if (const char* const why = api.why_no_device()) throw system_error(who + ": no device: " + why);
  int version = 0;
  if (const ncclResult_t status = api.version(&version); status != ncclSuccess) {
    throw system_error(who + ": ncclGetVersion: " + api.text(status));
  }
  // If the headers had a call, the loaded library must have it too: it is looked up at its first use.
  constexpr int least = Api::has_grow ? 22900 : Api::has_revoke ? 22807 : 22800;
  if (version < least) {
    throw system_error(who + ": the loaded NCCL has version code " + std::to_string(version) +
                       ", but at least " + std::to_string(least) +
                       " is needed; check which libnccl.so.2 the loader finds");
  }
  return api;
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

// A call
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::may_talk(rank_id with) const noexcept {
  if (to_index(with) >= to_number(world())) {
    return report_.refuse(errc::out_of_range, with, to_index(with), to_number(world()) - 1);
  }
  if (!is_ready()) return report_.refuse(errc::epoch_revoked, with, 0, channel_.side().epoch());
  return {};
}

template <nccl_side Side, class Api>
template <class Enqueue>
result<void> nccl_transport<Side, Api>::enqueue_and_wait(const char* name, std::optional<rank_id> with,
                                                         std::uint64_t bytes, deadline by, Enqueue enqueue) {
  ncclResult_t status = api_.group_start();
  if (detail::is_error(status)) return trouble("ncclGroupStart", status);
  marker_.will_put();
  const ncclResult_t put = enqueue();
  status = api_.group_end();  // also if queueing failed, because groups must balance
  if (detail::is_error(put)) return trouble(name, put);
  if (detail::is_error(status)) return trouble(name, status);
  for (bool is_marked = false;; api_.pause(options_.poll_ns)) {
    status = comm_.status();
    if (detail::is_error(status)) return trouble(name, status);
    if (status == ncclSuccess && !is_marked) {
      if (const cudaError_t cuda = marker_.mark(); cuda != cudaSuccess) {
        return trouble("cudaEventRecord", cuda);
      }
      is_marked = true;
    }
    if (is_marked) {
      const cudaError_t cuda = marker_.query();
      if (cuda == cudaSuccess) return {};
      if (cuda != cudaErrorNotReady) return trouble(name, cuda);
    }
    if (auto heard = channel_.listen(with, bytes, by); !heard) return heard;
  }
}

template <nccl_side Side, class Api>
template <class Enqueue>
result<void> nccl_transport<Side, Api>::call(const char* name, std::optional<rank_id> with,
                                             std::uint64_t bytes, deadline by, Enqueue enqueue) {
  result<void> done;
  try {
    done = enqueue_and_wait(name, with, bytes, by, enqueue);
  } catch (...) {
    revoke();
    comm_.stop(side());
    throw;
  }
  if (done) return done;
  ++stats_.failed_calls;
  revoke();  // before this rank stops, because the others wait for it
  comm_.stop(side());
  return done;
}

// Messages
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
ncclResult_t nccl_transport<Side, Api>::put_send(std::span<const std::byte> bytes, rank_id to) {
  const bool none = bytes.empty();
  return api_.send(none ? marker_.byte_out() : bytes.data(), none ? 1 : bytes.size(),
                   static_cast<int>(to_index(to)), comm_.handle(), marker_.stream());
}

template <nccl_side Side, class Api>
ncclResult_t nccl_transport<Side, Api>::put_recv(std::span<std::byte> bytes, rank_id from) {
  const bool none = bytes.empty();
  return api_.recv(none ? marker_.byte_in() : bytes.data(), none ? 1 : bytes.size(),
                   static_cast<int>(to_index(from)), comm_.handle(), marker_.stream());
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::send(std::span<const std::byte> bytes, rank_id to,
                                             std::uint32_t /*tag*/, deadline by) {
  if (auto may = may_talk(to); !may) return may;
  if (to == rank()) return report_.misfit(bytes.size(), 0);  // NCCL would wait for its other half forever
  return call("ncclSend", to, bytes.size(), by, [&] { return put_send(bytes, to); });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::recv(std::span<std::byte> bytes, rank_id from, std::uint32_t /*tag*/,
                                             deadline by) {
  if (auto may = may_talk(from); !may) return may;
  if (from == rank()) return report_.misfit(bytes.size(), 0);
  return call("ncclRecv", from, bytes.size(), by, [&] { return put_recv(bytes, from); });
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
    return report_.misfit(goes_to_self ? out.size() : 0, comes_from_self ? into.size() : 0);
  }
  // This rank waits for both: with two peers, any death ends the call.
  std::optional<rank_id> with = std::nullopt;
  if (to == from) with = to;
  return call("ncclSend and ncclRecv", with, out.size() + into.size(), by, [&] {
    const ncclResult_t sent = put_send(out, to);
    return detail::is_error(sent) ? sent : put_recv(into, from);
  });
}

// Collectives
// ---------------------------------------------------------------------------------------------------

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::all_reduce(std::span<const std::byte> from, std::span<std::byte> into,
                                                   ncclDataType_t type, ncclRedOp_t op, deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t element = size_of(type);
  if (from.size() != into.size()) return report_.misfit(from.size(), into.size());
  if (element == 0 || from.size() % element != 0) return report_.misfit(element, from.size());
  if (from.empty()) return {};
  return call("ncclAllReduce", std::nullopt, from.size(), by, [&] {
    return api_.all_reduce(from.data(), into.data(), from.size() / element, type, op, comm_.handle(),
                           marker_.stream());
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::reduce_scatter(std::span<const std::byte> from,
                                                       std::span<std::byte> into, ncclDataType_t type,
                                                       ncclRedOp_t op, deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t element = size_of(type);
  const std::uint64_t all = std::uint64_t{to_number(world())} * into.size();
  if (from.size() != all) return report_.misfit(all, from.size());
  if (element == 0 || into.size() % element != 0) return report_.misfit(element, into.size());
  if (into.empty()) return {};
  return call("ncclReduceScatter", std::nullopt, from.size(), by, [&] {
    return api_.reduce_scatter(from.data(), into.data(), into.size() / element, type, op, comm_.handle(),
                               marker_.stream());
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::all_gather(std::span<const std::byte> from, std::span<std::byte> into,
                                                   deadline by) {
  if (auto may = may_talk(rank()); !may) return may;
  const std::uint64_t all = std::uint64_t{to_number(world())} * from.size();
  if (into.size() != all) return report_.misfit(all, into.size());
  if (from.empty()) return {};
  return call("ncclAllGather", std::nullopt, into.size(), by, [&] {
    return api_.all_gather(from.data(), into.data(), from.size(), comm_.handle(), marker_.stream());
  });
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::broadcast(std::span<std::byte> bytes, rank_id root, deadline by) {
  if (auto may = may_talk(root); !may) return may;
  if (bytes.empty()) return {};
  return call("ncclBroadcast", std::nullopt, bytes.size(), by, [&] {
    return api_.broadcast(bytes.data(), bytes.size(), static_cast<int>(to_index(root)), comm_.handle(),
                          marker_.stream());
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
  if (memory.empty()) return report_.misfit(page, 0);
  if (address % page != 0) return report_.refuse(errc::bad_granularity, rank(), address, page);
  if (const std::optional<std::uint64_t> shared = comm_.windows().shared_bytes(memory)) {
    return report_.refuse(errc::overlapping_ranges, rank(), memory.size(), *shared);
  }
  ncclWindow_t* const made = comm_.windows().add(memory);
  const int flags = how == nccl_window::symmetric ? NCCL_WIN_COLL_SYMMETRIC : NCCL_WIN_DEFAULT;
  const result<void> done = call("ncclCommWindowRegister", std::nullopt, memory.size(), by, [&] {
    return api_.register_window(comm_.handle(), memory.data(), memory.size(), made, flags);
  });
  // A refusal ends the epoch: memory that NCCL may still write to is released with its communicator.
  if (!done) return done.error();
  if (*made != nullptr) return true;
  comm_.windows().erase(memory);
  return false;
}

template <nccl_side Side, class Api>
result<void> nccl_transport<Side, Api>::deregister_window(std::span<const std::byte> memory)
  requires(Api::has_windows)
{
  const ncclWindow_t* const found = comm_.windows().find(memory);
  if (found == nullptr) return {};
  // A stopped communicator may still be registering: its windows end with it.
  if (!is_ready()) return report_.refuse(errc::epoch_revoked, rank(), 0, channel_.side().epoch());
  const ncclResult_t status = api_.deregister_window(comm_.handle(), *found);
  comm_.windows().erase(memory);
  if (detail::is_error(status)) return trouble("ncclCommWindowDeregister", status);
  return {};
}

}  // namespace v0
}  // namespace llmmem
