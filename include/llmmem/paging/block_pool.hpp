/// @file
/// The block pool: which blocks are free, which are in use and by how many, which hold something worth
/// keeping.
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

/// How a block pool is built.
struct block_pool_options {
  std::uint64_t blocks = 0;         ///< usable blocks, 1 to `max_blocks`; the null block comes on top
  std::uint64_t most_blocks = 0;    ///< what `resize` may raise that to; 0: no more than `blocks`
  std::string name = "block_pool";  ///< what error texts call it
  metadata_source metadata{};       ///< where its tables come from
};

/// Counts since construction, and how the blocks are divided now: `active + idle + free == blocks`.
struct block_pool_stats {
  std::uint64_t blocks = 0;       ///< usable
  std::uint64_t active = 0;       ///< referenced
  std::uint64_t idle = 0;         ///< unreferenced, contents kept: eviction candidates
  std::uint64_t free = 0;         ///< unreferenced, contents worthless
  std::uint64_t retiring = 0;     ///< referenced, no longer usable: they leave with their last reference
  std::uint64_t allocations = 0;  ///< blocks handed out
  std::uint64_t evictions = 0;    ///< idle blocks whose contents were given up
  std::uint64_t evicting_allocations = 0;  ///< of those, blocks that an allocation gave up to have them
  std::size_t metadata_bytes = 0;          ///< of the pool and its eviction policy
};

/// What an allocation calls with the blocks whose contents it gives up: `noexcept`, so that it cannot stop
/// halfway. It may take back that other blocks are cached (`unmark_cached`). If it has a member
/// `told_alone(block)`, a block for which that says yes is the last of those it is told of in one call, so
/// that what it takes back counts before the next block is chosen.
template <class F>
concept eviction_callback = std::is_nothrow_invocable_v<F&, std::span<const block_id>>;

/// The callback that does nothing.
struct ignore_eviction {
  void operator()(std::span<const block_id>) const noexcept {}
};

/// Blocks of one size, by index; the backing memory is somebody else's.
///
/// A block is *active* while it has references. When the last one goes, a block marked cached becomes *idle*:
/// it keeps its contents and joins the eviction order. Any other becomes *free*. Allocation takes free blocks
/// first, the one freed last before the others, then evicts idle ones: the free list and the eviction list
/// are one queue with the worthless blocks in front (as in vLLM's block pool). Batches are released back to
/// front, so of a sequence's blocks the tail is evicted before the head.
///
/// To `share` and `release`, blocks are named by `block_id`, checked for range, life and double release, or
/// by `block_handle`, which also catches handles that are stale or from another pool. Calls that take several
/// blocks do all or nothing. To free blocks that a kernel may still read, see `deferred_frees`.
///
/// A running pool can be resized. Blocks are usable from id 1 to `blocks()`; when that shrinks, those above
/// in use retire: they stay with their holders, but nobody new gets them, and they do not come back.
///
/// @tparam Eviction  orders the idle blocks; slot i stands for block i.
/// @tparam FreeList  orders the free ones.
/// @tparam History  what audits tell of a block beside its last transition.
///
/// @par Complexity   allocate and release O(1) a block (plus the policy's, when it evicts); about 12 bytes of
///      metadata a block beside the policy's, allocated once; nothing is allocated later.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Moves   handles go along; a moved-from pool may only be destroyed or assigned to.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; everything else is `noexcept`.
template <eviction_policy Eviction = lru_eviction, free_list FreeList = lifo_free_list,
          block_history History = paging::no_history>
class block_pool {
 public:
  explicit block_pool(block_pool_options options);

  /// For policies that are not built from a capacity alone: `eviction` must hold a slot for each block that
  /// there may ever be and the null block, all unknown.
  block_pool(block_pool_options options, Eviction eviction);

