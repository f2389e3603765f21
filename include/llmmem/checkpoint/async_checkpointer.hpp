/// @file
/// `async_checkpointer`: saves a training run's state beside the training, and says what became of it.
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

/// What an `async_checkpointer` is made of: inherit and shadow.
struct checkpointer_traits {
  using storage_type = posix_storage<>;
  using coordinator_type = solo_coordinator<storage_type>;
  using view_type = host_state_view;
  using staging_space = host_space;     ///< must be accessible to the host
  using digest_type = no_chunk_digest;  ///< how incremental saves find out what changed, where no view tells
  /// `settled(ticket)` is called when a status is final, by the thread that made it so: the checkpointer's
  /// own, or, of one that never began, its caller's; never by two at once. It holds up the next checkpoint;
  /// what it throws is noted in `last_trouble`.
  using observer_type = no_checkpoint_observer;
};

/// Checkpoints of a state, written behind the training.
///
///     posix_storage storage("/checkpoints/run-7");
///     solo_coordinator coordinator(storage, keep_last_and_every{.last = 3, .every_steps = 1000});
///     async_checkpointer<> checkpointer(coordinator, tensors, {.ring_bytes = 256 << 20});
///
///     snapshot_guard guard = checkpointer.begin_snapshot(step, host_state_view(spans), extras);
///     const commit_ticket ticket = guard.ticket();
///     ...                                             // forward and backward pass: they only read
///     optimizer.step(std::move(guard).mutate());      // waits until all is copied
///     if (ticket.wait() == commit_status::committed)  // whenever one wants to know
///
/// `begin_snapshot` copies nothing but the extras. From then on bytes go through a ring of `ring_bytes`, the
/// only memory this takes: out of the state chunk by chunk, each with a CRC-32C, into safetensors files,
/// which are synced and committed (`checkpoint_folder`). A ring as large as the state holds a step up for no
/// longer than copying the state takes; with a smaller one for as long as it takes to write the rest. Whoever
/// changes the state takes a `mutation_permit`, from the guard or from `gate()`: without it his function does
/// not compile, and it is not given while a snapshot is being copied. A stable view (`cow_state_view`, say)
/// is read while the state changes: then the permit is given at once.
///
/// A checkpoint that fails, for whatever reason, ends no training and is never silent: its ticket, and
/// `stats().last_trouble`, say why. The next one begins anew.
///
/// *Incremental saves* (`whole_every`). What changed is told by the view (`change_tracking_view`: what did
/// not is not even copied), or found by a digest of each chunk (`digest_type`: copied and read, not written).
/// Each chunk is in one file, of this checkpoint or of an earlier one, which retention keeps as long as it is
/// needed: a restore reads each wanted byte once, from plain files. A checkpoint of which all chunks changed
/// is whole, as is the first of a process and the one after a failure. In others a file that is not whole is
/// there as `model.safetensors.changes`, so that no tool takes it for the model; `copy_checkpoint` folds
/// them. A snapshot is then copied once the one before it is over.
///
/// @par Complexity      `begin_snapshot` O(1) in the state; O(extras).
/// @par Thread safety   `begin_snapshot`, `gate` and guards by the thread that owns the state; the rest any.
///                      Two threads of its own (one where the view is not concurrent).
/// @par Errors          the constructor throws what `plan_files` does, `length_error` for a ring of less than
///                      two chunks, `argument_error` for incremental saves without a way to find out what
///                      changed, and `out_of_memory`.
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
      }, "Traits lacks a policy: inherit from llmmem::checkpointer_traits, and shadow those to change");
  using storage_type = typename Traits::storage_type;
  using coordinator_type = typename Traits::coordinator_type;
  using view_type = typename Traits::view_type;
  using observer_type = typename Traits::observer_type;
  using digest_type = typename Traits::digest_type;
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

  /// @param coordinator  outlives the checkpointer, which alone calls it.
  /// @param tensors      of every snapshot; the view numbers them in this order.
  async_checkpointer(coordinator_type& coordinator, std::vector<state_tensor> tensors,
                     checkpointer_options options = {}, observer_type observer = {})
      : observer_(std::move(observer)),
        core_(coordinator, tensors, std::move(options), policies()),
        space_({.budget = core_.options().ring_bytes, .name = core_.options().name + " ring"}),
        ring_(space_, core_.ring_bytes(), std::align_val_t{ring_alignment}) {
    std::memset(ring_.range().data, 0, ring_.range().bytes);  // now, not in the first snapshot
    core_.start(std::span<std::byte>(ring_.range().data, static_cast<std::size_t>(ring_.range().bytes)));
  }
  async_checkpointer(const async_checkpointer&) = delete;
  async_checkpointer& operator=(const async_checkpointer&) = delete;
  /// Waits for all that is pending.
  ~async_checkpointer() {
    core_.flush(commit_ticket::forever);
    core_.stop();
  }

  /// Begins a checkpoint of the state as it is now. @pre what `view` refers to stays as it is until the guard
  /// says that it is staged. Of a stable view the checkpoint is of the moment at which the view was taken.
  /// @throws argument_error  while a permit of the gate is alive (for stable views too: it would be of half a
  ///                         step), and for extras with bad names.
  snapshot_guard begin_snapshot(std::uint64_t step, view_type view,
                                std::vector<checkpoint_extra> extras = {}) {
    return core_.begin_snapshot(step, std::make_unique<held_state_view<view_type>>(std::move(view)),
                                std::move(extras));
  }

  /// Who changes the state asks here, whether or not a snapshot was begun.
  [[nodiscard]] snapshot_gate& gate() noexcept { return core_.gate(); }

  /// Returns once nothing is pending, or after `most_ns`: whether nothing is. For the end of a run, and for a
  /// process that was told to go. By the thread that owns the state, where the view is not concurrent.
  bool flush(std::uint64_t most_ns = commit_ticket::forever) { return core_.flush(most_ns); }

  /// Copies for about `most_ns`, without waiting for room; whether nothing is left to copy. Who changes the
  /// state under views that are stable, and not concurrent, waits for nothing, and copies nothing by that: he
  /// calls this now and then. Others need it not. By the thread that owns the state.
  bool stage_for(std::uint64_t most_ns) { return core_.stage_for(most_ns); }

  /// What the files will be, whatever the state.
  [[nodiscard]] const file_plan& plan() const noexcept { return core_.plan(); }
  [[nodiscard]] checkpointer_stats stats() const { return core_.stats(); }
  [[nodiscard]] checkpoint_progress progress() const { return core_.progress(); }

 private:
  static constexpr std::size_t ring_alignment = 4096;  // what is written goes past the page cache

  [[nodiscard]] detail::checkpointer_policies policies() noexcept {
    return {.is_concurrent = view_type::is_concurrent,
            .is_stable = is_stable_view<view_type>,
            .tracks_changes = change_tracking_view<view_type>,
            .has_digest = digest_type::tells,
            .digest = &digest_type::of,
            .observer = &observer_,
            .settled = [](void* observer, const commit_ticket& ticket) {
              static_cast<observer_type*>(observer)->settled(ticket);
            }};
  }

  observer_type observer_;
  detail::checkpointer_core core_;
  typename Traits::staging_space space_;
  space_buffer<typename Traits::staging_space> ring_;
};

#if !LLMMEM_CHECKPOINT_BODIES
extern template class async_checkpointer<checkpointer_traits>;
#endif

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/async_checkpointer_body.hpp>
#endif
