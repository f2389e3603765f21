/// @file
/// Bodies of stitched.hpp: construction, allocation by the paper's states, statistics. Only stitched.hpp
/// includes it.
#pragma once

#include <llmmem/arena/stitched.hpp>

namespace llmmem {
inline namespace v0 {

template <virtual_memory Memory>
std::uint64_t stitched_arena<Memory>::checked_chunk() const {
  const std::uint64_t unit = memory_->granularity();
  constexpr std::uint64_t usual = std::uint64_t{2} << 20;
  const std::uint64_t chunk = options_.chunk_bytes == 0 ? round_up_to(unit, usual) : options_.chunk_bytes;
  if (chunk % unit != 0 || chunk % (2 * arena_alignment) != 0) {
    throw length_error(options_.arena.name + ": chunks of " + std::to_string(chunk) +
                       " bytes are not a multiple of the granularity, " + std::to_string(unit) +
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
                       "; their number must be 1 to 4294967294");
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
      runs_.give_back(run_of_chunks{gone.where, static_cast<std::uint32_t>(gone.granted / chunk_)});
      break;
    case kind::stitched:
      stitched_.each_part(gone.where, [&](const run_of_chunks& run) { runs_.give_back(run); });
      stitched_.set(gone.where, condition::idle);
      break;
    case kind::little: {
      const std::uint32_t block = small_.give_back(gone.where);
      if (!small_.is_complete(block)) break;
      const std::uint32_t chunk = small_[block].segment;
      small_.remove_segment(block);
      runs_.give_back(run_of_chunks{chunk, 1});
    }
  }
  return {};
}

/// Allocates whole chunks, by the paper's states.
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

/// Allocates whole chunks from the free chunks. @pre that many are free.
template <virtual_memory Memory>
auto stitched_arena<Memory>::find_free(std::uint32_t chunks) noexcept -> result<place> {
  const run_of_chunks best = runs_.best(chunks);
  if (best.count == chunks) {  // S1
    ++counts_.exact;
    use(best, address(best.first));
    return place{kind::run, best.first};
  }
  if (const std::uint32_t idle = stitched_.fitting(chunks, runs_); idle != none) {  // S1
    ++counts_.reused;
    use_stitched(idle);
    stitched_.set(idle, condition::live);
    return place{kind::stitched, idle};
  }
  if (best) {  // S2
    ++counts_.split;
    use({best.first, chunks}, address(best.first));
    return place{kind::run, best.first};
  }
  return join(chunks);  // S3
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
    const run_of_chunks from = runs_.best(1);
    use({from.first, 1}, address(from.first));
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
  // Chunks that an idle or broken range still maps cannot be destroyed.
  if (stitched_.idle() == 0 && stitched_.broken() == 0) {
    for (run_of_chunks run = runs_.front(); run;) {
      const run_of_chunks following = runs_.behind(run);
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
  now.metadata_bytes = handles_.bytes() + used_at_.bytes() + runs_.bytes() + stitched_.bytes() +
                       small_.bytes() + allocations_.bytes();
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

}  // namespace v0
}  // namespace llmmem

#include <llmmem/arena/detail/stitched_audit.hpp>
#include <llmmem/arena/detail/stitched_mapping.hpp>
