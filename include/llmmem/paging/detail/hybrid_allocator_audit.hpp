/// @file
/// Bodies of hybrid_allocator.hpp: the audit. Only hybrid_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/hybrid_allocator.hpp>

namespace llmmem {
inline namespace v0 {

template <class Traits>
std::vector<std::string> hybrid_allocator<Traits>::audit() const {
  std::vector<std::string> found = pool_.audit();
  const auto blame = [&](const std::string& what) { found.push_back(name() + ": " + what); };
  std::vector<std::uint64_t> held(pool_.block_ids());
  std::vector<std::uint64_t> holders(chain_.capacity() + 1);
  std::uint64_t tokens = 0;
  for (std::uint32_t slot = 0; slot < records_.touched(); ++slot) {
    if (!records_.is_live(slot)) continue;
    const record& sequence = records_[slot];
    tokens += sequence.tokens;
    ++holders[to_index(sequence.at.node)];
    const std::string who = "sequence " + std::to_string(slot);
    if (sequence.tokens > max_sequence_tokens_ || sequence.committed > sequence.tokens / chunk_tokens_) {
      blame(who + " counts " + std::to_string(sequence.committed) + " chunks committed, of " +
            std::to_string(sequence.tokens) + " tokens");
      return found;
    }
    for (std::size_t g = 0; g < group_count_; ++g) {
      for (std::uint64_t i = 0; i < groups_[g].blocks_for(sequence.tokens); ++i) {
        const block_id block = row(slot, g)[i];
        const std::string where = "[" + std::string(groups_[g].name) + "][" + std::to_string(i) + "]";
        const bool is_dead = i >= dead_from(g) && i < dead_to(sequence, g);
        const bool may_be_skipped =
            groups_[g].skips_blocks() && i + 1 < groups_[g].blocks_for(sequence.tokens);
        if ((block == null_block) != is_dead && !(block == null_block && may_be_skipped)) {
          blame(who + where + (block == null_block ? " holds no block" : " still holds a block"));
        } else if (block != null_block && (to_index(block) >= held.size() || pool_.group_of(block) != g)) {
          blame(who + where + " names block " + std::to_string(to_index(block)) +
                ", which does not belong to its group");
        } else if (block != null_block) {
          ++held[to_index(block)];
        }
      }
    }
  }
  deferred_.for_each([&](block_id block) { ++held[to_index(block)]; });
  for (std::uint32_t i = 1; i < held.size(); ++i)
    held[i] += pins_.of(block_id{i});
  if (tokens != counters_.tokens) {
    blame("counts " + std::to_string(counters_.tokens) + " tokens, there are " + std::to_string(tokens));
  }
  for (std::uint32_t i = 1; i < held.size(); ++i) {
    const block_record& block = pool_.record(block_id{i});
    const auto accuse = [&](const std::string& what) {
      blame("block " + std::to_string(i) + " " + what + " (last: " + std::string(to_string(block.last())) +
            ")");
    };
    if (block.references() != held[i]) {
      accuse("counts " + std::to_string(block.references()) + " references, " + std::to_string(held[i]) +
             " exist");
    }
    if (!block.is_cached()) continue;
    const block_id node = node_of_[i];
    if (!chain_.contains(node) || chain_.cached(node, pool_.group_of(block_id{i})) != block_id{i})
      accuse("is cached, but no prefix names it");
  }
  std::uint64_t named = 0;
  std::uint64_t cached = 0;
  for (std::uint32_t i = 1; i < held.size(); ++i)
    cached += pool_.record(block_id{i}).is_cached() ? 1U : 0U;
  for (std::uint32_t node = 1; node < holders.size(); ++node) {
    for (std::size_t g = 0; g < group_count_; ++g) {
      named += chain_.contains(block_id{node}) && chain_.cached(block_id{node}, g) != null_block ? 1U : 0U;
    }
  }
  if (named != cached) {
    blame("prefixes name " + std::to_string(named) + " blocks, " + std::to_string(cached) + " are cached");
  }
  for (const std::string& each : chain_.audit(holders))
    blame(each);
  return found;
}

}  // namespace v0
}  // namespace llmmem
