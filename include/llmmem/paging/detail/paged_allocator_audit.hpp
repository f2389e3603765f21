/// @file
/// Bodies of paged_allocator.hpp: the proof of its invariants. Only paged_allocator_body.hpp includes it.
#pragma once

#include <llmmem/paging/paged_allocator.hpp>

#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

template <class Traits>
std::vector<std::string> paged_allocator<Traits>::audit() const {
  std::vector<std::string> found = pool_.audit();
  for (const std::string& each : index_.audit())
    found.push_back(name() + ": " + each);
  for (const std::string& each : followers_.audit([this](block_id block) { return index_.contains(block); }))
    found.push_back(name() + ": " + each);

  // Recounts the holders of each block from the tables and the queue.
  std::vector<std::uint64_t> held(max_physical_blocks());
  std::uint64_t tokens = 0;
  std::uint64_t table_blocks = 0;
  std::uint64_t alive = 0;
  for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
    const record& sequence = records_[slot];
    if (!sequence.alive()) continue;
    ++alive;
    tokens += sequence.tokens;
    table_blocks += sequence.blocks;
    if (sequence.blocks > max_table_blocks_) {
      found.push_back(name() + ": sequence " + std::to_string(slot) + " holds " +
                      std::to_string(sequence.blocks) +
                      " blocks, more than the longest table: " + std::to_string(max_table_blocks_));
      return found;  // entries after a table belong to another sequence
    }
    if (sequence.committed > sequence.blocks || sequence.keyed > sequence.tokens / block_tokens_) {
      found.push_back(name() + ": sequence " + std::to_string(slot) + " counts " +
                      std::to_string(sequence.committed) + " blocks committed and " +
                      std::to_string(sequence.keyed) + " keyed, of " + std::to_string(sequence.blocks));
    }
    if (sequence.blocks != detail::blocks_for(sequence.tokens, block_tokens_)) {
      found.push_back(name() + ": sequence " + std::to_string(slot) + " holds " +
                      std::to_string(sequence.tokens) + " tokens in " + std::to_string(sequence.blocks) +
                      " blocks");
    }
    for (std::uint32_t i = 0; i < sequence.blocks; ++i) {
      const std::uint32_t block = to_index(row(slot)[i]);
      if (block == 0 || block >= held.size()) {
        found.push_back(name() + ": sequence " + std::to_string(slot) + " names block " +
                        std::to_string(block) + ", which does not exist");
      } else {
        ++held[block];
      }
    }
  }
  deferred_.for_each([&](block_id block) {
    if (block == null_block || to_index(block) >= held.size()) {
      found.push_back(name() + ": a deferred free names block " + std::to_string(to_index(block)) +
                      ", which does not exist");
    } else {
      ++held[to_index(block)];
    }
  });
  for (std::uint32_t i = 1; i < held.size(); ++i)
    held[i] += pins_.of(block_id{i});
  audit_blocks(held, found);

  std::vector<bool> listed(records_.size());
  for (std::uint32_t i = 0; i < free_slot_count_; ++i) {
    const std::uint32_t slot = free_slots_[i];
    if (slot < listed.size() && !listed[slot] && !records_[slot].alive()) {
      listed[slot] = true;
    } else {
      found.push_back(name() + ": the free slots name sequence " + std::to_string(slot) +
                      ", which is alive, named twice or does not exist");
    }
  }
  if (pool_.idle() > max_idle_blocks_) {
    found.push_back(name() + ": " + std::to_string(pool_.idle()) + " blocks are idle, at most " +
                    std::to_string(max_idle_blocks_) + " are allowed");
  }
  if (alive != records_.size() - free_slot_count_ || tokens != counters_.tokens ||
      table_blocks != counters_.table_blocks) {
    found.push_back(name() + ": counts " + std::to_string(records_.size() - free_slot_count_) +
                    " sequences, " + std::to_string(counters_.tokens) + " tokens, " +
                    std::to_string(counters_.table_blocks) + " table entries; there are " +
                    std::to_string(alive) + ", " + std::to_string(tokens) + ", " +
                    std::to_string(table_blocks));
  }
  return found;
}

template <class Traits>
void paged_allocator<Traits>::audit_blocks(const std::vector<std::uint64_t>& held,
                                           std::vector<std::string>& found) const {
  for (std::uint32_t i = 1; i < held.size(); ++i) {
    const block_record& block = pool_.record(block_id{i});
    const auto blame = [&](const std::string& what) {
      found.push_back(name() + ": block " + std::to_string(i) + " " + what + "; held by " +
                      owners(block_id{i}) + " (last: " + pool_.last_of(block_id{i}) + ")");
    };
    if (block.references() != held[i]) {
      blame("counts " + std::to_string(block.references()) + " references, " + std::to_string(held[i]) +
            " exist");
    }
    if (block.is_cached() != index_.contains(block_id{i})) {
      blame(block.is_cached() ? "is marked cached but not in the index"
                              : "is in the index but not marked cached");
    }
  }
}

template <class Traits>
std::string paged_allocator<Traits>::owners(block_id block) const {
  std::string names;
  const auto add = [&](const std::string& who) { names += (names.empty() ? "" : ", ") + who; };
  for (std::uint32_t slot = 0; slot < records_.size(); ++slot) {
    if (!records_[slot].alive()) continue;
    for (std::uint32_t i = 0; i < records_[slot].blocks; ++i) {
      if (row(slot)[i] == block) add("sequence " + std::to_string(slot) + "[" + std::to_string(i) + "]");
    }
  }
  deferred_.for_each([&](block_id each) {
    if (each == block) add("a deferred free");
  });
  if (pins_.of(block) != 0) add(std::to_string(pins_.of(block)) + " pins");
  return names.empty() ? "no owner" : names;
}

}  // namespace v0
}  // namespace llmmem
