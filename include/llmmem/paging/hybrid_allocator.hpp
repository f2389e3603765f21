/// @file
/// `hybrid_allocator`: sequences over layers of several kinds, with different blocks, from one budget.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/divider.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/hash/block_key.hpp>
#include <llmmem/paging/deferred_frees.hpp>
#include <llmmem/paging/detail/block_pins.hpp>
#include <llmmem/paging/detail/hybrid_record.hpp>
#include <llmmem/paging/detail/sequence_record.hpp>
#include <llmmem/paging/group_observer.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/prefix_chain.hpp>
#include <llmmem/paging/super_pages.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/result.hpp>
#include <llmmem/space/fence.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace llmmem {
inline namespace v0 {

/// The bookkeeping of a paged KV cache for models whose layers differ: sliding windows and full attention,
/// states and attention, latents, chunks. Each group of layers has its own blocks and block table; all groups
/// take their blocks from one `super_page_pool`.
///
///     std::array groups{full_attention({"full", 23, 8192}), sliding_window({"local", 23, 8192}, 4096)};
///     llmmem::hybrid_allocator<> cache({.groups = groups, .budget_bytes = budget, .page_bytes = 8 << 20});
///     auto seq = cache.create().value();
///     auto hit = cache.match(seq, prompt).value();
///     auto rest = cache.append(seq, prompt.subspan(hit.tokens)).value();
///     ...                                 // carry out rest.copies, compute, with table(seq, group) for each
///     cache.commit(seq).value();          // others may share it now; releases blocks that left the window
///     cache.release(seq).value();
///
/// A table has an entry for every block of the sequence. The entry is the null block if the memory was
/// released or never allocated: blocks before a window, chunks before the present one, all states except the
/// last. Kernels do not read such entries. `commit` and `append` release such blocks, which stay cached if
/// they were committed; commit each step before the next append, or blocks that leave the window in between
/// are not cached. Released memory may be allocated again at once: if a kernel still reads it, keep the order
/// of the calls (on one stream), or give `read_until` a fence after that kernel.
///
/// A hit is the longest prefix for which *every* group has what the next token reads (`hit_scan`); it ends at
/// a multiple of all groups' `block_tokens`. After a hit, or at the end of a block, the next state block
/// begins as a copy of the one before it, listed in `copies`.
///
/// A separate chain names and proves prefixes, see `prefix_chain`. The tokens of its chunks are the greatest
/// common divisor of all groups' `block_tokens`.
///
/// @par Complexity   O(1) per block and group, and O(1) per token for hashing; no heap allocation after
///   construction. Metadata in addition to the pool's and the chain's: for each of `max_sequences` 4 bytes
///   per token that a sequence may have and 4 per table entry, committed as used; 4 bytes for each of
///   `max_deferred`.
/// @par Thread safety   one writer at a time; const calls may run concurrently.
/// @par Waits   never; calls that run short collect blocks whose fences have passed.
/// @par Errors   the constructor throws `length_error`, `argument_error` and `out_of_memory`. Every other
///   call is `noexcept`, except `for_each_cached` and `audit`. A refused call leaves sequences unchanged,
///   except that it may have released blocks that no later token reads, and collected deferred ones.
/// @par Sources   managers by kind, intersected hits and placeholders: vLLM's hybrid KV cache groups,
///   TensorRT-LLM's placeholder blocks. Pages instead of one padded block size are our own.
template <class Traits = hybrid_traits>
class hybrid_allocator {
 public:
  static_assert(
      requires {
        typename Traits::eviction;
        typename Traits::hash;
        typename Traits::verification;
        typename Traits::observer;
        typename Traits::fence;
      }, "Traits lacks a policy: inherit from llmmem::hybrid_traits and shadow the policies to change");
  using eviction_type = typename Traits::eviction;
  using hash_type = typename Traits::hash;
  using verification_type = typename Traits::verification;
  using observer_type = typename Traits::observer;
  using fence_type = typename Traits::fence;
  using pool_type = super_page_pool<eviction_type>;
  using chain_type = prefix_chain<hash_type, verification_type>;

  static_assert(
      eviction_policy<eviction_type>,
      "Traits::eviction must be an eviction_policy: <llmmem/eviction/concepts.hpp> lists its members");
  static_assert(block_hash<hash_type>, "Traits::hash must be a block_hash");
  static_assert(block_verification<verification_type>, "Traits::verification must be a block_verification");
  static_assert(group_cache_observer<observer_type>, "Traits::observer must be a group_cache_observer");
  static_assert(fence<fence_type>, "Traits::fence must be a fence");

  explicit hybrid_allocator(const hybrid_options& options, observer_type observer = {});
  /// Constructs an allocator for which `make`, an `eviction_factory`, makes each group's eviction policy.
  template <class Make>
  hybrid_allocator(const hybrid_options& options, Make&& make, observer_type observer = {});

  // Sequences

  /// Creates a sequence without tokens. Only sequences with equal `context` share blocks.
  /// @return `errc::out_of_sequences`, `errc::bad_priority`.
  result<sequence_id> create(const prefix_context& context = {}, const request_hints& hints = {}) noexcept;

  /// Creates a sequence with the same tokens in the same blocks. When either sequence writes into a block
  /// that both hold, it first gets a copy. O(blocks).
  result<sequence_id> fork(sequence_id parent) noexcept;

  /// Ends a sequence, the last block of each group first.
  /// @return `errc::deferred_full` when kernels may still read its blocks (`read_until`) and the queue is too
  ///         full for them.
  result<void> release(sequence_id sequence) noexcept;

  // Behind fences

  /// Declares that kernels may read the sequence's blocks until `after` has passed: blocks that any call
  /// releases from now on return to the pool after that fence. The last fence given applies; pass fences of
  /// one stream, in order; a fork starts with its parent's fence. If the queue is too full for blocks that no
  /// later token reads, the sequence keeps them until the queue has space.
  ///
  ///     cache.append(seq, tokens).value();
  ///     launch(step, stream);
  ///     cache.read_until(seq, stream.record()).value();   // now append, commit, release as you like
  result<void> read_until(sequence_id sequence, const fence_type& after) noexcept;

  /// `read_until`, then `release`. If refused, the sequence is unchanged.
  result<void> release_after(sequence_id sequence, const fence_type& after) noexcept;

  /// Drops the references whose fences have passed, and returns how many. Calls that run short do this
  /// themselves.
  std::uint64_t collect() noexcept;

  // Contents

  /// Shares the longest hit of `tokens` with a sequence that has no tokens yet.
  result<match_result> match(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Adds tokens with all the blocks they need in every group, or changes nothing.
  /// @return `errc::out_of_group_blocks` for the first group that lacks blocks, `errc::sequence_full`,
  ///   `errc::deferred_full` when kernels may still read the source of a copy (`read_until`) and the queue is
  ///   full, and the errors of `check` for a handle.
  result<hybrid_append> append(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Adds `count` tokens whose values the caller does not give; nothing from there on is cached until
  /// `name_tokens` gives the values. @return as `append`.
  result<hybrid_append> extend(sequence_id sequence, std::uint64_t count) noexcept;

  /// Gives values to the first tokens of a sequence that have none (`extend`,
  /// `hybrid_growth::unknown_tokens`, and all tokens after these), in order, see
  /// `paged_allocator::name_tokens`. Blocks stay where they are. A block that left its window before its
  /// tokens had values is not cached. If forks give different values to tokens of one block, the first commit
  /// names the block.
  /// @return `errc::past_the_end` for more values than tokens lack one.
  result<void> name_tokens(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Grows all sequences of a batch (its next step), or none. `out[i]` is what `append` would have returned
  /// for `batch[i]`, in the order of the batch; carry out all copies before anything is written. The blocks
  /// of the whole batch, copies on write included, are counted before anything changes, so a refused batch
  /// costs no eviction and no copy.
  /// @param leave  blocks of each group that must remain available afterwards, all together: a watermark for
  ///   sequences that grow later; empty: 0 of each.
  /// @return `errc::out_of_group_blocks` with what the whole batch needs (`leave` included) of the first
  ///   group that lacks blocks, `errc::sequence_full` for the first sequence that grows too long,
  ///   `errc::deferred_full` as in `append`, `errc::listed_twice`, `errc::size_mismatch` if `out` and
  ///   `batch`, or `leave` and `groups()`, differ in length, and the errors of `check` for a handle.
  result<void> append_batch(std::span<const hybrid_growth> batch, std::span<hybrid_append> out,
                            std::span<const std::uint64_t> leave = {}) noexcept;

  /// Returns what a prompt of `tokens` would need of each group if it arrived now and were appended in one
  /// piece (in several, with commits between, windows need less). Changes nothing: for admission. A prompt
  /// for which `pool().shortage` reports a lack cannot be admitted. Any other prompt usually can be, but only
  /// `append` decides, because revived blocks may hold pages that other blocks need.
  [[nodiscard]] hybrid_cost cost(std::span<const token_id> tokens,
                                 const prefix_context& context = {}) const noexcept;

  /// Computes what `append` of `count` tokens would need of each group, and returns whether any group lacks
  /// it. `out` has one entry per group. Releases blocks that no later token reads. It ignores whether kernels
  /// may still read the sources of copies, so `append` may still return `errc::deferred_full`.
  result<bool> shortage(sequence_id sequence, std::uint64_t count, std::span<group_shortage> out) noexcept;

  /// Computes what `append_batch` of `batch` would need of each group, and returns whether any group lacks
  /// it. Releases blocks that no later token reads. @return also the errors of `append_batch` for a batch.
  result<bool> shortage(std::span<const hybrid_growth> batch, std::span<group_shortage> out) noexcept;

  /// Returns the blocks of each group that `append` of `count` tokens would take now; 0 for a handle that
  /// `check` refuses. O(groups).
  [[nodiscard]] std::array<std::uint64_t, max_layer_groups> blocks_to_append(
      sequence_id sequence, std::uint64_t count) const noexcept;

  /// Returns the references to blocks of each group that wait for a fence. O(references).
  [[nodiscard]] std::array<std::uint64_t, max_layer_groups> deferred_by_group() const noexcept;

  /// Declares the KV, and the states at the ends of blocks, written for the first `written` tokens (default:
  /// all): full blocks become cached, and blocks that no later token reads are released. Returns how many
  /// became cached.
  result<std::uint64_t> commit(sequence_id sequence) noexcept {
    if (const auto alive = check(sequence); !alive) return alive.error();
    return commit_written(sequence.slot, records_[sequence.slot].tokens);
  }
  result<std::uint64_t> commit(sequence_id sequence, std::uint64_t written) noexcept;

  /// Keeps the first `tokens` tokens and releases the blocks after them, for example to take back a rejected
  /// draft. Possible at any length at which every group still has what the next token reads:
  ///
  ///   - full attention: any length;
  ///   - windows and chunks: any length at which none of the blocks read was released. `append` (even if
  ///     refused) and `shortage` release blocks according to the length before the call, `commit` according
  ///     to the tokens declared written. So a draft that was not committed can be cut to any length from its
  ///     start;
  ///   - states, updated in place: the ends of blocks that were not released, so only within the last draft.
  ///     To take back single tokens, `fork` before the draft and release the copy not needed.
  /// Length 0 and the present length are always possible.
  ///
  /// After a cut into a cached block its contents stay cached until the sequence writes there again (then
  /// other holders keep them, and the sequence gets a copy).
  /// @return `errc::not_kept` for the first group that lacks something, with the next larger length that is
  ///   possible; `errc::past_the_end`; and the errors of `check` for a handle.
  /// @par Complexity   O(blocks and chunks cut off); a refusal O(tokens after the cut x groups).
  result<void> truncate(sequence_id sequence, std::uint64_t tokens) noexcept;

  /// `read_until`, then `truncate`: for kernels that still use the blocks after the cut. The sequence may
  /// write its last remaining block at once; order such writes after those kernels. If refused, including by
  /// `errc::deferred_full`, the sequence is unchanged.
  result<void> truncate_after(sequence_id sequence, std::uint64_t tokens, const fence_type& after) noexcept;

  /// Returns the lengths nearest to `tokens` to which `truncate` is possible now. O(tokens between them x
  /// groups).
  /// @return `errc::past_the_end`, and the errors of `check` for a handle.
  [[nodiscard]] result<paging::cut_points> nearest_cuts(sequence_id sequence,
                                                        std::uint64_t tokens) const noexcept;

  /// Replaces the sequence's own full blocks by cached blocks with equal contents, in every group, and
  /// releases its own. Returns the number replaced. The block tables change: upload them again before the
  /// next kernel. With `..._after`, kernels may read the released blocks until the fence has passed.
  /// @return `errc::deferred_full` as in `truncate_after`; then nothing was replaced. O(table entries).
  result<std::uint64_t> deduplicate(sequence_id sequence) noexcept;
  result<std::uint64_t> deduplicate_after(sequence_id sequence, const fence_type& after) noexcept;

  // What is worth keeping, see `paged_allocator`

  /// Sets the worth of the sequence's blocks, in every group, that hold tokens of `range`: at once for blocks
  /// already cached, for others when they are committed. It has no effect under a policy that does not
  /// retain.
  result<void> retain(sequence_id sequence, token_range range, retention keep) noexcept;
  /// Gives the policies of all groups the current time, for `retention::until`. Time never goes back.
  void advance(std::uint64_t now) noexcept { pool_.advance(now); }
  /// Informs the policies that a waiting request will read what a hit of these tokens reads in every group,
  /// or will no longer do so (`access_hint::never`). Returns how many tokens the hit has.
  std::uint64_t expect(std::span<const token_id> tokens, const prefix_context& context,
                       std::uint64_t next_use) noexcept;

  /// Returns how many leading tokens `match` would find. Changes nothing.
  [[nodiscard]] std::uint64_t cached_tokens(std::span<const token_id> tokens,
                                            const prefix_context& context = {}) const noexcept {
    return longest_hit(tokens, chain_.root(context, epoch_), context).tokens;
  }

  /// Drops the contents of all idle blocks and returns how many.
  std::uint64_t drop_idle() noexcept;

  /// Sets the budget to `budget_bytes`, from two pages to `budget_capacity_bytes`; see
  /// `super_page_pool::resize`. Sequences keep their blocks: as they release them, pages above the budget
  /// become free, and at 0 retiring pages the memory there may be reclaimed. `pool().physical_bytes()` is
  /// where it begins.
  /// @return the number of pages that are retiring. `errc::bad_budget` for a budget that is not possible.
  result<std::uint64_t> resize(std::uint64_t budget_bytes) noexcept;

  /// Moves blocks from retiring pages to usable ones, so that a smaller budget takes effect while sequences
  /// live on; it evicts idle blocks for that. The caller ensures that no kernel uses the cache, carries out
  /// the copies before the next kernel starts and before it unmaps the memory, and uploads the tables again.
  /// If tiers save what is evicted, order the copies after their saves. The next `commit` of a holder, or its
  /// end, caches again what it had committed in these blocks, and also after a `resize` to more pages.
  /// Blocks that are pinned or wait for fences stay. `layout().offset(block, block_bytes)` says where both
  /// ends of a copy are: `pool()` no longer knows the group of a source.
  /// @param moves  receives a copy of a whole block for each block moved, at most `moves.size()`.
  /// @return how many blocks were moved. If fewer than `moves.size()`, no other block can be moved now. O(all
  ///   tables).
  std::uint64_t evacuate(std::span<group_copy> moves) noexcept;

  // Wrong contents, see `paged_allocator`

  /// Begins `epoch`: the model's weights have changed. Contents cached in any group are no longer found, and
  /// sequences that hold tokens now never cache anything again.
  /// @return how many blocks were cached. `errc::old_epoch` unless `epoch` is later than `epoch()`.
  result<std::uint64_t> reset(std::uint64_t epoch) noexcept;
  /// Begins the next epoch.
  std::uint64_t reset() noexcept { return reset(epoch_ + 1).value(); }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// Returns the epoch of a sequence's contents; 0 for a handle that `check` refuses.
  [[nodiscard]] std::uint64_t epoch(sequence_id sequence) const noexcept {
    return check(sequence) ? records_[sequence.slot].epoch : 0;
  }

  /// Declares that the contents of `block` are wrong. The cache drops the block and, in every group,
  /// everything after its last token, even if sequences hold it; contents of other prefixes stay. Sequences
  /// that hold the block, or held it until no token read it, cache nothing from its first token on;
  /// `prefix_tokens` returns how many of their leading tokens are sound. To repair a sequence, truncate it to
  /// that length, or to the shorter length that `nearest_cuts` returns, and compute the rest again.
  /// @return how many cached blocks were dropped. `errc::no_such_block` for an id that no block has.
  /// @par Complexity   O(prefix nodes + table entries), times the depth to which sequences share contents
  ///   that other contents made wrong.
  result<std::uint64_t> invalidate(block_id block) noexcept;

  /// Invalidates what a sequence holds from token `from` on, in all groups.
  result<std::uint64_t> invalidate(sequence_id sequence, std::uint64_t from) noexcept;

  /// Returns how many leading tokens of a sequence hold the contents of their prefix: all, up to the first
  /// invalidated block or removed token. 0 for a handle that `check` refuses. O(1).
  [[nodiscard]] std::uint64_t prefix_tokens(sequence_id sequence) const noexcept;

  /// Removes tokens from the middle of a sequence: the tables of all groups close up, later tokens move
  /// to lower positions, and the sequence may grow to its former limit. Nothing after the gap is cached
  /// again, see `paged_allocator::remove`. For windows that keep their first tokens see `layer_group::sinks`.
  /// @param range  first and end are multiples of every group's `block_tokens`; an end at or after the last
  ///   token means `truncate`.
  /// @return blocks released. `errc::cannot_remove` for the first group of states, of chunks whose `reach`
  ///   does not divide the range, or of a window that would reach released blocks; `errc::empty_range`,
  ///   `errc::past_the_end`, `errc::not_whole_blocks`, the errors of `truncate` if the range means that,
  ///   `errc::deferred_full` as in `truncate_after`, and the errors of `check` for a handle.
  result<std::uint64_t> remove(sequence_id sequence, token_range range) noexcept;
  /// `read_until`, then `remove`. If refused, the sequence is unchanged.
  result<std::uint64_t> remove_after(sequence_id sequence, token_range range,
                                     const fence_type& after) noexcept;

  // Transfers, see `paged_allocator`

  /// Keeps a block while a transfer reads or writes it: no call frees, evicts or reallocates it until `unpin`
  /// has been called as often as `pin`.
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

  /// Keeps the blocks that tokens from position `tokens` on read, although the sequence is longer: for
  /// kernels that still compute those tokens, and for drafts of which a part may be refused. `truncate` to
  /// `tokens` or more stays possible; for states, to the ends of blocks after `tokens`. The limit holds until
  /// the caller raises it (`unlimited`); blocks that it keeps are released by the calls that follow. A fork
  /// has none.
  /// @return the errors of `check` for a handle.
  result<void> limit_releases(sequence_id sequence, std::uint64_t tokens) noexcept;

  // What a sequence holds

  [[nodiscard]] result<void> check(sequence_id sequence) const noexcept {
    const failure wrong = records_.check(sequence, name().c_str());
    return wrong.code == errc::ok ? result<void>() : result<void>(wrong);
  }

  /// Returns the context of a sequence; the default context for a handle that `check` refuses.
  [[nodiscard]] prefix_context context(sequence_id sequence) const noexcept {
    return check(sequence) ? records_[sequence.slot].context : prefix_context{};
  }

  /// Returns the number of tokens of a sequence; 0 for a handle that `check` refuses.
  [[nodiscard]] std::uint64_t tokens(sequence_id sequence) const noexcept {
    return check(sequence) ? records_[sequence.slot].tokens : 0;
  }

  /// Returns the sequence's block table for one group, with the null block where the sequence holds none;
  /// empty for a handle that `check` refuses. Valid until the sequence is next changed.
  [[nodiscard]] std::span<const block_id> table(sequence_id sequence, std::size_t group) const noexcept;

  /// Writes the table as kernels read it, in units of `layout().unit` bytes (see `super_page_pool`), and
  /// fills the rest of `out` with 0. Returns the number of entries of the table; `errc::size_mismatch` if
  /// `out` is shorter. For the tables and slots of a batch see `paging::group_tables`.
  result<std::uint64_t> write_table(sequence_id sequence, std::size_t group,
                                    std::span<std::int32_t> out) const noexcept;

  // The whole cache

  [[nodiscard]] std::span<const layer_group> groups() const noexcept LLMMEM_LIFETIMEBOUND {
    return {groups_.data(), group_count_};
  }
  [[nodiscard]] const super_page_layout& layout() const noexcept { return pool_.layout(); }
  [[nodiscard]] const pool_type& pool() const noexcept { return pool_; }
  [[nodiscard]] const chain_type& chain() const noexcept { return chain_; }
  /// The hash that makes the keys of the chain: see `paging::root_key`.
  [[nodiscard]] const hash_type& hash() const noexcept { return chain_.hash(); }
  /// Returns the key of the prefix for which a block is cached, if any.
  [[nodiscard]] std::optional<block_key> cached_key(block_id block) const noexcept {
    if (block == null_block || to_index(block) >= pool_.block_ids() || !pool_.record(block).is_cached())
      return std::nullopt;
    return chain_.key(node_of_[to_index(block)]);
  }
  /// Returns the `paging::key_digest` of the key of the chunk before the last one of a block's prefix; 0 if
  /// there is none. @pre the block is cached
  [[nodiscard]] std::uint64_t parent_digest(block_id block) const noexcept {
    const block_id parent = chain_.parent(node_of_[to_index(block)]);
    return parent == null_block ? 0 : paging::key_digest(chain_.key(parent));
  }
  [[nodiscard]] std::uint32_t chunk_tokens() const noexcept { return chunk_tokens_; }
  [[nodiscard]] std::uint64_t max_sequence_tokens() const noexcept { return max_sequence_tokens_; }
  [[nodiscard]] const std::string& name() const noexcept LLMMEM_LIFETIMEBOUND { return pool_.name(); }
  [[nodiscard]] const observer_type& observer() const noexcept { return observer_; }
  /// Gives access to the observer, for example to set its clock.
  [[nodiscard]] observer_type& observer() noexcept { return observer_; }

  /// Calls `visit(const stored_key&, std::size_t group)` for all cached contents. O(block ids).
  template <class Visit>
  void for_each_cached(Visit&& visit) const;

  [[nodiscard]] hybrid_stats stats() const noexcept;

  /// Proves every invariant: the pool's, the chain's, and that each block has exactly the references that
  /// tables hold. Returns one sentence for each violation. Allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;

  using place = typename chain_type::place;
  using record = detail::hybrid_record<place, fence_type>;
  using need = detail::hybrid_need;
  using table_part = std::span<const block_id>;
  struct hit {
    std::uint64_t tokens = 0;
    place at{};
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(error_code code, std::uint32_t index, std::uint64_t wanted,
                                            std::uint64_t found) const noexcept {
    return {code, index, wanted, found, name().c_str()};
  }
  [[nodiscard]] block_id* row(std::uint32_t slot, std::size_t group) noexcept {
    return rows_.data() + slot * row_entries_ + row_first_[group];
  }
  [[nodiscard]] const block_id* row(std::uint32_t slot, std::size_t group) const noexcept {
    return rows_.data() + slot * row_entries_ + row_first_[group];
  }
  [[nodiscard]] std::span<const token_id> chunk(std::uint32_t slot, std::uint64_t i) const noexcept {
    return {tokens_.data() + slot * max_sequence_tokens_ + i * chunk_tokens_, chunk_tokens_};
  }
  void store_tokens(std::uint32_t slot, std::uint64_t first, std::span<const token_id> tokens) noexcept {
    token_id* const to = tokens_.data() + slot * max_sequence_tokens_ + first;
    if (tokens.size() == 1) {  // a step of decode
      *to = tokens[0];
    } else if (!tokens.empty()) {
      std::memcpy(to, tokens.data(), tokens.size_bytes());
    }
  }
  /// Records that tokens from `first` on have no values; values given after these do not count.
  void lose_tokens(std::uint32_t slot, std::uint64_t first) noexcept {
    if (first < records_[slot].unnamed) records_[slot].unnamed = first;
  }
  /// The tokens of a sequence that may be cached.
  [[nodiscard]] static std::uint64_t cacheable(const record& sequence) noexcept {
    std::uint64_t end = sequence.sound < sequence.limit ? sequence.sound : sequence.limit;
    return end < sequence.unnamed ? end : sequence.unnamed;
  }
  [[nodiscard]] auto forget_evicted() noexcept {
    return [this](std::span<const block_id> blocks) noexcept {
      for (const block_id block : blocks)
        forget<detail::loss::evicted>(block);
    };
  }
  /// Removes `block` from the prefix node that names it.
  template <detail::loss Why>
  void forget(block_id block) noexcept {
    const block_id node = node_of_[to_index(block)];
    const std::size_t group = pool_.group_of(block);
    detail::tell_loss<Why>(observer_, block, chain_.key(node), group);
    chain_.drop(node, group);
    ++losses_;
  }
  /// Returns the blocks of `group` that `tokens` tokens fill, and those that they fill or begin.
  [[nodiscard]] std::uint64_t whole_blocks(std::size_t group, std::uint64_t tokens) const noexcept {
    return per_block_[group].quotient(tokens);
  }
  [[nodiscard]] std::uint64_t blocks_for(std::size_t group, std::uint64_t tokens) const noexcept {
    const std::uint64_t whole = whole_blocks(group, tokens);
    return whole + (whole * per_block_[group].by() != tokens ? 1 : 0);
  }
  [[nodiscard]] bool ends_block(std::size_t group, std::uint64_t tokens) const noexcept {
    return per_block_[group].remainder(tokens) == 0;
  }
  /// Returns the index of the first table entry that may be null.
  [[nodiscard]] std::uint64_t dead_from(std::size_t group) const noexcept { return sink_blocks_[group]; }
  /// Returns the end of these entries for a sequence.
  [[nodiscard]] std::uint64_t dead_to(const record& sequence, std::size_t group) const noexcept {
    return sequence.dead[group] > dead_from(group) ? sequence.dead[group] : dead_from(group);
  }
  static constexpr bool is_observed = !std::is_same_v<observer_type, ignore_group_cache_events>;
  [[nodiscard]] retention kept(std::uint32_t slot, std::size_t group, std::uint64_t block) const noexcept;
  [[nodiscard]] access_hint hint_for(std::uint32_t slot, std::size_t group, std::uint64_t block,
                                     std::uint64_t content) const noexcept;
  void tell_cached(const place& at, std::uint32_t slot, std::size_t group, std::uint64_t block) noexcept;
  void tell_shared(std::uint32_t slot, std::uint64_t length) noexcept;
  [[nodiscard]] need needed_for(std::uint32_t slot, std::size_t group, std::uint64_t count) const noexcept;
  [[nodiscard]] result<void> check_length(std::uint32_t slot, std::uint64_t count) const noexcept;
  [[nodiscard]] hit longest_hit(std::span<const token_id> tokens, place at,
                                const prefix_context& context) const noexcept;
  result<std::uint64_t> take(std::uint32_t slot, const hit& found) noexcept;
  result<hybrid_append> grow(std::uint32_t slot, std::uint64_t count, std::span<std::uint64_t> rest,
                             std::size_t first_copy) noexcept;
  void drop_overwritten(std::uint32_t slot, std::size_t group) noexcept;
  /// Whether `count` more tokens begin no block of any group. @pre count is not 0
  [[nodiscard]] static bool grows_inside(const record& sequence, std::uint64_t count) noexcept {
    return sequence.tokens < sequence.full_at && count <= sequence.full_at - sequence.tokens;
  }
  [[nodiscard]] bool grows_in_place(std::uint32_t slot) noexcept;
  void note_full(record& sequence) noexcept;
  result<hybrid_append> grow_alone(sequence_id sequence, std::uint64_t count) noexcept;
  [[nodiscard]] result<void> check_batch(std::span<const hybrid_growth> batch) noexcept;
  [[nodiscard]] detail::hybrid_batch_need count_batch(std::span<const hybrid_growth> batch) noexcept;
  [[nodiscard]] bool is_read(record& sequence) noexcept;
  template <class Visit>
  void visit_hit(const hit& found, Visit&& visit) const noexcept;
  template <class Visit>
  void visit_retiring(Visit&& visit) noexcept;
  /// Releases blocks that no token after the first `length` reads; keeps the blocks for which the queue has
  /// no space now.
  void release_dead(std::uint32_t slot, std::uint64_t length) noexcept {
    if (length >= records_[slot].frees_at) release_more(slot, length);
  }
  void release_more(std::uint32_t slot, std::uint64_t length) noexcept;
  result<void> let_go(std::uint32_t slot, std::span<const table_part> parts) noexcept;
  [[nodiscard]] std::optional<place> next_place(record& sequence, const block_key& key,
                                                std::span<const token_id> part) noexcept;
  result<void> give_back(std::uint32_t slot, std::uint64_t keep) noexcept;
  [[nodiscard]] bool is_snapshot(std::uint32_t slot, std::size_t group, std::uint64_t block) const noexcept;
  [[nodiscard]] bool can_cut(std::uint32_t slot, std::size_t group, std::uint64_t tokens) const noexcept;
  [[nodiscard]] std::size_t blocking_group(std::uint32_t slot, std::uint64_t tokens) const noexcept;
  void shorten(std::uint32_t slot, std::uint64_t tokens) noexcept;
  template <detail::loss Why = detail::loss::dropped>
  void drop_contents(block_id block) noexcept;
  [[nodiscard]] std::uint64_t commit_written(std::uint32_t slot, std::uint64_t written) noexcept;
  void commit_chunks(std::uint32_t slot, std::uint64_t written) noexcept;
  void cache_block(std::uint32_t slot, std::size_t group, const place& at, std::uint64_t end) noexcept;
  /// Whether a hit of `length` tokens includes block number `block` of `group`.
  [[nodiscard]] bool hit_has(std::size_t group, std::uint64_t length, std::uint64_t block) const noexcept {
    return block < dead_from(group) || block >= groups_[group].hit_blocks(length).first;
  }
  void commit_again(std::uint32_t slot) noexcept;
  std::uint64_t drop_cached(block_id block) noexcept;
  std::uint64_t drop_below(block_id node) noexcept;
  [[nodiscard]] block_id node_at(const record& sequence, std::uint64_t chunks) const noexcept;
  void limit(record& sequence, std::uint64_t tokens) noexcept {
    if (tokens < sequence.sound) sequence.sound = tokens;
  }
  void limit_readers_of(block_id block, std::size_t group) noexcept;
  std::uint64_t mark_wrong(std::uint32_t slot) noexcept;
  std::uint64_t spread_wrong() noexcept;
  [[nodiscard]] bool has_unmarked(std::uint32_t slot) const noexcept;
  [[nodiscard]] result<token_range> check_removal(sequence_id sequence, token_range range) const noexcept;
  result<void> close_up(std::uint32_t slot, token_range range) noexcept;

  std::array<layer_group, max_layer_groups> groups_{};
  std::array<divider, max_layer_groups> per_block_{};          // by each group's `block_tokens`
  std::array<std::uint64_t, max_layer_groups> sink_blocks_{};  // of each group
  std::size_t group_count_;
  pool_type pool_;
  std::uint32_t chunk_tokens_;
  chain_type chain_;
  detail::fixed_array<block_id> node_of_;  // by block: if it is cached, the node that names it
  std::uint64_t max_sequence_tokens_;
  std::uint64_t epoch_;
  std::array<std::uint64_t, max_layer_groups> row_first_{};
  std::uint64_t row_entries_ = 0;  // of all groups' tables; each has one entry more than its maximum, for a
                                   // copy
  detail::handle_table<sequence_id, record> records_;
  detail::fixed_array<block_id> rows_;
  detail::fixed_array<token_id> tokens_;  // of each sequence
  detail::fixed_array<block_id> path_;    // nodes of one sequence, during a call
  detail::fixed_array<group_copy> copies_;
  deferred_frees<fence_type> deferred_;
  detail::block_pins pins_;
  detail::fixed_array<detail::retained_ranges> retained_;  // by slot; empty for a policy that does not retain
  std::uint64_t batches_ = 0;
  std::uint64_t losses_ = 0;  // contents that were dropped
  LLMMEM_NO_UNIQUE_ADDRESS observer_type observer_;
  detail::hybrid_counters counters_{};
};

}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/hybrid_allocator_body.hpp>
