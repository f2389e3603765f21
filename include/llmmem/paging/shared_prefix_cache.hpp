/// @file
/// `shared_prefix_cache`: blocks found by prefix, taken and released by many threads concurrently.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/atomic_array.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/hash/aes_pmac.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/chained_keys.hpp>
#include <llmmem/metadata.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/detail/shared_index.hpp>
#include <llmmem/paging/detail/shared_state.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/sharded_free_list.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/result.hpp>

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The mutex that `commit` holds while it runs: `std::mutex`, a spin lock of the engine, or nothing.
template <class M>
concept writer_mutex = std::default_initializable<M> && requires(M& mutex) {
  mutex.lock();
  mutex.unlock();
};

/// For engines with one writer, or with writers that already exclude each other.
struct null_mutex {
  void lock() noexcept {}
  void unlock() noexcept {}
};

static_assert(writer_mutex<null_mutex>);

/// The policies of a `shared_prefix_cache`. Inherit from it and shadow the policies to change.
struct shared_traits {
  using hash = aes_pmac_128;            ///< `block_hash`: keys of the prefix chain
  using verification = verify_tokens;   ///< `block_verification`: how a hit is verified
  using mutex = null_mutex;             ///< `writer_mutex`: excludes concurrent calls of `commit`
  using steps = paging::uninterrupted;  ///< `interleaving`, for tests
};

/// The construction parameters of a `shared_prefix_cache`.
struct shared_prefix_options {
  std::uint64_t blocks = 0;                  ///< usable blocks, 1 to `max_blocks`
  std::uint32_t block_tokens = 16;           ///< tokens a block holds, 1 to `max_block_tokens`
  std::uint32_t shards = 8;                  ///< free lists: the number of threads that allocate and free
  hash_seed seed{};                          ///< keys the hash chain
  std::string name = "shared_prefix_cache";  ///< the name in error texts
  metadata_source metadata{};                ///< source of memory for its tables
};

/// The end of a chain of cached blocks, where the next ones are committed. A plain value.
struct chain_end {
  prefix_context context{};
  block_key key{};               ///< of all contents up to here
  block_id block = null_block;   ///< holds the last contents; `null_block` at the root
  std::uint32_t generation = 0;  ///< of that block

  friend constexpr bool operator==(const chain_end&, const chain_end&) noexcept = default;
};

/// The result of `match`.
struct shared_match {
  std::uint64_t tokens = 0;  ///< cached tokens
  std::uint64_t blocks = 0;  ///< blocks that hold them, each with a reference that the caller now owns
  chain_end end{};           ///< after them
};

/// The result of `commit`.
struct shared_commit {
  std::uint64_t registered = 0;  ///< blocks that became cached
  std::uint64_t duplicates = 0;  ///< blocks whose contents are cached in another block; they stay private
  chain_end end{};               ///< after all of them: for the sequence's next commit
};

/// The approximate state of a `shared_prefix_cache`, and its counts since construction.
struct shared_stats {
  std::uint64_t blocks = 0;            ///< usable
  std::uint64_t active = 0;            ///< referenced by callers or by a cached block that continues them
  std::uint64_t idle = 0;              ///< cached, unreferenced: evictable at once
  std::uint64_t free = 0;              ///< neither
  std::uint64_t cached = 0;            ///< found by `match`
  std::uint64_t registrations = 0;     ///< blocks that became cached
  std::uint64_t duplicates = 0;        ///< commits that found equal contents already cached
  std::uint64_t evictions = 0;         ///< blocks whose cached contents were dropped
  std::size_t metadata_bytes = 0;      ///< states, index, lists
  std::size_t verification_bytes = 0;  ///< the verification's, counted separately
};

