/// @file
/// `mirrored_coordinator`: commits checkpoints to a local folder, and copies them to a durable one in the
/// background.
#pragma once

#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/copy.hpp>
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/folder.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/names.hpp>
#include <llmmem/checkpoint/retention.hpp>
#include <llmmem/checkpoint/search.hpp>
#include <llmmem/checkpoint/storage.hpp>
#include <llmmem/config.hpp>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// What happens to an unfinished copy when the coordinator is destroyed.
enum class mirror_end : std::uint8_t {
  finish,  ///< the destructor waits for the copy, at most `finish_within_ns`
  stop,    ///< the copy is abandoned; the next run copies what the durable folder lacks
};

/// The options of the copies.
struct mirror_options {
  std::uint64_t buffer_bytes = std::uint64_t{8} << 20;  ///< the memory that copies take
  std::uint32_t attempts = 3;                           ///< per copy; fewer if a newer one waits
  std::uint64_t retry_after_ns = 1'000'000'000;         ///< between two attempts
  mirror_end at_end = mirror_end::finish;
  std::uint64_t finish_within_ns = std::uint64_t{600'000'000'000};
};

/// The counters of a mirror, for this process.
struct mirror_stats {
  std::uint64_t copied = 0;        ///< checkpoints that were copied
  std::uint64_t skipped = 0;       ///< copies that never began because a newer one came first
  std::uint64_t failed = 0;        ///< attempts that failed
  std::uint64_t bytes = 0;         ///< bytes of the copied checkpoints
  std::uint64_t copy_ns = 0;       ///< time of their copies, from the first byte to the commit
  std::uint64_t behind = 0;        ///< local commits since the newest copy
  checkpoint_id last_committed{};  ///< the newest in the local folder; generation 0: none
  checkpoint_id last_copied{};     ///< the newest in the durable folder; generation 0: none
  copy_progress copying{};         ///< of the copy in progress; `id.generation` 0: none
  std::string last_error{};  ///< reason of the last failed attempt, or of the last problem during tidying

  /// Returns bytes per second.
  [[nodiscard]] double bandwidth() const noexcept {
    return copy_ns == 0 ? 0 : static_cast<double>(bytes) * 1e9 / static_cast<double>(copy_ns);
  }
};

/// Ignores every event.
struct no_mirror_observer {
  void copied(const checkpoint_id& /*id*/) const noexcept {}
  void failed(const checkpoint_id& /*id*/, const std::string& /*why*/) const noexcept {}
};

namespace detail {

/// Returns the folder to which a coordinator commits. @pre the coordinator is rank 0's.
template <class Coordinator>
[[nodiscard]] checkpoint_folder_base& folder_of(Coordinator& coordinator) {
  if constexpr (requires { coordinator.folder(); }) {
    return coordinator.folder();
  } else {
    return *coordinator.session().folder();
  }
}

/// The type-erased parts of a `mirrored_coordinator`.
struct mirror_parts {
  coordinator_ref local;
  void* coordinator;  // the same coordinator, for `local_folder`
  checkpoint_folder_base& (*local_folder)(void* coordinator);
  storage_ref durable;
  retention_ref retention;  // of the durable folder
  void* observer;
  void (*copied)(void* observer, const checkpoint_id& id);
  void (*failed)(void* observer, const checkpoint_id& id, const std::string& why);
};

/// The type-independent part of a `mirrored_coordinator`: implements its functions of the same names.
class mirror_core {
 public:
  mirror_core(const mirror_parts& parts, const mirror_options& options);
  mirror_core(const mirror_core&) = delete;
  mirror_core& operator=(const mirror_core&) = delete;
  ~mirror_core();

  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part);
  [[nodiscard]] std::string tidy();
  void give_up(const checkpoint_id& id) noexcept;
  [[nodiscard]] bool wait_copied(std::uint64_t generation, std::uint64_t limit_ns);
  [[nodiscard]] mirror_stats stats() const {
    const std::scoped_lock lock(mutex_);
    mirror_stats now = stats_;
    now.behind = folder_ ? commits_ - copied_commit_ : 0;
    return now;
  }

