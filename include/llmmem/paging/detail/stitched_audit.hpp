/// @file
/// Bodies of stitched.hpp: the proof of its invariants. Included by it alone.
#pragma once

#include <llmmem/paging/stitched.hpp>

namespace llmmem::inline v0 {

template <virtual_memory Memory>
std::vector<std::string> stitched_arena<Memory>::audit() const {
  std::vector<std::string> found;
  const auto say = [&](const std::string& what) {
    found.push_back(std::string(ledger_.name()) + ": " + what);
  };
  runs_.audit(ledger_.name(), found);
  std::vector<std::uint32_t> owners(runs_.size());
  const auto own = [&](const chunk_run& run) {
    for (std::uint32_t i = 0; i < run.count; ++i)
      ++owners[run.first + i];
  };
  std::uint64_t live = 0, requested = 0, granted = 0;
  for (std::uint32_t slot = 0; slot < allocations_.touched(); ++slot) {
    if (!allocations_.is_live(slot)) continue;
    const allocation& a = allocations_[slot];
    ++live;
    requested += a.requested;
    granted += a.granted;
    if (a.what == kind::run) own({a.where, static_cast<std::uint32_t>(a.granted / chunk_)});
    if (a.what == kind::stitched) {
      stitched_.each_part(a.where, own);
      if (stitched_[a.where].now != condition::live)
        say("allocation " + std::to_string(slot) + " lost its range");
    }
  }
  std::vector<std::uint64_t> shared(runs_.size());
  small_.audit(ledger_.name(), found, [&](const detail::split_blocks::block& b) {
    shared[b.segment] += b.bytes;
    if (b.data < address(b.segment) || b.data + b.bytes > address(b.segment) + chunk_) {
      say("a small block lies outside its chunk " + std::to_string(b.segment));
    }
  });
  for (std::uint32_t at = 0; at < runs_.size(); ++at) {
    const std::string who = "chunk " + std::to_string(at);
    if (shared[at] != 0) {
      ++owners[at];
      if (shared[at] != chunk_) say(who + " is not covered by its small blocks");
    }
    if (owners[at] != (runs_.state(at) == detail::chunk_state::used ? 1U : 0U)) {
      say(who + " has " + std::to_string(owners[at]) + " users");
    }
    const bool present = runs_.state(at) != detail::chunk_state::absent;
    const result<physical_handle> there = memory_->mapped_at(home_, at * chunk_);
    if (there.has_value() != present || (present && *there != handles_[at])) say(who + " is not at home");
  }
  std::uint64_t mapped = 0;
  stitched_.each([&](std::uint32_t slot, const detail::stitched_ranges::stitched& s) {
    mapped += s.chunks;
    if (s.now == condition::broken) return;
    std::uint64_t offset = 0;
    stitched_.each_part(slot, [&](const chunk_run& run) {
      for (std::uint32_t i = 0; i < run.count; ++i, offset += chunk_) {
        const result<physical_handle> there = memory_->mapped_at(s.range, offset);
        if (!there || *there != handles_[run.first + i]) {
          say("stitched range " + std::to_string(slot) + " does not map chunk " +
              std::to_string(run.first + i));
        }
      }
    });
  });
  if (mapped != mapped_chunks_) say("mappings of stitched ranges are miscounted");
  ledger_.audit_sums(found, live, requested, granted, runs_.present() * chunk_);
  return found;
}

}  // namespace llmmem::inline v0
