/// @file
/// Bodies of `mirrored_coordinator`: its calls, and its copying thread.
#pragma once

#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/copy_body.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/detail/search_body.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>
#include <llmmem/detail/write_signals.hpp>

#include <algorithm>
#include <exception>

namespace llmmem {
inline namespace v0 {
namespace detail {

template <class Tell>
void mirror_core::tell(Tell tell_it) noexcept {
  try {
    tell_it();
  } catch (const std::exception& error) {
    note_trouble(reason("the observer of copies failed: ", error.what()));
  } catch (...) {
    note_trouble(reason("the observer of copies failed"));
  }
}

LLMMEM_CHECKPOINT_BODY mirror_core::mirror_core(const mirror_parts& parts, const mirror_options& options)
    : parts_(parts), options_(options) {
  static_cast<void>(copy_buffer(options_.buffer_bytes));  // throws here if the buffer is too small
  if (parts_.local.rank() != 0) return;
  folder_.emplace(parts_.durable);
  parts_.local_folder(parts_.coordinator).raise_generation(folder_->generation());
  find_what_lacks();
  copier_ = std::thread([this] { run(); });
}

/// Finds a checkpoint that only this machine has, because a process ended between a commit and its copy.
LLMMEM_CHECKPOINT_BODY void mirror_core::find_what_lacks() {
  const checkpoint_search there = find_checkpoint(parts_.durable, verification::sizes);
  if (there.found) stats_.last_copied = there.found->id;
  checkpoint_search here = find_checkpoint(parts_.local.storage(), verification::sizes);
  if (!here.found) return;
  check_that_one_run(*here.found);
  stats_.last_committed = here.found->id;
  if (here.found->id.generation <= stats_.last_copied.generation) return;
  enqueue(*std::move(here.found), ++commits_);
  hold_local();
}

/// Checks that a durable checkpoint of the same generation, if any, is a copy of the local one.
LLMMEM_CHECKPOINT_BODY void mirror_core::check_that_one_run(const found_checkpoint& here) {
  for (const checkpoint_id& id : list_checkpoints(parts_.durable)) {
    if (id.generation != here.id.generation) continue;
    try {
      const checkpoint_manifest there =
          try_again({}, [&] { return open_manifest(parts_.durable, id).manifest; });
      if (folded_manifest(there) == folded_manifest(here.manifest)) return;
    } catch (const format_error&) {  // damaged: its contents are unknown
      return;
    } catch (const storage_error& error) {
      if (!proves_damage(error)) throw;
      return;
    }
    throw argument_error(parts_.local.storage().path(here.folder) + " and " +
                         parts_.durable.path(folder_name(id)) +
                         " have the same generation but differ: two runs wrote to these folders; "
                         "use a new folder for one of them");
  }
}

LLMMEM_CHECKPOINT_BODY mirror_core::~mirror_core() {
  if (!copier_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    const std::uint64_t began = monotonic_ns();
    if (options_.at_end == mirror_end::finish) {
      while (!is_idle() && wait_until(lock, began, options_.finish_within_ns)) {
      }
    }
    stops_ = true;
    changed_.notify_all();
  }
  copier_.join();
}

// --- calls by the checkpointer

LLMMEM_CHECKPOINT_BODY void mirror_core::commit(const checkpoint_draft& draft,
                                                const checkpoint_manifest& part) {
  const auto note = [&] {
    const std::scoped_lock lock(mutex_);
    committed_ = draft.id;
    stats_.last_committed = draft.id;
    ++commits_;
  };
  try {
    parts_.local.commit(draft, part);
  } catch (const durability_uncertain&) {
    note();  // the checkpoint is complete, and its copy may be all that remains
    throw;
  }
  note();
}

LLMMEM_CHECKPOINT_BODY std::string mirror_core::tidy() {
  if (!folder_) return parts_.local.tidy();
  hand_over();
  hold_local();
  std::string trouble = parts_.local.tidy();
  const std::scoped_lock lock(mutex_);
  if (!untold_.empty()) trouble += (trouble.empty() ? "" : "; ") + std::exchange(untold_, {});
  return trouble;
}

/// Called before the local folder is tidied, because checkpoints that are being copied must stay, with those
/// they refer to.
LLMMEM_CHECKPOINT_BODY void mirror_core::hold_local() {
  std::vector<std::uint64_t> held;
  {
    const std::scoped_lock lock(mutex_);
    if (copying_ != 0) held.push_back(copying_);
    if (pending_) held.push_back(pending_->what.id.generation);
  }
  parts_.local_folder(parts_.coordinator).hold(std::move(held));
}

LLMMEM_CHECKPOINT_BODY void mirror_core::hand_over() {
  checkpoint_id id;
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (!committed_) return;
    id = *std::exchange(committed_, std::nullopt);
    number = commits_;
  }
  std::string why;
  try {
    enqueue(open_checkpoint(parts_.local.storage(), id, verification::sizes), number);
    return;
  } catch (const std::exception& error) {
    why = reason_of(error);
  }
  note_failed(id, why);
  give_up(id);
}

LLMMEM_CHECKPOINT_BODY void mirror_core::give_up(const checkpoint_id& id) noexcept {
  const std::scoped_lock lock(mutex_);
  given_up_ = std::max(given_up_, id.generation);
  changed_.notify_all();
}

LLMMEM_CHECKPOINT_BODY void mirror_core::enqueue(found_checkpoint what, std::uint64_t number) {
  const std::scoped_lock lock(mutex_);
  if (pending_) ++stats_.skipped;
  pending_ = copy_job{std::move(what), number};
  changed_.notify_all();
}

LLMMEM_CHECKPOINT_BODY bool mirror_core::wait_copied(std::uint64_t generation, std::uint64_t limit_ns) {
  const std::uint64_t began = monotonic_ns();
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!folder_ || generation == 0) return false;
    if (stats_.last_copied.generation >= generation) return true;
    if (given_up_ >= generation && is_idle()) return false;
    if (!wait_until(lock, began, limit_ns)) return false;
  }
}