/// A prefix cache for engines whose threads must not wait for each other: any number of threads may call
/// `match`, `share`, `release`, `allocate` and `evict` without a lock, while one thread commits.
///
/// `paged_allocator` is for an engine whose scheduler is one thread, and offers much more: sequences, tables,
/// copy on write, deferred frees, exact policies. Here the caller keeps its own block tables, and ownership
/// of blocks moves by reference:
///
///     llmmem::shared_prefix_cache<> cache({.blocks = 4096});
///     std::vector<llmmem::block_id> table(n);                        // a sequence's, one for each block
///     auto hit = cache.match(prompt, context, table);                // any thread
///     auto rest = std::span(table).subspan(hit.blocks);
///     cache.allocate(rest).value();                                  // any thread
///     ...                                                            // write the KV of the missing blocks
///     cache.commit(hit.end, prompt.subspan(hit.tokens), rest).value();   // the writer
///     cache.release(table).value();                                  // any thread
///
/// Guarantees
///  - A block that a caller holds keeps its contents until the caller releases it. A reader that gets a block
///    from `match` sees all writes to it before its `commit`; all reads of a block happen before the writes
///    of the next caller that gets it from `allocate`.
///  - The cached prefixes are closed: a cached block keeps a reference to the block before it, so no head is
///    evicted before its tail, and every cached block can be found.
///  - `match` is linearizable: at some moment during the call, its result was the longest cached prefix. Also
///    linearizable are the commit of one block (of several: each by itself, in order), the release of one
///    block, each single eviction, and the refusal of `try_allocate`.
///
/// Eviction order. A clock's hand passes over the blocks (second chance). It evicts only leaves, and skips
/// leaves released since its last visit, accurate to an eighth of a round; after two rounds it takes any
/// leaf. From an evicted leaf it continues to the block before it, unless that block was also released since:
/// so it evicts an idle chain tail first, as far as necessary. If a reader revives an idle block first, the
/// hand skips it. No other order is guaranteed, and releases concurrent with an eviction may count late.
///
/// @tparam Traits  the policies, see `shared_traits`.
///
/// @par Progress   all calls except `commit` are lock-free: a call repeats an exchange only because another
///   thread's succeeded, and no call waits for a stalled thread (blocks that the stalled thread was about to
///   free stay unavailable). None is wait-free: one thread may lose again and again. `commit` waits only for
///   `Traits::mutex`.
/// @par Thread safety   all calls may run concurrently, except `commit` under `null_mutex` (one at a time)
///   and `audit` (while nothing else runs). Only the destructor releases the tables' memory, so a late thread
///   may read an old state or link; it then confirms what it read by an exchange. Generations wrap after 2^32
///   lives of one block: a `block_handle` or `chain_end` kept that long would be accepted; nothing else
///   depends on it.
/// @par Complexity   `match`, `commit`, `release`: O(1) per block, and hashing; `allocate`: O(1) per block
///   from the free lists, otherwise the distance that the hand moves, at most three rounds: O(blocks). No
///   heap allocation after construction. 57 bytes per block, and the verification's.
/// @par Moves   neither moved nor copied, because threads keep references to it.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`; all but `audit` is `noexcept`. A
///   mutex whose `lock` throws ends the program.
template <class Traits = shared_traits>
class shared_prefix_cache {
 public:
  static_assert(
      requires {
        typename Traits::hash;
        typename Traits::verification;
        typename Traits::mutex;
        typename Traits::steps;
      }, "Traits lacks a policy: inherit from llmmem::shared_traits and shadow the policies to change");
  using hash_type = typename Traits::hash;
  using verification_type = typename Traits::verification;
  using mutex_type = typename Traits::mutex;
  using steps = typename Traits::steps;
  using free_list_type = basic_sharded_free_list<steps>;

  static_assert(block_hash<hash_type>, "Traits::hash must be a block_hash");
  static_assert(block_verification<verification_type>, "Traits::verification must be a block_verification");
  static_assert(writer_mutex<mutex_type>, "Traits::mutex must be a writer_mutex");
  static_assert(interleaving<steps>, "Traits::steps must be an interleaving");

  explicit shared_prefix_cache(const shared_prefix_options& options);
  shared_prefix_cache(const shared_prefix_cache&) = delete;
  shared_prefix_cache& operator=(const shared_prefix_cache&) = delete;

