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
#include <llmmem/comm/detail/nccl_library.hpp>
#include <llmmem/comm/endpoint.hpp>
#include <llmmem/comm/id_set.hpp>
#include <llmmem/comm/ranks.hpp>
#include <llmmem/comm/transport.hpp>
#include <llmmem/error.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The channel beside NCCL's, over the host: a `communicator` of any endpoint, or what does as it does. It
/// knows who lives, passes on that an epoch is over, and carries NCCL's unique ids.
template <class S>
concept nccl_side = transport<S> && requires(S& side, const S& seen, rank_id rank, seat_id seat,
                                             const agreed& outcome, std::uint64_t bits, deadline by) {
  { seen.epoch() } noexcept -> std::same_as<std::uint64_t>;
  { seen.seats() } noexcept -> std::same_as<std::span<const seat_id>>;
  { seen.rank_of(seat) } noexcept -> std::same_as<std::optional<rank_id>>;
  { seen.failed() } noexcept -> std::same_as<seat_set>;
  { seen.has_failed(rank) } noexcept -> std::same_as<bool>;
  { seen.is_revoked() } noexcept -> std::same_as<bool>;
  side.poll();
  { side.agree(bits, by) } -> std::same_as<result<agreed>>;
  side.shrink(outcome);
  side.admit(outcome);
};

/// How a transport over NCCL is set up.
struct nccl_options {
  const char* name = "nccl_transport";    ///< for error texts; outlives it
  std::uint64_t look_ns = 20'000;         ///< between two looks at NCCL and at the side channel
  std::uint64_t stop_ns = 2'000'000'000;  ///< for NCCL to stop what it does, before it is aborted
  std::uint32_t side_tag = 0xFFFF'FF00;   ///< of what is sent over the side channel
};

/// How NCCL may use a window.
enum class nccl_window : std::uint8_t {
  any_offset,  ///< ranks may name other offsets of theirs in one call
  symmetric,   ///< all ranks name the same offset in a call, which NCCL can be quickest with
};

/// What a transport over NCCL has counted.
struct nccl_stats {
  std::uint64_t fresh = 0;    ///< NCCL communicators made by a unique id
  std::uint64_t shrunk = 0;   ///< made of the one before, without who has failed
  std::uint64_t grown = 0;    ///< made of the one before, with who has joined
  std::uint64_t revoked = 0;  ///< stopped, and fit to be shrunk
  std::uint64_t aborted = 0;
  std::uint64_t failed_calls = 0;
};

/// Ranks whose data go by NCCL between device memory, on one stream, while the side channel notices who has
/// died, agrees on it, and ends what waits for them. A `transport`: `broadcast`, `all_gather` and `barrier`
/// of collectives.hpp run over it with device pointers. The others copy or add up on the host: take the
/// members below in their place, which NCCL does natively.
///
///     communicator side(endpoint);                                     // over the host
///     side.join(side.after(10'000'000'000)).value();
///     nccl_transport ranks(side, stream);                              // the current device is the stream's
///     ranks.join(ranks.after(60'000'000'000)).value();
///     for (...) {
///       if (ranks.all_reduce(out, into, ncclFloat, ncclSum, ranks.after(...))) continue;
///       ranks.revoke();
///       const agreed outcome = ranks.agree(my_bits, ranks.after(1'000'000'000)).value();
///       ranks.shrink(outcome, ranks.after(60'000'000'000)).value();    // both channels, without the dead
///     }
///     ranks.leave(ranks.after(1'000'000'000)).value();
///
/// - **Calls** wait until the stream has done what they put on it, or their deadline, or the epoch's end:
///   every `look_ns` they ask NCCL for errors and the side channel for news. What stood on the stream before
///   counts. It must not be captured into a graph.
/// - **A call that fails ends the epoch**, on all ranks, by `revoke`: NCCL cannot take one message back. It
///   returns once NCCL no longer touches memory: its operations are revoked, or the communicator is aborted
///   where NCCL has no `ncclCommRevoke` (before 2.28.7), while it is still launching them or has failed, or
///   when that takes longer than `stop_ns`.
/// - **Tags**: NCCL has none. Messages between two ranks are received in the order in which they were sent,
///   with the sizes that they were sent with; a tag is not checked. Otherwise both wait, or NCCL fails. A
///   rank sends to itself by `exchange` alone. A message without bytes is one byte of NCCL's.
/// - **Agreement**: `agree` of this, not of the side channel, so that a `join` or `shrink` that was cut short
///   ends first. The side channel is not used otherwise while it has a transport over it, but for messages.
/// - **Epochs**: `shrink` lets NCCL shrink its communicator (NCCL_SHRINK_ABORT), and aborts the one before:
///   it is never destroyed. It makes a fresh one instead when any rank had to abort its own, or when nobody
///   is excluded, which NCCL does not take. `admit` grows it where NCCL can (2.29), nobody has failed, and
///   all who join have higher seats: NCCL numbers them last; else it makes a fresh one.
/// - **One communicator a device**: NCCL allows it. It must not be used by another thread meanwhile.
///
/// @par Complexity      a call some microseconds above NCCL's, and up to `look_ns` late. A new epoch two
///      agreements, and NCCL's set-up: seconds for many ranks.
/// @par Thread safety   one thread at a time, which also is the side channel's.
/// @par Errors          the constructor throws `system_error` without a device; calls return the failures of
///      the side channel, and `errc::library_failed` with the text of NCCL or CUDA, kept until the next one.
///      `std::bad_alloc` of the side channel goes on out of calls, when the operation has stopped.
/// @par Source          rules of use: NCCL's user guide, "Fault tolerance" and "Creating a communicator".
template <nccl_side Side, class Api = nccl_library>
class nccl_transport {
 public:
  /// Both outlive it. Reaches nobody yet: `join` does.
  /// @throws system_error  no device, an NCCL that is too old, or what CUDA refused.
  nccl_transport(Side& side, cudaStream_t stream, const nccl_options& options = {}, Api api = {});
  nccl_transport(const nccl_transport&) = delete;
  nccl_transport& operator=(const nccl_transport&) = delete;
  /// Aborts what is left: waits for no other rank. After `leave` there is nothing.
  ~nccl_transport();

