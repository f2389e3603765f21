/// @file
/// The first half of `async_checkpointer`: from the state into the ring.
#pragma once

#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/checkpointer_core.hpp>
#include <llmmem/checkpoint/detail/manifest_check.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/detail/monotonic.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

/// Calls `visit(span, first, last)` for the spans in `[begin, end)` of a file.
template <class Visit>
void each_span(const planned_file& file, std::uint64_t begin, std::uint64_t end, Visit&& visit) {
  auto span = std::partition_point(file.spans.begin(), file.spans.end(), [&](const planned_span& each) {
    return each.begin + each.bytes <= begin;
  });
  for (; span != file.spans.end() && span->begin < end; ++span)
    visit(*span, std::max(begin, span->begin), std::min(end, span->begin + span->bytes));
}

/// A pending snapshot. The members below the line are protected by the mutex.
struct checkpointer_core::job {
  job(std::uint64_t step, std::unique_ptr<any_state_view> of_state, file_plan beside)
      : view(std::move(of_state)), extras(std::move(beside)), record(std::make_shared<commit_record>(step)) {}

  std::unique_ptr<any_state_view> view;  // null once the snapshot is staged
  file_plan extras;
  std::shared_ptr<commit_record> record;
  // The gate that the guard of a stable view checks; otherwise null.
  std::shared_ptr<snapshot_gate> reading{};
  std::vector<const planned_file*> files{};
  std::uint64_t version = 0;                     // version of a view that tracks changes
  std::shared_ptr<const committed_part> base{};  // the checkpoint that this one refers to; null: it is full
  std::vector<std::vector<chunk_digest_value>> digests{};  // by file and chunk, as in `committed_part`
  std::uint64_t bytes = 0;
  std::uint64_t written = 0;
  std::uint64_t began_to_persist = 0;  // clock time in ns
  //
  std::size_t file = 0;  // position of staging
  std::uint64_t begin = 0;
  std::uint64_t staged = 0;
  std::uint64_t persisted = 0;
  bool may_stage = true;
  bool is_staged = false;         // also if it is abandoned
  bool is_drained = false;        // the writer has taken all staged chunks
  bool is_over = false;           // the staged data is no longer needed
  std::string why{};              // the reason why it was abandoned
  std::uint64_t stall_began = 0;  // beginning of the current stall; 0: no caller is waiting now
  std::uint64_t stalled = 0;      // total of completed stalls
};

LLMMEM_CHECKPOINT_BODY checkpointer_options
checkpointer_core::checked(checkpointer_options options, const checkpointer_policies& policies) {
  const auto wrong = [&](const std::string& why) { throw length_error(options.name + ": " + why); };
  if (options.chunk_bytes == 0 || options.chunk_bytes > max_checkpoint_chunk) {
    wrong("chunks of " + std::to_string(options.chunk_bytes) + " bytes; they have 1 to " +
          std::to_string(max_checkpoint_chunk));
  }
  // The ring of a small state uses smaller chunks.
  constexpr std::uint64_t page = 4096;
  if (const std::uint64_t fits = options.ring_bytes / 2 / page * page; fits != 0)
    options.chunk_bytes = std::min(options.chunk_bytes, fits);
  if (options.ring_bytes / 2 < options.chunk_bytes) {
    wrong("a ring of " + std::to_string(options.ring_bytes) + " bytes for chunks of " +
          std::to_string(options.chunk_bytes) + "; it needs space for two of them");
  }
  if (options.full_every == 0) wrong("full_every is 0; 1 writes each checkpoint whole");
  if (options.full_every > max_full_every) {
    wrong("full_every is " + std::to_string(options.full_every) + ", at most " +
          std::to_string(max_full_every) +
          " is allowed, because a reader of a file opens one of each checkpoint since the last whole one");
  }
  const bool can_tell = policies.has_digest || policies.tracks_changes;
  if (options.full_every > 1 && !can_tell) {
    throw argument_error(options.name + ": full_every is " + std::to_string(options.full_every) +
                         ", but nothing detects changes: give the traits a digest_type "
                         "(xxh3_chunk_digest), or a view that tracks changes (cow_state_view)");
  }
  if (options.max_pending == 0 || options.max_pending > 1024)
    wrong("max_pending is " + std::to_string(options.max_pending) + "; it may be 1 to 1024");
  return options;
}

