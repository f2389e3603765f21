/// @file
/// The two halves of `async_checkpointer`: out of the state into the ring, and from there to the storage.
#pragma once

#include <llmmem/async_checkpointer.hpp>
#include <llmmem/transfer/crc32c.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

namespace llmmem::inline v0 {

/// A snapshot that is pending. What is below the line is under the mutex.
template <class Traits>
struct async_checkpointer<Traits>::job {
  job(std::uint64_t step, view_type of_state, file_plan beside)
      : view(std::move(of_state)),
        extras(std::move(beside)),
        record(std::make_shared<detail::commit_record>(step)) {}

  std::optional<view_type> view;  // until it is staged
  file_plan extras;
  std::shared_ptr<detail::commit_record> record;
  std::shared_ptr<snapshot_gate> reading{};  // what the guard of a stable view asks; else null
  std::vector<const planned_file*> files{};
  std::uint64_t bytes = 0;
  std::uint64_t began_to_persist = 0;  // by the clock, in ns
  //
  std::size_t file = 0;  // where staging is
  std::uint64_t begin = 0;
  std::uint64_t staged = 0;
  std::uint64_t persisted = 0;
  bool is_staged = false;         // or given up
  bool is_drained = false;        // all that was staged has been taken
  bool is_over = false;           // what is staged is of no use any more
  std::string why{};              // it was given up
  std::uint64_t stall_began = 0;  // likewise; 0: nobody waits for it yet
};

template <class Traits>
checkpointer_options async_checkpointer<Traits>::checked(checkpointer_options options) {
  const auto wrong = [&](const std::string& why) { throw length_error(options.name + ": " + why); };
  if (options.chunk_bytes == 0 || options.chunk_bytes > max_checkpoint_chunk) {
    wrong("chunks of " + std::to_string(options.chunk_bytes) + " bytes; they have 1 to " +
          std::to_string(max_checkpoint_chunk));
  }
  if (options.ring_bytes / 2 < options.chunk_bytes) {
    wrong("a ring of " + std::to_string(options.ring_bytes) + " bytes for chunks of " +
          std::to_string(options.chunk_bytes) + "; it needs room for two of them");
  }
  if (options.max_pending == 0 || options.max_pending > 1024)
    wrong("max_pending is " + std::to_string(options.max_pending) + "; it may be 1 to 1024");
  return options;
}

template <class Traits>
async_checkpointer<Traits>::async_checkpointer(coordinator_type& coordinator,
                                               std::vector<state_tensor> tensors,
                                               checkpointer_options options, observer_type observer)
    : coordinator_(&coordinator),
      options_(checked(std::move(options))),
      observer_(std::move(observer)),
      plan_(plan_files(tensors, {.max_shard_bytes = options_.max_shard_bytes,
                                 .rank = coordinator.rank(),
                                 .world = coordinator.world()})),
      space_({.budget = options_.ring_bytes, .name = options_.name + " ring"}) {
  if (options_.busy == when_busy::skip && coordinator.world() > 1) {
    throw argument_error(options_.name + ": when_busy::skip with " + std::to_string(coordinator.world()) +
                         " ranks: one that skips would leave the others waiting; take when_busy::wait");
  }
  std::uint64_t chunks = 2;  // for extras
  for (const planned_file& each : plan_.files)
    chunks += detail::chunks_in(each.bytes, options_.chunk_bytes);
  const std::uint64_t slots = std::min(options_.ring_bytes / options_.chunk_bytes, chunks);
  ring_ = {space_, slots * options_.chunk_bytes, detail::aligned_bytes::alignment};
  std::memset(ring_.range().data, 0, ring_.range().bytes);  // now, not in the first snapshot
  for (auto i = static_cast<std::size_t>(slots); i-- > 0;)
    free_.push_back(i);
  stats_.ring_bytes = slots * options_.chunk_bytes;
  filled_.reserve(static_cast<std::size_t>(slots) + options_.max_pending);
  start();
}

template <class Traits>
void async_checkpointer<Traits>::start() {
  persister_ = std::thread([this] { run_persister(); });
  if constexpr (view_type::is_concurrent) {
    try {
      stager_ = std::thread([this] { run_stager(); });
    } catch (...) {
      stop();
      throw;
    }
  }
}

/// @pre nothing is pending.
template <class Traits>
void async_checkpointer<Traits>::stop() {
  {
    const std::scoped_lock lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  persister_.join();
  if (stager_.joinable()) stager_.join();
}

template <class Traits>
async_checkpointer<Traits>::~async_checkpointer() {
  flush();
  stop();
}

template <class Traits>
std::span<std::byte> async_checkpointer<Traits>::slot(std::size_t at) noexcept {
  const auto bytes = static_cast<std::size_t>(options_.chunk_bytes);
  return {ring_.range().data + at * bytes, bytes};
}

template <class Traits>
snapshot_guard async_checkpointer<Traits>::begin_snapshot(std::uint64_t step, view_type view,
                                                          std::vector<checkpoint_extra> extras) {
  const file_plan_options placed{.rank = coordinator_->rank(), .world = coordinator_->world()};
  auto made = std::make_unique<job>(step, std::move(view), plan_extras(extras, placed));
  for (const planned_file& each : plan_.files)
    made->files.push_back(&each);
  for (const planned_file& each : made->extras.files)
    made->files.push_back(&each);
  made->bytes = plan_.bytes + made->extras.bytes;
  if constexpr (!view_type::is_concurrent) {
    made->record->stage = [](void* self, std::uint64_t until) {
      static_cast<async_checkpointer*>(self)->hold_up(until);
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
  jobs_.reserve(jobs_.size() + 1);  // what can fail comes before the state is held
  const std::shared_ptr<snapshot_gate> reading = hold();
  made->reading = reading;
  ++stats_.begun;
  jobs_.push_back(std::move(made));
  changed_.notify_all();
  return {gate_, std::move(ticket), reading};
}

/// Holds the state for a snapshot that begins. For a stable view that is only the question whether it may:
/// then a gate of its own says when it has been read.
template <class Traits>
std::shared_ptr<snapshot_gate> async_checkpointer<Traits>::hold() {
  std::shared_ptr<snapshot_gate> reading;
  if constexpr (is_stable_view<view_type>) {
    reading = std::make_shared<snapshot_gate>();
    reading->freeze(
        [](void* of) {
          auto* const self = static_cast<async_checkpointer*>(of);
          const std::uint64_t began = detail::monotonic_ns();
          self->hold_up(commit_ticket::forever);
          const std::scoped_lock lock(self->mutex_);
          self->stats_.stall_ns += detail::monotonic_ns() - began;
        },
        this);
    gate_.freeze();
    gate_.thaw();
  } else {
    gate_.freeze([](void* of) { static_cast<async_checkpointer*>(of)->hold_up(commit_ticket::forever); },
                 this);
  }
  return reading;
}

/// Why a snapshot cannot begin now, or nothing once it can.
template <class Traits>
std::string async_checkpointer<Traits>::wait_for_turn(std::unique_lock<std::mutex>& lock) {
  if (jobs_.size() < options_.max_pending) return {};
  std::string still = std::to_string(jobs_.size()) + " snapshots before it are still being written";
  if (options_.busy == when_busy::skip) return still;
  const std::uint64_t began = detail::monotonic_ns();
  const std::uint64_t until = options_.max_stall_ns > commit_ticket::forever - began
                                  ? commit_ticket::forever
                                  : began + options_.max_stall_ns;
  while (jobs_.size() >= options_.max_pending && detail::monotonic_ns() < until)
    pump(lock, until);
  stats_.stall_ns += detail::monotonic_ns() - began;
  return jobs_.size() < options_.max_pending ? std::string() : still + ", for longer than max_stall_ns";
}

template <class Traits>
bool async_checkpointer<Traits>::flush(std::uint64_t most_ns) {
  const std::uint64_t now = detail::monotonic_ns();
  const std::uint64_t until = most_ns > commit_ticket::forever - now ? commit_ticket::forever : now + most_ns;
  std::unique_lock lock(mutex_);
  while (!jobs_.empty() && detail::monotonic_ns() < until)
    pump(lock, until);
  return jobs_.empty();
}

template <class Traits>
checkpointer_stats async_checkpointer<Traits>::stats() const {
  const std::scoped_lock lock(mutex_);
  checkpointer_stats now = stats_;
  now.stall_ns += gate_.waited_ns();
  return now;
}

template <class Traits>
checkpoint_progress async_checkpointer<Traits>::progress() const {
  const std::scoped_lock lock(mutex_);
  if (jobs_.empty()) return {};
  const job& oldest = *jobs_.front();
  return {oldest.record->step, oldest.bytes, oldest.staged, oldest.persisted};
}

// --- out of the state

template <class Traits>
auto async_checkpointer<Traits>::unstaged() noexcept -> job* {
  for (const std::unique_ptr<job>& each : jobs_) {
    if (!each->is_staged) return each.get();
  }
  return nullptr;
}

template <class Traits>
void async_checkpointer<Traits>::run_stager() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    job* const next = unstaged();
    if (next == nullptr || !stage_some(*next, lock)) changed_.wait(lock);
  }
}

/// Copies a chunk, without the lock. Nothing when there is no room for it.
template <class Traits>
bool async_checkpointer<Traits>::stage_some(job& of, std::unique_lock<std::mutex>& lock) {
  if (of.is_over || of.file == of.files.size()) {  // given up; or a rank that has nothing
    end_staging(of, lock, {});
    return true;
  }
  if (free_.empty()) return false;
  const std::size_t at = free_.back();
  free_.pop_back();
  const planned_file& file = *of.files[of.file];
  const std::uint64_t bytes = std::min(options_.chunk_bytes, file.bytes - of.begin);
  stats_.staging_bytes += options_.chunk_bytes;
  stats_.staging_peak = std::max(stats_.staging_peak, stats_.staging_bytes);
  lock.unlock();
  const auto began = detail::monotonic_ns();
  std::string why;
  try {
    fill(of, file, of.begin, slot(at).first(static_cast<std::size_t>(bytes)));
  } catch (const std::exception& error) {
    why = std::string("the state could not be copied: ") + error.what();
  } catch (...) {
    why = "the state could not be copied";
  }
  const std::uint64_t took = detail::monotonic_ns() - began;
  lock.lock();
  stats_.stage_ns += took;
  filled_.push_back({at, bytes, false});
  stats_.staged_bytes += bytes;
  of.staged += bytes;
  of.begin += bytes;
  if (of.begin == file.bytes) {
    of.begin = 0;
    ++of.file;
  }
  if (!why.empty() || of.file == of.files.size()) end_staging(of, lock, std::move(why));
  changed_.notify_all();
  return true;
}

/// The bytes of a file from `begin` on: its head, and what the state has.
template <class Traits>
void async_checkpointer<Traits>::fill(job& of, const planned_file& file, std::uint64_t begin,
                                      std::span<std::byte> into) {
  const std::uint64_t end = begin + into.size();
  if (begin < file.head.size()) {
    const std::uint64_t bytes = std::min<std::uint64_t>(file.head.size(), end) - begin;
    std::memcpy(into.data(), file.head.data() + begin, static_cast<std::size_t>(bytes));
  }
  auto span = std::partition_point(file.spans.begin(), file.spans.end(), [&](const planned_span& each) {
    return each.begin + each.bytes <= begin;
  });
  for (; span != file.spans.end() && span->begin < end; ++span) {
    const std::uint64_t first = std::max(begin, span->begin);
    const std::uint64_t last = std::min(end, span->begin + span->bytes);
    of.view->copy_out(
        span->tensor, span->offset + (first - span->begin),
        into.subspan(static_cast<std::size_t>(first - begin), static_cast<std::size_t>(last - first)));
  }
}

/// @pre the lock is held.
template <class Traits>
void async_checkpointer<Traits>::end_staging(job& of, std::unique_lock<std::mutex>& lock, std::string why) {
  lock.unlock();
  of.view.reset();  // before the state is free: what a view holds on to may go with it
  lock.lock();
  of.is_staged = true;
  if (of.why.empty()) of.why = std::move(why);
  {
    const std::scoped_lock of_ticket(of.record->mutex);
    of.record->stage = nullptr;
  }
  filled_.push_back({0, 0, true});
  (of.reading == nullptr ? gate_ : *of.reading).thaw();
  changed_.notify_all();
}

template <class Traits>
bool async_checkpointer<Traits>::stage_for(std::uint64_t most_ns) {
  std::unique_lock lock(mutex_);
  if constexpr (!view_type::is_concurrent) {
    const std::uint64_t began = detail::monotonic_ns();
    job* next = unstaged();
    while (next != nullptr && detail::monotonic_ns() - began < most_ns && stage_some(*next, lock))
      next = unstaged();
  }
  return unstaged() == nullptr;
}

/// What a thread of the caller's does while it waits.
/// @param until  by the clock, when it waits no longer.
template <class Traits>
void async_checkpointer<Traits>::pump(std::unique_lock<std::mutex>& lock, std::uint64_t until) {
  if constexpr (!view_type::is_concurrent) {
    job* const next = unstaged();
    if (next != nullptr && stage_some(*next, lock)) return;
  }
  const std::uint64_t now = detail::monotonic_ns();
  constexpr auto day_ns = std::uint64_t{86'400'000'000'000};
  const std::uint64_t left = until < now ? 0 : std::min(until - now, day_ns);
  changed_.wait_for(lock, std::chrono::nanoseconds(static_cast<std::int64_t>(left)));
}

/// Waits, on behalf of the gate, for a snapshot to be staged; not for ever.
template <class Traits>
void async_checkpointer<Traits>::hold_up(std::uint64_t until) {
  std::unique_lock lock(mutex_);
  job* const staging = unstaged();
  if (staging == nullptr) return;
  const std::uint64_t now = detail::monotonic_ns();
  if (staging->stall_began == 0) staging->stall_began = now;
  const bool is_too_long = now - staging->stall_began >= options_.max_stall_ns;
  if (is_too_long && !staging->is_over) {
    staging->is_over = true;
    staging->why = "it held the training up for longer than max_stall_ns";
    changed_.notify_all();
  }
  const bool can_be_late = is_too_long || options_.max_stall_ns > commit_ticket::forever - now;
  const std::uint64_t give_up =
      can_be_late ? commit_ticket::forever : staging->stall_began + options_.max_stall_ns;
  pump(lock, std::min(until, give_up));
}

// --- to the storage

template <class Traits>
void async_checkpointer<Traits>::run_persister() {
  std::unique_lock lock(mutex_);
  for (;;) {
    while (jobs_.empty() && !ends_)
      changed_.wait(lock);
    if (jobs_.empty()) return;
    job& next = *jobs_.front();
    lock.unlock();
    persist(next);
    lock.lock();
    std::unique_ptr<job> over = std::move(jobs_.front());
    jobs_.erase(jobs_.begin());
    changed_.notify_all();
    lock.unlock();  // nothing of it goes under the lock
    over.reset();
    lock.lock();
  }
}

template <class Traits>
void async_checkpointer<Traits>::persist(job& of) {
  std::optional<checkpoint_draft> draft;
  commit_status how = commit_status::not_committed;
  std::string why;
  try {
    draft = coordinator_->begin(of.record->step);
    {
      const std::scoped_lock lock(of.record->mutex);
      of.record->generation = draft->id.generation;
    }
    const checkpoint_manifest part = write_files(of, *draft);
    coordinator_->commit(*draft, part);
    how = commit_status::committed;
  } catch (const durability_uncertain& error) {
    how = commit_status::durability_uncertain;
    why = error.what();
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "an exception that is none of the standard library's";
  }
  conclude(of, how, why);
  if (how == commit_status::not_committed) {
    drain(of);
    if (draft) coordinator_->abandon(*draft);
  }
  // After a failure, too: on a full disk what is superfluous is in the way of the next one.
  const std::string trouble = tidy();
  if (trouble.empty() || how == commit_status::not_committed) return;
  const std::scoped_lock lock(mutex_);
  stats_.last_trouble = trouble;
}

/// What goes wrong here does not undo a commit.
template <class Traits>
std::string async_checkpointer<Traits>::tidy() {
  try {
    return coordinator_->tidy();
  } catch (...) {
    return "tidying ended with an exception that is none of the library's";
  }
}

template <class Traits>
void async_checkpointer<Traits>::conclude(job& of, commit_status how, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    of.is_over = true;
    if (how == commit_status::committed) {
      ++stats_.committed;
      stats_.last_step = of.record->step;
      stats_.last_generation = of.record->generation;
      stats_.persist_ns += detail::monotonic_ns() - of.began_to_persist;
      stats_.persisted_bytes += of.bytes;
    } else {
      ++(how == commit_status::not_committed ? stats_.failed : stats_.uncertain);
      stats_.last_trouble = why;
    }
    changed_.notify_all();
  }
  of.record->settle(how, why);
  const std::scoped_lock one_at_a_time(observer_mutex_);
  try {
    observer_.settled(commit_ticket(of.record));
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    stats_.last_trouble = "the observer threw";
  }
}

template <class Traits>
checkpoint_manifest async_checkpointer<Traits>::write_files(job& of, const checkpoint_draft& draft) {
  checkpoint_manifest part{.generation = draft.id.generation,
                           .step = draft.id.step,
                           .world = coordinator_->world(),
                           .chunk_bytes = options_.chunk_bytes,
                           .files = {},
                           .tensors = plan_.tensors};
  of.began_to_persist = detail::monotonic_ns();
  for (const planned_file* each : of.files)
    part.files.push_back(write_file(of, draft, *each));
  if (!take(of).is_end) throw argument_error(options_.name + ": more was staged than was planned");
  check_given_up(of);
  const auto of_state = static_cast<std::uint32_t>(plan_.files.size());
  for (checkpoint_tensor each : of.extras.tensors) {
    for (checkpoint_piece& piece : each.pieces)
      piece.file += of_state;
    part.tensors.push_back(std::move(each));
  }
  return part;
}

template <class Traits>
checkpoint_file async_checkpointer<Traits>::write_file(job& of, const checkpoint_draft& draft,
                                                       const planned_file& file) {
  using token = typename storage_type::output::write_token;
  struct in_flight {
    std::size_t slot;
    token written;
  };
  // Slots go back after the file is closed, which waits for what is being written from them.
  struct lent_slots {
    async_checkpointer* self;
    std::vector<std::size_t> slots{};
    ~lent_slots() { self->release(slots); }
  } lent{this};
  const std::size_t depth =
      std::clamp<std::size_t>(static_cast<std::size_t>(stats_.ring_bytes / options_.chunk_bytes / 2), 1, 8);
  auto output = coordinator_->storage().create(draft.path(file.name), file.bytes);
  std::vector<in_flight> writes;
  writes.reserve(depth);
  lent.slots.reserve(depth + 1);
  const auto finish_oldest = [&] {
    const in_flight oldest = writes.front();
    writes.erase(writes.begin());
    output.finish_write(oldest.written);
    lent.slots.erase(std::find(lent.slots.begin(), lent.slots.end(), oldest.slot));
    release({&oldest.slot, 1});
  };
  checkpoint_file made{file.name, file.bytes, coordinator_->rank(), 0, {}};
  for (std::uint64_t begin = 0; begin < file.bytes;) {
    while (!writes.empty() && (writes.size() >= depth || !has_filled()))
      finish_oldest();
    const filled_chunk chunk = take(of);
    if (chunk.is_end) check_given_up(of);
    lent.slots.push_back(chunk.slot);
    const std::span<const std::byte> bytes = slot(chunk.slot).first(static_cast<std::size_t>(chunk.bytes));
    made.chunks.push_back(crc32c(0, bytes));
    writes.push_back({chunk.slot, output.begin_write(begin, bytes)});
    begin += chunk.bytes;
    const std::scoped_lock lock(mutex_);
    of.persisted += chunk.bytes;
  }
  while (!writes.empty())
    finish_oldest();
  output.sync();
  made.crc32c = detail::combined_crc32c(made, options_.chunk_bytes);
  return made;
}

/// Once its end has been taken.
template <class Traits>
void async_checkpointer<Traits>::check_given_up(const job& of) const {
  const std::scoped_lock lock(mutex_);
  if (of.why.empty()) return;
  throw io_error(options_.name + ": step " + std::to_string(of.record->step) + " was given up: " + of.why);
}

template <class Traits>
bool async_checkpointer<Traits>::has_filled() const {
  const std::scoped_lock lock(mutex_);
  return !filled_.empty();
}

template <class Traits>
auto async_checkpointer<Traits>::take(job& of) -> filled_chunk {
  std::unique_lock lock(mutex_);
  while (filled_.empty())
    changed_.wait(lock);
  const filled_chunk next = filled_.front();
  filled_.erase(filled_.begin());
  of.is_drained = next.is_end;
  return next;
}

template <class Traits>
void async_checkpointer<Traits>::release(std::span<const std::size_t> slots) {
  const std::scoped_lock lock(mutex_);
  free_.insert(free_.end(), slots.begin(), slots.end());
  stats_.staging_bytes -= slots.size() * options_.chunk_bytes;
  changed_.notify_all();
}

/// What was staged of a snapshot that failed, and may still be until its staging has noticed.
template <class Traits>
void async_checkpointer<Traits>::drain(job& of) {
  while (!of.is_drained) {
    const filled_chunk next = take(of);
    if (!next.is_end) release({&next.slot, 1});
  }
}

}  // namespace llmmem::inline v0
