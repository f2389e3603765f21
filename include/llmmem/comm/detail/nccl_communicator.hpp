/// @file
/// An NCCL communicator from construction to its end. Private to comm/.
#pragma once

#include <llmmem/comm/detail/nccl_library.hpp>
#include <llmmem/comm/detail/stream_marker.hpp>
#include <llmmem/comm/detail/window_table.hpp>
#include <llmmem/comm/nccl_types.hpp>
#include <llmmem/config.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

[[nodiscard]] inline bool is_error(ncclResult_t status) noexcept {
  return status != ncclSuccess && status != ncclInProgress;
}

/// The communicator of the epoch, with its windows, and its *child*: the one being made for the next epoch.
/// NCCL makes it on its own threads; `look_at_child` returns the progress, and `adopt_child` replaces the
/// previous one by it.
///
/// `stop` ends NCCL's work, so that it no longer touches memory: it keeps a communicator that can be shrunk,
/// and aborts any other. A stopped communicator can only be shrunk or aborted. Windows end with their
/// communicator.
///
/// @par Complexity      as the calls of NCCL. `stop` waits for up to `nccl_options::stop_ns`, and `abort` for
///                      as long as NCCL takes; nothing else waits.
/// @par Thread safety   one thread at a time.
/// @par Errors          NCCL's status.
template <class Api>
class nccl_communicator {
 public:
  /// All arguments must outlive it.
  nccl_communicator(Api& api, stream_marker<Api>& marker, const nccl_options& options, nccl_stats& stats)
      : api_(api), marker_(marker), options_(options), stats_(stats) {}
  nccl_communicator(const nccl_communicator&) = delete;
  nccl_communicator& operator=(const nccl_communicator&) = delete;
  ~nccl_communicator() { abort(); }

  [[nodiscard]] bool is_there() const noexcept { return comm_ != nullptr; }
  [[nodiscard]] bool is_stopped() const noexcept { return is_stopped_; }
  [[nodiscard]] ncclComm_t handle() const noexcept { return comm_; }
  /// @pre `is_there()`.
  [[nodiscard]] ncclResult_t status() noexcept { return status_of(comm_); }

  [[nodiscard]] window_table& windows() noexcept { return windows_; }
  [[nodiscard]] const window_table& windows() const noexcept { return windows_; }

  /// @name Making   each begins to make a child, unless it returns an error
  /// @{
  /// By a unique id. The present communicator, of an epoch that all ranks have left, is aborted first.
  [[nodiscard]] ncclResult_t begin_fresh(int ranks, const ncclUniqueId& id, int self);
  /// From the present one, without the ranks `excluded`. @pre `is_there()`.
  [[nodiscard]] ncclResult_t begin_shrunk(std::vector<int>& excluded);
  /// From the present one or, for a joining rank, from that of the other ranks. Rank 0 and the joining ranks
  /// pass the id.
  [[nodiscard]] ncclResult_t begin_grown(int ranks, const ncclUniqueId& id, int self)
    requires(Api::has_grow);
  /// Returns `ncclInProgress` while the child is being made, `ncclSuccess` when it exists. Only once: the
  /// parent of a shrunk child is then aborted.
  [[nodiscard]] ncclResult_t look_at_child();
  /// Replaces the present communicator by the child. @pre `look_at_child()` was `ncclSuccess`.
  void adopt_child() noexcept;
  /// @}

  /// @name Ending
  /// @{
  /// Ends NCCL's work by `ncclCommRevoke` if possible; otherwise aborts. No effect if it is stopped.
  /// @param clock  returns the time: `after(ns).ns`.
  template <class Clock>
  void stop(const Clock& clock);
  /// Ends everything: the parent first, which releases the child being made from it.
  void abort() noexcept;
  /// Ends windows, and then the communicator in order: `ncclInProgress` while it waits for other ranks.
  /// @pre `is_there()`, and it is not stopped.
  [[nodiscard]] ncclResult_t begin_finalize();
  /// @pre finalizing has ended.
  void destroy() noexcept {
    is_stopped_ = true;
    static_cast<void>(api_.destroy(std::exchange(comm_, nullptr)));
  }
  /// @}

 private:
  enum class making : std::uint8_t { nothing, fresh, shrunk, grown };

  [[nodiscard]] static ncclConfig_t config() noexcept {
    ncclConfig_t made = NCCL_CONFIG_INITIALIZER;
    made.blocking = 0;
    return made;
  }
  [[nodiscard]] ncclResult_t status_of(ncclComm_t comm) noexcept {
    ncclResult_t status = ncclSuccess;
    const ncclResult_t asked = api_.async_error(comm, &status);
    return asked == ncclSuccess ? status : asked;
  }
  [[nodiscard]] ncclComm_t* child_place() {
    if (!child_) child_ = std::make_unique<ncclComm_t>(nullptr);
    return child_.get();
  }
  [[nodiscard]] ncclComm_t child() const noexcept {
    return child_ ? std::atomic_ref(*child_).load(std::memory_order_acquire) : nullptr;
  }
  [[nodiscard]] ncclComm_t take_child() noexcept { return std::exchange(*child_, nullptr); }
  [[nodiscard]] ncclResult_t began(making what, ncclResult_t status) noexcept {
    making_ = is_error(status) ? making::nothing : what;
    return status;
  }
  void abort_communicator() noexcept;