LLMMEM_CHECKPOINT_BODY checkpointer_core::checkpointer_core(coordinator_ref coordinator,
                                                            const std::vector<state_tensor>& tensors,
                                                            checkpointer_options options,
                                                            const checkpointer_policies& policies)
    : coordinator_(coordinator),
      policies_(policies),
      options_(checked(std::move(options), policies)),
      plan_(plan_files(tensors, {.max_shard_bytes = options_.max_shard_bytes,
                                 .rank = coordinator.rank(),
                                 .world = coordinator.world()})) {}

LLMMEM_CHECKPOINT_BODY checkpointer_core::~checkpointer_core() = default;

LLMMEM_CHECKPOINT_BODY std::uint64_t checkpointer_core::ring_bytes() const {
  if (options_.busy == when_busy::skip && coordinator_.world() > 1) {
    throw argument_error(options_.name + ": when_busy::skip with " + std::to_string(coordinator_.world()) +
                         " ranks: a rank that skips would leave the others waiting; use when_busy::wait");
  }
  std::uint64_t chunks = 2;  // two more for extras
  for (const planned_file& each : plan_.files)
    chunks += chunks_in(each.bytes, options_.chunk_bytes);
  return std::min(options_.ring_bytes / options_.chunk_bytes, chunks) * options_.chunk_bytes;
}

LLMMEM_CHECKPOINT_BODY void checkpointer_core::start(std::span<std::byte> ring) {
  ring_ = ring;
  const std::size_t slots = ring.size() / static_cast<std::size_t>(options_.chunk_bytes);
  for (std::size_t i = slots; i-- > 0;)
    free_.push_back(i);
  stats_.ring_bytes = ring.size();
  filled_.reserve(2 * slots + 2 * std::size_t{options_.max_pending});
  persister_ = std::thread([this] { run_persister(); });
  if (!policies_.is_concurrent) return;
  try {
    stager_ = std::thread([this] { run_stager(); });
  } catch (...) {
    stop();
    throw;
  }
}

/// @pre nothing is pending.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::stop() {
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  persister_.join();
  if (stager_.joinable()) stager_.join();
}

LLMMEM_CHECKPOINT_BODY std::span<std::byte> checkpointer_core::slot(std::size_t at) noexcept {
  const auto bytes = static_cast<std::size_t>(options_.chunk_bytes);
  return ring_.subspan(at * bytes, bytes);
}

LLMMEM_CHECKPOINT_BODY snapshot_guard checkpointer_core::begin_snapshot(
    std::uint64_t step, std::unique_ptr<any_state_view> view, std::vector<checkpoint_extra> extras) {
  const detail::named_range range("checkpoint snapshot");
  const file_plan_options placed{.rank = coordinator_.rank(), .world = coordinator_.world()};
  auto made = std::make_unique<job>(step, std::move(view), plan_extras(extras, placed));
  for (const planned_file& each : plan_.files)
    made->files.push_back(&each);
  for (const planned_file& each : made->extras.files)
    made->files.push_back(&each);
  made->bytes = plan_.bytes + made->extras.bytes;
  if (policies_.tracks_changes) made->version = made->view->version();
  made->may_stage = options_.full_every == 1;
  if (!policies_.is_concurrent) {
    made->record->stage = [](void* self, std::uint64_t until) {
      static_cast<checkpointer_core*>(self)->hold_up(until);
    };
    made->record->checkpointer = this;
    made->record->owner = ::pthread_self();
  }
  commit_ticket ticket(made->record);

  std::unique_lock lock(mutex_);
  if (const std::string busy = wait_for_turn(lock); !busy.empty()) {
    ++stats_.begun;
    ++stats_.skipped;
    lock.unlock();
    conclude(*made, commit_status::not_committed, options_.name + ": " + busy);
    return {gate_, std::move(ticket), nullptr};
  }
  jobs_.reserve(jobs_.size() + 1);  // all that can fail comes before the state is held
  const std::shared_ptr<snapshot_gate> reading = hold();
  made->reading = reading;
  ++stats_.begun;
  jobs_.push_back(std::move(made));
  changed_.notify_all();
  return {gate_, std::move(ticket), reading};
}

