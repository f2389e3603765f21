/// @file
/// Damages structures on purpose, so that tests see audit() name what is wrong.
#pragma once

#include <llmmem/paged_allocator.hpp>

#include <cstdint>

namespace llmmem {
inline namespace v0 {

/// The one definition of the friend that the structures declare.
struct testing_access {
  template <class Pool>
  static void forget_free_block(Pool& pool) {
    static_cast<void>(pool.free_.take(null_block));
  }
  template <class Pool>
  static void list_as_free(Pool& pool, block_id block) {
    pool.free_.push(block);
  }
  template <class Pool>
  static void miscount_idle(Pool& pool) {
    ++pool.idle_count_;
  }
  template <class Pool>
  static void withdraw_candidate(Pool& pool, block_id block) {
    pool.eviction_.erase(slot_id{to_index(block)});
  }
  template <class Pool>
  static void hold_null_block(Pool& pool) {
    pool.records_[0].allocate();
  }
  template <class Cache>
  static void list_slot_as_free(Cache& cache, sequence_id sequence) {
    cache.free_slots_[0] = sequence.slot;
  }
  template <class Cache>
  static void miscount_blocks(Cache& cache, sequence_id sequence) {
    cache.at(sequence).blocks = static_cast<std::uint32_t>(cache.max_table_blocks_ + 1);
  }
  template <class Cache>
  static void miscount_committed(Cache& cache, sequence_id sequence) {
    cache.at(sequence).committed = 3;
  }
  template <class Cache>
  static void allow_no_idle_blocks(Cache& cache) {
    cache.max_idle_blocks_ = 0;
  }
  template <class Cache>
  static void defer(Cache& cache, block_id block) {
    static_cast<void>(cache.deferred_.push(std::span<const block_id>(&block, 1), {}));
  }
  template <class Cache>
  static void add_reference(Cache& cache, block_id block) {
    static_cast<void>(cache.pool_.share(block));
  }
  template <class Cache>
  static block_id& table_entry(Cache& cache, sequence_id sequence, std::size_t i) {
    return cache.row(sequence.slot)[i];
  }
  template <class Cache>
  static void forget_key(Cache& cache, block_id block) {
    cache.index_.erase(block);
  }
  template <class Cache>
  static void miscount_tokens(Cache& cache, sequence_id sequence) {
    ++cache.at(sequence).tokens;
  }

  // Pools of super-pages
  template <class Pool>
  static auto& page(Pool& pool, std::uint32_t page) {
    return pool.pages_[page];
  }
  template <class Pool>
  static auto& group(Pool& pool, std::size_t group) {
    return pool.groups_[group];
  }
  template <class Pool>
  static auto& free_page(Pool& pool, std::size_t i) {
    return pool.free_pages_[i];
  }
  template <class Pool>
  static void forget_free_page(Pool& pool) {
    --pool.free_page_count_;
  }
  template <class Pool>
  static void assign_page(Pool& pool, std::uint16_t group) {
    static_cast<void>(pool.assign_page(group));
  }
  template <class Pool>
  static void hold(Pool& pool, block_id block) {
    pool.records_[to_index(block)].allocate();
  }
  template <class Pool>
  static void withdraw_candidate(Pool& pool, std::size_t group, std::uint32_t slot) {
    pool.evictions_by_group_[group]->erase(slot_id{slot});
  }
  template <class Pool>
  static auto& idle_blocks(Pool& pool) {
    return pool.idle_;
  }
  template <class Pool>
  static auto& emptiable_pages(Pool& pool) {
    return pool.emptiable_;
  }

  // Stitched arenas
  template <class Arena>
  static auto& chunks(Arena& arena) {
    return arena.runs_;
  }
  template <class Arena>
  static auto& chunk_handle(Arena& arena, std::size_t chunk) {
    return arena.handles_[chunk];
  }
  template <class Arena>
  static void lose_range(Arena& arena, std::uint32_t slot) {
    arena.stitched_.set(slot, Arena::condition::idle);
  }
  template <class Arena>
  static auto& allocation(Arena& arena, std::uint32_t slot) {
    return arena.allocations_[slot];
  }
  template <class Arena>
  static void miscount_mappings(Arena& arena) {
    ++arena.mapped_chunks_;
  }
  template <class Arena>
  static void shift_home(Arena& arena, std::uint64_t bytes) {
    arena.home_.data += bytes;
  }
};

}  // namespace v0
}  // namespace llmmem
