/// @file
/// The second half of `async_checkpointer`: from the ring to the storage.
#pragma once

#include <llmmem/checkpoint/detail/async_checkpointer_body.hpp>  // for `job`
#include <llmmem/checkpoint/detail/bodies.hpp>
#include <llmmem/checkpoint/detail/checkpointer_core.hpp>
#include <llmmem/checkpoint/detail/incremental.hpp>
#include <llmmem/checkpoint/detail/reason.hpp>
#include <llmmem/detail/named_range.hpp>
#include <llmmem/detail/write_signals.hpp>
#include <llmmem/hash/crc32c.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

namespace llmmem {
inline namespace v0 {
namespace detail {

LLMMEM_CHECKPOINT_BODY void checkpointer_core::run_persister() {
  block_write_signals();
  std::unique_lock lock(mutex_);
  for (;;) {
    while (jobs_.empty() && !ends_)
      changed_.wait(lock);
    if (jobs_.empty()) return;
    job& next = *jobs_.front();
    const bool is_complete = committed_ == nullptr || committed_->since_whole >= options_.full_every;
    if (!is_complete) next.base = committed_;
    if (next.is_staged && !next.may_stage) filled_.push_back({0, 0, true, 0});
    next.may_stage = true;
    changed_.notify_all();
    lock.unlock();
    persist(next);
    lock.lock();
    std::unique_ptr<job> over = std::move(jobs_.front());
    jobs_.erase(jobs_.begin());
    changed_.notify_all();
    lock.unlock();  // the job is destroyed without the lock
    over.reset();
    lock.lock();
  }
}

LLMMEM_CHECKPOINT_BODY void checkpointer_core::persist(job& of) {
  const detail::named_range range("checkpoint persist");
  std::optional<checkpoint_draft> draft;
  commit_status how = commit_status::not_committed;
  std::string why;
  try {
    draft = coordinator_.begin(of.record->step);
    {
      const std::scoped_lock lock(of.record->mutex);
      of.record->generation = draft->id.generation;
    }
    checkpoint_manifest part = write_files(of, *draft);
    coordinator_.commit(*draft, part);
    how = commit_status::committed;
    if (options_.full_every > 1) remember(of, std::move(part));
  } catch (const durability_uncertain& error) {
    how = commit_status::durability_uncertain;
    why = reason_of(error);
  } catch (const std::exception& error) {
    why = reason_of(error);
  } catch (...) {
    why = reason("an exception that is not from the standard library");
  }
  if (how == commit_status::not_committed) committed_.reset();  // because the base may be the reason
  if (how == commit_status::not_committed && draft) {
    give_up(of);  // at once, because the next steps may take long
    if (const std::string before = coordinator_.abandon(*draft, why); !before.empty())
      why = reason(before, reason("; here: ", why));
  }
  conclude(of, how, std::move(why));
  if (how == commit_status::not_committed) drain(of);
  // Also after a failure: on a full disk, checkpoints that are due for removal prevent the next one.
  const std::string trouble = tidy();
  if (trouble.empty() || how == commit_status::not_committed) return;
  const std::scoped_lock lock(mutex_);
  note_trouble(trouble);
}

/// @pre the lock is held.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::note_trouble(std::string_view what) noexcept {
  stats_.last_error = reason(what);
}

/// Stops the staging of a snapshot.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::give_up(job& of) {
  const std::scoped_lock lock(mutex_);
  of.is_over = true;
  changed_.notify_all();
}

/// Tidies after a commit; a problem here does not undo the commit.
LLMMEM_CHECKPOINT_BODY std::string checkpointer_core::tidy() noexcept {
  try {
    return coordinator_.tidy();
  } catch (const std::exception& error) {
    return reason_of(error);
  } catch (...) {
    return reason("tidying ended with an exception that is not from the standard library");
  }
}

LLMMEM_CHECKPOINT_BODY void checkpointer_core::conclude(job& of, commit_status how, std::string why) {
  {
    const std::scoped_lock lock(mutex_);
    of.is_over = true;
    if (how == commit_status::committed) {
      ++stats_.committed;
      stats_.last_step = of.record->step;
      stats_.last_generation = of.record->generation;
      stats_.persist_ns += monotonic_ns() - of.began_to_persist;
      stats_.persisted_bytes += of.written;
      stats_.unchanged_bytes += of.bytes - of.written;
    } else {
      ++(how == commit_status::not_committed ? stats_.failed : stats_.uncertain);
      note_trouble(why);
    }
    changed_.notify_all();
  }
  of.record->settle(how, std::move(why));
  const std::scoped_lock one_at_a_time(observer_mutex_);
  try {
    policies_.settled(policies_.observer, commit_ticket(of.record));
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    note_trouble("the observer threw");
  }
}

/// Records the part that the next checkpoint may refer to. A failure here must not lose this checkpoint.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::remember(job& of, checkpoint_manifest part) {
  try {
    auto made = std::make_shared<committed_part>();
    made->since_whole = of.base == nullptr ? 1 : of.base->since_whole + 1;
    made->version = of.version;
    made->part = std::move(part);
    made->part.tensors.clear();
    made->digests = std::move(of.digests);
    committed_ = std::move(made);
  } catch (const std::bad_alloc&) {
    committed_.reset();
  }
}

