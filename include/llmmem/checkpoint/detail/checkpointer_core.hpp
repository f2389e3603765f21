/// @file
/// The part of an `async_checkpointer` that is independent of its traits.
#pragma once

#include <llmmem/checkpoint/checkpointer_types.hpp>
#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/checkpoint/coordinator.hpp>
#include <llmmem/checkpoint/detail/incremental.hpp>
#include <llmmem/checkpoint/file_plan.hpp>
#include <llmmem/checkpoint/manifest.hpp>
#include <llmmem/checkpoint/state_view.hpp>
#include <llmmem/config.hpp>
#include <llmmem/version/snapshot_gate.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// The type-erased traits of an `async_checkpointer`.
struct checkpointer_policies {
  bool is_concurrent = false;   // of the view
  bool is_stable = false;       // of the view
  bool tracks_changes = false;  // of the view
  bool has_digest = false;
  chunk_digest_value (*digest)(std::span<const std::byte> bytes) noexcept = nullptr;
  void* observer = nullptr;
  void (*settled)(void* observer, const commit_ticket& ticket) = nullptr;
};

/// An `async_checkpointer` without its types: implements its functions of the same names.
class checkpointer_core {
 public:
  checkpointer_core(coordinator_ref coordinator, const std::vector<state_tensor>& tensors,
                    checkpointer_options options, const checkpointer_policies& policies);
  checkpointer_core(const checkpointer_core&) = delete;
  checkpointer_core& operator=(const checkpointer_core&) = delete;
  /// @pre the core was never started, or is stopped.
  ~checkpointer_core();

  /// Returns the required length of the ring, at most `ring_bytes` of the options. @throws argument_error for
  /// several ranks with `when_busy::skip`.
  [[nodiscard]] std::uint64_t ring_bytes() const;
  /// Starts its threads. @param ring `ring_bytes()` bytes, all zero; must stay until `stop` returns.
  void start(std::span<std::byte> ring);
  /// @pre nothing is pending.
  void stop();

  snapshot_guard begin_snapshot(std::uint64_t step, std::unique_ptr<any_state_view> view,
                                std::vector<checkpoint_extra> extras);
  [[nodiscard]] snapshot_gate& gate() noexcept { return gate_; }
  bool flush(std::uint64_t limit_ns);
  bool stage_for(std::uint64_t limit_ns);
  [[nodiscard]] const checkpointer_options& options() const noexcept { return options_; }
  [[nodiscard]] const file_plan& plan() const noexcept { return plan_; }
  [[nodiscard]] checkpointer_stats stats() const;
  [[nodiscard]] checkpoint_progress progress() const;

 private:
  struct job;
  struct filled_chunk {
    std::size_t slot = 0;
    std::uint64_t bytes = 0;
    bool is_end = false;          // the last entry of this snapshot
    std::uint64_t unchanged = 0;  // this many chunks were not copied; the entry then has no copied one
  };
  class file_writer;

  [[nodiscard]] std::string wait_for_turn(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] static checkpointer_options checked(checkpointer_options options,
                                                    const checkpointer_policies& policies);
  [[nodiscard]] std::span<std::byte> slot(std::size_t at) noexcept;
  // Staging.
  void run_stager();
  [[nodiscard]] job* unstaged() noexcept;
  [[nodiscard]] job* stageable() noexcept;
  [[nodiscard]] bool is_hurried() noexcept;
  [[nodiscard]] bool stage_some(job& of, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] bool is_unchanged(const job& of, const planned_file& file, std::uint64_t begin,
                                  std::uint64_t bytes) const;
  void pass(job& of, std::uint64_t bytes);
  static void fill(job& of, const planned_file& file, std::uint64_t begin, std::span<std::byte> into);
  void end_staging(job& of, std::unique_lock<std::mutex>& lock, std::string why);
  void pump(std::unique_lock<std::mutex>& lock, std::uint64_t until);
  void hold_up(std::uint64_t until);
  [[nodiscard]] std::shared_ptr<snapshot_gate> hold();

  // Persisting.
  void run_persister();
  void persist(job& of);
  void give_up(job& of);
  [[nodiscard]] std::string tidy() noexcept;
  [[nodiscard]] checkpoint_manifest write_files(job& of, const checkpoint_draft& draft);
  void remember(job& of, checkpoint_manifest part);
  [[nodiscard]] filled_chunk take(job& of);
  void check_given_up(const job& of) const;
  [[nodiscard]] bool has_filled() const;
  void release(std::span<const std::size_t> slots);
  void drain(job& of);
  void conclude(job& of, commit_status how, std::string why);
  void note_trouble(std::string_view what) noexcept;

  coordinator_ref coordinator_;
  checkpointer_policies policies_;
  checkpointer_options options_;
  file_plan plan_;
  snapshot_gate gate_;
  std::span<std::byte> ring_{};

  std::mutex observer_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<job>> jobs_;  // pending, the oldest first
  // The oldest first; has space for all slots, and for the gaps and ends between them.
  std::vector<filled_chunk> filled_;
  std::vector<std::size_t> free_;                      // slots
  std::shared_ptr<const committed_part> committed_{};  // the reference of incremental saves
  bool ends_ = false;
  checkpointer_stats stats_;
  std::thread persister_;
  std::thread stager_;
};

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
