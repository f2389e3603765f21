/// @file
/// Keys and values from ranks that split a model in one way to ranks that split it in another: prefill with
/// four ranks, decode with two, other block sizes, other orders.
#pragma once

#include <llmmem/config.hpp>
#include <llmmem/error.hpp>
#include <llmmem/paging/errors.hpp>
#include <llmmem/paging/ids.hpp>
#include <llmmem/paging/kv_contents.hpp>
#include <llmmem/paging/kv_layout.hpp>
#include <llmmem/paging/kv_memory.hpp>
#include <llmmem/paging/paged_types.hpp>
#include <llmmem/result.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llmmem {
inline namespace v0 {
namespace paging {

/// The heads that one rank sends to another, of the tokens that both hold.
struct kv_share {
  std::uint32_t from = 0;       ///< the sender, as an index of the plan's layouts
  std::uint32_t to = 0;         ///< the receiver
  std::uint32_t from_head = 0;  ///< the first head, among those of the sender's blocks
  std::uint32_t to_head = 0;    ///< the same, among those of the receiver's
  std::uint32_t heads = 0;
  /// Whether vectors that all heads of a token share (indexer keys) go along: in one share of each token.
  bool has_common = true;

  friend constexpr bool operator==(const kv_share&, const kv_share&) noexcept = default;
};

/// Which rank sends what to which, so that each receiver gets every vector of its heads and tokens once: the
/// fewest bytes possible. If several senders hold the same heads and tokens (a model with fewer heads than
/// ranks, latents), the one with the fewest heads to send so far sends.
///
/// Layouts may differ in `part` (tensor and context parallelism), `block_tokens`, `heads_in_block` and
/// `order`, and in where scales are placed. Everything else is the same on both sides; scales of a whole
/// block (by channel, `has_global`) have no meaning in blocks of other tokens, so they are refused.
///
///     const kv_split_plan plan(prefill, decode);            // the layouts of all ranks, on every rank
///     for (layer ...)                                       // as soon as its kernels are done
///       for (const kv_share& share : plan.shares_from(rank)) {
///         const auto part = staging.first(plan.bytes(share, tokens));
///         plan.pack(share, layer, tokens, memory, table, part).value();
///         ... send `part` to rank share.to, which calls `unpack` with the same share, layer and tokens ...
///       }
///
/// A packed share is one layer's vectors: token by token, of each token plane by plane, of each plane head by
/// head. It has no checksum of its own: transports and `pool/` have theirs.
///
/// @par Complexity      construction O(senders x receivers); the rest as stated.
/// @par Thread safety   const calls may run concurrently, as long as the memory that they write differs.
/// @par Source   vLLM's NIXL connector serves prefill and decode with other tensor-parallel degrees and block
///      sizes; here context parallelism, orders and places of scales may differ too.
class kv_split_plan {
 public:
  /// @param from  the layout of each sending rank, whose `part` says which; `to` of each receiving rank.
  /// @throws argument_error  with the field that differs; for scales of a whole block, layouts of one side
  ///   that differ in more than their ranks, and heads that no sender has. What `kv_layout::checked` throws.
  kv_split_plan(std::span<const kv_layout> from, std::span<const kv_layout> to,
                std::string name = "kv_split_plan");

  /// All shares, by receiver; of one receiver by context-parallel rank of the sender, then by head.
  [[nodiscard]] std::span<const kv_share> shares() const noexcept LLMMEM_LIFETIMEBOUND { return shares_; }
  /// The shares that a rank sends, or receives.
  [[nodiscard]] std::vector<kv_share> shares_from(std::uint32_t rank) const;
  [[nodiscard]] std::vector<kv_share> shares_to(std::uint32_t rank) const;

  [[nodiscard]] std::size_t senders() const noexcept { return from_.size(); }
  [[nodiscard]] std::size_t receivers() const noexcept { return to_.size(); }
  /// Equal for plans between equal layouts. Never 0.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept;

  /// Returns how many tokens of the range both sides of a share hold. O(1) unless both sides have context
  /// parallelism, else O(tokens), of at most two common multiples of their rounds.
  /// @pre the share is one of `shares()`, here and in the two functions below
  [[nodiscard]] std::uint64_t tokens(const kv_share& share, token_range range) const noexcept;
  /// Returns the bytes of one packed layer.
  [[nodiscard]] std::uint64_t bytes(const kv_share& share, token_range range) const noexcept {
    return tokens(share, range) * token_bytes(share);
  }
  /// Returns the bytes of one token in one layer.
  [[nodiscard]] std::uint64_t token_bytes(const kv_share& share) const noexcept;
  /// Returns the vectors of one token in one layer: the most runs that it has in any memory.
  [[nodiscard]] std::uint64_t token_vectors(const kv_share& share) const noexcept;

  /// Writes a share of the tokens `range` of one layer to `out`.
  /// @param memory  the sender's, in host memory. (For device memory see `offload::executor_packer`.)
  /// @param table   the sender's blocks of the sequence, from its first token on.
  /// @return `errc::layout_mismatch` for the memory of another layout, `errc::size_mismatch` unless `out` has
  ///   `bytes(share, range)`, `errc::past_the_end` for a table that ends before the range does,
  ///   `errc::no_such_block` for a block that is not in the memory, `errc::out_of_range` for a layer or a
  ///   share that does not exist. Then nothing is written.
  result<void> pack(const kv_share& share, std::uint32_t layer, token_range range, const kv_memory& memory,
                    std::span<const block_id> table, std::span<std::byte> out) const noexcept;
  /// Reads a packed share into the receiver's memory. Errors as `pack`.
  result<void> unpack(const kv_share& share, std::uint32_t layer, token_range range, const kv_memory& memory,
                      std::span<const block_id> table, std::span<const std::byte> in) const noexcept;

  /// Calls `visit(address, bytes)` for each run of a share in the sender's memory, in the order in which
  /// `pack` writes them, for a mover of memory that the host cannot access. Only a `plane_table` is read.
  /// Errors as `pack`; then nothing is visited.
  template <class Visit>
  result<void> each_packed(const kv_share& share, std::uint32_t layer, token_range range,
                           const kv_memory& memory, std::span<const block_id> table,
                           Visit&& visit) const noexcept;
  /// The same in the receiver's memory, in the order in which `unpack` reads them.
  template <class Visit>
  result<void> each_unpacked(const kv_share& share, std::uint32_t layer, token_range range,
                             const kv_memory& memory, std::span<const block_id> table,
                             Visit&& visit) const noexcept;

 private:
  enum class side : bool { sender, receiver };

  void check_side(std::span<const kv_layout> layouts, const char* name) const;
  void add_shares(std::uint32_t to, std::uint32_t context_rank);
  [[nodiscard]] result<void> check(side of, const kv_share& share, std::uint32_t layer, token_range range,
                                   const kv_memory& memory, std::span<const block_id> table,
                                   std::uint64_t packed) const noexcept;
  template <class Move>
  void each_run(side of, const kv_share& share, std::uint32_t layer, token_range range,
                const kv_memory& memory, std::span<const block_id> table, Move&& move) const noexcept;

  std::string name_;
  std::vector<kv_layout> from_;
  std::vector<kv_layout> to_;
  std::vector<kv_share> shares_;
  std::vector<std::uint64_t> sent_heads_;  // of each sender so far, for the next choice among holders
};

}  // namespace paging
}  // namespace v0
}  // namespace llmmem

#include <llmmem/paging/detail/kv_split_body.hpp>
