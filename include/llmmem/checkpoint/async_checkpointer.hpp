/// @file
/// `async_checkpointer`: saves a training run's state while training continues, and reports the outcome.
#pragma once

#include <llmmem/checkpoint/checkpointer_types.hpp>
#include <llmmem/checkpoint/chunk_digest.hpp>
#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/checkpointer_core.hpp>
#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/posix_storage.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/space/buffer.hpp>
#include <llmmem/space/host.hpp>
#include <llmmem/version/snapshot_gate.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Ignores every event.
struct no_checkpoint_observer {
  void settled(const commit_ticket& /*ticket*/) const noexcept {}
};

/// The policies of an `async_checkpointer`. Inherit from it and shadow the policies to change.
struct checkpointer_traits {
  using storage_type = posix_storage<>;
  using coordinator_type = solo_coordinator<storage_type>;
  using view_type = host_state_view;
  using staging_space = host_space;     ///< must be accessible to the host
  using digest_type = no_chunk_digest;  ///< how incremental saves detect changes that no view reports
  /// The thread that makes a status final calls `settled(ticket)`: the checkpointer's own, or the caller's
  /// for a checkpoint that never began; never two threads at once. The call delays the next checkpoint; its
  /// exception is recorded in `last_error`.
  using observer_type = no_checkpoint_observer;
};

/// Saves checkpoints of a state in the background of training.
///
///     posix_storage storage("/checkpoints/run-7");
///     solo_coordinator coordinator(storage, keep_last_and_every{.last = 3, .every_steps = 1000});
///     async_checkpointer<> checkpointer(coordinator, tensors, {.ring_bytes = 256 << 20});
///
///     snapshot_guard guard = checkpointer.begin_snapshot(step, host_state_view(spans), extras);
///     const commit_ticket ticket = guard.ticket();
///     ...                                             // forward and backward pass: they only read
///     optimizer.step(std::move(guard).mutate());      // waits until all is copied
///     if (ticket.wait() == commit_status::committed)  // whenever the result is needed
///
/// `begin_snapshot` copies only the extras. From then on, chunks of the state, each with a CRC-32C, go
/// through a ring of `ring_bytes`, the only memory that this takes. From the ring they go into safetensors
/// files, which are synced and committed (`checkpoint_folder`). With a ring as large as the state, a step
/// stalls while the state is copied; with a smaller ring, also while the rest is written. Code that modifies
/// the state takes a `mutation_permit`, from the guard or from `gate()`; the compiler rejects a function
/// without one, and no permit is given while a snapshot is being copied. A stable view (such as
/// `cow_state_view`) is read while the state changes, so the gate gives the permit at once.
///
/// A failed checkpoint never ends training and is never silent: its ticket, and `stats().last_error`, give
/// the reason. The next checkpoint starts from scratch.
///
/// *Incremental saves* (`full_every`). The view reports the changes (`change_tracking_view`: unchanged chunks
/// are not even copied), or a digest of each chunk detects them (`digest_type`: unchanged chunks are copied
/// and read, but not written). Each chunk is in one file, of this checkpoint or of an earlier one, which
/// retention keeps as long as it is needed. A restore therefore reads each wanted byte once, from plain
/// files. A checkpoint is full if all its chunks changed, if it is the first of a process, or if it follows a
/// failure. Otherwise a file that is not full is called `model.safetensors.changes`, so that no tool mistakes
/// it for the model; `copy_checkpoint` folds such files. A snapshot is then copied only after the previous
/// checkpoint is complete.
///
/// @par Complexity      `begin_snapshot` O(1) in the state; O(extras).
/// @par Thread safety   the thread that owns the state uses `begin_snapshot`, `gate` and guards; any thread
///   uses the rest. It runs two threads of its own (one if the view is not concurrent).
/// @par Errors          the constructor throws the errors of `plan_files`, `length_error` for a ring of less
///   than two chunks, `argument_error` for incremental saves without a way to detect changes, and
///   `out_of_memory`.
/// @par Source          two phases, snapshot and persist: Mohan et al., "CheckFreq", FAST 2021.
template <class Traits = checkpointer_traits>
class async_checkpointer {
 public:
  static_assert(
      requires {
        typename Traits::storage_type;
        typename Traits::coordinator_type;
        typename Traits::view_type;
        typename Traits::observer_type;
        typename Traits::digest_type;
        typename Traits::staging_space;
      },
      "Traits lacks a policy: inherit from llmmem::checkpointer_traits, and shadow the policies to change");
  using storage_type = typename Traits::storage_type;
  using coordinator_type = typename Traits::coordinator_type;
  using view_type = typename Traits::view_type;
  using observer_type = typename Traits::observer_type;
  using digest_type = typename Traits::digest_type;
  using staging_space = typename Traits::staging_space;
  static_assert(checkpoint_coordinator<coordinator_type>,
                "Traits::coordinator_type must be a checkpoint_coordinator: "
                "<llmmem/checkpoint/coordinator.hpp> lists its "
                "members");
  static_assert(state_view<view_type>,
                "Traits::view_type must be a state_view: it is copied, has copy_out(tensor, offset, into), "
                "and a static "
                "constexpr bool is_concurrent");
  static_assert(
      chunk_digest<digest_type>,
      "Traits::digest_type must be a chunk_digest: <llmmem/checkpoint/chunk_digest.hpp> lists its members");