  [[nodiscard]] Side& side() noexcept { return *side_; }
  [[nodiscard]] rank_id rank() const noexcept { return side_->rank(); }
  [[nodiscard]] rank_count world() const noexcept { return side_->world(); }
  [[nodiscard]] deadline after(std::uint64_t ns) const noexcept { return side_->after(ns); }
  [[nodiscard]] const nccl_stats& stats() const noexcept { return stats_; }
  /// Whether calls have a communicator of this epoch to go by.
  [[nodiscard]] bool is_ready() const noexcept {
    return comm_ != nullptr && !is_stopped_ && !side_->is_revoked();
  }

  /// Makes NCCL's communicator of the side channel's members, who all call it, or who were there before
  /// `admit`. @pre the side channel has joined
  result<void> join(deadline by);
  /// As the side channel's.
  result<agreed> agree(std::uint64_t bits, deadline by);
  /// The next epoch of both channels, without who has failed. All that got `outcome` must call it. Refused,
  /// it has begun the epoch on the side channel all the same: `revoke`, `agree` and `shrink` again.
  result<void> shrink(const agreed& outcome, deadline by);
  /// The next epoch of both, without who has failed and with who waited; these call `join`.
  result<void> admit(const agreed& outcome, deadline by);
  /// All are done: ends NCCL's communicator in good order. A rank that does not come leaves it aborted, and a
  /// failure.
  result<void> leave(deadline by);

  result<void> send(std::span<const std::byte> bytes, rank_id to, std::uint32_t tag, deadline by);
  result<void> recv(std::span<std::byte> bytes, rank_id from, std::uint32_t tag, deadline by);
  result<void> exchange(std::span<const std::byte> out, rank_id to, std::span<std::byte> into, rank_id from,
                        std::uint32_t tag, deadline by);
  void revoke() noexcept { side_->revoke(); }

  /// NCCL's own collectives; all ranks call the same with the same sizes. `errc::size_mismatch`, before
  /// anything was sent, for sizes that do not fit each other, or elements cut in two. The order of a sum is
  /// NCCL's. `from` may be `into`, and for the scatter and gather the rank's own block of the other.
  result<void> all_reduce(std::span<const std::byte> from, std::span<std::byte> into, ncclDataType_t type,
                          ncclRedOp_t op, deadline by);
  /// `from` has a block as large as `into` for each rank.
  result<void> reduce_scatter(std::span<const std::byte> from, std::span<std::byte> into, ncclDataType_t type,
                              ncclRedOp_t op, deadline by);
  /// `into` gets a block as large as `from` of each rank.
  result<void> all_gather(std::span<const std::byte> from, std::span<std::byte> into, deadline by);
  result<void> broadcast(std::span<std::byte> bytes, rank_id root, deadline by);

  /// Registers memory with NCCL as a window, which collectives on it then use: all ranks call it, in the same
  /// order, with as many bytes. A window is of the epoch's communicator, and gone with it: register anew
  /// after `shrink`, `admit` and a `join`. `nccl_memory` is what NCCL can register.
  ///
  /// @return whether NCCL made one; where the devices cannot reach each other newer versions make none, and
  ///      2.28 one for this rank alone: both go on as without. `errc::overlapping_ranges` for bytes that a
  ///      window has already, which NCCL would not notice; `errc::bad_granularity` for an address that is no
  ///      multiple of 4 KiB; `errc::size_mismatch` for no bytes at all; else as a collective.
  result<bool> register_window(std::span<std::byte> memory, deadline by,
                               nccl_window how = nccl_window::symmetric)
    requires(Api::has_windows);
  /// Ends the window that begins where `memory` does, of this rank alone: before it is given back. Nothing
  /// may be on its way there. Nothing happens where there is none. `errc::epoch_revoked` once the epoch has
  /// ended: then it goes with the communicator, in the next epoch or by `leave`; keep the memory until then.
  result<void> deregister_window(std::span<const std::byte> memory)
    requires(Api::has_windows);
  [[nodiscard]] std::size_t windows() const noexcept { return windows_.size(); }