LLMMEM_CHECKPOINT_BODY bool mirror_core::wait_until(std::unique_lock<std::mutex>& lock, std::uint64_t began,
                                                    std::uint64_t limit_ns) {
  constexpr std::uint64_t day_ns = 86'400'000'000'000;  // a clock cannot wait for an arbitrary time
  const std::uint64_t waited = monotonic_ns() - began;
  if (waited >= limit_ns) return false;
  const auto left = static_cast<std::int64_t>(std::min(limit_ns - waited, day_ns));
  changed_.wait_for(lock, std::chrono::nanoseconds(left));
  return true;
}

// --- the copying thread

LLMMEM_CHECKPOINT_BODY void mirror_core::run() {
  block_write_signals();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stops_ || pending_; });
    if (!pending_) return;
    const copy_job job = *std::exchange(pending_, std::nullopt);
    copying_ = job.what.id.generation;
    stats_.copying.id = job.what.id;
    const bool stops = stops_;
    lock.unlock();
    if (stops) {
      note_failed(job.what.id, reason("it was not copied before the run ended; the next one copies it"));
    } else {
      copy(job);
    }
    lock.lock();
    copying_ = 0;
    stats_.copying = {};
    changed_.notify_all();
  }
}

LLMMEM_CHECKPOINT_BODY void mirror_core::copy(const copy_job& job) noexcept {
  for (std::uint32_t attempt = 1;; ++attempt) {
    const copy_end end = try_copy(job);
    if (end == copy_end::copied) return tidy_durable();
    if (end == copy_end::failed && attempt < options_.attempts && waits_for_retry()) continue;
    return give_up(job.what.id);
  }
}

LLMMEM_CHECKPOINT_BODY auto mirror_core::try_copy(const copy_job& job) noexcept -> copy_end {
  const std::uint64_t began = monotonic_ns();
  copy_end end = copy_end::failed;
  std::string why;
  try {
    const copy_report report =
        copy_checkpoint(parts_.local.storage(), job.what, *folder_,
                        {.generation = copy_generation::same, .buffer_bytes = options_.buffer_bytes},
                        [this](const copy_progress& progress) { return watch(progress); });
    note_copied(job, report, monotonic_ns() - began);
    return copy_end::copied;
  } catch (const durability_uncertain& error) {
    end = copy_end::failed_for_good;  // another checkpoint has its name
    why = reason_of(error);
  } catch (const copy_stopped& error) {
    end = copy_end::failed_for_good;
    why = reason_of(error);
  } catch (const std::exception& error) {
    why = reason_of(error);
  } catch (...) {
    why = reason("an exception that is not from the standard library");
  }
  note_failed(job.what.id, why);
  return end;
}

LLMMEM_CHECKPOINT_BODY copy_verdict mirror_core::watch(const copy_progress& progress) {
  const std::scoped_lock lock(mutex_);
  stats_.copying = progress;
  return stops_ ? copy_verdict::stop : copy_verdict::proceed;
}

/// Waits, and returns whether to make another attempt: not if a newer checkpoint waits, or the coordinator is
/// ending.
LLMMEM_CHECKPOINT_BODY bool mirror_core::waits_for_retry() {
  const std::uint64_t began = monotonic_ns();
  std::unique_lock lock(mutex_);
  while (!stops_ && !pending_) {
    if (!wait_until(lock, began, options_.retry_after_ns)) return true;
  }
  return false;
}

LLMMEM_CHECKPOINT_BODY void mirror_core::note_copied(const copy_job& job, const copy_report& report,
                                                     std::uint64_t ns) {
  {
    const std::scoped_lock lock(mutex_);
    ++stats_.copied;
    stats_.bytes += report.bytes;
    stats_.copy_ns += ns;
    stats_.last_copied = report.copy.id;
    copied_commit_ = job.number;
    changed_.notify_all();
  }
  tell([&] { parts_.copied(parts_.observer, report.copy.id); });
}

LLMMEM_CHECKPOINT_BODY void mirror_core::note_failed(const checkpoint_id& id,
                                                     const std::string& why) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    ++stats_.failed;
  }
  try {
    note_trouble(folder_name(id) + " was not copied: " + why);
  } catch (const std::bad_alloc& error) {
    note_trouble(reason_of(error));
  }
  tell([&] { parts_.failed(parts_.observer, id, why); });
}

LLMMEM_CHECKPOINT_BODY void mirror_core::note_trouble(std::string what) noexcept {
  const std::scoped_lock lock(mutex_);
  untold_ = reason(what);
  stats_.last_error = std::move(what);
}

/// Tidies the durable folder; a problem here does not undo the copy.
LLMMEM_CHECKPOINT_BODY void mirror_core::tidy_durable() noexcept {
  try {
    static_cast<void>(folder_->tidy(parts_.retention));
  } catch (const std::exception& error) {
    note_trouble(reason_of(error));
  } catch (...) {
    note_trouble(
        reason("tidying the durable folder ended with an exception that is not from the "
               "standard library"));
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
