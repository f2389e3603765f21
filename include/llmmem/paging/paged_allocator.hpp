/// @file
/// `paged_allocator`: keeps sequences of tokens in fixed-size blocks that share prefixes, are copied on write
/// and are evicted by a policy.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/eviction/admission.hpp>
#include <llmmem/eviction/lru.hpp>
#include <llmmem/hash/aes_pmac.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/hash/chained_keys.hpp>
#include <llmmem/paging/block_pool.hpp>
#include <llmmem/paging/compaction.hpp>
#include <llmmem/paging/deferred_frees.hpp>
#include <llmmem/paging/detail/block_followers.hpp>
#include <llmmem/paging/detail/block_pins.hpp>
#include <llmmem/paging/detail/sequence_record.hpp>
#include <llmmem/paging/free_list.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/outside_keys.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/partial_reuse.hpp>
#include <llmmem/paging/prefix_index.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The policies of a `paged_allocator`. Inherit from it and shadow the policies to change:
///
///     struct my_traits : llmmem::paged_traits { using eviction = llmmem::lfu_eviction; };
///     llmmem::paged_allocator<my_traits> cache({.blocks = 4096});
struct paged_traits {
  using eviction = lru_eviction;       ///< `eviction_policy`: which idle block loses its contents
  using admission = admit_all;         ///< `admission_policy`: which contents are cached
  using history = paging::no_history;  ///< `block_history`: what audits report of a block's past
  using free_list = lifo_free_list;    ///< `free_list`: which free block is allocated next
  using partial = full_blocks_only;    ///< `partial_reuse_policy`: how a match uses the beginning of a block
  using hash = aes_pmac_128;           ///< `block_hash`: keys of the prefix chain
  using keys = paging::prefix_keys;    ///< `outside_key_policy`: what a caller's key identifies
  using verification = verify_tokens;  ///< `block_verification`: how a hit is verified
  using fence = host_fence;            ///< `fence`, trivially copyable: what `release_after` waits for
  using observer = ignore_cache_events;  ///< `cache_observer`: notified of what is cached and evicted
};

/// The bookkeeping of a paged KV cache: which blocks hold the tokens of which sequence.
///
/// It works with block ids only. The engine keeps the keys and values in `physical_blocks()` blocks of its
/// own memory: on a GPU or in a `block_storage`. A sequence grows with `append`, shares cached blocks with
/// `match`, splits with `fork` (copy on write), shrinks with `truncate` and ends with `release`. `commit`
/// declares that the KV of the appended tokens has been written: from then on `match` finds the sequence's
/// full blocks, which outlive the sequence until they are evicted.
///
///     llmmem::paged_allocator<> cache({.blocks = 4096, .block_tokens = 16});
///     auto seq = cache.create().value();
///     auto hit = cache.match(seq, prompt).value();             // blocks of equal prefixes, shared
///     auto rest = cache.append(seq, prompt.subspan(hit.tokens)).value();
///     ...                                                      // compute the KV of `rest`
///     cache.commit(seq).value();                               // now others may share it
///     auto twin = cache.fork(seq).value();                     // no copy until one of them writes
///     cache.release(seq).value();                              // cached blocks stay, evictable
///
/// @tparam Traits  the policies, see `paged_traits`.
///
/// @par Complexity   O(1) per block (plus the policy's cost on eviction), O(1) per token for hashing; no heap
///   allocation after construction, except in `compact` and `audit`. Metadata: 85 bytes per block with the
///   default policies; for each of `max_sequences` 276 bytes (136 more with a policy that retains), 4 per
///   token of one block and 4 per entry that a table may have; and the verification's (4 bytes per token,
///   reported separately). Tables and tokens take memory as they are used.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Moves   handles, tables and fences move with the allocator; a moved-from allocator may only be
///   destroyed or assigned to.
/// @par Waits   never. `release_after` queues blocks until a fence has passed; an `append` that runs short
///   collects them.
/// @par Errors   the constructor throws `length_error` and `out_of_memory`. Every other call is `noexcept`,
///   except `audit` and the compaction calls. A call that can be refused returns a `result`; a refused call
///   leaves sequences and references unchanged (a shortage may have collected deferred frees). A null or
///   stale handle, or one from another allocator, is reported, never followed.
/// @par Sources   block tables, hash chain and queue order: vLLM (Kwon et al., SOSP 2023) and its v1 block
///   pool.
template <class Traits = paged_traits>
class paged_allocator {
 public:
  static_assert(
      requires {
        typename Traits::eviction;
        typename Traits::admission;
        typename Traits::free_list;
        typename Traits::partial;
        typename Traits::history;
        typename Traits::hash;
        typename Traits::keys;
        typename Traits::verification;
        typename Traits::fence;
        typename Traits::observer;
      }, "Traits lacks a policy: inherit from llmmem::paged_traits and shadow the policies to change");
  using eviction_type = typename Traits::eviction;
  using admission_type = typename Traits::admission;
  using free_list_type = typename Traits::free_list;
  using partial_type = typename Traits::partial;
  using history_type = typename Traits::history;
  static_assert(
      eviction_policy<eviction_type>,
      "Traits::eviction must be an eviction_policy: <llmmem/eviction/concepts.hpp> lists its members");
  static_assert(free_list<free_list_type>, "Traits::free_list must be a free_list");
  static_assert(block_history<history_type>, "Traits::history must be a block_history");
  using pool_type = block_pool<eviction_type, free_list_type, history_type>;
  using hash_type = typename Traits::hash;
  using verification_type = typename Traits::verification;
  using fence_type = typename Traits::fence;
  using observer_type = typename Traits::observer;

