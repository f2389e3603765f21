/// @file
/// The block pool: which blocks are free, which are in use and by how many owners, and which hold contents
/// worth keeping.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/concepts.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/paging/block_history.hpp>
#include <llmmem/paging/block_record.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/free_list.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The construction parameters of a block pool.
struct block_pool_options {
  std::uint64_t blocks = 0;          ///< usable blocks, 1 to `max_blocks`, plus the null block
  std::uint64_t block_capacity = 0;  ///< the most blocks that `resize` may set; 0: at most `blocks`
  std::string name = "block_pool";   ///< the name in error texts
  metadata_source metadata{};        ///< source of memory for its tables
};

/// Counts since construction, and the present division of the blocks: `active + idle + free == blocks`.
struct block_pool_stats {
  std::uint64_t blocks = 0;       ///< usable
  std::uint64_t active = 0;       ///< referenced
  std::uint64_t idle = 0;         ///< unreferenced, contents kept: eviction candidates
  std::uint64_t free = 0;         ///< unreferenced, contents worthless
  std::uint64_t retiring = 0;     ///< referenced but no longer usable: they leave with their last reference
  std::uint64_t allocations = 0;  ///< blocks allocated
  std::uint64_t evictions = 0;    ///< idle blocks whose contents were dropped
  std::uint64_t evicting_allocations = 0;  ///< of those, blocks evicted by the allocation that took them
  std::size_t metadata_bytes = 0;          ///< of the pool and its eviction policy
};

/// A callback that an allocation calls with the blocks whose contents it drops: `noexcept`, so that it cannot
/// stop the allocation halfway. It may undo the caching of other blocks (`unmark_cached`). If it has a member
/// `reported_alone(block)` that returns true for a block, that block is the last one reported in its call, so
/// that the allocation chooses the next block after the callback has undone its caching.
template <class F>
concept eviction_callback = std::is_nothrow_invocable_v<F&, std::span<const block_id>>;

/// A callback that does nothing.
struct ignore_eviction {
  void operator()(std::span<const block_id>) const noexcept {}
};

/// Manages blocks of one size by index; it does not own the backing memory.
///
/// A block is *active* while it has references. When the last one is released, a block marked cached becomes
/// *idle*: it keeps its contents and joins the eviction order. Any other block becomes *free*. Allocation
/// first takes free blocks, the most recently freed one first, then evicts idle ones: the free list and the
/// eviction list form one queue with the worthless blocks in front (as in vLLM's block pool). Batches are
/// released back to front, so the tail of a sequence is evicted before its head.
///
/// `share` and `release` accept a `block_id`, checked for range, life and double release, or a
/// `block_handle`, which also detects handles that are stale or from another pool. A call with several blocks
/// succeeds for all of them or changes nothing. To free blocks that a kernel may still read, use
/// `deferred_frees`.
///
/// A running pool can be resized. Blocks are usable from id 1 to `blocks()`. When a resize lowers `blocks()`,
/// the active blocks above it retire: their holders keep them, but the pool does not allocate them again.
///
/// @tparam Eviction  orders the idle blocks; slot i represents block i.
/// @tparam FreeList  orders the free blocks.
/// @tparam History  remembers what audits report of a block in addition to its last transition.
///
/// @par Complexity   allocate and release O(1) per block (plus the policy's cost when it evicts); about 12
///   bytes of metadata per block in addition to the policy's, allocated once; nothing is allocated later.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Moves   handles move with the pool; a moved-from pool may only be destroyed or assigned to.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; everything else is `noexcept`.
template <eviction_policy Eviction = lru_eviction, free_list FreeList = lifo_free_list,
          block_history History = paging::no_history>
class block_pool {
 public:
  explicit block_pool(block_pool_options options);

  /// For policies that need more than a capacity. `eviction` must have a slot for the null block and for each
  /// block that may ever exist, and must track none of them yet.
  block_pool(block_pool_options options, Eviction eviction);

