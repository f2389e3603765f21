/// @file
/// `mirrored_coordinator`: checkpoints are committed to a local folder, and copied to a durable one behind
/// it.
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

/// What becomes of a copy that is not done when the coordinator goes.
enum class mirror_end : std::uint8_t {
  finish,  ///< it is waited for, `finish_within_ns` at most
  stop,    ///< it is given up; the next run copies what the durable folder lacks
};

/// How copies are made.
struct mirror_options {
  std::uint64_t buffer_bytes = std::uint64_t{8} << 20;  ///< all the memory that copying takes
  std::uint32_t attempts = 3;                           ///< of a copy; fewer when a newer one waits
  std::uint64_t retry_after_ns = 1'000'000'000;         ///< between two
  mirror_end at_end = mirror_end::finish;
  std::uint64_t finish_within_ns = std::uint64_t{600'000'000'000};
};

/// Counters of a mirror, of this process.
struct mirror_stats {
  std::uint64_t copied = 0;        ///< checkpoints
  std::uint64_t skipped = 0;       ///< never begun: a newer one came first
  std::uint64_t failed = 0;        ///< attempts
  std::uint64_t bytes = 0;         ///< of those copied
  std::uint64_t copy_ns = 0;       ///< of those copied, from the first byte to the commit
  std::uint64_t behind = 0;        ///< local commits since the one that is the newest copy
  checkpoint_id last_committed{};  ///< locally; generation 0: none
  checkpoint_id last_copied{};     ///< the newest in the durable folder; generation 0: none
  copy_progress copying{};         ///< of the copy under way; `id.generation` 0: none is
  std::string last_trouble{};      ///< why the last attempt that failed did, or what tidying met

  /// Bytes a second.
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

/// The folder that a coordinator commits to. @pre it is rank 0's.
template <class Coordinator>
[[nodiscard]] checkpoint_folder_base& folder_of(Coordinator& coordinator) {
  if constexpr (requires { coordinator.folder(); }) {
    return coordinator.folder();
  } else {
    return *coordinator.session().folder();
  }
}

/// What the types of a `mirrored_coordinator` come to.
struct mirror_parts {
  coordinator_ref local;
  void* coordinator;  // the same, as `local_folder` takes it
  checkpoint_folder_base& (*local_folder)(void* coordinator);
  storage_ref durable;
  retention_ref retention;  // of the durable folder
  void* observer;
  void (*copied)(void* observer, const checkpoint_id& id);
  void (*failed)(void* observer, const checkpoint_id& id, const std::string& why);
};

/// A `mirrored_coordinator` but for its types: what its functions of the same names do.
class mirror_core {
 public:
  mirror_core(const mirror_parts& parts, const mirror_options& options);
  mirror_core(const mirror_core&) = delete;
  mirror_core& operator=(const mirror_core&) = delete;
  ~mirror_core();

  void commit(const checkpoint_draft& draft, const checkpoint_manifest& part);
  [[nodiscard]] std::string tidy();
  void give_up(const checkpoint_id& id) noexcept;
  [[nodiscard]] bool wait_copied(std::uint64_t generation, std::uint64_t most_ns);
  [[nodiscard]] mirror_stats stats() const {
    const std::scoped_lock lock(mutex_);
    mirror_stats now = stats_;
    now.behind = folder_ ? commits_ - copied_commit_ : 0;
    return now;
  }

 private:
  struct copy_job {
    found_checkpoint what{};
    std::uint64_t number = 0;  // of its commit
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
  /// @return whether the time is not over.
  bool wait_until(std::unique_lock<std::mutex>& lock, std::uint64_t began, std::uint64_t most_ns);
  [[nodiscard]] bool is_idle() const noexcept { return !pending_ && copying_ == 0; }