  static_assert(admission_policy<admission_type>, "Traits::admission must be an admission_policy");
  static_assert(partial_reuse_policy<partial_type>, "Traits::partial must be a partial_reuse_policy");
  static_assert(block_hash<hash_type>, "Traits::hash must be a block_hash");
  static_assert(paging::outside_key_policy<typename Traits::keys>,
                "Traits::keys must be an outside_key_policy");
  static_assert(block_verification<verification_type>, "Traits::verification must be a block_verification");
  static_assert(fence<fence_type>, "Traits::fence must be a fence");
  static_assert(cache_observer<observer_type>, "Traits::observer must be a cache_observer");
  static_assert(partial_type::source == partial_source::none || verification_type::keeps_tokens,
                "partial reuse compares tokens: choose a verification that keeps them");

  /// Whether the allocator chains the caller's keys, see `Traits::keys`.
  static constexpr bool chains_outside_keys = Traits::keys::chains;

  explicit paged_allocator(paged_options options, observer_type observer = {});

  /// For policies chosen at run time. `eviction` must have a slot for the null block and for each block that
  /// may ever exist, and must track none of them yet.
  paged_allocator(paged_options options, eviction_type eviction, observer_type observer = {});

  // Sequences

  /// Creates a sequence without tokens. Only sequences with equal `context` share blocks.
  result<sequence_id> create(const prefix_context& context = {}, const request_hints& hints = {}) noexcept;

  /// Creates a sequence with the same tokens in the same blocks. When either sequence writes into a block
  /// that both hold, it first gets its own copy, see `append_result::copy`. An unused fork still protects its
  /// blocks from eviction. O(blocks).
  result<sequence_id> fork(sequence_id parent) noexcept;

  /// Ends a sequence. Its blocks are released tail first. Committed blocks stay cached, also if `match` found
  /// equal blocks instead of them and those have since been evicted; all other blocks become free and are
  /// reused first.
  result<void> release(sequence_id sequence) noexcept;

  /// Ends a sequence whose blocks kernels may still read until `after` has passed. The handle becomes stale
  /// at once; the blocks return to the pool when the caller calls `collect`, or when `append` runs short.
  result<void> release_after(sequence_id sequence, const fence_type& after) noexcept;

  /// Drops the references of ended sequences whose fences have passed, and returns how many.
  std::uint64_t collect() noexcept;

  // Contents

