/// @file
/// The thread that copies checkpoints to a durable folder.
#pragma once

#include <llmmem/checkpoint/commit_ticket.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/checkpoint/mirrored_coordinator.hpp>

#include <algorithm>
#include <exception>

namespace llmmem {
inline namespace v0 {

namespace detail {

/// The folder that a coordinator commits to. @pre it is rank 0's.
template <class Coordinator>
[[nodiscard]] auto& folder_of(Coordinator& coordinator) {
  if constexpr (requires { coordinator.folder(); }) {
    return coordinator.folder();
  } else {
    return *coordinator.session().folder();
  }
}

}  // namespace detail

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
mirrored_coordinator<C, D, R, O>::mirrored_coordinator(C& local, D& durable, R retention,
                                                       const mirror_options& options, O observer)
    : local_(&local),
      durable_(&durable),
      retention_(std::move(retention)),
      options_(options),
      observer_(std::move(observer)) {
  static_cast<void>(detail::copy_buffer(options_.buffer_bytes));  // so that it throws here
  if (local.rank() != 0) return;
  folder_.emplace(durable);
  detail::folder_of(local).raise_generation(folder_->generation());
  find_what_lacks();
  copier_ = std::thread([this] { run(); });
}

/// A process that ended between a commit and its copy leaves one that only this machine has.
template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::find_what_lacks() {
  const checkpoint_search there = find_checkpoint(*durable_, verification::sizes);
  if (there.found) stats_.last_copied = there.found->id;
  checkpoint_search here = find_checkpoint(local_->storage(), verification::sizes);
  if (!here.found) return;
  check_that_one_run(*here.found);
  stats_.last_committed = here.found->id;
  if (here.found->id.generation <= stats_.last_copied.generation) return;
  enqueue(*std::move(here.found), ++commits_);
  hold_local();
}

/// That a durable checkpoint of the same generation, if there is one, is a copy of the local one.
template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::check_that_one_run(const found_checkpoint& here) {
  for (const checkpoint_id& id : list_checkpoints(*durable_)) {
    if (id.generation != here.id.generation) continue;
    try {
      const checkpoint_manifest there = detail::open_manifest(*durable_, id).manifest;
      if (folded_manifest(there) == folded_manifest(here.manifest)) return;
    } catch (const error&) {  // damaged: nothing is known of it
      return;
    }
    throw argument_error(local_->storage().path(here.folder) + " and " + durable_->path(folder_name(id)) +
                         " have the same generation and are not the same: two runs wrote to these folders; "
                         "take a new folder for one of them");
  }
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
mirrored_coordinator<C, D, R, O>::~mirrored_coordinator() {
  if (!copier_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    const std::uint64_t began = detail::monotonic_ns();
    if (options_.at_end == mirror_end::finish) {
      while (!is_idle() && wait_until(lock, began, options_.finish_within_ns)) {
      }
    }
    stops_ = true;
    changed_.notify_all();
  }
  copier_.join();
}

// --- what the checkpointer calls

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::commit(const checkpoint_draft& draft,
                                              const checkpoint_manifest& part) {
  const auto note = [&] {
    const std::scoped_lock lock(mutex_);
    committed_ = draft.id;
    stats_.last_committed = draft.id;
    ++commits_;
  };
  try {
    local_->commit(draft, part);
  } catch (const durability_uncertain&) {
    note();  // it is whole, and a copy of it may be all that is left
    throw;
  }
  note();
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
std::string mirrored_coordinator<C, D, R, O>::tidy() {
  if (!folder_) return local_->tidy();
  hand_over();
  hold_local();
  std::string trouble = local_->tidy();
  const std::scoped_lock lock(mutex_);
  if (!untold_.empty()) trouble += (trouble.empty() ? "" : "; ") + std::exchange(untold_, {});
  return trouble;
}

/// Before the local folder is tidied: what is on its way must stay, and with it what it takes chunks from.
template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::hold_local() {
  std::vector<std::uint64_t> held;
  {
    const std::scoped_lock lock(mutex_);
    if (copying_ != 0) held.push_back(copying_);
    if (pending_) held.push_back(pending_->what.id.generation);
  }
  detail::folder_of(*local_).hold(std::move(held));
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::hand_over() {
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
    enqueue(open_checkpoint(local_->storage(), id, verification::sizes), number);
    return;
  } catch (const std::exception& error) {
    why = detail::reason_of(error);
  }
  note_failed(id, why);
  give_up(id);
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::give_up(const checkpoint_id& id) noexcept {
  const std::scoped_lock lock(mutex_);
  given_up_ = std::max(given_up_, id.generation);
  changed_.notify_all();
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::enqueue(found_checkpoint what, std::uint64_t number) {
  const std::scoped_lock lock(mutex_);
  if (pending_) ++stats_.skipped;
  pending_ = copy_job{std::move(what), number};
  changed_.notify_all();
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
bool mirrored_coordinator<C, D, R, O>::wait_copied(std::uint64_t generation, std::uint64_t most_ns) {
  const std::uint64_t began = detail::monotonic_ns();
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!folder_ || generation == 0) return false;
    if (stats_.last_copied.generation >= generation) return true;
    if (given_up_ >= generation && is_idle()) return false;
    if (!wait_until(lock, began, most_ns)) return false;
  }
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
bool mirrored_coordinator<C, D, R, O>::wait_until(std::unique_lock<std::mutex>& lock, std::uint64_t began,
                                                  std::uint64_t most_ns) {
  constexpr std::uint64_t day_ns = 86'400'000'000'000;  // a clock cannot be set to any time
  const std::uint64_t waited = detail::monotonic_ns() - began;
  if (waited >= most_ns) return false;
  const auto left = static_cast<std::int64_t>(std::min(most_ns - waited, day_ns));
  changed_.wait_for(lock, std::chrono::nanoseconds(left));
  return true;
}

// --- the copying thread

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::run() {
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
      note_failed(job.what.id,
                  detail::reason("it was not copied before the run ended; the next one copies it"));
    } else {
      copy(job);
    }
    lock.lock();
    copying_ = 0;
    stats_.copying = {};
    changed_.notify_all();
  }
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::copy(const copy_job& job) noexcept {
  for (std::uint32_t attempt = 1;; ++attempt) {
    const copy_end end = try_copy(job);
    if (end == copy_end::copied) return tidy_durable();
    if (end == copy_end::failed && attempt < options_.attempts && waits_for_retry()) continue;
    return give_up(job.what.id);
  }
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
auto mirrored_coordinator<C, D, R, O>::try_copy(const copy_job& job) noexcept -> copy_end {
  const std::uint64_t began = detail::monotonic_ns();
  copy_end end = copy_end::failed;
  std::string why;
  try {
    const copy_report report =
        copy_checkpoint(local_->storage(), job.what, *folder_,
                        {.generation = copy_generation::same, .buffer_bytes = options_.buffer_bytes},
                        [this](const copy_progress& progress) { return watch(progress); });
    note_copied(job, report, detail::monotonic_ns() - began);
    return copy_end::copied;
  } catch (const durability_uncertain& error) {
    end = copy_end::failed_for_good;  // its name is taken
    why = detail::reason_of(error);
  } catch (const copy_stopped& error) {
    end = copy_end::failed_for_good;
    why = detail::reason_of(error);
  } catch (const std::exception& error) {
    why = detail::reason_of(error);
  } catch (...) {
    why = detail::reason("an exception that is none of the standard library's");
  }
  note_failed(job.what.id, why);
  return end;
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
copy_verdict mirrored_coordinator<C, D, R, O>::watch(const copy_progress& progress) {
  const std::scoped_lock lock(mutex_);
  stats_.copying = progress;
  return stops_ ? copy_verdict::stop : copy_verdict::go_on;
}

/// Whether there is to be another attempt: not when a newer one waits, or all ends.
template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
bool mirrored_coordinator<C, D, R, O>::waits_for_retry() {
  const std::uint64_t began = detail::monotonic_ns();
  std::unique_lock lock(mutex_);
  while (!stops_ && !pending_) {
    if (!wait_until(lock, began, options_.retry_after_ns)) return true;
  }
  return false;
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::note_copied(const copy_job& job, const copy_report& report,
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
  tell([&] { observer_.copied(report.copy.id); });
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::note_failed(const checkpoint_id& id, const std::string& why) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    ++stats_.failed;
  }
  try {
    note_trouble(folder_name(id) + " was not copied: " + why);
  } catch (const std::bad_alloc& error) {
    note_trouble(detail::reason_of(error));
  }
  tell([&] { observer_.failed(id, why); });
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::note_trouble(std::string what) noexcept {
  const std::scoped_lock lock(mutex_);
  untold_ = detail::reason(what);
  stats_.last_trouble = std::move(what);
}

template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
template <class Tell>
void mirrored_coordinator<C, D, R, O>::tell(Tell tell_it) noexcept {
  try {
    tell_it();
  } catch (const std::exception& error) {
    note_trouble(detail::reason("the observer of copies failed: ", error.what()));
  } catch (...) {
    note_trouble(detail::reason("the observer of copies failed"));
  }
}

/// What it meets undoes no copy.
template <checkpoint_coordinator C, checkpoint_storage D, retention_policy R, class O>
void mirrored_coordinator<C, D, R, O>::tidy_durable() noexcept {
  try {
    static_cast<void>(folder_->tidy(retention_));
  } catch (const std::exception& error) {
    note_trouble(detail::reason_of(error));
  } catch (...) {
    note_trouble(
        detail::reason("tidying the durable folder ended with an exception that is none of the "
                       "standard library's"));
  }
}

}  // namespace v0
}  // namespace llmmem