/// Writes a file of a checkpoint: all chunks, or only the changed ones to a separate file.
class checkpointer_core::file_writer {
 public:
  file_writer(checkpointer_core& self, job& of, const checkpoint_draft& draft, checkpoint_manifest& part,
              std::size_t number)
      : self_(&self),
        of_(&of),
        draft_(&draft),
        file_(of.files[number]),
        made_{file_->name, file_->bytes, self.coordinator_.rank(), 0, {}, {}},
        runs_(part, made_),
        part_(&part),
        own_{draft.id.generation, draft.id.step, changes_name(file_->name), 0},
        depth_(std::clamp<std::size_t>(
            static_cast<std::size_t>(self.stats_.ring_bytes / self.options_.chunk_bytes / 2), 1, 8)) {
    const bool is_of_state = number < self.plan_.files.size();
    keeps_digests_ = self.policies_.has_digest && is_of_state && self.options_.full_every > 1;
    if (is_of_state && of.base != nullptr) {
      base_ = &of.base->part.files[number];
      if (self.policies_.has_digest) base_digests_ = of.base->digests[number];
    }
    writes_.reserve(depth_);
    lent_.reserve(depth_ + 1);
  }
  file_writer(const file_writer&) = delete;
  file_writer& operator=(const file_writer&) = delete;
  /// Releases slots after the file is closed, which waits for writes from them.
  ~file_writer() {
    output_.reset();
    self_->release(lent_);
  }

  [[nodiscard]] checkpoint_file write() {
    if (base_ == nullptr) output_.emplace(create(file_->name, file_->bytes));
    for (std::uint64_t begin = 0; begin < file_->bytes;) {
      while (!writes_.empty() && (writes_.size() >= depth_ || !self_->has_filled()))
        finish_oldest();
      const std::uint64_t bytes = std::min(self_->options_.chunk_bytes, file_->bytes - begin);
      const filled_chunk chunk = self_->take(*of_);
      if (chunk.is_end) self_->check_given_up(*of_);
      if (chunk.unchanged != 0) {
        refer();
      } else {
        lent_.push_back(chunk.slot);
        put(chunk, begin);
      }
      begin += bytes;
      const std::scoped_lock lock(self_->mutex_);
      of_->persisted += bytes;
    }
    while (!writes_.empty())
      finish_oldest();
    if (output_) output_->sync();
    made_.crc32c = combined_crc32c(made_, self_->options_.chunk_bytes);
    if (base_ != nullptr) settle_runs();
    if (keeps_digests_) of_->digests.push_back(std::move(digests_));
    return std::move(made_);
  }

 private:
  using output_type = storage_ref::output;
  struct in_flight {
    std::size_t slot;
    output_type::write_token written;
  };

  [[nodiscard]] output_type create(const std::string& name, std::uint64_t bytes) {
    return self_->coordinator_.storage().create(draft_->path(name), bytes);
  }

  void finish_oldest() {
    const in_flight oldest = writes_.front();
    writes_.erase(writes_.begin());
    output_->finish_write(oldest.written);
    give_back(oldest.slot);
  }
  void give_back(std::size_t slot) {
    lent_.erase(std::ranges::find(lent_, slot));
    self_->release({&slot, 1});
  }

  /// Writes a copied chunk, unless it is found unchanged.
  void put(const filled_chunk& chunk, std::uint64_t begin) {
    const std::span<const std::byte> bytes =
        self_->slot(chunk.slot).first(static_cast<std::size_t>(chunk.bytes));
    const std::uint32_t sum = crc32c(0, bytes);
    const std::size_t number = made_.chunks.size();
    if (keeps_digests_) {
      const chunk_digest_value digest = self_->policies_.digest(bytes);
      if (base_ != nullptr && base_->chunks[number] == sum && base_digests_[number] == digest) {
        give_back(chunk.slot);
        return refer();
      }
      digests_.push_back(digest);
    }
    made_.chunks.push_back(sum);
    if (base_ != nullptr) {
      runs_.add(own_, written_);
      begin = written_ * self_->options_.chunk_bytes;
      // Of length 0, because its final length is known only at the end.
      if (!output_) output_.emplace(create(own_.name, 0));
    }
    ++written_;
    of_->written += chunk.bytes;
    own_bytes_ += chunk.bytes;
    writes_.push_back({chunk.slot, output_->begin_write(begin, bytes)});
  }

