/// @file
/// Bodies of stitched.hpp: mappings of stitched ranges, and of new chunks at home. Only stitched_body.hpp
/// includes it.
#pragma once

#include <llmmem/arena/stitched.hpp>

namespace llmmem {
inline namespace v0 {

/// Joins several runs into one range; evicts idle ranges if the arena's tables, or the system's, are full.
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
  use_stitched(slot);
  stitched_.set(slot, condition::live);
  return place{kind::stitched, slot};
}

/// Takes free chunks for use at `at`. Sets chunks last used at another address aside there, adjacent ones in
/// one call.
template <virtual_memory Memory>
void stitched_arena<Memory>::use(const run_of_chunks& run, std::byte* at) noexcept {
  runs_.use(run);
  if constexpr (counts_addresses) {
    std::byte* former = nullptr;
    std::uint64_t bytes = 0;
    const auto set_aside = [&] {
      if (bytes != 0) memory_->set_aside(former, bytes);
      bytes = 0;
    };
    for (std::uint32_t i = 0; i < run.count; ++i) {
      std::byte* const was = std::exchange(used_at_[run.first + i], at + i * chunk_);
      if (was == nullptr || was == at + i * chunk_) continue;
      if (bytes == 0 || was != former + bytes) {
        set_aside();
        former = was;
      }
      bytes += chunk_;
    }
    set_aside();
  }
}

/// Does the same for the chunks of a stitched range, at its addresses.
template <virtual_memory Memory>
void stitched_arena<Memory>::use_stitched(std::uint32_t slot) noexcept {
  std::byte* at = stitched_[slot].range.data;
  stitched_.each_part(slot, [&](const run_of_chunks& run) {
    use(run, at);
    at += run.count * chunk_;
  });
}

/// Lists free runs with `chunks` chunks in total: the longest first, and finally the shortest run that
/// suffices for the rest. Returns false if the table of parts is full. @pre that many chunks are free, and no
/// run alone is long enough.
template <virtual_memory Memory>
bool stitched_arena<Memory>::gather(std::uint32_t slot, std::uint32_t chunks) noexcept {
  std::uint32_t rest = chunks;
  for (run_of_chunks run = runs_.longest(); rest != 0; run = runs_.shorter(run)) {
    if (run.count >= rest) {
      // Listed runs are longer, or equally long and later, so the shortest sufficient run is not among them.
      const run_of_chunks last = runs_.best(rest);
      return stitched_.append(slot, {last.first, rest});
    }
    if (!stitched_.append(slot, run)) return false;
    rest -= run.count;
  }
  return true;
}

/// Maps the parts next to each other at new addresses: all or none. If it can neither finish nor undo this,
/// it marks the range broken.
template <virtual_memory Memory>
result<void> stitched_arena<Memory>::map_parts(std::uint32_t slot) noexcept {
  const std::uint64_t bytes = stitched_[slot].chunks * chunk_;
  const result<virtual_range> range = memory_->try_reserve(bytes);
  if (!range) return range.error();
  std::uint64_t offset = 0;
  result<void> mapped;
  stitched_.each_part(slot, [&](const run_of_chunks& run) {
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
    mapped_chunks_ += stitched_[slot].chunks;  // an upper bound
  }
  return mapped;
}

/// Unmaps a range without an allocation, and forgets it. Returns false if the system refused.
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
  if constexpr (counts_addresses) {
    // Other memory may get these addresses, so nothing may be set aside there from now on.
    std::byte* at = s.range.data;
    stitched_.each_part(slot, [&](const run_of_chunks& run) {
      for (std::uint32_t i = 0; i < run.count; ++i, at += chunk_) {
        if (used_at_[run.first + i] == at) used_at_[run.first + i] = nullptr;
      }
    });
  }
  static_cast<void>(memory_->release(s.range));
  if (s.now == condition::idle) stitched_.set(slot, condition::building);
  stitched_.end(slot);
  mapped_chunks_ -= s.chunks;
  return true;
}

/// Takes apart the least recently used idle range. Returns false if there is none, or the system refused.
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

/// Creates chunks at home, in the first absent places: all or none. `uncreate_fresh` undoes it.
template <virtual_memory Memory>
result<void> stitched_arena<Memory>::create(std::uint32_t chunks) noexcept {
  const std::uint64_t left = memory_->capacity() - memory_->used();
  if (chunks * chunk_ > left) {
    return failure{.code = errc::out_of_bytes, .wanted = chunks * chunk_, .found = left};
  }
  first_fresh_ = none;
  std::uint32_t from = 0;
  for (std::uint32_t missing = chunks; missing != 0;) {
    const run_of_chunks gap = runs_.absent(from, missing);
    run_of_chunks made{gap.first, 0};
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
      // `destroy` fails if the failed mapping could not be undone either; then the chunk stays.
      if (!done && memory_->destroy(handles_[at])) continue;
      next_fresh_[at] = first_fresh_;
      first_fresh_ = at;
      if constexpr (counts_addresses) used_at_[at] = nullptr;
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

/// Destroys the chunks of the last `create`. @pre they are free.
template <virtual_memory Memory>
void stitched_arena<Memory>::uncreate_fresh() noexcept {
  for (std::uint32_t at = first_fresh_; at != none; at = next_fresh_[at])
    uncreate({at, 1});
  first_fresh_ = none;
}

/// Destroys free chunks; chunks that the system does not unmap stay free.
template <virtual_memory Memory>
void stitched_arena<Memory>::uncreate(const run_of_chunks& these) noexcept {
  if (!memory_->decommit(home_, these.first * chunk_, these.count * chunk_)) return;
  runs_.remove(these);
  ledger_.reserved_less(these.count * chunk_);
}

}  // namespace v0
}  // namespace llmmem