 private:
  struct copy_job {
    found_checkpoint what{};
    std::uint64_t number = 0;  // number of its commit
  };
  enum class copy_end : std::uint8_t { copied, failed, failed_for_good };

  void find_what_lacks();
  void check_that_one_run(const found_checkpoint& here);
  void hold_local();
  void hand_over();
  void enqueue(found_checkpoint what, std::uint64_t number);
  void run();
  void copy(const copy_job& job) noexcept;
  [[nodiscard]] copy_end try_copy(const copy_job& job) noexcept;
  [[nodiscard]] copy_verdict watch(const copy_progress& progress);
  [[nodiscard]] bool waits_for_retry();
  void note_copied(const copy_job& job, const copy_report& report, std::uint64_t ns);
  void note_failed(const checkpoint_id& id, const std::string& why) noexcept;
  void note_trouble(std::string what) noexcept;
  template <class Tell>
  void tell(Tell tell_it) noexcept;
  void tidy_durable() noexcept;
  /// @return whether time is left.
  bool wait_until(std::unique_lock<std::mutex>& lock, std::uint64_t began, std::uint64_t limit_ns);
  [[nodiscard]] bool is_idle() const noexcept { return !pending_ && copying_ == 0; }

  mirror_parts parts_;
  mirror_options options_;
  std::optional<checkpoint_folder_base> folder_;  // rank 0's; used by the copying thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<checkpoint_id> committed_;  // committed, and not yet handed to the copying thread
  std::optional<copy_job> pending_;
  std::uint64_t copying_ = 0;  // generation being read; 0: none
  std::uint64_t commits_ = 0;
  std::uint64_t copied_commit_ = 0;  // number of the newest commit that was copied
  std::uint64_t given_up_ = 0;       // the highest generation given up
  std::string untold_;
  bool stops_ = false;
  mirror_stats stats_;
  std::thread copier_;
};

}  // namespace detail

/// A `checkpoint_coordinator` over two folders: it commits checkpoints to a fast, local one, and a background
/// thread copies them to one that outlasts the machine.
///
///     posix_storage local("/nvme/run-7"), durable("/shared/run-7");
///     solo_coordinator fast(local);
///     mirrored_coordinator coordinator(fast, durable, keep_last_and_every{.last = 5});
///     async_checkpointer<traits> saves(coordinator, tensors);
///
/// The `committed` of a ticket refers to the local folder; `wait_copied` and `stats()` report what has
/// reached the durable one. Both use the same names and one count of generations, so `recover` finds the
/// newest over both. The thread works as follows:
///
/// - It copies one checkpoint at a time, while the newest one waits. If copies are slower than saves, it
///   skips and counts the checkpoints between. It finishes a copy that has begun.
/// - It retries a failed copy and reports the failure by `stats()`, the observer, and the result of `tidy`,
///   which `async_checkpointer` records as `last_error`. It never ends or delays training.
/// - After a copy it tidies the durable folder by that folder's retention. The local folder removes no
///   checkpoint that is being copied or waits to be.
/// - A run continues after the durable folder's last generation, even if the local disk was lost. If a
///   process ended between a commit and its copy, the newest local checkpoint is newer than all durable ones,
///   and is copied first.
///
/// With several ranks (`file_coordinator`), rank 0 copies, from the folder that all share. Local disks of
/// several machines, each with the files of its own ranks, need a transport and are not supported.
///
/// @tparam Observer  the copying thread calls its `copied(id)` and `failed(id, why)`; an exception from them
///                   is recorded.
/// @par Complexity      `tidy` reads the manifest of the committed checkpoint; copying: `copy_checkpoint`.
/// @par Thread safety   as `checkpoint_coordinator`; `stats` and `wait_copied` by any thread.
/// @par Errors          the constructor throws `io_error` if the durable folder cannot be opened or read, or
///   belongs to another process, because the generations in use are then unknown; `argument_error` if the
///   newest local checkpoint and the durable one of its generation belong to different runs; and
///   `length_error` for `buffer_bytes` below 2. Later calls throw only the local coordinator's exceptions.
template <checkpoint_coordinator Coordinator, checkpoint_storage DurableStorage,
          retention_policy Retention = keep_last_and_every, class Observer = no_mirror_observer>
