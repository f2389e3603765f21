/// @file
/// Bodies of stitched.hpp. Included by it alone.
#pragma once

#include <llmmem/paging/stitched.hpp>

namespace llmmem::inline v0 {

template <virtual_memory Memory>
std::uint64_t stitched_arena<Memory>::checked_chunk() const {
  const std::uint64_t unit = memory_->granularity();
  constexpr std::uint64_t usual = std::uint64_t{2} << 20;
  const std::uint64_t chunk = options_.chunk_bytes == 0 ? round_up_to(unit, usual) : options_.chunk_bytes;
  if (chunk % unit != 0 || chunk % (2 * arena_alignment) != 0) {
    throw length_error(options_.arena.name + ": chunks of " + std::to_string(chunk) +
                       " bytes are no multiple of the granularity, " + std::to_string(unit) +
                       " bytes, and of " + std::to_string(2 * arena_alignment));
  }
  return chunk;
}

template <virtual_memory Memory>
std::uint64_t stitched_arena<Memory>::checked_chunks() const {
  const std::uint64_t chunks = memory_->capacity() / chunk_;
  if (chunks == 0 || chunks >= none) {
    throw length_error(options_.arena.name + ": a budget of " + std::to_string(memory_->capacity()) +
                       " bytes makes " + std::to_string(chunks) + " chunks of " + std::to_string(chunk_) +
                       "; 1 to 4294967294 can be");
  }
  return chunks;
}

template <virtual_memory Memory>
stitched_arena<Memory>::~stitched_arena() {
  stitched_.each([&](std::uint32_t, const detail::stitched_ranges::stitched& s) {
    if (s.range.bytes == 0) return;
    static_cast<void>(memory_->unmap(s.range, 0, s.range.bytes));
    static_cast<void>(memory_->release(s.range));
  });
  for (std::uint32_t at = 0; at < runs_.size(); ++at) {
    if (runs_.state(at) == detail::chunk_state::absent) continue;
    static_cast<void>(memory_->decommit(home_, at * chunk_, chunk_));
  }
  static_cast<void>(memory_->release(home_));
}

template <virtual_memory Memory>
result<arena_allocation> stitched_arena<Memory>::allocate(std::uint64_t bytes) noexcept {
  if (const failure wrong = ledger_.check_size(bytes); wrong.code != errc::ok) return ledger_.refuse(wrong);
  if (allocations_.left() == 0) return ledger_.refuse({.code = errc::table_full, .wanted = 1, .found = 0});
  const std::uint64_t rounded = round_up_to(arena_alignment, bytes);
  const bool shares = rounded <= chunk_ / 2;
  const std::uint64_t chunks = (rounded + chunk_ - 1) / chunk_;
  if (!shares && chunks > runs_.size()) {
    ++counts_.refused;
    return ledger_.refuse(
        {.code = errc::out_of_bytes, .wanted = chunks * chunk_, .found = memory_->capacity()});
  }
  const result<place> found = shares ? find_small(rounded, bytes) : find(static_cast<std::uint32_t>(chunks));
  if (!found) {
    if (found.code() == errc::out_of_bytes) ++counts_.refused;
    return ledger_.refuse(found.error());
  }
  arena_allocation given{.bytes = bytes, .granted = chunks * chunk_};
  switch (found->what) {
    case kind::run:
      given.data = address(found->where);
      break;
    case kind::stitched:
      given.data = stitched_[found->where].range.data;
      break;
    case kind::little:
      given.data = small_[found->where].data;
      given.granted = small_[found->where].bytes;
  }
  ledger_.given(bytes, given.granted);
  given.handle = allocations_.handle(allocations_.acquire({bytes, given.granted, found->what, found->where}));
  return given;
}

template <virtual_memory Memory>
result<void> stitched_arena<Memory>::free(const arena_handle& handle) noexcept {
  const failure wrong = allocations_.check(handle, ledger_.name());
  if (wrong.code != errc::ok) return wrong;
  const allocation gone = allocations_[handle.slot];
  allocations_.release(handle.slot);
  ledger_.taken_back(gone.requested, gone.granted);
  switch (gone.what) {
    case kind::run:
      runs_.give_back(chunk_run{gone.where, static_cast<std::uint32_t>(gone.granted / chunk_)});
      break;
    case kind::stitched:
      stitched_.each_part(gone.where, [&](const chunk_run& run) { runs_.give_back(run); });
      stitched_.set(gone.where, condition::idle);
      break;
    case kind::little: {
      const std::uint32_t block = small_.give_back(gone.where);
      if (!small_.is_whole(block)) break;
      const std::uint32_t chunk = small_[block].segment;
      small_.remove_segment(block);
      runs_.give_back(chunk_run{chunk, 1});
    }
  }
  return {};
}

/// Whole chunks, by the states of the paper.
template <virtual_memory Memory>
auto stitched_arena<Memory>::find(std::uint32_t chunks) noexcept -> result<place> {
  const bool grows = runs_.free() < chunks;  // S4, or S5
  if (grows) {
    if (const result<void> made = create(chunks - runs_.free()); !made) return made.error();
  }
  const result<place> found = find_free(chunks);
  if (!found && grows) uncreate_fresh();
  if (found && grows) ++counts_.grown;
  return found;
}

/// Whole chunks out of those that are free. @pre that many are.
template <virtual_memory Memory>
auto stitched_arena<Memory>::find_free(std::uint32_t chunks) noexcept -> result<place> {
  const chunk_run best = runs_.best(chunks);
  if (best.count == chunks) {  // S1
    ++counts_.exact;
    runs_.use(best);
    return place{kind::run, best.first};
  }
  if (const std::uint32_t idle = stitched_.fitting(chunks, runs_); idle != none) {  // S1
    ++counts_.reused;
    stitched_.each_part(idle, [&](const chunk_run& run) { runs_.use(run); });
    stitched_.set(idle, condition::live);
    return place{kind::stitched, idle};
  }
  if (best) {  // S2
    ++counts_.split;
    runs_.use({best.first, chunks});
    return place{kind::run, best.first};
  }
  return join(chunks);  // S3
}

/// Several runs as one range; idle ranges make room for it where tables, or the system's, are full.
template <virtual_memory Memory>
auto stitched_arena<Memory>::join(std::uint32_t chunks) noexcept -> result<place> {
  const auto full = [](std::uint64_t wanted, std::uint64_t found) {
    return failure{.code = errc::table_full, .wanted = wanted, .found = found};
  };
  take_apart_broken();
  while (mapped_chunks_ + chunks > options_.max_stitched_chunks) {
    if (!evict()) return full(chunks, options_.max_stitched_chunks - mapped_chunks_);
  }
  std::uint32_t slot = stitched_.begin();
  while (slot == none) {
    if (!evict()) return full(1, 0);
    slot = stitched_.begin();
  }
  while (!gather(slot, chunks)) {
    stitched_.end(slot);
    if (!evict()) return full(1, 0);
    slot = stitched_.begin();
  }
  for (;;) {
    const result<void> mapped = map_parts(slot);
    if (mapped) break;
    if (stitched_[slot].now == condition::broken) return mapped.error();
    if (!evict()) {
      stitched_.end(slot);
      return mapped.error();
    }
  }
  ++counts_.stitched;
  stitched_.each_part(slot, [&](const chunk_run& run) { runs_.use(run); });
  stitched_.set(slot, condition::live);
  return place{kind::stitched, slot};
}

/// Lists free runs of `chunks` in all: the longest first, and as soon as one is enough for the rest the
/// shortest such. False when the table of parts is full. @pre that many are free, no run is long enough.
template <virtual_memory Memory>
bool stitched_arena<Memory>::gather(std::uint32_t slot, std::uint32_t chunks) noexcept {
  std::uint32_t rest = chunks;
  for (chunk_run run = runs_.longest(); rest != 0; run = runs_.shorter(run)) {
    if (run.count >= rest) {
      // Those listed are longer, or as long and behind: the shortest that is enough is not among them.
      const chunk_run last = runs_.best(rest);
      return stitched_.append(slot, {last.first, rest});
    }
    if (!stitched_.append(slot, run)) return false;
    rest -= run.count;
  }
  return true;
}

/// Maps the parts side by side at new addresses: all, or none. What can neither be finished nor undone is
/// marked broken.
template <virtual_memory Memory>
result<void> stitched_arena<Memory>::map_parts(std::uint32_t slot) noexcept {
  const std::uint64_t bytes = stitched_[slot].chunks * chunk_;
  const result<virtual_range> range = memory_->try_reserve(bytes);
  if (!range) return range.error();
  std::uint64_t offset = 0;
  result<void> mapped;
  stitched_.each_part(slot, [&](const chunk_run& run) {
    if (!mapped) return;
    mapped = memory_->map(*range, offset, handles(run));
    if (mapped) offset += run.count * chunk_;
  });
  if (mapped) {
    stitched_.set_range(slot, *range);
    mapped_chunks_ += stitched_[slot].chunks;
    return {};
  }
  const bool undone = offset == 0 || memory_->unmap(*range, 0, offset).has_value();
  if (!undone || !memory_->release(*range)) {
    stitched_.set_range(slot, *range);
    stitched_.set(slot, condition::broken);
    mapped_chunks_ += stitched_[slot].chunks;  // as many at most
  }
  return mapped;
}

/// Unmaps a range that no allocation has, and forgets it. False when the system refused.
template <virtual_memory Memory>
bool stitched_arena<Memory>::take_apart(std::uint32_t slot) noexcept {
  const detail::stitched_ranges::stitched s = stitched_[slot];
  std::uint64_t mapped = s.range.bytes;
  if (s.now == condition::broken) {  // only its beginning is mapped
    mapped = 0;
    while (mapped != s.range.bytes && memory_->mapped_at(s.range, mapped))
      mapped += chunk_;
  }
  if (mapped != 0 && !memory_->unmap(s.range, 0, mapped)) return false;
  static_cast<void>(memory_->release(s.range));
  if (s.now == condition::idle) stitched_.set(slot, condition::building);
  stitched_.end(slot);
  mapped_chunks_ -= s.chunks;
  return true;
}

/// Takes the idle range apart that was used longest ago. False when there is none, or the system refused.
template <virtual_memory Memory>
bool stitched_arena<Memory>::evict() noexcept {
  const std::uint32_t oldest = stitched_.oldest();
  if (oldest == none || !take_apart(oldest)) return false;
  ++counts_.evicted;
  return true;
}

template <virtual_memory Memory>
void stitched_arena<Memory>::take_apart_broken() noexcept {
  if (stitched_.broken() == 0) return;
  std::uint32_t found = none;
  do {
    found = none;
    stitched_.each([&](std::uint32_t slot, const detail::stitched_ranges::stitched& s) {
      if (s.now == condition::broken) found = slot;
    });
  } while (found != none && take_apart(found));
}

/// New chunks at home, in the first places that have none: all, or none. `uncreate_fresh` undoes it.
template <virtual_memory Memory>
result<void> stitched_arena<Memory>::create(std::uint32_t chunks) noexcept {
  const std::uint64_t left = memory_->capacity() - memory_->used();
  if (chunks * chunk_ > left) {
    return failure{.code = errc::out_of_bytes, .wanted = chunks * chunk_, .found = left};
  }
  first_fresh_ = none;
  std::uint32_t from = 0;
  for (std::uint32_t missing = chunks; missing != 0;) {
    const chunk_run gap = runs_.absent(from, missing);
    chunk_run made{gap.first, 0};
    result<void> done;
    for (; made.count != gap.count; ++made.count) {
      const result<physical_handle> one = memory_->try_create(chunk_);
      if (!one) {
        done = one.error();
        break;
      }
      handles_[made.first + made.count] = *one;
    }
    if (done) done = memory_->map(home_, made.first * chunk_, handles(made));
    for (std::uint32_t at = made.first; at != made.first + made.count; ++at) {
      // Refused where the mapping was refused and could not be undone either: then it is here to stay.
      if (!done && memory_->destroy(handles_[at])) continue;
      next_fresh_[at] = first_fresh_;
      first_fresh_ = at;
      runs_.add({at, 1});
      ledger_.reserved_more(chunk_);
    }
    if (!done) {
      uncreate_fresh();
      return done;
    }
    missing -= made.count;
    from = made.first + made.count;
  }
  return {};
}

/// Gives the chunks of the last `create` back. @pre they are free.
template <virtual_memory Memory>
void stitched_arena<Memory>::uncreate_fresh() noexcept {
  for (std::uint32_t at = first_fresh_; at != none; at = next_fresh_[at])
    uncreate({at, 1});
  first_fresh_ = none;
}

/// Gives free chunks back; those whose mapping the system does not let go stay free.
template <virtual_memory Memory>
void stitched_arena<Memory>::uncreate(const chunk_run& these) noexcept {
  if (!memory_->decommit(home_, these.first * chunk_, these.count * chunk_)) return;
  runs_.remove(these);
  ledger_.reserved_less(these.count * chunk_);
}

template <virtual_memory Memory>
auto stitched_arena<Memory>::find_small(std::uint64_t rounded, std::uint64_t bytes) noexcept
    -> result<place> {
  std::uint32_t block = small_.best(0, rounded);
  if (block == none) {
    if (small_.left() < 2) return failure{.code = errc::table_full, .wanted = 2, .found = small_.left()};
    if (runs_.free() == 0) {
      if (const result<void> made = create(1); !made) return made.error();
    }
    const chunk_run from = runs_.best(1);
    runs_.use({from.first, 1});
    block = small_.add_segment(address(from.first), chunk_, from.first, 0);
  }
  if (!small_.use(block, rounded, bytes, arena_alignment)) {
    return failure{.code = errc::table_full, .wanted = 1, .found = 0};
  }
  ++counts_.little;
  return place{kind::little, block};
}

template <virtual_memory Memory>
std::uint64_t stitched_arena<Memory>::trim() noexcept {
  const std::uint32_t before = runs_.present();
  take_apart_broken();
  while (evict()) {
  }
  // What an idle or broken range still maps cannot go.
  if (stitched_.idle() == 0 && stitched_.broken() == 0) {
    for (chunk_run run = runs_.front(); run;) {
      const chunk_run following = runs_.behind(run);
      uncreate(run);
      run = following;
    }
  }
  return (before - runs_.present()) * chunk_;
}

template <virtual_memory Memory>
arena_stats stitched_arena<Memory>::stats() const noexcept {
  arena_stats now = ledger_.stats();
  const std::uint64_t within = small_.largest_free(1);
  const std::uint64_t chunks = runs_.free() * chunk_;
  now.largest_free = chunks > within ? chunks : within;
  now.metadata_bytes =
      handles_.bytes() + runs_.bytes() + stitched_.bytes() + small_.bytes() + allocations_.bytes();
  return now;
}

template <virtual_memory Memory>
stitched_counts stitched_arena<Memory>::counts() const noexcept {
  stitched_counts now = counts_;
  now.ranges = stitched_.size();
  now.idle = stitched_.idle();
  now.mapped_chunks = mapped_chunks_;
  return now;
}

}  // namespace llmmem::inline v0