  /// Records that the next chunk is unchanged.
  void refer() {
    const std::size_t number = made_.chunks.size();
    const auto [in, place] = place_of(of_->base->part, *base_, number);
    runs_.add(in, place);
    made_.chunks.push_back(base_->chunks[number]);
    if (keeps_digests_) digests_.push_back(base_digests_[number]);
  }

  /// Sets the length of the file of changes; if everything changed, that file becomes the file itself.
  void settle_runs() {
    if (written_ != 0 && written_ == made_.chunks.size() && takes_its_name()) {
      made_.runs.clear();
      std::erase(part_->stored, own_);
      return;
    }
    if (const auto own = std::ranges::find(part_->stored, own_); own != part_->stored.end())
      own->bytes = own_bytes_;
  }

  /// Renames the file of changes to the file's name, and returns whether that worked. If the storage cannot
  /// rename, the file keeps its name; restores work with that as well.
  [[nodiscard]] bool takes_its_name() {
    try {
      self_->coordinator_.storage().rename(draft_->path(own_.name), draft_->path(file_->name));
      return true;
    } catch (const storage_error& error) {
      if (!is_unsupported(error.number())) throw;
      return false;
    }
  }

  checkpointer_core* self_;
  job* of_;
  const checkpoint_draft* draft_;
  const planned_file* file_;
  checkpoint_file made_;
  run_list runs_;
  checkpoint_manifest* part_;
  const stored_chunks own_;  // 0 bytes until all chunks are written
  const std::size_t depth_;
  bool keeps_digests_ = false;
  const checkpoint_file* base_ = nullptr;  // null: the file is full
  std::span<const chunk_digest_value> base_digests_{};
  std::vector<chunk_digest_value> digests_{};
  std::uint64_t written_ = 0;    // chunks
  std::uint64_t own_bytes_ = 0;  // bytes of these chunks
  std::optional<output_type> output_{};
  std::vector<in_flight> writes_{};
  std::vector<std::size_t> lent_{};
};

LLMMEM_CHECKPOINT_BODY checkpoint_manifest checkpointer_core::write_files(job& of,
                                                                          const checkpoint_draft& draft) {
  checkpoint_manifest part{.generation = draft.id.generation,
                           .step = draft.id.step,
                           .world = coordinator_.world(),
                           .chunk_bytes = options_.chunk_bytes,
                           .files = {},
                           .tensors = plan_.tensors,
                           .stored = {}};
  of.began_to_persist = monotonic_ns();
  for (std::size_t i = 0; i < of.files.size(); ++i) {
    file_writer writer(*this, of, draft, part, i);
    part.files.push_back(writer.write());
  }
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

/// Throws if the snapshot was abandoned. Called after its end entry has been taken.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::check_given_up(const job& of) const {
  const std::scoped_lock lock(mutex_);
  if (of.why.empty()) return;
  throw io_error(options_.name + ": step " + std::to_string(of.record->step) + " was abandoned: " + of.why);
}

LLMMEM_CHECKPOINT_BODY bool checkpointer_core::has_filled() const {
  const std::scoped_lock lock(mutex_);
  return !filled_.empty();
}

LLMMEM_CHECKPOINT_BODY auto checkpointer_core::take(job& of) -> filled_chunk {
  std::unique_lock lock(mutex_);
  while (filled_.empty() || is_hurried())
    changed_.wait(lock);
  const filled_chunk next = filled_.front();
  if (next.unchanged > 1) {
    filled_.front().unchanged -= 1;
    return next;
  }
  filled_.erase(filled_.begin());
  of.is_drained = next.is_end;
  return next;
}

LLMMEM_CHECKPOINT_BODY void checkpointer_core::release(std::span<const std::size_t> slots) {
  const std::scoped_lock lock(mutex_);
  free_.insert(free_.end(), slots.begin(), slots.end());
  stats_.staging_bytes -= slots.size() * options_.chunk_bytes;
  changed_.notify_all();
}

/// Takes the staged chunks of a failed snapshot until the stager has noticed the failure.
LLMMEM_CHECKPOINT_BODY void checkpointer_core::drain(job& of) {
  while (!of.is_drained) {
    const filled_chunk next = take(of);
    if (!next.is_end && next.unchanged == 0) release({&next.slot, 1});
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace llmmem