class mirrored_coordinator {
 public:
  using storage_type = typename Coordinator::storage_type;
  using durable_type = DurableStorage;

  /// @param local      a `solo_coordinator` or `file_coordinator`, with the local folder's retention.
  /// @param durable    used only by rank 0. It and `local` must outlive this.
  /// @param retention  of the durable folder.
  mirrored_coordinator(Coordinator& local, DurableStorage& durable, Retention retention = {},
                       const mirror_options& options = {}, Observer observer = {})
      : local_(&local),
        durable_(&durable),
        retention_(std::move(retention)),
        observer_(std::move(observer)),
        core_({.local = local,
               .coordinator = &local,
               .local_folder = [](void* of) -> checkpoint_folder_base& {
                 return detail::folder_of(*static_cast<Coordinator*>(of));
               },
               .durable = durable,
               .retention = retention_,
               .observer = &observer_,
               .copied = [](void* of, const checkpoint_id& id) { static_cast<Observer*>(of)->copied(id); },
               .failed = [](void* of, const checkpoint_id& id,
                            const std::string& why) { static_cast<Observer*>(of)->failed(id, why); }},
              options) {}
  mirrored_coordinator(const mirrored_coordinator&) = delete;
  mirrored_coordinator& operator=(const mirrored_coordinator&) = delete;
  /// Acts as `mirror_options::at_end` says: by default it waits up to 10 minutes for the copy in progress and
  /// the waiting one. It always waits for a hung call of the durable storage.
  ~mirrored_coordinator() = default;

  [[nodiscard]] std::uint32_t rank() const noexcept { return local_->rank(); }
  [[nodiscard]] std::uint32_t world() const noexcept { return local_->world(); }
  [[nodiscard]] storage_type& storage() noexcept { return local_->storage(); }
  [[nodiscard]] DurableStorage& durable() noexcept { return *durable_; }

  [[nodiscard]] checkpoint_draft begin(std::uint64_t step) { return local_->begin(step); }
  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part) { core_.commit(draft, part); }
  std::string abandon(const checkpoint_draft& draft, const std::string& why) noexcept {
    core_.give_up(draft.id);
    return local_->abandon(draft, why);
  }
  /// Hands the committed checkpoint to the copying thread, tidies the local folder, and returns the problems
  /// of both since the last call.
  [[nodiscard]] std::string tidy() { return core_.tidy(); }

  /// Waits until that generation, or a newer one, is in the durable folder, and returns true. Returns false
  /// after `limit_ns`; if the copy was abandoned or has failed permanently and no newer one waits; and at
  /// once on ranks other than 0, and for generation 0, which means that nothing was committed. For a
  /// generation that has never begun it waits for all of `limit_ns`. Any thread may call it.
  [[nodiscard]] bool wait_copied(std::uint64_t generation, std::uint64_t limit_ns = forever) {
    return core_.wait_copied(generation, limit_ns);
  }
  [[nodiscard]] mirror_stats stats() const { return core_.stats(); }

  static constexpr std::uint64_t forever = ~std::uint64_t{0};

 private:
  Coordinator* local_;
  DurableStorage* durable_;
  Retention retention_;
  Observer observer_;
  detail::mirror_core core_;
};

}  // namespace v0
}  // namespace llmmem

#if LLMMEM_CHECKPOINT_BODIES
#include <llmmem/checkpoint/detail/mirrored_coordinator_body.hpp>
#endif