  mirror_parts parts_;
  mirror_options options_;
  std::optional<checkpoint_folder_base> folder_;  // rank 0's; the copying thread's

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<checkpoint_id> committed_;  // and not handed over yet
  std::optional<copy_job> pending_;
  std::uint64_t copying_ = 0;  // generation that is read; 0: none
  std::uint64_t commits_ = 0;
  std::uint64_t copied_commit_ = 0;  // number of the newest that was copied
  std::uint64_t given_up_ = 0;       // highest generation
  std::string untold_;
  bool stops_ = false;
  mirror_stats stats_;
  std::thread copier_;
};

}  // namespace detail

/// A `checkpoint_coordinator` over two folders: one that is fast and near, in which checkpoints are
/// committed, and one that outlasts the machine, to which they are copied by a thread of its own.
///
///     posix_storage local("/nvme/run-7"), durable("/shared/run-7");
///     solo_coordinator fast(local);
///     mirrored_coordinator coordinator(fast, durable, keep_last_and_every{.last = 5});
///     async_checkpointer<traits> saves(coordinator, tensors);
///
/// A ticket that says `committed` speaks of the local folder; `wait_copied` and `stats()` tell what has come
/// to the durable one. Both have a checkpoint under the same name, and one count of generations:
/// `recover` finds the newest over both. What the thread does:
///
/// - One checkpoint is copied at a time, and one waits: the newest. Where copying is slower than saving,
///   those between are skipped and counted. A copy that was begun is finished, whatever comes meanwhile.
/// - A copy that fails is tried again, and told: `stats()`, the observer, and what `tidy` returns, which
///   `async_checkpointer` notes as `last_trouble`. It ends no training and holds none up.
/// - After a copy the durable folder is tidied by a retention of its own. The local one removes nothing
///   that is being copied or waits for it.
/// - A run goes on behind the durable folder's last generation, also where the local disk was lost. Where
///   the newest checkpoint of the local folder is newer than all of the durable one, because a process ended
///   in between, it is copied first.
///
/// With several ranks (`file_coordinator`), rank 0 copies, from the folder that all share. Local disks of
/// several machines, each with its own ranks' files, need a transport, and are not for this.
///
/// @tparam Observer  `copied(id)` and `failed(id, why)`, by the copying thread; what they throw is noted.
/// @par Complexity      `tidy` reads the manifest of what was committed; copying: `copy_checkpoint`.
/// @par Thread safety   as `checkpoint_coordinator`; `stats` and `wait_copied` by any thread.
/// @par Errors          the constructor throws `io_error` when the durable folder cannot be opened or read,
///      or is another process's: without it nobody knows which generations are taken; `argument_error` when
///      the local newest and the durable one of its generation are of two runs; and `length_error`
///      for `buffer_bytes` below 2. Later on nothing throws that the local coordinator does not.
template <checkpoint_coordinator Coordinator, checkpoint_storage DurableStorage,
          retention_policy Retention = keep_last_and_every, class Observer = no_mirror_observer>
class mirrored_coordinator {
 public:
  using storage_type = typename Coordinator::storage_type;
  using durable_type = DurableStorage;

  /// @param local      a `solo_coordinator` or `file_coordinator`, with the local folder's retention.
  /// @param durable    not used by ranks other than 0. It and `local` outlive this.
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
  /// As `mirror_options::at_end` says: by default it waits for the copy under way and the one that waits,
  /// up to 10 minutes. A call of the durable storage that hangs is waited for in any case.
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
  /// Hands what was committed to the copying thread, tidies the local folder, and tells what went wrong in
  /// either since it was last called.
  [[nodiscard]] std::string tidy() { return core_.tidy(); }

  /// Returns once that generation, or a newer one, is in the durable folder: true. False after `most_ns`,
  /// when it was abandoned or its copy has failed for good and none newer waits, and at once for ranks other
  /// than 0, and for generation 0: nothing was committed. A generation that was never begun is waited for as
  /// long. Any thread.
  [[nodiscard]] bool wait_copied(std::uint64_t generation, std::uint64_t most_ns = forever) {
    return core_.wait_copied(generation, most_ns);
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
