/// @file
/// `hybrid_allocator`: sequences over layers of several kinds, with different blocks, from one budget.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/detail/fixed_array.hpp>
#include <llmmem/detail/handle_table.hpp>
#include <llmmem/paging/block_key.hpp>
#include <llmmem/paging/hybrid_types.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/layer_group.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/paging/prefix_chain.hpp>
#include <llmmem/paging/super_pages.hpp>
#include <llmmem/paging/verification.hpp>
#include <llmmem/result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem::inline v0 {

/// A paged KV cache's bookkeeping for models whose layers differ: sliding windows beside full attention,
/// states beside attention, latents, chunks. Each group of layers has its own blocks and block table, all
/// take them from one `super_page_pool`.
///
///     std::array groups{full_attention({"full", 23, 8192}), sliding_window({"local", 23, 8192}, 4096)};
///     llmmem::hybrid_allocator<> cache({.groups = groups, .budget_bytes = budget, .page_bytes = 8 << 20});
///     auto seq = cache.create().value();
///     auto hit = cache.match(seq, prompt).value();
///     auto rest = cache.append(seq, prompt.subspan(hit.tokens)).value();
///     ...                                 // carry out rest.copies, compute, with table(seq, group) for each
///     cache.commit(seq).value();          // others may share it now; what lies behind the window goes
///     cache.release(seq).value();
///
/// A table has an entry for every block of the sequence, the null block where its memory is gone or was never
/// had: what a window has left behind, what chunks before the present one held, all states but the last.
/// Kernels do not look there. Blocks are given back by `commit` and by `append`, and stay cached if they were
/// committed; commit a step before the next append, or what leaves the window between them is not cached. The
/// memory may be handed out again at once: kernels that still read it keep the order of the calls, on one
/// stream.
///
/// A hit is the longest prefix for which *every* group has what the next token looks at (`hit_scan`), and
/// ends at a multiple of all groups' `block_tokens`. After a hit, or at the end of a block, the next state
/// block begins as a copy of the one before it, told in `copies`.
///
/// What names and proves prefixes is a chain of its own, see `prefix_chain`, in chunks of the greatest common
/// divisor of all groups' `block_tokens`.
///
/// @par Complexity   O(1) a block and a group, and O(1) a token for hashing; no heap allocation after
///      construction. Metadata beside the pool's and the chain's: for each of `max_sequences` 4 bytes a token
///      it may have and 4 for each table entry, committed as used.
/// @par Thread safety   one writer at a time; const calls may run together.
/// @par Errors   the constructor throws `length_error`, `argument_error` and `out_of_memory`. Every other
/// call
///      but `audit` is `noexcept`; a refusal leaves sequences as they were, but that blocks no token looks at
///      any more may have been given back.
/// @par Sources   managers by kind, intersected hits and placeholders: vLLM's hybrid KV cache groups,
///      TensorRT-LLM's placeholder blocks. Pages instead of one padded block size are ours.
template <class Traits = hybrid_traits>
class hybrid_allocator {
 public:
  using eviction_type = typename Traits::eviction;
  using hash_type = typename Traits::hash;
  using verification_type = typename Traits::verification;
  using pool_type = super_page_pool<eviction_type>;
  using chain_type = prefix_chain<hash_type, verification_type>;

  static_assert(eviction_policy<eviction_type>, "Traits::eviction must be an eviction_policy");
  static_assert(block_hash<hash_type>, "Traits::hash must be a block_hash");
  static_assert(block_verification<verification_type>, "Traits::verification must be a block_verification");

  explicit hybrid_allocator(const hybrid_options& options);
  /// `make`, an `eviction_factory`, makes each group's eviction policy.
  template <class Make>
  hybrid_allocator(const hybrid_options& options, Make&& make);

  // Sequences

  /// A new sequence without tokens. Only sequences of equal `context` share blocks.
  result<sequence_id> create(const prefix_context& context = {}) noexcept;

  /// A sequence with the same tokens in the same blocks; whichever writes into a block both hold gets a copy
  /// first. O(blocks).
  result<sequence_id> fork(sequence_id parent) noexcept;

  /// Ends a sequence; of each group the last block first.
  result<void> release(sequence_id sequence) noexcept;

  // Contents