 private:
  struct window {
    std::span<std::byte> memory{};
    // Written by NCCL while it is being made.
    std::unique_ptr<ncclWindow_t> handle{};
  };
  // Votes of forming a communicator that this rank still owes the others.
  enum class owes : std::uint8_t { nothing, both, second };
  enum class way : std::uint8_t { fresh = 1, grow };
  // Which way, and NCCL's id.
  using plan = std::array<std::byte, 1 + sizeof(ncclUniqueId)>;
  struct standing {
    std::vector<int> excluded{};  // ranks of the communicator that is there
    bool is_new = false;
    bool may_keep = false;  // what it has can become the next
  };

  [[nodiscard]] static bool is_error(ncclResult_t status) noexcept {
    return status != ncclSuccess && status != ncclInProgress;
  }
  [[nodiscard]] static std::uint64_t size_of(ncclDataType_t type) noexcept;
  [[nodiscard]] std::uint64_t now() const noexcept { return side_->after(0).ns; }
  [[nodiscard]] std::byte* mark(std::size_t at) const noexcept {
    return static_cast<std::byte*>(marks_) + at;
  }
  [[nodiscard]] failure refuse(error_code code, rank_id rank, std::uint64_t wanted,
                               std::uint64_t found) const noexcept;
  [[nodiscard]] failure misfit(std::uint64_t wanted, std::uint64_t found) const noexcept;
  [[nodiscard]] failure trouble(const char* call, const char* text, int status) noexcept;
  [[nodiscard]] failure trouble(const char* call, ncclResult_t status) noexcept;
  [[nodiscard]] ncclResult_t status_of(ncclComm_t comm) noexcept;
  [[nodiscard]] ncclComm_t child() const noexcept;
  [[nodiscard]] ncclComm_t take_child() noexcept { return std::exchange(*child_, nullptr); }
  [[nodiscard]] ncclConfig_t config() const noexcept;

  [[nodiscard]] result<void> may_talk(rank_id with) const noexcept;
  [[nodiscard]] result<void> listen(std::optional<rank_id> with, std::uint64_t bytes, deadline by);
  template <class Enqueue>
  [[nodiscard]] result<void> call(const char* name, std::optional<rank_id> with, std::uint64_t bytes,
                                  deadline by, Enqueue enqueue);
  template <class Enqueue>
  [[nodiscard]] result<void> enqueue_and_wait(const char* name, std::optional<rank_id> with,
                                              std::uint64_t bytes, deadline by, Enqueue enqueue);
  void stop();
  void abort() noexcept;
  void abort_communicator() noexcept;

  [[nodiscard]] std::vector<int> ranks_of(const seat_set& seats) const;
  [[nodiscard]] result<std::uint64_t> vote(std::uint64_t bits, owes next, deadline by);
  [[nodiscard]] result<void> form(standing& how, deadline by);
  [[nodiscard]] result<void> make_by_votes(standing& how, deadline by);
  [[nodiscard]] result<void> make(standing& how, std::uint64_t said, deadline by);
  [[nodiscard]] result<void> exchange_plan(plan& what, deadline by);
  [[nodiscard]] result<void> make_planned(way first, deadline by);
  [[nodiscard]] result<void> make_shrunk(std::vector<int>& excluded, deadline by);
  [[nodiscard]] result<void> wait_for_child(const char* name, deadline by);

  Side* side_;
  cudaStream_t stream_;
  nccl_options options_;
  Api api_;
  cudaEvent_t event_ = nullptr;
  void* marks_ = nullptr;  // two bytes of the device, for messages without any

  ncclComm_t comm_ = nullptr;
  // Written by NCCL's threads while it is being made: at a place that may outlive this.
  std::unique_ptr<ncclComm_t> child_ = std::make_unique<ncclComm_t>(nullptr);
  std::vector<window> windows_{};  // of `comm_`
  bool is_growing_ = false;
  bool is_stopped_ = false;  // nothing may be put on it any more
  bool is_put_ = false;      // something may be on the stream, with no event behind it as yet
  bool is_event_out_ = false;
  owes owes_ = owes::nothing;
  std::array<char, 256> trouble_{};
  nccl_stats stats_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/comm/detail/nccl_transport_body.hpp>