  Api& api_;
  stream_marker<Api>& marker_;
  const nccl_options& options_;
  nccl_stats& stats_;
  ncclComm_t comm_ = nullptr;
  // NCCL's threads write it while it is being made, so its place may outlive this object.
  std::unique_ptr<ncclComm_t> child_ = std::make_unique<ncclComm_t>(nullptr);
  making making_ = making::nothing;  // how the child is made
  bool is_stopped_ = false;          // no more work may be put on it
  window_table windows_;             // the windows of `comm_`
};

template <class Api>
ncclResult_t nccl_communicator<Api>::begin_fresh(int ranks, const ncclUniqueId& id, int self) {
  abort();
  ncclConfig_t how = config();
  return began(making::fresh, api_.init(child_place(), ranks, id, self, &how));
}

template <class Api>
ncclResult_t nccl_communicator<Api>::begin_shrunk(std::vector<int>& excluded) {
  ncclConfig_t how = config();
  return began(making::shrunk, api_.shrink(comm_, excluded.data(), static_cast<int>(excluded.size()),
                                           child_place(), &how, NCCL_SHRINK_ABORT));
}

template <class Api>
ncclResult_t nccl_communicator<Api>::begin_grown(int ranks, const ncclUniqueId& id, int self)
  requires(Api::has_grow)
{
  ncclConfig_t how = config();
  const bool is_member = comm_ != nullptr;
  const ncclUniqueId* const its = is_member && self != 0 ? nullptr : &id;
  return began(making::grown, api_.grow(comm_, ranks, its, is_member ? -1 : self, child_place(), &how));
}

/// The parent reports the progress; NCCL exposes the child early, or only when it is made.
template <class Api>
ncclResult_t nccl_communicator<Api>::look_at_child() {
  bool is_made = true;
  for (const ncclComm_t each : {comm_, child()}) {
    if (each == nullptr) continue;
    const ncclResult_t status = status_of(each);
    if (is_error(status)) return status;
    is_made = is_made && status == ncclSuccess;
  }
  if (!is_made || child() == nullptr) return ncclInProgress;
  if (making_ == making::shrunk) abort_communicator();  // destroying it would wait for the excluded ranks
  stats_.fresh += making_ == making::fresh ? 1U : 0U;
  stats_.shrunk += making_ == making::shrunk ? 1U : 0U;
  stats_.grown += making_ == making::grown ? 1U : 0U;
  return ncclSuccess;
}

template <class Api>
void nccl_communicator<Api>::adopt_child() noexcept {
  if (comm_ != nullptr) abort_communicator();  // it has grown: all ranks have left the previous one
  comm_ = take_child();
  making_ = making::nothing;
  is_stopped_ = false;
}

template <class Api>
template <class Clock>
void nccl_communicator<Api>::stop(const Clock& clock) {
  if (comm_ == nullptr || std::exchange(is_stopped_, true)) return;
  if constexpr (Api::has_revoke) {
    const std::uint64_t latest = clock.after(options_.stop_ns).ns;
    // While a group is being launched, NCCL 2.28.9 would free its job and continue to use it; and a failed
    // communicator cannot be shrunk. Work that has reached the stream since the last check has no event
    // after it.
    const bool may_revoke = status_of(comm_) == ncclSuccess && marker_.mark_the_rest();
    ncclResult_t status = may_revoke ? api_.revoke(comm_) : ncclInvalidUsage;
    while (!is_error(status)) {
      if (marker_.is_idle() && status == ncclSuccess) {
        marker_.forget();
        ++stats_.revoked;
        return;
      }
      if (clock.after(0).ns >= latest) break;
      api_.pause(options_.poll_ns);
      status = status_of(comm_);
    }
  }
  abort();
}

template <class Api>
void nccl_communicator<Api>::abort() noexcept {
  is_stopped_ = true;
  marker_.forget();
  if (comm_ != nullptr) abort_communicator();
  if (child() != nullptr) {
    static_cast<void>(api_.abort(take_child()));
    ++stats_.aborted;
  } else if (making_ == making::grown) {
    // No call stops the making of a child: NCCL writes there when it succeeds or fails.
    static_cast<void>(child_.release());
  }
  making_ = making::nothing;
}

template <class Api>
void nccl_communicator<Api>::abort_communicator() noexcept {
  static_cast<void>(api_.abort(std::exchange(comm_, nullptr)));
  windows_.clear();
  ++stats_.aborted;
}

template <class Api>
ncclResult_t nccl_communicator<Api>::begin_finalize() {
  if constexpr (Api::has_windows) {
    windows_.for_each([&](ncclWindow_t each) { static_cast<void>(api_.deregister_window(comm_, each)); });
    windows_.clear();
  }
  return api_.finalize(comm_);
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