  /// Allocates `out.size()` blocks with one reference each, or none.
  /// @param on_evict  called, `noexcept`, with each idle block whose contents are dropped, before it is
  ///   allocated.
  /// @param neighbour  the block to which the first new block should be adjacent, for free lists that support
  ///   it.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<block_id> out, OnEvict&& on_evict = {},
                        block_id neighbour = null_block) noexcept;
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<block_handle> out, OnEvict&& on_evict = {},
                        block_id neighbour = null_block) noexcept;

  /// Allocates one block.
  template <eviction_callback OnEvict = ignore_eviction>
  result<block_handle> allocate(OnEvict&& on_evict = {}) noexcept;

  /// Adds a reference to each block and revives idle ones, or changes nothing. A free block is refused.
  result<void> share(std::span<const block_id> blocks) noexcept { return share_all(blocks); }
  result<void> share(std::span<const block_handle> blocks) noexcept { return share_all(blocks); }
  result<void> share(block_id block) noexcept { return share_one(block); }
  result<void> share(block_handle block) noexcept { return share_one(block); }

  /// Drops a reference from each block, the last of the span first, or changes nothing.
  result<void> release(std::span<const block_id> blocks) noexcept { return release_all(blocks); }
  result<void> release(std::span<const block_handle> blocks) noexcept { return release_all(blocks); }
  result<void> release(block_id block) noexcept { return release_all(std::span<const block_id>(&block, 1)); }
  result<void> release(block_handle block) noexcept {
    return release_all(std::span<const block_handle>(&block, 1));
  }

  /// Declares that an active block's contents are worth keeping after its last release. @pre active, not
  /// cached, not retiring.
  void mark_cached(block_id block, const access_hint& hint = {}) noexcept;

  /// Undoes `mark_cached`: an idle block becomes free at once. Has no effect on a block that is not cached.
  void unmark_cached(block_id block) noexcept;

  /// Declares that an active block's contents are wrong: `record(block).is_invalid()` until the block is
  /// allocated again. @pre active, not cached.
  void invalidate(block_id block) noexcept { records_[to_index(block)].invalidate(); }

  /// Reports an access to a cached block to the policy.
  void touch(block_id block, const access_hint& hint = {}) noexcept;

  /// Whether the policy uses hints: if not, callers need not compute them.
  [[nodiscard]] bool reads_hints() const noexcept { return detail::reads_hints(eviction_); }

  /// Gives the policy facts other than accesses: when a cached block is next used, what it is worth, the
  /// time. Has no effect under a policy that does not use them.
  void expect(block_id block, std::uint64_t next_use) noexcept {
    detail::expect(eviction_, slot_id{to_index(block)}, next_use);
  }
  void retain(block_id block, retention keep) noexcept {
    detail::retain(eviction_, slot_id{to_index(block)}, keep);
  }
  void advance(std::uint64_t now) noexcept { detail::advance(eviction_, now); }

  /// Replaces the active blocks `source` by the free blocks `destination`, which take over references and
  /// cached state; the sources become free. Handles to the sources become stale. @pre each source is active,
  /// each destination free, none is named twice.
  void relocate(std::span<const block_move> moves) noexcept;

  /// Evicts up to `count` idle blocks into the free list; returns how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t reclaim(std::uint64_t count, OnEvict&& on_evict = {}) noexcept;

  /// Evicts idle blocks until at most `most` are left; returns how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t trim_idle(std::uint64_t most, OnEvict&& on_evict = {}) noexcept {
    return evict_while([&](std::uint64_t) noexcept { return idle_count_ > most; }, on_evict);
  }

  /// Returns the current handle of an active or idle block.
  [[nodiscard]] block_handle handle(block_id block) const noexcept {
    return {block, records_[to_index(block)].generation(), owner_};
  }

  /// Checks that `handle` names a block of this pool in its present generation, active or idle.
  [[nodiscard]] result<void> check(block_handle handle) const noexcept;
  /// Checks that `block` is a block of this pool, active or idle.
  [[nodiscard]] result<void> check(block_id block) const noexcept;

  /// Returns the record of one block. @pre `block` is at most `block_capacity()`.
  [[nodiscard]] const block_record& record(block_id block) const noexcept {
    return records_[to_index(block)];
  }

  /// Sets the number of usable blocks to `blocks`. Growing takes effect at once; the backing memory must
  /// exist. Shrinking drops the contents of the blocks above, idle or active, and retires the active ones.
  /// @return how many blocks are retiring: at 0, the memory above `blocks` may be reclaimed.
  ///   `errc::bad_block_count` for 0 and for more than `block_capacity()`.
  /// @par Complexity   O(`block_capacity()`).
  template <eviction_callback OnEvict = ignore_eviction>
  result<std::uint64_t> resize(std::uint64_t blocks, OnEvict&& on_evict = {}) noexcept;

  /// Usable blocks.
  [[nodiscard]] std::uint64_t blocks() const noexcept { return last_; }
  /// The most blocks that `resize` may set.
  [[nodiscard]] std::uint64_t block_capacity() const noexcept { return records_.size() - 1; }
  [[nodiscard, deprecated("call block_capacity()")]] std::uint64_t most_blocks() const noexcept {
    return block_capacity();
  }
  /// Blocks above `blocks()` that are still referenced.
  [[nodiscard]] std::uint64_t retiring() const noexcept { return retiring_; }
  [[nodiscard]] bool is_retiring(block_id block) const noexcept { return to_index(block) > last_; }
  [[nodiscard]] std::uint64_t free() const noexcept { return free_.size(); }
  /// Calls `visit(block_id)` for each free block. O(blocks).
  template <class Visit>
  void for_each_free(Visit&& visit) const {
    free_.for_each(visit);
  }
  [[nodiscard]] std::uint64_t idle() const noexcept { return idle_count_; }
  /// Blocks that `allocate` could return now.
  [[nodiscard]] std::uint64_t available() const noexcept { return free_.size() + idle_count_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }
  [[nodiscard]] std::uint32_t owner() const noexcept { return owner_; }
  [[nodiscard]] const Eviction& eviction() const noexcept { return eviction_; }

  /// Sets the actor that the history records from now on.
  void set_actor(std::uint32_t actor) noexcept { history_.set_actor(actor); }
  /// Returns the last transition of a block, and what the history remembers of it. Allocates.
  [[nodiscard]] std::string last_of(block_id block) const;

  /// Idle blocks whose contents were dropped, since construction.
  [[nodiscard]] std::uint64_t evictions() const noexcept { return evictions_; }
  [[nodiscard]] block_pool_stats stats() const noexcept;

  /// Proves the pool's invariants in O(blocks): each block is counted exactly once as active, idle or free,
  /// and the policy's candidates are exactly the idle ones. Returns one sentence for each violation, naming
  /// the block and its last transition; an empty result means proven. Allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;  // tests corrupt a pool on purpose to check that audit() names the fault

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name_.c_str()};
  }

  [[nodiscard]] static block_id id_of(block_id block) noexcept { return block; }
  [[nodiscard]] static block_id id_of(const block_handle& handle) noexcept { return handle.block; }
  void give(block_id block, block_id& out) const noexcept { out = block; }
  void give(block_id block, block_handle& out) const noexcept { out = handle(block); }

  template <class Name, class OnEvict>
  result<void> allocate_all(std::span<Name> out, OnEvict& on_evict, block_id neighbour) noexcept;
  template <class More, class OnEvict>
  std::uint64_t evict_while(More&& more, OnEvict& on_evict) noexcept;
  // Evicts idle blocks until the free list has `count`.
  template <class OnEvict>
  LLMMEM_OUTLINED result<void> make_free(std::uint64_t count, OnEvict& on_evict) noexcept;
  /// Whether the name is current; the block may have no references.
  [[nodiscard]] bool is_named_by(block_id block) const noexcept;
  [[nodiscard]] bool is_named_by(block_handle handle) const noexcept;
  template <class Name>
  [[nodiscard]] bool is_active(const Name& name) const noexcept {
    return is_named_by(name) && records_[to_index(id_of(name))].is_active();
  }
  template <class Name>
  result<void> check_share(const Name& name, std::size_t count) const noexcept;
  template <class Name>
  result<void> share_one(const Name& name) noexcept;
  template <class Name>
  result<void> share_all(std::span<const Name> names) noexcept;
  template <class Name>
  result<void> release_all(std::span<const Name> names) noexcept;
  void add_reference(block_id block) noexcept;
  using unpinned = detail::unpinned_slots<Eviction>;
  void drop_reference(block_id block, unpinned& idle) noexcept;
  void undo_drop(block_id block) noexcept;
  block_id take_free(block_id neighbour) noexcept;
  void push_free(block_id block) noexcept;

  std::string name_;
  detail::fixed_array<block_record> records_;  // by block; record 0 is the null block's
  FreeList free_;
  std::uint64_t last_;  // the highest usable id
  std::uint64_t retiring_ = 0;
  std::uint64_t idle_count_ = 0;
  std::uint32_t owner_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t evicting_allocations_ = 0;
  Eviction eviction_;
  LLMMEM_NO_UNIQUE_ADDRESS History history_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/block_pool_body.hpp>
