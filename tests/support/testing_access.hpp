/// @file
/// Damages structures on purpose, so that tests see audit() name what is wrong.
#pragma once

#include <llmmem/paged_allocator.hpp>

#include <cstdint>

namespace llmmem::inline v0 {

/// The one definition of the friend that the structures declare.
struct testing_access {
  template <class Pool>
  static void forget_free_block(Pool& pool) {
    --pool.free_count_;
  }
  template <class Pool>
  static void list_as_free(Pool& pool, block_id block) {
    pool.push_free(block);
  }
  template <class Pool>
  static void miscount_idle(Pool& pool) {
    ++pool.idle_count_;
  }
  template <class Pool>
  static void withdraw_candidate(Pool& pool, block_id block) {
    pool.eviction_.erase(slot_id{to_index(block)});
  }
};

}  // namespace llmmem::inline v0