  /// Shares the longest cached prefix of `tokens` with a sequence that has no tokens yet: full blocks and, if
  /// `Traits::partial` allows it, the beginning of one more block if a block is available for the copy.
  ///
  /// An engine that needs the last token's logits must compute that token, so it passes all tokens except the
  /// last.
  result<match_result> match(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Matches by precomputed keys, one per block; the last block may be partial. A block is shared only if it
  /// is cached after the key that precedes it here.
  result<match_result> match(sequence_id sequence, const keyed_blocks& prompt) noexcept;

  /// Adds tokens and allocates the blocks they need, or changes nothing.
  result<append_result> append(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Adds `count` tokens whose values the caller does not give. Later blocks are shared only by `fork` and by
  /// key, until `name_tokens` gives the values.
  result<append_result> extend(sequence_id sequence, std::uint64_t count) noexcept;

  /// Gives values to the first tokens of a sequence that have none (`extend`, `growth::unknown_tokens`), in
  /// order. The blocks stay where they are, so kernels may be writing them: an engine that plans a step ahead
  /// reserves the places of tokens that the running step is still sampling. Once all tokens have values,
  /// `commit` caches as if `append` had given them. Give forks that share such tokens the same values.
  /// @return `errc::past_the_end` for more values than tokens lack one; a sequence that was matched or
  ///   committed by keys, or that lost tokens in the middle, lacks none.
  result<void> name_tokens(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Grows all sequences of a batch (its next step), or none. `out[i]` is what `append` would have returned
  /// for `batch[i]`, in the order of the batch. The blocks of the whole batch, copies on write included, are
  /// counted before anything changes, so a refused batch costs no eviction and no copy.
  /// @param leave  blocks that must remain available afterwards: a watermark for sequences that grow later.
  /// @return `errc::out_of_blocks` with what the whole batch needs (`leave` included), `errc::sequence_full`
  ///   for the first sequence that grows too long, `errc::listed_twice`, `errc::size_mismatch` if `out` and
  ///   `batch` differ in length, and the errors of `check` for a handle.
  result<void> append_batch(std::span<const paging::growth> batch, std::span<append_result> out,
                            std::uint64_t leave = 0) noexcept;

  /// Returns what a prompt of `tokens` would need if it arrived now. Changes nothing: for admission.
  [[nodiscard]] prompt_cost cost(std::span<const token_id> tokens,
                                 const prefix_context& context = {}) const noexcept;

  /// Keeps the first `tokens` tokens and releases the blocks after them at once: no kernel may still use
  /// them. After a cut into committed blocks, the next `commit` examines all blocks of the sequence again.
  result<void> truncate(sequence_id sequence, std::uint64_t tokens) noexcept;

  /// Truncates while kernels may still use the blocks after the cut, which return to the pool once `after`
  /// has passed. The sequence may write its last remaining block at once; order such writes after those
  /// kernels.
  result<void> truncate_after(sequence_id sequence, std::uint64_t tokens, const fence_type& after) noexcept;

  /// Declares the KV of all tokens written: full blocks become cached, so that `match` finds them. Returns
  /// the number of blocks that became cached. If equal contents are already cached, the sequence keeps its
  /// own block, uncached. O(1) per new block, or O(blocks of the sequence) if cached contents before them may
  /// have been dropped.
  result<std::uint64_t> commit(sequence_id sequence) noexcept;

  /// Commits the first `written` tokens, for engines that append the tokens of a step before the previous
  /// step has ended.
  result<std::uint64_t> commit(sequence_id sequence, std::uint64_t written) noexcept;

  /// Commits by precomputed keys: key i names the present contents of block i; the last block may be partial.
  /// From then on the sequence is known by keys alone, as if its token values had not been given, and a
  /// commit by tokens finds nothing to do. A block has one key: if forks share a block, the first commit
  /// names it, and after a later commit of the other kind no lookup finds the block by the later key. The
  /// commit stops at a key that is cached after a different key (`stats().unchained`): see `Traits::keys` for
  /// engines whose keys identify each block alone.
  result<std::uint64_t> commit(sequence_id sequence, const keyed_blocks& contents) noexcept;

  /// Replaces the sequence's own blocks by cached blocks with equal contents and releases its own. Returns
  /// the number replaced. The block table changes: upload it again before the next kernel. With `..._after`,
  /// kernels may read the released blocks until the fence has passed.
  result<std::uint64_t> deduplicate(sequence_id sequence) noexcept;
  result<std::uint64_t> deduplicate_after(sequence_id sequence, const fence_type& after) noexcept;

  // What is worth keeping

  /// Sets the worth of the sequence's blocks that hold tokens of `range`. It applies at once to blocks
  /// already cached, and to other blocks when they are committed. If two ranges meet in a block, the later
  /// call applies; a sequence remembers the last `max_retained_ranges`. It has no effect under a policy that
  /// does not retain.
  result<void> retain(sequence_id sequence, token_range range, retention keep) noexcept;

  /// Gives the eviction policy the current time, for `retention::until`. Time never goes back.
  void advance(std::uint64_t now) noexcept { pool_.advance(now); }

  /// Informs the eviction policy that a waiting request will read these tokens, or will no longer do so
  /// (`access_hint::never`). Returns how many of the tokens are cached.
  std::uint64_t expect(std::span<const token_id> tokens, const prefix_context& context,
                       std::uint64_t next_use) noexcept;
  std::uint64_t expect(const keyed_blocks& prompt, const prefix_context& context,
                       std::uint64_t next_use) noexcept;

  /// Returns how many leading tokens of `tokens` are cached. Changes nothing: for schedulers and routers.
  [[nodiscard]] std::uint64_t cached_tokens(std::span<const token_id> tokens,
                                            const prefix_context& context = {}) const noexcept;

  /// Drops the contents of all idle blocks and returns how many. Blocks in use keep their contents.
  std::uint64_t drop_idle() noexcept;

  // Wrong contents

  /// Begins `epoch`: the model's weights have changed. The cache drops all contents, including those that
  /// sequences hold. Sequences that hold tokens now never cache anything again; sequences without tokens
  /// belong to the new epoch. Keys of the new epoch differ from all earlier keys (`paging::root_key`), so
  /// tiers and routers that identify blocks by key cannot mix the epochs. Observers receive `on_cleared`, or
  /// `on_dropped` for each block.
  ///
  ///     load_weights(version);
  ///     cache.reset(version).value();
  ///
  /// @return how many blocks were cached. `errc::old_epoch` unless `epoch` is later than `epoch()`.
  /// @par Complexity   O(blocks + max_sequences).
  result<std::uint64_t> reset(std::uint64_t epoch) noexcept;
  /// Begins the next epoch.
  std::uint64_t reset() noexcept { return reset(epoch_ + 1).value(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// Returns the epoch of a sequence's contents; 0 for a handle that `check` refuses.
  [[nodiscard]] std::uint64_t epoch(sequence_id sequence) const noexcept {
    return check(sequence) ? at(sequence).epoch : 0;
  }

  /// Declares that the contents of `block` are wrong, because a tier could not load them or a checksum
  /// failed. The cache drops the block and all contents cached after it, even if sequences hold them; all
  /// else stays. Sequences that hold the block cache nothing from its first token on; `prefix_tokens` returns
  /// how many of their leading tokens are sound. To repair a sequence, truncate it to that length and compute
  /// the rest again; then `commit` caches it as usual.
  ///
  ///     cache.invalidate(bad).value();
  ///     for (const sequence_id each : running) {
  ///       if (const auto sound = cache.prefix_tokens(each); sound < cache.tokens(each))
  ///         cache.truncate(each, sound).value();  // and schedule the rest again
  ///     }
  ///
  /// The allocator does not track copies of the bad block (on write, or of its beginning): if a copy may be
  /// wrong, call `invalidate` for its sequence too.
  /// @return how many cached blocks were dropped. `errc::no_such_block` for an id that no block has.
  /// @par Complexity   O(blocks dropped + table entries), times the depth to which sequences share blocks
  ///   that other blocks made wrong.
  result<std::uint64_t> invalidate(block_id block) noexcept;

  /// Invalidates the blocks of a sequence from token `from` on.
  /// @return also `errc::past_the_end` if the sequence holds fewer than `from` tokens.
  result<std::uint64_t> invalidate(sequence_id sequence, std::uint64_t from) noexcept;

  /// Returns how many leading tokens of a sequence are in blocks that hold the contents of their prefix: all,
  /// up to the first invalidated block or removed token. 0 for a handle that `check` refuses. O(1).
  [[nodiscard]] std::uint64_t prefix_tokens(sequence_id sequence) const noexcept;

  /// Removes whole blocks of tokens from the middle of a sequence. The table closes up, later tokens move to
  /// lower positions, and the sequence may grow to its former limit. The tokens before the range remain as
  /// context (attention sinks, a system prompt).
  ///
  /// Blocks after the gap are no longer a prefix. Blocks that only this sequence holds leave the cache and
  /// are never cached again; blocks that other sequences hold too stay cached for them. An engine that
  /// rewrites keys for their new positions must leave blocks with more than one reference (`pool().record`)
  /// unchanged.
  /// @param range  first and end are multiples of `block_tokens()`; an end at or after the last token means
  ///   `truncate`.
  /// @return blocks released. `errc::empty_range`, `errc::past_the_end`, `errc::not_whole_blocks`, and the
  ///   errors of `check` for a handle.
  result<std::uint64_t> remove(sequence_id sequence, token_range range) noexcept;

  /// Removes tokens while kernels may still read their blocks, which return to the pool once `after` has
  /// passed.
  result<std::uint64_t> remove_after(sequence_id sequence, token_range range,
                                     const fence_type& after) noexcept;

  // Transfers

  /// Keeps a block while a transfer reads or writes it: no call frees, evicts or reallocates it, even when
  /// its sequences end, until `unpin` has been called as often as `pin`. A sequence that appends to a pinned
  /// partial block gets a copy. `compact` refuses to move the block.
  /// @return `errc::no_such_block`, `errc::double_free` for a block that is neither in use nor cached,
  ///   `errc::too_many_shares`.
  result<void> pin(block_id block) noexcept;
  /// Ends one `pin`. @return `errc::no_such_block`, `errc::double_free` for a block that is not pinned.
  result<void> unpin(block_id block) noexcept;
  /// Prevents `commit` from caching anything after the first `tokens` tokens of a sequence, because the
  /// contents after them are still being loaded. The limit holds until the caller raises it (`unlimited`) or
  /// truncates the sequence to `tokens` or less.
  /// @return the errors of `check` for a handle.
  result<void> limit_commits(sequence_id sequence, std::uint64_t tokens) noexcept;

  // What a sequence holds

  /// Checks that the handle names a living sequence of this allocator.
  [[nodiscard]] result<void> check(sequence_id sequence) const noexcept;

  /// Returns the key by which `match` finds the block's contents, if they are cached.
  [[nodiscard]] std::optional<block_key> cached_key(block_id block) const noexcept {
    if (to_index(block) > pool_.block_capacity() || !index_.contains(block)) return std::nullopt;
    return index_.key(block);
  }

  /// Returns the `paging::key_digest` of the key that precedes a block's contents; 0 where nothing precedes
  /// them.
  /// @pre the block is cached
  [[nodiscard]] std::uint64_t parent_digest(block_id block) const noexcept {
    return followers_.before(block);
  }

  /// Returns the context of a sequence; the default context for a handle that `check` refuses.
  [[nodiscard]] prefix_context context(sequence_id sequence) const noexcept {
    return check(sequence) ? at(sequence).context : prefix_context{};
  }

  /// Returns the number of tokens of a sequence; 0 for a handle that `check` refuses.
  [[nodiscard]] std::uint64_t tokens(sequence_id sequence) const noexcept;

  /// Returns the sequence's block table in order; empty for a handle that `check` refuses. Valid until the
  /// sequence is next changed.
  [[nodiscard]] std::span<const block_id> blocks(sequence_id sequence) const noexcept LLMMEM_LIFETIMEBOUND;

  // The whole cache

  /// Sets the number of usable blocks to `blocks`, 1 to `block_capacity`; see `block_pool::resize`.
  /// @return how many blocks above the new end are still in use: their memory may be reclaimed once
  ///   `stats().retiring_blocks` is 0.
  result<std::uint64_t> resize(std::uint64_t blocks) noexcept;

  // Compaction

  /// Returns the input of `plan_compaction`. O(blocks + table entries); allocates.
  [[nodiscard]] compaction_facts compaction_facts_now() const;

  /// Moves blocks in use, one group at a time: `copy` moves the group's contents, then the allocator updates
  /// every table and cache entry. The allocator is consistent between groups, so compaction ends between two
  /// groups if `copy` returns false. While it runs, no kernel may use the cache, nor blocks that wait for a
  /// fence, because these move too. Upload the tables again afterwards. Contents, keys and tokens do not
  /// change, only block ids: sequence handles stay valid.
  ///
  ///     auto plan = plan_compaction(cache.compaction_facts_now(), {});
  ///     const auto move_kv = [&](std::span<const block_move> moves) noexcept { ... return true; };
  ///     cache.compact(plan.moves, move_kv).value();
  ///
  /// @param group  how many moves at a time; 0: all.
  /// @return moves made. `errc::stale_plan` if a source is no longer in use or a destination no longer free;
  ///   nothing was moved.
  /// @par Complexity   O(blocks + table entries) for each group.
  /// @par Errors   `out_of_memory` for 4 bytes per block, before anything changes.
  template <move_copier Copy>
  result<std::uint64_t> compact(std::span<const block_move> moves, Copy&& copy, std::size_t group = 0);

  [[nodiscard]] std::uint32_t block_tokens() const noexcept { return block_tokens_; }
  /// The most tokens that a sequence may have.
  [[nodiscard]] std::uint64_t max_sequence_tokens() const noexcept { return max_sequence_tokens_; }
  /// Blocks that the backing memory must have: the usable blocks and the null block. Retiring blocks are
  /// above these and not counted. So memory for a cache that is resized has `max_physical_blocks()`, or is
  /// shrunk only when no block is retiring.
  [[nodiscard]] std::uint64_t physical_blocks() const noexcept { return pool_.blocks() + 1; }
  /// The value of `physical_blocks()` at the largest size that `resize` may set.
  [[nodiscard]] std::uint64_t max_physical_blocks() const noexcept { return pool_.block_capacity() + 1; }
  [[nodiscard, deprecated("call max_physical_blocks()")]] std::uint64_t most_physical_blocks()
      const noexcept {
    return max_physical_blocks();
  }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return pool_.name(); }
  [[nodiscard]] const pool_type& pool() const noexcept { return pool_; }
  [[nodiscard]] const prefix_index& index() const noexcept { return index_; }
  /// The hash that makes the keys of the chain: see `paging::root_key`.
  [[nodiscard]] const hash_type& hash() const noexcept { return hash_; }
  [[nodiscard]] const observer_type& observer() const noexcept { return observer_; }
  /// Gives access to the observer, for example to set its clock.
  [[nodiscard]] observer_type& observer() noexcept { return observer_; }

  [[nodiscard]] paged_stats stats() const noexcept;

  /// Proves every invariant: those of the pool and of the index, and that each block has exactly the
  /// references that sequences and deferred frees hold. Returns one sentence for each violation, naming the
  /// block, its owners and its last transition; an empty result means proven. O(blocks + table entries);
  /// allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;
  using record = detail::sequence_record;
  struct need {
    std::uint64_t blocks = 0;
    bool copies = false;
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name().c_str()};
  }
  // Every modifying call on a sequence begins here.
  [[nodiscard]] result<void> begin(sequence_id sequence) noexcept {
    pool_.set_actor(sequence.slot);
    return check(sequence);
  }
  [[nodiscard]] record& at(sequence_id sequence) noexcept { return records_[sequence.slot]; }
  [[nodiscard]] const record& at(sequence_id sequence) const noexcept { return records_[sequence.slot]; }
  // A row is one entry longer than a table may be: space for the block that a copy on write adds.
  [[nodiscard]] block_id* row(std::uint32_t slot) noexcept {
    return rows_.data() + slot * (max_table_blocks_ + 1);
  }
  [[nodiscard]] const block_id* row(std::uint32_t slot) const noexcept {
    return rows_.data() + slot * (max_table_blocks_ + 1);
  }
  [[nodiscard]] token_id* tail(std::uint32_t slot) noexcept {
    return tails_.data() + std::size_t{slot} * block_tokens_;
  }

  /// Receives the blocks that the pool evicts.
  struct evicted_callback {
    paged_allocator* cache;
    void operator()(std::span<const block_id> blocks) const noexcept {
      for (const block_id block : blocks) {
        detail::tell_loss<detail::loss::evicted>(cache->observer_, block, cache->index_.key(block));
        cache->leave_followers(block);
      }
      cache->index_.erase(blocks);
      cache->drop_orphans();
    }
    [[nodiscard]] bool reported_alone(block_id block) const noexcept {
      return cache->followers_.first(block) != null_block;
    }
  };
  [[nodiscard]] evicted_callback forget_evicted() noexcept { return {this}; }
  result<void> defer(std::uint32_t slot, std::span<const block_id> blocks, const fence_type& after) noexcept;
  void end(std::uint32_t slot) noexcept;
  void shorten(std::uint32_t slot, std::uint64_t tokens) noexcept;
  void trim_idle() noexcept;
  [[nodiscard]] result<void> check_length(std::uint32_t slot, std::uint64_t count) const noexcept;
  [[nodiscard]] need needed_for(std::uint32_t slot, std::uint64_t count) const noexcept;
  LLMMEM_COLD bool relieve(std::uint64_t needed) noexcept;
  void warn_if_low(std::uint64_t before) noexcept {
    if (before >= pressure_.low && pool_.available() < pressure_.low) [[unlikely]]
      warn();
  }
  LLMMEM_COLD void warn() noexcept;
  result<need> make_room(sequence_id sequence, std::uint64_t count) noexcept;
  result<append_result> grow(std::uint32_t slot, std::uint64_t count, const need& required) noexcept;
  [[nodiscard]] result<std::uint64_t> count_batch(std::span<const paging::growth> batch) noexcept;
  template <class Visit>
  void walk(std::span<const token_id> tokens, const block_key& root, const prefix_context& context,
            Visit&& visit) const noexcept;
  void take_beginning(std::uint32_t slot, std::span<const token_id> rest, match_result& out) noexcept;
  template <class GiveBack>
  result<std::uint64_t> replace_duplicates(std::uint32_t slot, GiveBack&& give_back) noexcept;
  [[nodiscard]] result<void> check_moves(std::span<const block_move> moves,
                                         detail::fixed_array<block_id>& seen) const noexcept;
  void relocate(std::span<const block_move> moves, const detail::fixed_array<block_id>& moved_to) noexcept;
  [[nodiscard]] retention kept(const record& sequence, std::uint64_t block) const noexcept;
  static constexpr bool asks_admission = !std::is_same_v<admission_type, admit_all>;
  [[nodiscard]] bool admits(record& sequence, const access_hint& hint, std::uint64_t part) noexcept;
  template <class HintAt>
  void ask_on(record& sequence, std::uint64_t end, HintAt&& hint_at) noexcept;
  void fill(std::uint32_t slot, std::uint64_t first, std::span<const token_id> tokens) noexcept;
  void complete_block(std::uint32_t slot, std::span<const token_id> tokens, const block_key& key) noexcept;
  void rewind_chain(std::uint32_t slot, std::uint64_t tokens) noexcept;

  [[nodiscard]] result<void> check_fresh(sequence_id sequence) const noexcept;
  [[nodiscard]] result<void> check_keys(const keyed_blocks& blocks) const noexcept;
  static constexpr access_hint nothing_told{};
  [[nodiscard]] static const access_hint& hint_of(const keyed_blocks& blocks, std::size_t i) noexcept {
    return blocks.hints.empty() ? nothing_told : blocks.hints[i];
  }
  [[nodiscard]] access_hint placed(const access_hint& told, const record& sequence, block_id holder,
                                   block_id parent, std::uint64_t position,
                                   std::uint64_t chain) const noexcept;
  bool take(std::uint32_t slot, block_id found, const access_hint& hint, std::uint64_t chain) noexcept;
  match_result found_so_far(std::uint32_t slot, match_result out, std::uint64_t before) noexcept;
  struct adoption {
    bool is_new = false;
    block_id holder = null_block;  // null_block: the admission policy refused the block
  };
  adoption adopt(std::uint32_t slot, block_id block, block_id parent) noexcept;
  std::uint64_t commit_tokens(std::uint32_t slot, std::uint64_t written) noexcept;
  void forget_tokens(record& sequence) noexcept;
  [[nodiscard]] bool is_stale(const record& sequence) const noexcept {
    return sequence.cuts != cuts_ || (sequence.borrowed != 0 && sequence.evictions != pool_.evictions());
  }
  void look_again_if_stale(record& sequence) noexcept;
  void commit_again(std::uint32_t slot) noexcept;
  void register_block(const record& owner, stored_block& stored, block_id parent,
                      const access_hint& hint) noexcept;
  void unregister(block_id block) noexcept;
  void drop_contents(block_id block) noexcept;
  void leave_followers(block_id block) noexcept {
    followers_.unlink(block, [this](block_id each) noexcept { return verification_.needs_parent(each); });
  }
  void drop_orphans() noexcept {
    while (followers_.orphan() != null_block) [[unlikely]]
      drop_orphan();
  }
  LLMMEM_COLD void drop_orphan() noexcept;
  std::uint64_t drop_tree(block_id block) noexcept;
  std::uint64_t spread_invalid() noexcept;
  void reset(record& sequence) noexcept;
  [[nodiscard]] block_key root_of(const record& sequence) const noexcept {
    return paging::root_key(hash_, sequence.context, sequence.epoch);
  }
  [[nodiscard]] keyed_blocks in_chain(const keyed_blocks& given, const prefix_context& context) noexcept;
  [[nodiscard]] result<token_range> check_removal(sequence_id sequence, token_range range) const noexcept;
  void close_up(std::uint32_t slot, token_range range) noexcept;
  void audit_blocks(const std::vector<std::uint64_t>& held, std::vector<std::string>& found) const;
  [[nodiscard]] std::string owners(block_id block) const;

  pool_type pool_;
  prefix_index index_;
  verification_type verification_;
  hash_type hash_;
  LLMMEM_NO_UNIQUE_ADDRESS admission_type admission_;
  detail::block_followers followers_;
  LLMMEM_NO_UNIQUE_ADDRESS observer_type observer_;
  std::uint32_t block_tokens_;
  std::uint64_t epoch_;
  std::uint64_t max_table_blocks_;
  std::uint64_t max_sequence_tokens_;
  std::uint64_t max_idle_blocks_;
  pressure_callback pressure_;
  metadata_source metadata_;
  detail::fixed_array<record> records_;  // by slot
  detail::fixed_array<block_id> rows_;   // block tables, one after the other, see row()
  detail::fixed_array<token_id> tails_;  // tokens of partial last blocks, block_tokens_ a slot
  detail::fixed_array<detail::retained_ranges> retained_;  // by slot; empty for a policy that does not retain
  detail::fixed_array<block_key> chained_;  // during one call; empty if the caller's keys are already chained
  detail::fixed_array<std::uint32_t> free_slots_;  // a stack
  std::uint32_t free_slot_count_;
  std::uint32_t owner_;
  std::uint64_t batches_ = 0;
  std::uint64_t cuts_ = 0;  // contents dropped while sequences held them
  deferred_frees<fence_type> deferred_;
  detail::block_pins pins_;
  paged_counters counters_;
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/paged_allocator_body.hpp>

#if defined(LLMMEM_EXTERN_PAGING) && !defined(LLMMEM_INSTANTIATES_PAGING)
namespace llmmem {
inline namespace v0 {

extern template class paged_allocator<>;

}  // namespace v0
}  // namespace llmmem
#endif