/// Holds the state for a new snapshot. For a stable view it only checks whether a snapshot may begin; a
/// separate gate then reports when the view has been read.
LLMMEM_CHECKPOINT_BODY std::shared_ptr<snapshot_gate> checkpointer_core::hold() {
  std::shared_ptr<snapshot_gate> reading;
  if (policies_.is_stable) {
    reading = std::make_shared<snapshot_gate>();
    reading->freeze(
        [](void* of) {
          auto* const self = static_cast<checkpointer_core*>(of);
          const std::uint64_t began = monotonic_ns();
          self->hold_up(commit_ticket::forever);
          const std::scoped_lock lock(self->mutex_);
          self->stats_.stall_ns += monotonic_ns() - began;
        },
        this);
    gate_.freeze();
    gate_.thaw();
  } else {
    gate_.freeze([](void* of) { static_cast<checkpointer_core*>(of)->hold_up(commit_ticket::forever); },
                 this);
  }
  return reading;
}

/// Returns why a snapshot cannot begin now, or nothing once it can.
LLMMEM_CHECKPOINT_BODY std::string checkpointer_core::wait_for_turn(std::unique_lock<std::mutex>& lock) {
  if (jobs_.size() < options_.max_pending) return {};
  std::string still = std::to_string(jobs_.size()) + " snapshots before it are still being written";
  if (options_.busy == when_busy::skip) return still;
  const std::uint64_t began = monotonic_ns();
  const std::uint64_t until = options_.max_stall_ns > commit_ticket::forever - began
                                  ? commit_ticket::forever
                                  : began + options_.max_stall_ns;
  while (jobs_.size() >= options_.max_pending && monotonic_ns() < until)
    pump(lock, until);
  stats_.stall_ns += monotonic_ns() - began;
  return jobs_.size() < options_.max_pending ? std::string() : still + ", for longer than max_stall_ns";
}

LLMMEM_CHECKPOINT_BODY bool checkpointer_core::flush(std::uint64_t limit_ns) {
  const std::uint64_t now = monotonic_ns();
  const std::uint64_t until =
      limit_ns > commit_ticket::forever - now ? commit_ticket::forever : now + limit_ns;
  std::unique_lock lock(mutex_);
  while (!jobs_.empty() && monotonic_ns() < until)
    pump(lock, until);
  return jobs_.empty();
}

LLMMEM_CHECKPOINT_BODY checkpointer_stats checkpointer_core::stats() const {
  const std::scoped_lock lock(mutex_);
  checkpointer_stats now = stats_;
  now.stall_ns += gate_.waited_ns();
  return now;
}

LLMMEM_CHECKPOINT_BODY checkpoint_progress checkpointer_core::progress() const {
  const std::scoped_lock lock(mutex_);
  if (jobs_.empty()) return {};
  const job& oldest = *jobs_.front();
  return {oldest.record->step, oldest.bytes, oldest.staged, oldest.persisted};
}

// --- from the state

/// Returns the oldest snapshot that has not been read.
LLMMEM_CHECKPOINT_BODY auto checkpointer_core::unstaged() noexcept -> job* {
  const auto found = std::ranges::find_if(jobs_, [](const auto& each) { return !each->is_staged; });
  return found == jobs_.end() ? nullptr : found->get();
}