  /// Shares the longest hit of `tokens` with a sequence that has none yet.
  result<match_result> match(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// Adds tokens with all the blocks they need in every group, or nothing.
  /// @return `errc::out_of_group_blocks` for the first group that lacks some, `errc::sequence_full`, and what
  ///         `check` says of a handle.
  result<hybrid_append> append(sequence_id sequence, std::span<const token_id> tokens) noexcept;

  /// What `append` of `count` tokens would need of each group, and whether it could be had. `out` has a place
  /// for each group. Gives back what no token looks at any more.
  result<bool> shortage(sequence_id sequence, std::uint64_t count, std::span<group_shortage> out) noexcept;

  /// Declares the KV, and the states at the ends of blocks, written for the first `written` tokens (default:
  /// all): full blocks become visible to `match`, and what no later token looks at is given back. Says how
  /// many blocks were registered.
  result<std::uint64_t> commit(sequence_id sequence) noexcept { return commit(sequence, tokens(sequence)); }
  result<std::uint64_t> commit(sequence_id sequence, std::uint64_t written) noexcept;

  /// How many leading tokens `match` would find. Changes nothing.
  [[nodiscard]] std::uint64_t cached_tokens(std::span<const token_id> tokens,
                                            const prefix_context& context = {}) const noexcept {
    return longest_hit(tokens, chain_.root(context), context).tokens;
  }

  /// Gives up the contents of all idle blocks; says how many.
  std::uint64_t drop_idle() noexcept;

  // What a sequence holds

  [[nodiscard]] result<void> check(sequence_id sequence) const noexcept {
    const failure wrong = records_.check(sequence, name().c_str());
    return wrong.code == errc::ok ? result<void>() : result<void>(wrong);
  }

  /// Tokens of a sequence; 0 for a handle that `check` refuses.
  [[nodiscard]] std::uint64_t tokens(sequence_id sequence) const noexcept {
    return check(sequence) ? records_[sequence.slot].tokens : 0;
  }

  /// Its block table for one group, with null blocks where it holds none; empty for a handle that `check`
  /// refuses. Valid until the sequence is next changed.
  [[nodiscard]] std::span<const block_id> table(sequence_id sequence, std::size_t group) const noexcept;

  /// The same as kernels read it, in units of `layout().unit` bytes (see `super_page_pool`), the rest of
  /// `out` filled with 0. Says how many entries the table has; `errc::size_mismatch` if `out` is shorter.
  result<std::uint64_t> write_table(sequence_id sequence, std::size_t group,
                                    std::span<std::int32_t> out) const noexcept;

  // The whole

  [[nodiscard]] std::span<const layer_group> groups() const noexcept {
    return {groups_.data(), group_count_};
  }
  [[nodiscard]] const super_page_layout& layout() const noexcept { return pool_.layout(); }
  [[nodiscard]] const pool_type& pool() const noexcept { return pool_; }
  [[nodiscard]] const chain_type& chain() const noexcept { return chain_; }
  [[nodiscard]] std::uint32_t chunk_tokens() const noexcept { return chunk_tokens_; }
  [[nodiscard]] std::uint64_t max_sequence_tokens() const noexcept { return max_sequence_tokens_; }
  [[nodiscard]] const std::string& name() const noexcept { return pool_.name(); }
  [[nodiscard]] hybrid_stats stats() const noexcept;

  /// Proves every invariant: the pool's, the chain's, and that each block has exactly the references that
  /// tables hold. One sentence for each violation. Allocates.
  [[nodiscard]] std::vector<std::string> audit() const;

 private:
  friend struct testing_access;

  using place = typename chain_type::place;
  struct record {
    std::uint64_t tokens = 0;
    std::uint64_t committed = 0;  // leading chunks that the chain knows
    place at{};                   // behind them
    prefix_context context{};
    std::array<std::uint32_t, max_layer_groups> dead{};  // leading entries of each table that are null
  };
  struct hit {
    std::uint64_t tokens = 0;
    place at{};
  };
  struct counters {
    std::uint64_t tokens = 0;
    std::uint64_t matches = 0;
    std::uint64_t hit_tokens = 0;
    std::uint64_t registrations = 0;
    std::uint64_t duplicates = 0;
    std::uint64_t released_early = 0;
    std::uint64_t copies = 0;
  };

  [[nodiscard]] LLMMEM_COLD failure refusal(errc code, std::uint32_t index, std::uint64_t wanted,
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
  [[nodiscard]] auto forget_evicted() noexcept {
    return [this](std::span<const block_id> blocks) noexcept {
      for (const block_id block : blocks)
        chain_.drop(node_of_[to_index(block)], pool_.group_of(block));
    };
  }
  struct need {
    std::uint64_t more = 0;  // new entries of the table
    bool copies = false;     // on write, into one block more
    bool carries = false;    // a state into the first new block

    [[nodiscard]] std::uint64_t blocks() const noexcept { return more + (copies ? 1 : 0); }
  };
  [[nodiscard]] need needed_for(std::uint32_t slot, std::size_t group, std::uint64_t count) const noexcept;
  [[nodiscard]] result<void> check_length(std::uint32_t slot, std::uint64_t count) const noexcept;
  [[nodiscard]] hit longest_hit(std::span<const token_id> tokens, place at,
                                const prefix_context& context) const noexcept;
  result<std::uint64_t> take(std::uint32_t slot, const hit& found) noexcept;
  void release_dead(std::uint32_t slot, std::uint64_t length) noexcept;
  [[nodiscard]] std::optional<place> next_place(record& sequence, std::span<const token_id> part) noexcept;
  void give_back(std::uint32_t slot) noexcept;

  std::array<layer_group, max_layer_groups> groups_{};
  std::size_t group_count_;
  pool_type pool_;
  std::uint32_t chunk_tokens_;
  chain_type chain_;
  detail::fixed_array<block_id> node_of_;  // by block: the node that names a cached one
  std::uint64_t max_sequence_tokens_;
  std::array<std::uint64_t, max_layer_groups> row_first_{};
  std::uint64_t row_entries_ = 0;  // of all groups' tables, each one longer than it may be: for a copy
  detail::handle_table<sequence_id, record> records_;
  detail::fixed_array<block_id> rows_;
  detail::fixed_array<token_id> tokens_;  // of each sequence
  std::array<group_copy, max_layer_groups> copies_{};
  counters counters_{};
};

}  // namespace llmmem::inline v0

#include <llmmem/paging/detail/hybrid_allocator_body.hpp>
