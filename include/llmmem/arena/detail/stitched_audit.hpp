/// @file
/// Bodies of stitched.hpp: the proof of its invariants. Only stitched_body.hpp includes it.
#pragma once

#include <llmmem/arena/stitched.hpp>

#include <string>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// Walks an arena once, recounts it, and collects the differences.
template <virtual_memory Memory>
class stitched_arena<Memory>::auditor {
 public:
  explicit auditor(const stitched_arena& arena)
      : arena_(&arena), owners_(arena.runs_.size()), shared_(arena.runs_.size()) {}

  std::vector<std::string> run() && {
    arena_->runs_.audit(arena_->ledger_.name(), found_);
    for (std::uint32_t slot = 0; slot < arena_->allocations_.touched(); ++slot) {
      if (arena_->allocations_.is_live(slot)) audit_allocation(slot);
    }
    audit_small_blocks();
    for (std::uint32_t at = 0; at < arena_->runs_.size(); ++at)
      audit_chunk(at);
    audit_stitched_ranges();
    arena_->ledger_.audit_sums(found_, live_, requested_, granted_, arena_->runs_.present() * arena_->chunk_);
    return std::move(found_);
  }

 private:
  void blame(const std::string& what) { found_.push_back(std::string(arena_->ledger_.name()) + ": " + what); }
  void own(const run_of_chunks& run) noexcept {
    for (std::uint32_t i = 0; i < run.count; ++i)
      ++owners_[run.first + i];
  }

  void audit_allocation(std::uint32_t slot) {
    const allocation& a = arena_->allocations_[slot];
    ++live_;
    requested_ += a.requested;
    granted_ += a.granted;
    if (a.what == kind::run) own({a.where, static_cast<std::uint32_t>(a.granted / arena_->chunk_)});
    if (a.what != kind::stitched) return;
    arena_->stitched_.each_part(a.where, [&](const run_of_chunks& run) { own(run); });
    if (arena_->stitched_[a.where].now != condition::live) {
      blame("allocation " + std::to_string(slot) + " lost its range");
    }
  }

  void audit_small_blocks() {
    arena_->small_.audit(arena_->ledger_.name(), found_, [&](const detail::split_blocks::block& b) {
      shared_[b.segment] += b.bytes;
      const std::byte* const chunk = arena_->address(b.segment);
      if (b.data < chunk || b.data + b.bytes > chunk + arena_->chunk_) {
        blame("a small block is outside its chunk " + std::to_string(b.segment));
      }
    });
  }

  void audit_chunk(std::uint32_t at) {
    const std::string who = "chunk " + std::to_string(at);
    if (shared_[at] != 0) {
      ++owners_[at];
      if (shared_[at] != arena_->chunk_) blame(who + " is not covered by its small blocks");
    }
    if (owners_[at] != (arena_->runs_.state(at) == detail::chunk_state::used ? 1U : 0U)) {
      blame(who + " has " + std::to_string(owners_[at]) + " users");
    }
    const bool present = arena_->runs_.state(at) != detail::chunk_state::absent;
    const result<physical_handle> there = arena_->memory_->mapped_at(arena_->home_, at * arena_->chunk_);
    if (there.has_value() != present || (present && *there != arena_->handles_[at])) {
      blame(who + " is not mapped at its address");
    }
  }

  void audit_stitched_ranges() {
    std::uint64_t mapped = 0;
    arena_->stitched_.each([&](std::uint32_t slot, const detail::stitched_ranges::stitched& s) {
      mapped += s.chunks;
      if (s.now != condition::broken) audit_mapping(slot, s.range);
    });
    if (mapped != arena_->mapped_chunks_) blame("mappings of stitched ranges are miscounted");
  }

  void audit_mapping(std::uint32_t slot, const virtual_range& range) {
    std::uint64_t offset = 0;
    arena_->stitched_.each_part(slot, [&](const run_of_chunks& run) {
      for (std::uint32_t i = 0; i < run.count; ++i, offset += arena_->chunk_) {
        const result<physical_handle> there = arena_->memory_->mapped_at(range, offset);
        if (!there || *there != arena_->handles_[run.first + i]) {
          blame("stitched range " + std::to_string(slot) + " does not map chunk " +
                std::to_string(run.first + i));
        }
      }
    });
  }

  const stitched_arena* arena_;
  std::vector<std::string> found_;
  std::vector<std::uint32_t> owners_;  // of each chunk
  std::vector<std::uint64_t> shared_;  // bytes of each chunk that small blocks cover
  std::uint64_t live_ = 0;
  std::uint64_t requested_ = 0;
  std::uint64_t granted_ = 0;
};

template <virtual_memory Memory>
std::vector<std::string> stitched_arena<Memory>::audit() const {
  return auditor(*this).run();
}

}  // namespace v0
}  // namespace llmmem