  /// @param coordinator  outlives the checkpointer; only the checkpointer calls it.
  /// @param tensors      the tensors of every snapshot; the view numbers them in this order.
  async_checkpointer(coordinator_type& coordinator, std::vector<state_tensor> tensors,
                     checkpointer_options options = {}, observer_type observer = {})
      : observer_(std::move(observer)),
        core_(coordinator, tensors, std::move(options), policies()),
        own_(std::in_place,
             host_options{.budget = core_.options().ring_bytes, .name = core_.options().name + " ring"}),
        ring_(*own_, core_.ring_bytes(), std::align_val_t{ring_alignment}) {
    start();
  }
  /// The same with the ring in a space of the caller's: under a budget that other parts share, or in memory
  /// that an engine's resource gives (`cccl_host_source`).
  /// @param staging  outlives the checkpointer
  /// @throws out_of_memory  also if the space refuses the ring; the text has the space's name
  async_checkpointer(coordinator_type& coordinator, std::vector<state_tensor> tensors, staging_space& staging,
                     checkpointer_options options = {}, observer_type observer = {})
      : observer_(std::move(observer)),
        core_(coordinator, tensors, std::move(options), policies()),
        ring_(staging, core_.ring_bytes(), std::align_val_t{ring_alignment}) {
    start();
  }
  async_checkpointer(const async_checkpointer&) = delete;
  async_checkpointer& operator=(const async_checkpointer&) = delete;
  /// Waits for all pending checkpoints.
  ~async_checkpointer() {
    core_.flush(commit_ticket::forever);
    core_.stop();
  }

  /// Begins a checkpoint of the present state. @pre the memory that `view` refers to stays unchanged until
  /// the guard reports it staged. With a stable view, the checkpoint has the state of the moment at which the
  /// view was taken.
  /// @throws argument_error  while a permit of the gate is alive, even for stable views, because the
  ///                         checkpoint would have half a step; and for extras with bad names.
  snapshot_guard begin_snapshot(std::uint64_t step, view_type view,
                                std::vector<checkpoint_extra> extras = {}) {
    return core_.begin_snapshot(step, std::make_unique<held_state_view<view_type>>(std::move(view)),
                                std::move(extras));
  }

  /// The gate that code must pass before it modifies the state, with or without a snapshot.
  [[nodiscard]] snapshot_gate& gate() noexcept { return core_.gate(); }

  /// Waits at most `limit_ns` until nothing is pending, and returns whether that is so. For the end of a run,
  /// and for a process that was asked to terminate. Called by the thread that owns the state, if the view is
  /// not concurrent.
  bool flush(std::uint64_t limit_ns = commit_ticket::forever) { return core_.flush(limit_ns); }

  /// Copies for about `limit_ns`, without waiting for space; returns whether nothing is left to copy. Needed
  /// only with views that are stable and not concurrent: their owner never waits before it changes the state,
  /// so it must call this now and then, or nothing would be copied. Called by the thread that owns the state.
  bool stage_for(std::uint64_t limit_ns) { return core_.stage_for(limit_ns); }

  /// The plan of the files, independent of the state's values.
  [[nodiscard]] const file_plan& plan() const noexcept { return core_.plan(); }
  [[nodiscard]] checkpointer_stats stats() const { return core_.stats(); }
  [[nodiscard]] checkpoint_progress progress() const { return core_.progress(); }

 private:
  static constexpr std::size_t ring_alignment = 4096;  // writes bypass the page cache

  [[nodiscard]] detail::checkpointer_policies policies() noexcept {
    return {.is_concurrent = view_type::is_concurrent,
            .is_stable = is_stable_view<view_type>,
            .tracks_changes = change_tracking_view<view_type>,
            .has_digest = digest_type::detects_changes,
            .digest = &digest_type::of,
            .observer = &observer_,
            .settled = [](void* observer, const commit_ticket& ticket) {
              static_cast<observer_type*>(observer)->settled(ticket);
            }};
  }

  void start() {
    // Touches its pages now, not in the first snapshot.
    std::memset(ring_.range().data, 0, ring_.range().bytes);
    core_.start(std::span<std::byte>(ring_.range().data, static_cast<std::size_t>(ring_.range().bytes)));
  }

  observer_type observer_;
  detail::checkpointer_core core_;
  std::optional<staging_space> own_{};  // without a space of the caller's
  space_buffer<staging_space> ring_;
};

#if !LLMMEM_CHECKPOINT_BODIES
extern template class async_checkpointer<checkpointer_traits>;
#endif

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/async_checkpointer_body.hpp>
#endif