  /// Gives out `out.size()` blocks with one reference each, or none.
  /// @param on_evict  called, `noexcept`, with each idle block whose contents are given up, before it is
  /// handed out.
  /// @param beside  the block that the first of them should lie next to, for free lists that care.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<block_id> out, OnEvict&& on_evict = {},
                        block_id beside = null_block) noexcept;
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<block_handle> out, OnEvict&& on_evict = {},
                        block_id beside = null_block) noexcept;

  /// Gives out one block.
  template <eviction_callback OnEvict = ignore_eviction>
  result<block_handle> allocate(OnEvict&& on_evict = {}) noexcept;

  /// Adds a reference to each block, reviving idle ones, or to none. A block that is free is refused.
  result<void> share(std::span<const block_id> blocks) noexcept { return share_all(blocks); }
  result<void> share(std::span<const block_handle> blocks) noexcept { return share_all(blocks); }
  result<void> share(block_id block) noexcept { return share_all(std::span<const block_id>(&block, 1)); }
  result<void> share(block_handle block) noexcept {
    return share_all(std::span<const block_handle>(&block, 1));
  }

  /// Takes a reference from each block, the last of the span first, or from none.
  result<void> release(std::span<const block_id> blocks) noexcept { return release_all(blocks); }
  result<void> release(std::span<const block_handle> blocks) noexcept { return release_all(blocks); }
  result<void> release(block_id block) noexcept { return release_all(std::span<const block_id>(&block, 1)); }
  result<void> release(block_handle block) noexcept {
    return release_all(std::span<const block_handle>(&block, 1));
  }

  /// Declares that an active block's contents are worth keeping after its last release. @pre active, not
  /// cached, not retiring.
  void mark_cached(block_id block, const access_hint& hint = {}) noexcept;

  /// Takes that back: an idle block becomes free at once. Nothing happens to a block that is not cached.
  void unmark_cached(block_id block) noexcept;

  /// Declares that an active block's contents are wrong: `record(block).is_invalid()` until the block is
  /// allocated again. @pre active, not cached.
  void invalidate(block_id block) noexcept { records_[to_index(block)].invalidate(); }

  /// Tells the policy of an access to a cached block.
  void touch(block_id block, const access_hint& hint = {}) noexcept;

  /// Whether the policy takes anything from hints: where it does not, callers need not make them up.
  [[nodiscard]] bool reads_hints() const noexcept { return detail::reads_hints(eviction_); }

  /// Tells the policy what it may want to know beside accesses: when a cached block is next used, what it is
  /// worth, what time it is. Nothing happens under a policy that has no use for it.
  void expect(block_id block, std::uint64_t next_use) noexcept {
    detail::expect(eviction_, slot_id{to_index(block)}, next_use);
  }
  void retain(block_id block, retention keep) noexcept {
    detail::retain(eviction_, slot_id{to_index(block)}, keep);
  }
  void advance(std::uint64_t now) noexcept { detail::advance(eviction_, now); }

  /// The free blocks `destination` take the places of the active blocks `source`, references, contents' worth
  /// and all; the sources are free. Handles to the sources become stale. @pre each source is active, each
  /// destination free, none is named twice.
  void relocate(std::span<const block_move> moves) noexcept;

  /// Evicts up to `count` idle blocks into the free list; says how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t reclaim(std::uint64_t count, OnEvict&& on_evict = {}) noexcept;

  /// Evicts idle blocks until no more than `most` are left; says how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t trim_idle(std::uint64_t most, OnEvict&& on_evict = {}) noexcept {
    return evict_while([&](std::uint64_t) noexcept { return idle_count_ > most; }, on_evict);
  }

  /// The current handle of an active or idle block.
  [[nodiscard]] block_handle handle(block_id block) const noexcept {
    return {block, records_[to_index(block)].generation(), owner_};
  }

  /// Whether `handle` names a block of this pool in its present life, held by somebody.
  [[nodiscard]] result<void> check(block_handle handle) const noexcept;
  /// Whether `block` is a block of this pool held by somebody.
  [[nodiscard]] result<void> check(block_id block) const noexcept;

  /// What is known of one block. @pre `block` is at most `most_blocks()`.
  [[nodiscard]] const block_record& record(block_id block) const noexcept {
    return records_[to_index(block)];
  }

  /// Makes `blocks` blocks usable, from now on. Growing takes effect at once; the backing memory must be
  /// there. Shrinking gives up what the blocks above keep, idle or active, and retires the active ones.
  /// @return how many are retiring: when none is, the memory above `blocks` is nobody's.
  ///         `errc::bad_block_count` for 0 and for more than `most_blocks()`.
  /// @par Complexity   O(`most_blocks()`).
  template <eviction_callback OnEvict = ignore_eviction>
  result<std::uint64_t> resize(std::uint64_t blocks, OnEvict&& on_evict = {}) noexcept;

  /// Usable blocks.
  [[nodiscard]] std::uint64_t blocks() const noexcept { return last_; }
  /// What `resize` may raise them to.
  [[nodiscard]] std::uint64_t most_blocks() const noexcept { return records_.size() - 1; }
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
  /// Blocks that `allocate` could give out now.
  [[nodiscard]] std::uint64_t available() const noexcept { return free_.size() + idle_count_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }
  [[nodiscard]] std::uint32_t owner() const noexcept { return owner_; }
  [[nodiscard]] const Eviction& eviction() const noexcept { return eviction_; }

  /// Who acts from now on, for the history.
  void act_for(std::uint32_t actor) noexcept { history_.act_for(actor); }
  /// The last transition of a block, and what the history has of it. Allocates.
  [[nodiscard]] std::string last_of(block_id block) const;

  /// Idle blocks whose contents were given up, since construction.
  [[nodiscard]] std::uint64_t evictions() const noexcept { return evictions_; }
  [[nodiscard]] block_pool_stats stats() const noexcept;

  /// Proves the pool's invariants in O(blocks): each is counted exactly once as active, idle or free, and the
  /// policy's candidates are exactly the idle ones. Returns one sentence for each violation, naming the block
  /// and its last transition; none means proven. Allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;  // tests corrupt a pool on purpose, to see audit() name it

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name_.c_str()};
  }

  [[nodiscard]] static block_id id_of(block_id block) noexcept { return block; }
  [[nodiscard]] static block_id id_of(const block_handle& handle) noexcept { return handle.block; }
  void give(block_id block, block_id& out) const noexcept { out = block; }
  void give(block_id block, block_handle& out) const noexcept { out = handle(block); }

  template <class Name, class OnEvict>
  result<void> allocate_all(std::span<Name> out, OnEvict& on_evict, block_id beside) noexcept;
  template <class More, class OnEvict>
  std::uint64_t evict_while(More&& more, OnEvict& on_evict) noexcept;
  // Brings the free list to `count` blocks, evicting what is missing.
  template <class OnEvict>
  LLMMEM_OUTLINED result<void> make_free(std::uint64_t count, OnEvict& on_evict) noexcept;
  /// Whether a record goes by that name now; it may have no references.
  [[nodiscard]] bool is_named_by(block_id block) const noexcept;
  [[nodiscard]] bool is_named_by(block_handle handle) const noexcept;
  template <class Name>
  result<void> share_all(std::span<const Name> names) noexcept;
  template <class Name>
  result<void> release_all(std::span<const Name> names) noexcept;
  void add_reference(block_id block) noexcept;
  void drop_reference(block_id block) noexcept;
  void undo_drop(block_id block) noexcept;
  block_id take_free(block_id beside) noexcept;
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