/// Returns that snapshot once it can be staged. An incremental save must know the outcome of the previous
/// checkpoint; an abandoned snapshot need not wait for that.
LLMMEM_CHECKPOINT_BODY auto checkpointer_core::stageable() noexcept -> job* {
  job* const next = unstaged();
  return next != nullptr && (next->may_stage || next->is_over) ? next : nullptr;
}

LLMMEM_CHECKPOINT_BODY void checkpointer_core::run_stager() {
  block_write_signals();
  std::unique_lock lock(mutex_);
  while (!ends_) {
    job* const next = stageable();
    if (next == nullptr || !stage_some(*next, lock)) changed_.wait(lock);
  }
}

/// Copies a chunk, with the lock released. Does nothing if there is no space.
LLMMEM_CHECKPOINT_BODY bool checkpointer_core::stage_some(job& of, std::unique_lock<std::mutex>& lock) {
  if (of.is_over || of.file == of.files.size()) {  // it is abandoned, or this rank has no bytes
    end_staging(of, lock, {});
    return true;
  }
  const planned_file& file = *of.files[of.file];
  const std::uint64_t bytes = std::min(options_.chunk_bytes, file.bytes - of.begin);
  if (of.base != nullptr && of.file < plan_.files.size()) {
    lock.unlock();
    const bool unchanged = is_unchanged(of, file, of.begin, bytes);
    lock.lock();
    if (unchanged) {
      if (filled_.empty() || filled_.back().unchanged == 0) filled_.push_back({});
      filled_.back().unchanged += 1;
      pass(of, bytes);
      if (of.file == of.files.size()) end_staging(of, lock, {});
      changed_.notify_all();
      return true;
    }
  }
  if (free_.empty()) return false;
  const std::size_t at = free_.back();
  free_.pop_back();
  stats_.staging_bytes += options_.chunk_bytes;
  stats_.staging_peak = std::max(stats_.staging_peak, stats_.staging_bytes);
  lock.unlock();
  const auto began = monotonic_ns();
  std::string why;
  try {
    fill(of, file, of.begin, slot(at).first(static_cast<std::size_t>(bytes)));
  } catch (const std::exception& error) {
    why = reason("the state could not be copied: ", error.what());
  } catch (...) {
    why = reason("the state could not be copied");
  }
  const std::uint64_t took = monotonic_ns() - began;
  lock.lock();
  stats_.stage_ns += took;
  filled_.push_back({at, bytes, false, 0});
  stats_.staged_bytes += bytes;
  pass(of, bytes);
  if (!why.empty() || of.file == of.files.size()) end_staging(of, lock, std::move(why));
  if (!is_hurried()) changed_.notify_all();
  return true;
}

/// Returns whether a caller waits for a snapshot to be staged, and there is space for the rest of it. If so,
/// the writer thread pauses, because its checksums and wake-ups would take processor time and memory
/// bandwidth from the copy.
LLMMEM_CHECKPOINT_BODY bool checkpointer_core::is_hurried() noexcept {
  const job* const staging = stageable();
  return staging != nullptr && staging->stall_began != 0 && !staging->is_over && !free_.empty() &&
         staging->bytes - staging->staged <= free_.size() * options_.chunk_bytes;
}

/// Returns whether the view reports a chunk as unchanged since the checkpoint that this one refers to. If the
/// view throws, it throws again when the chunk is copied, and that is reported.
LLMMEM_CHECKPOINT_BODY bool checkpointer_core::is_unchanged(const job& of, const planned_file& file,
                                                            std::uint64_t begin, std::uint64_t bytes) const {
  if (!policies_.tracks_changes) return false;
  try {
    bool unchanged = true;
    each_span(
        file, begin, begin + bytes, [&](const planned_span& span, std::uint64_t first, std::uint64_t last) {
          unchanged =
              unchanged && of.view->is_unchanged_since(of.base->version, span.tensor,
                                                       span.offset + (first - span.begin), last - first);
        });
    return unchanged;
  } catch (...) {
    return false;
  }
}