  // Any thread

  /// Finds the longest cached prefix of `tokens`, in at most `out.size()` full blocks, and takes a reference
  /// to each.
  ///
  /// An engine that needs the last token's logits must compute that token, so it passes all tokens except the
  /// last.
  shared_match match(std::span<const token_id> tokens, const prefix_context& context,
                     std::span<block_id> out) noexcept;

  /// Returns the end of an empty chain, to commit a sequence from its beginning.
  [[nodiscard]] chain_end root(const prefix_context& context = {}) const noexcept {
    return {.context = context, .key = hash_.root(context), .block = null_block, .generation = 0};
  }

  /// Allocates `out.size()` blocks with one reference each, or none; evicts blocks if too few are free.
  /// @param on_evict  called on this thread, `noexcept`, with blocks whose contents are dropped, before any
  ///   caller gets them.
  /// @return `errc::out_of_blocks` if the hand found nothing to evict in its rounds and too few blocks are
  ///   free. Blocks that it had already evicted stay evicted.
  template <eviction_callback OnEvict = ignore_eviction>
  result<void> allocate(std::span<block_id> out, shard_id shard = {}, OnEvict&& on_evict = {}) noexcept;

  /// Allocates only from free blocks: nothing is evicted, and a refusal is exact.
  result<void> try_allocate(std::span<block_id> out, shard_id shard = {}) noexcept;

  /// Adds a reference to each block, for a second holder. @pre the caller holds a reference to each.
  /// @return the errors of `release`, and `errc::too_many_shares`; then none is added.
  result<void> share(std::span<const block_id> blocks) noexcept;

  /// Drops one of the caller's references from each block, the last of the span first. Cached blocks stay
  /// cached; private ones become free. If two threads release the same last reference at the same moment, the
  /// cache cannot detect the double release.
  /// @return `errc::double_free` for a block without references, `errc::null_handle`, `errc::foreign_handle`
  ///   for a block that is not of this cache, for a handle also `errc::stale_handle`: the blocks after it in
  ///   the span are released; it and the blocks before it are not.
  result<void> release(std::span<const block_id> blocks, shard_id shard = {}) noexcept {
    return release_all(blocks, shard);
  }
  result<void> release(std::span<const block_handle> blocks, shard_id shard = {}) noexcept {
    return release_all(blocks, shard);
  }

  /// Returns the handle, with the present generation, of a block that the caller holds.
  [[nodiscard]] block_handle handle(block_id block) const noexcept {
    return {block, state(block).generation(), owner_};
  }

  /// Drops the contents of `count` blocks, or of as many as the hand finds; returns how many.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t evict(std::uint64_t count, shard_id shard = {}, OnEvict&& on_evict = {}) noexcept;

  /// Drops all contents without holders; returns how many blocks. Exact while no thread releases.
  template <eviction_callback OnEvict = ignore_eviction>
  std::uint64_t drop_idle(shard_id shard = {}, OnEvict&& on_evict = {}) noexcept;

  // The writer

  /// Caches blocks after `after`: block i holds the i-th `block_tokens()` of `tokens`. The blocks must be
  /// written, and must not be written again. Tokens after the last full block are ignored.
  ///
  /// If equal contents are already cached, the caller keeps its own block, private, and the chain continues
  /// after the cached block, to which the caller has no reference.
  /// @pre the caller holds all blocks, and no thread releases them during the call.
  /// @return `errc::stale_handle` if the block that `after` names has been evicted, which happens only to a
  ///   block that the caller does not hold: then commit from `root`. `errc::size_mismatch` if there are fewer
  ///   blocks than full ones in `tokens`; `errc::double_free` for a block without references. After these
  ///   errors nothing has changed. `errc::already_cached` for a block that is cached with other contents, or
  ///   that would get more children than a block can have, `errc::too_many_shares`: the blocks before it are
  ///   committed.
  result<shared_commit> commit(const chain_end& after, std::span<const token_id> tokens,
                               std::span<const block_id> blocks) noexcept;

