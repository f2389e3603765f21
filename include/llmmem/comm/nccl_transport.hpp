/// @file
/// `nccl_transport`: messages and collectives between the devices of ranks, by NCCL. Needs NCCL 2.28 or
/// newer.
#pragma once

#include <llmmem/config.hpp>

#if !__has_include(<nccl.h>)
#error \
    "llmmem/comm/nccl_transport.hpp needs NCCL and the CUDA Toolkit: install libnccl-dev and link llmmem::nccl."
#endif

#include <llmmem/comm/agreement.hpp>
#include <llmmem/comm/detail/nccl_communicator.hpp>
#include <llmmem/comm/detail/nccl_epochs.hpp>
#include <llmmem/comm/detail/nccl_library.hpp>
#include <llmmem/comm/detail/nccl_report.hpp>
#include <llmmem/comm/detail/side_channel.hpp>
#include <llmmem/comm/detail/stream_marker.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/nccl_types.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace llmmem {
inline namespace v0 {

/// Moves data between the device memory of ranks by NCCL, on one stream. The side channel detects dead ranks,
/// agrees on them, and ends the calls that wait for them. A `transport`: `broadcast`, `all_gather` and
/// `barrier` of collectives.hpp run over it with device pointers. The other collectives there copy or add on
/// the host: use the members below instead, which are NCCL's own.
///
///     communicator side(endpoint);                                     // over the host
///     side.join(side.after(10'000'000'000)).value();
///     nccl_transport ranks(side, stream);                              // the current device is the stream's
///     ranks.join(ranks.after(60'000'000'000)).value();
///     for (...) {
///       if (ranks.all_reduce(out, into, ncclFloat, ncclSum, ranks.after(...))) continue;
///       ranks.revoke();
///       const comm::agreed outcome = ranks.agree(my_bits, ranks.after(1'000'000'000)).value();
///       ranks.shrink(outcome, ranks.after(60'000'000'000)).value();    // both channels, without the dead
///     }
///     ranks.leave(ranks.after(1'000'000'000)).value();
///
/// - **Calls** wait until the stream has done their work, their deadline has passed, or the epoch has ended:
///   every `poll_ns` they check NCCL for errors and the side channel for news. They also wait for the earlier
///   work of the stream. The stream must not be captured into a graph.
/// - **A call that fails ends the epoch**, on all ranks, by `revoke`, because NCCL cannot cancel one message.
///   The call returns once NCCL no longer touches memory. To that end it revokes NCCL's operations; it aborts
///   the communicator instead if NCCL has no `ncclCommRevoke` (before 2.28.7), is still launching operations
///   or has failed, or if the revoke takes longer than `stop_ns`.
/// - **Tags**: NCCL has none. Messages between two ranks are received in the order in which they were sent,
///   with the sizes that they were sent with; a tag is not checked. Otherwise both wait, or NCCL fails. A
///   rank sends to itself only by `exchange`. A message without bytes is sent as one byte.
/// - **Agreement**: call `agree` of the transport, not of the side channel, so that a `join` or `shrink` that
///   was cut short ends first. While the side channel has a transport over it, use it for messages only.
/// - **Epochs**: `shrink` lets NCCL shrink its communicator (NCCL_SHRINK_ABORT), and aborts the previous one:
///   it is never destroyed. It makes a fresh one when any rank had to abort its own, or when no rank is
///   excluded, which NCCL refuses. `admit` grows the communicator if NCCL can (2.29), no rank has failed, and
///   all joining ranks have higher seats, because NCCL numbers them last; otherwise it makes a fresh one.
/// - **Several transports** may share a device: NCCL allows it. Each is used by one thread.
///
/// @par Complexity      a call takes some microseconds more than NCCL's, and returns up to `poll_ns` late.
///      A new epoch takes two agreements and NCCL's set-up: seconds for many ranks.
/// @par Thread safety   one thread at a time, which also is the side channel's.
/// @par Errors          the constructor throws `system_error` without a device; calls return the failures of
///      the side channel, and `errc::library_failed` with the text of NCCL or CUDA. A `std::bad_alloc` of the
///      side channel leaves a call when its operation has stopped.
/// @par Source          rules of use: NCCL's user guide, "Fault tolerance" and "Creating a communicator".
template <nccl_side Side, class Api = nccl_library>
class nccl_transport {
 public:
  /// Side channel and stream must outlive it. It reaches no other rank before `join`.
  /// @throws system_error  if there is no device, NCCL is too old, or CUDA refuses.
  nccl_transport(Side& side, cudaStream_t stream, const nccl_options& options = {}, Api api = {});
  nccl_transport(const nccl_transport&) = delete;
  nccl_transport& operator=(const nccl_transport&) = delete;
  /// Aborts the communicator if it has not left; does not wait for other ranks.
  ~nccl_transport() = default;

  [[nodiscard]] Side& side() noexcept { return channel_.side(); }
  [[nodiscard]] rank_id rank() const noexcept { return channel_.side().rank(); }
  [[nodiscard]] rank_count world() const noexcept { return channel_.side().world(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return channel_.side().after(ns); }
  /// Returns the stream of its messages: work that the stream is given before a call is done before it.
  [[nodiscard]] cudaStream_t stream() const noexcept { return marker_.stream(); }
  [[nodiscard]] const nccl_stats& stats() const noexcept { return stats_; }
  /// Whether there is a communicator of this epoch that calls can use.
  [[nodiscard]] bool is_ready() const noexcept {
    return comm_.is_there() && !comm_.is_stopped() && !channel_.side().is_revoked();
  }

  /// Makes NCCL's communicator of the side channel's members: all of them call it, except those that were
  /// members before and call `admit`. @pre the side channel has joined
  result<void> join(deadline by) { return epochs_.join(by); }
  /// As in the side channel.
  result<comm::agreed> agree(std::uint64_t bits, deadline by) { return channel_.agree(bits, by); }
  /// Begins the next epoch of both channels, without the failed members. All members that got `outcome` must
  /// call it. If it fails, the epoch of the side channel has begun nevertheless: `revoke`, `agree` and
  /// `shrink` again.
  result<void> shrink(const comm::agreed& outcome, deadline by) { return epochs_.shrink(outcome, by); }
  /// Begins the next epoch of both, without the failed members and with the joining ones, which call `join`.
  result<void> admit(const comm::agreed& outcome, deadline by) { return epochs_.admit(outcome, by); }
  /// Ends NCCL's communicator in order, when all ranks are done. Fails when another rank does not leave by
  /// the deadline; the communicator is then aborted.
  result<void> leave(deadline by) { return epochs_.leave(by); }

  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by);
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by);
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by);
  void revoke() noexcept { channel_.side().revoke(); }

  /// NCCL's own collectives; all ranks call the same one with the same sizes. `errc::size_mismatch`, before
  /// anything is sent, for sizes that do not match, or are not a whole number of elements. NCCL determines
  /// the order of a sum. `from` may be `into`; for the scatter and gather, the smaller one may be the rank's
  /// own block of the larger.
  result<void> all_reduce(std::span<const std::byte> from, std::span<std::byte> into, ncclDataType_t type,
                          ncclRedOp_t op, deadline by);
  /// `from` has a block of `into`'s size for each rank.
  result<void> reduce_scatter(std::span<const std::byte> from, std::span<std::byte> into, ncclDataType_t type,
                              ncclRedOp_t op, deadline by);
  /// `into` gets a block of `from`'s size from each rank.
  result<void> all_gather(std::span<const std::byte> from, std::span<std::byte> into, deadline by);
  result<void> broadcast(std::span<std::byte> bytes, rank_id root, deadline by);

  /// Registers memory with NCCL as a window, which collectives on it then use: all ranks call it, in the same
  /// order, with the same number of bytes. A window ends with the epoch's communicator: register it again
  /// after `shrink`, `admit` and a `join`. NCCL can register `nccl_memory`.
  ///
  /// @return whether NCCL made a window. If the devices cannot reach each other, newer versions make none,
  ///   and 2.28 makes one for this rank alone: collectives work as without a window.
  ///   `errc::overlapping_ranges` for bytes of another window, which NCCL would not detect;
  ///   `errc::bad_granularity` for an address that is not a multiple of 4 KiB; `errc::size_mismatch` for no
  ///   bytes; otherwise as a collective.
  result<bool> register_window(std::span<std::byte> memory, deadline by,
                               nccl_window how = nccl_window::symmetric)
    requires(Api::has_windows);
  /// Ends the window of this rank that begins where `memory` does: call it before the memory is released, and
  /// while no transfer uses it. No effect if there is no such window. `errc::epoch_revoked` once the epoch
  /// has ended: keep the memory until the window ends with the communicator, in the next epoch or by `leave`.
  result<void> deregister_window(std::span<const std::byte> memory)
    requires(Api::has_windows);
  [[nodiscard]] std::size_t windows() const noexcept { return comm_.windows().size(); }

 private:
  [[nodiscard]] static Api checked(Api api, const char* name);
  [[nodiscard]] static std::uint64_t size_of(ncclDataType_t type) noexcept;
  [[nodiscard]] failure trouble(const char* call, ncclResult_t status) const noexcept {
    return report_.trouble(call, api_.text(status), static_cast<int>(status));
  }
  [[nodiscard]] failure trouble(const char* call, cudaError_t status) const noexcept {
    return report_.trouble(call, api_.text(status), static_cast<int>(status));
  }

  [[nodiscard]] result<void> may_talk(rank_id with) const noexcept;
  [[nodiscard]] ncclResult_t put_send(std::span<const std::byte> bytes, rank_id to);
  [[nodiscard]] ncclResult_t put_recv(std::span<std::byte> bytes, rank_id from);
  template <class Enqueue>
  [[nodiscard]] result<void> call(const char* name, std::optional<rank_id> with, std::uint64_t bytes,
                                  deadline by, Enqueue enqueue);
  template <class Enqueue>
  [[nodiscard]] result<void> enqueue_and_wait(const char* name, std::optional<rank_id> with,
                                              std::uint64_t bytes, deadline by, Enqueue enqueue);

  nccl_options options_;
  Api api_;
  nccl_stats stats_{};
  detail::nccl_report report_;
  detail::side_channel<Side> channel_;
  detail::stream_marker<Api> marker_;
  detail::nccl_communicator<Api> comm_;
  detail::nccl_epochs<Side, Api> epochs_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/nccl_transport_body.hpp>