/// Advances staging past these bytes.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::pass(job& of, std::uint64_t bytes) {
  of.staged += bytes;
  of.begin += bytes;
  if (of.begin == of.files[of.file]->bytes) {
    of.begin = 0;
    ++of.file;
  }
}

/// Fills in the bytes of a file from `begin` on: its head, and bytes of the state.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::fill(job& of, const planned_file& file, std::uint64_t begin,
                                                    std::span<std::byte> into) {
  const std::uint64_t end = begin + into.size();
  if (begin < file.head.size()) {
    const std::uint64_t bytes = std::min<std::uint64_t>(file.head.size(), end) - begin;
    std::memcpy(into.data(), file.head.data() + begin, static_cast<std::size_t>(bytes));
  }
  each_span(file, begin, end, [&](const planned_span& span, std::uint64_t first, std::uint64_t last) {
    of.view->copy_out(
        span.tensor, span.offset + (first - span.begin),
        into.subspan(static_cast<std::size_t>(first - begin), static_cast<std::size_t>(last - first)));
  });
}

/// @pre the lock is held.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::end_staging(job& of, std::unique_lock<std::mutex>& lock,
                                                           std::string why) {
  lock.unlock();
  of.view.reset();  // before the state is released, because its owner may then destroy the view's memory
  lock.lock();
  of.is_staged = true;
  if (of.why.empty()) of.why = std::move(why);
  {
    const std::scoped_lock of_ticket(of.record->mutex);
    of.record->stage = nullptr;
  }
  // Otherwise its entries follow those of the previous snapshot.
  if (of.may_stage) filled_.push_back({0, 0, true, 0});
  (of.reading == nullptr ? gate_ : *of.reading).thaw();
  changed_.notify_all();
}

LLMMEM_CHECKPOINT_BODY bool checkpointer_core::stage_for(std::uint64_t limit_ns) {
  std::unique_lock lock(mutex_);
  if (!policies_.is_concurrent) {
    const std::uint64_t began = monotonic_ns();
    job* next = stageable();
    while (next != nullptr && monotonic_ns() - began < limit_ns && stage_some(*next, lock))
      next = stageable();
  }
  return unstaged() == nullptr;
}

/// Copies on a caller's thread while that caller waits.
/// @param until  the end of the wait, in clock time.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::pump(std::unique_lock<std::mutex>& lock, std::uint64_t until) {
  if (!policies_.is_concurrent) {
    job* const next = stageable();
    if (next != nullptr && stage_some(*next, lock)) return;
  }
  const std::uint64_t now = monotonic_ns();
  constexpr auto day_ns = std::uint64_t{86'400'000'000'000};
  const std::uint64_t left = until < now ? 0 : std::min(until - now, day_ns);
  changed_.wait_for(lock, std::chrono::nanoseconds(static_cast<std::int64_t>(left)));
}

/// For the gate: waits, for a limited time, until a snapshot is staged.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::hold_up(std::uint64_t until) {
  std::unique_lock lock(mutex_);
  job* const staging = unstaged();
  if (staging == nullptr) return;
  const std::uint64_t now = monotonic_ns();
  if (staging->stall_began == 0) staging->stall_began = now;
  const std::uint64_t stalled = staging->stalled + (now - staging->stall_began);
  const bool is_too_long = stalled >= options_.max_stall_ns;
  if (is_too_long && !staging->is_over) {
    staging->is_over = true;
    staging->why = reason("it stalled the training for longer than max_stall_ns");
    changed_.notify_all();
  }
  const std::uint64_t left = is_too_long ? commit_ticket::forever : options_.max_stall_ns - stalled;
  pump(lock, std::min(until, left > commit_ticket::forever - now ? commit_ticket::forever : now + left));
  const std::uint64_t after = monotonic_ns();
  if (after < until || unstaged() != staging) return;
  // A caller whose wait has ended is no longer stalled, so the writer thread need not pause for it.
  staging->stalled += after - staging->stall_began;
  staging->stall_began = 0;
  changed_.notify_all();
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem

#include <llmmem/checkpoint/detail/async_checkpointer_persist.hpp>