  // The whole cache

  [[nodiscard]] std::uint64_t blocks() const noexcept { return states_.size() - 1; }
  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return block_tokens_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return name_; }

  /// Counts by reading the state of each block, O(blocks). Calls of `match` are not counted, because all
  /// threads would contend for a common counter. Exact while no other call runs.
  [[nodiscard]] shared_stats stats() const noexcept;

  /// Proves that each block is free, private or cached and nothing else, and that exactly the cached ones are
  /// found, each by its key and after a cached block to which it keeps a reference. Returns one sentence for
  /// each violation. O(blocks); allocates. @pre no other call runs.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;

  struct entry {
    block_key key{};
    block_id parent = null_block;
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name_.c_str()};
  }
  [[nodiscard]] detail::shared_state state(block_id block) const noexcept {
    return detail::shared_state(word_of(block).load(std::memory_order_relaxed));
  }
  [[nodiscard]] bool is_ours(block_id block) const noexcept {
    return block != null_block && to_index(block) < states_.size();
  }
  /// Accepts any number from a caller: an id that is not of this cache reads as the null block, which is
  /// never held.
  [[nodiscard]] std::atomic_ref<std::uint64_t> word_of(block_id block) const noexcept {
    return states_[is_ours(block) ? to_index(block) : 0];
  }
  [[nodiscard]] static block_id id_of(block_id block) noexcept { return block; }
  [[nodiscard]] static block_id id_of(const block_handle& handle) noexcept { return handle.block; }
  [[nodiscard]] result<void> check(block_id block, detail::shared_state seen) const noexcept;
  [[nodiscard]] result<void> check(const block_handle& handle, detail::shared_state seen) const noexcept;

  bool pin(block_id block) noexcept;
  bool unpin(block_id block) noexcept;
  [[nodiscard]] block_id find_and_pin(const block_key& key, std::span<const token_id> part, block_id parent,
                                      const prefix_context& context) noexcept;
  bool register_block(block_id block, const chain_end& after, const block_key& key,
                      std::span<const token_id> part) noexcept;
  template <class Name>
  result<void> release_all(std::span<const Name> names, shard_id shard) noexcept;
  template <class OnEvict>
  std::uint64_t sweep(std::uint64_t count, shard_id shard, OnEvict& on_evict) noexcept;
  bool claim(block_id block, std::uint8_t now, std::uint32_t least_age) noexcept;
  [[nodiscard]] block_id forget(block_id block) noexcept;
  void give_back(std::span<const block_id> evicted, shard_id shard) noexcept;

  static constexpr std::size_t batch = 32;  // blocks returned to a free list together
  static constexpr std::uint32_t rounds_by_age = 2;

  std::string name_;
  std::uint32_t block_tokens_;
  std::uint32_t owner_ = 0;
  detail::atomic_array<std::uint64_t> states_;  // by block: a shared_state
  detail::shared_index index_;
  // By block. The writer fills an entry before it caches the block; holders of the block read it.
  detail::fixed_array<entry> entries_;
  verification_type verification_;
  hash_type hash_;
  free_list_type free_;
  std::uint64_t eighth_;    // of a round of the hand, in blocks
  std::uint32_t full_age_;  // age of a block that was last released a full round ago, in eighths
  LLMMEM_NO_UNIQUE_ADDRESS mutex_type mutex_;

  alignas(64) std::atomic<std::uint64_t> hand_{0};  // number of blocks that the hand has passed
  std::atomic<std::uint8_t> time_{0};               // rounds of the hand, in eighths
  std::atomic<std::uint32_t> follow_{0};            // the block before the one evicted last
  std::atomic<std::uint64_t> evictions_{0};
  alignas(64) std::atomic<std::uint64_t> registrations_{0};
  std::atomic<std::uint64_t> duplicates_{0};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/shared_prefix_cache_body.hpp>
